"""Unpacks the map in a frame's body: at once, or in steps between which an event loop can run.

The numbers of maps and arrays, and of the items in them, are capped while they are made, since 1 MiB of empty maps
would otherwise become 73 MiB of Python objects, and 1 MiB of two-letter strings 20. The largest legal frame takes 15 ms
to unpack, so a daemon unpacks large frames in steps.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

import msgpack

from kvoffloadd.errors import FramingError

CONTAINERS_MAX = 16_384
ITEMS_MAX = 131_072
ARRAY_ITEMS_MAX = 16_384
MAP_ITEMS_MAX = 256
"""The cap for messages of clients. The daemon's reports have larger maps, keyed by names that clients chose."""

DEPTH: Final = 5
"""The nesting depth of the protocol's requests: a ref, in a list, in a group, in a list, in a message."""
STEP_ITEMS: Final = 512
"""The number of items of maps and arrays that one step makes; a step that unpacks a value whole may exceed it."""
WHOLE_MAX: Final = 64
"""A value that is unpacked whole has at most this number of maps and arrays, each with at most this number of items."""

MAPS: Final = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
"""The first bytes of maps: https://github.com/msgpack/msgpack/blob/master/spec.md#formats."""
CONTAINERS: Final = MAPS | {*range(0x90, 0xA0), 0xDC, 0xDD}
"""The first bytes of maps and arrays."""

Unpacking = Generator[None, None, dict[str, Any]]
"""See `unpack_in_steps`."""


class _Count:
    """Refuses a frame that holds too much, while it is being unpacked."""

    def __init__(self) -> None:
        self.containers = self.items = 0
        self.containers_max = CONTAINERS_MAX

    def note(self, items: int) -> None:
        self.containers += 1
        self.items += items
        if self.containers > self.containers_max or self.items > ITEMS_MAX:
            raise ValueError(f"more than {self.containers_max} maps and arrays, or {ITEMS_MAX} items in them")

    def to_list(self, items: list[Any]) -> list[Any]:
        self.note(len(items))
        return items

    def to_dict(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self.note(len(pairs))
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a map names a key twice")
        return found

    def options(self) -> dict[str, Any]:
        """Returns arguments for msgpack."""
        hooks = {"object_pairs_hook": self.to_dict, "list_hook": self.to_list, "ext_hook": _refuse_extension}
        return {"raw": False, "strict_map_key": True, **hooks}


def unpack(body: bytes | memoryview, map_items_max: int = MAP_ITEMS_MAX) -> dict[str, Any]:
    """Returns the map in a frame's body. Raises FramingError."""
    try:
        found = msgpack.unpackb(body, max_array_len=ARRAY_ITEMS_MAX, max_map_len=map_items_max, **_Count().options())
    except _UNPACK_ERRORS as error:
        raise _framing_error(error) from None
    return _one_map(found)


def unpack_in_steps(body: bytes) -> Unpacking:
    """Yields between its steps, and before it returns the map. Raises FramingError."""
    try:
        found = yield from _Unpacker(body).run()
    except _UNPACK_ERRORS as error:
        raise _framing_error(error) from None
    del body
    yield
    return found


class _Unpacker:
    """Enters maps and arrays above `DEPTH`, and unpacks the values at that depth whole."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._count = _Count()
        self._made = 0  # items made in this step
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=len(body),
            max_array_len=WHOLE_MAX,
            max_map_len=WHOLE_MAX,
            **self._count.options(),
        )
        self._unpacker.feed(body)

    def run(self) -> Generator[None, None, dict[str, Any]]:
        """Returns the only map in the body."""
        if self._first_byte() not in MAPS:
            raise ValueError("a frame holds one map")
        found = yield from self._map(1)
        if self._unpacker.tell() != len(self._body):
            raise ValueError("there are bytes behind it")
        return found

    def _container(self, depth: int) -> Generator[None, None, Any]:
        """Returns the next value in a container of this depth: a map or an array."""
        if depth == DEPTH - 1:
            return self._whole()
        if self._first_byte() in MAPS:
            return (yield from self._map(depth + 1))
        return (yield from self._array(depth + 1))

    def _map(self, depth: int) -> Generator[None, None, dict[Any, Any]]:
        size = self._unpacker.read_map_header()
        if size > MAP_ITEMS_MAX:
            raise ValueError(f"a map of {size} items; the cap is {MAP_ITEMS_MAX}")
        self._count.note(size)
        found: dict[Any, Any] = {}
        for _ in range(size):
            if self._step_ends():
                yield
            if type(key := self._whole()) not in (str, bytes):  # msgpack's `strict_map_key` allows the same types
                raise ValueError(f"a map has a key of type {type(key).__name__}")
            found[key] = (
                (yield from self._container(depth)) if self._first_byte() in CONTAINERS else self._unpacker.unpack()
            )
        if len(found) != size:
            raise ValueError("a map names a key twice")
        return found

    def _array(self, depth: int) -> Generator[None, None, list[Any]]:
        size = self._unpacker.read_array_header()
        if size > ARRAY_ITEMS_MAX:
            raise ValueError(f"an array of {size} items; the cap is {ARRAY_ITEMS_MAX}")
        self._count.note(size)
        found: list[Any] = []
        for _ in range(size):
            if self._step_ends():
                yield
            found.append(
                (yield from self._container(depth)) if self._first_byte() in CONTAINERS else self._unpacker.unpack()
            )
        return found

    def _step_ends(self) -> bool:
        """Returns whether the loop may run before the next item."""
        self._made += 1
        if self._made < STEP_ITEMS:
            return False
        self._made = 0
        return True

    def _whole(self) -> Any:
        """Unpacks the next value whole."""
        count = self._count
        items, count.containers_max = count.items, min(CONTAINERS_MAX, count.containers + WHOLE_MAX)
        found = self._unpacker.unpack()
        count.containers_max = CONTAINERS_MAX
        self._made += count.items - items
        return found

    def _first_byte(self) -> int:
        position: int = self._unpacker.tell()
        if position >= len(self._body):
            raise ValueError("the map is longer than its frame")
        return self._body[position]


_UNPACK_ERRORS: Final = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)


def _framing_error(error: Exception) -> FramingError:
    return FramingError(f"not a msgpack map: {str(error)[:200]}")


def _one_map(found: Any) -> dict[str, Any]:
    if type(found) is not dict:
        raise FramingError(f"a frame holds one map, not a {type(found).__name__}")
    return found


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code}: the protocol has no extension types")
