"""An unexpected error within a change of the cache's tables is a `CacheTornError`; any other error stays what it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.clearing import Clearings
from kvoffloadd.cache.memory.cache import NO_ROWS, Cache
from kvoffloadd.cache.memory.changing import CacheTornError, changing, torn_by
from kvoffloadd.cache.memory.epochs import REMEMBERED_MAX
from kvoffloadd.cache.memory.events import Event, WaitingEvents
from kvoffloadd.cache.memory.lease import Leases
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.reservation import STEP_KEYS, Wanted, reserve, reserve_all, reserve_in_steps
from kvoffloadd.cache.memory.steppedlookup import STEP_KEYS as FINDING_KEYS
from kvoffloadd.cache.memory.steppedlookup import find_in_steps
from kvoffloadd.cache.warm_restart import adopt
from kvoffloadd.errors import DeviceError, KvOffloadError, LimitError
from kvoffloadd.model import GroupKind, GroupSchema, I64Array, U32Array
from tests.cache.fakes import keys_of, make_cache, make_keyspace, store

ONE_PART = np.zeros(1, np.uint16)
UNEXPECTED = [IndexError("7"), MemoryError(), KeyError("a"), ValueError(), RuntimeError(), AssertionError()]
ON_PURPOSE = [LimitError("full"), DeviceError("fallen"), OSError(5, "EIO"), TimeoutError()]
ENDS = [asyncio.CancelledError(), GeneratorExit(), KeyboardInterrupt(), SystemExit()]


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def marked(error: BaseException) -> None:
    with changing:
        raise error


def inner(error: BaseException) -> None:
    changing(raiser(error))()


def nested(error: BaseException) -> None:
    with changing:
        inner(error)


async def over_turns(error: BaseException) -> None:
    with changing:
        await asyncio.sleep(0)
        raise error


def in_a_task(error: BaseException) -> None:
    coroutine = over_turns(error)
    coroutine.send(None)
    coroutine.send(None)


ways = pytest.mark.parametrize("way", [marked, inner, nested, in_a_task])


@ways
@pytest.mark.parametrize("error", UNEXPECTED, ids=repr)
def test_an_unexpected_error_tears_the_cache(way: Callable[[BaseException], None], error: Exception) -> None:
    with pytest.raises(CacheTornError) as torn:
        way(error)
    assert torn.value.__cause__ is error, "once, however many marks it passes"
    assert str(torn.value) == f"{type(error).__name__}: {error}"
    assert not isinstance(torn.value, KvOffloadError | OSError)


@ways
@pytest.mark.parametrize("error", [*ON_PURPOSE, *ENDS], ids=repr)
def test_what_is_raised_on_purpose_changes_nothing(way: Callable[[BaseException], None], error: BaseException) -> None:
    with pytest.raises(type(error)) as same:
        way(error)
    assert same.value is error


def test_a_change_that_ends_well_is_as_without_its_mark() -> None:
    def add(first: int, *, second: int) -> int:
        return first + second

    with changing:
        assert changing(add)(1, second=2) == 3
    assert changing(add).__name__ == "add"


def test_a_torn_cache_is_found_behind_what_followed() -> None:
    """Code that gives back what a request took may fail, too, or raise a different error."""
    torn = CacheTornError("IndexError: 7")
    followed, caused = KeyError(), LimitError("full")
    followed.__context__, caused.__cause__ = torn, followed
    assert [torn_by(error) for error in (torn, followed, caused)] == [torn] * 3
    assert torn_by(KeyError()) is None
    followed.__context__ = caused
    assert torn_by(followed) is None, "and a circle has an end"


# --- the changes of memory ---


@dataclass
class World:
    """A cache with three keys, a reserved part, and leases on two of the keys and on the part."""

    cache: Cache
    namespace: Namespace
    keyspace: Keyspace
    rows: U32Array
    reserved: I64Array
    leases: Leases

    @property
    def used(self) -> list[tuple[Keyspace, Any, int]]:
        return [(self.keyspace, self.cache.find(self.keyspace, keys_of(1, 2)), 0)]

    @property
    def wanted(self) -> list[Wanted]:
        return [Wanted.from_first(self.keyspace, keys_of(7), ONE_PART, 0)]

    def many(self, count: int) -> Wanted:
        return Wanted.from_first(self.keyspace, keys_of(*range(10, 10 + count)), ONE_PART, 0)

    @property
    def clearings(self) -> Clearings:
        return Clearings(self.cache, None, None, lambda work: work.close())  # type: ignore[arg-type,return-value]


@pytest.fixture
def world() -> Iterator[World]:
    cache = make_cache()
    namespace, keyspace = make_keyspace(cache)
    store(cache, keyspace, keys_of(1, 2, 3))
    rows = cache.find(keyspace, keys_of(1, 2)).hit_rows
    cache.hold(rows)
    reserved = reserve(cache, keyspace, keys_of(4), ONE_PART, 0).parts
    made = World(cache, namespace, keyspace, rows, reserved, Leases())
    yield made
    cache.tier.close()


def drain(steps: Any) -> None:
    for _ in steps:
        pass


def unsettled(world: World) -> None:
    world.cache.uses.add(world.used)
    world.cache.uses.settle_due()


def forget_clears(world: World) -> None:
    """Too many are remembered, and the tier below can't list the namespaces that it has keys of."""
    world.cache.epochs.by_namespace.update((number.to_bytes(16, "big"), 1) for number in range(REMEMBERED_MAX + 1))
    world.cache.local = SimpleNamespace(namespaces=raiser(IndexError("7")))
    world.cache.forget_clears()


def take_event(world: World) -> None:
    events = WaitingEvents()
    events.put(Event(world.namespace, 0, b"", b""))
    events._remove = raiser(IndexError("7"))  # type: ignore[method-assign]
    events.take(world.namespace)


def misses(world: World) -> None:
    lookups = world.cache.lookups
    keys = keys_of(8)
    lookups.record(world.keyspace, keys, world.cache.find(world.keyspace, keys), np.zeros(1, bool), None)
    lookups.classify_misses()


def lease(act: Callable[[Leases, World], Any]) -> Callable[[World], Any]:
    """Breaks the sums of what leases hold."""

    def change(world: World) -> None:
        read, write = world.leases.add_read(world.rows), world.leases.add_write(world.reserved)
        world.leases.held = None  # type: ignore[assignment]
        act(world.leases, world)
        del read, write

    return change


def first_id(leases: Leases) -> int:
    return next(iter(leases._leases))


def last_lease(leases: Leases) -> Any:
    return list(leases._leases.values())[-1]


Change = Callable[[World], Any]
CHANGES: dict[str, tuple[str, Change]] = {
    # What is broken, and the change that meets it.
    "open a namespace": ("namespaces.enter", lambda w: w.cache.open_namespace(b"o" * 16, 0, "other", 32)),
    "close a namespace": ("namespaces.leave", lambda w: w.cache.close_namespace(w.namespace)),
    "declare a group": (
        "entries.keyspaces.add",
        lambda w: w.cache.declare(w.namespace, GroupSchema(5, GroupKind.FULL, 16, parts=1)),
    ),
    "learn sizes": (
        "eviction.admit",
        lambda w: w.cache.set_part_bytes(
            w.cache.declare(w.namespace, GroupSchema(5, GroupKind.FULL, 16, parts=1)), {0: 4096}
        ),
    ),
    "save the state": ("tier.pool.save_names", lambda w: w.cache.save_state()),
    "keep": ("entries.find", lambda w: w.cache.keep([(w.keyspace, keys_of(1))], soon=True)),
    "hold": ("entries.count_leases", lambda w: w.cache.hold(w.rows)),
    "unhold": ("entries.count_leases", lambda w: w.cache.unhold(w.rows)),
    "abort": ("entries.vacate", lambda w: w.cache.abort(w.reserved)),
    "abort, its rows": ("entries.retire", lambda w: w.cache.abort(w.reserved)),
    "drop": ("entries.index.remove", lambda w: w.cache.drop(w.rows)),
    "clear": ("entries.keyspaces.retire", lambda w: drain(w.cache.clear(w.namespace))),
    "clear, its steps": ("entries.retire", lambda w: drain(w.cache.clear(w.namespace))),
    "drop what is older": (
        "entries.retire",
        lambda w: drain(w.cache.drop_older(w.namespace, w.cache.epochs.began + 1)),
    ),
    "forget clears": ("", forget_clears),
    "reserve, its index": ("entries.index._place", lambda w: reserve_all(w.cache, w.wanted)),
    "reserve, its slots": ("tier.take", lambda w: reserve_all(w.cache, w.wanted)),
    "reserve in steps": (
        "eviction.make_room",
        lambda w: drain(reserve_in_steps(w.cache, [w.many(STEP_KEYS + 1)])),
    ),
    "find in steps": (
        "entries.has_committed",
        lambda w: drain(find_in_steps(w.cache, [(w.keyspace, w.many(FINDING_KEYS + 1).keys)])),
    ),
    "use": ("uses._add", lambda w: w.cache.uses.add(w.used)),
    "use a prompt": ("uses._add", lambda w: w.cache.uses.add_prompt(w.used, 32)),
    "count uses": ("uses._touch", unsettled),
    "take an event": ("tier.touch", take_event),
    "record a lookup": ("lookups._of", misses),
    "find the reason of a miss": ("lookups._ghosts.why", misses),
    "adopt": ("tier.restore", lambda w: adopt(w.cache, None)),
    "begin a clear": ("entries.keyspaces.retire", lambda w: w.clearings.begin(frozenset([w.namespace.fingerprint]))),
    "add a read lease": ("", lease(lambda leases, w: leases.add_read(w.rows))),
    "add a write lease": ("", lease(lambda leases, w: leases.add_write(w.reserved))),
    "grow a lease": ("", lease(lambda leases, w: leases.grow(next(iter(leases._leases.values())), w.rows))),  # type: ignore[arg-type]
    "fill a lease": ("", lease(lambda leases, w: leases.fill(last_lease(leases), w.reserved))),
    "end a lease": ("", lease(lambda leases, w: leases.end(first_id(leases)))),
    "end leases": ("", lease(lambda leases, w: leases.end_some(10))),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_breaks_off_tears_the_cache(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, change = CHANGES[name]
    if broken:
        *owners, attribute = broken.split(".")
        owner: Any = world.cache
        for each in owners:
            owner = getattr(owner, each)
        monkeypatch.setattr(owner, attribute, raiser(IndexError("7")))
    with pytest.raises(CacheTornError):
        change(world)


READS: dict[str, tuple[str, Change]] = {
    "find": ("entries.index.find", lambda w: w.cache.find(w.keyspace, keys_of(1))),
    "find all": ("entries.states", lambda w: w.cache.find_all([(w.keyspace, keys_of(1))])),
    "which may be held": ("entries.held.bounds", lambda w: w.cache.may_hold(0, w.rows)),
    "a snapshot": ("entries.packed", lambda w: w.cache.snapshot(w.keyspace, 0)),
    "figures": ("lookups.totals", lambda w: w.cache.figures()),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_that_breaks_off_does_not(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, read = READS[name]
    *owners, attribute = broken.split(".")
    owner: Any = world.cache
    for each in owners:
        owner = getattr(owner, each)
    monkeypatch.setattr(owner, attribute, raiser(IndexError("7")))
    with pytest.raises(IndexError):
        read(world)


def test_what_a_change_refuses_leaves_the_cache_whole(world: World) -> None:
    with pytest.raises(LimitError):
        changing(raiser(LimitError("full")))()
    world.cache.unhold(NO_ROWS)
    assert world.cache.find(world.keyspace, keys_of(1, 2, 3)).num_hits == 3
