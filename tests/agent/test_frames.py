"""Frames between daemon and agent: what is encoded is decoded, whole or in pieces, and nothing else is believed."""

from __future__ import annotations

import random
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.agentwire import frames as frames
from kvoffloadd.agentwire.frames import (
    ANSWER_BYTES_MAX,
    Answer,
    Exists,
    Frames,
    Get,
    Greeting,
    Put,
    Read,
    Refused,
    Remove,
    Renew,
    Start,
    Started,
    Sweep,
    Swept,
    Values,
    Write,
    encode,
)
from kvoffloadd.agentwire.names import Space
from kvoffloadd.errors import FramingError

SPACE = Space(b"f" * 16, b"s" * 16, 1, b"e" * 8, 2, 32)
TO_AGENT: list[frames.FromDaemon] = [
    Start("memory", {"a": 1, "b": [True, None, "x"], "c": {"d": 1.5}}, 4096, 1 << 40, 8192, 2, 1),
    Exists(1, SPACE, b"k" * 64),
    Get(2, SPACE, b"k" * 32, bytes(8), bytes(16), bytes(16)),
    Put((1 << 63) - 1, SPACE, b"", b"", b"", b""),
    Read(3, ["kvo1/ü", "a"]),
    Write(4, "n", b"v", True, 86400.0),
    Renew(4, ["a"], 1.5),
    Remove(5, ["a", "b"]),
    Sweep(6, "p", "17"),
]
FROM_AGENT: list[frames.FromAgent] = [
    Greeting(1, 99),
    Started(True, "x 1.0"),
    Refused("operator", "why"),
    Answer(7, bytes(16)),
    Values(8, [b"v", None, -7]),
    Swept(9, 1000, "17"),
]


@pytest.mark.parametrize("by_agent", [True, False])
def test_messages_come_as_they_were_sent_however_they_are_cut(by_agent: bool, rng: random.Random) -> None:
    messages = [*(FROM_AGENT if by_agent else TO_AGENT)] * 5
    stream = b"".join(encode(message) for message in messages)
    reader, found = Frames(by_agent=by_agent), []
    while stream:
        size = rng.choice((1, 3, 50, 1000))
        reader.receive(stream[:size])
        stream = stream[size:]
        while (message := reader.next()) is not None:
            found.append(message)
    assert found == messages


def test_every_message_is_tried() -> None:
    structs = {each for each in vars(frames).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)}
    assert structs - {Space, msgspec.Struct} == {type(message) for message in TO_AGENT + FROM_AGENT}


@pytest.mark.parametrize("message", TO_AGENT)
def test_an_agent_may_not_say_what_the_daemon_says(message: frames.FromDaemon) -> None:
    reader = Frames(by_agent=True)
    reader.receive(encode(message))
    with pytest.raises(FramingError):
        reader.next()


@pytest.mark.parametrize("size", [0, ANSWER_BYTES_MAX + 1, (1 << 32) - 1])
def test_the_size_is_looked_at_before_the_bytes_come(size: int) -> None:
    reader = Frames(by_agent=True)
    reader.receive(size.to_bytes(4, "little"))
    with pytest.raises(FramingError, match="cap"):
        reader.next()


@given(body=st.binary(min_size=1, max_size=200), by_agent=st.booleans())
def test_no_bytes_make_it_fail_otherwise(body: bytes, by_agent: bool) -> None:
    reader = Frames(by_agent=by_agent)
    reader.receive(len(body).to_bytes(4, "little") + body)
    with suppress(FramingError):
        assert reader.next() is not None
        assert reader.next() is None


@given(at=st.integers(4, 400), to=st.integers(0, 255), number=st.integers(0, len(FROM_AGENT) - 1))
def test_a_wrong_byte_is_a_message_or_an_error(at: int, to: int, number: int) -> None:
    frame = bytearray(encode(FROM_AGENT[number]))
    frame[4 + at % (len(frame) - 4)] = to
    reader = Frames(by_agent=True)
    reader.receive(bytes(frame))
    with suppress(FramingError):
        assert reader.next() is not None


def test_deep_nesting_is_an_error() -> None:
    """An unknown field is skipped, however deep it is."""
    inner = b"\x91" * 100_000 + b"\xc0"
    body = b"\x83\xa4type\xa6answer\xa2id\x01\xa1x" + inner
    reader = Frames(by_agent=True)
    reader.receive(len(body).to_bytes(4, "little") + body)
    with pytest.raises(FramingError):
        reader.next()


def test_what_is_too_large_is_not_sent() -> None:
    with pytest.raises(FramingError, match="cap"):
        encode(Values(1, [bytes(ANSWER_BYTES_MAX)]), ANSWER_BYTES_MAX)
