"""A bound on the memory for large frames of one uid that have begun to come: a connection that finds it taken is read
again when there is room. Otherwise each of its sessions could make the daemon hold the beginning of the largest frame.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

ROOM_BYTES = 64 << 20
"""The room of one uid: sixteen of the largest frames."""
LARGE_BYTES = 256 << 10
"""Smaller frames need none: as much is read at once."""


class Receiver(Protocol):
    """A connection that waits for room."""

    def __hash__(self) -> int: ...

    def go_on(self) -> None:
        """There is room now, and it is the receiver's."""


class FrameRoom:
    """The room of one uid, and the connections that wait for it. Event loop only."""

    def __init__(self, room_bytes: int = ROOM_BYTES) -> None:
        self._room_bytes = room_bytes
        self._taken: dict[Hashable, int] = {}
        self._waiting: dict[Receiver, int] = {}

    @property
    def used_bytes(self) -> int:
        return sum(self._taken.values())

    def take(self, receiver: Receiver, frame_bytes: int) -> bool:
        """Take room for one frame, until `give`. False: there is none; `receiver.go_on` is called when there is. A
        receiver that has room, or waits for it, keeps its place.
        """
        if receiver in self._taken:
            return True
        self._waiting.setdefault(receiver, frame_bytes)
        if next(iter(self._waiting)) is receiver and self.used_bytes + frame_bytes <= self._room_bytes:
            self._taken[receiver] = self._waiting.pop(receiver)
            return True
        return False

    def give(self, receiver: Receiver) -> None:
        """Free the room: the frame has come whole, or never will. Does nothing for a receiver without room."""
        waited = self._waiting.pop(receiver, 0)
        if not self._taken.pop(receiver, 0) and not waited:
            return
        while self._waiting:
            first, size = next(iter(self._waiting.items()))
            if self.used_bytes + size > self._room_bytes:
                return
            self._taken[first] = self._waiting.pop(first)
            first.go_on()
