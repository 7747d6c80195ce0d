"""What tiers hold, against the tiers' own code."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvoffloadd.planner import DiskSpace, MemorySpace, demand_of
from kvoffloadd.storage.disk import format as disk_format
from kvoffloadd.storage.memory import MemoryTier

KIB, MIB = 1 << 10, 1 << 20


def test_demand() -> None:
    """Slots of equal size come together, whatever their group; nothing stored is no demand."""
    assert demand_of([(3, 2, 4096), (5, 1, 4000), (2, 4, 4097), (0, 1, 9000)]) == {1: 11, 2: 8}
    assert not demand_of([(0, 2, 4096)])


@pytest.mark.parametrize("pages", [1, 3, 96, 100, 256])
@pytest.mark.parametrize("capacity_bytes", [MIB, 5 * MIB, 5 * MIB + 400 * KIB, 700 * KIB])
def test_memory_with_slots_of_one_size(capacity_bytes: int, pages: int) -> None:
    tier = MemoryTier(capacity_bytes, MIB)
    try:
        assert MemorySpace(capacity_bytes, MIB).holds({pages: 1}) == tier.num_free(pages)
        assert MemorySpace(capacity_bytes, MIB).holds({pages: 3}) == tier.num_free(pages) // 3
    finally:
        tier.close()


@pytest.mark.parametrize("demand", [{3: 1, 100: 1}, {48: 2, 47: 1, 1: 1}, {256: 1, 1: 1}, {128: 3, 129: 1}])
def test_memory_with_slots_of_several_sizes(demand: dict[int, int]) -> None:
    """Fill a real tier until one slot more is refused."""
    tier = MemoryTier(16 * MIB, MIB)
    try:
        held = 0
        while True:
            for pages, count in demand.items():
                if tier.num_free(pages) < count:
                    break
                tier.take(pages, np.zeros(count, np.uint32))
            else:
                held += 1
                continue
            break
        assert MemorySpace(16 * MIB, MIB).holds(demand) == held > 0
    finally:
        tier.close()


def test_memory_that_is_too_small() -> None:
    assert MemorySpace(MIB, MIB).holds({257: 1}) == 0
    assert MemorySpace(64 * MIB, MIB).holds({257: 1}) == 0  # no slab is that long
    assert MemorySpace(64 * KIB, MIB).payload_bytes_max == 64 * KIB
    assert MemorySpace(0, MIB).holds({1: 1}) == 0


def filled(segment_pages: int, sizes: list[int]) -> int:
    """How many of these payloads a segment takes, by the disk tier's own rule."""
    page = disk_format.HEADER_PAGES
    for number, size in enumerate(sizes):
        page += size + 1
        if page > segment_pages - disk_format.footer_pages(number + 1, 1):
            return number
    raise AssertionError("not full")


@pytest.mark.parametrize("pages", [1, 7, 97, 500, 4000])
def test_disk_with_records_of_one_size(pages: int) -> None:
    each = filled(65_536, [pages] * 65_536)
    assert DiskSpace(2 << 40, 256 * MIB).holds({pages: 1}) == (8192 - 1) * each
    assert DiskSpace(2 << 40, 256 * MIB).holds({pages: 4}) == (8192 - 1) * each // 4


def test_disk_with_records_of_several_sizes(rng: random.Random) -> None:
    """A lower bound, and not far from what fits."""
    demand = {48: 2, 40: 1, 500: 1}
    sizes = [size for _ in range(2000) for size in (48, *rng.sample(list(demand), 3))]
    segments, taken = 63, 0
    for _ in range(segments):
        taken += filled(16_384, sizes[taken:])
    bound = DiskSpace(64 * 64 * MIB, 64 * MIB).holds(demand)
    assert 0.93 * taken <= bound * sum(demand.values()) <= taken


def test_small_disks_have_small_segments() -> None:
    assert DiskSpace(8 * MIB, 256 * MIB).holds({1: 1}) == 7 * filled(256, [1] * 256)
    assert DiskSpace(8 * MIB, 256 * MIB).holds({255: 1}) == 0
    assert DiskSpace(4096, 256 * MIB).holds({1: 1}) == 0
