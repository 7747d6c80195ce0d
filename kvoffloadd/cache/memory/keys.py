"""Converts between packed keys and arrays. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvoffloadd.errors import KeyWidthError
from kvoffloadd.model import KEY_BYTES_MAX, U64Array

_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


def keys_array(packed: bytes, key_bytes: int) -> U64Array:
    """Returns packed keys as a u64 array (n, WORDS). Raises KeyWidthError unless they are a whole number of keys."""
    if len(packed) % key_bytes:
        raise KeyWidthError(
            f"{len(packed)} bytes of keys are not a multiple of this namespace's key width of {key_bytes}"
        )
    raw = np.frombuffer(packed, np.uint8).reshape(-1, key_bytes)
    if key_bytes == KEY_BYTES_MAX:
        return raw.view(np.uint64)
    padded = np.zeros((len(raw), KEY_BYTES_MAX), np.uint8)
    padded[:, :key_bytes] = raw
    return padded.view(np.uint64)


def join_keys(keys: Iterable[U64Array]) -> U64Array:
    """Joins arrays of keys into one array with contiguous rows, since callers read their bytes in this order. For
    arrays with at most one row, numpy alone would store columns.
    """
    return np.ascontiguousarray(np.concatenate(list(keys)))


def has_duplicates(keys: U64Array) -> bool:
    """Returns whether a key occurs twice."""
    if len(keys) < 2:
        return False
    # Equal keys have equal sums: in the common case one sort of numbers shows that there are none.
    sums = np.sort(keys[:, 0] + keys[:, 1] * _ODD[0] + keys[:, 2] * _ODD[1] + keys[:, 3] * _ODD[2])
    if (sums[1:] != sums[:-1]).all():
        return False
    ordered = keys[np.lexsort(keys.T)]
    return bool((ordered[1:] == ordered[:-1]).all(axis=1).any())


def pack(keys: U64Array, key_bytes: int) -> bytes:
    """Returns the keys packed, `key_bytes` each."""
    raw = np.ascontiguousarray(keys).view(np.uint8).reshape(len(keys), KEY_BYTES_MAX)
    return raw[:, :key_bytes].tobytes()


def spans(counts: Iterable[int]) -> list[slice]:
    """Returns the slices of consecutive lists in one joined list, from the lengths of the lists."""
    found, begin = [], 0
    for count in counts:
        found.append(slice(begin, begin + count))
        begin += count
    return found
