"""kill -9 of the daemon at any moment: no request fails, and what is answered is what would have been."""

from __future__ import annotations

import random
import time

import pytest

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import Hold
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import ALL, COUNT, Prompts, VllmEngine, by_connector, cached, settle, tokens

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("kind", ["dense", "hybrid"]),
]


MEMORY = "256MiB"
KILLS = 20
RECOMPUTED = "vllm:kvoffloadd_recomputed_tokens"


def busy(daemon: Daemon) -> bool:
    """Is a job under way?"""
    return int(daemon.status()["running"]["jobs"]) > 0


def come_back(daemon: Daemon) -> None:
    """Start the daemon again, and wait for the engine's two sessions."""
    daemon.start()
    until(lambda: len(daemon.sessions()) == 2, "scheduler and worker are back", 60.0)


def check_works_again(daemon: Daemon, engine: VllmEngine, asked: Prompts, expected: list[list[int]]) -> None:
    """Checks after a restart that what is computed now is stored, and loaded in the next round."""
    come_back(daemon)
    engine.await_connection()
    assert tokens(engine.generate(asked)) == expected
    settle(daemon, engine)
    answer = engine.generate_anew(asked)
    assert cached(answer) == ALL
    assert tokens(answer) == expected


def test_before_a_lookup(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, kind: str
) -> None:
    """A daemon that is gone has nothing; when it is back, it is used again."""
    daemon = start_daemon(memory=MEMORY)
    engine = start_engine(kind, connector=by_connector(daemon.socket))
    expected = reference(kind, asked)
    assert tokens(engine.generate(asked)) == expected
    daemon.kill()
    assert tokens(engine.generate(asked)) == expected
    check_works_again(daemon, engine, asked, expected)


def test_between_lookup_and_load(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, kind: str
) -> None:
    """What was promised is computed in its place."""
    daemon = start_daemon(memory=MEMORY)
    engine = start_engine(kind, connector=by_connector(daemon.socket))
    expected = reference(kind, asked)
    assert tokens(engine.generate(asked)) == expected
    settle(daemon, engine)
    engine.kill_before_load(daemon.pid)
    assert tokens(engine.generate(asked)) == expected
    assert daemon.wait() < 0
    daemon.kill()
    assert engine.metrics()[RECOMPUTED] >= 480
    # Of the blocks of a failed load none may be found by the engine's own cache.
    for prompt, tokens_expected in zip(reversed(asked), reversed(expected), strict=True):
        assert tokens(engine.generate([prompt])) == [tokens_expected]
    check_works_again(daemon, engine, asked, expected)


def test_during_a_load(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, hold: Hold, asked: Prompts, kind: str
) -> None:
    """Its blocks are half old and half new; no request reads them."""
    daemon = start_daemon(memory=MEMORY, faults=hold.fault)
    engine = start_engine(kind, connector=by_connector(daemon.socket))
    expected = reference(kind, asked)
    assert tokens(engine.generate(asked)) == expected
    settle(daemon, engine)
    stored = daemon.status()["transfers"]["store"]["bytes"]
    with hold:
        engine.begin(asked)
        until(lambda: busy(daemon), "a load is under way")
        assert daemon.status()["transfers"]["store"]["bytes"] == stored
        daemon.kill()
    assert tokens(engine.finish()) == expected
    assert engine.metrics()[RECOMPUTED] >= 480
    for prompt, tokens_expected in zip(reversed(asked), reversed(expected), strict=True):
        assert tokens(engine.generate([prompt])) == [tokens_expected]
    check_works_again(daemon, engine, asked, expected)


def test_during_a_store(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, hold: Hold, asked: Prompts, kind: str
) -> None:
    """It is dropped."""
    daemon = start_daemon(memory=MEMORY, faults=hold.fault)
    engine = start_engine(kind, connector=by_connector(daemon.socket))
    expected = reference(kind, asked)
    with hold:
        engine.begin(asked)
        until(lambda: busy(daemon), "a store is under way", 60.0)
        daemon.kill()
    assert tokens(engine.finish()) == expected
    check_works_again(daemon, engine, asked, expected)


def test_at_random_moments(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    kind: str,
    rng: random.Random,
) -> None:
    """The daemon is under load, and every second round's prompts are stored just before."""
    daemon = start_daemon(memory=MEMORY, faults="delay_s=0.005")
    engine = start_engine(kind, connector=by_connector(daemon.socket))
    expected = reference(kind, asked)
    for _ in range(KILLS):
        assert tokens(engine.generate(asked)) == expected
        begun = time.monotonic()
        assert tokens(engine.generate_anew(asked)) == expected
        took_s = time.monotonic() - begun
        engine.begin(asked)
        time.sleep(rng.random() * took_s)
        daemon.kill()
        time.sleep(rng.random() * 0.2)
        come_back(daemon)
        assert tokens(engine.finish()) == expected
    engine.await_connection()
    assert tokens(engine.generate(asked)) == expected
    settle(daemon, engine)
    assert cached(engine.generate_anew(asked)) == ALL


def test_no_daemon_at_the_start(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, kind: str
) -> None:
    """The engine serves without a cache, logs that, and uses the daemon when it comes."""
    daemon = start_daemon(memory=MEMORY)
    daemon.kill()
    engine = start_engine(kind, connector=by_connector(daemon.socket))
    expected = reference(kind, asked)
    for _ in range(2):
        answer = engine.generate(asked)
        assert cached(answer) == [0] * COUNT
        assert tokens(answer) == expected
    assert "WARNING" in "".join(line for line in engine.log().splitlines() if "kvoffloadd" in line)
    check_works_again(daemon, engine, asked, expected)
