"""The agent's interface to a store's client."""

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
    """The memory of the pieces of transfers: for engines that must register memory with their hardware."""

    arena: Region
    headers: Region


@dataclass(frozen=True, slots=True)
class ObjectTransfer:
    """An object, and the places of its bytes: address and bytes of each piece, in the object's order, the header page
    first. Its size is the sum.
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
    process if one takes too long, except `sweep`. If a call raises, all its names count as FAILED, and the exception is
    logged.

    Codes are `agentwire.frames.Code`. Any code except FAILED, and any success, guarantees that nothing reads or writes
    the memory of the call any more: not even an earlier attempt of the same call that was given up. An engine without
    that certainty answers FAILED.
    """

    stops_at_once: ClassVar[bool]
    """Whether FAILED guarantees it, too, because giving up a transfer ends it. False: only the end of this process
    does.
    """

    def start(self, settings: Mapping[str, Any], memory: Memory) -> None:
        """Connects. Called once, before all else. Raises EngineError."""

    def about(self) -> str:
        """Returns name and version of the client, for people."""

    def exists(self, names: Sequence[str]) -> list[int]:
        """Returns a `Presence` for each name."""

    def get(self, transfers: Sequence[ObjectTransfer]) -> list[int]:
        """Returns for each the object's bytes, all of them received, or a `Code`. Writes only to the pieces. An object
        of another size is SIZE.
        """

    def put(self, transfers: Sequence[ObjectTransfer]) -> list[int]:
        """Returns for each the object's bytes, or a `Code`. An existing object stays unchanged: a success."""

    def read(self, names: Sequence[str]) -> list[bytes | int | None]:
        """Returns for each the small object, None (there is none) or a `Code`. An object that takes longer than about a
        second is FAILED, and delays neither the others nor later calls.
        """

    def write(self, name: str, value: bytes, *, if_absent: bool, kept_s: float | None) -> int:
        """Writes a small object. Returns its bytes, or a `Code`. `if_absent`: an existing one stays, which is a
        success. Without it, the value replaces an existing one. `kept_s`: the time in which it is not evicted, in as
        many copies as possible; it may go after that. An existing kept one that stays is renewed.
        """

    def renew(self, names: Sequence[str], kept_s: float) -> list[int]:
        """Returns for each 1 (it is there), 0 (there is none) or a `Code`. Existing objects are kept for `kept_s` from
        now on, or, by an engine that can't do that, as long as hosts ask for them. The engine may also remove expired
        objects.
        """

    def remove(self, names: Sequence[str]) -> list[int]:
        """Returns for each 1 (removed), 0 (there was none) or a `Code`: it may still be there, for example while a
        client reads it, and must be removed again. Leases and pins keep nothing.
        """

    def sweep(self, prefix: str, after: str) -> tuple[int, str]:
        """Removes objects with names of this prefix, some thousand or for half a second. Returns how many, or a `Code`,
        and the `after` of the next step; empty: this was the last one. The first step has an empty one. Objects written
        meanwhile may stay.
        """

    def close(self) -> None:
        """Closes the engine, as the process is about to end. May be called while other calls are under way."""
