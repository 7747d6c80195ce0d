"""Slot records: key, checksum, keyspace and part of each slot, in memory that outlives the process.

A slot's record is written when its payload is sealed, and erased before the slot, or the key, changes hands. A
record is 8 u64:

    0..3  the key          4..5  xxh3_128 of the payload, high half first
    6     keyspace | part << 16 | order << 32          7  check of the words before and of the place; 0: no record

The check is written last and erased first. Event loop only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array
from kvoffloadd.storage.arenafile import RECORD_WORDS

_CHECK = RECORD_WORDS - 1
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ORDERS = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class RecoveredSlots:
    """Whole records: arrays with one item for each."""

    pages: U32Array  # first page of the slot
    sizes: I64Array  # pages of the slot
    keys: U64Array
    digests: U64Array
    keyspaces: I64Array
    parts: I64Array
    orders: I64Array  # in which they were written
    damaged: int  # number of records that were not whole

    def __len__(self) -> int:
        return len(self.pages)

    def only(self, which: BoolArray | I64Array) -> RecoveredSlots:
        return RecoveredSlots(
            self.pages[which],
            self.sizes[which],
            self.keys[which],
            self.digests[which],
            self.keyspaces[which],
            self.parts[which],
            self.orders[which],
            self.damaged,
        )


class SlotRecords:
    """`records`: (pages of the arena, 8) u64 and `slabs`: u32 slot sizes in pages, both shared with a successor."""

    def __init__(self, records: U64Array, slabs: U32Array, slab_pages: int, seed: int) -> None:
        self._records = records
        self._slabs = slabs
        self._slab_pages = slab_pages
        self._seed = np.uint64(seed)
        self._order = 0

    def assign(self, slab: int, size: int) -> None:
        """Sets the slot size of this slab, which has no records, to `size` pages; 0: it has no slots."""
        self._slabs[slab] = size

    def write(self, pages: U32Array, keys: U64Array, digests: U64Array, keyspaces: I64Array, parts: I64Array) -> None:
        """Writes the records of slots with sealed payloads. They share an order number above all previous ones."""
        if not len(pages):
            return
        self._order = (self._order + 1) % _ORDERS
        places = self._places(pages)
        words = np.empty((len(pages), _CHECK), np.uint64)
        words[:, :4] = keys
        words[:, 4:6] = digests
        words[:, 6] = (keyspaces | parts << 16 | self._order << 32).astype(np.uint64)
        self._records[places, :_CHECK] = words
        self._records[places, _CHECK] = self._checks(places, words)

    def erase(self, pages: U32Array) -> None:
        """Erases the records of these slots."""
        self._records[self._places(pages), _CHECK] = 0

    def read(self) -> RecoveredSlots:
        """Returns the records of a predecessor; erases records that are not whole."""
        places, pages, sizes = self._slots(range(len(self._slabs)))
        written = self._records[places, _CHECK] != 0
        places, pages, sizes = places[written], pages[written], sizes[written]
        words = self._records[places]
        whole = words[:, _CHECK] == self._checks(places, words[:, :_CHECK])
        self._records[places[~whole], _CHECK] = 0
        words = words[whole]
        about = words[:, 6].astype(np.int64)
        orders = about >> 32 & 0xFFFFFFFF
        self._order = int(orders.max(initial=0))
        return RecoveredSlots(
            pages=pages[whole],
            sizes=sizes[whole],
            keys=words[:, :4],
            digests=words[:, 4:6],
            keyspaces=about & 0xFFFF,
            parts=about >> 16 & 0xFFFF,
            orders=orders,
            damaged=int((~whole).sum()),
        )

    def check(
        self, pages: U32Array, keys: U64Array, digests: U64Array, keyspaces: I64Array, parts: I64Array
    ) -> list[str]:
        """Audits records: compares them with the caller's data of these slots, which are sealed and can be found."""
        places = self._places(pages)
        words = self._records[places]
        same = (words[:, :4] == keys).all(axis=1) & (words[:, 4:6] == digests).all(axis=1)
        same &= words[:, 6] & np.uint64(0xFFFFFFFF) == (keyspaces | parts << 16).astype(np.uint64)
        same &= words[:, _CHECK] == self._checks(places, words[:, :_CHECK])
        wrong = int(np.count_nonzero(~same))
        return [f"slot records: {wrong} of sealed slots are wrong or missing"] if wrong else []

    def written(self, slabs: range) -> U32Array:
        """Returns the first pages, ascending, of the slots in these slabs that have a record."""
        places, pages, _ = self._slots(slabs)
        found: U32Array = pages[self._records[places, _CHECK] != 0]
        return found

    # --- internals ---

    def _slots(self, slabs: range) -> tuple[I64Array, U32Array, I64Array]:
        """Returns every slot of these slabs: place of its record, first page, pages."""
        places, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for slab in (slabs.start + np.flatnonzero(self._slabs[slabs.start : slabs.stop])).tolist():
            size, first = int(self._slabs[slab]), slab * self._slab_pages
            count = (min(first + self._slab_pages, len(self._records)) - first) // size
            places.append(np.arange(first, first + count))
            sizes.append(np.full(count, size))
        all_places, slot_pages = np.concatenate(places), np.concatenate(sizes)
        in_slab = all_places % self._slab_pages
        return all_places, (all_places - in_slab + in_slab * slot_pages).astype(np.uint32), slot_pages

    def _places(self, pages: U32Array) -> I64Array:
        """Returns the places of records: those of a slab are neighbours, so that records of large slots share pages."""
        wide = pages.astype(np.int64)
        slabs = wide // self._slab_pages
        first = slabs * self._slab_pages
        places: I64Array = first + (wide - first) // self._slabs[slabs].astype(np.int64)
        return places

    def _checks(self, places: I64Array, words: U64Array) -> U64Array:
        """Returns a u64 per record, never 0."""
        check: U64Array = places.astype(np.uint64) ^ self._seed
        for word in range(_CHECK):
            check = (check ^ words[:, word]) * _MIX
            check ^= check >> np.uint64(29)
        return check | np.uint64(1)
