"""Bytes that are no frame end the session with an error; frames that are no message are answered, and it goes on."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from kvoffloadd.linux.sharedmem import create_memfd
from kvoffloadd.testing.process import open_fds
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import NAMESPACE, PREFIX, RawPeer, frame, said
from tests.server.scene import Scene

FRAME_BYTES_MAX = 4 << 20


def prefixed(body: bytes) -> bytes:
    return PREFIX.pack(len(body)) + body


def deep(levels: int) -> bytes:
    """A ping with arrays within arrays."""
    kind: bytes = msgpack.packb("type")
    return b"\x83" + kind + b"\xa4ping\xa3seq\x01\xa1x" + b"\x91" * levels + b"\xc0"


UNUSABLE = {
    "no bytes": PREFIX.pack(0),
    "a byte too many": PREFIX.pack(FRAME_BYTES_MAX + 1),
    "four gigabytes": PREFIX.pack(0xFFFFFFFF),
    "no msgpack": prefixed(b"\xc1"),
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a list": frame([1, 2]),
    "a number": frame(7),
    "nil": frame(None),
    "a cut map": prefixed(frame({"type": "ping", "seq": 1})[4:-1]),
    "a map and a byte": prefixed(frame({"type": "ping", "seq": 1})[4:] + b"\0"),
    "two maps": prefixed(frame({"type": "ping", "seq": 1})[4:] * 2),
    "a key twice": prefixed(b"\x83\xa4type\xa4ping\xa3seq\x01\xa3seq\x02"),
    "a key that is a number": frame({"type": "ping", "seq": 1, 5: 1}),
    "a key that is a map": prefixed(b"\x82\xa4type\xa4ping\x80\x01"),
    "text that is no UTF-8": prefixed(b"\x82\xa4type\xa4\xff\xff\xff\xff\xa3seq\x01"),
    "too many fields": frame({"type": "ping", "seq": 1, **{str(n): n for n in range(300)}}),
    "too many maps": frame({"type": "lookup", "seq": 1, "groups": [[{}] * 16_000, [{}] * 16_000]}),
    "too long a list": frame({"type": "lookup", "seq": 1, "groups": [0] * 20_000}),
    "an extension": frame({"type": "release", "seq": 50, "lease": msgpack.ExtType(7, b"1")}),
    "depth": prefixed(deep(5_000)),
    "a length that is not there": prefixed(b"\x82\xa4type\xa4ping\xa3seq\xc6\xff\xff\xff\xff"),
    "a list of four billion": prefixed(b"\x82\xa4type\xa4ping\xa3seq\xdd\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_no_frame(unchanged: Scene, case: str) -> None:
    with unchanged.session() as peer:
        peer.send(UNUSABLE[case])
        peer.turned_away("bad_frame")


@pytest.mark.parametrize("case", UNUSABLE)
def test_no_frame_in_place_of_the_hello(daemon: Daemon, case: str) -> None:
    with RawPeer(daemon.socket) as peer:
        peer.send(UNUSABLE[case])
        peer.turned_away("bad_frame")


def test_what_came_before_an_unusable_frame_is_answered(unchanged: Scene) -> None:
    with unchanged.session() as peer:
        peer.send(frame({"type": "ping", "seq": 70}) + frame({"type": "nonsense", "seq": 71}) + PREFIX.pack(0))
        assert [(m["type"], m["seq"]) for m in peer.end()] == [("done", 70), ("error", 71), ("error", 0)]


NO_MESSAGE: dict[str, dict[str, Any]] = {
    "an unknown type": {"type": "pong", "seq": 50},
    "a type of the daemon's": {"type": "done", "seq": 50},
    "a push": {"type": "gap", "seq": 50},
    "a type in capitals": {"type": "PING", "seq": 50},
    "no type": {"seq": 50},
    "a type that is bytes": {"type": b"ping", "seq": 50},
    "a type that is a list": {"type": ["ping"], "seq": 50},
    "an unknown field": {"type": "ping", "seq": 50, "now": True},
    "a missing field": {"type": "release", "seq": 50},
    "bool for int": {"type": "release", "seq": 50, "lease": True},
    "int for bool": {"type": "clear", "seq": 50, "everything": 1},
    "float for int": {"type": "release", "seq": 50, "lease": 1.0},
    "text for int": {"type": "release", "seq": 50, "lease": "1"},
    "nil for int": {"type": "release", "seq": 50, "lease": None},
    "bool for float": {"type": "drain", "seq": 50, "deadline_s": True},
    "a deadline of nothing": {"type": "drain", "seq": 50, "deadline_s": 0.0},
    "a deadline of not a number": {"type": "drain", "seq": 50, "deadline_s": float("nan")},
    "a deadline without end": {"type": "drain", "seq": 50, "deadline_s": float("inf")},
    "a negative id": {"type": "release", "seq": 50, "lease": -1},
    "an id of 63 bits": {"type": "release", "seq": 50, "lease": 1 << 62},
    "an id of 64 bits": {"type": "release", "seq": 50, "lease": (1 << 64) - 1},
    "text for keys": {"type": "lookup", "seq": 50, "groups": [{"group": 0, "keys": "k" * 32}]},
    "a list for keys": {"type": "lookup", "seq": 50, "groups": [{"group": 0, "keys": [1, 2]}]},
    "a map for a list": {"type": "lookup", "seq": 50, "groups": {"group": 0, "keys": b""}},
    "an unknown field inside": {"type": "lookup", "seq": 50, "groups": [{"group": 0, "keys": b"", "part": 0}]},
    "bool for int inside": {"type": "lookup", "seq": 50, "groups": [{"group": False, "keys": b""}]},
    "a time": {"type": "release", "seq": 50, "lease": msgpack.Timestamp(1)},
    "an unknown kind of memory": {"type": "attach", "seq": 50, "kind": "floppy", "fds": 0},
    "memory without descriptors": {"type": "attach", "seq": 50, "kind": "shm", "fds": 0},
    "an unknown kind of group": {
        "type": "register", "seq": 50, "tensors": [], "groups": [{"group": 1, "kind": "half", "tokens_per_key": 1}],
    },
    "0 tokens per key": {
        "type": "register", "seq": 50, "tensors": [], "groups": [{"group": 1, "kind": "full", "tokens_per_key": 0}],
    },
}  # fmt: skip


@pytest.mark.parametrize("case", NO_MESSAGE)
def test_no_message(unchanged: Scene, case: str) -> None:
    unchanged.peer.send(frame(NO_MESSAGE[case]))
    assert said(unchanged.peer.answer(50), "bad_message")


@pytest.mark.parametrize("seq", [True, "1", None, -1, 1 << 32, 1.0, b"1", [1]])
def test_a_seq_that_is_none_is_not_given_back(unchanged: Scene, seq: Any) -> None:
    """The error's own `seq` must be one, or the peer could not read it."""
    unchanged.peer.send(frame({"type": "ping", "seq": seq}))
    assert said(unchanged.peer.answer(0), "bad_message")


def test_a_missing_seq(unchanged: Scene) -> None:
    unchanged.peer.send(frame({"type": "ping"}))
    assert said(unchanged.peer.answer(0), "bad_message")


# --- descriptors ---------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[int]:
    """A descriptor that could be attached."""
    fd = create_memfd("bad_frames", 4096)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("stated", "sent"), [(1, 0), (2, 1), (64, 63), (1, 2), (1, 64), (65, 0), (-1, 1), (1 << 40, 1)]
)
def test_attach_with_too_few_or_too_many_descriptors(unchanged: Scene, memory: int, stated: int, sent: int) -> None:
    before = unchanged.daemon.open_fds()
    with unchanged.session() as peer:
        peer.begin("attach", rights=[memory] * sent, kind="shm", fds=stated)
        peer.turned_away("bad_frame")
    _descriptors_again(unchanged.daemon, before)


@pytest.mark.parametrize("stated", [True, "1", 1.0, None])
def test_a_count_that_is_none(unchanged: Scene, memory: int, stated: Any) -> None:
    with unchanged.session() as peer:
        peer.begin("attach", rights=[memory], kind="shm", fds=stated)
        peer.turned_away("bad_frame")


@pytest.mark.parametrize("tag", ["ping", "hello", "nonsense"])
def test_descriptors_with_what_takes_none(unchanged: Scene, memory: int, tag: str) -> None:
    before = unchanged.daemon.open_fds()
    with unchanged.session() as peer:
        peer.begin(tag, rights=[memory])
        peer.turned_away("bad_frame")
    with unchanged.session() as peer:
        peer.begin(tag, rights=[memory], fds=1)
        peer.turned_away("bad_frame")
    _descriptors_again(unchanged.daemon, before)


def test_descriptors_before_the_hello(daemon: Daemon, memory: int) -> None:
    before = daemon.open_fds()
    with RawPeer(daemon.socket) as peer:
        fields = {"version": 1, "role": "worker", "instance": bytes(16), "namespace": NAMESPACE}
        while True:
            try:
                peer.begin("hello", rights=[memory], **fields)
                break
            except PermissionError:  # Linux 6.16: nothing passes until it is accepted
                time.sleep(0.01)
        peer.turned_away("bad_frame")
    _descriptors_again(daemon, before)


def test_more_descriptors_than_a_frame_may_carry(unchanged: Scene, memory: int) -> None:
    before = unchanged.daemon.open_fds()
    with unchanged.session() as peer:
        whole = frame({"type": "attach", "seq": 9, "kind": "shm", "fds": 64})
        peer.send(whole[:3], [memory] * 40)
        peer.send(whole[3:6], [memory] * 40)
        peer.turned_away("bad_frame")
    _descriptors_again(unchanged.daemon, before)


def test_descriptors_that_nobody_claimed_are_closed_with_the_session(unchanged: Scene, memory: int) -> None:
    before = unchanged.daemon.open_fds()
    with unchanged.session() as peer:
        peer.send(PREFIX.pack(100) + b"\x84", [memory] * 30)  # a frame that never ends
        peer.socket.shutdown(socket.SHUT_RDWR)
    _descriptors_again(unchanged.daemon, before)


def test_a_later_attach_takes_its_descriptors_from_the_same_read(scene: Scene, memory: int) -> None:
    """Frames that arrive together: the descriptors belong to the one that states them."""
    peer = scene.session()
    attach = {"type": "attach", "seq": 61, "kind": "shm", "fds": 2}
    peer.send(frame({"type": "ping", "seq": 60}) + frame(attach) + frame({"type": "ping", "seq": 62}), [memory] * 2)
    assert [peer.answer(seq)["type"] for seq in (60, 61, 62)] == ["done", "attached", "done"]


def _descriptors_again(daemon: Daemon, before: int) -> None:
    from kvoffloadd.testing.wait import until

    until(lambda: daemon.open_fds() <= before, f"{before} descriptors are open, not {daemon.open_fds()}")


# --- the partial frame ---------------------------------------------------------------------------------------


def test_one_byte_at_a_time_is_slow_but_right(scene: Scene) -> None:
    peer = scene.session()
    for byte in frame({"type": "ping", "seq": 900}):
        peer.send(bytes([byte]))
    assert peer.answer(900)["type"] == "done"


@pytest.mark.parametrize("name", ["x`\n12:34:56.789 WARNING kvoffloadd.daemon: exiting\x1b[31m", "\x9b2J\u202e\r"])
def test_what_a_peer_sends_is_escaped_in_the_log(start_daemon: Callable[[], Daemon], name: str) -> None:
    """Here it is the name of a field. An unexpected descriptor makes the frame end the session."""
    daemon = start_daemon()
    fd = create_memfd("forged", 4096)
    with daemon.peer() as peer:
        peer.hello(namespace={"model": name})
        peer.begin("attach", rights=[fd], kind="shm", fds=1, **{name: 1})
        refused = peer.receive()
        assert refused is not None
        assert refused["code"] == "bad_frame"
    os.close(fd)
    until(lambda: "ends:" in daemon.log(), "the end is logged")
    written = daemon.log()
    assert {c for c in written if not c.isprintable()} == {"\n"}
    assert not [line for line in written.splitlines() if line.startswith("12:34:56.789")]


@pytest.mark.slow
def test_descriptors_that_the_daemon_has_no_room_for_are_not_the_peers_fault(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon()
    fd = create_memfd("lost", 4096)
    with RawPeer(daemon.socket) as peer:
        peer.hello()
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (max(open_fds(daemon.pid)) + 1, limits[1]))
        free = set(range(max(open_fds(daemon.pid)))) - set(open_fds(daemon.pid))
        count = len(free) + 1
        peer.begin("attach", rights=[fd] * count, kind="shm", fds=count)
        refused = peer.receive()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
    os.close(fd)
    assert refused is not None
    assert (refused["code"], refused["fault"], refused["retryable"]) == ("descriptors_lost", "daemon", True)
