"""The remote store with a real agent: what is put on one host comes on another one, verified, or not at all."""

from __future__ import annotations

import asyncio
import os
import time

import msgspec
import numpy as np
import pytest

from kvoffloadd.agentwire.frames import KEYS_MAX, READ_THREADS, VALUE_BYTES_MAX, Code, Presence, Swept
from kvoffloadd.agentwire.names import key_names, marker_name
from kvoffloadd.errors import RemoteStoreError, UsageError
from kvoffloadd.model import U64Array
from kvoffloadd.storage.remote.store import RemoteState
from kvoffloadd.storage.remote.transfers import RemoteStatus
from kvoffloadd.storage.remote.values import NotRead
from tests.storage.remote.conftest import Open
from tests.storage.remote.host import FOREVER_S, PARTS, SPACE, FaultyEngine, StoreHost, names_of, soon, until, value_of

OK, MISS, FAILED, NOT_ASKED = RemoteStatus.OK, RemoteStatus.MISS, RemoteStatus.FAILED, RemoteStatus.NOT_ASKED
NO, YES, UNKNOWN = Presence.NO, Presence.YES, Presence.UNKNOWN
MARKER = marker_name(SPACE.fingerprint, SPACE.generation, SPACE.era)


async def stored(host: StoreHost, count: int, seed: int) -> list[list[bytes]]:
    """Put `count` keys, and return their payloads. The host's slots have other bytes then."""
    payloads = host.fill(host.slots[:count], seed)
    assert await host.put(names_of(count), host.slots[:count]) == [OK] * count
    host.fill(host.slots[:count], seed + 1)
    return payloads


@pytest.mark.parametrize("engine_name", ["memory", "memory-stops"])
async def test_what_one_host_puts_another_one_gets(open_host: Open, seed: int, engine_name: str) -> None:
    here, there = await open_host(engine_name=engine_name), await open_host(engine_name=engine_name)
    payloads = await stored(here, 5, seed)
    before = there.fill(there.slots[:10], seed + 2) + there.fill(there.slots[16:], seed + 3)
    result = await there.get(names_of(6), there.slots[10:16])
    assert result.status.tolist() == [OK] * 5 + [MISS]
    assert there.payloads(there.slots[10:15]) == payloads
    assert (result.digests[:5] == there.digests(there.slots[10:15])).all()
    assert there.payloads(there.slots[:10]) + there.payloads(there.slots[16:]) == before
    assert there.store.corrupt.total() == 0


async def test_questions_tell_of_the_marker_and_of_each_key(open_host: Open, seed: int) -> None:
    host = await open_host()
    await stored(host, 2, seed)
    found = await host.exists(names_of(3))
    assert found is not None
    assert (found.marker, found.keys.tolist()) == (NO, [YES, YES, NO])
    await host.store.write_value(MARKER, b"", soon(), kept_s=FOREVER_S)
    found = await host.exists(names_of(0))
    assert found is not None
    assert (found.marker, found.keys.tolist()) == (YES, [])


async def test_the_largest_lookup(open_host: Open, seed: int) -> None:
    host = await open_host()
    await stored(host, 3, seed)
    found = await host.exists(names_of(KEYS_MAX))
    assert found is not None
    assert found.keys.tolist() == [YES] * 3 + [NO] * (KEYS_MAX - 3)
    with pytest.raises(UsageError):
        await host.exists(names_of(KEYS_MAX + 1))


async def test_the_first_one_who_puts_a_key_has_it(open_host: Open, seed: int) -> None:
    host = await open_host()
    payloads = await stored(host, 2, seed)
    assert await host.put(names_of(2), host.slots[4:6]) == [OK, OK]
    assert (await host.get(names_of(2), host.slots[8:10])).status.tolist() == [OK, OK]
    assert host.payloads(host.slots[8:10]) == payloads


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("flip", RemoteStatus.PAYLOAD),
        ("flip_header", RemoteStatus.HEADER),
        ("swap", RemoteStatus.HEADER),
        ("shorter", RemoteStatus.SIZE),
        ("longer", RemoteStatus.SIZE),
        ("SIZE", RemoteStatus.SIZE),
    ],
)
async def test_what_does_not_verify_is_counted_and_removed_there(
    open_host: Open, engine: FaultyEngine, seed: int, fault: str, status: RemoteStatus
) -> None:
    host = await open_host()
    await stored(host, 3, seed)
    engine.plant(f"get={fault}")
    result = await host.get(names_of(2), host.slots[8:10])
    assert result.status.tolist() == [status] * 2
    assert not result.digests.any()
    assert host.store.corrupt == {status: 2}
    await until(lambda: len(engine.names) == 1)
    engine.plant()
    assert (await host.get(names_of(3), host.slots[8:11])).status.tolist() == [MISS, MISS, OK]


async def test_an_object_of_other_parts_or_of_another_era_is_not_taken(
    open_host: Open, engine: FaultyEngine, seed: int
) -> None:
    """The name is no proof: a host that can write to the store can rename."""
    host = await open_host()
    await stored(host, 1, seed)
    other = msgspec.structs.replace(SPACE, era=b"another!")
    (was,) = engine.names
    renamed = was.replace(SPACE.era.hex(), other.era.hex())
    (engine.directory / was).rename(engine.directory / renamed)
    result = await host.get(names_of(1, other), host.slots[8:9])
    assert result.status.tolist() == [RemoteStatus.HEADER]
    await until(lambda: engine.names == [])


async def test_only_what_is_wrong_is_a_miss(open_host: Open, engine: FaultyEngine, seed: int) -> None:
    host = await open_host()
    payloads = await stored(host, 4, seed)
    objects = [engine.directory / name for name in engine.names]
    objects[1].write_bytes(objects[1].read_bytes()[:-1])
    damaged = bytearray(objects[2].read_bytes())
    damaged[-1] ^= 1
    objects[2].write_bytes(damaged)
    result = await host.get(names_of(4), host.slots[8:12])
    assert sorted(result.status.tolist()) == [OK, OK, RemoteStatus.SIZE, RemoteStatus.PAYLOAD]
    good = np.flatnonzero(result.status == OK)
    assert host.payloads(host.slots[8:12][good]) == [payloads[at] for at in good]
    assert host.store.corrupt == {RemoteStatus.SIZE: 1, RemoteStatus.PAYLOAD: 1}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("MISS", MISS),
        ("NOT_COMPLETE", MISS),
        ("LEASE_OVER", RemoteStatus.LEASE_OVER),
        ("REFUSED", FAILED),
    ],
)
async def test_codes_of_a_get(
    open_host: Open, engine: FaultyEngine, seed: int, code: str, status: RemoteStatus
) -> None:
    host = await open_host()
    await stored(host, 2, seed)
    engine.plant(f"get={code}")
    assert (await host.get(names_of(2), host.slots[8:10])).status.tolist() == [status] * 2
    assert host.store.corrupt.total() == 0
    assert len(engine.names) == 2
    assert host.store.starts == 1


async def test_a_put_that_finds_no_room(open_host: Open, engine: FaultyEngine, seed: int) -> None:
    host = await open_host()
    engine.plant("put=NO_SPACE")
    assert await host.put(names_of(2), host.slots[:2]) == [RemoteStatus.NO_SPACE] * 2
    assert host.store.can_write()


async def test_an_engine_that_raises_costs_the_call_alone(open_host: Open, engine: FaultyEngine, seed: int) -> None:
    host = await open_host(engine_name="memory-stops")
    payloads = await stored(host, 1, seed)
    engine.plant("get=raise", "exists=raise", "read=raise", "sweep=raise")
    assert (await host.get(names_of(1), host.slots[8:9])).status.tolist() == [FAILED]
    found = await host.exists(names_of(1))
    assert found is not None
    assert (found.marker, found.keys.tolist()) == (UNKNOWN, [UNKNOWN])
    with pytest.raises(RemoteStoreError):
        await value_of(host.store, "name", soon())
    with pytest.raises(RemoteStoreError):
        await host.store.sweep("kvo1/", soon())
    engine.plant()
    assert (await host.get(names_of(1), host.slots[8:9])).status.tolist() == [OK]
    assert host.payloads(host.slots[8:9]) == payloads
    assert host.store.starts == 1


# --- small objects ---


async def test_values(open_host: Open) -> None:
    host = await open_host()
    store = host.store
    assert await value_of(store, "a/b", soon()) is None
    await store.write_value("a/b", b"1", soon())
    await store.write_value("a/b", b"2", soon(), if_absent=True, kept_s=FOREVER_S)
    assert await value_of(store, "a/b", soon()) == b"1"
    await store.write_value("a/b", b"", soon())
    assert await value_of(store, "a/b", soon()) == b""
    await store.write_value("a/c", bytes(VALUE_BYTES_MAX), soon())
    assert await value_of(store, "a/c", soon()) == bytes(VALUE_BYTES_MAX)
    with pytest.raises(UsageError):
        await store.write_value("a/d", bytes(VALUE_BYTES_MAX + 1), soon())
    await store.remove(["a/b", "a/none"], soon())
    assert await value_of(store, "a/b", soon()) is None
    assert await store.sweep("a/", soon()) == (1, "")


async def test_many_values_come_in_their_order(open_host: Open, engine: FaultyEngine) -> None:
    """However many calls they take, by number and by size."""
    host = await open_host()
    values = {f"a/{number}": bytes([number % 256]) * (number % 5 and 20) for number in range(0, 1200, 7)}
    values |= {f"large/{number}": bytes([number]) * VALUE_BYTES_MAX for number in range(8)}
    for name, value in values.items():
        await host.store.write_value(name, value, soon())
    names = [f"large/{number}" for number in range(9)] + [f"a/{number}" for number in range(1200)] + ["a/7", "a/7"]
    assert await host.store.read_values(names, soon()) == [values.get(name) for name in names]
    assert await host.store.read_values([], soon()) == []


async def test_what_can_not_be_read_is_nothing_to_the_others(open_host: Open, engine: FaultyEngine) -> None:
    host = await open_host()
    for name in ("a", "bad", "b"):
        await host.store.write_value(name, name.encode(), soon())
    (engine.directory / "big").write_bytes(bytes(VALUE_BYTES_MAX + 1))
    engine.plant("read=REFUSED bad")
    expected = [b"a", NotRead(Code.REFUSED), NotRead(Code.SIZE), None, b"b"]
    assert await host.store.read_values(["a", "bad", "big", "none", "b"], soon()) == expected
    with pytest.raises(RemoteStoreError, match="refused"):
        await value_of(host.store, "bad", soon())
    engine.plant("read=raise bad")
    assert (await host.store.read_values(["a", "bad"], soon()))[1] == NotRead(Code.FAILED)
    engine.plant("read=raise")
    assert await host.store.read_values(["a", "b"], soon()) == [NotRead(Code.FAILED)] * 2
    engine.plant()
    assert await host.store.read_values(["bad", "a"], soon()) == [b"bad", b"a"]


async def test_one_that_hangs_holds_up_neither_the_others_nor_later_reads(
    open_host: Open, engine: FaultyEngine
) -> None:
    host = await open_host()
    for name in ("a", "bad"):
        await host.store.write_value(name, name.encode(), soon())
    engine.plant("read=hang bad")
    expected = [b"a", NotRead(Code.FAILED)]
    while await host.store.read_values(["a", "bad"], soon()) != expected:
        pass  # what is slow counts as failed, too
    reads = [host.store.read_values(["bad", "a", f"none{number}"], soon()) for number in range(20)]
    for found in await asyncio.gather(*reads):
        assert found[0] == NotRead(Code.FAILED)
    assert await value_of(host.store, "a", soon()) == b"a"
    engine.plant()
    while await host.store.read_values(["a", "bad"], soon()) != [b"a", b"bad"]:
        pass
    assert host.store.starts == 1


async def test_a_value_that_is_too_large_is_no_value(open_host: Open, engine: FaultyEngine) -> None:
    """This holds no matter which host wrote it."""
    host = await open_host()
    (engine.directory / "big").write_bytes(bytes(VALUE_BYTES_MAX + 1))
    with pytest.raises(RemoteStoreError):
        await value_of(host.store, "big", soon())
    assert host.store.starts == 1


async def test_removing_and_sweeping_take_what_they_name(open_host: Open, engine: FaultyEngine, seed: int) -> None:
    host = await open_host()
    await stored(host, 4, seed)
    await host.store.write_value(MARKER, b"", soon(), kept_s=FOREVER_S)
    await host.store.remove(key_names(SPACE, names_of(1).packed()), soon())
    found = await host.exists(names_of(4))
    assert found is not None
    assert (found.marker, found.keys.tolist()) == (YES, [NO, YES, YES, YES])
    assert await host.store.sweep(MARKER.rpartition("/era/")[0] + "/00000007", soon()) == (3, "")
    assert len(engine.names) == 1


async def test_what_is_kept_stays_until_then(open_host: Open, engine: FaultyEngine) -> None:
    """However full the store is. What is renewed stays longer, and a host that renews removes what is over."""
    host = await open_host()
    for kept_s in (0.001, FOREVER_S, None):
        await host.store.write_value(f"a{kept_s}", b"v", soon(), kept_s=kept_s)
    names = ["a0.001", f"a{FOREVER_S}", "aNone", "none"]
    await until(lambda: time.time() > max(os.stat(engine.directory / "aNone").st_mtime, 0) + 0.01)
    assert await host.store.read_values(names, soon()) == [None, b"v", b"v", None]
    await host.store.write_value("a0.001", b"w", soon(), if_absent=True, kept_s=0.001)
    await host.store.write_value("b", b"w", soon(), if_absent=True, kept_s=0.001)
    await asyncio.sleep(0.01)
    assert await host.store.renew(names, FOREVER_S, soon()) == [False, True, True, False]
    assert engine.names == [f"a{FOREVER_S}", "aNone"]


async def test_renewing_that_fails_is_an_error(open_host: Open, engine: FaultyEngine) -> None:
    host = await open_host()
    engine.plant("renew=REFUSED")
    with pytest.raises(RemoteStoreError, match=r"renewing: 2 of 2 failed \(refused\)"):
        await host.store.renew(["a", "b"], FOREVER_S, soon())


async def test_a_sweep_takes_as_many_steps_as_it_needs(open_host: Open, engine: FaultyEngine) -> None:
    host = await open_host()
    for number in range(250):
        (engine.directory / f"swept%2F{number}").touch()
    await host.store.write_value("swept", b"", soon())
    assert await host.store.sweep("swept/", soon()) == (250, "")
    assert engine.names == ["swept"]


async def test_a_sweep_stops_at_its_time_and_at_a_failure(open_host: Open, engine: FaultyEngine) -> None:
    host = await open_host()
    for number in range(250):
        (engine.directory / f"swept%2F{number}").touch()
    engine.plant("sweep_delay_s=0.2")
    with pytest.raises(RemoteStoreError, match="in time"):
        await host.store.sweep("swept/", time.monotonic() + 0.1)
    engine.plant("sweep=REFUSED")
    with pytest.raises(RemoteStoreError, match="refused"):
        await host.store.sweep("swept/", soon())
    engine.plant()
    assert (await host.store.sweep("swept/", soon()))[0] > 0
    assert engine.names == []


async def test_a_sweep_goes_on_from_where_time_was_over(open_host: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    host = await open_host()
    steps: list[Swept | RemoteStoreError] = [
        Swept(1, 7, "b"),
        Swept(2, 7, "c"),
        RemoteStoreError("late"),
        Swept(3, 1, ""),
    ]
    asked: list[str] = []

    async def step(prefix: str, until_s: float, after: str) -> Swept:
        asked.append(after)
        if isinstance(made := steps.pop(0), RemoteStoreError):
            raise made
        return made

    monkeypatch.setattr(host.store._values, "_sweep_step", step)
    assert await host.store.sweep("swept/", soon()) == (14, "c")
    assert await host.store.sweep("swept/", soon(), "c") == (1, "")
    assert asked == ["", "b", "c", "c"]


async def test_nothing_waits_for_a_sweep_that_hangs_and_the_agent_lives(
    open_host: Open, engine: FaultyEngine, seed: int
) -> None:
    """Mooncake's master takes as long as it takes: its answer may come after minutes, or never."""
    host = await open_host()
    payloads = await stored(host, 1, seed)
    engine.plant("sweep=hang")
    host.set_stuck_s(0.5)
    sweep = asyncio.create_task(host.store.sweep("kvo1/none/", soon()))
    await asyncio.sleep(2.0)
    host.set_stuck_s(FOREVER_S)
    assert host.store.figures()["agent"]["ends"] == 0
    with pytest.raises(RemoteStoreError, match="in time; it had not begun"):
        await host.store.sweep("kvo1/other/", time.monotonic() + 0.2)
    await host.store.write_value(MARKER, b"v", soon(), kept_s=FOREVER_S)
    assert await host.store.read_values([MARKER], soon()) == [b"v"]
    assert await host.store.renew([MARKER], FOREVER_S, soon()) == [True]
    await host.store.remove([MARKER], soon())
    assert (await host.get(names_of(1), host.slots[8:9])).status.tolist() == [OK]
    assert host.payloads(host.slots[8:9]) == payloads
    assert await host.put(names_of(1, first=9), host.slots[:1]) == [OK]
    assert (await host.exists(names_of(1))) is not None
    assert not sweep.done()
    engine.plant()
    assert await sweep == (0, "")
    assert host.store.starts == 1


async def test_a_failed_get_gives_its_memory_back_beside_a_sweep_that_hangs(
    open_host: Open, engine: FaultyEngine, seed: int
) -> None:
    """The agent has to end for that, and it does."""
    host = await open_host()
    await stored(host, 1, seed)
    engine.plant("sweep=hang", "get=FAILED")
    sweep = asyncio.create_task(host.store.sweep("kvo1/none/", soon()))
    await until(lambda: bool(host.store._values._sweeping.given))
    assert (await host.get(names_of(1), host.slots[8:9])).status.tolist() == [FAILED]
    with pytest.raises(RemoteStoreError, match="before the connection was lost"):
        await sweep
    engine.plant()


async def test_a_value_that_is_late_is_an_error(open_host: Open, engine: FaultyEngine) -> None:
    host = await open_host()
    engine.plant("read=hang", "write=hang")
    for _ in range(READ_THREADS):
        with pytest.raises(RemoteStoreError, match="in time; it may still be done"):
            await value_of(host.store, "a", time.monotonic() + 0.2)
    with pytest.raises(RemoteStoreError, match="in time; it had not begun"):
        await host.store.read_values(["a", "b"], time.monotonic() + 0.2)
    with pytest.raises(RemoteStoreError, match="may still be done"):
        await host.store.write_value("b", b"", time.monotonic() + 0.2)
    engine.plant()
    assert await value_of(host.store, "a", soon()) is None


# --- deadlines, room and breakers ---


async def test_a_lookup_that_is_late_is_none(open_host: Open, engine: FaultyEngine) -> None:
    host = await open_host()
    engine.plant("exists=hang")
    assert await host.exists(names_of(1), time.monotonic() + 0.2) is None
    engine.plant()
    found = await host.exists(names_of(1))
    assert found is not None


async def test_questions_do_not_wait_behind_bytes(open_host: Open, engine: FaultyEngine, seed: int) -> None:
    host = await open_host()
    await stored(host, 1, seed)
    engine.plant("get=hang", "put=hang")
    got = [host.begin_get(names_of(1), host.slots[at : at + 1])[1] for at in range(8, 14)]
    put = host.begin_put(names_of(1, first=5), host.slots[:1])[1]
    found = await host.exists(names_of(1))
    assert found is not None
    assert found.keys.tolist() == [YES]
    assert not put.done()
    assert not any(each.done() for each in got)
    engine.plant()
    assert [(await each).status.tolist() for each in got] == [[OK]] * 6
    assert (await put).tolist() == [OK]


async def test_what_has_not_begun_can_be_cancelled(open_host: Open, engine: FaultyEngine, seed: int) -> None:
    host = await open_host(get_threads=1)
    await stored(host, 1, seed)
    engine.plant("get=hang")
    running, result = host.begin_get(names_of(1), host.slots[8:9])
    waiting, never = host.begin_get(names_of(1), host.slots[9:10])
    assert not running.cancel()
    assert waiting.cancel()
    assert not waiting.cancel()
    before = host.fill(host.slots[9:10], seed)
    assert host.store.held_addresses().tolist() == host.slots[8].tolist()
    engine.plant()
    assert (await result).status.tolist() == [OK]
    assert not running.cancel()
    await host.close()
    assert not never.done()
    del before


async def test_what_does_not_begin_in_time_does_not_begin(open_host: Open, engine: FaultyEngine, seed: int) -> None:
    host = await open_host(get_threads=1)
    await stored(host, 1, seed)
    engine.plant("get=hang")
    late, result = host.begin_get(names_of(1), host.slots[8:9], time.monotonic() + 0.2)
    _, never = host.begin_get(names_of(1), host.slots[9:10], time.monotonic() + 0.2)
    assert (await never).status.tolist() == [NOT_ASKED]
    assert not result.done()
    assert not late.cancel()
    assert host.store.figures()["gets"]["late_bytes"] == 4096 + sum(PARTS)
    engine.plant()
    assert (await result).status.tolist() == [OK]  # late, and right
    assert host.store.figures()["gets"]["late_bytes"] == 0


async def test_no_more_bytes_are_in_flight_than_there_may_be(open_host: Open, engine: FaultyEngine, seed: int) -> None:
    one = 4096 + sum(PARTS)
    host = await open_host(inflight_bytes=3 * one)
    await stored(host, 3, seed)
    engine.plant("get=hang")
    first = host.begin_get(names_of(2), host.slots[8:10])[1]
    assert host.store._gets.room_bytes == one
    refused, result = host.begin_get(names_of(2), host.slots[10:12])
    assert (await result).status.tolist() == [NOT_ASKED] * 2
    assert not refused.cancel()
    cancelled, never = host.begin_get(names_of(2), host.slots[10:12])
    assert cancelled.cancel()
    second = host.begin_get(names_of(1), host.slots[10:11])[1]
    assert host.store._gets.room_bytes == 0
    assert host.store.put_room_bytes() == 3 * one
    engine.plant()
    assert (await first).status.tolist() == [OK] * 2
    assert (await second).status.tolist() == [OK]
    assert host.store._gets.room_bytes == 3 * one
    assert not never.done()


async def test_a_store_that_does_not_answer_is_asked_no_more_until_it_does(
    open_host: Open, engine: FaultyEngine
) -> None:
    host = await open_host()
    engine.plant("exists=hang")
    for _ in range(3):
        assert await host.exists(names_of(1), time.monotonic() + 0.1) is None
    assert host.store.state is RemoteState.OPEN
    assert not host.store.can_read()
    assert host.store.can_write()
    assert await host.exists(names_of(1)) is None  # at once, whatever its deadline
    engine.plant()
    await until(host.store.can_read)
    assert await host.exists(names_of(1)) is not None
    assert host.store.figures()["state"] == "ok"
    assert host.store.starts == 1


@pytest.mark.parametrize("code", [Code.FAILED, Code.REFUSED])
async def test_gets_that_fail_are_not_made_until_one_goes_well(
    open_host: Open, engine: FaultyEngine, seed: int, code: Code
) -> None:
    host = await open_host(engine_name="memory-stops")
    await stored(host, 1, seed)
    engine.plant(f"get={code.name}")
    for _ in range(20):
        await host.get(names_of(1), host.slots[8:9])
    assert host.store.state is RemoteState.OPEN
    assert not host.store.can_read()
    assert (await host.get(names_of(1), host.slots[8:9])).status.tolist() == [NOT_ASKED]
    assert await host.exists(names_of(1)) is not None
    engine.plant()
    await until(host.store.can_read)
    assert (await host.get(names_of(1), host.slots[8:9])).status.tolist() == [OK]
    assert host.store.figures()["gets"]["breaker"] == "closed"


def of(*numbers: int) -> U64Array:
    return np.array([numbers], np.uint64)


async def test_misuse_is_an_error(open_host: Open) -> None:
    host = await open_host()
    first, end = host.pool.address, host.pool.address + host.pool.capacity_bytes
    digests = np.zeros((1, 2, 2), np.uint64)
    for addresses, sizes in (
        (of(first, first), [1]),
        (of(first), [1, 2]),
        (of(first, first), [1, 0]),
        (of(first, end - 4), [1, 5]),
        (of(first - 1, first), [1, 1]),
        (of(first, (1 << 64) - 4), [1, 8]),
        (of(first, first), [1, (1 << 64) - 1]),
        (np.zeros((1, 0), np.uint64), []),
        (np.full((1, 124), first, np.uint64), [1] * 124),
    ):
        with pytest.raises(UsageError):
            host.store.get(names_of(1), addresses, sizes, soon(), lambda result: None)
    with pytest.raises(UsageError):
        host.store.get(names_of(2), host.slots[:1], PARTS, soon(), lambda result: None)
    with pytest.raises(UsageError):
        host.store.get(names_of(0), host.slots[:0], PARTS, soon(), lambda result: None)
    with pytest.raises(UsageError):
        host.store.put(names_of(1), host.slots[:1], PARTS, digests[:, :1], soon(), lambda status: None)
    assert host.store.check() == []


async def test_figures_are_what_msgpack_can_carry(open_host: Open) -> None:
    host = await open_host()
    figures = msgspec.msgpack.decode(msgspec.msgpack.encode(host.store.figures()))
    assert figures["state"] == "ok"
    assert figures["agent"]["pid"] == host.pid
    assert figures["agent"]["about"].startswith("memory")
