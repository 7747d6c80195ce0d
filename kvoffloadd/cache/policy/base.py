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
    """The time by which policies judge the age of keys: how many keys were used, modulo 2**32. Policies whose keys are
    compared share one.
    """

    now: int = 0
    _learned_at: int = -1

    def take_turn(self) -> bool:
        """Whether a policy may learn now, which takes milliseconds: one of them at a time, so that no turn of the loop
        pays for all.
        """
        if self._learned_at == self.now:
            return False
        self._learned_at = self.now
        return True

    def advance(self, keys: int) -> None:
        """So many keys are used."""
        self.now = (self.now + keys) & TIME_MASK

    @property
    def long_ago(self) -> int:
        """So long ago that it stays so: half of what can be told."""
        return (self.now + (1 << 31)) & TIME_MASK

    def ages(self, stamps: U32Array) -> U32Array:
        """How long ago these times were."""
        ages: U32Array = np.uint32(self.now) - stamps  # modulo 2**32
        return ages


class Policy(Protocol):
    """Orders the resident keys of one user and one slot footprint for eviction.

    A key is a row number (u32, below the `max_rows` given at construction; rows are reused after `remove`). All calls
    come from the event loop. The caller guarantees that `insert` names rows it does not hold, that the other
    calls name rows it does, and that no call names a row twice.
    """

    def insert(self, rows: U32Array, hashes: U64Array, positions: U32Array, begins: I64Array | None = None) -> None:
        """Take new keys, given in prompt order.

        `hashes`: a well-mixed u64 per key, equal whenever the same key comes back (for ghost lists).
        `positions`: index of each key in its prompt's key list (0 = first block of the prompt).
        `begins`: where each of several prompts begins, the first one at 0, none of them empty; None: it is one. As a
        call for each of them, at a lower price.
        """

    def touch(self, rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        """A request used these keys, given in prompt order. `begins`: see `insert`."""

    def keep(self, rows: U32Array, *, soon: bool) -> None:
        """A client says of these keys, given in prompt order, that they will be used again soon, or not at all. This is
        no use, and only a hint, which a policy may ignore. It holds until the next use of each key.
        """

    def lose(self, rows: U32Array) -> None:
        """Something before these keys in their prompts is gone, so that they can't be restored. They are evicted before
        all others, until they are used.
        """

    def remove(self, rows: U32Array) -> None:
        """Forget keys: evicted, cleared or dropped."""

    def victims(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> U32Array:
        """Returns up to `wanted` distinct rows, first to be evicted first, all of them evictable when asked.

        Fewer only if fewer evictable rows exist, or if it met so many in use on the way that the next call is to go
        on. The rows stay held until `remove`: a caller that changes its mind has changed nothing but hints of order.
        `evictable` is a vectorised predicate: leased and in-flight keys say no. Rows that say no are set aside, so that
        no call meets them again: the caller that unholds a row calls `readmit`.
        """

    def worth(self, rows: U32Array) -> F64Array:
        """What each key earns in its slot: about as many hits in each unit of the clock's time. Comparable between
        policies of one kind that share a clock.
        """

    def readmit(self, rows: U32Array) -> None:
        """These rows, given in prompt order, are evictable again. Those that were set aside count as used now."""

    @property
    def num_aside(self) -> int:
        """Rows set aside; while there are none, `readmit` does nothing."""

    def resize(self, capacity_rows: int) -> None:
        """The tier is now expected to hold about this many rows; at least 1.

        A hint that sizes ghost lists and shares; evicts nothing. May forget what is remembered of keys not held. Raises
        MemoryError, having changed nothing.
        """

    def __len__(self) -> int:
        """Rows held."""
