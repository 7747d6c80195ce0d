"""Computes how much a tier of a given size holds: the arithmetic of its slots, slabs, records and segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvoffloadd.model import PAGE_BYTES, slot_pages
from kvoffloadd.storage.disk.format import ENTRY, HEADER_PAGES, RECORD_HEADER_PAGES, TRAILER_PAGES, footer_pages
from kvoffloadd.storage.disk.segment import SEGMENTS_MIN

INDEX_BYTES_PER_KEY = 92
"""The daemon's own memory for each key, in addition to the memory tier; measured at 10 million keys
(docs/benchmarks/RESULTS.md).
"""

SPARE_SEGMENTS = 1
"""The next segment is made before the open one is full."""

Demand = Counter[int]
"""Maps the pages of a slot to the number of such slots."""


def demand_of(stored: Iterable[tuple[int, int, int]]) -> Demand:
    """Returns the slots that these keys take. `stored`: for each group (keys, parts of a key, payload bytes of
    a part).
    """
    demand: Demand = Counter()
    for keys, parts, payload_bytes in stored:
        demand[slot_pages(payload_bytes)] += keys * parts
    return +demand


@dataclass(frozen=True, slots=True)
class MemorySpace:
    """A memory tier. All slots of a slab have one size; the remainder at the end of a slab is lost."""

    capacity_bytes: int
    slab_bytes: int

    @property
    def payload_bytes_max(self) -> int:
        """The largest payload that can be stored at all."""
        return min(self.slab_bytes, self.capacity_bytes) // PAGE_BYTES * PAGE_BYTES

    def holds(self, demand: Mapping[int, int]) -> int:
        """Returns how many times the tier holds the whole demand."""
        pages = self.capacity_bytes // PAGE_BYTES
        slab = self.payload_bytes_max // PAGE_BYTES
        if not slab or max(demand) > slab:
            return 0
        slabs, short = divmod(pages, slab)
        return _most(pages // _pages(demand), lambda times: _fits(demand, times, slab, slabs, short))


def _fits(demand: Mapping[int, int], times: int, slab: int, slabs: int, short: int) -> bool:
    """Returns whether all slots fit. `short`: free pages of the last slab, which go to the size that needs them
    most.
    """
    last = [0, *(size for size in demand if size <= short)]
    for chosen in last:
        needed = 0
        for size, count in demand.items():
            rest = times * count - (short // size if size == chosen else 0)
            needed += -(-max(0, rest) // (slab // size))
        if needed <= slabs:
            return True
    return False


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """A disk root. A record is a header and a payload; a segment ends in a footer that lists its records."""

    capacity_bytes: int
    segment_bytes: int

    def holds(self, demand: Mapping[int, int]) -> int:
        """Returns how many times the root holds the whole demand. For records of several sizes the figure is a little
        too low.
        """
        segment = min(self.segment_bytes, self.capacity_bytes // SEGMENTS_MIN) // PAGE_BYTES
        segments = self.capacity_bytes // PAGE_BYTES // segment - SPARE_SEGMENTS if segment else 0
        room = segment - HEADER_PAGES
        records = {RECORD_HEADER_PAGES + size: count for size, count in demand.items()}
        if segments < 1 or max(records) + footer_pages(1, 1) > room:
            return 0
        if len(records) == 1:
            ((size, count),) = records.items()
            each = _most(room // size, lambda times: times * size + footer_pages(times, 1) <= room)
            return segments * each // count
        # Records come in any order: the end of a segment loses up to all but a page of the largest record, and up to a
        # page for the footer.
        room -= max(records) + TRAILER_PAGES
        entries = sum(records.values())
        return segments * room * PAGE_BYTES // (_pages(records) * PAGE_BYTES + entries * ENTRY.itemsize)


def _pages(demand: Mapping[int, int]) -> int:
    return sum(size * count for size, count in demand.items())


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number up to `limit` that fits. If a number fits, all smaller ones do."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
