"""The daemon dies, hangs or loses what it had: no request fails, and answers are as ever."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from kvoffloadd.trial.wait import until
from tests.conftest import SEED
from tests.e2e import disk
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, SESSIONS, Prompts, cached, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]

KILLS = 20


def test_killed_at_any_time(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, tmp_path: Path
) -> None:
    """With a disk, so that its successors have something to load, too."""
    print("random seed:", SEED)
    rng = random.Random(SEED)
    daemon = start_daemon(*disk.disk_settings((tmp_path / "disk", 512 * disk.MIB)), memory="256MiB")
    expected = reference("dense", asked)
    engine = start_engine("dense", storage=stored_at(daemon.socket))
    begun = time.monotonic()
    assert tokens(engine.generate(asked)) == expected
    round_s = time.monotonic() - begun
    kills, from_storage = 0, 0
    while kills < KILLS:
        engine.begin(asked)
        while engine.busy():
            time.sleep(rng.random() * round_s / 2)
            if not engine.busy():
                break
            daemon.kill()
            kills += 1
            time.sleep(rng.random() * round_s / 8)
            daemon.start()
        found = engine.finish()
        assert tokens(found) == expected, f"after {kills} kills"
        from_storage += sum(cached(found))
    print(f"{kills} kills, {from_storage} tokens from the storage")
    assert from_storage > 0
    settle(daemon)
    assert tokens(engine.generate(asked)) == expected


def test_daemon_restarted(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, tmp_path: Path
) -> None:
    """The engine, kept, connects again by itself and loads what is on disk; without a daemon it computes."""
    daemon = start_daemon(*disk.disk_settings((tmp_path / "disk", 512 * disk.MIB)), memory="256MiB")
    expected = reference("dense", asked)
    engine = start_engine("dense", storage=stored_at(daemon.socket))
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    disk.idle(daemon)
    daemon.stop()
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, [0] * len(asked))
    daemon.start()
    engine.flush()
    until(lambda: len(daemon.sessions()) == SESSIONS, "all lines are up again", 60.0)
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)


def test_daemon_hangs(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    """Requests that come meanwhile are computed; those whose pages it has begun to move wait until it goes on."""
    daemon = start_daemon(memory="256MiB")
    expected = reference("dense", asked)
    engine = start_engine("dense", storage=stored_at(daemon.socket, timeout_s=2.0))
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    engine.begin(asked, together=True)
    daemon.signal(signal.SIGSTOP)
    time.sleep(5.0)
    daemon.signal(signal.SIGCONT)
    assert tokens(engine.finish()) == expected
    settle(daemon)
    daemon.signal(signal.SIGSTOP)
    try:
        found = engine.generate(asked)
    finally:
        daemon.signal(signal.SIGCONT)
    assert tokens(found) == expected
    until(lambda: len(daemon.sessions()) == SESSIONS, "all lines are up again", 60.0)
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)
