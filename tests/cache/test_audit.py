"""The audit finds what is planted: each law is broken once, in a cache that has something of everything."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.cache.memory import audit
from kvoffloadd.cache.memory.audit import check, steps
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.reservation import reserve

from .fakes import keys_of, make_cache, make_keyspace, store

HOLDS, RESERVED = 2, 1
COUNT = 40

Plant = Callable[[Cache], object]


@pytest.fixture
def cache() -> Cache:
    """Keys of one part and of two, one that is retired and held, one that is being written."""
    made = make_cache(256, 16)
    one = make_keyspace(made, b"a" * 16)[1]
    two = make_keyspace(made, b"b" * 16, pages=(1, 3))[1]
    store(made, one, keys_of(*range(COUNT)))
    store(made, two, keys_of(*range(COUNT, COUNT + 10)))
    reserve(made, two, keys_of(900), np.array([0], np.uint16), 0)
    made.hold(made.find(one, keys_of(1, 2)).rows.astype(np.uint32))
    made.entries.retire(made.find(one, keys_of(2)).rows.astype(np.uint32))
    return made


def _record(cache: Cache, state: int = PartState.SEALED) -> int:
    return int(np.flatnonzero(cache.entries.parts.state == state)[3 if state == PartState.SEALED else 0])


def _owner(cache: Cache, record: int, owner: int) -> None:
    cache.tier._owner[cache.entries.parts.page[record]] = owner


def _same_slot(cache: Cache) -> None:
    parts, record = cache.entries.parts, _record(cache)
    parts.page[record] = parts.page[record + 1]


def _lost_slot(cache: Cache) -> None:
    """The part records the slot as free, the tier as taken."""
    cache.entries.parts.state[_record(cache, PartState.RESERVED)] = PartState.EMPTY


def _free_twice(cache: Cache) -> None:
    pool = cache.tier._sizes[1]
    pool.free[0] = pool.free[1]


def _strand(cache: Cache) -> None:
    """A record that no key has any more."""
    parts = cache.entries.parts
    parts.runs.used += 1
    parts.state[parts.runs.used - 1] = PartState.SEALED


def _in_map(cache: Cache) -> None:
    cache.entries.parts.runs._map[_record(cache)] = True


def _longer(cache: Cache) -> None:
    runs = cache.entries.parts.runs
    runs._unlist()
    runs._longest[0] = 1


def _twice(cache: Cache) -> None:
    runs = cache.entries.parts.runs
    runs.free(1, runs.listed()[:1].astype(np.uint32))


def _turn(cache: Cache, record: int, state: int) -> None:
    cache.entries.parts.state[record] = state


def _change(column: str, of: str, by: int) -> Plant:
    def plant(cache: Cache) -> None:
        values = getattr(cache.entries.parts if of == "parts" else cache.entries, column)
        at = _record(cache) if of == "parts" else cache.entries.parts.row[_record(cache)]
        values[at] += values.dtype.type(by)

    return plant


def _count(name: str) -> Plant:
    def plant(cache: Cache) -> None:
        keyspace = next(iter(cache.entries.keyspaces.values()))
        setattr(keyspace, name, getattr(keyspace, name) + 1)

    return plant


PLANTED: dict[str, tuple[Plant, str]] = {
    "owner": (lambda cache: _owner(cache, _record(cache), 1), "owner differs"),
    "no owner": (lambda cache: _owner(cache, _record(cache), 0), "owner differs"),
    "same slot": (_same_slot, "owner differs"),
    "lost slot": (_lost_slot, "owned by a part that does not have it"),
    "free twice": (_free_twice, "free list"),
    "slab": (lambda cache: cache.tier._unassigned.pop(), "a slab is lost"),
    "row": (_change("row", "parts", 1), "belong to other keys"),
    "missing": (_change("missing", "rows", 1), "miscounted"),
    "lease": (_change("leases", "rows", 1), "keys are held 3 times, leases and loads account for 2"),
    "digest": (lambda cache: cache.entries.parts.digest.__setitem__((_record(cache), 0), 5), "wrong or missing"),
    "slot records": (
        lambda cache: cache.tier.slot_records.erase(cache.entries.parts.page[[_record(cache)]]),
        "wrong or missing",
    ),
    "slot records, retired": (
        lambda cache: _turn(cache, _record(cache), PartState.COMMITTED),
        "have records",
    ),
    "retired": (lambda cache: setattr(cache.entries, "num_retired", 5), "are retired, counted 5"),
    "rows": (_count("rows"), "rows and keys, counted"),
    "keys": (_count("keys"), "rows and keys, counted"),
    "bytes": (_count("bytes"), "bytes committed, counted"),
    "policy": (
        lambda cache: next(iter(cache.eviction.queues.values())).policy.remove(np.zeros(1, np.uint32)),
        "policies hold",
    ),
    "index": (lambda cache: cache.entries.index.keys.__setitem__((0, 3), 7), "is not found"),
    "record, free": (lambda cache: cache.entries.parts.runs.free(1, np.zeros(1, np.uint32)), "a key has free records"),
    "record, in the map": (_in_map, "a key has free records"),
    "record, lost": (lambda cache: cache.entries.parts.runs.allocate(1, 1), "are given out"),
    "record, twice": (_twice, "free twice"),
    "longer": (_longer, "a longer run than it is known for"),
    "share": (lambda cache: cache.entries.records_by_uid.update([0]), "of a user are miscounted"),
    "stranded": (_strand, "1 records hold a slot that no key owns"),
}


def test_nothing_is_wrong(cache: Cache) -> None:
    assert check(cache, HOLDS, RESERVED) == []
    assert any("account for 9" in finding for finding in check(cache, HOLDS, 9))


@pytest.mark.parametrize("step", [audit.STEP_ROWS, 7])
@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_found(cache: Cache, monkeypatch: pytest.MonkeyPatch, planted: str, step: int) -> None:
    """It is found in one step as in many."""
    monkeypatch.setattr(audit, "STEP_ROWS", step)
    plant, words = PLANTED[planted]
    plant(cache)
    findings = check(cache, HOLDS, RESERVED)
    assert any(words in finding for finding in findings), findings


def test_the_cache_may_change_between_two_steps(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes and goes meanwhile is no finding."""
    monkeypatch.setattr(audit, "STEP_ROWS", 7)
    keyspace = next(iter(cache.entries.keyspaces.values()))
    found = []
    for number, findings in enumerate(steps(cache, lambda: (HOLDS, RESERVED))):
        found += findings
        store(cache, keyspace, keys_of(1000 + number))
        if number < 20:
            cache.entries.retire(cache.find(keyspace, keys_of(10 + number)).rows.astype(np.uint32))
    assert found == []
    assert check(cache, HOLDS, RESERVED) == []
