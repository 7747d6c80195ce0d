"""A direct-mapped table of use counts, also of evicted keys."""

from __future__ import annotations

import numpy as np

from kvoffloadd.cache.policy.prompts import highest_from_here
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array

USES_MAX = 255
"""The limit of counted uses of a held key."""

REMEMBERED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192], np.uint8)
"""The use counts that the table can hold: half powers of two, rounded down."""

_MARK_SHIFT = 20
_CODE_MASK = np.uint16(len(REMEMBERED) - 1)
_CODES = (np.searchsorted(REMEMBERED, np.arange(USES_MAX + 1), side="right") - 1).astype(np.uint8)


class UseCounts:
    """Approximate use counts of keys, in 2 bytes per slot: 12 bits of the key's tag and 4 for one of `REMEMBERED`.

    Direct-mapped: a key replaces the previous key in its slot, so memory fades by itself, at a pace that scales with
    the number of slots. A wrong match (1 in 4,096 lookups of unknown keys) costs a wrong hint of order.
    """

    def __init__(self, min_slots: int) -> None:
        self.num_slots = slots_for(min_slots)
        self._entries = reserve_array((self.num_slots,), np.uint16, scattered=True)

    def look_up(self, tags: U32Array) -> tuple[BoolArray, U8Array]:
        """Returns which of the keys are remembered, and their uses, 0 for the others."""
        return self._compare(self._slots(tags), _marks(tags))

    def own(self, tags: U32Array) -> U32Array:
        """Returns the slots of the remembered keys among these."""
        slots = self._slots(tags)
        return slots[self._compare(slots, _marks(tags))[0]]

    def record(self, tags: U32Array, uses: U8Array) -> None:
        """Remembers 1..USES_MAX uses for each key."""
        self._entries[self._slots(tags)] = _marks(tags) | _CODES[uses]

    def count(
        self, tags: U32Array, uses: U8Array | None, begins: I64Array | None
    ) -> tuple[U32Array, BoolArray, U8Array]:
        """Counts one more use of each key of a prompt, in its order; `begins`: of several, as in `prompts`. `uses`: the
        previous counts; None: as remembered. Returns the slot of each key, whether it was remembered, and its uses now.
        """
        slots, marks = self._slots(tags), _marks(tags)
        known, remembered = self._compare(slots, marks)
        uses = np.minimum(remembered if uses is None else uses, np.uint8(USES_MAX - 1)) + np.uint8(1)
        # A key is used at least as often as any that follows it. This repairs forgotten counts: a key that looks unused
        # would be evicted first, and all keys behind it would be out of reach.
        uses = np.maximum.accumulate(uses[::-1])[::-1] if begins is None else highest_from_here(uses, begins)
        self._entries[slots] = marks | _CODES[uses]
        return slots, known, uses

    def _slots(self, tags: U32Array) -> U32Array:
        return tags & np.uint32(self.num_slots - 1)

    def _compare(self, slots: U32Array, marks: U16Array) -> tuple[BoolArray, U8Array]:
        difference = self._entries[slots] ^ marks
        known = (difference > 0) & (difference <= _CODE_MASK)  # 0: an empty slot looks like a mark of 0
        return known, REMEMBERED[difference * known]


def slots_for(min_slots: int) -> int:
    """Returns the smallest power of two that is at least this."""
    return 1 << max(0, min_slots - 1).bit_length()


def _marks(tags: U32Array) -> U16Array:
    return (tags >> np.uint32(_MARK_SHIFT)).astype(np.uint16) << np.uint16(4)
