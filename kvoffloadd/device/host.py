"""The `host` device: workers' shared memory, copied by this machine's cores.

Ownership
    HostDevice      the event loop alone, but for `mover`, which the lanes' threads call.
    HostCopy        the event loop, except for these, which the threads of its lane share:
        _chunks     filled before the first thread sees it; then popped by threads, cleared by whoever stops the copy.
        _moved      appended by threads; read by the loop when no thread is at the copy any more.
        _stop       why chunks are dropped; set by the loop (cancel, deadline) or by a thread (failure). A copy that
                    both ends and is stopped at the same time is judged by what was moved.
    All of them are changed by single operations on built-in types, which the GIL makes atomic.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import stat
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffloadd.device.base import Allocation, CopyResult
from kvoffloadd.device.copyruns import CopyRuns, copy_runs
from kvoffloadd.device.plan import Copies, split
from kvoffloadd.errors import MemoryKindError, UsageError
from kvoffloadd.lanes import AGAIN, Again, CancelledWork, Lane, Ticket
from kvoffloadd.model import Direction, Outcome
from kvoffloadd.sharedmem import Mapping, is_sealed_against_shrinking

if TYPE_CHECKING:
    from collections.abc import Callable

SPLIT_BYTES_MIN = 1 << 20
"""Smaller copies are not worth a second thread."""

_PIECE_BYTES_MIN = SPLIT_BYTES_MIN // 2
_URGENT, _ORDINARY = 0, 1
_TMPFS_MAGIC, _HUGETLBFS_MAGIC = 0x01021994, 0x958458F6
_ROOT_UID = 0


@dataclass(frozen=True, slots=True, eq=False)
class HostAllocation(Allocation):
    """An `Allocation` of the host device, which owns `mapping`."""

    mapping: Mapping


class HostDevice:
    """Copies with `copy_threads` threads for each direction, in chunks of at most `chunk_bytes`.

    `mover` performs a chunk's copies in a lane's thread; another one may be put in its place, to plant faults.
    """

    kind = "host"

    def __init__(
        self, loop: asyncio.AbstractEventLoop, copy_threads: int, chunk_bytes: int, *, mover: CopyRuns = copy_runs
    ) -> None:
        self.mover = mover
        self._loop = loop
        self._copy_threads = copy_threads
        self._chunk_bytes = chunk_bytes
        self._lanes = {direction: Lane(direction.value, copy_threads, loop) for direction in Direction}
        self._copies: set[HostCopy] = set()
        self._mapped: set[HostAllocation] = set()

    def map(self, fd: int, peer_uid: int) -> HostAllocation:
        """See `Device.map`. Takes memfds and files of tmpfs or hugetlbfs, opened for reading and writing.

        A peer that could shorten its file could kill the daemon by SIGBUS. So the file must be sealed against
        shrinking, unless the peer runs as the daemon's own user or root, who could kill it anyway.
        """
        size_bytes = _check_memory(fd, peer_uid)
        mapping = Mapping.map_fd(fd, size_bytes)
        allocation = HostAllocation(self.kind, size_bytes, mapping.address, mapping)
        self._mapped.add(allocation)
        return allocation

    async def unmap(self, allocation: Allocation) -> None:
        """See `Device.unmap`."""
        if not isinstance(allocation, HostAllocation) or allocation not in self._mapped:
            raise UsageError("not mapped, or no longer")
        self._mapped.remove(allocation)
        await self._loop.run_in_executor(None, allocation.mapping.close)

    def submit(
        self,
        direction: Direction,
        copies: Copies,
        *,
        deadline_s: float,
        urgent: bool,
        done: Callable[[CopyResult], None],
    ) -> HostCopy:
        """See `Device.submit`."""
        threads = self._copy_threads if copies.total_bytes >= SPLIT_BYTES_MIN else 1
        chunks = split(copies, threads, _PIECE_BYTES_MIN, chunk_bytes=self._chunk_bytes)

        def on_end(result: CopyResult) -> None:
            self._copies.discard(copy)
            done(result)

        copy = HostCopy(self, chunks, deadline_s, on_end)
        copy.start(self._loop, self._lanes[direction], min(threads, len(chunks)), _URGENT if urgent else _ORDINARY)
        self._copies.add(copy)
        return copy

    def busy_s(self, now: float) -> float:
        """See `Device.busy_s`."""
        return max(lane.oldest_running_s(now) for lane in self._lanes.values())

    def gauges(self) -> dict[str, int | float]:
        """`{store,load}_{queued,running}`: threads' turns that copies wait for, and have; `copies`; `mapped_bytes`."""
        gauges: dict[str, int | float] = {
            "copies": len(self._copies),
            "mapped_bytes": sum(allocation.size_bytes for allocation in self._mapped),
        }
        for direction, lane in self._lanes.items():
            gauges[f"{direction.value}_queued"] = lane.queued
            gauges[f"{direction.value}_running"] = lane.running
        return gauges

    async def close(self, deadline_s: float) -> bool:
        """See `Device.close`."""
        for copy in self._copies:
            copy.cancel()
        return all(await asyncio.gather(*(lane.close(deadline_s) for lane in self._lanes.values())))


class HostCopy:
    """One copy: some threads take its chunks, one at a time and in turn with other copies', until none is left."""

    def __init__(
        self, device: HostDevice, chunks: list[Copies], deadline_s: float, done: Callable[[CopyResult], None]
    ) -> None:
        self._device = device
        self._chunks = deque(chunks)
        self._moved: list[Copies] = []
        self._stop: Outcome | None = None
        self._num_chunks = len(chunks)
        self._deadline_s = deadline_s
        self._done = done
        self._reason = ""
        self._began_s = time.monotonic()
        self._tickets: list[Ticket] = []
        self._open_tickets = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop, lane: Lane, threads: int, urgent: int) -> None:
        """Queues it for some threads of `lane` (for one, if there is nothing to copy: its end comes the same way)."""
        self._open_tickets = max(threads, 1)
        self._tickets = [
            lane.submit(self._copy_chunk, self._on_ticket_end, urgent=urgent) for _ in range(self._open_tickets)
        ]
        self._timer = loop.call_at(self._deadline_s, self._drop, Outcome.EXPIRED)

    def cancel(self) -> None:
        """See `Copy.cancel`."""
        self._drop(Outcome.CANCELLED)

    def _drop(self, outcome: Outcome) -> None:
        self._stop = self._stop or outcome
        self._chunks.clear()
        for ticket in self._tickets:
            ticket.cancel()

    # --- the lane's threads -----------------------------------------------------------------------

    def _copy_chunk(self) -> Again | None:
        if time.monotonic() >= self._deadline_s:  # the loop's timer may be late
            self._stop = self._stop or Outcome.EXPIRED
            self._chunks.clear()
        try:
            chunk = self._chunks.popleft()
        except IndexError:
            return None
        try:
            self._device.mover(chunk.src, chunk.dst, chunk.size)
        except BaseException:
            self._stop = Outcome.FAILED
            self._chunks.clear()
            raise
        self._moved.append(chunk)
        return AGAIN if self._chunks else None

    # --- the event loop -----------------------------------------------------------------------------

    def _on_ticket_end(self, value: Again | BaseException | None) -> None:
        if isinstance(value, BaseException) and not isinstance(value, CancelledWork):
            self._reason = self._reason or f"{type(value).__name__}: {value}"
        self._open_tickets -= 1
        if self._open_tickets == 0:
            if self._timer is not None:
                self._timer.cancel()
            self._done(self._result())

    def _result(self) -> CopyResult:
        complete = len(self._moved) == self._num_chunks
        # Chunks are left behind without a reason only when the lane is closed, which is a cancel as well.
        outcome = Outcome.DONE if complete else self._stop or Outcome.CANCELLED
        return CopyResult(
            outcome,
            sum(chunk.total_bytes for chunk in self._moved),
            sum(chunk.descriptors for chunk in self._moved),
            sum(map(len, self._moved)),
            time.monotonic() - self._began_s,
            self._reason,
        )


def _check_memory(fd: int, peer_uid: int) -> int:
    """The size of a descriptor's memory in bytes; raises MemoryKindError if it may not be mapped."""
    try:
        status = os.fstat(fd)
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError as error:
        raise MemoryKindError(f"not a usable descriptor: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode) or _file_system(fd) not in (_TMPFS_MAGIC, _HUGETLBFS_MAGIC):
        raise MemoryKindError("not shared memory: send a memfd (memfd_create), or a file of /dev/shm or hugetlbfs")
    if flags & os.O_ACCMODE != os.O_RDWR:
        raise MemoryKindError("not open for reading and writing: open it with O_RDWR")
    if status.st_size == 0:
        raise MemoryKindError("has no bytes: set its size with ftruncate before sending it")
    if peer_uid not in (os.geteuid(), _ROOT_UID) and not is_sealed_against_shrinking(fd):
        raise MemoryKindError(
            "not sealed against shrinking, which the memory of other users must be: make it with "
            "memfd_create(MFD_ALLOW_SEALING) and seal it with fcntl(F_ADD_SEALS, F_SEAL_SHRINK)"
        )
    return status.st_size


def _file_system(fd: int) -> int:
    """The magic number of the file system that holds a file; 0 if it can't be told."""
    buffer = (ctypes.c_long * 32)()  # struct statfs has 120 bytes; f_type is its first word
    if ctypes.CDLL(None).fstatfs(fd, ctypes.byref(buffer)) != 0:
        return 0
    return int(buffer[0])
