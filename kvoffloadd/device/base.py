"""What a device is: a place where registered memory lives, and which copies between it and payloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffloadd.device.plan import Copies
    from kvoffloadd.model import Direction, Outcome


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """Memory of a worker that is mapped into this process, from `map` to `unmap`.

    Devices add what they need to unmap it. `size_bytes` is the kernel's or the driver's word, never the peer's.
    """

    kind: str
    size_bytes: int
    base_address: int


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How a copy ended. `bytes`, `descriptors` and `copies` count what was really moved (descriptors in proportion to
    bytes, when only a part was); `seconds` is from `submit` to the last access.

    `outcome`: DONE, CANCELLED, EXPIRED or FAILED. All but DONE leave destinations with old, new or mixed bytes.
    """

    outcome: Outcome
    bytes: int
    descriptors: int
    copies: int
    seconds: float
    reason: str = ""


class Copy(Protocol):
    """A copy under way, as `Device.submit` returns it."""

    def cancel(self) -> None:
        """Drops the chunks that have not begun. `done` comes after those that have; DONE if nothing was left to drop.

        No effect on a copy that has ended. Never calls `done` itself.
        """


class Device(Protocol):
    """All methods are for the event loop's thread."""

    kind: str

    def map(self, fd: int, peer_uid: int) -> Allocation:
        """Maps the whole of a worker's memory. `fd` stays the caller's. Commits no memory and does not wait.

        Effect: address space only; the caller counts it against the peer's caps, and owes an `unmap`.

        Raises:
            MemoryKindError: memory that may not be registered, with what to do about it.
            LimitError: the kernel has no address space for it.
        """

    async def unmap(self, allocation: Allocation) -> None:
        """Ends a mapping, off the loop. The caller guarantees that no copy uses it, and none will.

        Raises:
            UsageError: it is unmapped already, or another device's.
        """

    def submit(
        self,
        direction: Direction,
        copies: Copies,
        *,
        deadline_s: float,
        urgent: bool,
        done: Callable[[CopyResult], None],
    ) -> Copy:
        """Begins copies, and returns at once. The caller guarantees that all addresses are mapped until `done`, and
        that no two of the copies write a common byte.

        `done` is called exactly once, on the loop, never within this call, after the last access to any byte of
        `copies`. `deadline_s`: absolute, of `loop.time()`; chunks that have not begun by then are dropped. `urgent`:
        goes before all copies of its direction that are not, at the next end of a chunk. Stores and loads never wait
        for each other.

        Raises:
            UsageError: the device is closed.
        """

    def busy_s(self, now: float) -> float:
        """Seconds since the longest running chunk began; 0 if none runs. Chunks take milliseconds."""

    def gauges(self) -> dict[str, int | float]:
        """What it is doing now, by name, for metrics."""

    async def close(self, deadline_s: float) -> bool:
        """Drops all copies that have not begun, and waits at most `deadline_s` seconds for those that have.

        True: no thread touches any mapping any more. False: one does; the caller must end the process without
        unmapping. Mappings stay as they are.
        """
