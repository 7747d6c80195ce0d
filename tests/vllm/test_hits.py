"""A system prompt that real engines serve from their own caches stays in a daemon whose memory holds a third of all."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import StartDaemon, StartEngine
from tests.vllm.engine import ROUTES, cached, prompts, settle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HEAD, TAIL, USERS = 256, 101, 60
"""Tokens: 8 keys of all users, and 3 of each."""

THIRD = "8MiB"
"""64 of 188 keys of 128 KiB, or of twice as many of 64 KiB, half of which only some prompts need."""


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_every_user_of_a_system_prompt_gets_it(start_daemon: StartDaemon, start_engine: StartEngine, kind: str) -> None:
    """One after the other; then each of them from the daemon alone."""
    daemon = start_daemon("memory.slab_bytes=1MiB", memory=THIRD)
    engine = start_engine(kind, connector=ROUTES["connector"](daemon.socket))
    engine.await_connection()  # nothing stores the head's window again
    (head,) = prompts(1, 1, HEAD)
    users = [head + tail for tail in prompts(2, USERS, TAIL)]
    engine.generate([[*head, 7]])  # of windows vLLM stores those at the ends of prompts
    assert [cached(engine.generate([prompt]))[0] for prompt in users] == [HEAD] * USERS
    settle(daemon, engine)
    assert daemon.status()["cache"]["keys_touched"] > 0
    assert daemon.status()["cache"]["keys_evicted"] > 0
    anew = [cached(engine.generate_anew([prompt]))[0] for prompt in users]
    assert all(found is not None and found >= HEAD for found in anew), anew
