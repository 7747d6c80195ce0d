"""Finding the daemon, losing it, finding it again."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import EventGap, KvCache, Lease, Outcome
from kvoffloadd.errors import ConnectionLostError, DaemonUnreachableError, DeadlineError, RemoteError
from kvoffloadd.model import U8Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.testing.wait import HANG_S, until
from tests.client.fake_daemon import FakeDaemon, FakeSession
from tests.client.test_lifetime import eof, fake_is_idle


def test_no_such_socket(make_client: Any, path: str) -> None:
    with pytest.raises(DaemonUnreachableError, match=r"no such socket.*start the daemon"):
        make_client(path, connect_deadline_s=0.0).connect()


def test_nobody_listens(make_client: Any, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(path)
    with pytest.raises(DaemonUnreachableError, match=r"connection refused.*start it again"):
        make_client(path, connect_deadline_s=0.0).ping()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may connect to any socket")
def test_permission_denied(make_client: Any, fake: FakeDaemon, path: str) -> None:
    os.chmod(path, 0)
    begun = time.monotonic()
    with pytest.raises(DaemonUnreachableError, match=r"permission denied.*group"):
        make_client(path, connect_deadline_s=2 * HANG_S).connect()
    assert time.monotonic() - begun < HANG_S  # trying again would not help


def test_permission_denied_is_told_apart(make_client: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives this error to users other than root."""

    class Forbidden(socket.socket):
        def connect(self, _address: Any) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("kvoffloadd.client.transport.socket.socket", Forbidden)
    with pytest.raises(DaemonUnreachableError, match=r"permission denied.*group"):
        make_client(path).connect()


def test_a_socket_of_another_kind(make_client: Any, path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(path)
        with pytest.raises(DaemonUnreachableError, match="not a stream socket"):
            make_client(path).connect()


def test_a_daemon_that_never_accepts(make_client: Any, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as stuck:
        stuck.bind(path)
        stuck.listen(0)
        begun = time.monotonic()
        with pytest.raises(DeadlineError, match="welcome"):
            make_client(path, deadline_s=0.1).connect()  # the kernel accepts one for it
        with pytest.raises(DaemonUnreachableError, match="does not accept"):
            make_client(path, deadline_s=0.1).connect()
        assert time.monotonic() - begun < HANG_S


def test_the_daemon_may_start_later(make_client: Any, path: str) -> None:
    client = make_client(path, connect_deadline_s=5.0)
    started: list[FakeDaemon] = []

    def start() -> None:
        time.sleep(0.1)
        started.append(FakeDaemon(path).__enter__())

    thread = threading.Thread(target=start)
    thread.start()
    try:
        client.ping()
    finally:
        thread.join()
        started[0].stop()


@pytest.mark.parametrize("heard", [True, False])
def test_a_refused_greeting(make_client: Any, fake: FakeDaemon, path: str, heard: bool) -> None:
    """A peer whose user is refused gets an error too, though the daemon does not read its greeting."""
    fake.on["hello"] = lambda peer, message: peer.error(message.seq if heard else 0, "forbidden")
    with pytest.raises(RemoteError, match="scripted forbidden") as caught:
        make_client(path).connect()
    assert caught.value.code == "forbidden"
    assert fake.tags() == ["hello"]


def test_a_busy_greeting_is_repeated(make_client: Any, fake: FakeDaemon, path: str) -> None:
    left = [2]

    def busy(peer: FakeSession, message: Any) -> bool:
        left[0] -= 1
        return left[0] >= 0 and peer.error(message.seq, "busy", retryable=True)

    fake.on["hello"] = busy
    make_client(path).ping()
    assert fake.tags().count("hello") == 3


def test_a_greeting_without_pidfd(make_client: Any, fake: FakeDaemon, path: str) -> None:
    limits = m.Limits(frame_bytes=1, fds_per_frame=1, keys_per_request=1, jobs=1, deadline_s=1.0)

    def welcome(peer: FakeSession, message: Any) -> bool:
        peer.say(
            m.Welcome(
                seq=message.seq, version=1, boot_id=b"b" * 16, session=1, namespace=b"", epoch=0, limits=limits,
                features=[], fds=0,
            )
        )  # fmt: skip
        return True

    fake.on["hello"] = welcome
    with pytest.raises(ConnectionLostError, match="pidfd"):
        make_client(path, connect_deadline_s=0.0).connect()


def test_everything_is_registered_again(client: Any, fake: FakeDaemon, caches: KvCache, keys: U8Array) -> None:
    first, second = client.register(caches), client.register(caches)
    client.unregister(first)
    client.subscribe()
    number = second.id
    eof(fake)
    fake_is_idle(fake)
    client.ping()
    seen = fake.tags()
    assert seen[seen.index("hello", 1) :] == ["hello", "attach", "register", "subscribe", "ping"]
    assert second.id not in (None, number)
    assert client.events() == [EventGap()]
    assert client.wait(client.store(second, {0: (keys, np.arange(4))}), 5).outcome is Outcome.DONE


@pytest.mark.parametrize("tiers", [False, True])
def test_a_subscription_is_made_again_as_it_was(client: Any, fake: FakeDaemon, tiers: bool) -> None:
    fake.features = ["event_tiers"]
    for _ in range(2):
        eof(fake)
        fake_is_idle(fake)
        client.subscribe(tiers=tiers)
    eof(fake)
    fake_is_idle(fake)
    client.ping()
    assert [message.tiers for tag, message in fake.seen if tag == "subscribe"] == [tiers] * 3


def test_another_daemon_is_seen_by_its_boot_id(make_client: Any, path: str, caches: KvCache, keys: U8Array) -> None:
    with FakeDaemon(path) as first:
        client = make_client(path)
        registration = client.register(caches)
        lease = client.pin({0: keys}).lease
        assert client.boot_id == first.boot_id
    with FakeDaemon(path) as second:
        client.ping()
        assert client.boot_id == second.boot_id
        second.leases.add(int(lease))  # the new daemon gave the same number to another client
        client.release(lease)
        assert second.leases == {int(lease)}
        with pytest.raises(ConnectionLostError, match="lease"):
            client.load(registration, {0: (keys, np.arange(4))}, lease=lease)


def test_leases_of_the_same_daemon_are_still_ended(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    """The instance may live on through other connections."""
    lease = client.pin({0: keys}).lease
    eof(fake)
    client.release(lease)
    assert fake.leases == set()
    client.release(lease)


def test_leases_are_numbers() -> None:
    lease = Lease(7, b"boot")
    assert (lease, lease + 1, hash(lease)) == (7, 8, hash(7))


@pytest.mark.parametrize("name", ["ping", "status", "lookup"])
def test_reads_are_asked_again_once(client: Any, fake: FakeDaemon, keys: U8Array, name: str) -> None:
    losses = [1]

    def lose(peer: FakeSession, _message: Any) -> bool:
        if losses[0] > 0:
            losses[0] -= 1
            peer.close()
            return True
        return False

    fake.on[name] = lose
    arguments = ({0: keys},) if name == "lookup" else ()
    getattr(client, name)(*arguments)
    losses[0] = 2
    with pytest.raises(ConnectionLostError):
        getattr(client, name)(*arguments)


def test_others_are_not(client: Any, fake: FakeDaemon, keys: U8Array) -> None:
    fake.on["pin"] = lambda peer, message: peer.hang_up()
    with pytest.raises(ConnectionLostError):
        client.pin({0: keys})
    assert fake.tags().count("pin") == 1


@pytest.mark.parametrize("losses", [1, 2])
def test_registering_survives_one_loss(client: Any, fake: FakeDaemon, caches: KvCache, losses: int) -> None:
    left = [losses]

    def lose(peer: FakeSession, _message: Any) -> bool:
        left[0] -= 1
        if left[0] >= 0:
            peer.close()
        return left[0] >= 0

    fake.on["register"] = lose
    if losses == 1:
        assert client.register(caches).id is not None
    else:
        with pytest.raises(ConnectionLostError):
            client.register(caches)


def test_a_lost_unregister_forgets(client: Any, fake: FakeDaemon, caches: KvCache) -> None:
    registration = client.register(caches)
    fake.on["unregister"] = lambda peer, message: peer.hang_up()
    with pytest.raises(ConnectionLostError):
        client.unregister(registration)
    client.ping()
    assert fake.tags().count("register") == 1


def test_late_replies_are_dropped(make_client: Any, fake: FakeDaemon, path: str, keys: U8Array) -> None:
    """A late answer to one lookup is not taken for the answer to the next, and a late lease is given back."""
    client = make_client(path, deadline_s=0.1)
    client.connect()
    answers: list[Callable[[], None]] = []

    def late(peer: FakeSession, message: Any) -> bool:
        states = [bytes([1, 1, 1, 1])]
        fake.leases.add(1234)
        answers.append(lambda: peer.say(m.Found(seq=message.seq, states=states, boundaries=b"", lease=1234)))
        return True

    fake.on["pin"] = late
    with pytest.raises(DeadlineError):
        client.pin({0: keys})
    fake.soon(answers[0])
    assert client.lookup({0: keys}).states[0].tolist() == [0, 0, 0, 0]
    until(lambda: client.ping() is None and not fake.leases, "the late lease is given back")
    assert fake.tags().count("hello") == 1


def test_a_replay_that_is_refused(make_client: Any, fake: FakeDaemon, path: str, caches: KvCache) -> None:
    client = make_client(path, connect_deadline_s=0.0)
    client.register(caches)
    eof(fake)
    fake_is_idle(fake)
    fake.on["register"] = lambda peer, message: peer.error(message.seq, "schema_mismatch")
    with pytest.raises(RemoteError, match="schema_mismatch"):
        client.ping()
    assert not client.is_connected, "the refusal is none of a request"
    del fake.on["register"]
    client.ping()
    assert client.is_connected
