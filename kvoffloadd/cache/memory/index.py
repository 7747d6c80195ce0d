"""The index finds the row of a key: a vectorised hash table without per-key Python objects.

Extendible hashing: the top bits of a key's hash choose a segment through a directory; the bottom bits choose a bucket
of 16 slots in it, with overflow into the next bucket. A full segment splits in two. Segments fill at different times,
so growth costs a few segments at a time, for any number of keys. All columns are reserved for the worst case and
committed lazily. A slot holds a 16-bit tag of the hash and a row number; a row holds the whole key and its keyspace,
which are compared before a row is returned: two keys are never taken for each other, even if their hashes are equal.

Splitting can't separate equal hashes. Without the seed, a client can't choose such keys (see `KeyHash`). Even with such
keys, all work stays bounded: a segment splits a limited number of times, and takes no more keys than it has room for.

The compiled helper does most of this work where it is available: for a few keys, it takes a fortieth of the time of
numpy's dozens of small operations.

Event loop only.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.ma  # imported here, or the first np.unique would import it while the daemon serves: it takes 12 ms
import numpy.typing as npt

from kvoffloadd.cache.memory.keyhash import KeyHash
from kvoffloadd.errors import LimitError
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array, U64Array
from kvoffloadd.native import loader

Numbers = TypeVar("Numbers", bound=npt.NDArray[Any])

WORDS = 4
"""u64 words of a stored key: `model.KEY_BYTES_MAX` bytes, zero padded. A key's width is a property of its namespace."""

_BUCKETS, _SLOTS = 64, 16
_SEGMENT = _BUCKETS * _SLOTS
_FULL, _FULL_SPREAD = int(_SEGMENT * 0.85), int(_SEGMENT * 0.2)
"""A segment is full at this many slots, or at up to `_FULL_SPREAD` fewer: each segment has another limit. With one
limit for all, they would fill at the same time, and a single insertion might have to rewrite the whole table.
"""
_EXPECTED_FILL = 0.65
_EMPTY, _DEAD, _FIRST_TAG = 0, 1, 2
_DEEPER_MAX = 3
"""The number of splits by which a segment may be deeper than all segments together would be. Keys with different hashes
need fewer.
"""


class Index:
    """Maps (keyspace, key) to a row.

    Rows are dense small numbers, reused after `free`; their columns are here and in the owner of the index. `max_keys`
    bounds the rows. `seed`, below 2**128, is the hash's secret: a client that does not know it can't choose keys that
    collide.
    """

    def __init__(self, max_keys: int, seed: int) -> None:
        self._hash = KeyHash(seed, "index")
        self.max_keys = max_keys
        self.keys: U64Array = reserve_array((max_keys, WORDS), np.uint64)
        self.keyspace: U16Array = reserve_array((max_keys,), np.uint16)
        self._rows_used = 0  # rows ever handed out; the free ones among them are in _free
        self._free: U32Array = reserve_array((max_keys,), np.uint32)
        self._num_free = 0
        # Splits leave segments at least a third full on average; eight times the need is virtual memory only.
        segments = max(16, 8 * (max_keys // _SEGMENT + 1))
        self._depth_max = segments.bit_length() + _DEEPER_MAX
        self._tags: U16Array = reserve_array((segments * _BUCKETS, _SLOTS), np.uint16)
        self._rows: U32Array = reserve_array((segments * _BUCKETS, _SLOTS), np.uint32)
        self._used: U32Array = reserve_array((segments,), np.uint32)  # slots that are not empty, dead ones included
        self._live: U32Array = reserve_array((segments,), np.uint32)
        self._full = (_FULL - np.arange(segments) * 0x9E37 % _FULL_SPREAD).astype(np.uint32)
        self._depth = reserve_array((segments,), np.uint8)
        self._num_segments = 1
        self._set_directory(np.zeros(1, np.uint32), 0)

    def __len__(self) -> int:
        return self._rows_used - self._num_free

    @property
    def rows_end(self) -> int:
        """Returns the end of the rows: every row ever handed out is below it."""
        return self._rows_used

    def hash(self, keyspace: int | U16Array, keys: U64Array) -> U64Array:
        """Returns a u64 hash per key, with 64 significant bits. `keys`: (n, WORDS)."""
        return self._hash(keyspace, keys)

    def find(self, keyspace: int | U16Array, keys: U64Array, hashes: U64Array | None = None) -> I64Array:
        """Returns the row of each key, or -1. Changes nothing.

        `keys`: (n, WORDS); `keyspace`: of all of them, or of each; `hashes`: the result of `hash` for them, if the
        caller has it.
        """
        h = self.hash(keyspace, keys) if hashes is None else hashes
        if loader.HELPER is None:
            return self._find_in_numpy(keyspace, keys, h)
        rows = np.empty(len(keys), np.int64)
        loader.HELPER.find_rows(self._table, keyspace, np.ascontiguousarray(keys), h, rows)
        return rows

    def _find_in_numpy(self, keyspace: int | U16Array, keys: U64Array, h: U64Array) -> I64Array:
        found = np.full(len(keys), -1, np.int64)
        bucket, tag = self._home(h), self._tag(h)
        pending = np.arange(len(keys))
        while len(pending):
            tags = self._tags.take(bucket, axis=0)
            matches = np.flatnonzero(tags == tag[:, None])
            where = matches // _SLOTS
            rows = self._rows[bucket[where], matches % _SLOTS].astype(np.int64)
            who = pending[where]
            same = _equal(self.keys.take(rows, axis=0), keys.take(who, axis=0))
            same &= self.keyspace[rows] == (keyspace[who] if isinstance(keyspace, np.ndarray) else keyspace)
            found[who[same]] = rows[same]
            # A bucket with an empty slot never overflowed, and its last slot is the last to be taken; a dead slot keeps
            # the chain whole.
            on = np.flatnonzero((found[pending] < 0) & (tags[:, -1] != _EMPTY))
            pending, bucket, tag = pending[on], _next(bucket[on]), tag[on]
        return found

    def expect(self, count: int) -> None:
        """Makes room at once for `count` keys in a table that is still empty: growth in small steps takes twice as
        long.
        """
        if self._num_segments > 1 or len(self):
            return
        depth = 0
        while count > _EXPECTED_FILL * _SEGMENT * self._num_segments and depth < 24:
            depth += 1
            self._num_segments *= 2
        self._set_directory(np.arange(self._num_segments, dtype=np.uint32), depth)
        self._depth[: self._num_segments] = self._directory_depth

    def insert(self, keyspace: int | U16Array, keys: U64Array, hashes: U64Array | None = None) -> U32Array:
        """Returns new rows for keys that are distinct and not in the table; the caller guarantees both and enough free
        rows. `keyspace` and `hashes` as in `find`.

        Raises:
            LimitError: too many keys have almost equal hashes. Nothing was inserted.
        """
        h = self.hash(keyspace, keys) if hashes is None else hashes
        if loader.HELPER is None or not loader.HELPER.rows_fit(self._table, h):
            self._make_room(h)
        rows = self._take_rows(len(keys))
        self.keys[rows] = keys
        self.keyspace[rows] = keyspace
        self._place(h, rows)
        return rows

    def remove(self, rows: U32Array) -> None:
        """Forgets keys by row. Their columns stay readable until `free`.

        Raises:
            LookupError: a row is not in the table, which is a bug of the daemon. Other rows may be forgotten then.
        """
        if not len(rows):
            return
        h = self.hash(self.keyspace[rows], self.keys.take(rows, axis=0))
        if loader.HELPER is None:
            self._remove_in_numpy(h, rows)
        elif (removed := loader.HELPER.remove_rows(self._table, h, np.ascontiguousarray(rows, np.uint32))) < len(rows):
            raise LookupError(f"{len(rows) - removed} of {len(rows)} rows are not in the table")

    def _remove_in_numpy(self, h: U64Array, rows: U32Array) -> None:
        bucket = self._home(h)
        left = rows
        for _ in range(_BUCKETS):
            mask = self._rows.take(bucket, axis=0) == left[:, None]
            mask &= self._tags.take(bucket, axis=0) >= _FIRST_TAG
            matches = np.flatnonzero(mask)
            here, slot = matches // _SLOTS, matches % _SLOTS
            self._tags[bucket[here], slot] = _DEAD
            count_down(self._live, bucket[here] // _BUCKETS)
            if len(matches) == len(left):
                return
            on = np.ones(len(left), bool)
            on[here] = False
            left, bucket = left[on], _next(bucket[on])
        raise LookupError(f"{len(left)} of {len(rows)} rows are not in the table")

    def free(self, rows: U32Array) -> None:
        """Takes removed rows back for reuse."""
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)

    def memory_bytes(self) -> int:
        """Returns the used bytes of the table: columns up to the highest row, and segments."""
        per_row = self.keys.itemsize * WORDS + self.keyspace.itemsize
        per_segment = _SEGMENT * (self._tags.itemsize + self._rows.itemsize) + 9
        free = self._free.itemsize * self._num_free
        return self._rows_used * per_row + self._num_segments * per_segment + self._directory.nbytes + free

    @property
    def num_found(self) -> int:
        """Returns the number of rows that lookups can find."""
        return int(self._live[: self._num_segments].sum())

    def check_table(self) -> list[str]:
        """Returns a list of errors of the table itself, independent of its keys."""
        findings = []
        live = self._in_table()
        seen = np.zeros(self._rows_used, bool)
        seen[live] = True
        if np.count_nonzero(seen) != len(live):
            findings.append("index: a row is in the table twice")
        if self.num_found != len(live):
            findings.append("index: live slots are miscounted")
        return findings

    def _in_table(self) -> U32Array:
        used = self._num_segments * _BUCKETS
        found: U32Array = self._rows[:used][self._tags[:used] >= _FIRST_TAG]
        return found

    # --- inside ---

    def _home(self, h: U64Array) -> I64Array:
        if self._directory_depth:
            segment = self._directory[(h >> np.uint64(64 - self._directory_depth)).astype(np.int64)].astype(np.int64)
        else:
            segment = np.zeros(len(h), np.int64)
        return segment * _BUCKETS + (h & np.uint64(_BUCKETS - 1)).astype(np.int64)

    @staticmethod
    def _tag(h: U64Array) -> U16Array:
        tag = ((h >> np.uint64(8)) & np.uint64(0xFFFF)).astype(np.uint16)
        return np.maximum(tag, np.uint16(_FIRST_TAG))

    def _set_directory(self, directory: U32Array, depth: int) -> None:
        """Sets the directory. `depth` is the number of top bits of a hash that choose a segment."""
        self._directory, self._directory_depth = directory, depth
        columns = (self.keys, self.keyspace, self._tags, self._rows, self._used, self._live, self._full, directory)
        # `Table` of _indexfind.c. The columns stay where they are; `directory` is kept for as long as this is.
        self._table = np.array([*(column.ctypes.data for column in columns), depth], np.uint64)

    def _take_rows(self, count: int) -> U32Array:
        reused = min(count, self._num_free)
        self._num_free -= reused
        old = self._free[self._num_free : self._num_free + reused].copy()
        new = np.arange(self._rows_used, self._rows_used + count - reused, dtype=np.uint32)
        self._rows_used += count - reused
        return np.concatenate([old, new])

    def _place(self, h: U64Array, rows: U32Array) -> None:
        """Puts rows into free slots; the segments have room."""
        if loader.HELPER is not None:
            loader.HELPER.place_rows(self._table, h, rows)
            return
        bucket, tag = self._home(h), self._tag(h)
        while len(rows):
            order = _order(bucket)
            bucket, tag, rows = bucket[order], tag[order], rows[order]
            tags = self._tags.take(bucket, axis=0)
            free = np.packbits((tags < _FIRST_TAG).reshape(-1), bitorder="little").view(np.uint16)
            slots = _NTH_BIT[free, np.minimum(_rank_in_runs(bucket), _SLOTS)]
            fits = slots < _SLOTS
            buckets, slot = bucket[fits], slots[fits]
            segment = buckets // _BUCKETS
            count_up(self._used, segment[self._tags[buckets, slot] == _EMPTY])
            count_up(self._live, segment)
            self._tags[buckets, slot] = tag[fits]
            self._rows[buckets, slot] = rows[fits]
            bucket, tag, rows = _next(bucket[~fits]), tag[~fits], rows[~fits]

    def _make_room(self, h: U64Array) -> None:
        """Splits or cleans segments until the keys with these hashes fit. Raises LimitError if that does not help."""
        while len(h):
            ordered = np.sort(self._home(h) // _BUCKETS)
            begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
            segment, count = ordered[begins], np.diff(begins, append=len(ordered))
            full = self._full[segment]
            crowded = self._used[segment] + count > full
            if not crowded.any():
                return
            segment, full = segment[crowded], full[crowded]
            split = segment[self._live[segment] + count[crowded] > full * 2 // 3]
            room = len(self._depth) - self._num_segments
            if len(split) > room or (self._depth[split] >= self._depth_max).any():
                raise LimitError(f"{len(h)} keys can't be stored: too many keys have almost equal hashes")
            self._rebuild(segment, split)

    def _rebuild(self, segments: I64Array, crowded: I64Array) -> None:
        """Rewrites segments without dead slots. Half of the keys of each `crowded` segment move to a new one."""
        buckets = (segments[:, None] * _BUCKETS + np.arange(_BUCKETS)).reshape(-1)
        rows = self._rows.take(buckets, axis=0)[self._tags.take(buckets, axis=0) >= _FIRST_TAG]
        self._tags[buckets] = _EMPTY
        self._used[segments] = self._live[segments] = 0
        if len(crowded):
            self._split_directory(crowded)
        if len(rows):
            self._place(self.hash(self.keyspace[rows], self.keys.take(rows, axis=0)), rows)

    def _split_directory(self, segments: I64Array) -> None:
        """Gives half of the directory entries of each of these segments to a new segment."""
        if (self._depth[segments] == self._directory_depth).any():
            self._set_directory(np.repeat(self._directory, 2), self._directory_depth + 1)
        new = np.arange(self._num_segments, self._num_segments + len(segments))
        self._num_segments += len(segments)
        self._depth[segments] += 1
        self._depth[new] = self._depth[segments]
        heir = np.zeros(self._num_segments, np.uint32)
        heir[segments] = new
        # Directory entries of a segment share as many top bits as it is deep: the next bit separates the halves.
        entries = np.flatnonzero(heir[self._directory])
        old = self._directory[entries]
        upper = entries >> (self._directory_depth - self._depth[old].astype(np.int64)) & 1 == 1
        self._directory[entries[upper]] = heir[old[upper]]


def _nth_bit() -> U8Array:
    """Makes the table (65536, 17) of the places of the n-th set bit of a number, from 0 on; 16 if it has none."""
    numbers = np.arange(1 << _SLOTS)
    found = np.full((len(numbers), _SLOTS + 1), _SLOTS, np.uint8)
    rank = np.zeros(len(numbers), np.int64)
    for bit in range(_SLOTS):
        having = np.flatnonzero(numbers & 1 << bit)
        found[having, rank[having]] = bit
        rank[having] += 1
    return found


_NTH_BIT = _nth_bit()


def distinct(numbers: Numbers) -> Numbers:
    """Returns each number once, ascending. `np.unique` does the same, but takes twenty times as long."""
    ordered: Any = np.sort(numbers)
    first = np.ones(len(ordered), bool)
    first[1:] = ordered[1:] != ordered[:-1]
    found: Numbers = ordered[first]
    return found


def first_of_each(numbers: npt.NDArray[Any]) -> I64Array:
    """Returns the places where each number occurs first, ascending."""
    found: I64Array = np.sort(np.unique(numbers, return_index=True)[1])
    return found


def count_up(counts: Numbers, indices: I64Array | U32Array) -> None:
    """Adds 1 at each of these places, as often as it is named."""
    # With other dtypes `ufunc.at` takes thirty times as long.
    np.add.at(counts, indices.astype(np.intp, copy=False), counts.dtype.type(1))


def count_down(counts: Numbers, indices: I64Array | U32Array) -> None:
    """Subtracts 1 at each of these places, as often as it is named."""
    np.subtract.at(counts, indices.astype(np.intp, copy=False), counts.dtype.type(1))


def _equal(a: U64Array, b: U64Array) -> BoolArray:
    """Returns which rows of two (n, WORDS) arrays are equal."""
    differ = a[:, 0] ^ b[:, 0]
    for word in range(1, WORDS):
        differ |= a[:, word] ^ b[:, word]
    same: BoolArray = differ == 0
    return same


def _next(bucket: I64Array) -> I64Array:
    """Returns the bucket that takes the overflow: the next one of the same segment, cyclically."""
    after: I64Array = (bucket & ~np.int64(_BUCKETS - 1)) | ((bucket + 1) & np.int64(_BUCKETS - 1))
    return after


def _order(numbers: I64Array) -> I64Array:
    """Returns the order that sorts these numbers, below 2**40. To sort them together with their places is faster than
    an argsort.
    """
    bits = np.uint64(len(numbers).bit_length())
    keyed = numbers.astype(np.uint64) << bits | np.arange(len(numbers), dtype=np.uint64)
    return (np.sort(keyed) & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


def _rank_in_runs(values: I64Array) -> I64Array:
    """Returns, for sorted values, 0, 1, 2... within each run of equal ones."""
    positions = np.arange(len(values))
    starts: BoolArray = np.ones(len(values), bool)
    starts[1:] = values[1:] != values[:-1]
    return positions - np.maximum.accumulate(np.where(starts, positions, 0))
