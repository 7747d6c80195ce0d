"""Checksums of payloads in memory: xxh3_128, as 2 u64 each. Pure; runs in the threads of the hash lane.

The checksum guards against our own and the machine's errors, not against an attacker who can write to the arena.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from kvoffloadd.model import I64Array, U64Array


def hash_payloads(addresses: U64Array, sizes: I64Array) -> U64Array:
    """(n, 2) u64: the xxh3_128 of `sizes[i]` bytes at `addresses[i]`, high half first.

    The caller guarantees that the ranges are mapped. xxhash lets the GIL go for all but short inputs.
    """
    digest = xxhash.xxh3_128_intdigest
    found = [
        digest((ctypes.c_char * size).from_address(address))
        for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True)
    ]
    low = (1 << 64) - 1
    return np.array([(value >> 64, value & low) for value in found], np.uint64).reshape(-1, 2)
