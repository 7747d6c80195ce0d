"""What the agent needs of a store's client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from kvoffloadd.errors import KvOffloadError


class EngineError(KvOffloadError):
    """The engine can't start. `fault`: "operator" (settings, packages) or "store" (it does not answer)."""

    code = "engine"

    def __init__(self, reason: str, *, fault: str) -> None:
        super().__init__(reason)
        self.fault = fault  # type: ignore[misc]  # per instance here


@dataclass(frozen=True, slots=True)
class Region:
    """`size_bytes` of this process's memory, from `address` on. Page-aligned; mapped as long as the process lives."""

    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Where pieces of transfers lie: for engines that must register memory with their hardware."""

    arena: Region
    headers: Region


@dataclass(frozen=True, slots=True)
class ObjectTransfer:
    """An object, and where its bytes come from or go to: address and bytes of each piece, in the object's order, the
    header page first. Its size is the sum.
    """

    name: str
    pieces: list[tuple[int, int]]

    @property
    def size_bytes(self) -> int:
        """Returns the size of the object."""
        return sum(size for _, size in self.pieces)


class Engine(Protocol):
    """A client of a store.

    Called from several threads at once: one for `exists`, `get_threads` for `get`, `put_threads` for `put`, some for
    `read`, some for `write`, `renew` and `remove`, and one for `sweep`. Calls may take long: the daemon kills this
    process if one takes too long, but for `sweep`. What a call raises counts as FAILED for all that it names, and is
    logged.

    Codes are `agentframes.Code`. Any code but FAILED, and any success, says that nothing reads or writes the memory of
    the call any more: not even an earlier attempt of the same call that was given up. An engine that can't be sure
    answers FAILED.
    """

    stops_at_once: ClassVar[bool]
    """Whether FAILED says so, too, because giving up a transfer ends it. False: only the end of this process does."""

    def start(self, settings: Mapping[str, Any], memory: Memory) -> None:
        """Connect. Called once, before all else. Raises EngineError."""

    def about(self) -> str:
        """Name and version of the client, for people."""

    def exists(self, names: Sequence[str]) -> list[int]:
        """A `Presence` for each name."""

    def get(self, transfers: Sequence[ObjectTransfer]) -> list[int]:
        """Returns for each the object's bytes, all of which came, or a `Code`. Writes nowhere but to the pieces. An
        object of another size is SIZE.
        """

    def put(self, transfers: Sequence[ObjectTransfer]) -> list[int]:
        """Returns for each the object's bytes, or a `Code`. One that is there already stays as it is: a success."""

    def read(self, names: Sequence[str]) -> list[bytes | int | None]:
        """Returns for each the small object, None (there is none) or a `Code`. One that does not come within a second
        or so is FAILED, and holds up neither the others nor later calls.
        """

    def write(self, name: str, value: bytes, *, if_absent: bool, kept_s: float | None) -> int:
        """Write a small object: its bytes, or a `Code`. `if_absent`: one that is there stays, which is a success.
        Without it, the value takes the place of one that is there. `kept_s`: it is not evicted for so long, in as many
        copies as there can be, and may go after that. One that was kept, and stays, is renewed.
        """

    def renew(self, names: Sequence[str], kept_s: float) -> list[int]:
        """Returns for each 1 (it is there), 0 (there is none) or a `Code`. What is there is kept for `kept_s` from now
        on, or, with an engine that can't do that, as long as it is asked for. The engine may also remove what is kept
        no longer.
        """

    def remove(self, names: Sequence[str]) -> list[int]:
        """Return for each 1 (removed), 0 (there was none) or a `Code`: it may still be there, as it may while somebody
        reads it, and is to be removed again. Leases and pins keep nothing.
        """

    def sweep(self, prefix: str, after: str) -> tuple[int, str]:
        """Remove objects whose name begins so, some thousand or for half a second: how many, or a `Code`, and the
        `after` of the next step; empty: this was the last one. The first step has an empty one. What is written
        meanwhile may stay.
        """

    def close(self) -> None:
        """The process is about to end. May be called while other calls are under way."""
