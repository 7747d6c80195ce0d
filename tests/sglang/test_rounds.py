"""What one engine has stored, it and the next one load, and answer as ever."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, Prompts, cached, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("mode", ["cache", "buffer_only"])
def test_a_second_round_and_a_second_engine(
    mode: str, start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    daemon = start_daemon(memory="256MiB")
    storage = stored_at(daemon.socket, hicache_host_memory_mode=mode)
    expected = reference("dense", asked)
    first = start_engine("dense", storage=storage)
    found = first.generate(asked)
    assert (tokens(found), cached(found)) == (expected, [0] * len(asked))
    settle(daemon)
    first.flush()
    found = first.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)
    first.close()
    second = start_engine("dense", storage=storage)
    found = second.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)
    found = second.generate(asked, together=True)
    assert tokens(found) == expected


def test_a_buffer_smaller_than_the_gpus_cache(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    """It holds two prompts: what is on its way is all that it has to hold."""
    daemon = start_daemon(memory="256MiB")
    storage = stored_at(daemon.socket, hicache_host_memory_mode="buffer_only", hicache_ratio=0.7)
    expected = reference("dense", asked)
    engine = start_engine("dense", storage=storage)
    found = engine.generate(asked, together=True)
    assert tokens(found) == expected
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)
    engine.flush()
    assert tokens(engine.generate(asked, together=True)) == expected
