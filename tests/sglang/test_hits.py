"""A system prompt that real engines serve from their own caches stays in a daemon whose memory holds a third of all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.sharedstore import SharedStore
from tests.sglang.conftest import StartDaemon, StartEngine
from tests.sglang.engine import LINKED_TOKENS, PAGE, SEATS, Seat, cached, settle, stored_at
from tests.vllm.engine import prompts

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

HEAD, TAIL, USERS = 5 * PAGE, 2 * PAGE + 2, 60
"""Tokens: 5 pages of all users, and 2 of each."""

THIRD = "10MiB"
"""40 of 125 pages of 256 KiB."""


def touched(daemon: Daemon) -> int:
    return int(daemon.status()["cache"]["keys_touched"])


@pytest.mark.parametrize("mode", ["cache", "buffer_only", "linker"])
def test_every_user_of_a_system_prompt_gets_it(start_daemon: StartDaemon, start_engine: StartEngine, mode: str) -> None:
    """One after the other; then each of them from the daemon alone."""
    daemon = start_daemon("memory.slab_bytes=1MiB", memory=THIRD)
    linked = mode == "linker"
    seat: Seat = SEATS["linker" if linked else "storage"]
    given = {} if linked else {"hicache_host_memory_mode": mode}
    engine = start_engine("dense", **seat.options(daemon.socket, **given))
    assert LINKED_TOKENS > 2 * (HEAD + TAIL)
    (head,) = prompts(1, 1, HEAD)
    users = [head + tail for tail in prompts(2, USERS, TAIL)]
    computed = [engine.generate([prompt])[0].cached for prompt in users]
    assert computed[0] == 0
    assert min(computed[1:]) >= HEAD, "SGLang has it"
    settle(daemon)
    assert touched(daemon) >= (USERS - 1) * HEAD // PAGE
    assert daemon.status()["cache"]["keys_evicted"] > 0
    anew = []
    for prompt in users:
        engine.flush()
        anew += seat.found(engine.generate([prompt]))
    assert min(anew) >= HEAD, anew


def test_the_default_pushes_what_sglang_uses_twice(
    start_daemon: StartDaemon, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Though it asks the daemon for nothing."""
    store = SharedStore(tmp_path)
    daemon = start_daemon(*store.settings("remote.push=second-use"), memory="256MiB")
    engine = start_engine("dense", storage=stored_at(daemon.socket))
    until(lambda: any(daemon.status()["remote"]["eras"].values()), "it may use the store")
    (prompt,) = prompts(1, 1, HEAD + 1)
    engine.generate([prompt])
    settle(daemon)
    assert daemon.status()["remote"]["pushed"]["keys"] == 0
    for _ in range(3):
        found = engine.generate([prompt])
        assert (found[0].cached, cached(found)) == (HEAD, [0])
    until(lambda: daemon.status()["remote"]["pushed"]["keys"] == HEAD // PAGE, "the store has all pages")
