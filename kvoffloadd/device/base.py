"""The interface of devices: a device maps registered memory, and copies between it and payloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvoffloadd.device.plan import Copies
from kvoffloadd.device.work import HashedWork, Piece
from kvoffloadd.model import Direction, Outcome, U64Array
from kvoffloadd.scheduling.lanes import DAEMON, Flow, Lane


@dataclass(slots=True, eq=False)
class Allocation:
    """A worker's memory that is mapped into this process, until `unmap`.

    Devices add the fields that they need to unmap it. `size_bytes` comes from the kernel or the driver, never from the
    peer. An allocation that is made in pieces grows until it is `whole`.
    """

    kind: str
    size_bytes: int
    base_address: int

    @property
    def whole(self) -> bool:
        """Returns whether all of it is mapped."""
        return True

    @property
    def charged_bytes(self) -> int:
        """Returns the bytes that the peer is charged for it, from the beginning."""
        return self.size_bytes


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How a copy ended. The numbers count what was really moved."""

    outcome: Outcome  # DONE, CANCELLED, EXPIRED or FAILED; all but DONE leave old, new or mixed bytes
    bytes: int
    descriptors: int  # in proportion to `bytes`, when only a part was moved
    copies: int
    seconds: float  # from `submit` to the last access
    reason: str = ""
    digests: U64Array | None = None  # (payloads, 2): of the bytes read, if it is DONE; None: it was not hashed

    @classmethod
    def not_begun(cls, outcome: Outcome, reason: str = "") -> CopyResult:
        """The result of a copy that was never begun."""
        return cls(outcome, 0, 0, 0, 0.0, reason)


class Work(Protocol):
    """The copies of a job, before any of them is made. Immutable: any thread may use it."""

    total_bytes: int
    descriptors: int
    small: bool  # the event loop may make all its copies

    def pieces(self, most_descriptors: int, most_bytes: int) -> Iterator[Piece]:
        """Yields all of it in pieces of about that size; a single descriptor is never split, however large."""

    def make(self, direction: Direction, piece: Piece) -> Copies:
        """Makes the copies of a piece."""

    def make_all(self, direction: Direction) -> Copies:
        """Makes the copies of all pieces."""

    def hashed(self, most_descriptors: int, most_bytes: int) -> HashedWork | None:
        """Returns the same work as a store that hashes its payloads while it copies them. None: a payload is copied
        only in part, or by more copies or bytes than these limits.
        """


@dataclass(frozen=True, slots=True, eq=False)
class CopyRequest:
    """What a device copies, its deadline, and the flow that pays for it. No two copies of a request write a common
    byte.
    """

    direction: Direction
    work: Work  # a load is hashed while it is copied if this is a `HashedWork`, see `Device.hashed_load_bytes`
    deadline_s: float  # absolute, of `loop.time()`: chunks that have not begun by then are dropped
    urgent: bool = False  # before most of the flow's other copies
    flow: Flow = DAEMON  # copies of one direction share the device by flow, chunk by chunk


class Copy(Protocol):
    """A copy under way, as `Device.submit` returns it."""

    def cancel(self) -> None:
        """Drops the chunks that have not begun. `done` is called after the others have ended; with DONE if nothing was
        left to drop.

        No effect on a copy that has ended. Never calls `done` itself.
        """

    def busy_s(self, now: float) -> float:
        """Returns the seconds since its longest running chunk began; 0 if none runs: the copy waits, or has ended.
        Chunks take milliseconds. `now`: of time.monotonic().
        """


class Device(Protocol):
    """Maps memory and copies. All methods are for the event loop's thread."""

    kind: str
    hashed_load_bytes: int  # the most bytes of a payload that a load can hash while it is copied; 0: it hashes none

    async def unmap(self, allocation: Allocation) -> None:
        """Ends a mapping, off the loop. The caller guarantees that no copy uses it, and none will.

        Raises:
            UsageError: it is unmapped already, or belongs to another device.
        """

    def submit(self, request: CopyRequest, done: Callable[[CopyResult], None]) -> Copy:
        """Begins a copy, and returns at once. The caller guarantees that all addresses are mapped until `done`.

        `done` is called exactly once, on the loop, never within this call, after the last access to any byte of the
        work. Stores and loads never wait for each other. A store is hashed while it is copied where that costs little.

        Raises:
            UsageError: the device is closed.
        """

    def busy_s(self, now: float) -> float:
        """Returns the seconds since the longest running chunk began; 0 if none runs. Chunks take milliseconds."""

    def gauges(self) -> dict[str, int | float | str]:
        """Returns the device's present activity by name, for `status` and metrics."""

    def lanes(self) -> list[Lane]:
        """Returns the lanes that copy, for `status`."""

    def watched_lanes(self) -> list[Lane]:
        """Returns those lanes that no user can hold up, except root and the daemon's own user: for the watchdog."""

    async def close(self, deadline_s: float) -> bool:
        """Drops all copies that have not begun, and waits at most `deadline_s` seconds for those that have.

        Returns True if no thread touches any mapping any more. False: one does; the caller must end the process without
        unmapping. Mappings stay as they are.
        """


class HostMemory(Device, Protocol):
    """The device of shared memory."""

    @property
    def others_late(self) -> bool:
        """Returns whether, after `close`, a thread still touches memory of a user other than root and the daemon's own.
        Then no memory may be unmapped.
        """

    def admit(self, uid: int) -> None:
        """Makes this user's threads; no others touch the user's memory. Raises RuntimeError: no thread can be made."""

    def measure(self, fd: int, peer_uid: int) -> int:
        """Returns the size in bytes of a worker's memory, before it is mapped. Does not wait.

        Raises:
            MemoryKindError: memory that may not be registered, with what to do about it.
            BusyError: memory of this user keeps its threads waiting.
        """

    async def map(self, fd: int, size_bytes: int, peer_uid: int) -> Allocation:
        """Maps the whole of a worker's memory, of the size that `measure` returned, in a thread of this user. The
        caller keeps `fd` and leaves it open. Commits no memory. The caller must await the end, which the user may
        delay.

        Effect: address space only; the caller counts it against the peer's caps, and must call `unmap`.

        Raises:
            MemoryKindError: memory that the kernel does not map.
            LimitError: the kernel has no address space for it.
            DrainingError: the device is closed, or was before its turn.
        """


class GpuMemory(Device, Protocol):
    """The device of one GPU. The driver's calls take milliseconds: they run off the loop."""

    async def open_handle(self, handle: bytes) -> Allocation:
        """Opens a CUDA IPC handle of 64 bytes. The caller must call `unmap` once for each opening of the same handle.

        Raises:
            MemoryKindError: the driver doesn't open it, with a possible reason.
            DeviceError: the driver fails otherwise.
        """

    async def reserve_chunks(self, total_bytes: int) -> Allocation:
        """Reserves address space for an allocation that comes in chunks. The caller must call `unmap`.

        Raises:
            MemoryKindError: no size that chunks can add up to.
            LimitError: there is no address space for it.
        """

    async def add_chunks(self, allocation: Allocation, fds: Sequence[int], sizes: Sequence[int]) -> None:
        """Maps the next chunks of it, in order: `sizes` in bytes. The caller keeps `fds`. Maps all of them or none.

        Raises:
            MemoryKindError: not chunks of memory of this GPU, or of other sizes, or more than was reserved.
        """


class Gpus(Protocol):
    """The GPUs of this machine; each is opened when it is first requested."""

    async def device(self, uuid: bytes) -> GpuMemory:
        """Returns the GPU with this name of 16 bytes.

        Raises:
            MemoryKindError: there is none, or this daemon does without CUDA; with what to do about it.
        """

    def devices(self) -> list[Device]:
        """Returns the devices in use."""

    async def close(self, deadline_s: float) -> bool:
        """Releases what belongs to no single GPU; the devices are closed. Returns False if that takes longer than
        `deadline_s` seconds.
        """
