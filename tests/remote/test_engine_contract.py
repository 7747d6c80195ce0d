"""Tests what every engine must do, as `Engine` documents it: the same tests on all of them, against real stores."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvoffloadd.agentwire.frames import HEADER_BYTES, Code, Presence
from kvoffloadd.testing.wait import until
from scripts.harness.enginehost import EngineHost
from tests.remote.cluster import MEMORY_BYTES, Cluster
from tests.remote.objects import KIB, MIB, Object, Places, get, put

YES, NO = Presence.YES, Presence.NO


def named(prefix: str, count: int, *part_bytes: int) -> list[Object]:
    return [Object(f"{prefix}{number:04x}", number, part_bytes or (64 * KIB,)) for number in range(count)]


def removed(engine: EngineHost, *names: str) -> list[int]:
    """Returns the code of `remove` for each in the end. For an object that was just read, a store's code may be that it
    is still there: this asks again, as the daemon does.
    """
    codes = dict.fromkeys(names, int(Code.REFUSED))

    def all_are_told() -> bool:
        left = [name for name in codes if codes[name] < 0]
        codes.update(zip(left, engine.call("remove", left), strict=True))
        return min(codes.values()) >= 0

    until(all_are_told, "each of them is removed, or was not there", every_s=0.05)
    return [codes[name] for name in names]


def test_what_one_host_puts_another_one_gets(cluster: Cluster, prefix: str) -> None:
    """Header and parts go from their places to other places, and nothing is written outside these."""
    here, there = cluster.engine(0), cluster.engine(1)
    objects = [Object(f"{prefix}{n}", n, (4 * KIB * (n + 1), 12 * KIB, 100 * KIB)) for n in range(5)]
    assert there.exists(*(each.name for each in objects)) == [NO] * 5
    assert put(here, *objects) == [each.size_bytes for each in objects]
    assert there.exists(*(each.name for each in objects)) == [YES] * 5
    codes, places = get(there, *objects)
    assert codes == [each.size_bytes for each in objects]
    assert all(map(places.holds, range(5)))
    assert places.guards_stand()


def test_pieces_may_be_cut_otherwise(cluster: Cluster, prefix: str) -> None:
    engine = cluster.engine()
    put(engine, Object(prefix + "a", 1, (8 * KIB, 56 * KIB)))
    codes, places = get(engine, Object(prefix + "a", 1, (4 * KIB, 32 * KIB, 28 * KIB)))
    assert codes == [HEADER_BYTES + 64 * KIB]
    assert places.holds(0)


def test_nothing_is_there(cluster: Cluster, prefix: str) -> None:
    engine = cluster.engine()
    assert engine.exists(prefix + "a") == [NO]
    codes, places = get(engine, *named(prefix, 2))
    assert codes == [Code.MISS] * 2
    assert places.is_wiped(0) and places.is_wiped(1)
    assert engine.read(prefix + "a") is None
    assert removed(engine, prefix + "a", prefix + "b") == [0, 0]
    assert engine.sweep(prefix) == 0


def test_calls_may_name_nothing(cluster: Cluster) -> None:
    engine = cluster.engine()
    assert engine.exists() == engine.get([]) == engine.put([]) == engine.call("remove", []) == []


def test_some_of_a_batch_come(cluster: Cluster, prefix: str) -> None:
    """Results are in the order of the call: a miss, an object that is larger than its place, and
    one that is smaller.
    """
    engine = cluster.engine()
    stored = named(prefix, 5)
    put(engine, *stored)
    asked = list(stored)
    asked[1] = Object(prefix + "none", 1)
    asked[2] = Object(stored[2].name, 2, (32 * KIB,))
    asked[3] = Object(stored[3].name, 3, (96 * KIB,))
    codes, places = get(engine, *asked)
    assert codes == [stored[0].size_bytes, Code.MISS, Code.SIZE, Code.SIZE, stored[4].size_bytes]
    assert places.holds(0) and places.holds(4)
    assert places.guards_stand()
    codes, places = get(engine, *stored)  # the engine is none the worse
    assert all(map(places.holds, range(5)))


def test_what_is_there_stays_as_it_is(cluster: Cluster, prefix: str) -> None:
    """Keys name contents: the second one to put the same has succeeded."""
    here, there = cluster.engine(0), cluster.engine(1)
    first, second = Object(prefix + "a", 1), Object(prefix + "a", 2)
    assert put(here, first) == put(there, second) == [first.size_bytes]
    _, places = get(there, first)
    assert places.holds(0)


def test_many_names_are_asked_for_at_once(cluster: Cluster, prefix: str, rng: random.Random) -> None:
    engine = cluster.engine()
    names = [f"{prefix}{number:064x}" for number in range(4097)]
    there = set(rng.sample(range(4097), 40))
    put(engine, *(Object(names[number], number, (KIB,)) for number in there))
    assert engine.exists(*names) == [YES if number in there else NO for number in range(4097)]


@pytest.mark.parametrize("kept_s", [None, 3600.0], ids=["ordinary", "kept"])
def test_small_objects_are_written_and_read(cluster: Cluster, prefix: str, kept_s: float | None) -> None:
    here, there = cluster.engine(0), cluster.engine(1)
    for value in (b"x", bytes(range(256)) * 256):
        name = f"{prefix}{len(value)}"
        assert here.call("write", name, value, if_absent=True, kept_s=kept_s) == len(value)
        assert there.read(name) == value
        assert there.exists(name) == [YES]
        # It is leased now, where there are leases.
        assert there.call("write", name, b"other", if_absent=True, kept_s=kept_s) == len(b"other")
        assert here.read(name) == value
        assert there.call("write", name, b"another", if_absent=False, kept_s=kept_s) == len(b"another")
        assert here.read(name) == b"another"
        assert removed(here, name) == [1]
        assert there.read(name) is None


def test_many_small_objects_are_read_at_once(cluster: Cluster, prefix: str) -> None:
    """Results are in the order of the call, with those that are not there."""
    here, there = cluster.engine(0), cluster.engine(1)
    values = {f"{prefix}{number}": b"%d" % number * (number + 1) for number in range(0, 150, 3)}
    for name, value in values.items():
        assert here.call("write", name, value, if_absent=True, kept_s=None) == len(value)
    names = [f"{prefix}{number}" for number in range(150)]
    assert there.call("read", names) == [values.get(name) for name in names]
    assert there.call("read", []) == []


def test_small_objects_are_renewed(cluster: Cluster, prefix: str) -> None:
    here, there = cluster.engine(0), cluster.engine(1)
    assert here.call("write", prefix + "a", b"v", if_absent=True, kept_s=3600.0) == 1
    assert there.call("renew", [prefix + "none", prefix + "a"], 7200.0) == [0, 1]
    assert there.call("renew", [], 7200.0) == []
    assert here.read(prefix + "a") == b"v"
    assert removed(here, prefix + "a") == [1]
    assert there.call("renew", [prefix + "a"], 7200.0) == [0]


def test_what_is_removed_is_gone_for_all_at_once(cluster: Cluster, prefix: str) -> None:
    """Though it was just asked for, and fetched."""
    here, there = cluster.engine(0), cluster.engine(1)
    objects = named(prefix, 3)
    names = [each.name for each in objects]
    put(here, *objects)
    there.exists(*names)
    get(there, *objects)
    assert removed(here, *names[:2], prefix + "none") == [1, 1, 0]
    assert there.exists(*names) == [NO, NO, YES]
    codes, _ = get(there, *objects)
    assert codes == [Code.MISS, Code.MISS, objects[2].size_bytes]
    assert put(here, objects[0]) == [objects[0].size_bytes]
    codes, places = get(there, objects[0])
    assert places.holds(0)


def test_a_sweep_takes_one_prefix(cluster: Cluster, prefix: str) -> None:
    """All of it, whatever leases say, and nothing else: letters mean themselves."""
    engine = cluster.engine()
    swept = named(f"{prefix}1.a/", 20, KIB)
    kept = [Object(prefix + "1xa/0", 1, (KIB,)), Object(prefix + "1.b/0", 1, (KIB,)), Object(prefix + "1.a", 1, (KIB,))]
    put(engine, *swept, *kept)
    engine.exists(*(each.name for each in swept))
    assert engine.sweep(prefix + "1.a/") == len(swept)
    assert engine.exists(*(each.name for each in swept)) == [NO] * len(swept)
    assert engine.exists(*(each.name for each in kept)) == [YES] * len(kept)


@pytest.mark.slow
def test_who_writes_first_wins(cluster: Cluster, prefix: str) -> None:
    """And all agree on who that was: an era is chosen so."""
    engines = [cluster.engine(number) for number in range(3)]
    for race in range(20):
        name = f"{prefix}{race}"
        calls = [
            engine.begin("write", name, bytes([number]) * 16, if_absent=True, kept_s=3600.0)
            for number, engine in enumerate(engines)
        ]
        for call in calls:
            call.result()
        assert len({engine.read(name) for engine in engines}) == 1
    engines[0].sweep(prefix)  # kept


def test_calls_of_many_threads_do_not_meet(cluster: Cluster, prefix: str, seed: int) -> None:
    engine = cluster.engine()
    objects = named(prefix, 8, 200 * KIB)
    put(engine, *objects)

    def work(number: int) -> list[str]:
        """Work with separate memory."""
        rng = np.random.default_rng([seed, number])
        wrong = []
        for _ in range(15):
            asked = [objects[index] for index in rng.permutation(8)[:3]]
            places = Places(engine, asked, at=number * 4 * MIB)
            codes = engine.get(places.wanted)
            wrong += [each.name for at, each in enumerate(asked) if codes[at] < 0 or not places.holds(at)]
            if engine.exists(*(each.name for each in asked)) != [YES] * 3 or not places.guards_stand():
                wrong.append("exists or guards")
        return wrong

    with ThreadPoolExecutor(6) as threads:
        assert [wrong for found in threads.map(work, range(6)) for wrong in found] == []


@pytest.mark.slow
def test_a_full_store_makes_room(cluster: Cluster, prefix: str) -> None:
    """What an `exists` still uses, and is kept, is there at the end; the newest objects are; and all is bounded."""
    engine = cluster.engine()
    marker, objects = prefix + "marker", named(prefix, 150, MIB - HEADER_BYTES)
    assert engine.call("write", marker, b"here", if_absent=True, kept_s=3600.0) == 4
    codes = []
    for each in objects:
        assert engine.exists(marker) == [YES]
        codes += put(engine, each)
    assert set(codes) <= {MIB, Code.NO_SPACE}
    assert codes.count(MIB) > len(codes) * 2 // 3
    there = engine.exists(*(each.name for each in objects))
    assert 0 < there.count(YES) <= MEMORY_BYTES // MIB
    left = [each for each, found in zip(objects, there, strict=True) if found == YES]
    codes, places = get(engine, left[-1])
    assert codes == [MIB]
    assert places.holds(0)
    assert engine.read(marker) == b"here"
    engine.sweep(prefix)


def test_what_is_too_large_is_refused(cluster: Cluster, prefix: str) -> None:
    engine = cluster.engine()
    assert put(engine, Object(prefix + "large", 1, (80 * MIB,))) == [Code.NO_SPACE]
    assert engine.exists(prefix + "large") == [NO]
    small = Object(prefix + "small", 1)
    assert put(engine, small) == [small.size_bytes]
    _, places = get(engine, small)
    assert places.holds(0)


@pytest.mark.slow
def test_it_does_what_a_table_of_objects_does(cluster: Cluster, prefix: str, rng: random.Random) -> None:
    """Some hundred calls at random, from two hosts, have the results that a dict gives."""
    engines = [cluster.engine(0), cluster.engine(1)]
    table: dict[str, Object] = {}
    names = [f"{prefix}{place}/{number}" for place in "ab" for number in range(6)]
    for step in range(200):
        engine = rng.choice(engines)
        chosen = rng.sample(names, rng.randint(1, 5))
        action = rng.choice(("put", "put", "get", "get", "exists", "remove", "sweep"))
        note = f"step {step}: {action} {chosen}"
        if action == "put":
            objects = [Object(name, step, (rng.choice((1, 500, 4096, 70_000)),)) for name in chosen]
            assert put(engine, *objects) == [each.size_bytes for each in objects], note
            table = {each.name: each for each in objects} | table
        elif action == "get":
            asked = [table.get(name, Object(name, 0)) for name in chosen]
            codes, places = get(engine, *asked)
            assert codes == [each.size_bytes if each.name in table else Code.MISS for each in asked], note
            assert all(places.holds(at) for at, each in enumerate(asked) if each.name in table), note
            assert places.guards_stand(), note
        elif action == "exists":
            assert engine.exists(*chosen) == [YES if name in table else NO for name in chosen], note
        elif action == "remove":
            assert removed(engine, *chosen) == [int(name in table) for name in chosen], note
            table = {name: each for name, each in table.items() if name not in chosen}
        elif rng.random() < 0.3:
            gone = [name for name in table if name.startswith(prefix + "a/")]
            assert engine.sweep(prefix + "a/") == len(gone), note
            table = {name: each for name, each in table.items() if name not in gone}
