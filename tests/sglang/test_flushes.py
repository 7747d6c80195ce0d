"""SGLang forgets its own pages while the storage is at work, or without a daemon: it goes on, and answers as ever."""

from __future__ import annotations

import pytest

from kvoffloadd.testing.wait import until
from tests.e2e.daemons import Hold
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, SESSIONS, Prompts, cached, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

WAITS = "flush waits for the daemon"


@pytest.mark.parametrize("mode", ["cache", "buffer_only"])
def test_flushed(
    mode: str,
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    hold: Hold,
) -> None:
    """It is flushed while a store does not end, while an aborted request's load does not end, and without a daemon."""
    daemon = start_daemon(memory="256MiB", faults=hold.fault)
    engine = start_engine("dense", storage=stored_at(daemon.socket, hicache_host_memory_mode=mode))
    with hold:
        first = tokens(engine.generate(asked[:1]))
        until(lambda: daemon.status()["running"]["jobs"] == 1, "its pages are being stored")
        assert not engine.do("flush")["success"], "SGLang does not flush while it stores"
    settle(daemon)
    engine.flush()
    with hold:
        engine.start({"given up": asked[0]})
        until(lambda: daemon.status()["running"]["jobs"] == 1, "its pages are being loaded")
        assert engine.abort("given up").reason == "abort"
        engine.begin_flush()
        until(lambda: WAITS in engine.log(), "SGLang would have given up by now", 120.0)
        assert engine.busy()
    assert engine.finish_flush()
    expected = reference("dense", asked)
    assert first == expected[:1]
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    daemon.kill()
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, [0] * len(asked))
    daemon.start()
    until(lambda: len(daemon.sessions()) == SESSIONS, "all lines are up again", 60.0)
    engine.flush()
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)
