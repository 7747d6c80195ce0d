"""The memory tier: an arena of shared memory, cut into slabs of equal slots.

A slot is named by the number of its first 4 KiB page in the arena, so its address is arithmetic. Slot sizes are exact:
a payload's bytes rounded up to pages. A slab belongs to one slot size at a time; a slab with only free slots can change
its size. This module knows places, not keys: the contents of a slot are the caller's `owner` number.

Event loop only, except `prefault`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvoffloadd.errors import UsageError
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import PAGE_BYTES, I64Array, U32Array, U64Array
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.slotrecords import SlotRecords


@dataclass(slots=True)
class _Size:
    """The slabs and free slots of one slot size. `free[:num_free]` is a stack of first pages, taken from the top."""

    pages: int
    slabs: set[int] = field(default_factory=set)
    free: U32Array = field(default_factory=lambda: np.zeros(64, np.uint32))
    num_free: int = 0

    def push(self, pages: U32Array) -> None:
        end = self.num_free + len(pages)
        if end > len(self.free):
            self.free = np.concatenate([self.free, np.zeros(end, np.uint32)])
        self.free[self.num_free : end] = pages
        self.num_free = end

    def pop(self, count: int) -> U32Array:
        self.num_free -= count
        return self.free[self.num_free : self.num_free + count][::-1].copy()


class MemoryTier:
    """`capacity_bytes` of pinnable shared memory. The last slab may be short, so that any capacity is used whole."""

    def __init__(self, capacity_bytes: int, slab_bytes: int, pool: ArenaFile | None = None) -> None:
        """Owns the `pool`, which has this capacity; without one, a new one is made. The slots of an old pool are free,
        except those that `restore` names, which comes first then.
        """
        self.num_pages = capacity_bytes // PAGE_BYTES
        self.slab_pages = min(slab_bytes // PAGE_BYTES, self.num_pages)
        self.num_slabs = -(-self.num_pages // self.slab_pages)
        self.pool = pool or ArenaFile.make(self.num_pages * PAGE_BYTES, self.slab_pages * PAGE_BYTES)
        self.address: Final = self.pool.address  # of the arena's first byte
        self.slot_records = SlotRecords(self.pool.records, self.pool.slabs, self.slab_pages, self.pool.seed)
        self._owner: U32Array = reserve_array((self.num_pages,), np.uint32)  # owner + 1 of the slot at its first page
        self._slab_size: I64Array = np.zeros(self.num_slabs, np.int64)  # slot size in pages; 0: unassigned
        self._slab_used: I64Array = np.zeros(self.num_slabs, np.int64)
        self.slab_touched: U64Array = np.zeros(self.num_slabs, np.uint64)  # when one of its slots was last used
        self._tick = 0  # counts uses
        self._unassigned: list[int] = list(range(self.num_slabs - 1, -1, -1))
        self._sizes: dict[int, _Size] = {}
        self._closed = threading.Event()
        self._prefaulting = threading.Lock()  # held while pages are touched, which requires the mapping

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the arena."""
        return self.num_pages * PAGE_BYTES

    def prefault(self, threads: int) -> None:
        """Makes the kernel provide every page now. Blocks; call it off the loop. Safe while the arena is in use;
        `close` ends it. Raises ResourceError if memory is lacking.
        """
        with self._prefaulting:
            if self._closed.is_set():  # the arena was gone before this thread ran
                return
            self.pool.populate(threads, self._closed)
        if not self._closed.is_set():
            self.pool.count_huge_pages()

    def close(self) -> None:
        """Unmaps the arena. The caller guarantees that nothing reads or writes the arena any more."""
        if self._closed.is_set():
            raise UsageError("the memory tier is closed already")
        self._closed.set()
        with self._prefaulting:  # it ends within about a millisecond
            self.pool.close()

    @property
    def payload_bytes_max(self) -> int:
        """The largest payload that a slab can hold."""
        return self.slab_pages * PAGE_BYTES

    def num_free(self, size: int) -> int:
        """Returns the slots of `size` pages that can be taken without evicting, including unassigned slabs."""
        known = self._sizes.get(size)
        free = known.num_free if known else 0
        last = self.num_slabs - 1
        whole = len(self._unassigned) - (last in self._unassigned)
        short = self._slab_length(last) // size if whole < len(self._unassigned) else 0
        return free + whole * (self.slab_pages // size) + short

    def num_slots(self, size: int) -> int:
        """Returns the slots of `size` pages, used and free, including those of unassigned slabs."""
        known = self._sizes.get(size)
        return self.num_free(size) + (int(self._slab_used[list(known.slabs)].sum()) if known else 0)

    def sizes(self) -> list[int]:
        """Returns the slot sizes that have slabs."""
        return list(self._sizes)

    def take(self, size: int, owners: U32Array) -> U32Array:
        """Takes one slot of `size` pages per owner, used now; the caller checks `num_free`. Returns first pages."""
        pool = self._sizes.setdefault(size, _Size(size))
        while pool.num_free < len(owners):
            slab = next((s for s in reversed(self._unassigned) if self._slab_length(s) >= size), None)
            if slab is None:
                raise UsageError("slots were taken that are not free")
            self._unassigned.remove(slab)
            self._assign(pool, slab)
        pages = pool.pop(len(owners))
        self._owner[pages] = owners + np.uint32(1)
        np.add.at(self._slab_used, pages // self.slab_pages, 1)
        self.touch(pages)  # otherwise a slab just taken over would be the coldest, like its previous contents
        return pages

    def restore(self, pages: U32Array, owners: U32Array) -> None:
        """Takes over these slots of an old pool; its other slots are free. No slot has been taken yet."""
        used = np.zeros(self.num_slabs, bool)
        used[pages // self.slab_pages] = True
        for slab in np.flatnonzero(self.pool.slabs).tolist():
            size = int(self.pool.slabs[slab])
            if used[slab]:
                self._unassigned.remove(slab)
                self._assign(self._sizes.setdefault(size, _Size(size)), slab)
            else:
                self.slot_records.assign(slab, 0)
        self._owner[pages] = owners + np.uint32(1)
        np.add.at(self._slab_used, pages // self.slab_pages, 1)
        for pool in self._sizes.values():
            kept = pool.free[: pool.num_free]
            kept = kept[self._owner[kept] == 0]
            pool.num_free = len(kept)
            pool.free[: len(kept)] = kept

    def give(self, pages: U32Array) -> None:
        """Frees slots of any sizes; they are the next ones to be taken."""
        self.slot_records.erase(pages)
        slabs = pages // self.slab_pages
        self._owner[pages] = 0
        np.subtract.at(self._slab_used, slabs, 1)
        sizes = self._slab_size[slabs]
        for size in np.unique(sizes).tolist():
            self._sizes[size].push(pages[sizes == size][::-1])

    def touch_slab(self, slab: int) -> None:
        """Notes a use of something in the slab."""
        self._tick += 1
        self.slab_touched[slab] = self._tick

    def touch(self, pages: U32Array) -> None:
        """Notes a use of these slots, for `coldest_slabs`."""
        self._tick += 1
        self.slab_touched[pages // self.slab_pages] = self._tick

    def coldest_slabs(self, size: int) -> I64Array:
        """Returns the slabs of other sizes that could hold a slot of `size` pages, least recently touched first."""
        slabs = np.flatnonzero((self._slab_size != size) & (self._slab_size != 0))
        if self._slab_length(self.num_slabs - 1) < size:
            slabs = slabs[slabs != self.num_slabs - 1]
        order: I64Array = slabs[np.argsort(self.slab_touched[slabs], kind="stable")]
        return order

    def slabs_of(self, pages: U32Array) -> I64Array:
        """Returns the slab of each of these pages."""
        return (pages // self.slab_pages).astype(np.int64)

    def share_used(self, slab: int) -> float:
        """Returns the share of a slab that its used slots take."""
        return float(self._slab_used[slab] * self._slab_size[slab] / self._slab_length(slab))

    def owners_in(self, slab: int) -> U32Array:
        """Returns the owners of the used slots of a slab."""
        first = slab * self.slab_pages
        owners = self._owner[first : first + self._slab_length(slab)]
        used: U32Array = owners[owners != 0] - np.uint32(1)
        return used

    def unassign(self, slab: int) -> bool:
        """Releases a slab without used slots for any size; False (nothing changed) if it is in use."""
        if self._slab_used[slab]:
            return False
        pool = self._sizes[int(self._slab_size[slab])]
        kept = pool.free[: pool.num_free]
        kept = kept[kept // self.slab_pages != slab]
        pool.free[: len(kept)] = kept
        pool.num_free = len(kept)
        pool.slabs.remove(slab)
        if not pool.slabs:
            del self._sizes[pool.pages]
        self._slab_size[slab] = 0
        self.slot_records.assign(slab, 0)
        self._unassigned.append(slab)
        return True

    def gauges(self) -> dict[str, int]:
        """Returns bytes by use: capacity = used + free + unassigned + tail (not covered by slots of a slab's size). And
        `huge_bytes`: in huge pages, if the kernel reports them.
        """
        used = int((self._slab_used * self._slab_size).sum())  # not slab by slab: a TiB has 16,384
        free = sum(pool.num_free * pool.pages for pool in self._sizes.values())
        unassigned = len(self._unassigned) * self.slab_pages
        if self._slab_size[-1] == 0:
            unassigned -= self.slab_pages - self._slab_length(self.num_slabs - 1)
        tail = self.num_pages - used - free - unassigned
        figures = {"capacity": self.num_pages, "used": used, "free": free, "unassigned": unassigned, "tail": tail}
        huge_bytes = self.pool.huge_bytes
        huge = {} if huge_bytes is None else {"huge_bytes": huge_bytes}
        return {f"{name}_bytes": pages * PAGE_BYTES for name, pages in figures.items()} | huge

    def owned(self, slabs: range) -> tuple[U32Array, U32Array]:
        """Returns the first pages, ascending, of the taken slots in these slabs, and their owners."""
        first = slabs.start * self.slab_pages
        owner = self._owner[first : slabs.stop * self.slab_pages]
        indices = np.flatnonzero(owner)
        return (indices + first).astype(np.uint32), owner[indices] - np.uint32(1)

    def check_slots(self, pages: U32Array, sizes: I64Array, owners: U32Array) -> list[str]:
        """Audits these taken slots: compares them with the caller's owners and sizes in pages."""
        findings = []
        if (self._owner[pages] != owners + np.uint32(1)).any():
            findings.append("memory: a slot's owner differs from its part")
        if (self._slab_size[pages // self.slab_pages] != sizes).any():
            findings.append("memory: a slot lies in a slab of another size")
        return findings

    def check_pools(self) -> list[str]:
        """Audits slabs and free lists; an empty list: no errors."""
        findings = []
        for pool in self._sizes.values():
            slots = sum(self._slab_length(s) // pool.pages for s in pool.slabs)
            used = sum(int(self._slab_used[s]) for s in pool.slabs)
            if used + pool.num_free != slots:
                findings.append(f"memory: {used} used + {pool.num_free} free != {slots} slots of {pool.pages} pages")
            free = pool.free[: pool.num_free]
            if (np.diff(np.sort(free)) == 0).any() or self._owner[free].any():
                findings.append(f"memory: the free list of {pool.pages}-page slots is wrong")
        assigned = sum(len(pool.slabs) for pool in self._sizes.values())
        if assigned + len(self._unassigned) != self.num_slabs:
            findings.append("memory: a slab is lost or held twice")
        return findings

    # --- internals ---

    def _slab_length(self, slab: int) -> int:
        return min(self.slab_pages, self.num_pages - slab * self.slab_pages)

    def _assign(self, pool: _Size, slab: int) -> None:
        first = slab * self.slab_pages
        slots = self._slab_length(slab) // pool.pages
        self._slab_size[slab] = pool.pages
        self.slot_records.assign(slab, pool.pages)
        pool.slabs.add(slab)
        # Descending, so that the stack hands them out ascending: neighbours on both sides coalesce.
        pool.push(np.arange(first + (slots - 1) * pool.pages, first - 1, -pool.pages, dtype=np.int64).astype(np.uint32))
