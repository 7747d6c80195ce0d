"""Converts calls' packed fields to an engine's arguments: names and pieces of memory. Pure."""

from __future__ import annotations

from kvoffloadd.agent.engines.base import Memory, ObjectTransfer, Region
from kvoffloadd.agentwire.frames import HEADER_BYTES, Exists, Get, Put
from kvoffloadd.agentwire.names import KEY_BYTES, key_names, marker_name
from kvoffloadd.errors import FramingError


def requested_names(call: Exists) -> list[str]:
    """Returns the era's marker, then each key."""
    space = call.space
    return [marker_name(space.fingerprint, space.generation, space.era), *key_names(space, call.keys)]


def transfers(call: Get | Put, memory: Memory) -> list[ObjectTransfer]:
    """Returns one for each key. Raises FramingError if a field's size is wrong, or memory lies outside the agent's."""
    headers, parts, sizes = _u64(call.headers), _u64(call.parts), _u64(call.part_bytes)
    count, width = len(headers), len(sizes)
    if len(call.keys) != count * KEY_BYTES or len(parts) != count * width:
        raise FramingError("the fields of a call do not match each other")
    addresses = [_address(memory.headers, offset, HEADER_BYTES) for offset in headers]
    made = []
    for index, name in enumerate(key_names(call.space, call.keys)):
        own_parts = zip(parts[index * width : (index + 1) * width], sizes, strict=True)
        pieces = [(_address(memory.arena, offset, size), size) for offset, size in own_parts]
        made.append(ObjectTransfer(name, [(addresses[index], HEADER_BYTES), *pieces]))
    return made


def _address(region: Region, offset: int, size_bytes: int) -> int:
    if offset + size_bytes > region.size_bytes:
        raise FramingError(f"{size_bytes} bytes at {offset} are outside a region of {region.size_bytes} bytes")
    return region.address + offset


def _u64(packed: bytes) -> list[int]:
    if len(packed) % 8:
        raise FramingError("a packed field ends inside a number")
    return memoryview(packed).cast("Q").tolist()
