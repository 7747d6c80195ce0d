"""Pieces of the arena: where they end, that no copy reaches over an end, which come first, and what is refused."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda.pinning import FIRST_BYTES, REFUSALS_MAX, Arena, Pinning, cut, piece_ends
from kvoffloadd.device.plan import Copies
from kvoffloadd.errors import ResourceError
from kvoffloadd.linux.sharedmem import Mapping, create_memfd
from kvoffloadd.model import Direction, U64Array
from kvoffloadd.testing.wait import HANG_S, until

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
    host_side = done.dst if direction is Direction.STORE else done.src
    for begin, size in zip(host_side.tolist(), done.size.tolist(), strict=True):
        assert size > 0
        assert not any(begin < end < begin + size for end in ends.tolist())


def moved(copies: Copies) -> list[tuple[int, int]]:
    """Every byte that is moved: from where to where."""
    runs = zip(copies.src.tolist(), copies.dst.tolist(), copies.size.tolist(), strict=True)
    return sorted((src + at, dst + at) for src, dst, size in runs for at in range(size))


class PinningDriver:
    """Registers what it is let to: each piece waits for a `release`. `refused`: raised for these pieces, by number.
    `resident`: how many bytes of the arena the kernel had provided at each registration.
    """

    fd = -1  # the arena's

    def __init__(self, refused: dict[int, Exception] | None = None) -> None:
        self.allowed = threading.Semaphore(0)
        self.registered: list[int] = []
        self.tried: list[int] = []
        self.resident: list[int] = []
        self.refused = refused or {}
        self.base = 0

    def set_current(self, context: int) -> int:
        assert context == 1
        return 0

    def check(self, call: str, status: int) -> None:
        assert status == 0

    def call(self, name: str, *arguments: Any) -> None:
        assert name == "cuMemHostRegister"
        address, size, flags = arguments
        assert (size, flags) == (SLAB, 1)
        piece = (address - self.base) // SLAB
        assert self.allowed.acquire(timeout=HANG_S)
        self.tried.append(piece)
        if piece in self.refused:
            raise self.refused[piece]
        self.resident.append(os.fstat(self.fd).st_blocks * 512)
        self.registered.append(piece)


SLAB, PIECES = 1 << 20, 8
Start = Callable[..., Pinning]
NO_MEMORY = CudaError("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")


@pytest.fixture
def pinning() -> Iterator[Start]:
    """Pins eight slabs of untouched memory."""
    fd = create_memfd("arena", PIECES * SLAB)
    mapping = Mapping.map_fd(fd, PIECES * SLAB)
    started: list[tuple[Pinning, PinningDriver]] = []

    def start(driver: PinningDriver, before: Callable[[Pinning], object] = lambda made: None) -> Pinning:
        driver.fd, driver.base = fd, mapping.address
        made = Pinning(driver, Arena(mapping.address, PIECES * SLAB, SLAB), SLAB)  # type: ignore[arg-type]  # a fake
        before(made)
        made.start(1)
        made.start(1)  # a second GPU changes nothing
        started.append((made, driver))
        return made

    yield start
    for made, driver in started:
        driver.allowed.release(1000)
        made.stop()
        assert made._thread is None or not made._thread.is_alive()
    mapping.close()
    os.close(fd)


def store_to(made: Pinning, *pieces: int) -> bool:
    """Whether the memory for a store of a page to each of these pieces is pinned."""
    begins = np.concatenate([made.ends[:1] - np.uint64(SLAB), made.ends[:-1]])
    dst = begins[list(pieces)] + np.uint64(4096)
    return made.covers(Copies(dst * 0, dst, dst * 0 + np.uint64(4096), len(dst)), Direction.STORE)


def pinned(made: Pinning, count: int) -> None:
    until(lambda: made.pinned_bytes == count * SLAB, f"{count} pieces are pinned")


def test_pieces_are_pinned_one_after_another(pinning: Start) -> None:
    driver = PinningDriver()
    made = pinning(driver)
    assert not store_to(made, 0)
    driver.allowed.release()
    pinned(made, 1)
    assert store_to(made, 0)
    assert not store_to(made, 1)
    assert not store_to(made, 0, 1)
    driver.allowed.release(PIECES)
    pinned(made, PIECES)
    assert store_to(made, *range(PIECES))
    assert driver.registered == list(range(PIECES))
    assert made.failure == ""


def test_a_piece_that_a_copy_has_missed_comes_first(pinning: Start) -> None:
    driver = PinningDriver()

    def want(made: Pinning) -> None:
        assert not store_to(made, 5, 6)
        assert not store_to(made, 6)

    made = pinning(driver, before=want)
    driver.allowed.release(4)
    pinned(made, 4)
    assert driver.registered == [6, 5, 0, 1]


def test_pages_are_there_before_the_driver_is_asked_for_them(pinning: Start) -> None:
    """Or its call would make them, under its lock: a second a GiB."""
    driver = PinningDriver()
    made = pinning(driver)
    driver.allowed.release(PIECES)
    pinned(made, PIECES)
    assert driver.resident == [SLAB * (1 + piece) for piece in range(PIECES)]


def test_there_is_a_pause_after_each_piece(pinning: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffloadd.device.cuda.pinning.PAUSE_S", 0.05)
    driver = PinningDriver()
    driver.allowed.release(PIECES)
    began = time.monotonic()
    pinned(pinning(driver), PIECES)
    assert time.monotonic() - began >= (PIECES - 1) * 0.05


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NO_MEMORY, "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"),
        (CudaError("cuMemHostRegister", "CUresult 950"), "cuMemHostRegister: CUresult 950"),
        (ResourceError("no memory for it"), "no memory for it"),
        (RuntimeError("can't start new thread"), "RuntimeError: can't start new thread"),
        (ValueError("what nobody thought of"), "ValueError: what nobody thought of"),
    ],
)
def test_what_is_refused_is_told_once_and_tried_again(
    pinning: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, reason: str
) -> None:
    """Whatever the reason: the others are pinned meanwhile, and what comes back is used."""
    monkeypatch.setattr("kvoffloadd.device.cuda.pinning.RETRY_S", 0.05)
    driver = PinningDriver({1: error, 4: error})
    made = pinning(driver)
    driver.allowed.release(100)
    until(lambda: driver.tried.count(4) >= 3, "it is tried again")
    assert made.pinned_bytes == (PIECES - 2) * SLAB
    assert made.failure == reason
    assert (store_to(made, 0), store_to(made, 1)) == (True, False)
    driver.refused.clear()
    driver.allowed.release(100)
    pinned(made, PIECES)
    until(lambda: not made.failure, "nothing is missing any more")
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"some of the memory tier can't be pinned, and copies of it are slower: {reason}"
    ]


def test_a_driver_that_pins_nothing_is_asked_some_times_only(pinning: Start) -> None:
    """Confidential computing: each try takes a lock that other processes of the host wait for."""
    driver = PinningDriver(dict.fromkeys(range(PIECES), NO_MEMORY))
    made = pinning(driver)
    driver.allowed.release(100)
    until(lambda: len(driver.tried) == REFUSALS_MAX, "it has been asked")
    time.sleep(0.1)
    assert driver.tried == list(range(REFUSALS_MAX))
    assert made.pinned_bytes == 0
    assert made.failure


def test_pieces_that_are_refused_for_good_keep_no_other_from_its_turn(
    pinning: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does one that a call which failed has registered all the same."""
    monkeypatch.setattr("kvoffloadd.device.cuda.pinning.RETRY_S", 0.02)
    already = CudaError("cuMemHostRegister", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
    driver = PinningDriver({**dict.fromkeys(range(REFUSALS_MAX), NO_MEMORY), PIECES - 1: already})
    driver.allowed.release(100)
    pinned(pinning(driver), PIECES - REFUSALS_MAX)


def test_memory_that_is_not_there_ends_nothing() -> None:
    driver = PinningDriver()
    made = Pinning(driver, Arena(BASE, 4 * SLAB, SLAB), SLAB)  # type: ignore[arg-type]  # a fake; nothing is mapped
    made.start(1)
    until(lambda: made.failure, "it has failed")
    made.stop()
    assert driver.tried == []


def test_without_a_thread_nothing_is_pinned_until_there_is_one(pinning: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU can be used."""
    driver = PinningDriver()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: no_thread())
        made = pinning(driver)
    assert made.failure == "RuntimeError: can't start new thread"
    assert not store_to(made, 0)
    driver.allowed.release(PIECES)
    made.start(1)
    pinned(made, PIECES)


def no_thread() -> NoReturn:
    raise RuntimeError("can't start new thread")


def test_stop_ends_between_pieces(pinning: Start) -> None:
    driver = PinningDriver()
    made = pinning(driver)
    driver.allowed.release()
    pinned(made, 1)
    threading.Timer(0.05, driver.allowed.release).start()
    made.stop()
    assert len(driver.registered) <= 2


def test_a_new_context_may_take_longer_the_more_is_pinned() -> None:
    made = Pinning(PinningDriver(), Arena(BASE, 512 * GIB, 64 << 20), GIB)  # type: ignore[arg-type]  # a fake
    assert made.mapping_s == 0
    made._pinned[:] = True
    assert made.mapping_s >= 30
