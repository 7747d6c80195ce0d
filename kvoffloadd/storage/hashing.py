"""Checksums of payloads in memory: xxh3_128, as 2 u64 each. Pure; runs in the threads of the hash lane.

The checksum guards against our own and the machine's errors, not against an attacker who can write to the arena.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable

import numpy as np
import xxhash

from kvoffloadd.lanes import TURN_BYTES
from kvoffloadd.model import I64Array, U64Array
from kvoffloadd.xxh3 import find_function

HashPayloads = Callable[[U64Array, I64Array], U64Array]

_ANY_BYTES = ctypes.c_char * (1 << 47)


def _hash_one_by_one(addresses: U64Array, sizes: I64Array) -> U64Array:
    # One view from the first of them on: its slices cost a fraction of a view of each payload.
    first = int(addresses.min())
    view = memoryview(_ANY_BYTES.from_address(first)).cast("B")
    begins = (addresses - np.uint64(first)).astype(np.int64)
    ends = begins + sizes
    digest = xxhash.xxh3_128_digest
    digests = b"".join([digest(view[b:e]) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)])
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


def _load_native() -> HashPayloads | None:
    """One call for all payloads, which lets the GIL go once. With a call for each, a thread that hashes payloads of a
    few KiB takes the GIL again every microsecond, and the event loop waits for it.

    The function that is called is the C function within the package `xxhash`; None: the package doesn't export it, or
    the helper was not compiled.
    """
    try:
        hash_all = importlib.import_module("kvoffloadd.storage._hashruns").hash
    except ImportError:
        return None
    function = find_function("XXH3_128bits_dispatch", "XXH3_128bits")
    if function is None:
        return None

    def native(addresses: U64Array, sizes: I64Array) -> U64Array:
        digests = np.empty((len(addresses), 2), np.uint64)
        hash_all(function, np.ascontiguousarray(addresses), np.ascontiguousarray(sizes, np.int64), digests)
        return digests

    return native if _is_right(native) else None


def _is_right(native: HashPayloads) -> bool:
    """Whether it gives the digests of the package's Python functions, for a payload of each of xxh3's code paths."""
    data = np.arange(4096, dtype=np.uint8)
    sizes = np.array([0, 3, 8, 16, 128, 240, 512, 1024, 4096], np.int64)
    addresses = np.full(len(sizes), data.ctypes.data, np.uint64)
    return bool((native(addresses, sizes) == _hash_one_by_one(addresses, sizes)).all())


_native = _load_native()


def hash_payloads(addresses: U64Array, sizes: I64Array) -> U64Array:
    """(n, 2) u64: the xxh3_128 of `sizes[i]` bytes at `addresses[i]`, high half first.

    The caller guarantees that the ranges are mapped. Other threads run meanwhile.
    """
    if not len(sizes):
        return np.zeros((0, 2), np.uint64)
    return (_native or _hash_one_by_one)(addresses, sizes)


def in_turns(
    items: I64Array, sizes: I64Array, turn_bytes: int | None = None, turn_items: int = 1 << 62
) -> list[I64Array]:
    """The items, which have these sizes, cut into what a lane does in one turn: about so many bytes (None: TURN_BYTES),
    and no more than so many items.
    """
    if not len(items):
        return []
    by_bytes, by_count = (np.cumsum(sizes) - sizes) // (turn_bytes or TURN_BYTES), np.arange(len(items)) // turn_items
    return np.split(items, np.flatnonzero((np.diff(by_bytes) != 0) | (np.diff(by_count) != 0)) + 1)
