"""Data from outside that is almost right: what writers write, changed in a few places."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import msgpack
import numpy as np

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.signedpages import sign_page

Take = Callable[[Random], None]
"""Makes something that is almost right, has it decoded, and raises AssertionError for what should not come of it."""

EXTREMES = [
    0, 1, 2, 3, (1 << 7) - 1, (1 << 8) - 1, 1 << 15, (1 << 16) - 1, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
    1 << 32, (1 << 53) - 1, 1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1,
]  # fmt: skip
"""Numbers at which something may end."""

STRANGE: list[Any] = [
    None, True, False, -1, -(1 << 63), 0.0, 1.5, float("inf"), float("nan"), "", "x", "n" * 600, b"",
    b"\0", b"x" * 16, b"x" * 17, [], {}, [[]], [0], {"a": 1}, [None] * 3,
]  # fmt: skip
"""Values in place of others."""


def changed_bytes(rng: Random, raw: bytes, times: int = 3) -> bytes:
    """Returns the same with up to `times` changes: bits, numbers of each size in either order, cuts, repeated bytes."""
    found = bytearray(raw)
    for _ in range(rng.randint(1, times)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(7):
            case 0 if found:
                found[min(at, len(found) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del found[at:]
            case 2:
                found[at:at] = rng.randbytes(rng.randrange(1, 40))
            case 3:
                found[at:at] = found[at : at + rng.randrange(1, 64)]
            case _:
                size = rng.choice([1, 2, 4, 8])
                at -= at % size
                number = rng.choice(EXTREMES) % (1 << 8 * size)
                found[at : at + size] = number.to_bytes(size, rng.choice(["little", "little", "big"]))
    return bytes(found)


def changed_numbers(rng: Random, raw: bytes, spots: list[tuple[int, int]], times: int = 2) -> bytes:
    """Returns the same with up to `times` of its little-endian numbers, (offset, bytes), at an end of their range."""
    found = bytearray(raw)
    for at, size in rng.sample(spots, min(len(spots), rng.randint(1, times))):
        found[at : at + size] = (rng.choice(EXTREMES) % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(found)


def changed_tree(rng: Random, tree: Any, times: int = 2) -> Any:
    """Returns the same lists and maps with up to `times` items that are others, gone, or there twice."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, times)):
        spots = list(_spots(tree))
        if not spots:
            return copy.deepcopy(rng.choice(STRANGE))
        holder, key = rng.choice(spots)
        match rng.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case 2 if isinstance(holder, dict):
                holder[rng.choice(["x", "", "type", b"x" * 16])] = copy.deepcopy(holder[key])
            case 3:
                holder[key] = copy.deepcopy(rng.choice(STRANGE))
            case _:
                holder[key] = rng.choice(EXTREMES)
    return tree


def _spots(tree: Any) -> Any:
    keys = range(len(tree)) if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else ()
    for key in keys:
        yield tree, key
        yield from _spots(tree[key])


def signed(page: bytes) -> bytes:
    """Returns a page with the daemon's signature, whatever is in it."""
    whole = np.frombuffer(page[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0"), np.uint8).copy()
    sign_page(whole)
    return whole.tobytes()


def spots_of(dtype: np.dtype[Any], at: int = 0) -> list[tuple[int, int]]:
    """Where the numbers of a structure lie: (offset, bytes)."""
    found = []
    for kind, offset in (field[:2] for field in (dtype.fields or {}).values()):
        base, count = (kind.base, int(np.prod(kind.shape))) if kind.shape else (kind, 1)
        if base.fields is None and base.itemsize > 1:
            found += [(at + offset + base.itemsize * number, base.itemsize) for number in range(count)]
    return found


def framed(body: bytes) -> bytes:
    """Frames a body as agents, daemons and clients do."""
    return len(body).to_bytes(4, "little") + body


def changed_frame(rng: Random, body: bytes, pack: Callable[[Any], bytes]) -> bytes:
    """A frame of something like this body."""
    if rng.random() < 0.3:
        return framed(changed_bytes(rng, body))
    with suppress(OverflowError, ValueError, UnicodeError):  # what can't be packed can't come
        return framed(pack(changed_tree(rng, msgpack.unpackb(body, strict_map_key=False))))
    return framed(body)
