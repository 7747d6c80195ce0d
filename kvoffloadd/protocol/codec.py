"""Frames and messages: bytes <-> typed structs. Pure.

A frame is a u32 little-endian length and that many bytes of one msgpack map. Decoding a hostile frame costs at most
a small multiple of its size: the number of maps and arrays in it, and of what they hold, is capped while it is being
unpacked, since 1 MiB of empty maps would otherwise become 73 MiB of Python objects, and 1 MiB of two-letter strings 20.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import msgspec

from kvoffloadd.errors import FramingError, MessageError
from kvoffloadd.protocol.messages import FRAME_BYTES_MAX, Message

PREFIX = struct.Struct("<I")
CONTAINERS_MAX = 16_384
ITEMS_MAX = 131_072
ARRAY_ITEMS_MAX = 16_384
MAP_ITEMS_MAX = 256

_to_builtins = msgspec.to_builtins
_convert = msgspec.convert
_BYTES = (bytes,)


def encode(message: Message) -> bytes:
    """One frame. Raises FramingError if it would exceed the frame cap."""
    body: bytes = msgpack.packb(_to_builtins(message, builtin_types=_BYTES), use_bin_type=True)
    if len(body) > FRAME_BYTES_MAX:
        raise FramingError(
            f"a {type(message).__name__} of {len(body)} bytes exceeds the frame cap of {FRAME_BYTES_MAX}"
        )
    return PREFIX.pack(len(body)) + body


def unpack(body: bytes | memoryview) -> dict[str, Any]:
    """The map in a frame's body. Raises FramingError."""
    seen = held = 0

    def count(items: Any) -> Any:
        nonlocal seen, held
        seen += 1
        held += len(items)
        if seen > CONTAINERS_MAX or held > ITEMS_MAX:
            raise ValueError(f"more than {CONTAINERS_MAX} maps and arrays, or {ITEMS_MAX} items in them")
        return items

    def to_dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        found = dict(count(pairs))
        if len(found) != len(pairs):
            raise ValueError("a map names a key twice")
        return found

    try:
        found = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            max_array_len=ARRAY_ITEMS_MAX,
            max_map_len=MAP_ITEMS_MAX,
            object_pairs_hook=to_dict,
            list_hook=count,
            ext_hook=_refuse_extension,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise FramingError(f"not a msgpack map: {str(error)[:200]}") from None
    if type(found) is not dict:
        raise FramingError(f"a frame holds one map, not a {type(found).__name__}")
    return found


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code}, where the protocol has none")


def convert(fields: dict[str, Any], known: dict[str, type[Message]]) -> Message:
    """The typed message in a frame's map. Raises MessageError."""
    tag = fields.get("type")
    cls = known.get(tag) if type(tag) is str else None
    if cls is None:
        raise MessageError(f"unknown message type {tag!r:.60}")
    try:
        return _convert(fields, cls, builtin_types=_BYTES)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise MessageError(f"{tag}: {str(error)[:300]}") from None
