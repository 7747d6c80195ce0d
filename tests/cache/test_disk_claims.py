"""Claims on disk: what is claimed moves on when its segment is reclaimed, within the share of its user."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.composition import Composition
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import PAGE_BYTES

from .conftest import Open
from .disktier import Shape, Tier
from .fakes import keys_of

BIG = Shape(pages=512, segment_pages=64)
"""30 records of two pages in a segment; the root has 8 segments, so claims may keep about 120 records."""

PER_SEGMENT, NUM_SEGMENTS = 30, 8


def retain(
    tier: Tier, keyspace: Keyspace, *numbers: int, priority: int = 50, seconds: float = 600.0, name: str = ""
) -> Claim | None:
    return tier.cache.retention.retain(
        keyspace.namespace, [(keyspace, 0, keys_of(*numbers))], priority=priority, seconds=seconds, name=name
    )


async def pour(tier: Tier, keyspace: Keyspace, first: int, count: int, *, step: int = 10) -> None:
    """Stores keys and evicts them from memory once they are written."""
    for at in range(first, first + count, step):
        batch = range(at, min(at + step, first + count))
        tier.store(keyspace, *batch)
        await tier.quiet()
        tier.evict(keyspace, *batch)


async def turn_over(tier: Tier, keyspace: Keyspace, turns: int, first: int = 10_000) -> None:
    """Writes as much as the disk holds, so often."""
    await pour(tier, keyspace, first, turns * PER_SEGMENT * NUM_SEGMENTS, step=30)


async def test_what_is_claimed_outlives_ten_turnovers_of_the_disk(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, 60)
    retain(tier, keyspace, *range(20, 50))
    await turn_over(tier, keyspace, 10)
    left = tier.on_disk(keyspace, *range(60))
    assert set(range(20, 50)) <= set(left)
    assert not set(range(20)) & set(left), "what shares a segment with little else may ride along"
    assert tier.disk.reclaim.keys_unkept == 0
    assert await tier.fetch(keyspace, *range(20, 50)) == list(range(20, 50))
    assert tier.audit() == []


@pytest.mark.slow
async def test_half_of_the_disk_may_be_claimed_and_new_keys_still_find_room(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    claimed: list[int] = []
    for number in range(100):
        await pour(tier, keyspace, 20 * number, 20)
        retain(tier, keyspace, 20 * number)  # one of twenty: they lie in all segments
        claimed.append(20 * number)
    assert tier.on_disk(keyspace, *claimed) == claimed
    await turn_over(tier, keyspace, 5)
    assert tier.on_disk(keyspace, *claimed) == claimed
    assert tier.disk.reclaim.keys_unkept == 0
    assert tier.not_demoted == {}
    written = sum(root.figures()["written_bytes"] for root in tier.roots)
    assert tier.disk.reclaim.bytes_rewritten <= written / 2, "at most one byte is written again for each new one"


async def test_younger_segments_go_first_where_the_older_ones_are_claimed_for_the_most_part(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, 5 * PER_SEGMENT, step=30)
    claimed = [number for number in range(5 * PER_SEGMENT) if number % 3]
    retain(tier, keyspace, *claimed)
    assert tier.cache.retention.figures()["disk_keys"] == len(claimed)
    await turn_over(tier, keyspace, 3)
    assert tier.on_disk(keyspace, *claimed) == claimed
    assert tier.disk.reclaim.keys_unkept == 0


async def test_keys_that_come_to_disk_later_are_claimed_too(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    retain(tier, keyspace, *range(10))
    await pour(tier, keyspace, 0, 30)
    await turn_over(tier, keyspace, 3)
    assert tier.on_disk(keyspace, *range(30)) == list(range(10))
    assert tier.cache.retention.figures()["disk_keys"] == 10
    assert tier.cache.retention.figures()["disk_bytes"] == 10 * 2 * PAGE_BYTES


async def test_a_claim_that_is_over_or_cleared_keeps_nothing(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace, other = tier.keyspace(), tier.keyspace(b"o" * 16)
    now_s = 1000.0
    tier.cache.retention.clock = lambda: now_s
    await pour(tier, keyspace, 0, 20)
    await pour(tier, other, 0, 10)
    retain(tier, keyspace, *range(10), seconds=10)
    retain(tier, other, *range(10), seconds=1000)
    now_s += 10
    tier.cache.retention.expire()
    assert tier.audit() == []
    await turn_over(tier, keyspace, 2)
    assert tier.on_disk(keyspace, *range(20)) == []
    assert tier.on_disk(other, *range(10)) == list(range(10))
    await tier.clear(other.namespace)
    other = other.namespace.keyspaces[0]
    assert len(tier.cache.retention) == 0
    await pour(tier, other, 0, 10)
    await turn_over(tier, keyspace, 2, first=20_000)
    assert tier.on_disk(other, *range(10)) == []
    assert tier.audit() == []


async def test_a_namespace_stays_known_until_the_tiers_have_let_all_of_it_go(open_tier: Open) -> None:
    """Otherwise its successor would claim rows on disk that the former claims let go afterwards."""
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    namespace = keyspace.namespace
    await pour(tier, keyspace, 0, 20)
    retain(tier, keyspace, *range(10))
    tier.cache.close_namespace(namespace)
    tier.cache.retention.forget(tier.cache.retention.claims)
    assert tier.cache.open_namespace(namespace.fingerprint, 0, "test", 32) is namespace
    retain(tier, keyspace, *range(5))
    tier.cache.retention.expire()
    assert tier.audit() == []
    await turn_over(tier, keyspace, 2)
    assert tier.on_disk(keyspace, *range(20)) == list(range(5))
    tier.cache.close_namespace(namespace)
    tier.cache.retention.forget(tier.cache.retention.claims)
    tier.cache.retention.expire()
    assert tier.cache.namespaces.find(namespace.fingerprint) is None
    assert tier.audit() == []


async def test_a_claim_lapses_in_each_tier_by_itself(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    tier.cache.retention.change_shares(20 / 512, 0.5)
    claims = []
    for first in (0, 20, 40):
        tier.store(keyspace, *range(first, first + 20))
        claims.append(retain(tier, keyspace, *range(first, first + 20)))
    await tier.quiet()
    held = [claim is not None and tier.cache.retention.memory.get(claim) is not None for claim in claims]
    assert held == [False, False, True]
    assert all(claim is not None and claim.is_in_force for claim in claims)
    figures = tier.cache.retention.figures()
    assert (figures["memory_keys"], figures["disk_keys"]) == (20, 60)
    assert (figures["claims_lapsed"], figures["disk_claims_lapsed"]) == (2, 0)
    told = tier.cache.retention.describe(tier.cache.retention.claims[0])
    assert (told["memory_keys"], told["disk_keys"], told["disk_bytes"]) == (0, 20, 40 * PAGE_BYTES)
    tier.evict(keyspace, *range(60))
    await turn_over(tier, keyspace, 3)
    assert tier.on_disk(keyspace, *range(60)) == list(range(60))
    tier.cache.retention.change_shares(0.25, 60 / (8 * 64))
    assert [claim is not None and claim.is_in_force for claim in claims] == [False, False, True]
    await turn_over(tier, keyspace, 3, first=30_000)
    assert set(range(40, 60)) <= set(tier.on_disk(keyspace, *range(60)))
    assert not tier.on_disk(keyspace, *range(20))


async def test_without_rewriting_segments_without_claims_go_first(open_tier: Open) -> None:
    tier = await open_tier(BIG, rewrite_hot=False)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, PER_SEGMENT)
    retain(tier, keyspace, *range(5))
    await turn_over(tier, keyspace, 3)
    assert tier.on_disk(keyspace, *range(5)) == list(range(5))
    assert tier.disk.reclaim.records_rewritten == 0
    assert tier.disk.reclaim.keys_unkept == 0


async def test_what_can_not_be_kept_is_counted(open_tier: Open) -> None:
    """A segment that is removed takes what is claimed with it; the claim goes on, and keeps what comes back."""
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, 60)
    retain(tier, keyspace, *range(10))
    _, segment, _ = tier.place(keyspace, 0)
    (tier.root.path / "segments" / segment.name).unlink()
    await tier.until(lambda: tier.on_disk(keyspace, 0) == [])
    assert tier.disk.reclaim.keys_unkept == 10
    await pour(tier, keyspace, 0, 10)
    await turn_over(tier, keyspace, 2)
    assert tier.on_disk(keyspace, *range(10)) == list(range(10))


async def test_claims_follow_a_group_whose_composition_becomes_known(open_tier: Open) -> None:
    """Its keys on disk have another name then: they are others' keys, and those that are written again are claimed."""
    tier = await open_tier(BIG)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, 10)
    tier.store(keyspace, *range(10, 20))
    await tier.quiet()
    retain(tier, keyspace, *range(20))
    assert tier.cache.retention.figures()["disk_keys"] == 20
    tier.cache.set_part_bytes(keyspace, {0: PAGE_BYTES}, {0: Composition("bfloat16", b"")})
    await tier.until(lambda: tier.on_disk(keyspace, *range(20)) == list(range(10, 20)))
    await tier.quiet()
    assert tier.audit() == []
    assert tier.cache.retention.figures()["disk_keys"] == 10
    tier.evict(keyspace, *range(10, 20))
    await turn_over(tier, keyspace, 2)
    assert tier.on_disk(keyspace, *range(20)) == list(range(10, 20))


async def test_random_claims_agree_with_the_catalog(open_tier: Open, seed: int) -> None:
    tier = await open_tier(Shape(pages=256, segment_pages=32, roots=2))
    rng = np.random.default_rng(seed)
    keyspaces = [tier.keyspace(), tier.keyspace(b"o" * 16, sizes=(PAGE_BYTES, 2 * PAGE_BYTES))]
    now_s = 1000.0
    tier.cache.retention.clock = lambda: now_s
    for _ in range(150):
        n = int(rng.integers(0, 2))
        keyspace = keyspaces[n] = keyspaces[n].namespace.keyspaces[0]
        keys = rng.choice(60, int(rng.integers(1, 12)), replace=False).tolist()
        what = int(rng.integers(0, 12))
        if what < 5:
            tier.store(keyspace, *keys)
            await tier.quiet()
            tier.cache.eviction.drop(tier.cache.find(keyspace, keys_of(*keys)).hit_rows)
        elif what < 8:
            retain(tier, keyspace, *keys, priority=int(rng.integers(0, 101)), seconds=float(rng.integers(1, 30)))
        elif what == 8:
            now_s += float(rng.integers(1, 10))
            tier.cache.retention.expire()
        elif what == 9 and tier.cache.retention.claims:
            tier.cache.retention.extend(tier.cache.retention.claims[:1], 5, int(rng.integers(0, 101)))
        elif what == 10:
            tier.cache.retention.change_shares(float(rng.random()), float(rng.random()) / 2)
        elif what == 11 and rng.random() < 0.3:
            await tier.clear(keyspace.namespace)
        assert tier.audit() == []
        claims = tier.disk.claims
        assert claims.claimed.pages_of_user(0) <= claims.budget_pages(0)
        for number, own in enumerate(keyspaces):
            disk_keyspace = tier.disk.of(own.namespace.keyspaces[0])
            if disk_keyspace is None:
                continue
            rows = tier.disk.catalog.find(disk_keyspace, keys_of(*range(60)))
            there = rows[rows >= 0].astype(np.uint32)
            marked = tier.disk.catalog.claimed[there] != 0
            assert (marked == claims.claimed.is_claimed(there)).all(), number
