"""Memory or disk have no room: no request fails, answers are as ever, and what is held stays within its bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffloadd.testing.disk import used_bytes
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e import disk
from tests.e2e.daemons import chosen
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, SESSIONS, Prompts, SglangEngine, cached, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

SMALL = 4 * disk.MIB
"""Less than a third of what the prompts need: 56 pages of 256 KiB."""


def test_no_room(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, tmp_path: Path
) -> None:
    """One engine, through daemons with little memory, with a disk that is full and with one that is too small."""
    switch, root = disk.Switch(tmp_path), tmp_path / "disk"
    daemon = start_daemon(memory=str(SMALL), faults=f"disk={switch.path}")
    engine = start_engine("dense", storage=stored_at(daemon.socket))
    expected = reference("dense", asked)

    two_rounds(engine, daemon, asked, expected)
    assert daemon.status()["cache"]["keys_evicted"] > 0
    assert daemon.status()["memory"]["used_bytes"] <= SMALL

    switch.set("write=ENOSPC", "allocate=ENOSPC")
    restart(daemon, *disk.disk_settings((root, 64 * disk.MIB)), "disk.flush_s=0.5")
    two_rounds(engine, daemon, asked, expected)
    assert disk.disk(daemon)["keys"] == 0
    assert daemon.status()["memory"]["used_bytes"] <= SMALL

    switch.set()  # there is room again: what is stored from now on outlives memory
    until(lambda: disk.root_state(daemon) == "ok", "the disk is taken into use again", 60.0)
    two_rounds(engine, daemon, asked, expected)
    disk.idle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert tokens(found) == expected
    assert sum(cached(found)) > 0

    restart(daemon, *disk.disk_settings((tmp_path / "small", 8 * disk.MIB)), "disk.flush_s=0.5")
    two_rounds(engine, daemon, asked, expected)
    assert used_bytes(tmp_path / "small") <= 8 * disk.MIB


def two_rounds(engine: SglangEngine, daemon: Daemon, asked: Prompts, expected: Prompts) -> None:
    """Asks all prompts in two rounds, the second with those last that came first: the coldest keys
    have gone for them.
    """
    for order in (1, -1):
        found = engine.generate(asked[::order])
        assert tokens(found) == expected[::order]
        assert all(0 <= one <= whole for one, whole in zip(cached(found), ALL, strict=True))
        settle(daemon)
        engine.flush()


def restart(daemon: Daemon, *settings: str) -> None:
    daemon.kill()
    daemon.settings |= chosen(*settings)
    daemon.start()
    until(lambda: len(daemon.sessions()) == SESSIONS, "all lines are up again", 60.0)
