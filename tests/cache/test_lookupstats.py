"""What was asked for: every outcome is counted once, with the right reason; and the ceiling."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.stats.lookupstats import NAMESPACES_MAX, LookupStats
from kvoffloadd.cache.stats.missreasons import MissReasons, Reason
from kvoffloadd.model import GroupKind, GroupSchema, I64Array, U64Array
from scripts.replay.trace import load_trace, num_blocks, num_references

from .conftest import Open
from .disktier import Tier
from .fakes import keys_of, make_cache, make_keyspace

ONE = np.array([0], np.uint16)
TRACE = "KVOFFLOADD_TEST_TRACE"
CEILING, POINTS = 0.366, 0.02
"""Of the conversation trace, whose 288,500 references name 182,790 blocks."""


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = make_cache(pages=8, slab_pages=4)
    yield made
    made.tier.close()


def store(cache: Cache, keyspace: Keyspace, *numbers: int) -> None:
    parts = reserve(cache, keyspace, keys_of(*numbers), np.arange(keyspace.schema.parts, dtype=np.uint16), 0).parts
    cache.commit(parts)


def ask(cache: Cache, keyspace: Keyspace, *numbers: int) -> None:
    keys = keys_of(*numbers)
    found = cache.find(keyspace, keys)
    disk = cache.local
    on_disk = disk.on_disk(keyspace, keys, found) if isinstance(disk, DiskTier) else np.zeros(len(keys), bool)
    cache.lookups.record(keyspace, keys, found, on_disk)
    cache.lookups.classify_misses()


def told(cache: Cache) -> dict[str, Any]:
    """Returns the figures of the only namespace that asked that are not 0."""
    (row,) = cache.lookups.figures()
    assert row["asked"] == row["hit"] + row["on_disk"] + sum(row["missed"].values())
    counts = {name: row[name] for name in ("hit", "on_disk")} | row["missed"]
    return {name: count for name, count in counts.items() if count}


def test_hits_and_what_was_never_stored(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, 1, 2)
    ask(cache, keyspace, 1, 2, 3)
    ask(cache, keyspace, 1)
    assert told(cache) == {"hit": 3, "never_stored": 1}
    assert (cache.figures()["keys_hit"], cache.figures()["keys_missed"]) == (3, 1)


def test_evicted_keys(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, *range(8))
    store(cache, keyspace, 10, 11, 12)
    ask(cache, keyspace, *range(8), 99)
    assert told(cache) == {"hit": 5, "evicted": 3, "never_stored": 1}


def test_a_key_that_is_evicted_between_two_questions_had_the_first_reason_first(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    ask(cache, keyspace, 1)
    store(cache, keyspace, 1)
    store(cache, keyspace, *range(10, 18))
    ask(cache, keyspace, 1)
    assert told(cache) == {"never_stored": 1, "evicted": 1}


def test_cleared_keys(cache: Cache) -> None:
    namespace, keyspace = make_keyspace(cache)
    store(cache, keyspace, 1, 2)
    cache.epochs.advance(namespace.fingerprint)
    for _ in cache.clear(namespace):
        pass
    ask(cache, namespace.keyspaces[0], 1, 2, 3)
    assert told(cache) == {"cleared": 2, "never_stored": 1}


def test_corrupt_keys(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, 1, 2)
    cache.drop(cache.find(keyspace, keys_of(1)).hit_rows)
    ask(cache, keyspace, 1, 2)
    assert told(cache) == {"hit": 1, "failed_verification": 1}


def test_keys_of_another_namespace(cache: Cache) -> None:
    _, other = make_keyspace(cache, b"o" * 16)
    _, keyspace = make_keyspace(cache)
    store(cache, other, 1, 2)
    ask(cache, keyspace, 1, 2, 3)
    store(cache, keyspace, 1)
    ask(cache, keyspace, 1)
    assert told(cache) == {"hit": 1, "other_namespace": 2, "never_stored": 1}


def test_pending_and_incomplete_keys(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache, pages=(1, 1))
    reserve(cache, keyspace, keys_of(1), np.array([0, 1], np.uint16), 0)
    first = reserve(cache, keyspace, keys_of(2), ONE, 0)
    cache.commit(first.parts)
    ask(cache, keyspace, 1, 2, 3)
    assert told(cache) == {"pending": 1, "incomplete": 1, "never_stored": 1}
    assert cache.lookups.totals() == {"keys_hit": 0, "keys_pending": 1, "keys_missed": 2}
    for row in cache.lookups.figures():
        assert row["new"] == 2


async def test_keys_on_disk_and_those_that_went_from_there(open_tier: Open) -> None:
    tier: Tier = await open_tier()
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1, 2, 3)
    ask(tier.cache, keyspace, 1, 2, 4)
    assert told(tier.cache) == {"on_disk": 2, "never_stored": 1}
    catalog = tier.disk.catalog
    disk_keyspace = tier.disk.of(keyspace)
    assert disk_keyspace is not None
    rows = catalog.find(disk_keyspace, keys_of(1, 2, 3)).astype(np.uint32)
    records = catalog.places(disk_keyspace, rows).ravel()
    tier.disk.lose(records[:1])
    tier.disk.lose(records[1:2], Reason.CORRUPT)
    ask(tier.cache, keyspace, 1, 2, 3)
    assert told(tier.cache) == {"on_disk": 3, "never_stored": 1, "evicted": 1, "failed_verification": 1}
    await tier.clear(keyspace.namespace)
    ask(tier.cache, tier.keyspace(), 3)
    assert told(tier.cache)["cleared"] == 1


def test_a_namespace_that_comes_again_goes_on_counting(cache: Cache) -> None:
    namespace, keyspace = make_keyspace(cache)
    ask(cache, keyspace, 1)
    cache.close_namespace(namespace)
    assert not cache.namespaces
    _, again = make_keyspace(cache)
    ask(cache, again, 2)
    assert told(cache) == {"never_stored": 2}


def test_so_many_namespaces_are_told_apart_and_no_more(cache: Cache) -> None:
    for number in range(NAMESPACES_MAX + 3):
        namespace, keyspace = make_keyspace(cache, number.to_bytes(16, "little"))
        ask(cache, keyspace, 1)
        cache.close_namespace(namespace)
    rows = cache.lookups.figures()
    assert len(rows) == NAMESPACES_MAX + 1
    assert (rows[-1]["namespace"], rows[-1]["asked"], rows[-1]["uid"]) == ("other", 3, None)
    assert len({row["namespace"] for row in rows}) == len(rows)
    assert cache.lookups.totals()["keys_missed"] == NAMESPACES_MAX + 3
    assert cache.lookups.figures(uid=1) == []
    assert len(cache.lookups.figures(uid=0)) == NAMESPACES_MAX


def test_names_are_safe_and_short() -> None:
    namespace = Namespace(bytes(range(16)), 0, 'a "model"\n\\with{ünusual}' + "/x" * 100, 32, 0)
    name = namespace.name
    assert name.endswith("/x#00010203")
    assert len(name) == 49
    assert Namespace(bytes(16), 0, 'q"\n{é', 32, 0).name == "q____#00000000"


# --- the ceiling -------------------------------------------------------------------------------------


class Replay:
    """A cache of `capacity` keys (none: without bounds) that forgets the oldest, as far as lookups can see."""

    def __init__(self, blocks: int, capacity: int, seed: int) -> None:
        self._ghosts = MissReasons(seed)
        self.lookups = LookupStats(self._ghosts)
        self._keys = np.random.default_rng(seed).integers(0, 1 << 63, (blocks, 4), dtype=np.uint64)
        self._held = np.zeros(blocks, bool)
        self._order: list[I64Array] = []
        self._free = capacity
        namespace = Namespace(b"n" * 16, 0, "trace", 32, 0)
        self._space = Keyspace(0, namespace, GroupSchema(0, GroupKind.FULL, 512), [4096])

    def request(self, ids: I64Array) -> None:
        """Ask, then store what is missing."""
        held, keys = self._held[ids], self._keys[ids]
        rows = np.where(held, 0, -1)
        self.lookups.record(
            self._space, keys, LookupResult(rows, held.astype(np.uint8), held), np.zeros(len(ids), bool)
        )
        self.lookups.classify_misses()
        self._store(ids[~held], keys[~held])

    def _store(self, ids: I64Array, keys: U64Array) -> None:
        name = self._space.namespace.fingerprint
        self._held[ids] = True
        self._order.append(ids)
        self._ghosts.came(0, name, self._ghosts.hash(0, keys))
        self._free -= len(ids)
        while self._free < 0:
            oldest = self._order.pop(0)
            self._held[oldest] = False
            self._ghosts.went(name, self._ghosts.hash(0, self._keys[oldest]), Reason.EVICTED)
            self._free += len(oldest)

    def row(self) -> dict[str, Any]:
        (row,) = self.lookups.figures()
        return row


@pytest.mark.parametrize("share", [1.0, 0.05])
def test_the_ceiling_is_that_of_a_cache_without_bounds(share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [np.arange(40) + 40 * int(one) for one in rng.zipf(1.3, 3000) if one < 2000]
    blocks = len(np.unique(np.concatenate(prompts)))
    replay = Replay(80_000, int(blocks * share), seed)
    for prompt in prompts:
        replay.request(prompt)
    asked = 40 * len(prompts)
    row = replay.row()
    assert row["asked"] == asked
    assert row["ceiling_rate"] == pytest.approx(1 - blocks / asked, abs=0.02)
    assert round(row["hit"] / asked, 4) <= row["ceiling_rate"]
    if share == 1.0:
        assert row["hit"] == asked - blocks


def test_no_estimate_is_below_what_was_seen() -> None:
    """An estimate may be above the true number of new keys; the misses show how many there were at most."""
    for seed in range(12):
        replay = Replay(5000, 5000, seed)
        for _ in range(2):
            replay.request(np.arange(5000))
        row = replay.row()
        assert (row["hit"], row["missed"]["never_stored"]) == (5000, 5000)
        assert row["ceiling_rate"] >= 0.5
        assert 4900 < row["new"] <= 5000


def test_keys_that_were_stored_before_anybody_asked_count_as_hits_of_the_ceiling(cache: Cache) -> None:
    _, keyspace = make_keyspace(cache)
    store(cache, keyspace, *range(8))
    store(cache, keyspace, 20, 21)  # two of the first are gone
    ask(cache, keyspace, *range(8))
    (row,) = cache.lookups.figures()
    assert (row["hit"], row["missed"]["evicted"], row["new"], row["ceiling_rate"]) == (6, 2, 0, 1.0)


@pytest.mark.parametrize("share", [1.0, 0.05])
def test_the_ceiling_of_the_conversation_trace(share: float, seed: int) -> None:
    path = os.environ.get(TRACE, "")
    if not path:
        pytest.skip(f"{TRACE} names no file with the conversation trace of Mooncake (FAST'25)")
    requests = load_trace(Path(path))
    blocks, asked = num_blocks(requests), num_references(requests)
    replay = Replay(max(int(ids.max()) for ids in requests) + 1, int(blocks * share), seed)
    for ids in requests:
        replay.request(ids)
    row = replay.row()
    assert row["asked"] == asked
    assert row["ceiling_rate"] == pytest.approx(1 - blocks / asked, abs=POINTS)
    assert row["ceiling_rate"] == pytest.approx(CEILING, abs=POINTS)
