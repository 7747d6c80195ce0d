"""Nothing that ends needs Python's garbage collector, which therefore need not look at all objects.

A daemon's collector is off here. On demand the daemon writes to a file what it would find of this project's objects.
"""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.testing.wait import until
from tests.e2e.daemons import make_daemon
from tests.e2e.disk import disk_settings, group_of, only_on_disk, store_on_disk
from tests.e2e.rank import Rank, new_keys
from tests.server.scene import Scene

MIB = 1 << 20
PROGRAM = """
import gc, json, os, signal, sys
from collections import Counter
from kvoffloadd.scheduling import collector
from kvoffloadd.cli import main

def tell(*_):
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter(type(one).__name__ for one in gc.garbage if type(one).__module__.startswith("kvoffloadd"))
    gc.garbage.clear()
    with open(path + ".new", "w") as file:
        json.dump(found, file)
    os.rename(path + ".new", path)

path = {path!r}
signal.signal(signal.SIGUSR1, tell)
collector.Collector.start = lambda self: None
collector.Collector.on_idle = lambda self: None
gc.disable()
sys.exit(main())
"""


class WatchedDaemon:
    """A daemon with little memory above a disk."""

    def __init__(self, folder: Path) -> None:
        self._told = folder / "garbage"
        program = ("-c", PROGRAM.replace("{path!r}", repr(str(self._told))))
        self.daemon = make_daemon(folder, *disk_settings((folder / "disk", 64 * MIB)), memory="1MiB", program=program)
        self.garbage()

    def garbage(self) -> dict[str, int]:
        """What has been left since the last call by sessions that have ended, by type."""
        until(lambda: not self.daemon.sessions(), "all sessions have ended")
        self.daemon.observer.ping()  # what is behind their ends is done
        self._told.unlink(missing_ok=True)
        self.daemon.signal(signal.SIGUSR1)
        until(self._told.exists, "it has looked")
        found: dict[str, int] = json.loads(self._told.read_text(encoding="utf-8"))
        return found


@pytest.fixture
def above_a_disk() -> Iterator[WatchedDaemon]:
    made = WatchedDaemon(Path(tempfile.mkdtemp(prefix="kvo-", dir="/tmp")))
    yield made
    made.daemon.finish()


def test_sessions_leave_nothing(above_a_disk: WatchedDaemon) -> None:
    daemon = above_a_disk.daemon
    for number in range(4):
        scene = Scene(daemon, f"garbage {number}")
        scene.peer.ok("subscribe")
        scene.peer.refused("bad_lease", "release", lease=99)
        if number % 2:
            scene.peer.ok("bye")
        daemon.leave_guests()
    silent = daemon.peer()
    silent.send(b"\xff" * 8)
    assert silent.receive() is not None, "a frame that is too large"
    daemon.leave_guests()
    found = above_a_disk.garbage()
    assert not found, str(found)


def test_pins_that_have_waited_for_the_disk_leave_nothing(above_a_disk: WatchedDaemon) -> None:
    daemon = above_a_disk.daemon
    rank = daemon.welcome(Rank(daemon.socket, group_of(64 << 10), num_blocks=64))
    stored = new_keys(np.random.default_rng(1), 48)
    store_on_disk(daemon, rank, stored, 8)
    wanted = only_on_disk(rank, stored)
    assert len(wanted) > 8
    for begin in range(0, 8, 4):
        pin = rank.client.pin({0: wanted[begin : begin + 4]})
        assert pin.lease
        rank.client.release(pin.lease)
    rank.client.prefetch({0: wanted[:4]})
    rank.client.pin({0: wanted[4:8]})
    daemon.leave_guests()  # while that waits, perhaps
    found = above_a_disk.garbage()
    assert not found, str(found)
