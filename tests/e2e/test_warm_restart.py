"""A daemon that goes on with the memory that another one left: what had been sealed is served, and it is right."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import KeyState, Outcome
from kvoffloadd.storage.arenafile import _ATTEMPTS_AT as ATTEMPTS_AT
from kvoffloadd.storage.arenafile import ATTEMPTS_MAX
from kvoffloadd.testing.process import DaemonError
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, disk, disk_settings, group_of, idle, served, store_all
from tests.e2e.rank import Keys, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
SIZES = (100, 4096, 9000, 20_000)
TAKEN_OVER = "keys were taken over"


@pytest.fixture
def pool_file(tmp_path: Path) -> Iterator[Path]:
    """Where memory files lie, if there is such a place."""
    path = Path(f"/dev/shm/kvoffloadd-test-{os.getpid()}")
    if not os.access(path.parent, os.W_OK):
        path = tmp_path / "pool"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def start(start_daemon: Start, pool_file: Path) -> Start:
    """Does what `start_daemon` does, with a pool file."""
    return lambda *settings, **options: start_daemon(f"memory.pool_file={pool_file}", *settings, **options)


def sealed(daemon: Daemon) -> int:
    """Once nothing waits for its checksum: parts sealed since the start, and those adopted."""
    until(lambda: daemon.status()["cache"]["unsealed"] == 0, "all is sealed")
    return int(daemon.status()["cache"]["parts_sealed"])


@pytest.mark.parametrize("ends", ["stop", "kill"])
def test_restarted(start: Start, seed: int, ends: str) -> None:
    """All keys are there, are right, and are counted as verified at their first load."""
    daemon = start()
    keys = new_keys(np.random.default_rng(seed), 300)
    rank = daemon.welcome(Rank(daemon.socket, group_of(20_000)))
    store_all(rank, keys)
    sealed(daemon)
    daemon.leave_guests()
    getattr(daemon, ends)()
    daemon.start()
    assert daemon.status()["cache"]["keys_adopted"] == 300
    assert daemon.verify() == ()
    rank = daemon.welcome(Rank(daemon.socket, group_of(20_000)))
    assert set(rank.states(keys)) == {KeyState.HIT}
    assert served(rank, keys).all()
    assert daemon.says(TAKEN_OVER)


def test_an_orderly_stop_loses_nothing(start: Start, seed: int) -> None:
    """Also what still waits for its checksum then, and there is no disk to wait for either."""
    daemon = start("memory.slab_bytes=16MiB", memory="384MiB")
    keys = new_keys(np.random.default_rng(seed), 300)
    rank = daemon.welcome(Rank(daemon.socket, group_of(MIB), num_blocks=320))
    store_all(rank, keys, at_once=300)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    daemon.leave_guests()
    daemon.start()
    assert daemon.status()["cache"]["keys_adopted"] == 300


@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_killed_while_it_stores(start: Start, seed: int, kills: int) -> None:
    """It is killed at random instants: what is served is right, and it is at least 95 % of what had
    been sealed before.
    """
    rng = np.random.default_rng(seed)
    size = SIZES[seed % len(SIZES)]
    daemon = start(memory="48MiB")
    held: list[Keys] = []
    promised = came = 0
    for _ in range(kills):
        rank = daemon.welcome(Rank(daemon.socket, group_of(size), num_blocks=512))
        before = daemon.status()["cache"]
        jobs = []
        for part in range(4):
            held.append(new_keys(rng, 60))
            jobs.append(rank.begin_store({0: (held[-1], rank.blocks_of(0, 60 * part, 60))}))
        for job in jobs[: int(rng.integers(0, 5))]:
            assert rank.wait(job).outcome is Outcome.DONE
        now = daemon.status()["cache"]
        promised = before["keys"] + now["parts_sealed"] - before["parts_sealed"] - now["keys_evicted"]
        daemon.kill()
        daemon.leave_guests()
        daemon.start()
        assert daemon.verify() == ()
        assert daemon.status()["cache"]["keys"] >= 0.95 * promised
        rank = daemon.welcome(Rank(daemon.socket, group_of(size), num_blocks=512))
        found = np.concatenate([rank.states(lot) for lot in held])
        assert int((found == KeyState.HIT).sum()) == daemon.status()["cache"]["keys"]
        for lot in held[-4:]:
            hit = np.array(rank.states(lot)) == KeyState.HIT
            assert served(rank, lot).tolist() == hit.tolist()
            came += int(hit.sum())
        daemon.leave_guests()
    assert came > 0
    assert daemon.status()["cache"]["keys_corrupt"] == 0


@pytest.mark.parametrize("when", ["load", "start"])
def test_a_flipped_bit(start: Start, pool_file: Path, seed: int, when: str) -> None:
    """The bit is in a payload: that key is lost, counted, and a miss; at its load, or at the start if all is verified
    there.
    """
    rng = np.random.default_rng(seed)
    daemon = start(f"memory.verify_adopted={when}")
    keys = new_keys(rng, 40)
    rank = daemon.welcome(Rank(daemon.socket, group_of(9000)))
    store_all(rank, keys)
    sealed(daemon)
    daemon.leave_guests()
    daemon.kill()
    with pool_file.open("r+b") as file:
        whole = np.fromfile(file, np.uint8)
        arena = len(whole) - 32 * MIB
        # The first slot of the last slab that has any: its bytes are not zero.
        used = np.flatnonzero(whole[arena:].reshape(-1, 4096).any(axis=1))
        at = arena + int(rng.choice(used)) * 4096
        at += int(np.flatnonzero(whole[at : at + 4096])[0])
        file.seek(at)
        file.write(bytes([whole[at] ^ 1 << int(rng.integers(8))]))
    daemon.expected_in_log = "checksum|verif"
    daemon.start()
    assert daemon.status()["cache"]["keys_corrupt"] == (when == "start")
    rank = daemon.welcome(Rank(daemon.socket, group_of(9000)))
    assert int(served(rank, keys, writes_wrong=when == "load").sum()) == 39
    assert daemon.status()["cache"]["keys_corrupt"] == 1
    assert sorted(rank.states(keys))[:2] == [KeyState.MISS, KeyState.HIT]


def test_what_was_cleared_stays_away(start: Start, seed: int) -> None:
    daemon = start()
    rng = np.random.default_rng(seed)
    old, new = new_keys(rng, 20), new_keys(rng, 20)
    rank = daemon.welcome(Rank(daemon.socket, group_of(4096)))
    store_all(rank, old)
    sealed(daemon)
    rank.client.clear()
    store_all(rank, new)
    sealed(daemon)
    daemon.leave_guests()
    daemon.kill()
    daemon.start()
    rank = daemon.welcome(Rank(daemon.socket, group_of(4096)))
    assert set(rank.states(old)) == {KeyState.MISS}
    assert served(rank, new).all()


def test_another_size_is_a_cold_start(start: Start, seed: int) -> None:
    daemon = start()
    keys = new_keys(np.random.default_rng(seed), 20)
    rank = daemon.welcome(Rank(daemon.socket, group_of(4096)))
    store_all(rank, keys)
    sealed(daemon)
    daemon.leave_guests()
    daemon.stop()
    daemon.memory = "16MiB"
    daemon.start()
    assert daemon.says("a cold start")
    rank = daemon.welcome(Rank(daemon.socket, group_of(4096)))
    assert set(rank.states(keys)) == {KeyState.MISS}
    store_all(rank, keys)
    assert served(rank, keys).all()


def test_one_pool_one_daemon(start: Start, start_daemon: Start, pool_file: Path) -> None:
    start()
    with pytest.raises(DaemonError, match="another daemon has it"):
        start_daemon(f"memory.pool_file={pool_file}")


def test_with_a_disk(start: Start, tmp_path: Path, seed: int) -> None:
    """Keys that only memory had are written after the restart; those on disk are not written again."""
    rng = np.random.default_rng(seed)
    daemon = start(*disk_settings((tmp_path / "disk", 64 * MIB)))
    rank = daemon.welcome(Rank(daemon.socket, group_of(9000)))
    first = new_keys(rng, 50)
    store_all(rank, first)
    idle(daemon)
    assert disk(daemon)["keys"] == 50
    later = new_keys(rng, 50)
    store_all(rank, later)
    sealed(daemon)
    daemon.signal(signal.SIGKILL)
    daemon.kill()
    daemon.leave_guests()
    daemon.start()
    idle(daemon)
    assert (disk(daemon)["keys"], daemon.status()["cache"]["keys_adopted"]) == (100, 100)
    assert disk(daemon)["demoted"]["keys"] <= 50
    rank = daemon.welcome(Rank(daemon.socket, group_of(9000)))
    assert served(rank, np.concatenate([first, later])).all()


def attempts(pool_file: Path) -> int:
    """Starts that began to take it over and were not heard of again."""
    with pool_file.open("rb") as file:
        return int.from_bytes(os.pread(file.fileno(), 4, ATTEMPTS_AT), "little")


def test_an_orderly_end_of_a_start_is_no_crash(start: Start, tmp_path: Path, pool_file: Path, seed: int) -> None:
    """While the memory is being taken over, which a disk that hangs draws out: any number of times."""
    switch = tmp_path / "switch"
    daemon = start(*disk_settings((tmp_path / "root", 64 * MIB)), faults=f"disk={switch}")
    keys = new_keys(np.random.default_rng(seed), 20)
    store_all(daemon.welcome(Rank(daemon.socket, group_of(4096))), keys)
    sealed(daemon)
    daemon.leave_guests()
    daemon.stop()
    switch.write_text("\n".join(f"{what}_delay_s=3600" for what in ("open", "names", "read")))
    for _ in range(ATTEMPTS_MAX + 1):
        daemon.launch()
        until(lambda: attempts(pool_file) == 1, "it is taking over")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert attempts(pool_file) == 0
    switch.unlink()
    daemon.start()
    assert daemon.status()["cache"]["keys_adopted"] == 20
