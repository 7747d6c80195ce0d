"""A direct-mapped table of what is remembered of keys, evicted ones too."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffloadd.model import BoolArray, U32Array

USES_MAX = 15
"""Uses of a key are counted up to here."""

_MARK_SHIFT = 20
_USES_MASK = np.uint16(USES_MAX)


class UseCounts:
    """How often a key was used, in 2 bytes per slot: 12 bits of the key's tag and 4 of count.

    Direct-mapped: a key takes its slot from the key that had it, so memory fades by itself, at a pace that scales with
    the number of slots. A wrong match (1 in 4,096 lookups of unknown keys) costs a wrong hint of order.
    """

    def __init__(self, min_slots: int) -> None:
        self.num_slots = slots_for(min_slots)
        self._entries = np.zeros(self.num_slots, np.uint16)

    def slots(self, tags: U32Array) -> U32Array:
        """Where keys with these tags are remembered."""
        return tags & np.uint32(self.num_slots - 1)

    def look_up(self, tags: U32Array, slots: U32Array) -> tuple[BoolArray, npt.NDArray[np.uint8]]:
        """Which of the keys are remembered, and their uses so far, 0 for the others."""
        difference = self._entries[slots] ^ _marks(tags)
        known = (difference > 0) & (difference <= _USES_MASK)  # 0: an empty slot looks like a mark of 0
        return known, (difference * known).astype(np.uint8)

    def record(self, tags: U32Array, slots: U32Array, uses: npt.NDArray[np.uint8]) -> None:
        """Remember 1..USES_MAX uses for each key."""
        self._entries[slots] = _marks(tags) | uses


def slots_for(min_slots: int) -> int:
    """The power of two that is at least this."""
    return 1 << max(0, min_slots - 1).bit_length()


def _marks(tags: U32Array) -> npt.NDArray[np.uint16]:
    return (tags >> np.uint32(_MARK_SHIFT)).astype(np.uint16) << np.uint16(4)
