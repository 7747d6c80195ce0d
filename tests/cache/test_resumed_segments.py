"""A start goes on in the last segment where that can't hurt, and nowhere else."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk import resuming
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.resuming import SegmentResumer

from .conftest import Open
from .disktier import Shape, Tier, flip_byte

BIG = Shape(pages=512, segment_pages=64)
PER_SEGMENT = 30


async def left(open_tier: Open, count: int, *, how: str = "close") -> list[int]:
    """What an earlier run has left: `count` keys in one segment. Returns their numbers."""
    tier = await open_tier(BIG)
    numbers = list(range(count))
    await tier.store_away(tier.keyspace(), *numbers)
    await (tier.close() if how == "close" else tier.drop())
    return numbers


def resumed(tier: Tier) -> bool:
    segment = tier.root.pool.open_segment
    return segment is not None and segment.next_page > 1


def files(tier: Tier) -> list[Path]:
    return sorted((tier.root.path / "segments").iterdir())


@pytest.mark.parametrize("how", ["close", "drop"])
async def test_records_of_several_keyspaces_are_told_apart_after_the_next_stop(open_tier: Open, how: str) -> None:
    """Both that were there and new ones: the footer numbers them."""
    tier = await open_tier(BIG)
    names = (b"a" * 16, b"b" * 16, b"c" * 16)
    there = {name: list(range(5)) for name in names[:2]}
    for name, numbers in there.items():
        await tier.store_away(tier.keyspace(name), *numbers)
    for number in (7, 8):
        await (tier.close() if how == "close" else tier.drop())
        tier = await open_tier(BIG)
        assert resumed(tier)
        for name, numbers in there.items():
            assert await tier.fetch(tier.keyspace(name), *numbers) == numbers
        for name in names[::-1]:
            await tier.store_away(tier.keyspace(name), number)
            there.setdefault(name, []).append(number)
    await tier.close()
    tier = await open_tier(BIG)
    for name, numbers in there.items():
        assert await tier.fetch(tier.keyspace(name), *numbers) == numbers
    assert tier.audit() == []


@pytest.mark.parametrize(("count", "goes_on"), [(1, True), (26, True), (27, False), (PER_SEGMENT, False)])
async def test_only_if_an_eighth_is_free(open_tier: Open, count: int, goes_on: bool) -> None:
    numbers = await left(open_tier, count)
    tier = await open_tier(BIG)
    assert resumed(tier) == goes_on
    assert tier.on_disk(tier.keyspace(), *numbers) == numbers


async def test_not_in_a_segment_of_another_size(open_tier: Open) -> None:
    numbers = await left(open_tier, 5)
    tier = await open_tier(Shape(pages=512, segment_pages=32, num_segments=16))
    assert not resumed(tier)
    assert tier.on_disk(tier.keyspace(), *numbers) == numbers


async def test_not_in_one_whose_header_is_lost(open_tier: Open) -> None:
    """Its trailer alone identifies it, and would go."""
    numbers = await left(open_tier, 5)
    tier = await open_tier(BIG)
    paths = files(tier)
    await tier.close()
    for path in paths:
        flip_byte(path, 20)
    tier = await open_tier(BIG)
    assert not resumed(tier)
    for start in range(2):
        assert tier.on_disk(tier.keyspace(), *numbers) == numbers
        await tier.store_away(tier.keyspace(), 100 + start)
        await tier.drop()
        tier = await open_tier(BIG)
    assert tier.on_disk(tier.keyspace(), *numbers, 100, 101) == [*numbers, 100, 101]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "planted"), OSError(errno.EROFS, "planted"), MemoryError()],
    ids=["EIO", "EROFS", "memory"],
)
@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("where", ["_open", "_begin"])
async def test_where_it_fails_the_root_comes_all_the_same(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, error: Exception, how: str, where: str
) -> None:
    numbers = await left(open_tier, 5, how=how)

    def fail(_work: SegmentResumer) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(SegmentResumer, where, fail)
        tier = await open_tier(BIG)
        assert tier.root.state == RootState.OK
        assert not resumed(tier)
        assert tier.on_disk(tier.keyspace(), *numbers) == numbers
        await tier.store_away(tier.keyspace(), 100)
    await tier.drop()
    tier = await open_tier(BIG)
    assert tier.on_disk(tier.keyspace(), *numbers, 100) == [*numbers, 100]


async def test_what_a_stop_has_left_is_looked_at_in_turns(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "WALK_BYTES", PAGE_BYTES)
    numbers = await left(open_tier, 5)
    tier = await open_tier(BIG)
    assert resumed(tier)
    assert await tier.fetch(tier.keyspace(), *numbers) == numbers
