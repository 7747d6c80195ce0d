"""Frames: what is written is read, what is hostile is refused at a bounded cost."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvoffloadd.errors import FramingError, MessageError, PeerError
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol import unpacking
from kvoffloadd.protocol.connection import PREFIX, Connection, convert, encode
from kvoffloadd.protocol.state import ProtocolState
from kvoffloadd.protocol.unpacking import DEPTH, STEP_ITEMS, WHOLE_MAX, unpack, unpack_in_steps
from tests.protocol.samples import EVERY, fields, in_state, messages_of, sample, structs

AMPLIFIED_BYTES_MAX = 64 << 20
quick = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def stepped(body: bytes) -> dict[str, Any]:
    """Unpacks as `unpack` does, in steps."""
    steps = unpack_in_steps(body)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        found: dict[str, Any] = end.value
        return found


def decoded(frame: bytes) -> m.Message:
    body = frame[PREFIX.size :]
    fields = unpack(body)
    assert stepped(body) == fields
    return convert(fields, EVERY)


@pytest.mark.parametrize("tag", EVERY)
def test_every_message_comes_back(tag: str) -> None:
    @quick
    @given(structs(EVERY[tag]))
    def comes_back(message: m.Message) -> None:
        assert decoded(encode(message)) == message

    comes_back()
    assert decoded(encode(sample(tag))) == sample(tag)


@pytest.mark.parametrize("tag", EVERY)
def test_no_field_may_be_unknown_missing_or_of_another_type(tag: str) -> None:
    good = fields(tag)
    required = {field.encode_name for field in msgspec.structs.fields(EVERY[tag]) if field.required}
    with pytest.raises(MessageError):
        convert({**good, "surplus": 1}, EVERY)
    for name in good:
        if name in required or name == "type":
            with pytest.raises(MessageError):
                convert({key: value for key, value in good.items() if key != name}, EVERY)
        for wrong in wrongs(good[name]):
            with pytest.raises(MessageError):
                convert({**good, name: wrong}, EVERY)


def wrongs(value: Any) -> list[Any]:
    """Values of other types; a bool where a number is due above all."""
    everything: list[Any] = [True, 1.5, "text", [1, "x"], {"no": b"field"}, object]
    if isinstance(value, bool):
        everything[0] = 1
    elif isinstance(value, float):
        everything.remove(1.5)
    elif isinstance(value, str):
        everything.remove("text")
    elif isinstance(value, dict) and "no" not in value and "model" not in value and "frame_bytes" not in value:
        everything.remove({"no": b"field"})  # `report.status` holds anything
    return everything[:-1]


@pytest.mark.parametrize(("tag", "name", "value"), [
    ("ping", "seq", -1), ("ping", "seq", 1 << 32), ("hello", "instance", b"short"), ("hello", "version", 1 << 31),
    ("release", "lease", -1), ("release", "lease", 1 << 62), ("attach", "fds", 65), ("attach", "fds", 0),
    ("store", "deadline_s", 0.0), ("store", "deadline_s", 86_401.0), ("store", "deadline_s", float("nan")),
    ("drain", "deadline_s", float("inf")), ("snapshot", "cursor", 1 << 48), ("hello", "role", "root"),
    ("completed", "outcome", "lost"), ("clear", "everything", 1), ("clear", "everything", None),
    ("clear", "token", b"short"), ("clear", "token", bytes(17)), ("clear", "wait_s", -0.1), ("clear", "wait_s", 3601.0),
    ("clear", "namespaces", "x" * 129),
    ("welcome", "boot_id", b""), ("hello", "namespace", {"model": "x" * 513}), ("reserve", "parts", [True]),
])  # fmt: skip
def test_values_out_of_range(tag: str, name: str, value: object) -> None:
    with pytest.raises(MessageError, match=name):
        convert({**fields(tag), name: value}, EVERY)


def test_bool_is_no_int_in_lists_either() -> None:
    for tag, changed in (
        ("attached", {"allocations": [True]}),
        ("lookup", {"groups": [{"group": True, "keys": b""}]}),
        ("register", {"tensors": [], "groups": [{"group": 0, "kind": "full", "tokens_per_key": True}]}),
    ):
        with pytest.raises(MessageError):
            convert({**fields(tag), **changed}, EVERY)


def test_unknown_types() -> None:
    strange: list[Any] = ["nothing", "", None, 5, True, b"ping", ["ping"], {}]
    for tag in strange:
        with pytest.raises(MessageError, match="unknown message type"):
            convert({"type": tag, "seq": 1}, EVERY)
    with pytest.raises(MessageError):
        convert(fields("welcome"), dict(m.FROM_CLIENT))


# --- hostile frames ----------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [
    b"", b"\x01", b"\x90", b"\xc0", b"\xa3abc", b"\xc1", b"\xff", b"\x81", b"\x81\xa1a", b"\x80\x80", b"\x81\x01\x01",
    b"\x81\xa1\xff\x01", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x81\xa1a\xc7\x01\x05x",
    b"\x82\xa1a\x01\xa1a\x02", b"\x81\xa1a\x82\xa1b\x01\xa1b\x01", b"\x81\x90\x01", b"\x81\x80\x01",
    b"\x81\xa1a\xc6\xff\xff\xff\xff", b"\x81\xa1a\xdb\xff\xff\xff\xff",
    b"\x81\xa1a\xd6\xff\xff\xff\xff\xff", b"\x81\xa1a" + b"\x91" * 5000, b"\x81\xa1a" * 5000,
], ids=lambda body: body[:12].hex() or "empty")  # fmt: skip
@pytest.mark.parametrize("way", [unpack, stepped])
def test_what_is_no_message(body: bytes, way: Callable[[bytes], dict[str, Any]]) -> None:
    with pytest.raises(PeerError):
        convert(way(body), EVERY)


@pytest.mark.parametrize("way", [unpack, stepped])
def test_keys_named_twice(way: Callable[[bytes], dict[str, Any]]) -> None:
    for body in (b"\x82\xa4type\xa4ping\xa4type\xa3bye", b"\x81\xa1x\x91\x81\xa1x\x91\x82\xa1a\x01\xa1a\x02"):
        with pytest.raises(FramingError, match="twice"):
            way(body)


@pytest.mark.parametrize("way", [unpack, stepped])
def test_a_frame_holds_no_more_than_its_map(way: Callable[[bytes], dict[str, Any]]) -> None:
    body = encode(sample("ping"))[PREFIX.size :]
    for more in (b"\x80", b"\0", body):
        with pytest.raises(FramingError):
            way(body + more)


def nested(value: Any, depth: int) -> dict[str, Any]:
    """A map with this value in a map or a list of that depth; the map is the first."""
    for at in range(depth - 1, 0, -1):
        value = {"x": value} if at % 2 else [value]
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize("depth", range(1, DEPTH + 3))
@pytest.mark.parametrize("value", [
    [[]] * 4000, [{}] * 4000, [{"a": [n]} for n in range(4000)], {str(n): [[]] * 60 for n in range(100)},
    [[n] * 60 for n in range(1000)], [1] * 16_000, ["ab", b"cd"] * 8000, [[[[[[]]]]]] * 1000,
    [[[]] * 60] * 60, [[[[]] * 18] * 18] * 40,
    {str(n): n for n in range(256)}, [[1] * 510] * 256, [{str(n): n for n in range(255)}] * 100,
], ids=lambda value: msgpack.packb(value)[:9].hex())  # fmt: skip
def test_a_step_is_short(value: Any, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a frame holds, and however deep: in Python calls of msgpack, and items of what it unpacks whole."""
    body = msgpack.packb(nested(value, depth + 1))
    work: Counter[str] = Counter()
    plain_whole = unpacking._Unpacker._whole

    def whole(unpacker: unpacking._Unpacker) -> Any:
        before = unpacker._count.items
        found = plain_whole(unpacker)
        work.update(calls=1, items=unpacker._count.items - before)
        return found

    monkeypatch.setattr(unpacking._Unpacker, "_whole", whole)
    steps = unpack_in_steps(body)
    longest = made = 0
    try:
        while True:
            work.clear()
            next(steps)
            made, longest = made + 1, max(longest, work.total())
    except StopIteration as end:
        assert end.value == unpack(body)
        assert made > len(body) // (1 << 17), "in steps"
    except FramingError as error:
        assert depth >= DEPTH - 2, error
    assert longest <= 2 * STEP_ITEMS + WHOLE_MAX * WHOLE_MAX


@pytest.mark.parametrize("key", [b"type", "x" * 300])
def test_a_key_is_what_it_may_be_at_once(key: Any) -> None:
    body = msgpack.packb({"type": "ping", "seq": 1, "x": [{key: 1}]})
    assert stepped(body) == unpack(body)


@pytest.mark.parametrize("way", [unpack, stepped])
def test_a_key_that_holds_very_much(way: Callable[[bytes], dict[str, Any]]) -> None:
    body = b"\x82\xa4type\xa4ping" + msgpack.packb([[1] * 60] * 60) + b"\1"
    with pytest.raises(FramingError):
        way(body)


def test_single_values_are_made_in_steps() -> None:
    steps = unpack_in_steps(msgpack.packb({"type": "register", "signals": list(range(16_000))}))
    assert sum(1 for _ in steps) >= 16_000 // STEP_ITEMS


def lists_of(item: bytes, count: int = 253) -> bytes:
    """Packs as many lists of `count` equal items as fit, in a list, in a map."""
    one = b"\xdc" + count.to_bytes(2, "big") + item * count
    return b"\x82\xa4type\xa4ping\xa1x\xdc\x3f\xff" + one * ((m.FRAME_BYTES_MAX - 64) // len(one))


def hostile_bodies() -> dict[str, bytes]:
    """4 MiB each, made to become as many objects as they can."""
    size = m.FRAME_BYTES_MAX - 64
    name = b"\x82\xa4type\xa4ping\xa1x"
    small_map = b"\xde\x01\x00" + b"".join(b"\xa2%02x\xa2ab" % i for i in range(256))
    return {
        "empty maps": name + b"\xdd" + size.to_bytes(4, "big") + b"\x80" * size,
        "empty lists": name + b"\xdd" + size.to_bytes(4, "big") + b"\x90" * size,
        "lists of lists": lists_of(b"\x90"),
        "lists of numbers": lists_of(b"\xcd\x10\x00"),
        "lists of letters": lists_of(b"\xa1a"),
        "lists of strings": lists_of(b"\xa2ab", 4096),
        "lists of bytes": lists_of(b"\xc4\2ab", 4096),
        "lists of extensions": lists_of(b"\xd4\1a", 4096),
        "lists of timestamps": lists_of(b"\xd6\xffabcd", 4096),
        "small maps": name + b"\xdc\x3f\xff" + b"\x84\xa1a\1\xa1b\1\xa1c\1\xa1d\1" * (size // 13),
        "larger maps": name + b"\xdc\x3f\xff" + small_map * (size // len(small_map)),
        "deep": name + b"\x91" * size,
        "wide map": b"\xdf" + (size // 2).to_bytes(4, "big") + b"\xa0\x01" * (size // 2),
        "one string": name + b"\xdb" + (size - 20).to_bytes(4, "big") + b"a" * (size - 20),
        "one wide string": name + b"\xdb" + (size - 20).to_bytes(4, "big") + b"\xf0\x9f\x98\x80" * (size // 4 - 5),
        "zeros": bytes(size),
    }


@pytest.mark.parametrize("kind", hostile_bodies())
def test_a_hostile_frame_costs_a_bounded_amount(kind: str) -> None:
    body = hostile_bodies()[kind]
    daemon = in_state(ProtocolState.READY, daemon=True)
    frame = PREFIX.pack(len(body)) + body
    tracemalloc.start()
    try:
        daemon.receive_data(frame)
        with pytest.raises(PeerError):
            while daemon.next_message() is None:
                assert daemon.unpacking is not None
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < AMPLIFIED_BYTES_MAX


# --- random and mutated ------------------------------------------------------------------------------


def never_surprises(connection: Connection, data: bytes) -> None:
    """Whatever comes: messages, or the peer's fault."""
    try:
        connection.receive_data(data)
        for _ in range(1000):
            if connection.next_message() is None and connection.unpacking is None:
                return
    except PeerError:
        return


@quick
@given(st.binary(max_size=300), st.booleans(), st.sampled_from(list(ProtocolState)))
def test_random_bytes(data: bytes, daemon: bool, state: ProtocolState) -> None:
    never_surprises(in_state(state, daemon=daemon), data)
    never_surprises(in_state(state, daemon=daemon), PREFIX.pack(len(data)) + data)


@quick
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9) | st.binary(), inner),
        max_leaves=20,
    ),
    st.sampled_from(sorted(EVERY)),
)
def test_random_values(value: Any, tag: str) -> None:
    for body in (msgpack.packb(value), msgpack.packb({**fields(tag), "seq": value})):
        for daemon in (True, False):
            never_surprises(in_state(ProtocolState.READY, daemon=daemon), PREFIX.pack(len(body)) + body)


@quick
@given(messages_of(EVERY), st.data())
def test_mutated_messages(message: m.Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(4, len(frame) - 1))] = data.draw(st.integers(0, 255))
    for daemon in (True, False):
        never_surprises(in_state(ProtocolState.READY, daemon=daemon), bytes(frame))


def test_many_mutated_frames(rng: random.Random) -> None:
    """A longer loop than hypothesis has time for; prefixes change too."""
    frames = [encode(sample(tag)) for tag in EVERY]
    for _ in range(4000):
        frame = bytearray(rng.choice(frames) + rng.choice(frames))
        for _ in range(rng.randint(1, 5)):
            match rng.randrange(4):
                case 0:
                    frame[rng.randrange(len(frame))] = rng.randrange(256)
                case 1:
                    del frame[rng.randrange(len(frame)) :]
                case 2:
                    frame[rng.randrange(len(frame)) : 0] = rng.randbytes(rng.randint(1, 8))
                case _:
                    start = rng.randrange(len(frame))
                    frame += frame[start : start + 20]
            frame = frame or bytearray(b"\0")
        never_surprises(in_state(rng.choice(list(ProtocolState)), daemon=rng.random() < 0.5), bytes(frame))
