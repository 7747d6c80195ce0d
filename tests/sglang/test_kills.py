"""The daemon dies, hangs or loses what it had: by default no request fails, and answers are as ever."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from kvoffloadd.testing.wait import until
from tests.conftest import SEED
from tests.e2e import disk
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import (
    ALL,
    SESSIONS,
    VICTIM,
    Prompts,
    Seat,
    cached,
    linked,
    linked_to,
    settle,
    stored_at,
    tokens,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]

KILLS = 20


def test_killed_at_any_time(
    seat: Seat,
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    tmp_path: Path,
) -> None:
    """It has a disk, so that its successors have something to load, too."""
    print("random seed:", SEED)
    rng = random.Random(SEED)
    daemon = start_daemon(*disk.disk_settings((tmp_path / "disk", 512 * disk.MIB)), memory="256MiB")
    expected = reference("dense", asked)
    engine = start_engine("dense", **seat.options(daemon.socket))
    begun = time.monotonic()
    assert tokens(engine.generate(asked)) == expected
    round_s = time.monotonic() - begun
    kills, loaded = 0, 0
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
        loaded += sum(seat.found(found))
    print(f"{kills} kills, {loaded} tokens were not computed")
    assert loaded > 0
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
    until(lambda: len(daemon.sessions()) == SESSIONS, "all lines are up again", 60.0)
    engine.flush()  # a session may be there a moment before its rank knows
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)


def test_daemon_hangs_and_requests_are_aborted(
    seat: Seat, start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    """Requests that come while it hangs are computed; those whose pages it has begun to move wait until it goes on."""
    daemon = start_daemon(memory="256MiB")
    expected = reference("dense", asked)
    engine = start_engine("dense", **seat.options(daemon.socket, timeout_s=2.0))
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
    for after_s in (0.0, 0.05, 0.2, 0.5):
        engine.flush()
        engine.do("give_up", prompts=asked, max_tokens=8, after_s=after_s)
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), seat.found(found)) == (expected, ALL)
    assert daemon.status()["running"]["jobs"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_killed_while_pages_are_loaded(
    overlap: bool,
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    tmp_path: Path,
) -> None:
    """The engine has a linker. By default the request is computed. With `overlap` SGLang fails it, and the engine
    lives.
    """
    daemon = start_daemon(memory="256MiB")
    expected, victim = reference("dense", asked), tmp_path / "victim"
    linker = linked_to(daemon.socket, "KillingLinker", "tests.sglang.killing", overlap=overlap)
    engine = start_engine("dense", **linker, environment={VICTIM: str(victim)})
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), linked(found)) == (expected, ALL)
    victim.write_text(str(daemon.pid), encoding="utf-8")
    engine.flush()
    found = engine.generate(asked)
    assert not victim.exists()
    assert [one.tokens for one in found[1:]] == expected[1:]
    if overlap:
        assert "External KV cache load failed" in found[0].reason or found[0].reason == "abort", found[0]
    else:
        assert found[0].tokens == expected[0]
    daemon.kill()  # for its end to be known here, too
    daemon.start()
    until(lambda: len(daemon.sessions()) == SESSIONS, "all lines are up again", 60.0)
    engine.flush()
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    engine.flush()
    found = engine.generate(asked, together=True)
    assert tokens(found) == expected
    assert sum(linked(found)) > 0
