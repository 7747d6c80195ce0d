"""Requests that are given up while the storage works for them: nothing is left behind, and no other request notices."""

from __future__ import annotations

import pytest

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import Hold
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, Prompts, SglangEngine, StoredRequest, cached, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

LONG = 400
"""Tokens of an answer that takes long enough for its prompt to be stored meanwhile."""


def under_way(daemon: Daemon, jobs: int) -> None:
    until(lambda: daemon.status()["running"]["jobs"] == jobs, f"{jobs} jobs are under way")


def at_rest(daemon: Daemon) -> None:
    """Nothing is held for the engine but its memory."""
    until(lambda: daemon.status()["running"] == {**daemon.status()["running"], "jobs": 0, "holds": 0}, "all has ended")
    assert daemon.status()["cache"]["unsealed"] == 0
    assert daemon.verify(payloads=True) == ()


def was_aborted(request: StoredRequest) -> bool:
    return request.reason == "abort"


@pytest.mark.parametrize("mode", ["cache", "buffer_only"])
def test_given_up(
    mode: str,
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    hold: Hold,
) -> None:
    """While its pages are loaded, while it waits for its turn to have them loaded, and while they are stored."""
    daemon = start_daemon(memory="256MiB", faults=hold.fault)
    engine = start_engine("dense", storage=stored_at(daemon.socket, hicache_host_memory_mode=mode))
    expected = reference("dense", asked)
    _while_stored(engine, daemon, hold, asked[0])
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    at_rest(daemon)
    _while_loaded(engine, daemon, hold, asked, expected)
    at_rest(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)


def _while_stored(engine: SglangEngine, daemon: Daemon, hold: Hold, prompt: list[int]) -> None:
    with hold:
        engine.start({"stored": prompt}, LONG)
        under_way(daemon, 1)
        assert was_aborted(engine.abort("stored"))
        assert daemon.status()["running"]["jobs"] == 1
    settle(daemon)
    at_rest(daemon)
    engine.flush()


def _while_loaded(engine: SglangEngine, daemon: Daemon, hold: Hold, asked: Prompts, expected: Prompts) -> None:
    """SGLang loads for one request at a time: the second and the third wait for the first."""
    engine.flush()
    with hold:
        engine.start({"loading": asked[0], "waiting": asked[1], "third": asked[2]})
        under_way(daemon, 1)
        assert was_aborted(engine.abort("waiting"))
        assert was_aborted(engine.abort("loading"))
        assert daemon.status()["running"]["jobs"] == 1
    (third,) = engine.end("third")
    assert (third.tokens, third.stored) == (expected[2], ALL[2])
