"""Whose a job's blocks are: section 5's promise, against daemons that die, hang, lie and leave."""

from __future__ import annotations

import errno
import functools
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import (
    Client,
    Group,
    GroupKind,
    JobConnectionLostError,
    JobDeadlineError,
    KvCache,
    Outcome,
    SharedTensor,
)
from kvoffloadd.errors import ConnectionLostError, DeadlineError, RemoteError
from kvoffloadd.model import U8Array
from kvoffloadd.protocol import messages as m
from tests.client.fake_daemon import FakeDaemon, FakeSession
from tests.client.flavours import NAMESPACE


@pytest.fixture
def stand_in() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose pidfd a fake daemon gives out as its own, so that it can die when the test wants."""
    with subprocess.Popen(["sleep", "1000"]) as child:
        yield child
        child.kill()


def eof(fake: FakeDaemon) -> None:
    """Close every connection."""
    fake.soon(lambda: [peer.hang_up() for peer in fake.peers])


def refuse_greetings(fake: FakeDaemon) -> None:
    """Let no client in any more."""

    def refuse(peer: FakeSession, _message: Any) -> bool:
        peer.close()
        return True

    fake.on["hello"] = refuse


@pytest.fixture
def job_at(make_client: Callable[..., Any], caches: KvCache, keys: U8Array) -> Callable[..., tuple[Any, Any]]:
    """`job_at(path, ...)` -> (client, a running store)."""

    def start(path: str, **options: Any) -> tuple[Any, Any]:
        client = make_client(path, connect_deadline_s=0.05, **options)
        return client, client.store(client.register(caches), {0: (keys, np.arange(4))})

    return start


def test_a_deadline_frees_nothing(fake: FakeDaemon, path: str, job_at: Any) -> None:
    fake.manual_completion = True
    client, job = job_at(path)
    with pytest.raises(JobDeadlineError, match="the daemon still uses its blocks") as caught:
        client.wait(job, 0.05)
    assert isinstance(caught.value, DeadlineError)
    assert caught.value.job is job
    assert not job.blocks_free
    with pytest.raises(JobDeadlineError):
        client.wait(job, 0.0)
    fake.soon(lambda: fake.complete(fake.peers[0], job.id))
    assert client.wait(job, 5.0).outcome is Outcome.DONE


def test_waiting_without_time_takes_what_has_come(fake: FakeDaemon, path: str, job_at: Any) -> None:
    client, job = job_at(path)
    fake_is_idle(fake)
    assert client.wait(job, 0.0).outcome is Outcome.DONE


def fake_is_idle(fake: FakeDaemon) -> None:
    """Returns when the fake's thread has sent all that it was asked to."""
    read, write = os.pipe()
    fake.soon(lambda: os.close(write))
    os.read(read, 1)
    os.close(read)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_request_without_answer_owns_its_blocks(
    client: Any, fake: FakeDaemon, caches: KvCache, keys: U8Array, kind: str, make_client: Any, path: str
) -> None:
    hasty = make_client(path, deadline_s=0.1)
    registration = hasty.register(caches)
    answer: list[Callable[[], None]] = []

    def late(peer: FakeSession, message: Any) -> bool:
        def accept() -> None:
            peer.say(m.Accepted(seq=message.seq, job=message.job, states=[bytes([3, 3, 3, 3])]))
            fake.complete(peer, message.job)

        answer.append(accept)
        return True

    fake.on[kind] = late
    with pytest.raises(JobDeadlineError) as caught:
        getattr(hasty, kind)(registration, {0: (keys, np.arange(4))})
    job = caught.value.job
    assert hasty.open_jobs() == [job]
    hasty.ping()  # the session goes on meanwhile
    assert not job.blocks_free
    fake.soon(answer[0])
    result = hasty.wait(job, 5.0)
    assert result.outcome is Outcome.DONE
    assert result.states[0].tolist() == [3, 3, 3, 3]


def test_a_late_error_frees_the_blocks(fake: FakeDaemon, path: str, make_client: Any, caches: KvCache) -> None:
    client = make_client(path, deadline_s=0.1)
    registration = client.register(caches)

    def late(peer: FakeSession, message: Any) -> bool:
        fake.soon(lambda: peer.error(message.seq, "bad_block_id"), 0.3)
        return True

    fake.on["store"] = late
    with pytest.raises(JobDeadlineError) as caught:
        client.store(registration, {0: (b"k" * 32, [0])})
    result = client.wait(caught.value.job, 5.0)
    assert result.outcome is Outcome.FAILED
    assert "bad_block_id" in result.reason


def test_an_error_in_time_makes_no_job(client: Any, fake: FakeDaemon, caches: KvCache) -> None:
    registration = client.register(caches)
    fake.on["store"] = lambda peer, message: peer.error(message.seq, "bad_block_id")
    with pytest.raises(RemoteError, match="bad_block_id"):
        client.store(registration, {0: (b"k" * 32, [0])})
    assert client.open_jobs() == []


def test_eof_alone_proves_nothing_but_death_does(path: str, stand_in: subprocess.Popen[bytes], job_at: Any) -> None:
    with FakeDaemon(path, pid=stand_in.pid) as fake:
        fake.manual_completion = True
        client, job = job_at(path)
        refuse_greetings(fake)
        eof(fake)
        with pytest.raises(JobDeadlineError):
            client.wait(job, 0.3)
        assert not job.blocks_free
        assert client.open_jobs() == [job]

        stand_in.kill()
        result = client.wait(job, 5.0)
        assert (result.outcome, result.reason) == (Outcome.LOST, "the daemon died")
        assert result.failed[0].tolist() == [0, 1, 2, 3]
        assert not result.valid(0).any()


def test_eof_and_a_greeting_by_the_same_daemon_prove_it(fake: FakeDaemon, path: str, job_at: Any) -> None:
    fake.manual_completion = True
    client, job = job_at(path)
    eof(fake)
    result = client.wait(job, 5.0)
    assert result.outcome is Outcome.LOST
    assert fake.tags().count("hello") == 2
    client.ping()


def test_a_greeting_by_another_daemon_proves_nothing(path: str, stand_in: subprocess.Popen[bytes], job_at: Any) -> None:
    first = FakeDaemon(path, pid=stand_in.pid)
    with first:
        first.manual_completion = True
        client, job = job_at(path)
    with FakeDaemon(path) as second:
        with pytest.raises(JobDeadlineError):
            client.wait(job, 0.3)
        assert client.boot_id == second.boot_id
        assert not job.blocks_free
        client.ping()  # the new daemon serves meanwhile
        client.cancel(job)  # which it has never heard of
        assert "cancel" not in second.tags()
        stand_in.kill()
        assert client.wait(job, 5.0).outcome is Outcome.LOST


def test_death_is_seen_though_a_child_keeps_the_socket_open(
    fake: FakeDaemon, path: str, job_at: Any, stand_in: subprocess.Popen[bytes]
) -> None:
    fake.pid = stand_in.pid
    fake.manual_completion = True
    client, job = job_at(path)
    stand_in.kill()  # no EOF comes: the fake lives
    assert client.wait(job, 5.0).outcome is Outcome.LOST
    fake.pid = os.getpid()
    client.ping()


def test_what_was_said_before_death_counts(
    fake: FakeDaemon, path: str, job_at: Any, stand_in: subprocess.Popen[bytes]
) -> None:
    fake.pid = stand_in.pid
    fake.manual_completion = True
    client, job = job_at(path)
    fake.soon(lambda: fake.complete(fake.peers[0], job.id))
    fake_is_idle(fake)
    stand_in.kill()
    stand_in.wait()
    assert client.wait(job, 5.0).outcome is Outcome.DONE


def test_a_killed_daemon(path: str, spawn: Any, job_at: Any) -> None:
    """A real process gets a real SIGKILL. The outcome is LOST only when its pidfd shows that it is dead."""
    child = spawn("--never-complete")
    client, job = job_at(path)
    pidfd = os.pidfd_open(child.pid)
    try:
        os.kill(child.pid, signal.SIGKILL)
        assert client.wait(job, 10.0).outcome is Outcome.LOST
        assert select.select([pidfd], [], [], 0)[0] == [pidfd]
    finally:
        os.close(pidfd)
    spawn()
    client.ping()


def test_a_stopped_daemon_keeps_its_blocks(path: str, spawn: Any, make_client: Any, caches: KvCache) -> None:
    child = spawn("--never-complete")
    client = make_client(path, deadline_s=0.3)
    registration = client.register(caches)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(JobDeadlineError) as caught:
        client.store(registration, {0: (b"k" * 32, [0])})
    with pytest.raises(DeadlineError):
        client.ping()
    assert not caught.value.job.blocks_free
    with pytest.raises(JobDeadlineError):
        client.close(0.2)
    assert not caught.value.job.blocks_free
    os.kill(child.pid, signal.SIGKILL)
    assert client.wait(caught.value.job, 5.0).outcome is Outcome.LOST
    client.close()


def test_a_loss_in_the_request_leaves_the_job_open(
    path: str, stand_in: subprocess.Popen[bytes], make_client: Any, caches: KvCache
) -> None:
    with FakeDaemon(path, pid=stand_in.pid) as fake:
        client = make_client(path, connect_deadline_s=0.05)
        registration = client.register(caches)
        fake.on["store"] = lambda peer, message: peer.hang_up()
        with pytest.raises(JobConnectionLostError) as caught:
            client.store(registration, {0: (b"k" * 32, [0])})
        assert isinstance(caught.value, ConnectionLostError)
        job = caught.value.job
        assert client.open_jobs() == [job]
        assert not job.blocks_free
        stand_in.kill()
        assert client.wait(job, 5.0).outcome is Outcome.LOST


def test_a_request_that_was_never_sent_is_sent_again(
    client: Any, fake: FakeDaemon, caches: KvCache, keys: U8Array
) -> None:
    """The daemon closed an idle connection and has not seen the request, so even a store may be asked again."""
    registration = client.register(caches)
    number = registration.id
    eof(fake)
    fake_is_idle(fake)
    job = client.store(registration, {0: (keys, np.arange(4))})
    assert client.wait(job, 5.0).outcome is Outcome.DONE
    assert registration.id != number
    assert fake.tags().count("store") == 1


@pytest.mark.parametrize(
    "lie",
    [
        lambda peer, message: peer.raw(b"\xff\xff\xff\xff"),
        lambda peer, message: peer.raw(b"\3\0\0\0abc"),
        lambda peer, message: peer.say(m.Done(seq=message.seq + 1)),
        lambda peer, message: peer.say(m.Registered(seq=message.seq, registration=1)),
        lambda peer, message: peer.say(m.Found(seq=message.seq, states=[b"\1"], boundaries=b"")),
        lambda peer, message: peer.say(m.Found(seq=message.seq, states=[b"\1\1\1\x63"], boundaries=b"")),
        lambda peer, message: peer.say(m.Found(seq=message.seq, states=[b"\1\1\1\1"], boundaries=b"123")),
        lambda peer, message: peer.say(m.Completed(job=77, outcome="done", bytes=0, seconds=0.0, failed=[])),
        lambda peer, message: peer.say(m.Events(group=0, added=b"", removed=b"")),
        lambda peer, message: peer.say(m.Error(seq=0, code="bad_frame", message="?", fault="client", retryable=False)),
        lambda peer, message: peer.raw(peer.connection.send(m.Done(seq=message.seq)), [0]),
    ],
    ids=[
        "oversize", "no map", "wrong seq", "wrong type", "short states", "no state", "no u32", "no job",
        "no subscriber", "error for nobody", "descriptor",
    ],
)  # fmt: skip
def test_a_daemon_that_breaks_the_protocol(
    fake: FakeDaemon, path: str, job_at: Any, keys: U8Array, lie: Callable[[FakeSession, Any], None]
) -> None:
    """The connection is broken off, jobs on it stay open until the daemon has closed it, then all goes on."""
    fake.manual_completion = True
    client, job = job_at(path)
    lies = [True, True]  # lookup is asked again once by itself

    def handler(peer: FakeSession, message: Any) -> bool:
        if not lies:
            return False
        lies.pop()
        lie(peer, message)
        return True

    fake.on["lookup"] = handler
    with pytest.raises(ConnectionLostError, match="broke the protocol"):
        client.lookup({0: keys})
    # The fake closes when it sees that nothing more comes; its greeting after that proves the job's end.
    assert client.lookup({0: keys}).states[0].tolist() == [1, 1, 1, 1]
    assert client.wait(job, 5.0).outcome is Outcome.LOST


class InterruptedSocket:
    """A socket whose next `send` has done its work when a signal's handler raises."""

    def __init__(self, sock: Any) -> None:
        self._socket = sock
        self._armed = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def send(self, data: Any) -> int:
        sent: int = self._socket.send(data)
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt
        return sent


def test_an_interrupt_in_the_middle_of_a_request(fake: FakeDaemon, path: str, caches: KvCache, keys: U8Array) -> None:
    """The daemon may have it: its blocks are not free before that is disproved, and nothing is sent twice."""
    fake.manual_completion = True
    with Client(path, namespace=NAMESPACE, role="worker", deadline_s=2.0) as client:
        registration = client.register(caches)
        sockets: Any = client._core._transport._sockets
        for connection, sock in sockets.items():
            sockets[connection] = InterruptedSocket(sock)
        with pytest.raises(KeyboardInterrupt):
            client.store(registration, {0: (keys, np.arange(4))})
        (job,) = client.open_jobs()
        assert not job.blocks_free
        client.ping()  # on another connection, after the daemon has closed the broken one
        assert fake.tags().count("store") == 1
        assert client.wait(job, 5.0).outcome is Outcome.LOST


class Unreadable:
    """A socket that can't be read because the kernel has no memory for it."""

    def __init__(self, sock: Any) -> None:
        self._socket = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recvmsg_into(self, *_: Any) -> Any:
        raise OSError(errno.ENOMEM, "no memory")


def test_a_connection_that_can_not_be_read_proves_nothing(
    path: str, stand_in: subprocess.Popen[bytes], job_at: Any
) -> None:
    """The client has not seen the daemon close it: a greeting by the same daemon is no proof that its copies have
    ended.
    """
    with FakeDaemon(path, pid=stand_in.pid) as fake:
        fake.manual_completion = True
        client, job = job_at(path)
        sockets = client._core._transport._sockets
        for connection, sock in sockets.items():
            sockets[connection] = Unreadable(sock)
        fake.soon(lambda: fake.peers[0].raw(b"\0"))
        with pytest.raises(JobDeadlineError):
            client.wait(job, 0.3)
        client.ping()
        assert fake.tags().count("hello") == 2
        assert client.open_jobs() == [job]
        assert not job.blocks_free
        stand_in.kill()
        assert client.wait(job, 60.0).outcome is Outcome.LOST


def test_a_late_answer_does_not_disturb_the_end(fake: FakeDaemon, path: str, make_client: Any, keys: U8Array) -> None:
    """It is for a call that was given up; what it granted ends with the session."""
    late: list[int] = []

    def pin(_peer: FakeSession, message: Any) -> bool:
        late.append(message.seq)
        return True

    def bye(peer: FakeSession, _message: Any) -> bool:
        peer.say(m.Found(seq=late[0], states=[b"\1\1\1\1"], boundaries=b"", lease=5))
        return False

    fake.on["pin"] = pin
    client = make_client(path, deadline_s=2.0)
    with pytest.raises(DeadlineError):
        client.pin({0: keys})
    fake.on["bye"] = bye
    client.close(5.0)
    assert "release" not in fake.tags()


@pytest.mark.slow
def test_a_broken_off_connection_is_waited_for(
    path: str, stand_in: subprocess.Popen[bytes], make_client: Any, caches: KvCache, keys: U8Array
) -> None:
    """No new greeting counts before the daemon has closed the old connection."""
    with FakeDaemon(path, pid=stand_in.pid) as fake:
        fake.manual_completion = True
        client = make_client(path, deadline_s=2.0)
        job = client.store(client.register(caches), {0: (keys, np.arange(4))})
        child_end = fake.peers[0].socket.dup()  # while any process holds it, the client sees no end
        try:
            fake.soon(lambda: fake.peers[0].raw(b"\0\0\0\0"))
            with pytest.raises(JobDeadlineError):
                client.wait(job, 0.5)
            with pytest.raises(DeadlineError, match="the previous, broken connection"):
                client.ping()
            assert not job.blocks_free
        finally:
            child_end.close()
        assert client.wait(job, 5.0).outcome is Outcome.LOST


def test_what_comes_on_a_broken_off_connection_proves_nothing(fake: FakeDaemon, path: str, job_at: Any) -> None:
    """Some of its bytes may be missing, so the rest may mean anything."""
    fake.manual_completion = True
    client, job = job_at(path)
    peer = fake.peers[-1]

    def lie_then_complete() -> None:
        peer.say(m.Done(seq=12345))
        time.sleep(0.2)  # the client breaks it off
        fake.complete(peer, job.id)

    fake.soon(lie_then_complete)
    assert client.wait(job, 5.0).outcome is Outcome.LOST


def test_a_wrong_failed_list_is_no_completion(fake: FakeDaemon, path: str, job_at: Any) -> None:
    for failed in ([b"\4\0\0\0"], [b"\0"], [b"", b""]):
        fake.manual_completion = True
        client, job = job_at(path)
        peer = fake.peers[-1]
        fake.soon(functools.partial(fake.complete, peer, job.id, "done", failed))
        assert client.wait(job, 5.0).outcome is Outcome.LOST


def test_without_reconnect(path: str, stand_in: subprocess.Popen[bytes], job_at: Any) -> None:
    with FakeDaemon(path, pid=stand_in.pid) as fake:
        fake.manual_completion = True
        client, job = job_at(path, reconnect=False)
        eof(fake)
        with pytest.raises(JobDeadlineError):
            client.wait(job, 0.1)
        with pytest.raises(ConnectionLostError, match="connect"):
            client.ping()
        assert fake.tags().count("hello") == 1
        client.connect()
        assert client.wait(job, 0.0).outcome is Outcome.LOST
        client.ping()


def test_closing_waits_for_the_daemons_copies(fake: FakeDaemon, path: str, job_at: Any) -> None:
    fake.manual_completion = True
    client, job = job_at(path)

    def drain(peer: FakeSession, message: Any) -> bool:
        def finish() -> None:
            fake.complete(peer, job.id, "cancelled")
            peer.say(m.Done(seq=message.seq))

        fake.soon(finish, 0.2)
        return True

    fake.on["bye"] = drain
    begun = time.monotonic()
    client.close()
    assert time.monotonic() - begun >= 0.2
    assert job.result.outcome is Outcome.CANCELLED


def test_the_answer_to_bye_frees_all(fake: FakeDaemon, path: str, job_at: Any) -> None:
    fake.manual_completion = True
    client, job = job_at(path)
    client.close()
    assert job.result.outcome is Outcome.LOST


def test_closing_by_force(fake: FakeDaemon, path: str, job_at: Any) -> None:
    fake.manual_completion = True
    fake.on["bye"] = lambda peer, message: True
    client, job = job_at(path)
    with pytest.raises(JobDeadlineError):
        client.close(0.05)
    client.close(0.05, force=True)
    assert not job.blocks_free


def test_a_job_keeps_its_memory(fake: FakeDaemon, path: str, make_client: Any) -> None:
    fake.manual_completion = True
    client = make_client(path)
    tensor = SharedTensor.allocate(1, 4096, name="kept")
    registration = client.register(KvCache([tensor], [Group(0, GroupKind.FULL, 16)]))
    job = client.store(registration, {0: (b"k" * 32, [0])})
    client.unregister(registration)
    del registration, tensor
    assert job.registration.caches.tensors[0].array.shape == (1, 4096)
