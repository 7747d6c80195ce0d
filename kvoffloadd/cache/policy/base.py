"""The interface of eviction policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvoffloadd.model import BoolArray, F64Array, I64Array, U32Array, U64Array

TIME_MASK = 0xFFFFFFFF


@dataclass(slots=True)
class Clock:
    """The time by which policies judge the age of keys: the number of used keys, modulo 2**32. Policies share one clock
    if their keys are compared.
    """

    now: int = 0
    _learned_at: int = -1

    def take_turn(self) -> bool:
        """Returns whether a policy may learn now, which takes milliseconds: one policy at a time, so that no turn of
        the loop pays for all.
        """
        if self._learned_at == self.now:
            return False
        self._learned_at = self.now
        return True

    def advance(self, keys: int) -> None:
        """Counts used keys."""
        self.now = (self.now + keys) & TIME_MASK

    @property
    def long_ago(self) -> int:
        """A time so far back that it stays in the past: half of the range of the clock."""
        return (self.now + (1 << 31)) & TIME_MASK

    def ages(self, stamps: U32Array) -> U32Array:
        """Returns how long ago these times were."""
        ages: U32Array = np.uint32(self.now) - stamps  # modulo 2**32
        return ages


class Policy(Protocol):
    """Orders the resident keys of one user and one slot footprint for eviction.

    A key is a row number (u32, below the `max_rows` given at construction; rows are reused after `remove`). All calls
    come from the event loop. The caller guarantees that `insert` names rows it does not hold, that the other
    calls name rows it does, and that no call names a row twice.
    """

    def insert(self, rows: U32Array, hashes: U64Array, positions: U32Array, begins: I64Array | None = None) -> None:
        """Takes new keys, given in prompt order.

        `hashes`: a well-mixed u64 per key, equal whenever the same key comes back (for ghost lists).
        `positions`: index of each key in its prompt's key list (0 = first block of the prompt).
        `begins`: where each of several prompts begins, the first one at 0, none of them empty; None: there is one
        prompt. Equivalent to a call for each prompt, at a lower price.
        """

    def touch(self, rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        """Notes that a request used these keys, given in prompt order. `begins`: see `insert`."""

    def keep(self, rows: U32Array, *, soon: bool) -> None:
        """Notes that a client expects these keys, given in prompt order, to be used again soon, or not at all. This is
        no use, and only a hint, which a policy may ignore. It holds until the next use of each key.
        """

    def lose(self, rows: U32Array) -> None:
        """Notes that keys before these in their prompts are gone, so that these can't be restored. They are evicted
        before all others, until they are used.
        """

    def set_aside(self, rows: U32Array) -> None:
        """Takes rows that `evictable` rejects out of the way of `victims`, as it would do itself when it meets them,
        until `readmit` or their next use.
        """

    def remove(self, rows: U32Array) -> None:
        """Forgets keys: evicted, cleared or dropped."""

    def victims(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> U32Array:
        """Returns up to `wanted` distinct rows, first to be evicted first, all of them evictable when asked.

        Fewer only if fewer evictable rows exist, or if the search met too many rows in use for one call. The rows stay
        held until `remove`: a caller that drops its plan has changed nothing but hints of order. `evictable` is a
        vectorised predicate that rejects leased and in-flight keys. Rejected rows are set aside, so that no call meets
        them again: the caller that unholds a row calls `readmit`.
        """

    def worth(self, rows: U32Array) -> F64Array:
        """Returns what each key earns in its slot: the approximate hits in each unit of the clock's time. Comparable
        between policies of one kind that share a clock.
        """

    def readmit(self, rows: U32Array) -> None:
        """Makes these rows, given in prompt order, evictable again. Rows that were set aside count as used now."""

    @property
    def num_aside(self) -> int:
        """The number of rows set aside; while it is 0, `readmit` does nothing."""

    def resize(self, capacity_rows: int) -> None:
        """Adapts to a tier that is expected to hold about this number of rows; at least 1.

        A hint that sizes ghost lists and shares; evicts nothing. May forget keys that are not held. Raises MemoryError,
        with nothing changed.
        """

    def __len__(self) -> int:
        """Returns the number of rows held."""
