"""The arena, registered with CUDA piece by piece, so that copies begin before all of it is.

One call for 512 GiB or more fails on present drivers, and takes tenths of a second a GiB; so pieces double in size from
small to `piece_bytes`. They end where slabs end, and no copy may reach over an end: the driver knows each piece alone.

Ownership: the event loop, but for `_work`, which runs in the thread that pins.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda.driver import Driver, host_side
from kvoffloadd.device.plan import Copies
from kvoffloadd.units import format_bytes

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvoffloadd.model import Direction, U64Array

log = logging.getLogger(__name__)

FIRST_BYTES = 1 << 30
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for the contexts of all GPUs


class Arena(NamedTuple):
    """The memory tier's memory: what is pinned, and the multiple at which pieces may end."""

    address: int
    size_bytes: int
    slab_bytes: int


def piece_ends(arena: Arena, piece_bytes: int) -> U64Array:
    """The addresses at which the pieces end: u64, ascending, the arena's end the last."""
    ends, at, size = [], 0, min(FIRST_BYTES, piece_bytes)
    while at < arena.size_bytes:
        at = min(at + max(size - size % arena.slab_bytes, arena.slab_bytes), arena.size_bytes)
        ends.append(arena.address + at)
        size = min(2 * size, piece_bytes)
    return np.array(ends, np.uint64)


def cut(copies: Copies, direction: Direction, ends: U64Array) -> Copies:
    """The same bytes in copies that reach over none of `ends` on this process's side."""
    host = host_side(direction, copies.src, copies.dst)
    first = np.searchsorted(ends, host, side="right")
    last = np.searchsorted(ends, host + copies.size - np.uint64(1), side="right")
    over = np.flatnonzero(first != last)
    if not len(over):
        return copies
    rows = [_pieces(copies, int(at), host, ends[first[at] : last[at]]) for at in over]
    kept = np.setdiff1d(np.arange(len(copies)), over, assume_unique=True)
    src, dst, size = (
        np.concatenate([column[kept], *(row[number] for row in rows)])
        for number, column in enumerate((copies.src, copies.dst, copies.size))
    )
    return Copies(src, dst, size, copies.descriptors)


def _pieces(copies: Copies, at: int, host: U64Array, ends: U64Array) -> tuple[U64Array, U64Array, U64Array]:
    """One copy in pieces that end at `ends`."""
    starts = np.concatenate([np.zeros(1, np.uint64), ends - host[at]])
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
        self._stopping = False

    @property
    def pinned_bytes(self) -> int:
        """Registered so far."""
        return self.pinned_to - self._arena.address

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
        self._stopping = True
        if self._thread is not None:
            self._thread.join()

    def unpin(self) -> None:
        """Ends all registrations; blocks. The caller has made a context current, and no copy runs."""
        at = self._arena.address
        for end in self.ends.tolist():
            if end > self.pinned_to:
                return
            self._driver.call("cuMemHostUnregister", at)
            at = end

    def _work(self, context: int) -> None:
        at = self._arena.address
        try:
            self._driver.check("cuCtxSetCurrent", self._driver.set_current(context))
            for end in self.ends.tolist():
                if self._stopping:
                    return
                self._driver.call("cuMemHostRegister", at, end - at, _PORTABLE)
                self._loop.call_soon_threadsafe(self._pinned, end)
                at = end
        except CudaError as error:
            reason = f"the arena can't be pinned beyond {format_bytes(at - self._arena.address)}: {error}"
            self._loop.call_soon_threadsafe(partial(self._fail, reason))
        except RuntimeError:  # the loop is closed: the process ends
            return

    def _pinned(self, end: int) -> None:
        self.pinned_to = end
        log.info("pinned %s of %s", format_bytes(self.pinned_bytes), format_bytes(self._arena.size_bytes))
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
