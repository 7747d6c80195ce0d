"""Tests keys on disk: what `pin` and `prefetch` promise, and the `ready` that reports the result."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import AsyncClient, Client, Found, KvCache, Outcome
from kvoffloadd.client.calls import ping, prefetch
from kvoffloadd.client.connection import ConnectionState
from kvoffloadd.client.events import EventQueue
from kvoffloadd.errors import ConnectionLostError, DeadlineError, RemoteError, UsageError
from kvoffloadd.model import U8Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import encode
from kvoffloadd.protocol.state import ProtocolState
from kvoffloadd.testing.wait import HANG_S
from tests.client.fake_daemon import FakeDaemon, FakeSession
from tests.client.flavours import NAMESPACE
from tests.client.test_lifetime import eof, fake_is_idle

HIT, PENDING, MISS = 1, 2, 0


@pytest.fixture(autouse=True)
def on_disk(fake: FakeDaemon, keys: U8Array) -> None:
    """The first key is in memory, the next two are on disk."""
    fake.held = {keys[0].tobytes()}
    fake.on_disk = {keys[1].tobytes(), keys[2].tobytes()}


def seq_of(found: Found) -> int:
    assert found.promotion is not None
    return found.promotion.seq


def bring(fake: FakeDaemon, found: Found, delay_s: float = 0.0) -> None:
    """Have the fake say that this one's keys have come."""
    fake.soon(functools.partial(fake.bring, seq_of(found)), delay_s)


def due(client: Any) -> int:
    """How many `ready` the client knows to be due."""
    core = getattr(client, "_core", None) or client._client._core
    return len(core._transport.current._promotions)


def states(found: Found) -> list[int]:
    listed: list[int] = found.states[0].tolist()
    return listed


# --- what it is for ----------------------------------------------------------------------------------


def test_a_pin_is_answered_anew(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.pin({0: keys})
    assert (states(found), found.promoting, found.ready) == ([HIT, PENDING, PENDING, MISS], 2, False)
    assert found.lease
    bring(fake, found, 0.05)
    anew = client.wait_ready(found, HANG_S)
    assert (states(anew), anew.promoting, anew.ready) == ([HIT, HIT, HIT, MISS], 0, True)
    assert anew.boundaries.tolist() == [16]
    assert (anew.lease, anew.lease.boot_id) == (found.lease, fake.boot_id)
    assert found.ready
    assert client.wait_ready(found, HANG_S) is client.wait_ready(anew, HANG_S) is anew
    client.release(anew.lease)
    assert fake.leases == set()


def test_a_prefetch_has_no_lease(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.prefetch({0: keys})
    assert (found.promoting, found.lease) == (2, 0)
    bring(fake, found)
    anew = client.wait_ready(found, HANG_S)
    assert (states(anew), anew.lease) == ([HIT, HIT, HIT, MISS], 0)


def test_what_could_not_be_read_is_a_miss(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.pin({0: keys})
    fake.soon(lambda: fake.bring(seq_of(found), found=False))
    anew = client.wait_ready(found, HANG_S)
    assert (states(anew), anew.lease) == ([HIT, MISS, MISS, MISS], found.lease)


def test_where_nothing_is_promoted_nothing_is_waited_for(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    for found in (client.pin({0: keys[:1]}), client.prefetch({0: keys[3:]}), client.lookup({0: keys})):
        assert (found.promoting, found.ready) == (0, True)
        assert client.wait_ready(found, HANG_S) is found
    assert due(client) == 0
    eof(fake)
    fake_is_idle(fake)
    assert client.wait_ready(found, HANG_S) is found


def test_ready_before_it_is_waited_for(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.pin({0: keys})
    bring(fake, found)
    fake_is_idle(fake)
    client.ping()  # takes it in
    assert found.ready
    eof(fake)
    fake_is_idle(fake)
    client.ping()  # on a new connection
    assert states(client.wait_ready(found, HANG_S)) == [HIT, HIT, HIT, MISS]


def test_waiting_without_time_takes_what_has_come(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.pin({0: keys})
    bring(fake, found)
    fake_is_idle(fake)
    assert client.wait_ready(found, HANG_S).promoting == 0


def test_ready_in_the_same_bytes_as_found(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    def at_once(peer: FakeSession, message: m.Pin) -> bool:
        found = m.Found(seq=message.seq, states=[b"\1\2\2\0"], boundaries=b"", lease=5, promoting=2)
        ready = m.Ready(seq=message.seq, states=[b"\1\1\1\0"], boundaries=b"", lease=5)
        peer.raw(peer.connection.send(found) + peer.connection.send(ready))
        return True

    fake.on["pin"] = at_once
    found = client.pin({0: keys})
    assert (states(found), found.ready) == ([HIT, PENDING, PENDING, MISS], True)
    assert states(client.wait_ready(found, HANG_S)) == [HIT, HIT, HIT, MISS]


def test_several_out_of_order(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    founds = [client.pin({0: keys[1:2]}), client.prefetch({0: keys[2:3]}), client.pin({0: keys, 3: keys[1:2]})]
    assert [found.promoting for found in founds] == [1, 1, 3]
    for number in (2, 0, 1):
        bring(fake, founds[number], 0.02)
        fake_is_idle(fake)
    first, second, third = (client.wait_ready(found, HANG_S) for found in founds)
    assert (states(first), states(second), states(third)) == ([HIT], [HIT], [HIT, HIT, HIT, MISS])
    assert third.states[1].tolist() == [HIT]
    assert [anew.lease for anew in (first, second, third)] == [found.lease for found in founds]
    assert due(client) == 0


def test_the_lease_is_released_before_the_keys_come(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.pin({0: keys})
    client.release(found.lease)
    bring(fake, found)
    anew = client.wait_ready(found, HANG_S)
    assert (states(anew), anew.lease) == ([HIT, HIT, HIT, MISS], 0)


# --- what can go wrong -------------------------------------------------------------------------------


def test_a_deadline_then_again(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.pin({0: keys})
    for deadline_s in (0.05, 0.0, -1.0):
        with pytest.raises(DeadlineError, match="disk"):
            client.wait_ready(found, deadline_s)
    bring(fake, found, 0.05)
    assert client.wait_ready(found, HANG_S).promoting == 0


def test_a_lost_connection(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found, other = client.pin({0: keys}), client.prefetch({0: keys})
    fake.soon(lambda: fake.peers[0].close(), 0.05)
    begun = time.monotonic()
    with pytest.raises(ConnectionLostError, match="closed the connection"):
        client.wait_ready(found, 2 * HANG_S)
    assert time.monotonic() - begun < HANG_S
    client.ping()
    assert other.ready
    for lost in (other, found):
        with pytest.raises(ConnectionLostError):
            client.wait_ready(lost, HANG_S)
    assert due(client) == 0


def test_a_seq_is_its_own_connections(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    """The same seq may name another request after a reconnect: the first one stays lost."""
    old = client.pin({0: keys})
    eof(fake)
    fake_is_idle(fake)
    new = client.pin({0: keys})
    while seq_of(new) < seq_of(old):
        new = client.pin({0: keys})
    assert seq_of(new) == seq_of(old)
    bring(fake, new)
    assert client.wait_ready(new, HANG_S).promoting == 0
    with pytest.raises(ConnectionLostError):
        client.wait_ready(old, HANG_S)


def test_what_was_said_before_the_loss_counts(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.pin({0: keys})
    bring(fake, found)
    eof(fake)
    fake_is_idle(fake)
    assert states(client.wait_ready(found, HANG_S)) == [HIT, HIT, HIT, MISS]


def test_closing_loses_it(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.pin({0: keys})
    client.close()
    with pytest.raises(ConnectionLostError):
        client.wait_ready(found, HANG_S)


def test_ready_while_the_client_leaves(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.pin({0: keys})

    def late(_peer: FakeSession, _message: m.Bye) -> bool:
        fake.bring(seq_of(found))
        return False

    fake.on["bye"] = late
    client.close()
    assert client.wait_ready(found, HANG_S).promoting == 0


def test_a_forgotten_one_is_dropped(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    founds = [client.pin({0: keys}), client.prefetch({0: keys})]
    seqs = [seq_of(found) for found in founds]
    handles = [weakref.ref(found.promotion) for found in founds]
    assert due(client) == 2
    founds.clear()
    gc.collect()
    assert [handle() for handle in handles] == [None, None]
    for seq in seqs:
        fake.soon(functools.partial(fake.bring, seq))
    fake_is_idle(fake)
    client.ping()
    assert due(client) == 0
    assert fake.tags().count("hello") == 1


def test_forgotten_ones_are_lost_too(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    client.pin({0: keys})
    gc.collect()
    eof(fake)
    fake_is_idle(fake)
    client.ping()
    assert fake.tags().count("hello") == 2


def test_a_late_answer_is_taken_back(make_client: Any, fake: FakeDaemon, path: str, keys: U8Array) -> None:
    """Its `ready` is still due after the lease was given back, and belongs to no call."""
    client = make_client(path, deadline_s=0.1)
    client.connect()
    answers: list[tuple[FakeSession, m.Pin]] = []

    def late(peer: FakeSession, message: m.Pin) -> bool:
        answers.append((peer, message))
        return True

    fake.on["pin"] = late
    with pytest.raises(DeadlineError):
        client.pin({0: keys})
    fake.soon(lambda: fake._on_pin(*answers[0]))
    fake_is_idle(fake)
    client.ping()
    client.ping()
    assert fake.leases == set()
    assert due(client) == 1
    fake.soon(lambda: fake.bring(answers[0][1].seq))
    fake_is_idle(fake)
    client.ping()
    assert due(client) == 0
    assert fake.tags().count("hello") == 1


@pytest.mark.parametrize(
    "lie",
    [
        lambda peer, seq: peer.say(m.Ready(seq=seq + 1, states=[b"\1\1\1\0"], boundaries=b"")),
        lambda peer, seq: peer.say(m.Ready(seq=0, states=[b"\1\1\1\0"], boundaries=b"")),
        lambda peer, seq: peer.say(m.Ready(seq=seq, states=[b"\1\1\1"], boundaries=b"")),
        lambda peer, seq: peer.say(m.Ready(seq=seq, states=[b"\1\1\1\x63"], boundaries=b"")),
        lambda peer, seq: peer.say(m.Ready(seq=seq, states=[b"\1\1\1\0", b""], boundaries=b"")),
        lambda peer, seq: peer.say(m.Ready(seq=seq, states=[b"\1\1\1\0"], boundaries=b"123")),
        lambda peer, seq: peer.say(m.Ready(seq=seq, states=[b"\1\1\1\0"], boundaries=b"", lease=7777)),
    ],
    ids=["never asked", "seq 0", "short states", "no state", "one group more", "no u32", "another lease"],
)
def test_a_ready_that_cannot_be(
    client: Any, fake: FakeDaemon, keys: U8Array, lie: Callable[[FakeSession, int], None]
) -> None:
    found = client.pin({0: keys})
    fake.soon(lambda: lie(fake.peers[0], seq_of(found)))
    with pytest.raises(ConnectionLostError, match="broke the protocol"):
        client.wait_ready(found, HANG_S)
    client.ping()
    assert fake.tags().count("hello") == 2


def test_exactly_once(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    found = client.pin({0: keys})

    def twice() -> None:
        for _ in range(2):
            fake.peers[0].say(m.Ready(seq=seq_of(found), states=[b"\1\1\1\0"], boundaries=b""))

    fake.soon(twice)
    assert client.wait_ready(found, HANG_S).promoting == 0  # what was right, counts
    fake_is_idle(fake)
    client.ping()
    assert fake.tags().count("hello") == 2


@pytest.mark.parametrize("promoting", [0, 1])
def test_never_before_its_found(client: Any, fake: FakeDaemon, keys: U8Array, promoting: int) -> None:
    """Nor after one that promised none."""

    def early(peer: FakeSession, message: m.Pin) -> bool:
        found = m.Found(seq=message.seq, states=[b"\1\2\2\0"], boundaries=b"", promoting=promoting)
        ready = m.Ready(seq=message.seq, states=[b"\1\1\1\0"], boundaries=b"")
        for one in (ready, found) if promoting else (found, ready):
            peer.say(one)
        return True

    fake.on["pin"] = early
    if promoting:
        with pytest.raises(ConnectionLostError, match="broke the protocol"):
            client.pin({0: keys})
    else:
        client.pin({0: keys})
        fake_is_idle(fake)
    client.ping()
    assert fake.tags().count("hello") == 2


def test_a_lookup_brings_nothing(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    def lie(peer: FakeSession, message: m.Lookup) -> bool:
        peer.say(m.Found(seq=message.seq, states=[b"\1\2\2\0"], boundaries=b"", promoting=2))
        return True

    assert states(client.lookup({0: keys})) == [HIT, PENDING, PENDING, MISS]
    fake.on["lookup"] = lie
    with pytest.raises(ConnectionLostError, match="broke the protocol"):
        client.lookup({0: keys})


def test_another_clients_answer(client: Any, make_client: Any, fake: FakeDaemon, path: str, keys: U8Array) -> None:
    other = make_client(path)
    own, theirs = client.pin({0: keys}), other.pin({0: keys})
    assert seq_of(own) == seq_of(theirs)
    with pytest.raises(UsageError, match="another client"):
        client.wait_ready(theirs, HANG_S)


def test_no_room_for_the_answer(make_client: Any, fake: FakeDaemon, path: str, keys: U8Array) -> None:
    fake.on["pin"] = lambda peer, message: peer.error(message.seq, "busy", retryable=True)
    client = make_client(path, retry_busy=False)
    with pytest.raises(RemoteError, match="busy"):
        client.pin({0: keys})
    assert due(client) == 0


# --- loads, the audit --------------------------------------------------------------------------------


def test_a_load_reads_from_disk_first(client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache) -> None:
    fake.manual_completion = True
    job = client.load(client.register(caches), {0: (keys, np.arange(4))})
    assert job.states[0].tolist() == [HIT, HIT, HIT, MISS]
    failed = [np.array([2], "<u4").tobytes()]
    fake.soon(lambda: fake.complete(fake.peers[0], job.id, "partial", failed))
    result = client.wait(job, 5.0)
    assert result.outcome is Outcome.PARTIAL
    assert result.valid(0).tolist() == [True, True, False, False]


def test_a_load_under_the_lease(client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache) -> None:
    registration = client.register(caches)
    found = client.pin({0: keys[:3]})
    bring(fake, found)
    anew = client.wait_ready(found, HANG_S)
    job = client.load(registration, {0: (keys[:3], [0, 1, 2])}, lease=anew.lease)
    assert fake.last("load").lease == found.lease
    assert client.wait(job, 5.0).valid(0).all()


def test_jobs_and_promotions_share_a_connection(client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache) -> None:
    """What comes for the one while the other is waited for is not lost."""
    fake.manual_completion = True
    found = client.pin({0: keys})
    job = client.load(client.register(caches), {0: (keys[:1], [0])})
    bring(fake, found)
    fake.soon(lambda: fake.complete(fake.peers[0], job.id, failed=[b""]))
    assert client.wait(job, 5.0).outcome is Outcome.DONE
    assert client.wait_ready(found, HANG_S).promoting == 0


def test_an_audit_of_the_disk(client: Any, fake: FakeDaemon) -> None:
    assert client.verify(disk=True).records == 2
    asked = fake.last("verify")
    assert (asked.payloads, asked.disk, asked.repair) == (False, True, False)
    client.verify(payloads=True, disk=True, repair=True)
    asked = fake.last("verify")
    assert (asked.payloads, asked.disk, asked.repair) == (True, True, True)
    client.verify()
    assert not fake.last("verify").disk
    with pytest.raises(UsageError, match="disk"):
        client.verify(repair=True)


# --- seqs --------------------------------------------------------------------------------------------


def test_a_seq_is_not_used_again_while_an_answer_is_due(keys: U8Array) -> None:
    connection = ConnectionState(EventQueue(32))
    connection._protocol.state = ProtocolState.READY
    kept, _unanswered, _forgotten = asked = (
        prefetch({0: keys}, 0, 32, bool),
        ping(),
        prefetch({}, 0, 32, bool),
    )
    for call in asked:
        connection.ask(call)
    connection.receive(encode(m.Found(seq=1, states=[b"\2\2\2\2"], boundaries=b"", promoting=4)), [])
    connection.receive(encode(m.Found(seq=3, states=[], boundaries=b"", promoting=1)), [])
    _forgotten.value = None

    connection._seq = 0xFFFFFFFF - 1
    assert [asked_as(connection) for _ in range(3)] == [0xFFFFFFFF, 4, 5]
    connection.receive(encode(m.Ready(seq=1, states=[b"\1\1\1\1"], boundaries=b"")), [])
    connection.receive(encode(m.Ready(seq=3, states=[], boundaries=b"")), [])
    assert kept.value.promotion.outcome().promoting == 0
    connection._seq = 0xFFFFFFFF - 1
    assert [asked_as(connection) for _ in range(3)] == [1, 3, 6]


def asked_as(connection: ConnectionState) -> int:
    """The seq of one more request."""
    connection.ask(ping())
    return connection._seq


# --- threads and tasks -------------------------------------------------------------------------------


async def test_tasks_wait_at_once(fake: FakeDaemon, path: str, keys: U8Array) -> None:
    async with AsyncClient(path, namespace=NAMESPACE) as client:
        founds = [await client.pin({0: keys}) for _ in range(20)]
        waits = [asyncio.create_task(client.wait_ready(found, HANG_S)) for found in (*founds, founds[0])]
        await asyncio.sleep(0.05)
        await client.ping()  # others go on meanwhile
        for found in reversed(founds):
            bring(fake, found)
        assert [states(anew) for anew in await asyncio.gather(*waits)] == [[HIT, HIT, HIT, MISS]] * 21


async def test_it_comes_without_a_call(fake: FakeDaemon, path: str, keys: U8Array) -> None:
    async with AsyncClient(path, namespace=NAMESPACE) as client:
        found = await client.pin({0: keys})
        bring(fake, found)
        assert found.promotion is not None
        woken = asyncio.Event()
        found.promotion.add_waker(woken.set)
        async with asyncio.timeout(HANG_S):
            await woken.wait()
        assert found.ready
        assert (await client.wait_ready(found, HANG_S)).promoting == 0


async def test_a_cancelled_wait_may_be_repeated(fake: FakeDaemon, path: str, keys: U8Array) -> None:
    async with AsyncClient(path, namespace=NAMESPACE) as client:
        found = await client.pin({0: keys})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.wait_ready(found, HANG_S)
        assert found.promotion is not None
        assert found.promotion._wakers == []
        bring(fake, found)
        assert (await client.wait_ready(found, HANG_S)).promoting == 0


async def test_a_task_waits_while_another_closes(fake: FakeDaemon, path: str, keys: U8Array) -> None:
    client = AsyncClient(path, namespace=NAMESPACE)
    found = await client.pin({0: keys})
    wait = asyncio.create_task(client.wait_ready(found, HANG_S))
    await asyncio.sleep(0.02)
    await client.close()
    with pytest.raises(ConnectionLostError):
        await wait


def test_threads_wait_in_turn(fake: FakeDaemon, path: str, keys: U8Array) -> None:
    with Client(path, namespace=NAMESPACE) as client:
        founds = [client.pin({0: keys}) for _ in range(4)]
        got: list[Found] = []
        threads = [threading.Thread(target=lambda f=f: got.append(client.wait_ready(f, HANG_S))) for f in founds]
        for thread in threads:
            thread.start()
        for found in reversed(founds):
            bring(fake, found, 0.05)
        for thread in threads:
            thread.join()
        assert {int(anew.lease) for anew in got} == {int(found.lease) for found in founds}
