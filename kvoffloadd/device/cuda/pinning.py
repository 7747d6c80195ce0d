"""Pinning the arena: it is registered with CUDA piece by piece, beside the copies.

What is not pinned, yet or ever, is copied all the same, by way of the driver's own buffers: that is legal and slower.
So nothing waits for a piece. One that a copy has missed is pinned before the others; one that the driver refuses is
tried again later, for what it lacks may come back.

A call takes some 0.05 s a GiB (docs/benchmarks/gpu.md), and as long as it does the driver keeps copies and other
processes of this host waiting, and the kernel every thread of this one that maps memory. So pieces are small, their
pages are there before the driver is asked for them (else the call would provide them, a second a GiB), and between two
of them others have their turn.
They double in size from `FIRST_BYTES` to `piece_bytes` and end where slabs end, unless slabs are larger. No copy may
reach over an end: the driver knows each piece alone.

Nothing is unpinned: the process's end does that, and no deadline holds for it.

Ownership: the thread that pins, but for `start` and `stop`, which are the event loop's. Any thread may ask what is
pinned, and `want` more: `_pinned` and `_wanted` change by single operations.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

import numpy as np

from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda.driver import Driver, host_side
from kvoffloadd.device.plan import Copies
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.linux.sharedmem import populate
from kvoffloadd.model import PAGE_BYTES, BoolArray, Direction, I64Array, U64Array
from kvoffloadd.units import format_bytes

log = logging.getLogger(__name__)

FIRST_BYTES = 128 << 20
PAUSE_S = 0.01
"""A pause between two pieces, so that others that wait for the driver get it."""
RETRY_S = 60.0
"""When what was refused is tried again."""
REFUSALS_MAX = 4
"""After so many in a row, the others are left for later, too: each try takes the driver's lock."""
_MAP_S_PER_GIB = 0.1
"""How long a driver may take to give a new context what is pinned, on top of the context itself."""
_ALREADY = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for the contexts of all GPUs


class Arena(NamedTuple):
    """The memory tier's memory: what is pinned, and the multiple at which pieces may end."""

    address: int
    size_bytes: int
    slab_bytes: int


def piece_ends(arena: Arena, piece_bytes: int) -> U64Array:
    """The addresses at which the pieces end: u64, ascending, the arena's end the last."""
    ends, at, size = [], 0, min(max(FIRST_BYTES, arena.slab_bytes), piece_bytes)
    while at < arena.size_bytes:
        unit = arena.slab_bytes if arena.slab_bytes <= size else PAGE_BYTES
        at = min(at + size - size % unit, arena.size_bytes)
        ends.append(arena.address + at)
        size = min(2 * size, piece_bytes)
    return np.array(ends, np.uint64)


def cut(copies: Copies, direction: Direction, ends: U64Array) -> Copies:
    """The same bytes in copies that reach over none of `ends` on this process's side."""
    return cut_at(copies, host_side(direction, copies.src, copies.dst), ends)


def cut_at(copies: Copies, side: U64Array, ends: U64Array) -> Copies:
    """The same bytes in copies that reach over none of `ends`. `side`: their sources, or their destinations."""
    first = np.searchsorted(ends, side, side="right")
    last = np.searchsorted(ends, side + copies.size - np.uint64(1), side="right")
    over = np.flatnonzero(first != last)
    if not len(over):
        return copies
    rows = [_pieces(copies, int(at), side, ends[first[at] : last[at]]) for at in over]
    kept = np.setdiff1d(np.arange(len(copies)), over, assume_unique=True)
    src, dst, size = (
        np.concatenate([column[kept], *(row[number] for row in rows)])
        for number, column in enumerate((copies.src, copies.dst, copies.size))
    )
    return Copies(src, dst, size, copies.descriptors)


def _pieces(copies: Copies, at: int, side: U64Array, ends: U64Array) -> tuple[U64Array, U64Array, U64Array]:
    """One copy in pieces that end at `ends`."""
    starts = np.concatenate([np.zeros(1, np.uint64), ends - side[at]])
    return copies.src[at] + starts, copies.dst[at] + starts, np.diff(starts, append=copies.size[at])


class Pinning:
    """What is pinned so far. `failure`: why some of it is not, in the driver's words; empty if nothing was refused."""

    def __init__(self, driver: Driver, arena: Arena, piece_bytes: int) -> None:
        self.ends = piece_ends(arena, piece_bytes)
        self.failure = ""
        self._driver = driver
        self._begins = np.concatenate([np.array([arena.address], np.uint64), self.ends[:-1]])
        self._sizes = (self.ends - self._begins).astype(np.int64)
        self._pinned: BoolArray = np.zeros(len(self.ends), bool)
        self._wanted: I64Array = np.zeros(len(self.ends), np.int64)  # how many bytes were copied past the driver
        self._left: BoolArray = np.ones(len(self.ends), bool)  # not tried since all were
        self._complete = False
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered so far."""
        return int(self._sizes[self._pinned].sum())

    @property
    def mapping_s(self) -> float:
        """How much longer a new context may take for what is pinned."""
        return self.pinned_bytes / (1 << 30) * _MAP_S_PER_GIB

    def start(self, context: int) -> None:
        """Begins, in a thread of its own, with this context current. Once there is one, later calls change nothing."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._work, args=(context,), name="kvo-pin", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the kernel grants none: the next call tries again
            self._fail(error)
        else:
            self._thread = thread

    def covers(self, copies: Copies, direction: Direction) -> bool:
        """Whether all that these copies touch of the arena is pinned. None of them reaches over one of `ends`. What is
        not is wanted from now on.
        """
        if self._complete or not len(copies):
            return True
        pieces = np.searchsorted(self.ends, host_side(direction, copies.src, copies.dst), side="right")
        missing = ~self._pinned[pieces]
        np.add.at(self._wanted, pieces[missing], copies.size[missing].astype(np.int64))
        return not missing.any()

    def stop(self) -> None:
        """Begins no further piece, and blocks until the one under way has ended."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    # --- the thread that pins -------------------------------------------------------------------------

    def _work(self, context: int) -> None:
        """Ends when all is pinned, or at `stop`; whatever else fails is told, and tried again."""
        while not self._stopping.is_set() and not self._complete:
            self._pin_all(context)
            self._complete = bool(self._pinned.all())
            if self._complete:
                self.failure = ""
                log.info("all of the arena is pinned, %s", format_bytes(self.pinned_bytes))
            else:
                self._stopping.wait(RETRY_S)

    def _pin_all(self, context: int) -> None:
        """Tries each piece once, until too many in a row were refused: the next call goes on with the others."""
        refused = 0
        while self._left.any() and refused < REFUSALS_MAX and not self._stopping.is_set():
            piece = int(np.argmax(np.where(self._left, self._wanted + 1, 0)))  # of equals, the first
            self._left[piece] = False
            try:
                self._pin(piece, context)
                refused = 0
            except Exception as error:  # noqa: BLE001  nothing may end this thread: it is told, and tried again
                self._fail(error)
                refused += 1
        if not self._left.any():
            self._left = ~self._pinned

    def _pin(self, piece: int, context: int) -> None:
        at, size_bytes = int(self._begins[piece]), int(self._sizes[piece])
        populate(at, size_bytes, 1, self._stopping)
        if not self._stopping.wait(PAUSE_S):
            self._driver.check("cuCtxSetCurrent", self._driver.set_current(context))
            try:
                self._driver.call("cuMemHostRegister", at, size_bytes, _PORTABLE)
            except CudaError as error:
                if error.name != _ALREADY:  # a call that failed may have registered it all the same
                    raise
            self._pinned[piece] = True

    def _fail(self, error: Exception) -> None:
        """Says it once."""
        reason = str(error) if isinstance(error, KvOffloadError) else f"{type(error).__name__}: {error}"
        if not self.failure:
            log.warning("some of the memory tier can't be pinned, and copies of it are slower: %s", reason)
        self.failure = reason
