"""Bytes and descriptors in any pieces: the same messages, or the fault of the side that sent them."""

from __future__ import annotations

import random

import msgpack
import pytest

from kvoffloadd.errors import FramingError, InternalError, MessageError, PeerError
from kvoffloadd.protocol import connection
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import AT_ONCE_BYTES, PREFIX, Connection, tag_of
from kvoffloadd.protocol.state import ProtocolState
from tests.protocol.samples import EVERY, SAMPLES, fds_of, in_state, sample

REQUEST_TAGS = [tag for tag in m.REQUESTS if tag not in ("hello", "bye")]


def conversation() -> tuple[bytes, list[m.Message]]:
    """All that a client may say, in one stream without descriptors."""
    client = in_state(ProtocolState.READY, daemon=False)
    messages = [sample(tag) for tag in REQUEST_TAGS if not fds_of(tag)] + [sample("bye")]
    return b"".join(map(client.send, messages)), messages


def heard(connection: Connection) -> list[m.Message]:
    found = []
    while (one := connection.next_message()) is not None:
        found.append(one[0])
    return found


def test_whole() -> None:
    stream, messages = conversation()
    daemon = in_state(ProtocolState.READY, daemon=True)
    daemon.receive_data(stream)
    assert heard(daemon) == messages
    assert not daemon.pending


def test_byte_by_byte() -> None:
    stream, messages = conversation()
    daemon = in_state(ProtocolState.READY, daemon=True)
    found = []
    for i in range(len(stream)):
        daemon.receive_data(stream[i : i + 1])
        found += heard(daemon)
    assert found == messages
    assert not daemon.pending


def test_in_random_pieces(rng: random.Random) -> None:
    stream, messages = conversation()
    for _ in range(50):
        cuts = sorted(rng.sample(range(len(stream)), 10))
        daemon = in_state(ProtocolState.READY, daemon=True)
        found = []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            daemon.receive_data(memoryview(stream)[start:end])
            found += heard(daemon)
        assert found == messages


@pytest.mark.parametrize("tag", EVERY)
def test_every_truncation_waits_for_more(tag: str) -> None:
    state = (
        ProtocolState.HELLO if tag == "hello" else ProtocolState.GREETING if tag == "welcome" else ProtocolState.READY
    )
    frame = in_state(state, daemon=tag in m.FROM_DAEMON).send(sample(tag))
    for end in range(len(frame)):
        receiver = in_state(state, daemon=tag in m.FROM_CLIENT)
        receiver.receive_data(frame[:end], [50] * fds_of(tag))
        assert receiver.next_message() is None
        assert bool(receiver.pending) is (end > 0)
        receiver.receive_data(frame[end:] + b"\x01")
        found = receiver.next_message()
        assert found is not None
        assert found[0] == sample(tag)
        assert receiver.next_message() is None
        assert receiver.pending


@pytest.mark.parametrize("size", [0, m.FRAME_BYTES_MAX + 1, 0xFFFFFFFF])
def test_sizes_that_are_none_are_refused_on_the_prefix(size: int) -> None:
    daemon = Connection(daemon=True)
    daemon.receive_data(PREFIX.pack(size))
    with pytest.raises(FramingError, match="cap"):
        daemon.next_message()


def test_what_is_too_big_is_not_sent() -> None:
    client = in_state(ProtocolState.READY, daemon=False)
    with pytest.raises(FramingError, match="cap"):
        client.send(sample("lookup", groups=[m.GroupKeys(group=0, keys=bytes(m.FRAME_BYTES_MAX))]))
    client.send(sample("lookup", groups=[m.GroupKeys(group=0, keys=bytes(m.FRAME_BYTES_MAX - 1000))]))


def test_an_answer_that_is_too_big_is_the_daemons_fault() -> None:
    daemon = in_state(ProtocolState.READY, daemon=True)
    with pytest.raises(InternalError, match="cap") as raised:
        daemon.send(m.Report(seq=1, status={"large": bytes(m.FRAME_BYTES_MAX)}))
    assert raised.value.fault == "daemon"
    assert not raised.value.ends_session
    daemon.send(m.Report(seq=1, status={}))


@pytest.mark.parametrize("digits", [32, 4])
def test_a_report_has_larger_maps_than_a_request(digits: int) -> None:
    """Clients have named their entries: those of many sessions are more than one client may send. The daemon unpacks a
    request in steps, or at once if it has few bytes.
    """
    many = {f"{number:0{digits}x}": "" for number in range(3000)}
    client = in_state(ProtocolState.READY, daemon=False)
    report = m.Report(seq=1, status={"remote": {"eras": many}})
    client.receive_data(in_state(ProtocolState.READY, daemon=True).send(report))
    assert client.next_message() == (report, [])
    daemon = in_state(ProtocolState.READY, daemon=True)
    body = msgpack.packb({"type": "ping", "seq": 1, "more": many})
    assert (len(body) > AT_ONCE_BYTES) == (digits == 32)
    daemon.receive_data(PREFIX.pack(len(body)) + body)
    with pytest.raises(FramingError, match=r"map.* 3000"):
        while daemon.next_message() is None:
            assert daemon.unpacking is not None


def test_a_refused_bye_does_not_leave() -> None:
    """What could not be encoded was not sent."""
    client = in_state(ProtocolState.READY, daemon=False)
    with pytest.raises(FramingError):
        client.send(sample("touch", groups=[m.GroupKeys(group=0, keys=bytes(m.FRAME_BYTES_MAX))]))
    assert client.state is ProtocolState.READY


def test_a_bad_message_is_skipped_and_says_which_request_it_was() -> None:
    daemon = in_state(ProtocolState.READY, daemon=True)
    good = in_state(ProtocolState.READY, daemon=False).send(sample("ping"))
    for fields, seq in (
        ({"type": "ping", "seq": 5, "more": 1}, 5),
        ({"type": "nothing", "seq": 6}, 6),
        ({"type": "ping", "seq": True}, 0),
        ({"type": "ping", "seq": "x"}, 0),
        ({"seq": 8}, 8),
        ({}, 0),
    ):
        daemon.receive_data(frame_of(fields) + good)
        with pytest.raises(MessageError) as caught:
            daemon.next_message()
        assert caught.value.seq == seq
        assert daemon.next_message() == (sample("ping"), [])


def test_a_large_frame_is_unpacked_before_a_message_is_made_of_it() -> None:
    """The daemon unpacks it, and its loop may turn in between; what came behind it waits, and its descriptors go with
    it.
    """
    wide = m.Lookup(seq=7, groups=[m.GroupKeys(group=0, keys=bytes(AT_ONCE_BYTES))])
    client = in_state(ProtocolState.READY, daemon=False)
    daemon = in_state(ProtocolState.READY, daemon=True)
    daemon.receive_data(client.send(wide) + attach(1) + client.send(sample("ping")), [10])
    assert (daemon.next_message(), daemon.unpacking is not None) == (None, True)
    assert (daemon.next_message(), daemon.unpacking is not None) == (None, True)
    assert (daemon.next_message(), daemon.unpacking is not None) == ((wide, []), False)
    assert daemon.next_message() == (sample("attach", fds=1), [10])
    assert daemon.next_message() == (sample("ping"), [])
    assert (daemon.next_message(), daemon.unpacking is not None) == (None, False)
    bad = frame_of({"type": "lookup", "seq": 8, "more": bytes(AT_ONCE_BYTES)})
    daemon.receive_data(bad)
    with pytest.raises(MessageError) as caught:
        while daemon.next_message() is None:
            assert daemon.unpacking is not None
    assert (caught.value.seq, daemon.unpacking) == (8, None)
    found = m.Found(seq=7, states=[bytes(AT_ONCE_BYTES)], boundaries=b"")
    client.receive_data(daemon.send(found))
    assert client.next_message() == (found, []), "a client waits for nothing else"


def frame_of(fields: object) -> bytes:
    import msgpack

    body: bytes = msgpack.packb(fields)
    return PREFIX.pack(len(body)) + body


# --- descriptors -------------------------------------------------------------------------------------


def attach(count: int) -> bytes:
    return in_state(ProtocolState.READY, daemon=False).send(sample("attach", fds=count))


def test_descriptors_go_with_their_frames() -> None:
    daemon = in_state(ProtocolState.READY, daemon=True)
    daemon.receive_data(attach(2) + attach(1), [10, 11, 12])
    assert daemon.next_message() == (sample("attach", fds=2), [10, 11])
    assert daemon.next_message() == (sample("attach", fds=1), [12])
    assert daemon.take_fds() == []


def test_descriptors_may_come_before_the_rest_of_their_frame() -> None:
    frame = attach(2)
    daemon = in_state(ProtocolState.READY, daemon=True)
    daemon.receive_data(frame[:3], [10, 11])
    assert daemon.next_message() is None
    daemon.receive_data(frame[3:])
    assert daemon.next_message() == (sample("attach", fds=2), [10, 11])


@pytest.mark.parametrize(("stated", "came"), [(2, 1), (1, 0), (1, 2), (64, 63)])
def test_too_few_or_too_many_descriptors(stated: int, came: int) -> None:
    daemon = in_state(ProtocolState.READY, daemon=True)
    daemon.receive_data(attach(stated), range(100, 100 + came))
    with pytest.raises(FramingError, match="descriptors"):
        daemon.next_message()
    assert len(daemon.take_fds()) in (came, came - stated)  # what no message got is there to be closed


def test_a_descriptor_that_no_frame_states() -> None:
    daemon = in_state(ProtocolState.READY, daemon=True)
    daemon.receive_data(in_state(ProtocolState.READY, daemon=False).send(sample("ping")), [10])
    with pytest.raises(FramingError, match="no frame states"):
        daemon.next_message()
    assert daemon.take_fds() == [10]


def test_more_descriptors_than_a_frame_may_carry() -> None:
    daemon = in_state(ProtocolState.READY, daemon=True)
    with pytest.raises(FramingError, match="65 descriptors"):
        daemon.receive_data(b"", range(65))
    assert len(daemon.take_fds()) == 65
    with pytest.raises(MessageError):
        lone = in_state(ProtocolState.READY, daemon=True)
        lone.receive_data(frame_of({"type": "attach", "seq": 1, "kind": "shm", "fds": 0}))
        lone.next_message()


@pytest.mark.parametrize("fields", [
    {"type": "attach", "seq": 1, "kind": "floppy", "fds": 1},
    {"type": "ping", "seq": 1, "fds": 1},
    {"type": "no such", "seq": 1, "fds": 1},
])  # fmt: skip
def test_descriptors_with_what_cannot_be_taken_end_the_stream(fields: dict[str, object]) -> None:
    daemon = in_state(ProtocolState.READY, daemon=True)
    daemon.receive_data(frame_of(fields), [10])
    with pytest.raises(FramingError, match="descriptors"):
        daemon.next_message()
    assert daemon.take_fds() == [10]


def test_descriptors_of_a_message_that_memory_lacks_for_are_there_to_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    daemon = in_state(ProtocolState.READY, daemon=True)
    daemon.receive_data(frame_of({"type": "attach", "seq": 1, "kind": "shm", "fds": 2}), [10, 11])
    monkeypatch.setattr(connection, "_convert", fail)
    with pytest.raises(MemoryError):
        daemon.next_message()
    assert daemon.take_fds() == [10, 11]


@pytest.mark.parametrize("fds", [True, -1, 1.0, "1", None, 1 << 62])
def test_a_count_of_descriptors_that_is_none(fds: object) -> None:
    daemon = in_state(ProtocolState.READY, daemon=True)
    daemon.receive_data(frame_of({"type": "attach", "seq": 1, "kind": "shm", "fds": fds}), [10])
    with pytest.raises(PeerError):
        daemon.next_message()
    assert daemon.take_fds() == [10]


def test_tags() -> None:
    assert {tag_of(sample(tag)) for tag in EVERY} == set(EVERY)
    assert set(SAMPLES) <= set(EVERY)
