"""File systems that fill up, turn read-only, go and come back. Needs root, for mounts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import KeyState, Outcome
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, disk, disk_settings, idle, root_state, served, store_on_disk
from tests.e2e.rank import Keys, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
PENDING, MISS = KeyState.PENDING, KeyState.MISS
EXT4 = pytest.mark.parametrize("mount", ["ext4"], indirect=True)
"""What is on a tmpfs is gone with it."""


@dataclass
class Mount:
    """A file system of 24 MiB at `point`, which `command` mounts."""

    point: Path
    command: list[str]

    def mount(self) -> None:
        done = subprocess.run([*self.command, str(self.point)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"can't mount here: {done.stderr.strip()}")

    def abort(self) -> None:
        """Make an ext4 read-only, also for processes that write to it, as it does itself after an error."""
        subprocess.run(["mount", "-o", "remount,abort", str(self.point)], check=True, capture_output=True)

    def unmount(self) -> None:
        """Unmount it lazily: processes that use it go on for a while."""
        subprocess.run(["umount", "-l", str(self.point)], check=True, capture_output=True)

    def fill(self) -> None:
        """No byte is left for others."""
        fd = os.open(self.point / "other", os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            for size in (MIB, 4096):
                try:
                    while True:
                        os.write(fd, bytes(size))
                except OSError:
                    continue
        finally:
            os.close(fd)

    def free(self) -> None:
        (self.point / "other").unlink()

    @property
    def root(self) -> Path:
        return self.point / "disk"


@pytest.fixture(params=["tmpfs", "ext4"])
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mount]:
    """Mounted. At the end it is gone, whatever has happened."""
    if os.getuid() != 0:
        pytest.skip("only root can mount")
    point = tmp_path / "mount"
    point.mkdir(mode=0o700)
    if request.param == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=700", "tmpfs"]
    else:
        image = tmp_path / "image"
        with image.open("wb") as stream:
            stream.truncate(24 * MIB)
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"can't make a file system here: {made.stderr.strip()}")
        command = ["mount", "-o", "loop", str(image)]
    found = Mount(point, command)
    found.mount()
    yield found
    while os.path.ismount(point):
        found.unmount()
    point.rmdir()


@pytest.fixture
def lots(seed: int) -> list[Keys]:
    rng = np.random.default_rng(seed)
    return [new_keys(rng, 60) for _ in range(12)]


def launch(start_daemon: Start, mount: Mount) -> tuple[Daemon, Rank]:
    daemon = start_daemon(*disk_settings((mount.root, 64 * MIB)), "disk.segment_bytes=1MiB", memory="1MiB")
    return daemon, worker(daemon)


def worker(daemon: Daemon) -> Rank:
    found: Rank = daemon.welcome(Rank(daemon.socket))
    return found


def test_filled_up_by_another_file(mount: Mount, start_daemon: Start, lots: list[Keys]) -> None:
    """The newest keys find room in what the daemon has."""
    daemon, rank = launch(start_daemon, mount)
    for keys in lots[:4]:
        store_on_disk(daemon, rank, keys)
    mount.fill()
    for keys in lots[4:8]:
        assert rank.store_keys(keys).outcome is Outcome.DONE
        assert rank.loads_right(keys)
        idle(daemon)
    assert served(rank, lots[7]).all()
    mount.free()
    for keys in lots[8:]:
        store_on_disk(daemon, rank, keys)
    assert root_state(daemon) == "ok"
    assert served(rank, lots[11]).all()
    assert served(rank, lots[10]).all()


def test_full_from_the_start(mount: Mount, start_daemon: Start, lots: list[Keys]) -> None:
    mount.fill()
    daemon, rank = launch(start_daemon, mount)
    until(lambda: root_state(daemon) != "ok", "it is told")
    assert disk(daemon)["roots"][0]["reason"]
    assert rank.store_keys(lots[0]).outcome is Outcome.DONE
    assert rank.loads_right(lots[0])
    mount.free()
    until(lambda: root_state(daemon) == "ok" and disk(daemon)["roots"][0]["segments"] > 0, "it recovers by itself")
    store_on_disk(daemon, rank, lots[1])


@EXT4
def test_read_only_for_a_while(mount: Mount, start_daemon: Start, lots: list[Keys]) -> None:
    """This happens after an error. What is there can be read; a clear reports where it is not recorded."""
    daemon, rank = launch(start_daemon, mount)
    for keys in lots[:6]:
        store_on_disk(daemon, rank, keys)
    daemon.leave_guests()
    daemon.stop()  # so that all of it is durable
    daemon.start()
    rank = worker(daemon)
    mount.abort()
    assert rank.store_keys(lots[6]).outcome is Outcome.DONE
    assert served(rank, lots[0]).all()
    until(lambda: root_state(daemon) == "read-only", "it is told")
    assert rank.client.clear(wait_s=0.1).unrecorded == (str(mount.root),)
    assert not served(rank, lots[1]).any()
    mount.unmount()
    until(lambda: root_state(daemon) == "off", "it is gone")
    mount.mount()
    until(lambda: root_state(daemon) == "ok", "it recovers by itself")
    store_on_disk(daemon, rank, lots[7])


@EXT4
def test_gone_and_back(mount: Mount, start_daemon: Start, lots: list[Keys]) -> None:
    """Lazily unmounted, so that descriptors still work; then mounted again: nothing is lost, and nothing is written
    to what lies beneath.
    """
    daemon, rank = launch(start_daemon, mount)
    for keys in lots[:6]:
        store_on_disk(daemon, rank, keys)
    mount.unmount()
    until(lambda: root_state(daemon) == "off", "it is told")
    assert rank.store_keys(lots[6]).outcome is Outcome.DONE
    assert rank.loads_right(lots[6])
    until(lambda: rank.states(lots[0]) == [MISS] * 60, "its keys are misses")
    assert not served(rank, lots[0]).any()
    assert list(mount.point.iterdir()) == []
    mount.mount()
    until(lambda: root_state(daemon) == "ok", "it recovers by itself")
    for keys in lots[:6]:
        assert served(rank, keys).all()
    store_on_disk(daemon, rank, lots[7])


@EXT4
def test_cleared_while_it_was_gone(mount: Mount, start_daemon: Start, lots: list[Keys]) -> None:
    """What was on it is not served when it is back, nor after a restart."""
    daemon, rank = launch(start_daemon, mount)
    store_on_disk(daemon, rank, lots[0])
    mount.unmount()
    until(lambda: root_state(daemon) == "off" and disk(daemon)["roots"][0]["segments"] == 0, "it is gone")
    assert rank.client.clear(wait_s=0.1).unrecorded == (str(mount.root),)
    mount.mount()
    until(lambda: root_state(daemon) == "ok", "it is back")
    assert rank.states(lots[0]) == [MISS] * 60
    store_on_disk(daemon, rank, lots[1])
    until(lambda: '"last_epoch": 0' not in (mount.root / "manifest").read_text(), "the clear is noted")
    daemon.leave_guests()
    daemon.kill()
    daemon.start()
    rank = worker(daemon)
    assert rank.states(lots[0]) == [MISS] * 60
    assert served(rank, lots[1]).all()


@EXT4
def test_another_root_in_its_place(mount: Mount, start_daemon: Start, lots: list[Keys]) -> None:
    """An operator who puts another disk in its place restarts the daemon."""
    daemon, rank = launch(start_daemon, mount)
    store_on_disk(daemon, rank, lots[0])
    mount.root.rename(mount.point / "old")
    mount.root.mkdir(mode=0o700)
    (mount.root / "segments").mkdir(mode=0o700)
    until(lambda: root_state(daemon) == "off", "it is told")
    assert rank.states(lots[0]) != [PENDING] * 60
    assert sorted(path.name for path in (mount.root / "segments").iterdir()) == []
    daemon.leave_guests()
    daemon.stop()
    daemon.start()
    assert root_state(daemon) == "ok"
    store_on_disk(daemon, worker(daemon), lots[1])
