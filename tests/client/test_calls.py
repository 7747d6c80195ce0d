"""Each call of each client, against a daemon that behaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvoffloadd.client import EventGap, Group, GroupKind, KeyEvents, KvCache, Outcome, Ref, SharedTensor, digest_layers
from kvoffloadd.errors import ConnectionLostError, DeadlineError, RemoteError, UsageError
from kvoffloadd.model import NO_BLOCK, Tier, U8Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import PREFIX, encode
from kvoffloadd.protocol.unpacking import unpack
from kvoffloadd.testing.wait import until
from tests.client.fake_daemon import FakeDaemon, FakeSession
from tests.client.flavours import NAMESPACE


def test_store_then_lookup_then_load(client: Any, keys: U8Array, caches: KvCache) -> None:
    registration = client.register(caches)
    assert client.lookup({0: keys}).states[0].tolist() == [0, 0, 0, 0]

    stored = client.wait(client.store(registration, {0: (keys, np.arange(4))}), 5)
    assert stored.outcome is Outcome.DONE
    assert stored.valid(0).all()

    found = client.lookup({0: keys}, first=3)
    assert (found.states[0].tolist(), found.boundaries.tolist(), found.lease) == ([1, 1, 1, 1], [16], 0)

    job = client.load(registration, {0: (keys[:2].tobytes(), [6, 7])}, expedited=True)
    loaded = client.wait(job, 5)
    assert job.blocks_free
    assert loaded.valid(0).tolist() == [True, True]
    assert client.open_jobs() == []


def test_what_is_asked_is_what_was_given(client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache) -> None:
    registration = client.register(caches)
    client.lookup({0: keys, 3: keys[:1]}, first={3: 5})
    assert fake.last("lookup").groups == [
        m.GroupKeys(group=0, keys=keys.tobytes()),
        m.GroupKeys(group=3, keys=keys[:1].tobytes(), first=5),
    ]
    client.reserve({0: keys}, parts=[1, 2])
    assert fake.last("reserve").parts == [1, 2]
    client.store(registration, {0: (keys, [1, 2, 3, NO_BLOCK])}, lease=9, deadline_s=2.5, first=1)
    store = fake.last("store")
    assert np.frombuffer(store.groups[0].blocks, "<u4").tolist() == [1, 2, 3, NO_BLOCK]
    assert (store.lease, store.deadline_s, store.groups[0].first) == (9, 2.5, 1)
    assert store.registration == registration.id


def greet_anew(client: Any, fake: FakeDaemon, *features: str) -> None:
    """Have the client connect anew, to a daemon that has these features."""
    fake.features = list(features)
    old = fake.peers[-1]
    fake.soon(old.close)
    until(lambda: old.socket.fileno() < 0, "the daemon has closed the connection")
    client.ping()


def test_a_hint_goes_to_daemons_that_take_it_alone(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    client.keep({0: keys}, "drop", first=2)
    client.ping()
    assert "keep" not in fake.tags()
    greet_anew(client, fake, "keep")
    client.keep({0: keys}, "drop", first=2)
    client.ping()  # a hint gets no answer: it has come when what was sent after it has
    assert fake.last("keep").groups == [m.GroupKeys(group=0, keys=keys.tobytes(), first=2)]
    assert fake.last("keep").how == "drop"


@pytest.mark.parametrize("knows", [False, True])
def test_requests_are_local_where_the_daemon_knows_that(
    knows: bool, client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache
) -> None:
    greet_anew(client, fake, *["local"] * knows)
    registration = client.register(caches)
    for local in (False, True):
        client.lookup({0: keys}, local=local)
        client.prefetch({0: keys}, local=local)
        client.wait(client.load(registration, {0: (keys, np.arange(4))}, local=local), 5)
        for asked in (fake.last("lookup"), fake.last("prefetch"), fake.last("load")):
            assert asked.local == (knows and local)
            assert ("local" in msgspec.to_builtins(asked)) == (knows and local)


# --- tiers ---


def test_only_daemons_that_know_are_asked_from_where_keys_come(client: Any, fake: FakeDaemon) -> None:
    for features, expected in (((), {}), (("tiers",), {"tiers": True})):
        greet_anew(client, fake, *features)
        assert client.pin({0: bytes(32)}).tiers == []
        asked = msgspec.to_builtins(fake.last("pin"))
        assert {name: asked[name] for name in asked.keys() - {"type", "seq", "groups"}} == expected


# --- clears ---

TOKEN = b"0123456789abcdef"


@pytest.mark.parametrize("features", [(), ("clear_token",)])
def test_a_clear_by_names_that_meets_an_older_daemon_in_mid_call_clears_nothing_else(
    client: Any, fake: FakeDaemon, features: tuple[str, ...]
) -> None:
    """The repeated request names them all the same, and older daemons refuse it: without the names it would mean the
    client's own namespace.
    """

    def replace(peer: Any, _: Any) -> Any:
        fake.features = list(features)
        del fake.on["clear"]
        return peer.hang_up()

    greet_anew(client, fake, "clear_token", "clear_namespaces")
    fake.on["clear"] = replace
    client.clear(namespaces="llama*", token=TOKEN)
    assert [message.namespaces for tag, message in fake.seen if tag == "clear"] == ["llama*"] * 2


def test_a_clear_names_its_token(client: Any, fake: FakeDaemon) -> None:
    greet_anew(client, fake, "clear_token")

    def answer(peer: FakeSession, message: Any) -> bool:
        peer.say(m.Cleared(seq=message.seq, keys=4, bytes=5, unrecorded=["/disk", "remote"]))
        return True

    fake.on["clear"] = answer
    cleared = client.clear(wait_s=0.5, token=TOKEN, everything=True)
    assert (cleared.keys, cleared.bytes, cleared.unrecorded) == (4, 5, ("/disk", "remote"))
    asked = fake.last("clear")
    assert (asked.token, asked.wait_s, asked.everything) == (TOKEN, 0.5, True)
    client.clear()
    first = fake.last("clear")
    client.clear()
    assert first.wait_s == 10.0
    assert len({TOKEN, first.token, fake.last("clear").token}) == 3, "each is a clear of its own"


def test_a_clear_is_asked_again_by_its_token(client: Any, fake: FakeDaemon) -> None:
    """When the connection is lost: whether the daemon has cleared is not known."""
    greet_anew(client, fake, "clear_token")
    losses = [1]

    def lose(peer: FakeSession, _message: Any) -> bool:
        if losses[0]:
            losses[0] -= 1
            return peer.hang_up()
        return False

    fake.on["clear"] = lose
    assert client.clear().unrecorded == ()
    first, second = (message for tag, message in fake.seen if tag == "clear")
    assert first.token == second.token is not None
    losses[0] = 2
    with pytest.raises(ConnectionLostError):
        client.clear(token=TOKEN)
    assert client.clear(token=TOKEN).keys == 0


def test_an_older_daemon_is_asked_as_it_was_before(client: Any, fake: FakeDaemon) -> None:
    """Also one that comes in place of a newer one, in mid-call. What it could not record it does later."""
    assert client.clear(token=TOKEN).unrecorded == ()
    (asked,) = (message for tag, message in fake.seen if tag == "clear")
    assert msgspec.to_builtins(asked) == {"type": "clear", "seq": asked.seq}
    fake.on["clear"] = lambda peer, message: peer.error(message.seq, "not_durable", retryable=True)
    cleared = client.clear(token=TOKEN)
    assert (cleared.keys, cleared.unrecorded) == (0, ("not_durable: scripted not_durable",))
    fake.on["clear"] = lambda peer, message: peer.error(message.seq, "limit")
    with pytest.raises(RemoteError, match="limit"):
        client.clear(token=TOKEN)

    def replace(peer: FakeSession, _message: Any) -> bool:
        fake.features = []
        del fake.on["clear"]
        return peer.hang_up()

    fake.features = ["clear_token"]
    fake.on["clear"] = lambda peer, message: peer.hang_up()
    with pytest.raises(ConnectionLostError):
        client.clear()
    fake.on["clear"] = replace
    client.clear(token=TOKEN)
    assert [message.token for tag, message in fake.seen if tag == "clear"][-2:] == [TOKEN, None]


def test_an_older_daemon_clears_nothing_in_place_of_what_it_can_not(client: Any, fake: FakeDaemon) -> None:
    greet_anew(client, fake, "clear_token")
    with pytest.raises(UsageError, match="nothing was cleared"):
        client.clear(namespaces="llama*")
    assert not [tag for tag, _ in fake.seen if tag == "clear"]
    greet_anew(client, fake, "clear_token", "clear_namespaces")
    with pytest.raises(UsageError, match="can't clear the namespaces of a user: nothing was cleared"):
        client.clear(uid=7)
    greet_anew(client, fake, "clear_token", "clear_namespaces", "clear_user")
    client.clear(uid=7)
    assert (fake.last("clear").uid, fake.last("clear").everything) == (7, False)
    client.clear(namespaces="llama*")
    assert (fake.last("clear").namespaces, fake.last("clear").everything) == ("llama*", False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"wait_s": -1.0}, {"wait_s": 3601.0}, {"token": b"short"}, {"namespaces": ""}, {"namespaces": "x" * 129},
        {"namespaces": b"*"}, {"namespaces": "*", "everything": True},
    ],
)  # fmt: skip
def test_what_no_clear_can_ask(client: Any, fake: FakeDaemon, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"clear|namespaces"):
        client.clear(**wrong)
    assert "clear" not in fake.tags()


def test_what_bytes_are_is_told_to_daemons_that_take_it_alone(
    make_client: Callable[..., Any], fake: FakeDaemon, path: str, caches: KvCache
) -> None:
    """Others refuse fields that they do not know."""
    layers = digest_layers(["l0"])
    described = KvCache(
        caches.tensors, [Group(0, GroupKind.FULL, 16, [Ref(0, 0, 64, dtype="bfloat16", layers=layers)])]
    )
    bare = {"tensor": 0, "offset": 0, "length": 64}
    for features, expected in (([], bare), (["composition"], {**bare, "dtype": "bfloat16", "layers": layers})):
        fake.features = features
        client = make_client(path)
        client.register(described)
        register = unpack(encode(fake.last("register"))[PREFIX.size :])
        assert register["groups"][0]["refs"] == [expected]


def test_the_composition_is_told_again_after_a_reconnect(client: Any, fake: FakeDaemon, caches: KvCache) -> None:
    """It is sent as far as the daemon that is there by then accepts it."""
    described = KvCache(caches.tensors, [Group(0, GroupKind.FULL, 16, [Ref(0, 0, 64, dtype="bfloat16")])])
    client.register(described)
    assert fake.last("register").groups[0].refs[0].dtype == ""
    fake.features = ["composition"]
    old = fake.peers[-1]
    fake.soon(old.close)
    until(lambda: old.socket.fileno() < 0, "the daemon has closed the connection")
    client.ping()  # connects anew, and registers
    assert fake.last("register").groups[0].refs[0].dtype == "bfloat16"


@pytest.mark.parametrize("what", [{"dtype": "bf16"}, {"layers": b"l0"}])
def test_what_no_ref_can_be(caches: KvCache, what: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"`dtype` must be one of float64, .*`digest_layers`"):
        KvCache(caches.tensors, [Group(0, GroupKind.FULL, 16, [Ref(0, 0, 64, **what)])])


def test_small_calls(client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache) -> None:
    client.ping()
    client.touch({0: keys})
    client.prefetch({0: keys})
    client.wait(client.store(client.register(caches), {0: (keys, np.arange(4))}), 5)
    assert client.status() == {"keys": 4}
    assert client.verify(payloads=True).findings == ()
    assert client.drain(1.5).jobs == 0
    assert fake.last("drain").deadline_s == 1.5
    listed = client.snapshot(0)
    assert {row.tobytes() for row in listed} == {row.tobytes() for row in keys}
    page, cursor = client.snapshot_page(0)
    while cursor:
        more, cursor = client.snapshot_page(0, cursor)
        page = np.concatenate([page, more])
    assert {row.tobytes() for row in page} == {row.tobytes() for row in keys}
    assert client.clear().keys == 4
    assert client.snapshot(0).shape == (0, 32)


def test_registering_attaches_each_memory_once(client: Any, fake: FakeDaemon) -> None:
    one, other = SharedTensor.allocate(16, 128), SharedTensor.allocate(2, 64)
    upper = SharedTensor.adopt(one.array[8:, :32])
    registration = client.register(
        KvCache([one, other, upper], [Group(0, GroupKind.SLIDING, 16, refs=[Ref(2, 0, 32)], window_keys=3)])
    )
    assert fake.last("attach").fds == 2
    register = fake.last("register")
    first, second, third = register.tensors
    assert first.allocation == third.allocation != second.allocation
    assert (third.offset, third.num_blocks, third.page_bytes, third.stride_bytes) == (8 * 128, 8, 32, 128)
    assert register.groups[0].window_keys == 3
    # The descriptors that came are the memory itself.
    peer = fake.peers[0]
    assert {os.fstat(fd).st_ino for fd in peer.fds} == {one.allocation.identity[1], other.allocation.identity[1]}
    client.unregister(registration)
    client.unregister(registration)
    assert fake.tags().count("unregister") == 1
    with pytest.raises(UsageError, match="unregister"):
        client.store(registration, {0: (b"k" * 32, [0])})


def test_more_memories_than_fit_a_frame(client: Any, fake: FakeDaemon) -> None:
    tensors = [SharedTensor.allocate(1, 64) for _ in range(70)]
    client.register(KvCache(tensors, []))
    assert [message.fds for tag, message in fake.seen if tag == "attach"] == [64, 6]
    assert len({tensor.allocation for tensor in fake.last("register").tensors}) == 70


def test_a_scheduler_registers_groups_alone(make_client: Any, fake: FakeDaemon, path: str) -> None:
    scheduler = make_client(path, role="scheduler", instance=b"i" * 16)
    scheduler.register(KvCache([], [Group(0, GroupKind.MAMBA, 256)]))
    assert "attach" not in fake.tags()
    assert (fake.last("hello").role, fake.last("hello").instance) == ("scheduler", b"i" * 16)


def test_leases(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    pinned = client.pin({0: keys})
    reserved = client.reserve({0: keys})
    assert {int(pinned.lease), int(reserved.lease)} == fake.leases
    client.release(pinned.lease)
    client.release(int(reserved.lease))
    assert fake.leases == set()
    client.release(pinned.lease)  # has ended: nothing
    client.release(0)
    fake.on["release"] = lambda peer, message: peer.error(message.seq, "bad_lease")
    client.release(pinned.lease)
    fake.on["release"] = lambda peer, message: peer.error(message.seq, "internal")
    with pytest.raises(RemoteError, match="internal"):
        client.release(pinned.lease)


def test_events(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    client.subscribe()
    assert client.events() == []

    def tell() -> None:
        fake.peers[0].say(m.Events(group=2, added=keys.tobytes(), removed=b""))
        fake.peers[0].say(m.Gap())

    fake.soon(tell)
    events = client.events(5.0)
    while len(events) < 2:
        events += client.events(5.0)
    assert isinstance(events[0], KeyEvents)
    assert events[0].group == 2
    assert (events[0].added == keys).all()
    assert events[0].removed.shape == (0, 32)
    assert events[1] == EventGap()


def test_events_of_tiers(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    """An older daemon is asked as before, and what it tells is of the whole."""
    for features, asked in (((), {}), (("event_tiers",), {"tiers": True})):
        greet_anew(client, fake, *features)
        client._core._events.subscribed = False
        client.subscribe(tiers=True)
        message = fake.seen[-1][1]
        assert msgspec.to_builtins(message) == {"type": "subscribe", "seq": message.seq, **asked}
    client.events()
    for tier in (None, 0, 1):
        event = m.Events(group=2, added=keys.tobytes(), removed=b"", tier=tier)
        fake.soon(partial(fake.peers[-1].say, event))
        (heard,) = client.events(5.0)
        assert heard.tier == (None if tier is None else Tier(tier))


def test_the_keys_of_one_tier(client: Any, fake: FakeDaemon) -> None:
    fake.held = {b"a" * 32, b"b" * 32}
    with pytest.raises(UsageError, match="event_tiers"):
        client.snapshot(0, tier=Tier.DISK)
    assert not [tag for tag, _ in fake.seen if tag == "snapshot"]
    greet_anew(client, fake, "event_tiers")
    assert len(client.snapshot(0, tier=Tier.DISK)) == 2
    assert client.snapshot_page(0, 1, tier=Tier.MEMORY)[1] == 0
    client.snapshot_page(0)
    assert [message.tier for tag, message in fake.seen if tag == "snapshot"] == [1, 1, 0, None]
    with pytest.raises(UsageError, match="tier"):
        client.snapshot(0, tier=Tier.REMOTE)


def test_error_replies_tell_what_the_daemon_said(client: Any, fake: FakeDaemon) -> None:
    fake.on["status"] = lambda peer, message: peer.error(message.seq, "forbidden")
    with pytest.raises(RemoteError, match="scripted forbidden") as caught:
        client.status()
    assert (caught.value.code, caught.value.fault, caught.value.retryable) == ("forbidden", "client", False)
    client.ping()  # the session goes on


def test_busy_is_asked_again(client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache) -> None:
    registration = client.register(caches)
    left = [3]

    def busy(peer: FakeSession, message: Any) -> bool:
        left[0] -= 1
        return left[0] >= 0 and peer.error(message.seq, "busy", retryable=True)

    fake.on["store"] = busy
    job = client.store(registration, {0: (keys, np.arange(4))})
    assert client.wait(job, 5).outcome is Outcome.DONE
    assert fake.tags().count("store") == 4
    assert client.open_jobs() == []


def test_busy_until_the_deadline(make_client: Any, fake: FakeDaemon, path: str) -> None:
    fake.on["ping"] = lambda peer, message: peer.error(message.seq, "busy", retryable=True)
    patient = make_client(path, deadline_s=2.0)
    with pytest.raises(
        (RemoteError, DeadlineError), match=r"busy|in time"
    ):  # the deadline comes between two tries, or in one
        patient.ping()
    assert fake.tags().count("ping") > 1
    hasty = make_client(path, retry_busy=False)
    before = fake.tags().count("ping")
    with pytest.raises(RemoteError, match="busy"):
        hasty.ping()
    assert fake.tags().count("ping") == before + 1


def test_cancel(client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache) -> None:
    fake.manual_completion = True
    job = client.store(client.register(caches), {0: (keys, np.arange(4))})
    client.cancel(job)
    assert not job.blocks_free
    fake.soon(lambda: fake.complete(fake.peers[0], job.id, "cancelled", reason="asked to"))
    result = client.wait(job, 5)
    assert (result.outcome, result.reason) == (Outcome.CANCELLED, "asked to")
    assert not result.valid(0).any()
    client.cancel(job)  # has ended: nothing is asked
    assert fake.tags().count("cancel") == 1


def test_partial_loads_name_what_failed(client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache) -> None:
    fake.manual_completion = True
    fake.held = {row.tobytes() for row in keys[:3]}
    job = client.load(client.register(caches), {0: (keys, np.arange(4))})
    failed = [np.array([1], "<u4").tobytes()]
    fake.soon(lambda: fake.complete(fake.peers[0], job.id, "partial", failed))
    result = client.wait(job, 5)
    assert result.valid(0).tolist() == [True, False, True, False]
    assert result.failed[0].tolist() == [1]


def test_a_completion_may_come_before_its_acceptance(
    client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache
) -> None:
    def early(peer: FakeSession, message: m.Store) -> bool:
        fake.complete(peer, message.job)
        peer.say(m.Accepted(seq=message.seq, job=message.job, states=[b"\3\3\1\3"]))
        return True

    fake.on["store"] = early
    job = client.store(client.register(caches), {0: (keys, np.arange(4))})
    assert client.wait(job, 5).valid(0).tolist() == [True, True, False, True]


def test_wait_any(client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache) -> None:
    fake.manual_completion = True
    registration = client.register(caches)
    jobs = [client.store(registration, {0: (keys[i : i + 1], [i])}) for i in range(3)]
    assert client.open_jobs() == jobs
    fake.soon(lambda: fake.complete(fake.peers[0], jobs[1].id))
    assert client.wait_any(jobs, 5) == [jobs[1]]
    assert client.open_jobs() == [jobs[0], jobs[2]]
    assert client.wait_any([], 0) == []


def test_what_cannot_be_asked(client: Any, fake: FakeDaemon, keys: U8Array, caches: KvCache) -> None:
    registration = client.register(caches)
    seen = len(fake.seen)
    for groups in (
        {0: (keys, np.arange(3))},
        {0: (keys, np.array([True, False, True, True]))},
        {0: (keys, [0, 1, True, 3])},
        {0: (keys, [0, 1, -1, 3])},
        {0: (keys, [0, 1, 1 << 32, 3])},
        {0: (keys, [0.0, 1.0, 2.0, 3.0])},
        {0: (keys, np.zeros((4, 2), np.uint32))},
        {1: (keys, np.arange(4))},
        {0: (keys[:, :31], np.arange(4))},
        {0: (b"short", [0])},
        {0: ([1, 2], [0, 1])},
    ):
        with pytest.raises(UsageError):
            client.store(registration, groups)
    with pytest.raises(UsageError):
        client.store(registration, {0: (keys, np.arange(4))}, deadline_s=0)
    assert len(fake.seen) == seen
    with pytest.raises(UsageError, match="too large for one request"):
        client.lookup({0: bytes(5 << 20)})
    client.ping()


def test_large_requests_and_replies(client: Any) -> None:
    """More than a socket's buffer takes at once, both ways."""
    many = np.zeros((60_000, 32), np.uint8)
    assert client.lookup({0: many, 1: many}).states[1].shape == (60_000,)


def test_settings_are_checked(make_client: Any) -> None:
    for options in (
        {"instance": b"short"},
        {"role": "king"},
        {"namespace": None},
        {"deadline_s": 0.0},
        {"connect_deadline_s": -1.0},
    ):
        with pytest.raises(UsageError):
            make_client("/nowhere", **options)
    with pytest.raises(UsageError, match="107"):
        make_client("/" + "x" * 107)
    assert make_client(Path("/nowhere"), role="observer", namespace=None).boot_id == b""


def test_an_observer_without_a_namespace(make_client: Any, fake: FakeDaemon, path: str, keys: U8Array) -> None:
    observer = make_client(path, role="observer", namespace=None)
    assert observer.status() == {"keys": 0}
    with pytest.raises(UsageError, match="namespace"):
        observer.lookup({0: keys})
    assert fake.last("hello").namespace is None


def test_closing(client: Any, fake: FakeDaemon) -> None:
    client.close()
    client.close()
    assert fake.tags()[-1] == "bye"
    with pytest.raises(UsageError, match="closed"):
        client.ping()


def test_as_a_context_manager(make_client: Any, fake: FakeDaemon, path: str) -> None:
    with make_client(path) as client:
        assert client.boot_id == fake.boot_id
        assert fake.last("hello").namespace == NAMESPACE
    assert fake.tags()[-1] == "bye"


def test_limits_are_those_of_the_greeting(client: Any) -> None:
    client.connect()
    assert client.limits.keys_per_request == 8192
    client.close()
    assert client.limits.keys_per_request == 8192


def test_what_a_refused_registration_has_attached_is_detached(
    client: Any, fake: FakeDaemon, caches: KvCache, path: str
) -> None:
    """Where the daemon knows how, and before the caller learns of the refusal."""
    fake.on["register"] = lambda peer, message: peer.error(message.seq, "schema_mismatch")
    with pytest.raises(RemoteError, match="schema_mismatch"):
        client.register(caches)
    assert "detach" not in fake.tags()
    greet_anew(client, fake, "detach")
    with pytest.raises(RemoteError, match="schema_mismatch"):
        client.register(caches)
    assert fake.tags()[-3:] == ["attach", "register", "detach"]
    assert len(fake.last("detach").allocations) == 1
    del fake.on["register"]
    client.register(caches)
    assert fake.tags()[-1] == "register"


@pytest.mark.parametrize("silent", ["attach", "register"])
def test_what_comes_of_a_registration_that_was_given_up_is_detached(
    make_client: Any, fake: FakeDaemon, caches: KvCache, path: str, silent: str
) -> None:
    """Whenever the answers come, and whatever they are."""
    fake.features = ["detach"]
    client = make_client(path, deadline_s=0.2)
    client.connect()
    answers: list[Callable[[], object]] = []

    def keep(peer: FakeSession, message: Any) -> bool:
        usual = getattr(fake, f"_on_{silent}") if silent == "attach" else lambda *_: peer.error(message.seq, "limit")
        answers.append(lambda: usual(peer, message))
        return True

    fake.on[silent] = keep
    with pytest.raises(DeadlineError):
        client.register(caches)
    fake.soon(answers[0])
    client.ping()  # takes in what has come
    client.ping()
    until(lambda: "detach" in fake.tags(), "the daemon has read the detach")
    client.ping()
    assert fake.tags().count("detach") == 1
    assert len(fake.last("detach").allocations) == 1
