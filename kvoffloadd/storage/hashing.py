"""Checksums of payloads in memory: xxh3_128, as 2 u64 each. Pure; runs in the threads of the hash lane.

The checksum guards against errors of the program and the machine, not against an attacker with access to the arena.
"""

from __future__ import annotations

import ctypes

import numpy as np
import xxhash

from kvoffloadd.model import I64Array, U64Array
from kvoffloadd.native import loader
from kvoffloadd.scheduling.lanes import TURN_BYTES

_ANY_BYTES = ctypes.c_char * (1 << 47)


def _hash_one_by_one(addresses: U64Array, sizes: I64Array) -> U64Array:
    # One view from the first of them on: slicing it costs a fraction of a view of each payload.
    first = int(addresses.min())
    view = memoryview(_ANY_BYTES.from_address(first)).cast("B")
    begins = (addresses - np.uint64(first)).astype(np.int64)
    ends = begins + sizes
    digest = xxhash.xxh3_128_digest
    digests = b"".join([digest(view[b:e]) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)])
    return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2)


def hash_payloads(addresses: U64Array, sizes: I64Array) -> U64Array:
    """Returns (n, 2) u64: the xxh3_128 of `sizes[i]` bytes at `addresses[i]`, high half first.

    The caller guarantees that the ranges are mapped. Other threads run meanwhile.
    """
    if not len(sizes):
        return np.zeros((0, 2), np.uint64)
    helper, xxh3 = loader.HELPER, loader.XXH3
    if helper is None or xxh3 is None:
        return _hash_one_by_one(addresses, sizes)
    # One call for all payloads lets the GIL go once. With a call for each, a thread that hashes payloads of a few KiB
    # takes the GIL again every microsecond, and the event loop waits for it.
    digests = np.empty((len(addresses), 2), np.uint64)
    sizes = np.ascontiguousarray(sizes, np.int64)
    helper.hash_payloads(xxh3.whole, np.ascontiguousarray(addresses), sizes, digests)
    return digests


def in_turns(
    items: I64Array, sizes: I64Array, turn_bytes: int | None = None, turn_items: int = 1 << 62
) -> list[I64Array]:
    """Splits items of these sizes into the turns of a lane: each of about `turn_bytes` (None: TURN_BYTES), and
    of at most `turn_items` items.
    """
    if not len(items):
        return []
    by_bytes, by_count = (np.cumsum(sizes) - sizes) // (turn_bytes or TURN_BYTES), np.arange(len(items)) // turn_items
    return np.split(items, np.flatnonzero((np.diff(by_bytes) != 0) | (np.diff(by_count) != 0)) + 1)
