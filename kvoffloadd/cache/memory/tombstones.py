"""Tombstones of deleted keys that some place may still have: a segment, a root that is off, the remote store.

Event loop only. They are merged like clears: the result depends neither on the order of the roots nor on which of them
are present. docs/DISK_FORMAT.md, "What was deleted stays deleted", has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack
import numpy as np

from kvoffloadd.cache.memory.epochs import unix_time_us
from kvoffloadd.cache.memory.keys import keys_array
from kvoffloadd.errors import LimitError
from kvoffloadd.model import EPOCH_MAX, BoolArray, U64Array
from kvoffloadd.scheduling.shares import share_left
from kvoffloadd.storage.tombstone import Tombstone

BYTES_MAX: Final = 2 << 20
"""The maximum size of all tombstones: each manifest, and the saved state, has all of them."""

TOMBSTONE_BYTES: Final = 128
"""What a tombstone takes in addition to its keys."""

LEAP: Final = 1 << 32
"""While the clock is behind the records' places in history, numbers rise by this: a root that is off may have records
that this run does not know.
"""

Space = tuple[bytes, int, int]
"""Fingerprint of a namespace, epoch, group."""

TombstoneId = tuple[bytes, int, int, int]
"""See `Tombstone.id`."""


def size_bytes(tombstone: Tombstone) -> int:
    """Returns what a tombstone counts towards `BYTES_MAX`."""
    return TOMBSTONE_BYTES + len(tombstone.keys)


@dataclass(slots=True)
class _Graves:
    """The deleted keys of one space: the last number of each, and in how many tombstones it is; and first words of
    theirs, ascending, which sort out nearly all others.
    """

    numbers: dict[bytes, int] = field(default_factory=dict)
    counts: Counter[bytes] = field(default_factory=Counter)
    heads: U64Array = field(default_factory=lambda: np.zeros(0, np.uint64))

    def add(self, tombstone: Tombstone) -> None:
        keys = keys_array(tombstone.keys, tombstone.key_bytes)
        for key in map(np.ndarray.tobytes, keys):
            self.numbers[key] = max(self.numbers.get(key, 0), tombstone.number)
            self.counts[key] += 1
        heads = np.sort(keys[:, 0])
        self.heads = np.insert(self.heads, np.searchsorted(self.heads, heads), heads)  # sorts the new ones only

    def remove(self, tombstone: Tombstone) -> None:
        """Removes a tombstone. Keys that are in another one, too, keep their number."""
        for key in map(np.ndarray.tobytes, keys_array(tombstone.keys, tombstone.key_bytes)):
            self.counts[key] -= 1
            if not self.counts[key]:
                del self.counts[key], self.numbers[key]
        if len(self.heads) > 2 * self.counts.total():
            self.heads = np.unique(keys_array(b"".join(self.numbers), tombstone.key_bytes)[:, 0])

    def numbers_of(self, keys: U64Array) -> U64Array:
        """Returns the number of each key; 0: it was not deleted."""
        numbers = np.zeros(len(keys), np.uint64)
        heads = keys[:, 0]
        likely = self.heads[np.minimum(np.searchsorted(self.heads, heads), len(self.heads) - 1)] == heads
        for index in np.flatnonzero(likely).tolist():
            numbers[index] = self.numbers.get(keys[index].tobytes(), 0)
        return numbers


_BySpace = dict[Space, _Graves]


def _add(graves: _BySpace, tombstone: Tombstone) -> None:
    graves.setdefault(tombstone.space, _Graves()).add(tombstone)


def _remove(graves: _BySpace, tombstone: Tombstone) -> None:
    if (found := graves.get(tombstone.space)) is not None:
        found.remove(tombstone)
        if not found.numbers:
            del graves[tombstone.space]


def _numbers_of(graves: _BySpace, space: Space, keys: U64Array) -> U64Array:
    found = graves.get(space)
    return np.zeros(len(keys), np.uint64) if found is None else found.numbers_of(keys)


class Tombstones:
    """All tombstones that this host knows of."""

    def __init__(self) -> None:
        self.clock: Callable[[], int] = unix_time_us
        self.last = 0  # the highest number that was ever known
        self._by_id: dict[TombstoneId, Tombstone] = {}
        self._graves: _BySpace = {}
        self._in_store: _BySpace = {}
        self._bytes_by_uid: Counter[int] = Counter()
        self._listed: tuple[Tombstone, ...] | None = ()
        self._packed = b""

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_keys(self) -> int:
        """Returns the number of their keys, each counted for every tombstone."""
        return sum(tombstone.num_keys for tombstone in self._by_id.values())

    @property
    def used_bytes(self) -> int:
        """Returns their size, as `size_bytes` counts it."""
        return self._bytes_by_uid.total()

    @property
    def in_store(self) -> list[Tombstone]:
        """Returns those of keys that the remote store may still have."""
        return [tombstone for tombstone in self._by_id.values() if tombstone.in_store]

    def next_number(self, after: int) -> int:
        """Returns the number of the next deletion, later than all, and than the place `after` in history. Raises
        LimitError: none is left.
        """
        last, now = max(self.last, after), self.clock()
        number = now if now > last else last + LEAP
        if number > EPOCH_MAX:
            raise LimitError("no number is left for a deletion: set this host's clock, and clear what it wrote since")
        return number

    def make_room(self, uid: int, wanted: Iterable[Tombstone], needless: Callable[[], Iterable[Tombstone]]) -> None:
        """Makes room for these tombstones of a user: forgets as many of the `needless()` ones, which no place needs, as
        it takes. Raises LimitError if there is no room even so.
        """
        more = sum(map(size_bytes, wanted))
        if more <= self._left(uid):
            return
        for tombstone in needless():
            self.forget([tombstone])
            if more <= self._left(uid):
                return
        raise LimitError(
            f"the deleted keys of uid {uid} take {self._bytes_by_uid[uid]:,} bytes until the segments with their "
            "records are used again, and there is no room for more: clear the namespace, or delete more later"
        )

    def _left(self, uid: int) -> int:
        return share_left(BYTES_MAX, self.used_bytes, self._bytes_by_uid[uid])

    def add(self, tombstones: Iterable[Tombstone]) -> list[Tombstone]:
        """Adds tombstones. Returns those that were not known. One whose objects the store may have stays such."""
        new = []
        for tombstone in tombstones:
            known = self._by_id.get(tombstone.id)
            self.last = max(self.last, tombstone.number)
            if known is not None and (known.in_store or not tombstone.in_store):
                continue
            if known is None:
                new.append(tombstone)
                self._bytes_by_uid[tombstone.uid] += size_bytes(tombstone)
                _add(self._graves, tombstone)
            if tombstone.in_store:
                _add(self._in_store, tombstone)
            self._by_id[tombstone.id] = tombstone
            self._listed = None
        return new

    def supersede(self, tombstones: Iterable[Tombstone]) -> None:
        """Adds new tombstones, in place of earlier ones of exactly the same keys: a deletion may be repeated."""
        new = {(tombstone.space, tombstone.keys): tombstone for tombstone in tombstones}
        same = [each for each in self._by_id.values() if (each.space, each.keys) in new]
        self.add(new.values())
        self.forget(same)

    def known(self, ids: Iterable[TombstoneId]) -> list[Tombstone]:
        """Returns the tombstones of these ids that are still needed."""
        return [self._by_id[each] for each in ids if each in self._by_id]

    def removed_from_store(self, tombstone: Tombstone) -> None:
        """Notes that the store has no objects of it any more."""
        if (known := self._by_id.get(tombstone.id)) is not None and known.in_store:
            _remove(self._in_store, known)
            self._by_id[known.id] = Tombstone(*_fields(known)[:-1])
            self._listed = None

    def forget(self, tombstones: Iterable[Tombstone]) -> None:
        """Forgets tombstones that no place needs."""
        for tombstone in tombstones:
            if (known := self._by_id.pop(tombstone.id, None)) is not None:
                self._bytes_by_uid[known.uid] -= size_bytes(known)
                _remove(self._graves, known)
                if known.in_store:
                    _remove(self._in_store, known)
                self._listed = None
        self._bytes_by_uid += Counter()  # drops zeros

    def current(self, epoch_of: Callable[[bytes], int]) -> tuple[Tombstone, ...]:
        """Returns all tombstones, by number. Those of epochs that are over are forgotten: a clear has ended these."""
        over = [tombstone for tombstone in self._by_id.values() if tombstone.epoch != epoch_of(tombstone.fingerprint)]
        for tombstone in over:
            for graves in (self._graves, self._in_store):
                graves.pop(tombstone.space, None)  # of one epoch, all are over
        self.forget(over)
        if self._listed is None:
            self._listed = tuple(sorted(self._by_id.values(), key=lambda tombstone: (tombstone.number, tombstone.id)))
            self._packed = msgpack.packb([_fields(each) for each in self._listed]) if self._listed else b""
        return self._listed

    def packed(self, epoch_of: Callable[[bytes], int]) -> bytes:
        """Returns `current` for the saved state; empty: there are none."""
        self.current(epoch_of)
        return self._packed

    # --- questions ---

    def void(self, space: Space, keys: U64Array, sequences: U64Array) -> BoolArray:
        """Returns which records of these keys were written before the keys were deleted."""
        numbers = _numbers_of(self._graves, space, keys)
        flags: BoolArray = (numbers > 0) & (sequences <= numbers)
        return flags

    def deleted(self, space: Space, keys: U64Array) -> BoolArray:
        """Returns which of these keys were deleted, whatever came after it."""
        flags: BoolArray = _numbers_of(self._graves, space, keys) > 0
        return flags

    def leaving_store(self, space: Space, keys: U64Array) -> BoolArray:
        """Returns which of these keys were deleted, and may have an object in the remote store from before."""
        flags: BoolArray = _numbers_of(self._in_store, space, keys) > 0
        return flags

    def beyond(self, known: Sequence[Tombstone]) -> Tombstones:
        """Returns those that are not among the ones that are `known` somewhere."""
        ids = {tombstone.id for tombstone in known}
        others = Tombstones()
        others.add(tombstone for tombstone in self._by_id.values() if tombstone.id not in ids)
        return others

    def check(self) -> list[str]:
        """Returns the audit's list of errors."""
        findings = []
        bytes_by_uid: Counter[int] = Counter()
        for tombstone in self._by_id.values():
            bytes_by_uid[tombstone.uid] += size_bytes(tombstone)
        if bytes_by_uid != self._bytes_by_uid:
            findings.append(f"tombstones: users have {bytes_by_uid} bytes, counted {self._bytes_by_uid}")
        for graves, named in ((self._graves, self._by_id.values()), (self._in_store, self.in_store)):
            counts = Counter(tombstone.space for tombstone in named for _ in range(tombstone.num_keys))
            if counts != {space: each.counts.total() for space, each in graves.items()}:
                findings.append("tombstones: the deleted keys of a group are miscounted")
        return findings


def _fields(tombstone: Tombstone) -> list[Any]:
    return [getattr(tombstone, name) for name in Tombstone.__struct_fields__]
