"""Whatever becomes of the bytes on disk, nothing wrong is served, and no more is lost than was damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Client, KeyState
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.daemon import Daemon
from scripts.harness.damage import flip
from tests.e2e.disk import (
    MIB,
    Record,
    demoted,
    disk,
    disk_settings,
    flip_each,
    group_of,
    only_on_disk,
    records,
    records_of,
    segments,
    served,
    store_all,
    store_on_disk,
)
from tests.e2e.rank import Keys, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
Ints = list[int]

SMALL = 100
"""Bytes of a payload whose every position is tried."""

AT_ONCE = 512


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def launch(start_daemon: Start, root: Path, capacity: int = 64 * MIB, *settings: str) -> Daemon:
    """Memory of 4 MiB, segments of 1 MiB."""
    daemon = start_daemon(*disk_settings((root, capacity)), "disk.segment_bytes=1MiB", *settings, memory="4MiB")
    daemon.expected_in_log = "WARNING"
    return daemon


def worker(daemon: Daemon, payload_bytes: int) -> Rank:
    found: Rank = daemon.welcome(Rank(daemon.socket, group_of(payload_bytes), num_blocks=AT_ONCE))
    return found


def fill(daemon: Daemon, rank: Rank, keys: Keys, at_once: int = AT_ONCE) -> None:
    """All of them on disk; memory holds the last of them, too."""
    for start in range(0, len(keys), at_once):
        batch = keys[start : start + at_once]
        store_all(rank, batch, at_once)
        demoted(daemon, start + len(batch))


def lost_alone(rank: Rank, keys: Keys, bad: np.ndarray) -> None:
    """Exactly the bad ones are named in `failed`, and are misses from then on; the others are served."""
    came = served(rank, keys, AT_ONCE)
    assert came.tolist() == (~bad).tolist()
    if bad.any():
        assert set(rank.states(keys[bad][:AT_ONCE])) == {KeyState.MISS}
    assert set(rank.states(keys[~bad][:AT_ONCE])) <= {KeyState.HIT, KeyState.PENDING}


def spread(count: int, size: int, rng: np.random.Generator) -> Ints:
    """Returns `count` positions below `size`: each one if `count` is `size`, else evenly from a random one on."""
    found: Ints = ((np.arange(count) * size // count + rng.integers(size)) % size).tolist()
    return found


# --- one byte ---


def test_every_position_of_a_record_running(start_daemon: Start, root: Path, generator: np.random.Generator) -> None:
    """Header and payload: each byte of one record in some record."""
    daemon = launch(start_daemon, root)
    rank = worker(daemon, SMALL)
    positions = np.arange(PAGE_BYTES + SMALL)
    keys = new_keys(generator, 2 * len(positions) // 4 * 3)
    fill(daemon, rank, keys)
    keys = only_on_disk(rank, keys)
    assert len(keys) >= len(positions)
    bad = np.zeros(len(keys), bool)
    bad[generator.permutation(len(keys))[: len(positions)]] = True
    flip_each(records_of(root, keys[bad]), positions.tolist())
    lost_alone(rank, keys, bad)
    assert disk(daemon)["corrupt"] == len(positions)


@pytest.mark.parametrize("payload_bytes", [PAGE_BYTES, 20_000])
def test_some_positions_of_larger_records_running(
    start_daemon: Start, root: Path, generator: np.random.Generator, payload_bytes: int
) -> None:
    daemon = launch(start_daemon, root)
    rank = worker(daemon, payload_bytes)
    keys = new_keys(generator, 1400)
    fill(daemon, rank, keys, 128)
    keys = only_on_disk(rank, keys)
    bad = generator.random(len(keys)) < 0.5
    flip_each(records_of(root, keys[bad]), spread(int(bad.sum()), PAGE_BYTES + payload_bytes, generator))
    for start in range(0, len(keys), 128):
        lost_alone(rank, keys[start : start + 128], bad[start : start + 128])
    assert disk(daemon)["corrupt"] == bad.sum()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_every_position_of_a_record_stopped(
    start_daemon: Start, root: Path, generator: np.random.Generator, end: str
) -> None:
    """Stopped, all segments are sealed; killed, the last one is not."""
    daemon = launch(start_daemon, root, 96 * MIB, "disk.segment_bytes=8MiB")
    rank = worker(daemon, SMALL)
    positions = np.arange(PAGE_BYTES + SMALL)
    keys = new_keys(generator, 2 * len(positions) // 4 * 3)
    fill(daemon, rank, keys)
    daemon.leave_guests()
    getattr(daemon, end)()
    bad = np.zeros(len(keys), bool)
    bad[generator.permutation(len(keys))[: len(positions)]] = True
    flip_each(records_of(root, keys[bad]), positions.tolist())
    daemon.start()
    rank = worker(daemon, SMALL)
    lost_alone(rank, keys, bad)
    if end == "stop":
        assert disk(daemon)["corrupt"] == len(positions)


def test_header_or_footer_of_a_segment(start_daemon: Start, root: Path, generator: np.random.Generator) -> None:
    """What names the records is there twice: with one of them damaged nothing is lost, with both one segment."""
    daemon = launch(start_daemon, root)
    rank = worker(daemon, PAGE_BYTES)
    keys = new_keys(generator, 4000)
    fill(daemon, rank, keys)
    daemon.leave_guests()
    daemon.stop()
    where = records(root)
    paths = segments(root)
    heads = spread(len(paths), PAGE_BYTES, generator)
    tails = spread(len(paths), 3 * PAGE_BYTES, generator)
    for number, path in enumerate(paths):
        if number % 3 != 1:
            flip(path, heads[number])
        if number % 3 != 0:
            # The trailer for a certain loss, any page of the footer else.
            tail = heads[number] % PAGE_BYTES if number % 3 == 2 else tails[number]
            flip(path, path.stat().st_size - 1 - tail)
    daemon.start()
    rank = worker(daemon, PAGE_BYTES)
    gone = {path for number, path in enumerate(paths) if number % 3 == 2}
    lost_alone(rank, keys, np.array([where[key.tobytes()].path in gone for key in keys]))


# --- shorter files ---

CUT_PAYLOAD = 15 * PAGE_BYTES
CUTS = MIB // PAGE_BYTES


@pytest.mark.parametrize(
    ("step", "phase"),
    [(8, None), *(pytest.param(4, phase, marks=pytest.mark.soak) for phase in range(4))],
)
@pytest.mark.parametrize("end", ["", "kill", pytest.param("stop", marks=pytest.mark.soak)])
def test_truncated_at_every_page(
    start_daemon: Start, root: Path, generator: np.random.Generator, end: str, step: int, phase: int | None
) -> None:
    """Each segment is cut at another page; what lies before the cut is served."""
    daemon = launch(start_daemon, root, 80 * MIB)
    rank = worker(daemon, CUT_PAYLOAD)
    keys = new_keys(generator, 15 * (CUTS // step))
    fill(daemon, rank, keys, 32)
    if end:
        daemon.leave_guests()
        getattr(daemon, end)()
    else:
        keys = only_on_disk(rank, keys)
    where = records(root)
    first = int(generator.integers(step)) if phase is None else phase
    used = sorted({record.path for record in where.values()})
    cuts = dict(zip(used, range(first, CUTS, step), strict=False))
    for path, page in cuts.items():
        with path.open("r+b") as stream:
            stream.truncate(page * PAGE_BYTES)
    if end:
        daemon.start()
        rank = worker(daemon, CUT_PAYLOAD)
    cut = np.array([_behind(where[key.tobytes()], cuts) for key in keys])
    for start in range(0, len(keys), 32):
        lost_alone(rank, keys[start : start + 32], cut[start : start + 32])
    # And the files are of use again.
    more = new_keys(generator, 300)
    store_on_disk(daemon, rank, more, 20)
    status = disk(daemon)["roots"][0]
    assert (status["state"], status["write_errors"]) == ("ok", 0)
    assert served(rank, more, 20).all()


def _behind(record: Record, cuts: dict[Path, int]) -> bool:
    # Without page 0 it is unknown what the file was, and a start has no other way to find out.
    return record.path in cuts and record.end_page > cuts[record.path]


# --- the daemon looks for itself ---


def test_verify_names_what_is_damaged_and_repair_drops_it(
    start_daemon: Start, root: Path, generator: np.random.Generator
) -> None:
    daemon = launch(start_daemon, root)
    rank = worker(daemon, PAGE_BYTES)
    keys = new_keys(generator, 1500)
    fill(daemon, rank, keys)
    keys = only_on_disk(rank, keys)
    bad = np.zeros(len(keys), bool)
    bad[::10] = True
    damaged = records_of(root, keys[bad])
    flip_each(damaged, spread(len(damaged), damaged[0].covered_bytes, generator))
    with Client(daemon.socket, namespace=None, role="observer") as observer:
        first = observer.verify(disk=True, deadline_s=HANG_S)
        assert first.records == 1500
        expected = {f"disk: the record at {one.path}, page {one.page} is damaged" for one in damaged}
        assert set(first.findings) == expected
        assert set(rank.states(keys[bad])) == {KeyState.PENDING}
        second = observer.verify(disk=True, repair=True, deadline_s=HANG_S)
        assert set(second.findings) == {f"{finding}, dropped" for finding in expected}
        assert set(rank.states(keys[bad])) == {KeyState.MISS}
        third = observer.verify(disk=True, deadline_s=HANG_S)
        assert (third.findings, third.records) == ((), 1500 - len(damaged))
    assert disk(daemon)["corrupt"] == len(damaged)
    lost_alone(rank, keys, bad)
