"""Pinning the arena: it is registered with CUDA piece by piece, so that copies begin before all of it is.

A call takes some 0.05 s a GiB (docs/benchmarks/gpu.md), and as long as it does the driver keeps copies and other
processes of this host waiting, and the kernel every thread of this one that maps memory. So pieces are small, their
pages are there before the driver is asked for them (else the call would provide them, a second a GiB), and between two
of them others have their turn.
They double in size from `FIRST_BYTES` to `piece_bytes` and end where slabs end, unless slabs are larger. No copy may
reach over an end: the driver knows each piece alone.

Nothing is unpinned: the process's end does that, and no deadline holds for it.

Ownership: the event loop, but for `_work`, which runs in the thread that pins.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda.driver import Driver, host_side
from kvoffloadd.device.plan import Copies
from kvoffloadd.errors import ResourceError
from kvoffloadd.model import PAGE_BYTES, Direction, U64Array
from kvoffloadd.sharedmem import populate
from kvoffloadd.units import format_bytes

log = logging.getLogger(__name__)

FIRST_BYTES = 128 << 20
PAUSE_S = 0.01
"""A pause between two pieces, so that others that wait for the driver get it."""
_MAP_S_PER_GIB = 0.1
"""How long a driver may take to give a new context what is pinned, on top of the context itself."""
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
    """What is pinned so far. `on_piece(number, of)` may be None."""

    def __init__(self, loop: asyncio.AbstractEventLoop, driver: Driver, arena: Arena, piece_bytes: int) -> None:
        self.ends = piece_ends(arena, piece_bytes)
        self.pinned_to = arena.address
        self.failure = ""
        self._arena = arena
        self._loop = loop
        self._driver = driver
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def pinned_bytes(self) -> int:
        """Bytes registered so far."""
        return self.pinned_to - self._arena.address

    @property
    def mapping_s(self) -> float:
        """How much longer a new context may take for what is pinned."""
        return self.pinned_bytes / (1 << 30) * _MAP_S_PER_GIB

    def start(self, context: int) -> None:
        """Begins, in a thread of its own, with this context current; later calls change nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(context,), name="kvo-pin", daemon=True)
            self._thread.start()

    def covers(self, end: int) -> bool:
        """Whether everything below this address is pinned, or never will be."""
        return end <= self.pinned_to or bool(self.failure)

    def when(self, end: int, do: Callable[[], None]) -> None:
        """Calls `do` on the loop once `covers(end)`."""
        self._waiting.append((end, do))

    def stop(self) -> None:
        """Begins no further piece, and blocks until the one under way has ended."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self, context: int) -> None:
        at = self._arena.address
        try:
            self._driver.check("cuCtxSetCurrent", self._driver.set_current(context))
            for end in self.ends.tolist():
                populate(at, end - at, 1, self._stopping)
                if self._stopping.wait(PAUSE_S):
                    return
                self._driver.call("cuMemHostRegister", at, end - at, _PORTABLE)
                self._loop.call_soon_threadsafe(self._pinned, end)
                at = end
        except (CudaError, ResourceError) as error:
            reason = f"the arena can't be pinned beyond {format_bytes(at - self._arena.address)}: {error}"
            self._loop.call_soon_threadsafe(partial(self._fail, reason))
        except RuntimeError:  # the loop is closed: the process ends
            return

    def _pinned(self, end: int) -> None:
        self.pinned_to = end
        if self.pinned_bytes == self._arena.size_bytes:
            log.info("all of the arena is pinned, %s", format_bytes(self.pinned_bytes))
        self._release()

    def _fail(self, reason: str) -> None:
        log.error("%s", reason)
        self.failure = reason
        self._release()

    def _release(self) -> None:
        ready = [do for end, do in self._waiting if self.covers(end)]
        self._waiting = [(end, do) for end, do in self._waiting if not self.covers(end)]
        for do in ready:
            do()
