"""The chunks of one job's copy, made as threads ask for them, and what was moved of them.

Ownership: any thread, through the methods. `_lock` guards every field that changes; it is never held while copies are
made, which is most of the work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvoffloadd.device.base import Work
from kvoffloadd.device.plan import CHUNK_DESCRIPTORS, Copies
from kvoffloadd.model import Direction

PIECE_DESCRIPTORS = 32_768
"""Made in one go, in some milliseconds: so many that threads seldom wait for each other meanwhile, and that what lies
side by side becomes large copies.
"""


class Chunks:
    """`cut` turns copies into chunks. `piece_bytes`: about what is made in one go, at most."""

    def __init__(
        self, work: Work, direction: Direction, cut: Callable[[Copies], list[Copies]], piece_bytes: int
    ) -> None:
        self.bytes = self.descriptors = self.copies = 0
        self._work = work
        self._direction = direction
        self._cut = cut
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._dropped = False
        self._made = deque(cut(work.make_all(direction)) if work.small else ())
        self._pieces = iter(()) if work.small else work.pieces(PIECE_DESCRIPTORS, piece_bytes)
        self._next = next(self._pieces, None)

    @property
    def turn_bytes(self) -> int:
        """About what a chunk moves, while nothing has been taken."""
        if self._made:
            return self._work.total_bytes // len(self._made)
        return min(self._piece_bytes, self._work.total_bytes * CHUNK_DESCRIPTORS // max(self._work.descriptors, 1))

    @property
    def complete(self) -> bool:
        """Whether all of the work was moved."""
        return self.bytes == self._work.total_bytes

    @property
    def left(self) -> bool:
        """Whether `take` has more."""
        return bool(self._made) or self._next is not None

    def share(self, threads: int) -> int:
        """How many of these threads find something to do; at least one, which tells the end."""
        return threads if self._next is not None else max(min(threads, len(self._made)), 1)

    def take(self) -> Copies | None:
        """A chunk that nobody else has; None: none is left. An empty one if no block of a piece is wanted: others have
        their turn before the next one. Blocks for as long as a piece takes to be made.
        """
        with self._lock:
            if self._made:
                return self._made.popleft()
            piece = self._next
            if piece is None:
                return None
            self._next = next(self._pieces, None)
        copies = self._work.make(self._direction, piece)
        made = self._cut(copies)
        with self._lock:
            if self._dropped:
                return None
            self._made.extend(made[1:])
            return made[0] if made else copies

    def note_moved(self, chunk: Copies) -> None:
        """Its bytes have arrived."""
        with self._lock:
            self.bytes += chunk.total_bytes
            self.descriptors += chunk.descriptors
            self.copies += len(chunk)

    def drop(self) -> None:
        """From now on none is left."""
        with self._lock:
            self._dropped = True
            self._made.clear()
            self._next = None
