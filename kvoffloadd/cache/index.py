"""Which row a key has: a vectorised hash table without per-key Python objects.

Extendible hashing: the top bits of a key's hash choose a segment through a directory; the bottom bits choose a bucket
of 16 slots in it, with overflow into the next bucket. A full segment splits in two, so growth never costs more than
one segment at a time, however many keys are held. All columns are reserved for the worst case and committed lazily.
A slot holds a 16-bit tag of the hash and a row number; a row holds the whole key and its space, which are compared
before a row is ever answered: two keys are never taken for each other, whatever their hashes.

Event loop only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.sharedmem import reserve_array

if TYPE_CHECKING:
    from kvoffloadd.model import BoolArray, I64Array, U16Array, U32Array, U64Array

WORDS = 4
"""u64 words of a stored key: `model.KEY_BYTES_MAX` bytes, zero padded. A key's width is a property of its space."""

_BUCKETS, _SLOTS = 64, 16
_SEGMENT = _BUCKETS * _SLOTS
_FULL = int(_SEGMENT * 0.8)
_EXPECTED_FILL = 0.65
_EMPTY, _DEAD, _FIRST_TAG = 0, 1, 2
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Index:
    """(space, key) -> row.

    Rows are dense small numbers, reused after `free`; their columns live here and with the owner.
    `max_keys` bounds the rows; `seed` makes the hash unguessable, so that nobody can choose keys that collide.
    """

    def __init__(self, max_keys: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._factors: U64Array = rng.integers(0, 1 << 63, size=WORDS + 1, dtype=np.uint64) << np.uint64(1) | np.uint64(
            1
        )
        self.max_keys = max_keys
        self.keys: U64Array = reserve_array((max_keys, WORDS), np.uint64)
        self.space: U16Array = reserve_array((max_keys,), np.uint16)
        self._rows_used = 0  # rows ever handed out; those below it that are free are in _free
        self._free: U32Array = reserve_array((max_keys,), np.uint32)
        self._num_free = 0
        # Splits leave segments at least a third full on average; eight times the need is virtual memory only.
        segments = max(16, 8 * (max_keys // _SEGMENT + 1))
        self._tags: U16Array = reserve_array((segments * _BUCKETS, _SLOTS), np.uint16)
        self._rows: U32Array = reserve_array((segments * _BUCKETS, _SLOTS), np.uint32)
        self._used: U32Array = reserve_array((segments,), np.uint32)  # slots that are not empty, dead ones included
        self._live: U32Array = reserve_array((segments,), np.uint32)
        self._depth = reserve_array((segments,), np.uint8)
        self._num_segments = 1
        self._directory: U32Array = np.zeros(1, np.uint32)
        self._directory_depth = 0

    def __len__(self) -> int:
        return self._rows_used - self._num_free

    @property
    def rows_end(self) -> int:
        """Every row ever handed out is below this."""
        return self._rows_used

    def hash(self, space: int | U16Array, keys: U64Array) -> U64Array:
        """u64 per key. `keys`: (n, WORDS). Multilinear with secret odd factors, then mixed so that all bits count."""
        # Word by word: a reduction over an axis of four costs three times as much.
        h: U64Array = keys[:, 0] * self._factors[0]
        for word in range(1, WORDS):
            h += keys[:, word] * self._factors[word]
        h += np.asarray(space, np.uint64) * self._factors[WORDS]
        h ^= h >> np.uint64(32)
        h *= _GOLDEN
        h ^= h >> np.uint64(29)
        h *= self._factors[0]
        h ^= h >> np.uint64(32)
        return h

    def find(self, space: int, keys: U64Array) -> I64Array:
        """The row of each key, or -1. `keys`: (n, WORDS). Changes nothing."""
        found = np.full(len(keys), -1, np.int64)
        if not len(keys):
            return found
        h = self.hash(space, keys)
        bucket, tag = self._home(h), self._tag(h)
        asked = np.arange(len(keys))
        while len(asked):
            tags = self._tags[bucket]
            at = np.flatnonzero(tags == tag[:, None])
            where = at // _SLOTS
            rows = self._rows[bucket[where], at % _SLOTS]
            who = asked[where]
            same = _equal(self.keys[rows], keys[who]) & (self.space[rows] == space)
            found[who[same]] = rows[same]
            on = np.flatnonzero(found[asked] < 0)
            # A bucket with an empty slot never overflowed; a dead slot keeps the chain whole.
            on = on[(tags[on] != _EMPTY).all(axis=1)]
            asked, bucket, tag = asked[on], _next(bucket[on]), tag[on]
        return found

    def expect(self, count: int) -> None:
        """Make room at once for so many keys in a table that is empty still: growing one by one takes twice as long."""
        if self._num_segments > 1 or len(self):
            return
        while count > _EXPECTED_FILL * _SEGMENT * self._num_segments and self._directory_depth < 24:
            self._directory_depth += 1
            self._num_segments *= 2
        self._directory = np.arange(self._num_segments, dtype=np.uint32)
        self._depth[: self._num_segments] = self._directory_depth

    def insert(self, space: int, keys: U64Array) -> U32Array:
        """New rows for keys that are distinct and not in the table; the caller guarantees both and that they fit."""
        rows = self._take_rows(len(keys))
        self.keys[rows] = keys
        self.space[rows] = space
        h = self.hash(space, keys)
        self._make_room(h)
        self._place(h, rows)
        return rows

    def remove(self, rows: U32Array) -> None:
        """Forget keys by row. Their columns stay readable until `free`."""
        h = self.hash(self.space[rows], self.keys[rows])
        bucket = self._home(h)
        left = rows
        while len(left):
            mine = (self._rows[bucket] == left[:, None]) & (self._tags[bucket] >= _FIRST_TAG)
            here = mine.any(axis=1)
            slot = mine[here].argmax(axis=1)
            self._tags[bucket[here], slot] = _DEAD
            np.subtract.at(self._live, bucket[here] // _BUCKETS, 1)
            left, bucket = left[~here], _next(bucket[~here])

    def free(self, rows: U32Array) -> None:
        """Give removed rows back for reuse."""
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)

    def memory_bytes(self) -> int:
        """Bytes of the table that have been in use: columns up to the highest row, and segments."""
        per_row = self.keys.itemsize * WORDS + self.space.itemsize
        per_segment = _SEGMENT * (self._tags.itemsize + self._rows.itemsize) + 9
        free = self._free.itemsize * self._num_free
        return self._rows_used * per_row + self._num_segments * per_segment + self._directory.nbytes + free

    def check(self) -> list[str]:
        """What is wrong with the table itself; nothing: an empty list. Walks every slot."""
        findings = []
        used = self._num_segments * _BUCKETS
        tags, rows = self._tags[:used], self._rows[:used]
        live = rows[tags >= _FIRST_TAG]
        if len(np.unique(live)) != len(live):
            findings.append("index: a row is in the table twice")
        if int(self._live[: self._num_segments].sum()) != len(live):
            findings.append("index: live slots are miscounted")
        if len(live) and (self._find_rows(live) != live).any():
            findings.append("index: a key in the table can't be found")
        return findings

    def _find_rows(self, rows: U32Array) -> I64Array:
        found = np.full(len(rows), -1, np.int64)
        for space in np.unique(self.space[rows]):
            mine = self.space[rows] == space
            found[mine] = self.find(int(space), self.keys[rows[mine]])
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

    def _take_rows(self, count: int) -> U32Array:
        reused = min(count, self._num_free)
        self._num_free -= reused
        old = self._free[self._num_free : self._num_free + reused].copy()
        new = np.arange(self._rows_used, self._rows_used + count - reused, dtype=np.uint32)
        self._rows_used += count - reused
        return np.concatenate([old, new])

    def _place(self, h: U64Array, rows: U32Array) -> None:
        """Put rows into free slots; the segments have room."""
        bucket, tag = self._home(h), self._tag(h)
        while len(rows):
            order = np.argsort(bucket, kind="stable")
            bucket, tag, rows = bucket[order], tag[order], rows[order]
            rank = _rank_in_runs(bucket)
            usable = self._tags[bucket] < _FIRST_TAG
            nth = np.cumsum(usable, axis=1)
            takes = usable & (nth == (rank + 1)[:, None])
            fits = takes.any(axis=1)
            at, slot = bucket[fits], takes[fits].argmax(axis=1)
            segment = at // _BUCKETS
            np.add.at(self._used, segment, (self._tags[at, slot] == _EMPTY).astype(np.uint32))
            np.add.at(self._live, segment, 1)
            self._tags[at, slot] = tag[fits]
            self._rows[at, slot] = rows[fits]
            bucket, tag, rows = _next(bucket[~fits]), tag[~fits], rows[~fits]

    def _make_room(self, h: U64Array) -> None:
        """Split or clean segments until the keys with these hashes fit."""
        while True:
            segment, count = np.unique(self._home(h) // _BUCKETS, return_counts=True)
            crowded = segment[self._used[segment] + count > _FULL]
            if not len(crowded):
                return
            for s in crowded.tolist():
                self._rebuild(s, split=self._live[s] + int(count[segment == s][0]) > _FULL * 2 // 3)

    def _rebuild(self, segment: int, *, split: bool) -> None:
        """Rewrite a segment without dead slots; with `split`, half of its keys move to a new one."""
        span = slice(segment * _BUCKETS, (segment + 1) * _BUCKETS)
        rows = self._rows[span][self._tags[span] >= _FIRST_TAG]
        self._tags[span] = _EMPTY
        self._used[segment] = self._live[segment] = 0
        if split:
            self._split_directory(segment)
        if len(rows):
            self._place(self.hash(self.space[rows], self.keys[rows]), rows)

    def _split_directory(self, segment: int) -> None:
        if self._depth[segment] == self._directory_depth:
            self._directory = np.repeat(self._directory, 2)
            self._directory_depth += 1
        new = self._num_segments
        self._num_segments += 1
        self._depth[segment] += 1
        self._depth[new] = self._depth[segment]
        mine = np.flatnonzero(self._directory == segment)
        self._directory[mine[len(mine) // 2 :]] = new


def _equal(a: U64Array, b: U64Array) -> BoolArray:
    """Which rows of two (n, WORDS) arrays are equal."""
    differ = a[:, 0] ^ b[:, 0]
    for word in range(1, WORDS):
        differ |= a[:, word] ^ b[:, word]
    same: BoolArray = differ == 0
    return same


def _next(bucket: I64Array) -> I64Array:
    """The bucket that takes the overflow: the next one of the same segment, round."""
    after: I64Array = (bucket & ~np.int64(_BUCKETS - 1)) | ((bucket + 1) & np.int64(_BUCKETS - 1))
    return after


def _rank_in_runs(values: I64Array) -> I64Array:
    """For sorted values: 0, 1, 2... within each run of equal ones."""
    at = np.arange(len(values))
    starts: BoolArray = np.ones(len(values), bool)
    starts[1:] = values[1:] != values[:-1]
    return at - np.maximum.accumulate(np.where(starts, at, 0))
