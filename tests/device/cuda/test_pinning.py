"""Pieces of the arena: where they end, that no copy reaches over an end, and who waits for which."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda.pinning import FIRST_BYTES, Arena, Pinning, cut, piece_ends
from kvoffloadd.device.plan import Copies
from kvoffloadd.model import Direction, U64Array
from kvoffloadd.sharedmem import Mapping, create_memfd

GIB = 1 << 30
BASE = 1 << 40


def u64(*values: int) -> U64Array:
    return np.array(values, np.uint64)


@given(
    st.integers(1, 100),
    st.sampled_from([1 << 20, 64 << 20, 3 * 4096, 4 * GIB]),
    st.sampled_from([4096, 3 << 20, (5 << 20) + 1, GIB, 2 * GIB]),
)
def test_pieces_cover_the_arena_and_end_where_slabs_do(slabs: int, slab_bytes: int, piece_bytes: int) -> None:
    """Whatever a slab's size: no piece is larger than was asked for."""
    size = slabs * slab_bytes - 4096  # the last slab is short
    if size // piece_bytes > 1000:
        return
    ends = piece_ends(Arena(BASE, size, slab_bytes), piece_bytes).astype(np.int64) - BASE
    assert ends[-1] == size
    assert (np.diff(ends) > 0).all()
    assert int(np.diff(ends, prepend=0).max()) <= piece_bytes
    unit = slab_bytes if slab_bytes <= piece_bytes else 4096
    assert all(end % unit == 0 for end in ends[:-1].tolist())


def test_pieces_begin_small_and_double() -> None:
    sizes = np.diff(piece_ends(Arena(BASE, 200 * GIB, 64 << 20), 2 * GIB), prepend=np.uint64(BASE))
    assert sizes[:5].tolist() == [FIRST_BYTES << doubling for doubling in range(5)]
    assert int(sizes.max()) == 2 * GIB


@given(st.data())
def test_cut_moves_the_same_bytes_and_reaches_over_no_end(data: st.DataObject) -> None:
    ends = np.cumsum(np.array(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6)), np.uint64)) + BASE
    total = int(ends[-1]) - BASE
    begins = data.draw(st.lists(st.integers(0, total - 1), max_size=8))
    sizes = [data.draw(st.integers(1, total - begin)) for begin in begins]
    host, other = u64(*begins) + np.uint64(BASE), np.arange(len(begins), dtype=np.uint64) * np.uint64(1 << 20)
    direction = data.draw(st.sampled_from(list(Direction)))
    src, dst = (other, host) if direction is Direction.STORE else (host, other)
    done = cut(Copies(src, dst, u64(*sizes), 99), direction, ends)
    assert done.descriptors == 99
    assert moved(done) == moved(Copies(src, dst, u64(*sizes), 99))
    mine = done.dst if direction is Direction.STORE else done.src
    for begin, size in zip(mine.tolist(), done.size.tolist(), strict=True):
        assert size > 0
        assert not any(begin < end < begin + size for end in ends.tolist())


def moved(copies: Copies) -> list[tuple[int, int]]:
    """Every byte that is moved: from where to where."""
    runs = zip(copies.src.tolist(), copies.dst.tolist(), copies.size.tolist(), strict=True)
    return sorted((src + at, dst + at) for src, dst, size in runs for at in range(size))


class FakeDriver:
    """Registers what it is let to: each piece waits for a `release`. `refuse`: the number of the piece that fails.
    `resident`: how many bytes of the arena the kernel had provided at each registration.
    """

    fd = -1  # the arena's

    def __init__(self, refuse: int = -1) -> None:
        self.allowed = threading.Semaphore(0)
        self.registered: list[tuple[int, int]] = []
        self.resident: list[int] = []
        self._refuse = refuse

    def set_current(self, context: int) -> int:
        return 0

    def check(self, call: str, status: int) -> None:
        assert status == 0

    def call(self, name: str, *arguments: Any) -> None:
        assert name == "cuMemHostRegister"
        assert self.allowed.acquire(timeout=10)
        if len(self.registered) == self._refuse:
            raise CudaError(name, "CUDA_ERROR_OUT_OF_MEMORY")
        self.resident.append(os.fstat(self.fd).st_blocks * 512)
        self.registered.append((arguments[0], arguments[1]))


SLAB = 1 << 20
Start = Callable[[FakeDriver], Pinning]


@pytest.fixture
async def pinning() -> AsyncIterator[Start]:
    """Pins four slabs of memory that nobody has touched."""
    fd = create_memfd("arena", 4 * SLAB)
    mapping = Mapping.map_fd(fd, 4 * SLAB)
    started: list[tuple[Pinning, FakeDriver]] = []

    def start(driver: FakeDriver) -> Pinning:
        driver.fd = fd
        arena = Arena(mapping.address, 4 * SLAB, SLAB)
        made = Pinning(asyncio.get_running_loop(), driver, arena, SLAB)  # type: ignore[arg-type]  # a fake
        made.start(1)
        made.start(1)  # a second GPU changes nothing
        started.append((made, driver))
        return made

    yield start
    for made, driver in started:
        driver.allowed.release(8)
        made.stop()
    mapping.close()
    os.close(fd)


async def until(done: asyncio.Event) -> None:
    async with asyncio.timeout(10):
        await done.wait()


async def test_who_needs_the_first_piece_waits_for_no_other(pinning: Start) -> None:
    driver = FakeDriver()
    made = pinning(driver)
    base = made.pinned_to
    first, last = asyncio.Event(), asyncio.Event()
    assert not made.covers(base + 1)
    made.when(base + SLAB, first.set)
    made.when(base + 4 * SLAB, last.set)
    driver.allowed.release()
    await until(first)
    assert made.covers(base + SLAB)
    assert not made.covers(base + SLAB + 1)
    assert not last.is_set()
    driver.allowed.release(3)
    await until(last)
    assert driver.registered == [(base + at * SLAB, SLAB) for at in range(4)]


async def test_pages_are_there_before_the_driver_is_asked_for_them(pinning: Start) -> None:
    """Or its call would make them, under its lock: a second a GiB."""
    driver = FakeDriver()
    made = pinning(driver)
    last = asyncio.Event()
    made.when(made.pinned_to + 4 * SLAB, last.set)
    driver.allowed.release(4)
    await until(last)
    assert driver.resident == [SLAB, 2 * SLAB, 3 * SLAB, 4 * SLAB]


async def test_there_is_a_pause_after_each_piece(pinning: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffloadd.device.cuda.pinning.PAUSE_S", 0.05)
    driver = FakeDriver()
    driver.allowed.release(4)
    began = time.monotonic()
    made = pinning(driver)
    last = asyncio.Event()
    made.when(made.pinned_to + 4 * SLAB, last.set)
    await until(last)
    assert time.monotonic() - began >= 3 * 0.05


async def test_a_piece_that_cannot_be_pinned_keeps_nobody_waiting(pinning: Start) -> None:
    driver = FakeDriver(refuse=1)
    made = pinning(driver)
    last = asyncio.Event()
    made.when(made.pinned_to + 4 * SLAB, last.set)
    driver.allowed.release(4)
    await until(last)
    assert "OUT_OF_MEMORY" in made.failure
    assert made.pinned_bytes == SLAB


async def test_memory_that_is_not_there_keeps_nobody_waiting() -> None:
    driver = FakeDriver()
    arena = Arena(BASE, 4 * SLAB, SLAB)  # nothing is mapped
    made = Pinning(asyncio.get_running_loop(), driver, arena, SLAB)  # type: ignore[arg-type]  # a fake
    last = asyncio.Event()
    made.when(BASE + 4 * SLAB, last.set)
    made.start(1)
    await until(last)
    assert "can't be pinned beyond 0 B" in made.failure
    assert driver.registered == []


async def test_stop_ends_between_pieces(pinning: Start) -> None:
    driver = FakeDriver()
    made = pinning(driver)
    first = asyncio.Event()
    made.when(made.pinned_to + SLAB, first.set)
    driver.allowed.release()
    await until(first)
    threading.Timer(0.05, driver.allowed.release).start()
    await asyncio.get_running_loop().run_in_executor(None, made.stop)
    await asyncio.sleep(0)
    assert len(driver.registered) <= 2


@pytest.mark.parametrize("end", [BASE, BASE - 1, 0])
async def test_nothing_below_the_arena_is_waited_for(end: int) -> None:
    arena = Arena(BASE, 4 * SLAB, SLAB)
    made = Pinning(asyncio.get_running_loop(), FakeDriver(), arena, SLAB)  # type: ignore[arg-type]  # a fake
    assert made.covers(end)


async def test_a_new_context_may_take_longer_the_more_is_pinned() -> None:
    arena = Arena(BASE, 512 * GIB, 64 << 20)
    made = Pinning(asyncio.get_running_loop(), FakeDriver(), arena, GIB)  # type: ignore[arg-type]  # a fake
    assert made.mapping_s == 0
    made.pinned_to = BASE + 512 * GIB
    assert made.mapping_s >= 30
