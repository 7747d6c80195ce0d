"""What was cleared does not come back: not from disk, not after a restart, not out of files that are used again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Client, KeyEvents, KeyState, NamespaceSpec, Outcome
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, Switch, demoted, disk, disk_settings, idle, only_on_disk, served, store_on_disk
from tests.e2e.rank import NAMESPACE, Keys, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
MISS, HIT, PENDING = KeyState.MISS, KeyState.HIT, KeyState.PENDING
OTHER = NamespaceSpec(model="other")
ENDS = pytest.mark.parametrize("end", ["kill", pytest.param("stop", marks=pytest.mark.soak)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    return Switch(tmp_path)


@pytest.fixture
def lots(seed: int) -> list[Keys]:
    """Four lots of keys, nothing in common."""
    rng = np.random.default_rng(seed)
    return [new_keys(rng, 60) for _ in range(4)]


def again(daemon: Daemon, end: str) -> None:
    """A restart, of whatever kind."""
    daemon.leave_guests()
    if end == "kill":
        daemon.kill()
    else:
        assert daemon.stop() == 0
    daemon.start()


def worker(daemon: Daemon, namespace: NamespaceSpec = NAMESPACE) -> Rank:
    found: Rank = daemon.welcome(Rank(daemon.socket, namespace=namespace))
    return found


def all_miss(rank: Rank, keys: Keys) -> bool:
    return rank.states(keys) == [MISS] * len(keys) and not served(rank, keys).any()


@ENDS
def test_a_clear_holds_over_restarts(start_daemon: Start, root: Path, lots: list[Keys], end: str) -> None:
    """The own namespace alone; what is stored after it stays."""
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    rank, other = worker(daemon), worker(daemon, OTHER)
    store_on_disk(daemon, rank, lots[0])
    store_on_disk(daemon, other, lots[1])
    rank.client.clear()
    assert all_miss(rank, lots[0])
    store_on_disk(daemon, rank, lots[2])
    for _ in range(2):
        again(daemon, end)
        rank, other = worker(daemon), worker(daemon, OTHER)
        assert all_miss(rank, lots[0])
        assert served(other, lots[1]).all()
        assert served(rank, lots[2]).all()


@ENDS
def test_a_clear_of_everything_reaches_those_that_nobody_has_opened(
    start_daemon: Start, root: Path, lots: list[Keys], end: str
) -> None:
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    store_on_disk(daemon, worker(daemon), lots[0])
    store_on_disk(daemon, worker(daemon, OTHER), lots[1])
    again(daemon, "stop")
    rank = worker(daemon)
    daemon.clear()
    assert all_miss(rank, lots[0])
    store_on_disk(daemon, rank, lots[2])
    assert all_miss(worker(daemon, OTHER), lots[1])
    again(daemon, end)
    assert all_miss(worker(daemon), lots[0])
    assert all_miss(worker(daemon, OTHER), lots[1])
    assert served(worker(daemon), lots[2]).all()


@ENDS
def test_nothing_comes_back_out_of_files_that_are_used_again(
    start_daemon: Start, root: Path, seed: int, end: str
) -> None:
    """The file is full of old records when the new use of it has only begun."""
    daemon = start_daemon(*disk_settings((root, 8 * MIB)), "disk.segment_bytes=1MiB")
    rank = worker(daemon)
    rng = np.random.default_rng(seed)
    old, new = new_keys(rng, 720), new_keys(rng, 300)
    store_on_disk(daemon, rank, old)
    rank.client.clear()
    store_on_disk(daemon, rank, new)
    assert disk(daemon)["roots"][0]["segments_recycled"] > 0
    again(daemon, end)
    rank = worker(daemon)
    assert rank.states(old) == [MISS] * len(old)
    assert served(rank, new).all()


@ENDS
def test_a_clear_during_demotion(start_daemon: Start, root: Path, switch: Switch, lots: list[Keys], end: str) -> None:
    daemon = start_daemon(*disk_settings((root, 64 * MIB)), "disk.stuck_s=600", faults=f"disk={switch.path}")
    rank = worker(daemon)
    store_on_disk(daemon, rank, lots[0])
    switch.set("write_delay_s=3600")
    assert rank.store_keys(lots[1]).outcome is Outcome.DONE
    until(lambda: disk(daemon)["roots"][0]["writing"], "it is being written")
    rank.client.clear()
    assert rank.store_keys(lots[2]).outcome is Outcome.DONE
    switch.set()
    demoted(daemon, 60)
    idle(daemon)
    assert rank.states(lots[0]) == rank.states(lots[1]) == [MISS] * 60
    again(daemon, end)
    rank = worker(daemon)
    assert all_miss(rank, lots[0])
    assert all_miss(rank, lots[1])
    assert served(rank, lots[2]).all()


def test_a_clear_during_promotion(start_daemon: Start, root: Path, switch: Switch, lots: list[Keys]) -> None:
    """Neither a pin nor a load gets what was cleared."""
    daemon = start_daemon(*disk_settings((root, 64 * MIB)), "disk.stuck_s=600", faults=f"disk={switch.path}")
    store_on_disk(daemon, worker(daemon), lots[0])
    again(daemon, "stop")
    rank, other = worker(daemon), worker(daemon)
    switch.set("read_delay_s=3600")
    pinned = rank.client.pin({0: lots[0][:30]})
    assert pinned.promoting == 30
    rank.wipe()
    job = rank.client.load(rank.registration, {0: (lots[0][30:], rank.blocks_of(0, 0, 30))})
    other.client.clear()
    switch.set()
    ready = rank.client.wait_ready(pinned, HANG_S)
    assert ready.states[0].tolist() == [MISS] * 30
    result = rank.wait(job)
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, list(range(30)))
    assert rank.clean()
    assert all_miss(rank, lots[0])
    rank.client.release(pinned.lease)
    store_on_disk(daemon, rank, lots[0])
    assert served(rank, lots[0]).all()


def test_a_clear_that_can_not_be_recorded_is_told(start_daemon: Start, root: Path, lots: list[Keys]) -> None:
    """It holds as long as the daemon lives; the status warns that it may not hold longer, until the daemon has recorded
    it.
    """
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(daemon)
    store_on_disk(daemon, rank, lots[0])
    on_disk = root.with_name("away")
    root.rename(on_disk)  # as if its file system were not there any more
    until(lambda: disk(daemon)["roots"][0]["state"] == "off", "the root is off")
    assert rank.client.clear(wait_s=0.1).unrecorded == (str(root),)
    assert all_miss(rank, lots[0])
    on_disk.rename(root)
    until(lambda: disk(daemon)["roots"][0]["state"] == "ok", "the root is back")
    assert all_miss(rank, lots[0])
    until(lambda: daemon.status()["clears"]["unrecorded"] == 0, "it is recorded")
    again(daemon, "kill")
    assert all_miss(worker(daemon), lots[0])


def test_what_was_stored_after_a_clear_that_was_not_noted(start_daemon: Start, root: Path, lots: list[Keys]) -> None:
    """The daemon dies before the manifest can be written again; the next clear, which is durable, reaches all of it."""
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(daemon)
    trap = root / "manifest.new" / "x"
    trap.mkdir(parents=True)
    assert rank.client.clear(wait_s=0.1).unrecorded == (str(root),)
    assert rank.store_keys(lots[0]).outcome is Outcome.DONE
    until(lambda: disk(daemon)["not_demoted"].get("clear not noted") == len(lots[0]), "nothing is written")
    daemon.leave_guests()
    daemon.kill()
    trap.rmdir()
    trap.parent.rmdir()
    daemon.start()
    rank = worker(daemon)
    rank.client.clear()
    store_on_disk(daemon, rank, lots[1])
    again(daemon, "kill")
    rank = worker(daemon)
    assert all_miss(rank, lots[0])
    assert served(rank, lots[1]).all()


def test_a_root_that_was_out_comes_back(start_daemon: Start, root: Path, tmp_path: Path, lots: list[Keys]) -> None:
    """This follows OPERATIONS.md, with a restart in between, and what is stored meanwhile."""
    other = tmp_path / "other"
    first = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(first)
    for _ in range(3):
        rank.client.clear()
    store_on_disk(first, rank, lots[0])
    first.leave_guests()
    assert first.stop() == 0
    second = start_daemon(*disk_settings((other, 64 * MIB)))
    rank = worker(second)
    rank.client.clear()
    again(second, "stop")
    rank = worker(second)
    store_on_disk(second, rank, lots[1])
    second.leave_guests()
    assert second.stop() == 0
    both = start_daemon(*disk_settings((root, 64 * MIB), (other, 64 * MIB)))
    rank = worker(both)
    assert all_miss(rank, lots[0])
    assert served(rank, lots[1]).all()


def test_adopted_keys_that_a_late_root_knows_were_cleared(
    start_daemon: Start, root: Path, tmp_path: Path, lots: list[Keys]
) -> None:
    pools = [f"memory.pool_file={tmp_path / name}" for name in ("one", "two")]
    first = start_daemon(*disk_settings((root, 64 * MIB)), pools[0])
    store_on_disk(first, worker(first), lots[0])
    first.leave_guests()
    assert first.stop() == 0
    second = start_daemon(*disk_settings((root, 64 * MIB)), pools[1])
    worker(second).client.clear()
    second.leave_guests()
    assert second.stop() == 0
    root.chmod(0o755)  # it is refused for now
    third = start_daemon(*disk_settings((root, 64 * MIB)), pools[0])
    rank = worker(third)
    assert rank.states(lots[0]) == [HIT] * len(lots[0])
    assert rank.store_keys(lots[1]).outcome is Outcome.DONE
    root.chmod(0o700)
    until(lambda: disk(third)["roots"][0]["state"] == "ok", "the root is there")
    assert all_miss(rank, lots[0])
    assert served(rank, lots[1]).all(), "what was stored in this run stays"


def test_what_could_not_be_read_at_a_start_stays_cleared(
    start_daemon: Start, root: Path, switch: Switch, lots: list[Keys]
) -> None:
    """Nothing of the root could be read. tests/cache/test_disk_history.py has a root that can be read in part."""
    settings = (*disk_settings((root, 64 * MIB)), "disk.direct=false")
    daemon = start_daemon(*settings, faults=f"disk={switch.path}")
    rank = worker(daemon)
    store_on_disk(daemon, rank, lots[0])
    rank.client.clear()
    daemon.leave_guests()
    daemon.stop()
    switch.set("read=EIO")
    daemon.start()
    switch.set()
    again(daemon, "stop")
    assert all_miss(worker(daemon), lots[0])


# --- events ---


class Listener:
    """Adds up the events that a subscriber gets."""

    def __init__(self, daemon: Daemon) -> None:
        self.client = daemon.welcome(Client(daemon.socket, namespace=NAMESPACE, role="observer"))
        self.client.subscribe()
        self.keys: set[bytes] = set()
        self.added = self.removed = 0

    def listen(self, deadline_s: float = 0.0) -> None:
        """Take in what has come."""
        for event in self.client.events(deadline_s):
            assert isinstance(event, KeyEvents)
            self.added += len(event.added)
            self.removed += len(event.removed)
            self.keys |= {key.tobytes() for key in event.added}
            self.keys -= {key.tobytes() for key in event.removed}

    def agrees(self, rank: Rank) -> None:
        """Returns whether it knows in the end what there is."""

        def same() -> bool:
            self.listen(0.02)
            return self.keys == {key.tobytes() for key in rank.client.snapshot(0)}

        until(same, "events tell what a snapshot tells")


def test_events_tell_what_no_tier_has(start_daemon: Start, root: Path, seed: int) -> None:
    """Eviction of what is on disk, and promotion, are no news."""
    daemon = start_daemon(*disk_settings((root, 64 * MIB)), memory="1MiB")
    rank = worker(daemon)
    listener = Listener(daemon)
    keys = new_keys(np.random.default_rng(seed), 600)
    store_on_disk(daemon, rank, keys)
    listener.agrees(rank)
    assert (listener.added, listener.removed) == (600, 0)
    assert len(only_on_disk(rank, keys)) >= 300
    assert served(rank, keys).all()
    listener.agrees(rank)
    assert (listener.added, listener.removed) == (600, 0)
    rank.client.clear()
    listener.agrees(rank)
    assert (listener.added, listener.removed, listener.keys) == (600, 600, set())


def test_events_of_keys_that_a_full_disk_gives_up(start_daemon: Start, root: Path, seed: int) -> None:
    daemon = start_daemon(*disk_settings((root, 4 * MIB)), memory="1MiB")
    rank = worker(daemon)
    listener = Listener(daemon)
    keys = new_keys(np.random.default_rng(seed), 1800)
    store_on_disk(daemon, rank, keys)
    idle(daemon)
    listener.agrees(rank)
    assert listener.added - listener.removed == len(listener.keys) < 800
    there = np.array([key.tobytes() in listener.keys for key in keys])
    assert served(rank, keys)[there].all()
