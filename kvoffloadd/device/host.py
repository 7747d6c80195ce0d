"""The `host` device: workers' shared memory, copied by this machine's cores.

A user can make the kernel block any thread that maps, unmaps or touches the user's memory for an unlimited time: for
example by punching a hole slowly. So each user has separate threads for all three, and the event loop does none of
them.

Ownership: the event loop alone, except for `mover`, which the lanes' threads call.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from kvoffloadd.device.base import Allocation, CopyRequest, CopyResult
from kvoffloadd.device.chunked import ChunkedCopy, Chunks, Mover, Turn, lane_gauges
from kvoffloadd.device.copyruns import copy_payloads, copy_runs
from kvoffloadd.device.peruser import PerUser
from kvoffloadd.device.plan import Copies, PayloadCopies, split, split_payloads
from kvoffloadd.device.userfaultguard import UserfaultGuard
from kvoffloadd.device.work import HASHED_DESCRIPTORS, HashedWork
from kvoffloadd.errors import BusyError, DrainingError, MemoryKindError, UsageError
from kvoffloadd.linux.sharedmem import Mapping, is_sealed_against_shrinking
from kvoffloadd.model import Direction, Outcome
from kvoffloadd.scheduling.lanes import TURN_BYTES, CancelledWork, Lane

SPLIT_BYTES_MIN = 1 << 20
"""Smaller copies are not worth a second thread."""

MAP_THREADS = 2
"""The threads of each user. They are made in advance: memory must be unmapped even when no thread can be made
any more.
"""

MAP_STUCK_S = 5.0
"""When all threads of a user have been busy with one mapping each for this long, the user can map nothing more
meanwhile. To unmap some hundred GiB takes one thread as long.
"""

_MAP_URGENT, _UNMAP_URGENT = 0, 1

_PIECE_BYTES_MIN = SPLIT_BYTES_MIN // 2


@dataclass(slots=True, eq=False)
class HostAllocation(Allocation):
    """An `Allocation` of the host device, which owns `mapping`. `uid`: the user with the threads that map and
    unmap it.
    """

    mapping: Mapping
    uid: int


class _Threads(NamedTuple):
    """The threads that touch one user's memory."""

    copying: dict[Direction, Lane]
    mapping: Lane

    @property
    def lanes(self) -> list[Lane]:
        return [*self.copying.values(), self.mapping]


class HostDevice:
    """Copies with `copy_threads` threads for each user and direction, in chunks of at most `chunk_bytes`, and never
    more than a turn of a lane.

    `mover` performs a chunk's copies in a lane's thread, and may be replaced, to plant faults. `holes`: forbids holes
    in mapped memory, and is owned by the device; None: holes are filled. `trusted`: see `PerUser`. `others_late`: after
    `close`, whether a thread still touches memory of another user.
    """

    kind = "host"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        copy_threads: int,
        chunk_bytes: int,
        *,
        holes: UserfaultGuard | None = None,
        trusted: Collection[int] | None = None,
    ) -> None:
        self.others_late = False
        self.mover: Mover = copy_chunk
        self._holes = holes
        self._loop = loop
        self._copy_threads = copy_threads
        self._chunk_bytes = min(chunk_bytes, TURN_BYTES)
        self.hashed_load_bytes = self._chunk_bytes // 2 if copy_payloads is not None else 0
        self._threads = PerUser(self._make_threads, trusted)
        self._copies: set[ChunkedCopy] = set()
        self._mapped: set[HostAllocation] = set()

    def _make_threads(self, suffix: str) -> _Threads:
        made: dict[str, Lane] = {}
        counts = {direction.value: self._copy_threads for direction in Direction} | {"map": MAP_THREADS}
        try:
            for name, threads in counts.items():
                made[name] = Lane(f"{name}{suffix}", threads, self._loop)
        except BaseException:
            for lane in made.values():
                lane.dismiss()
            raise
        return _Threads({direction: made[direction.value] for direction in Direction}, made["map"])

    def admit(self, uid: int) -> None:
        """See `HostMemory.admit`."""
        self._threads.admit(uid)

    def measure(self, fd: int, peer_uid: int) -> int:
        """See `HostMemory.measure`. Takes memfds and files of tmpfs or hugetlbfs, opened for reading and writing.

        A page that is gone fails the job that touches it, see `copyruns`. Even so, the file must be sealed against
        shrinking, unless the peer runs as the daemon's own user or root, and so could kill the daemon anyway.
        """
        is_trusted = peer_uid in self._threads.trusted
        busy = self._threads.of(peer_uid).mapping
        all_busy = not is_trusted and busy.running == busy.threads
        if all_busy and busy.newest_running_s(time.monotonic()) > MAP_STUCK_S:
            raise BusyError(
                f"memory that uid {peer_uid} has shared keeps the kernel waiting (a hole is being punched into it); "
                "nothing more is mapped until that ends"
            )
        return _check_memory(fd, is_trusted=is_trusted)

    async def map(self, fd: int, size_bytes: int, peer_uid: int) -> HostAllocation:
        """See `HostMemory.map`."""
        lane = self._threads.of(peer_uid).mapping
        try:
            mapping = await lane.perform(partial(self._map, fd, size_bytes), urgent=_MAP_URGENT)
        except (CancelledWork, UsageError):  # closed, before or meanwhile
            raise DrainingError("the daemon is shutting down and maps nothing more") from None
        allocation = HostAllocation(self.kind, size_bytes, mapping.address, mapping, peer_uid)
        self._mapped.add(allocation)
        return allocation

    def _map(self, fd: int, size_bytes: int) -> Mapping:
        """Maps the file; runs in a thread."""
        mapping = Mapping.map_fd(fd, size_bytes)
        if self._holes is not None:
            try:
                self._holes.forbid(mapping)
            except BaseException:
                mapping.close()
                raise
        return mapping

    async def unmap(self, allocation: Allocation) -> None:
        """See `Device.unmap`. Remaining mappings end with the process when the device is closed."""
        if not isinstance(allocation, HostAllocation) or allocation not in self._mapped:
            raise UsageError("not mapped, or already unmapped")
        self._mapped.remove(allocation)
        lane = self._threads.of(allocation.uid).mapping
        with contextlib.suppress(CancelledWork):
            if not lane.closing:
                await lane.perform(allocation.mapping.close, urgent=_UNMAP_URGENT)

    def submit(self, request: CopyRequest, done: Callable[[CopyResult], None]) -> ChunkedCopy:
        """See `Device.submit`."""
        direction, work = request.direction, request.work
        threads = self._copy_threads if work.total_bytes >= SPLIT_BYTES_MIN else 1
        piece_bytes = min(self._chunk_bytes, max(work.total_bytes // threads, _PIECE_BYTES_MIN))
        pieces, cutter = threads if work.small else 1, split
        hashed = work if isinstance(work, HashedWork) else None
        if direction is Direction.STORE and copy_payloads is not None:
            # Payloads are not divided, so only if all threads have about the same amount: at most a quarter more.
            most_bytes = piece_bytes if threads == 1 else min(self._chunk_bytes // 2, work.total_bytes // (4 * threads))
            hashed = work.hashed(HASHED_DESCRIPTORS, most_bytes)
        if hashed is not None:
            work, cutter, done = hashed, split_payloads, partial(_end_hashed, done, hashed)
        cut = partial(cutter, pieces=pieces, min_piece_bytes=_PIECE_BYTES_MIN, chunk_bytes=self._chunk_bytes)
        chunks = Chunks(work, direction, cut, piece_bytes)
        lane = self._threads.of(request.flow.uid).copying[direction]
        turn = Turn(self._loop, lane, threads, request.urgent, request.flow)
        copy = ChunkedCopy(chunks, self.mover, turn, request.deadline_s, done, self._copies)
        copy.start()
        return copy

    def busy_s(self, now: float) -> float:
        """See `Device.busy_s`."""
        return max(lane.oldest_running_s(now) for threads in self._threads for lane in threads.copying.values())

    def gauges(self) -> dict[str, int | float | str]:
        """Returns `{store,load}_{queued,running}`: turns of threads that copies wait for, and have; `copies`;
        `mapped_bytes`.
        """
        gauges: dict[str, int | float | str] = {
            "copies": len(self._copies),
            "mapped_bytes": sum(allocation.size_bytes for allocation in self._mapped),
        }
        return gauges | lane_gauges(threads.copying for threads in self._threads)

    def lanes(self) -> list[Lane]:
        """See `Device.lanes`."""
        return [lane for threads in self._threads for lane in threads.copying.values()]

    def watched_lanes(self) -> list[Lane]:
        """See `Device.watched_lanes`."""
        return list(self._threads.common.copying.values())

    async def close(self, deadline_s: float) -> bool:
        """See `Device.close`. Threads that touch memory of another user are waited for no longer than the others, and
        only make `others_late`.
        """
        for copy in self._copies:
            copy.cancel()
        common, others = self._threads.common, self._threads.others()
        lanes = [lane for threads in (common, *others) for lane in threads.copying.values()]
        ended = await asyncio.gather(*(lane.close(deadline_s) for lane in lanes))
        ours = len(common.copying)
        # Mappings are closed first: a thread that hangs in an unmap keeps no copy.
        await asyncio.gather(*(self._close_mapping(threads.mapping, deadline_s) for threads in self._threads))
        self.others_late = not all(ended[ours:])
        return all(ended[:ours])

    @staticmethod
    async def _close_mapping(lane: Lane, deadline_s: float) -> None:
        with contextlib.suppress(TimeoutError, UsageError):  # it hangs; it is closed already
            async with asyncio.timeout(deadline_s):
                await lane.perform(_nothing, urgent=_UNMAP_URGENT)
        await lane.close(deadline_s)


def copy_chunk(chunk: Copies) -> None:
    """Performs a chunk's copies for a HostDevice."""
    if isinstance(chunk, PayloadCopies) and copy_payloads is not None:
        copy_payloads(chunk.src, chunk.dst, chunk.size, chunk.counts, chunk.digests)
    else:
        copy_runs(chunk.src, chunk.dst, chunk.size)


def _end_hashed(done: Callable[[CopyResult], None], work: HashedWork, result: CopyResult) -> None:
    done(replace(result, digests=work.found()) if result.outcome is Outcome.DONE else result)


def _check_memory(fd: int, *, is_trusted: bool) -> int:
    """Returns the size of a descriptor's memory in bytes; raises MemoryKindError if it may not be mapped.

    No call here may reach a file system that the peer runs, which may never answer, before the file is known to be
    memory: the kernel reports seals without it, and only memory (memfds, files of tmpfs and hugetlbfs) has them.
    """
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError as error:
        raise MemoryKindError(f"not a usable descriptor: {error.strerror}") from None
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        status = os.fstat(fd)
    except OSError:
        raise _not_memory() from None
    if not stat.S_ISREG(status.st_mode):
        raise _not_memory()
    if flags & os.O_ACCMODE != os.O_RDWR:
        raise MemoryKindError("not open for reading and writing: open it with O_RDWR")
    if status.st_size == 0:
        raise MemoryKindError("has no bytes: set its size with ftruncate before sending it")
    if not is_trusted and not is_sealed_against_shrinking(fd):
        raise MemoryKindError(
            "not sealed against shrinking, which the memory of other users must be: make it with "
            "memfd_create(MFD_ALLOW_SEALING) and seal it with fcntl(F_ADD_SEALS, F_SEAL_SHRINK)"
        )
    return status.st_size


def _nothing() -> None:
    """The unmapping lane's last work."""


def _not_memory() -> MemoryKindError:
    return MemoryKindError("not shared memory: send a memfd (memfd_create), or a file of /dev/shm or hugetlbfs")
