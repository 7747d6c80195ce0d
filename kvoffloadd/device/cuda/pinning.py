"""Pins the arena: registers it with CUDA piece by piece, while copies run.

Memory that is not pinned is copied all the same, through the driver's own buffers, which is legal but slower. So
nothing waits for a piece. A piece that a copy has missed is pinned before the others; one that the driver refuses is
tried again later, since the missing resource may be free by then.

A call takes some 0.05 s a GiB (docs/benchmarks/gpu.md), and meanwhile the driver blocks copies and other processes of
this host, and the kernel blocks every thread of this process that maps memory. So pieces are small, their pages are
populated before the driver call (which otherwise would populate them, at a second a GiB), and others have their turn
between two pieces. They double in size from `FIRST_BYTES` to `piece_bytes` and end where slabs end, unless slabs are
larger. No copy may cross an end: the driver knows each piece separately.

Nothing is unpinned explicitly: the end of the process does that, without a deadline.

Ownership: the thread that pins, except for `start` and `stop`, which the event loop calls. Any thread may ask what is
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
"""A pause between two pieces, so that other users of the driver get it."""
RETRY_S = 60.0
"""The delay before refused pieces are tried again."""
REFUSALS_MAX = 4
"""After this many refusals in a row the other pieces are deferred, too: each try takes the driver's lock."""
_MAP_S_PER_GIB = 0.1
"""How long a driver may take to give a new context the pinned memory, in addition to the context itself."""
_ALREADY = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for the contexts of all GPUs


class Arena(NamedTuple):
    """The memory tier's memory that is pinned, and the multiple at which pieces may end."""

    address: int
    size_bytes: int
    slab_bytes: int


def piece_ends(arena: Arena, piece_bytes: int) -> U64Array:
    """Returns the addresses at which the pieces end: u64, ascending; the last is the arena's end."""
    ends, offset, size = [], 0, min(max(FIRST_BYTES, arena.slab_bytes), piece_bytes)
    while offset < arena.size_bytes:
        unit = arena.slab_bytes if arena.slab_bytes <= size else PAGE_BYTES
        offset = min(offset + size - size % unit, arena.size_bytes)
        ends.append(arena.address + offset)
        size = min(2 * size, piece_bytes)
    return np.array(ends, np.uint64)


def cut(copies: Copies, direction: Direction, ends: U64Array) -> Copies:
    """Returns the same bytes in copies that cross none of `ends` on this process's side."""
    return cut_at(copies, host_side(direction, copies.src, copies.dst), ends)


def cut_at(copies: Copies, side: U64Array, ends: U64Array) -> Copies:
    """Returns the same bytes in copies that cross none of `ends`. `side`: their sources, or their destinations."""
    first = np.searchsorted(ends, side, side="right")
    last = np.searchsorted(ends, side + copies.size - np.uint64(1), side="right")
    over = np.flatnonzero(first != last)
    if not len(over):
        return copies
    rows = [_pieces(copies, int(index), side, ends[first[index] : last[index]]) for index in over]
    kept = np.setdiff1d(np.arange(len(copies)), over, assume_unique=True)
    src, dst, size = (
        np.concatenate([column[kept], *(row[number] for row in rows)])
        for number, column in enumerate((copies.src, copies.dst, copies.size))
    )
    return Copies(src, dst, size, copies.descriptors)


def _pieces(copies: Copies, index: int, side: U64Array, ends: U64Array) -> tuple[U64Array, U64Array, U64Array]:
    """Returns one copy in pieces that end at `ends`."""
    starts = np.concatenate([np.zeros(1, np.uint64), ends - side[index]])
    return copies.src[index] + starts, copies.dst[index] + starts, np.diff(starts, append=copies.size[index])


class Pinning:
    """Pins the arena. `failure`: why some of it is not pinned, as the driver reports it; empty if nothing was
    refused.
    """

    def __init__(self, driver: Driver, arena: Arena, piece_bytes: int) -> None:
        self.ends = piece_ends(arena, piece_bytes)
        self.failure = ""
        self._driver = driver
        self._begins = np.concatenate([np.array([arena.address], np.uint64), self.ends[:-1]])
        self._sizes = (self.ends - self._begins).astype(np.int64)
        self._pinned: BoolArray = np.zeros(len(self.ends), bool)
        # how many bytes were copied through the driver's buffers
        self._wanted: I64Array = np.zeros(len(self.ends), np.int64)
        self._left: BoolArray = np.ones(len(self.ends), bool)  # pieces not tried in the present round
        self._complete = False
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def pinned_bytes(self) -> int:
        """Returns the bytes registered so far."""
        return int(self._sizes[self._pinned].sum())

    @property
    def mapping_s(self) -> float:
        """Returns how much longer a new context may take because of the pinned memory."""
        return self.pinned_bytes / (1 << 30) * _MAP_S_PER_GIB

    def start(self, context: int) -> None:
        """Starts a thread that pins, with this context current. Once there is one, later calls change nothing."""
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
        """Returns whether all that these copies touch of the arena is pinned. None of them crosses any of `ends`.
        Pieces that are not pinned are wanted from now on.
        """
        if self._complete or not len(copies):
            return True
        pieces = np.searchsorted(self.ends, host_side(direction, copies.src, copies.dst), side="right")
        missing = ~self._pinned[pieces]
        np.add.at(self._wanted, pieces[missing], copies.size[missing].astype(np.int64))
        return not missing.any()

    def stop(self) -> None:
        """Begins no further piece, and blocks until the present one has ended."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    # --- the thread that pins -------------------------------------------------------------------------

    def _work(self, context: int) -> None:
        """Runs until all is pinned, or until `stop`; any other failure is logged, and tried again."""
        while not self._stopping.is_set() and not self._complete:
            self._pin_all(context)
            self._complete = bool(self._pinned.all())
            if self._complete:
                self.failure = ""
                log.info("all of the arena is pinned, %s", format_bytes(self.pinned_bytes))
            else:
                self._stopping.wait(RETRY_S)

    def _pin_all(self, context: int) -> None:
        """Tries each piece once, until too many in a row were refused: the next call continues with the others."""
        refused = 0
        while self._left.any() and refused < REFUSALS_MAX and not self._stopping.is_set():
            piece = int(np.argmax(np.where(self._left, self._wanted + 1, 0)))  # of equals, the first
            self._left[piece] = False
            try:
                self._pin(piece, context)
                refused = 0
            except Exception as error:  # noqa: BLE001 nothing may end this thread: logged, and tried again
                self._fail(error)
                refused += 1
        if not self._left.any():
            self._left = ~self._pinned

    def _pin(self, piece: int, context: int) -> None:
        address, size_bytes = int(self._begins[piece]), int(self._sizes[piece])
        populate(address, size_bytes, 1, self._stopping)
        if not self._stopping.wait(PAUSE_S):
            self._driver.check("cuCtxSetCurrent", self._driver.set_current(context))
            try:
                self._driver.call("cuMemHostRegister", address, size_bytes, _PORTABLE)
            except CudaError as error:
                if error.name != _ALREADY:  # a failed call may have registered it all the same
                    raise
            self._pinned[piece] = True

    def _fail(self, error: Exception) -> None:
        """Records the failure; logs the first one."""
        reason = str(error) if isinstance(error, KvOffloadError) else f"{type(error).__name__}: {error}"
        if not self.failure:
            log.warning("some of the memory tier can't be pinned, and copies of it are slower: %s", reason)
        self.failure = reason
