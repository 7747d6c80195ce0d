"""Names of objects, and calls' packed fields as an engine gets them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.agent.engines.base import Memory, Region
from kvoffloadd.agent.names import requested_names, transfers
from kvoffloadd.agentwire.frames import HEADER_BYTES, Exists, Get
from kvoffloadd.agentwire.names import Space, era_prefix, key_names, marker_name, pointer_name
from kvoffloadd.errors import FramingError

SPACE = Space(bytes([0xF0]) * 16, bytes(range(16)), 0x1A, bytes([0xE0]) * 8, 5, 9)
MEMORY = Memory(Region(1 << 30, 1 << 20), Region(2 << 30, 10 * HEADER_BYTES))


def packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def test_names_are_what_other_hosts_call_them() -> None:
    fingerprint = SPACE.fingerprint
    assert pointer_name(fingerprint) == f"kvo1/{'f0' * 16}/era"
    assert marker_name(fingerprint, 0x1A, SPACE.era) == f"kvo1/{'f0' * 16}/era/0000001a.{'e0' * 8}"
    assert key_names(SPACE, bytes(range(64))) == [
        f"kvo1/{'f0' * 16}/0000001a.{'e0' * 8}/0001020304050607/5/000102030405060708",
        f"kvo1/{'f0' * 16}/0000001a.{'e0' * 8}/0001020304050607/5/202122232425262728",
    ]


def test_one_prefix_has_all_of_an_era_and_nothing_else() -> None:
    prefix = era_prefix(SPACE.fingerprint, SPACE.generation, SPACE.era)
    assert all(name.startswith(prefix) for name in key_names(SPACE, bytes(64)))
    assert not pointer_name(SPACE.fingerprint).startswith(prefix)
    assert not marker_name(SPACE.fingerprint, SPACE.generation, SPACE.era).startswith(prefix)


@given(st.lists(st.binary(min_size=32, max_size=32), unique=True))
def test_keys_have_names_of_their_own(keys: list[bytes]) -> None:
    space = Space(SPACE.fingerprint, SPACE.shape, 1, SPACE.era, 0, 32)
    assert len(set(key_names(space, b"".join(keys)))) == len(keys)


def test_the_marker_is_asked_first() -> None:
    names = requested_names(Exists(1, SPACE, bytes(32)))
    assert names == [marker_name(SPACE.fingerprint, 0x1A, SPACE.era), *key_names(SPACE, bytes(32))]


def test_pieces_are_the_header_and_then_each_part() -> None:
    call = Get(1, SPACE, bytes(64), packed(8192, 4096), packed(100, 200, 300, 400), packed(7, 11))
    one, other = transfers(call, MEMORY)
    assert one.pieces == [((2 << 30) + 8192, 4096), ((1 << 30) + 100, 7), ((1 << 30) + 200, 11)]
    assert other.pieces == [((2 << 30) + 4096, 4096), ((1 << 30) + 300, 7), ((1 << 30) + 400, 11)]
    assert [one.name, other.name] == key_names(SPACE, bytes(64))
    assert one.size_bytes == 4096 + 18


@pytest.mark.parametrize(
    "call",
    [
        Get(1, SPACE, bytes(32), packed(0), packed((1 << 20) - 6), packed(7)),
        Get(1, SPACE, bytes(32), packed(0), packed(0), packed((1 << 20) + 1)),
        Get(1, SPACE, bytes(32), packed(0), packed((1 << 64) - 1), packed(1)),
        Get(1, SPACE, bytes(32), packed(9 * HEADER_BYTES + 1), packed(0), packed(7)),
        Get(1, SPACE, bytes(32), packed(0), packed(0, 8), packed(7)),
        Get(1, SPACE, bytes(64), packed(0), packed(0), packed(7)),
        Get(1, SPACE, bytes(32), packed(0, 0), packed(0), packed(7)),
        Get(1, SPACE, bytes(32), packed(0), packed(0) + b"x", packed(7)),
    ],
)
def test_memory_that_is_not_the_agents_is_refused(call: Get) -> None:
    with pytest.raises(FramingError):
        transfers(call, MEMORY)


def test_the_last_byte_may_be_used() -> None:
    call = Get(1, SPACE, bytes(32), packed(9 * HEADER_BYTES), packed((1 << 20) - 7), packed(7))
    assert len(transfers(call, MEMORY)) == 1
