"""How much of what is stored a tier of some size holds: the arithmetic of its slots, slabs, records and segments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvoffloadd.model import PAGE_BYTES, slot_pages
from kvoffloadd.storage.disk.format import ENTRY, HEADER_PAGES, RECORD_HEADER_PAGES, TRAILER_PAGES, footer_pages
from kvoffloadd.storage.disk.segment import SEGMENTS_MIN

INDEX_BYTES_PER_KEY = 92
"""Of the daemon's own memory, beside the memory tier: measured at 10 million keys (docs/benchmarks/RESULTS.md)."""

SPARE_SEGMENTS = 1
"""The next segment is made before the open one is full."""

Demand = Counter[int]
"""Pages of a slot -> how many such slots."""


def demand_of(stored: Iterable[tuple[int, int, int]]) -> Demand:
    """What so many keys take. `stored`: (keys, parts of a key, payload bytes of a part), of each group."""
    demand: Demand = Counter()
    for keys, parts, payload_bytes in stored:
        demand[slot_pages(payload_bytes)] += keys * parts
    return +demand


@dataclass(frozen=True, slots=True)
class MemorySpace:
    """A memory tier. A slab has slots of one size; what does not fill a slot at its end is lost."""

    capacity_bytes: int
    slab_bytes: int

    @property
    def payload_bytes_max(self) -> int:
        """The largest payload that can be stored at all."""
        return min(self.slab_bytes, self.capacity_bytes) // PAGE_BYTES * PAGE_BYTES

    def holds(self, demand: Mapping[int, int]) -> int:
        """How many times all of that."""
        pages = self.capacity_bytes // PAGE_BYTES
        slab = self.payload_bytes_max // PAGE_BYTES
        if not slab or max(demand) > slab:
            return 0
        slabs, short = divmod(pages, slab)
        return _most(pages // _pages(demand), lambda times: _fits(demand, times, slab, slabs, short))


def _fits(demand: Mapping[int, int], times: int, slab: int, slabs: int, short: int) -> bool:
    """`short`: pages of the last slab; whichever size needs it most gets it."""
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
        """How many times all of that. With records of several sizes a little less than may fit."""
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
        # They come in any order: at a segment's end up to all but a page of the largest is lost, and a page's end of
        # the footer.
        room -= max(records) + TRAILER_PAGES
        entries = sum(records.values())
        return segments * room * PAGE_BYTES // (_pages(records) * PAGE_BYTES + entries * ENTRY.itemsize)


def _pages(demand: Mapping[int, int]) -> int:
    return sum(size * count for size, count in demand.items())


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits; what fits, fits with less, too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
