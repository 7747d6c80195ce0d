"""Mooncake's failures, each on the real thing: what the engine calls them, and that memory stays as it is afterwards.

A get that the engine has ended with anything but FAILED may not write any more: each test fills its memory then, lets
whatever was held up come, and compares.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffloadd.agentwire.frames import Code, Presence
from kvoffloadd.testing.process import DaemonError
from kvoffloadd.testing.wait import until
from scripts.harness.enginehost import BASE, EngineHost, Pending
from scripts.harness.lab import Host
from scripts.harness.stores import MooncakeStore
from scripts.harness.wait import throughout
from tests.remote.cluster import Cluster
from tests.remote.objects import MIB, Object, Places, get, put
from tests.remote.stranger import stranger

pytestmark = pytest.mark.remote

QUIET_S = 3.0
"""How long memory is watched after what was held up can come."""
NO, YES, UNKNOWN = Presence
LARGE = Object("kvo1/large", 1, (16 * MIB,))
SMALL = Object("kvo1/small", 2)
Make = Callable[..., Cluster]


@pytest.fixture
def cluster(make_isolated: Make) -> Cluster:
    """A reader and a writer on hosts 0 and 1, the store on host 2, the master on the hub."""
    return make_isolated("mooncake")


def begin_get(cluster: Cluster, engine: EngineHost, asked: Object) -> tuple[Pending, Places]:
    """Begins a get over a slow link: some of it has come, and most of it has not."""
    cluster.lab.slow(cluster.lab.hosts[2], "16mbit")
    places = Places(engine, [asked])
    call = engine.begin("get", places.wanted)
    until(lambda: not places.is_wiped(0), "the first bytes have come")
    assert not call.is_done()
    return call, places


def stays_wiped(places: Places) -> None:
    """Nothing comes any more."""
    throughout(lambda: places.is_wiped(0), "nothing writes there", QUIET_S)


def ports_of(host: Host, pid: int) -> list[str]:
    """Where this process listens."""
    command = [*host.enter, "ss", "-ltnpH"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    return [line.split()[3].rpartition(":")[2] for line in lines if f"pid={pid}," in line]


def test_a_store_dies_in_the_middle_of_a_get(cluster: Cluster) -> None:
    engine = cluster.engine()
    assert put(engine, LARGE) == [LARGE.size_bytes]
    call, places = begin_get(cluster, engine, LARGE)
    cluster.stores[0].kill()
    assert call.result() == [Code.REFUSED]
    places.wipe()
    cluster.lab.fast(cluster.lab.hosts[2])
    stays_wiped(places)


def test_a_dead_store_is_noticed_and_its_keys_are_misses(make_isolated: Make) -> None:
    """`exists` is wrong about them until then, and gets fail at once."""
    cluster = make_isolated("mooncake", "--client_ttl=2")
    engine = cluster.engine()
    put(engine, SMALL)
    cluster.stores[0].kill()
    codes, places = get(engine, SMALL)
    assert codes in ([Code.REFUSED], [Code.MISS])
    assert places.is_wiped(0)
    until(lambda: engine.exists(SMALL.name) == [NO], "the master has noticed")
    assert get(engine, SMALL)[0] == [Code.MISS]
    assert put(engine, SMALL) == [Code.NO_SPACE]  # there is no other store
    cluster.stores[0].start()
    until(lambda: put(engine, SMALL) == [SMALL.size_bytes], "the store's memory can be used")
    assert get(engine, SMALL)[1].holds(0)


def test_the_store_is_cut_off_while_nothing_moves(cluster: Cluster) -> None:
    """The next get goes to a connection that is open, and dead."""
    engine = cluster.engine()
    put(engine, SMALL)
    get(engine, SMALL)
    cluster.lab.cut(cluster.lab.hosts[0], cluster.lab.hosts[2])
    codes, places = get(engine, SMALL)
    assert codes == [Code.REFUSED]
    assert engine.exists(SMALL.name) == [YES]  # of the master, which is not
    places.wipe()
    cluster.lab.mend(cluster.lab.hosts[0])
    stays_wiped(places)


def test_the_store_is_cut_off_in_the_middle_of_a_get(cluster: Cluster) -> None:
    """The call does not end, and `exists` is answered meanwhile. With the process's end the memory is ours again."""
    engine = cluster.engine()
    put(engine, LARGE)
    call, places = begin_get(cluster, engine, LARGE)
    cluster.lab.cut(cluster.lab.hosts[0], cluster.lab.hosts[2])
    throughout(lambda: not call.is_done(), "it hangs", 3.0)
    assert engine.exists(LARGE.name) == [YES]
    engine.kill()
    places.wipe()
    cluster.lab.mend(cluster.lab.hosts[0])
    cluster.lab.fast(cluster.lab.hosts[2])
    stays_wiped(places)


def test_a_store_that_is_stopped_holds_up_gets_alone(cluster: Cluster) -> None:
    engine = cluster.engine()
    put(engine, LARGE, SMALL)
    call, places = begin_get(cluster, engine, LARGE)
    cluster.stores[0].pause()
    assert engine.exists(SMALL.name, "kvo1/none") == [YES, NO]
    engine.kill()
    places.wipe()
    cluster.stores[0].resume()
    stays_wiped(places)
    with pytest.raises(DaemonError, match="ended"):
        call.result()


def test_a_store_that_is_stopped_holds_up_its_own_small_objects_alone(make_loopback: Make, tmp_path: Path) -> None:
    cluster = make_loopback("mooncake", "--client_ttl=600")
    lab, master = cluster.lab, cluster.stores[1]
    with MooncakeStore(lab.hosts[1], tmp_path, master, "64MB"):
        writer, reader = cluster.engine(0), cluster.engine(0)
        values = {f"kvo1/{number}": b"%d" % number for number in range(40)}
        for name, value in values.items():
            assert writer.call("write", name, value, if_absent=True, kept_s=None) == len(value)
        names = [*values, "kvo1/none"]
        expected = [*values.values(), None]
        assert reader.call("read", names) == expected
        cluster.stores[0].pause()
        for _ in range(5):
            call = reader.begin("read", names)
            found = call.result()
            assert found.count(Code.FAILED) in range(1, 40)
            assert all(a in (Code.FAILED, b) for a, b in zip(found, expected, strict=True))
        cluster.stores[0].resume()
        until(lambda: reader.call("read", names) == expected, "it is read again")


@pytest.mark.slow
def test_pins_end_where_the_master_allows_those_that_are_so_long(make_loopback: Make) -> None:
    """Others are for good. What is full of pins alone takes no more, so these are few."""
    cluster = make_loopback(
        "mooncake", "--max_kv_soft_pin_ttl=2h", "--allow_evict_soft_pinned_objects=false", "--default_kv_lease_ttl=500"
    )
    engine, other = cluster.engine(0), cluster.engine(1)
    assert other.call("write", "kvo1/good", b"v", if_absent=True, kept_s=86400.0) == 1
    assert "pinned for good" in other.log()
    assert engine.call("write", "kvo1/long", b"v", if_absent=True, kept_s=3600.0) == 1
    assert engine.call("write", "kvo1/over", b"v", if_absent=True, kept_s=0.001) == 1
    names = ["kvo1/good", "kvo1/long", "kvo1/over"]
    numbers = iter(range(10_000))

    def fill() -> bool:
        time.sleep(1.0)  # the lease of the question before ends
        for _ in range(150):  # more than there is room for: the question is a use, too
            put(engine, Object(f"kvo1/{next(numbers)}", 1, (MIB,)))
        return engine.exists(*names) != [YES, YES, YES]

    until(fill, "what is over is evicted")
    assert engine.exists(*names) == [YES, YES, NO]


def test_the_master_is_cut_off(cluster: Cluster) -> None:
    engine = cluster.engine()
    put(engine, SMALL)
    cluster.lab.cut(cluster.lab.hosts[0], cluster.lab.hub)
    assert engine.exists(SMALL.name, "kvo1/none") == [UNKNOWN, UNKNOWN]
    codes, places = get(engine, SMALL)
    assert codes == [Code.REFUSED]
    assert places.is_wiped(0)
    assert put(engine, Object("kvo1/other", 1)) == [Code.REFUSED]
    assert engine.call("remove", [SMALL.name]) == [Code.REFUSED]
    assert engine.sweep("kvo1/") == Code.REFUSED
    assert engine.read(SMALL.name) == Code.FAILED
    assert engine.call("write", "kvo1/w", b"x", if_absent=True, kept_s=None) == Code.FAILED
    cluster.lab.mend(cluster.lab.hosts[0])
    until(lambda: engine.exists(SMALL.name) == [YES], "it is heard again")
    assert get(engine, SMALL)[1].holds(0)


def test_the_master_dies_and_comes_back_without_its_memory(cluster: Cluster) -> None:
    """All keys are misses, and may be put again, over what is left in the stores."""
    engine = cluster.engine()
    put(engine, SMALL)
    master = cluster.stores[1]
    master.kill()
    assert engine.exists(SMALL.name) == [UNKNOWN]
    assert get(engine, SMALL)[0] == [Code.REFUSED]
    master.start()
    until(lambda: engine.exists(SMALL.name) == [NO], "it is heard again")
    assert get(engine, SMALL)[0] == [Code.MISS]
    until(lambda: put(engine, SMALL) == [SMALL.size_bytes], "the store has come back to it")
    assert get(engine, SMALL)[1].holds(0)


def test_what_is_being_put_is_not_there_yet(cluster: Cluster) -> None:
    """Nor is it after its writer's death."""
    reader, writer = cluster.engine(0), cluster.engine(1)
    cluster.lab.slow(cluster.lab.hosts[1], "16mbit")
    places = Places(writer, [LARGE])
    places.fill()
    call = writer.begin("put", places.wanted)
    until(lambda: get(reader, LARGE)[0] == [Code.NOT_COMPLETE], "it has begun")
    assert reader.exists(LARGE.name) == [NO]
    assert put(reader, LARGE)[0] in (LARGE.size_bytes, Code.REFUSED)  # either may happen: no matter
    writer.kill()
    assert call.is_done()
    codes, places = get(reader, LARGE)
    assert codes in ([Code.NOT_COMPLETE], [Code.MISS])
    assert places.is_wiped(0)


def test_a_lease_that_is_over_before_the_bytes_are_there(make_isolated: Make) -> None:
    cluster = make_isolated("mooncake", "--default_kv_lease_ttl=300")
    engine = cluster.engine()
    asked = Object("kvo1/lease", 1, (4 * MIB,))
    put(engine, asked)
    cluster.lab.slow(cluster.lab.hosts[2], "16mbit")
    codes, places = get(engine, asked)
    assert codes == [Code.LEASE_OVER]
    places.wipe()
    stays_wiped(places)


def test_who_leaves_in_the_middle_of_a_put_damages_nobody(cluster: Cluster) -> None:
    """Its place is given to others while its bytes are on their way: with its process, they are not."""
    reader, writer = cluster.engine(0), cluster.engine(1)
    cluster.lab.slow(cluster.lab.hosts[1], "16mbit")
    places = Places(writer, [LARGE])
    places.fill()
    writer.begin("put", places.wanted)
    until(lambda: get(reader, LARGE)[0] == [Code.NOT_COMPLETE], "it has begun")
    writer.kill()
    cluster.lab.fast(cluster.lab.hosts[1])
    others = [Object(f"kvo1/other{number}", number, (MIB,)) for number in range(40)]
    for each in others:
        put(reader, each)
    time.sleep(QUIET_S)
    codes, places = get(reader, *others)
    assert any(code > 0 for code in codes)
    assert all(places.holds(at) for at, code in enumerate(codes) if code > 0)


def test_nobody_answers_at_the_start(cluster: Cluster) -> None:
    for store in cluster.stores:
        store.kill()
    with pytest.raises(DaemonError, match=r"EngineError \(store\): the master at .* does not answer"):
        cluster.engine()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"host": "10.77.0.99"}, "not an address of this host"),
        ({"host": "no such name"}, "not an address of this host"),
        ({"master": "10.77.0.1"}, "HOST:PORT"),
    ],
)
def test_settings_that_cannot_be_right(make_isolated: Make, settings: dict[str, str], complaint: str) -> None:
    cluster = make_isolated("mooncake")
    with pytest.raises(DaemonError, match=rf"EngineError \(operator\): .*{complaint}"):
        cluster.engine(0, settings)


def test_nobody_reaches_our_memory(cluster: Cluster) -> None:
    """Mooncake serves registered memory to any peer that asks. Its own store's memory proves that it would."""
    engine = cluster.engine()
    put(engine, SMALL)
    get(engine, SMALL)
    address = int(engine.call(BASE))
    endpoints = [f"{cluster.lab.hosts[0].address}:{port}" for port in ports_of(cluster.lab.hosts[0], engine.pid)]
    assert endpoints
    before = engine.memory.copy()
    assert stranger(cluster.lab.hosts[1], "reach", str(address), *endpoints) == {"read": 0, "written": 0}
    assert (engine.memory == before).all()
    assert stranger(cluster.lab.hosts[1], "scribble", cluster.stores[1].place, SMALL.name, "4096") == 0
    codes, places = get(engine, SMALL)
    assert codes == [SMALL.size_bytes]  # Mooncake does not notice: our checksums do
    assert not places.holds(0)
