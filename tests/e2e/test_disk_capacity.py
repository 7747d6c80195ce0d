"""A root never takes more than it was given, however much is written, and keeps what is worth most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import KeyState
from kvoffloadd.testing.disk import used_bytes
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import chosen
from tests.e2e.disk import (
    MIB,
    disk,
    disk_settings,
    group_of,
    idle,
    only_on_disk,
    records,
    served,
    store_all,
    store_on_disk,
)
from tests.e2e.rank import Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
PAYLOAD = 60_000
"""A record of 16 pages."""


@contextmanager
def within(*bounds: tuple[Path, int]) -> Iterator[None]:
    """All the while, no root takes more than its bound on disk."""
    most = dict.fromkeys((root for root, _ in bounds), 0)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            for root in most:
                most[root] = max(most[root], used_bytes(root))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    for root, bound in bounds:
        assert 0 < most[root] <= bound


def worker(daemon: Daemon) -> Rank:
    found: Rank = daemon.welcome(Rank(daemon.socket, group_of(PAYLOAD)))
    return found


def restart(daemon: Daemon, *settings: str) -> Rank:
    """Restarts the daemon with other settings in place of those of the same names."""
    daemon.leave_guests()
    assert daemon.stop() == 0
    daemon.settings |= chosen(*settings)
    daemon.start()
    return worker(daemon)


def test_ten_times_the_capacity(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    root = tmp_path / "disk"
    daemon = start_daemon(*disk_settings((root, 8 * MIB)), memory="4MiB")
    rank = worker(daemon)
    keys = new_keys(np.random.default_rng(seed), 1280)
    with within((root, 8 * MIB)):
        store_on_disk(daemon, rank, keys, 32)
    status = disk(daemon)
    assert status["roots"][0]["used_bytes"] <= 8 * MIB
    # Of 128 records that would fit one segment is open, one is spare, one is just given up, and each has a footer.
    assert status["keys"] >= 70
    assert status["evicted_keys"] + status["keys"] >= 1280  # more, where some were written again
    assert served(rank, keys[-60:], 20).all()
    assert served(rank, keys[:1000], 20).mean() < 0.2  # some may have moved on, since memory had them


@pytest.mark.parametrize("hot_keys", [3, 6])
def test_used_keys_move_on(start_daemon: Start, tmp_path: Path, hot_keys: int, seed: int) -> None:
    """A few keys are loaded from disk again and again, while five times the capacity passes by. Memory has evicted them
    each time. Where they are more than a quarter of their segment, that is spared.
    """
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 8 * MIB)), 'memory.policy="lru"', memory="2MiB")
    rank = worker(daemon)
    rng = np.random.default_rng(seed)
    hot = new_keys(rng, hot_keys)
    store_on_disk(daemon, rank, hot)
    for _ in range(16):
        store_on_disk(daemon, rank, new_keys(rng, 40), 20)
        assert len(only_on_disk(rank, hot)) == hot_keys
        assert served(rank, hot).all()
    assert (disk(daemon)["rewritten"] > 0) == (hot_keys == 3)
    daemon.leave_guests()
    daemon.kill()
    daemon.start()
    assert served(worker(daemon), hot).all()


def test_keys_that_an_engine_has_itself_move_on(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    """It reports that it uses them, and loads none of them."""
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 8 * MIB)), 'memory.policy="lru"', memory="2MiB")
    rank = worker(daemon)
    rng = np.random.default_rng(seed)
    used, unused = new_keys(rng, 3), new_keys(rng, 3)
    store_on_disk(daemon, rank, np.concatenate([used, unused]))
    for _ in range(16):
        store_on_disk(daemon, rank, new_keys(rng, 40), 20)
        assert len(only_on_disk(rank, used)) == 3
        rank.client.touch({0: used})
    assert disk(daemon)["promoted"]["keys"] == 0
    assert served(rank, used).all()
    assert rank.states(unused) == [KeyState.MISS] * 3


def test_they_do_not_where_that_is_not_wanted(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 8 * MIB)), "disk.rewrite_hot=false", memory="2MiB")
    rank = worker(daemon)
    rng = np.random.default_rng(seed)
    hot = new_keys(rng, 8)
    store_on_disk(daemon, rank, hot)
    store_on_disk(daemon, rank, new_keys(rng, 40), 20)
    assert served(rank, hot).all()
    store_on_disk(daemon, rank, new_keys(rng, 160), 20)
    assert rank.states(hot) == [KeyState.MISS] * 8
    assert disk(daemon)["rewritten"] == 0


def test_memory_larger_than_the_disk_is_not_written_for_ever(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    """What the disk gives up is in memory still: written again without end, it would wear the disk out."""
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 4 * MIB)), memory="32MiB")
    rank = worker(daemon)
    store_all(rank, new_keys(np.random.default_rng(seed), 300))
    idle(daemon)

    def written_bytes() -> int:
        return int(disk(daemon)["roots"][0]["written_bytes"])

    def is_still() -> bool:
        before = written_bytes()
        time.sleep(0.3)
        return written_bytes() == before

    until(is_still, "nothing is written any more")
    assert written_bytes() <= 2 * 300 * PAYLOAD


def test_another_capacity_at_the_next_start(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    """Smaller: it shrinks at once, and the newest stay. Larger, with larger segments: it is filled, and no more."""
    root = tmp_path / "disk"
    daemon = start_daemon(*disk_settings((root, 16 * MIB)), memory="2MiB")
    rank = worker(daemon)
    rng = np.random.default_rng(seed)
    keys = new_keys(rng, 240)
    store_on_disk(daemon, rank, keys, 20)
    rank = restart(daemon, *disk_settings((root, 8 * MIB)))
    assert used_bytes(root) <= 8 * MIB
    there = len(only_on_disk(rank, keys))
    assert there >= 35
    assert served(rank, keys[-35:], 20).all()
    with within((root, 8 * MIB)):
        more = new_keys(rng, 200)
        store_on_disk(daemon, rank, more, 20)
    assert served(rank, more[-60:], 20).all()
    rank = restart(daemon, *disk_settings((root, 24 * MIB)))
    assert served(rank, more[-60:], 20).all()
    with within((root, 24 * MIB)):
        last = new_keys(rng, 600)
        store_on_disk(daemon, rank, last, 20)
    assert disk(daemon)["keys"] >= 230
    assert served(rank, last[-220:], 20).all()


def test_two_roots(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    """Both are used, each within its bound."""
    bounds = (tmp_path / "small", 8 * MIB), (tmp_path / "large", 24 * MIB)
    daemon = start_daemon(*disk_settings(*bounds), memory="2MiB")
    rank = worker(daemon)
    keys = new_keys(np.random.default_rng(seed), 600)
    with within(*bounds):
        store_on_disk(daemon, rank, keys, 20)
    idle(daemon)
    assert all(root["written_bytes"] > 8 * MIB for root in disk(daemon)["roots"])
    assert served(rank, keys[-100:], 20).all()
    daemon.leave_guests()
    assert daemon.stop() == 0
    found = [len(records(root)) for root, _ in bounds]
    assert found[0] >= 60
    assert found[1] >= 200
    daemon.start()
    assert served(worker(daemon), keys[-100:], 20).all()
