"""Tests whether a build of the C code is correct: it may be of another version, or wrong."""

from __future__ import annotations

import itertools

import numpy as np
import xxhash

from kvoffloadd.model import U64Array
from kvoffloadd.native.helper import ALIGNED, Helper
from kvoffloadd.native.xxh3 import Xxh3

_BUCKETS, _SLOTS = 64, 16  # of a segment of the index
_ROWS = 40
_64_BITS = (1 << 64) - 1


def is_right(helper: Helper, xxh3: Xxh3 | None) -> bool:
    """Returns whether each function gives the same results as the package's Python code. Those that hash payloads count
    only with `xxh3`.
    """
    try:
        return _copies(helper) and _finds(helper) and _counts(helper) and (xxh3 is None or _hashes(helper, xxh3))
    except Exception:  # noqa: BLE001 a build of another version lacks functions, or refuses their arguments
        return False


def _copies(helper: Helper) -> bool:
    data, target = np.arange(1 << 15, dtype=np.uint16).view(np.uint8), np.zeros(1 << 16, np.uint8)
    size = np.array([40, 4096, 0, 1, 20_000, 41_399], np.uint64)
    begin = np.cumsum(size) - size
    copied = helper.copy_runs(begin + np.uint64(data.ctypes.data), begin + np.uint64(target.ctypes.data), size)
    words, gone = np.zeros(8, np.uint64), np.ones(8, bool)
    helper.read_words(np.uint64(data.ctypes.data) + np.arange(0, 64, 8, dtype=np.uint64), words, gone)
    is_read = words.tobytes() == data[:64].tobytes() and not gone.any()
    return copied == len(size) and data.tobytes() == target.tobytes() and is_read


def _hashes(helper: Helper, xxh3: Xxh3) -> bool:
    """Returns whether payloads are hashed correctly: short ones, long ones, and ones of whole blocks of the hash
    function, for each of its code paths.
    """
    data = np.arange(1 << 15, dtype=np.uint16).view(np.uint8)
    target, digests = np.zeros(len(data) + ALIGNED, np.uint8), np.zeros((4, 2), np.uint64)
    target = target[-target.ctypes.data % ALIGNED :][: len(data)]
    size = np.array([4096, 8192, 40, 200, 1, 299, 65_536 - 12_828], np.uint64)
    begin = np.cumsum(size) - size
    runs = (begin + np.uint64(data.ctypes.data), begin + np.uint64(target.ctypes.data), size)
    copied = helper.copy_payloads(xxh3.streaming, *runs, np.array([2, 1, 3, 1], np.uint64), digests)
    payloads = [data[low:high] for low, high in itertools.pairwise((0, 12_288, 12_328, 12_828, 65_536))]
    if copied != len(payloads) or data.tobytes() != target.tobytes() or _digests(payloads) != _packed(digests):
        return False
    sizes = np.array([0, 3, 8, 16, 128, 240, 512, 1024, 4096], np.int64)
    digests = np.zeros((len(sizes), 2), np.uint64)
    helper.hash_payloads(xxh3.whole, np.full(len(sizes), data.ctypes.data, np.uint64), sizes, digests)
    return _digests([data[:size] for size in sizes.tolist()]) == _packed(digests)


def _digests(payloads: list[np.ndarray]) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(payload.data) for payload in payloads)


def _packed(digests: U64Array) -> bytes:
    return digests.astype(">u8").tobytes()


def _finds(helper: Helper) -> bool:
    """Returns whether keys are found in a table of two segments, where half of the keys are in one bucket, and overflow
    it.
    """
    keys = np.arange(1, 4 * _ROWS + 1, dtype=np.uint64).reshape(-1, 4) * np.uint64(0x9E3779B97F4A7C15)
    keyspaces, secret = np.arange(_ROWS, dtype=np.uint16) % np.uint16(3), np.arange(3, 47, 2, dtype=np.uint64) ** 9
    hashes = np.zeros(_ROWS, np.uint64)
    helper.hash_keys(secret, keyspaces, keys, hashes)
    expected = [_key_hash(secret.tolist(), *key) for key in zip(keyspaces.tolist(), keys.tolist(), strict=True)]
    if hashes.tolist() != expected:
        return False
    hashes[::2] = np.arange(_ROWS // 2, dtype=np.uint64) << np.uint64(8)
    slots = (2 * _BUCKETS, _SLOTS)
    tags, rows, used, live = (
        *(np.zeros(slots, np.uint16), np.zeros(slots, np.uint32)),
        *(np.zeros(2, np.uint32), np.zeros(2, np.uint32)),
    )
    full, directory = np.full(2, _ROWS, np.uint32), np.array([0, 1], np.uint32)
    columns = (keys, keyspaces, tags, rows, used, live, full, directory)
    table = np.array([*(column.ctypes.data for column in columns), 1], np.uint64)
    placed, found = np.arange(_ROWS, dtype=np.uint32), np.zeros(_ROWS, np.int64)
    fits = helper.rows_fit(table, hashes)
    helper.place_rows(table, hashes, placed)
    helper.find_rows(table, keyspaces, keys, hashes, found)
    if not fits or helper.rows_fit(table, hashes) or found.tolist() != placed.tolist():
        return False
    removed = helper.remove_rows(table, hashes[:6], placed[:6])
    helper.find_rows(table, keyspaces, keys, hashes, found)
    is_counted = int(used.sum()) == _ROWS and int(live.sum()) == _ROWS - 6
    return removed == 6 and found.tolist() == [-1] * 6 + list(range(6, _ROWS)) and is_counted


def _key_hash(secret: list[int], keyspace: int, key: list[int]) -> int:
    """Returns the hash that `KeyHash` defines, computed with Python's integers."""
    halves = [keyspace, 1, *(half for word in key for half in (word & 0xFFFFFFFF, word >> 32))]
    low, high = (
        sum(half * factor for half, factor in zip(halves, factors, strict=True)) & _64_BITS
        for factors in ([secret[16 + index], secret[18 + index], *secret[index:16:2]] for index in (0, 1))
    )
    found = low >> 32 | high & ~0xFFFFFFFF
    found = (found ^ found >> 32) * secret[20] & _64_BITS
    found = (found ^ found >> 29) * secret[21] & _64_BITS
    return found ^ found >> 32


def _counts(helper: Helper) -> bool:
    """Returns whether the helper marks hits and counts holders as Python does."""
    missing, states = np.array([0, 2, 1], np.uint16), np.zeros(4, np.uint8)
    incomplete = helper.mark_hits(np.array([-1, 0, 1, 2]), missing, states)
    counts, held = np.array([1, 0, 0], np.uint32), np.array([1, 0], np.int64)
    kinds = np.array([0, 0, 1], np.uint16)
    helper.add_counts(counts, np.array([2, 2], np.uint32), 1, kinds, held)
    helper.add_counts(counts, np.array([0], np.uint32), -1, kinds, held)
    are_marked = incomplete == 2 and states.tolist() == [0, 1, 0, 0]
    return are_marked and counts.tolist() == [0, 0, 2] and held.tolist() == [0, 1]
