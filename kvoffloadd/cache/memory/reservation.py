"""Reserving slots: what a request wants them for (`Wanted`), and those it gets (`Reservation`). Event loop only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.memory.cache import NO_ROWS, Cache
from kvoffloadd.cache.memory.keys import join_keys, spans
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.errors import LimitError, SchemaError
from kvoffloadd.model import BoolArray, I64Array, KeyState, U8Array, U16Array, U32Array, U64Array

_RESERVED, _HIT, _PENDING, _NO_SPACE = (
    int(state) for state in (KeyState.RESERVED, KeyState.HIT, KeyState.PENDING, KeyState.NO_SPACE)
)


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """What was reserved, key by key, part by part: of each payload four numbers."""

    parts: I64Array  # its record number
    addresses: U64Array  # where it is to be written
    keys: I64Array  # the index of its key among the keys of the request
    columns: I64Array  # the index of its part among the parts that are wanted
    states: U8Array  # a `KeyState` for each key of the request


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Parts of some keys of a keyspace, for which slots are wanted."""

    keyspace: Keyspace
    keys: U64Array  # distinct
    parts: U16Array
    positions: U32Array  # of each key in its prompt

    @classmethod
    def from_first(cls, keyspace: Keyspace, keys: U64Array, parts: U16Array, first: int) -> Wanted:
        """Keys that follow one another in their prompt, from this position on."""
        return cls(keyspace, keys, parts, np.arange(first, first + len(keys), dtype=np.uint32))

    def is_like(self, other: Wanted) -> bool:
        """Whether the keys of both take the same slots."""
        a, b = self.keyspace, other.keyspace
        return a.queue is b.queue and a.part_bytes == b.part_bytes and np.array_equal(self.parts, other.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Groups of one request that are alike, joined into one, one behind the other."""

    keyspaces: list[tuple[Keyspace, int]]  # and how many of the keys are in each
    keys: U64Array
    parts: U16Array
    positions: U32Array

    @classmethod
    def of(cls, groups: Sequence[Wanted]) -> Joined:
        """Join at least one group."""
        keyspaces, first = [(wanted.keyspace, len(wanted.keys)) for wanted in groups], groups[0]
        keys, positions = first.keys, first.positions
        if len(groups) > 1:
            keys = join_keys(wanted.keys for wanted in groups)
            positions = np.concatenate([wanted.positions for wanted in groups])
        return cls(keyspaces, keys, first.parts, positions)

    def counts(self, indices: I64Array) -> list[tuple[Keyspace, int]]:
        """How many of the keys with these indices, ascending, are in each keyspace."""
        ends = np.cumsum([count for _, count in self.keyspaces])
        numbers = np.diff(np.searchsorted(indices, ends), prepend=0).tolist()
        return [(keyspace, number) for (keyspace, _), number in zip(self.keyspaces, numbers, strict=True)]

    def split(self, made: Reservation) -> list[Reservation]:
        """The reservation of each group."""
        if len(self.keyspaces) == 1:
            return [made]
        key_spans = spans(count for _, count in self.keyspaces)
        ends = np.searchsorted(made.keys, [span.stop for span in key_spans]).tolist()
        groups = []
        for span, begin, end in zip(key_spans, [0, *ends], ends, strict=False):
            keys = made.keys[begin:end] - span.start
            parts, addresses = made.parts[begin:end], made.addresses[begin:end]
            groups.append(Reservation(parts, addresses, keys, made.columns[begin:end], made.states[span]))
        return groups


def reserve(
    cache: Cache, keyspace: Keyspace, keys: U64Array, parts: U16Array, first: int, positions: U32Array | None = None
) -> Reservation:
    """`reserve_all` of one group. `first` is the position of its first key, or `positions` has each one's."""
    if positions is None:
        return reserve_all(cache, [Wanted.from_first(keyspace, keys, parts, first)])[0]
    return reserve_all(cache, [Wanted(keyspace, keys, parts, positions)])[0]


def reserve_all(cache: Cache, request: Sequence[Wanted]) -> list[Reservation]:
    """Slots for what one request wants, in key order, evicting what is needed and some to spare, and nothing that the
    request names. Its groups are distinct.

    States: RESERVED; HIT (these parts are there); PENDING (another request reserved some of them); NO_SPACE for
    the keys of a group behind the last one that could be served, and for all if the index can't hold those that are
    new.

    Raises:
        SchemaError: no rank has registered a wanted part yet.
        InternalError: a keyspace is retired.
    """
    for wanted in request:
        unknown = [p for p in wanted.parts.tolist() if not wanted.keyspace.part_bytes[p]]
        if unknown:
            raise SchemaError(f"no rank has registered part {unknown[0]} of group {wanted.keyspace.schema.group} yet")
    # Groups whose keys take the same slots are one list of keys from here on: what it takes is paid once.
    alike: list[list[Wanted]] = []
    for wanted in request:
        if alike and wanted.is_like(alike[-1][0]):
            alike[-1].append(wanted)
        else:
            alike.append([wanted])
    joined = [Joined.of(groups) for groups in alike]
    found = [cache.entries.find_for_insert(groups.keyspaces, groups.keys) for groups in joined]
    present = np.concatenate([NO_ROWS, *(rows[rows >= 0].astype(np.uint32) for rows, _ in found)])
    if len(present):
        cache.hold(present)
    reserved = [_reserve(cache, groups, rows, hashes) for groups, (rows, hashes) in zip(joined, found, strict=True)]
    if len(present):
        cache.unhold(present)
    if len(joined) == len(request):
        return reserved  # no two are alike
    return [r for groups, joint in zip(joined, reserved, strict=True) for r in groups.split(joint)]


def _reserve(cache: Cache, wanted: Joined, rows: I64Array, hashes: U64Array) -> Reservation:
    """`reserve_all` of groups that are alike. `rows` of their keys, -1 for new ones, which get theirs here."""
    states = np.full(len(rows), _RESERVED, np.uint8)
    empty = np.ones((len(rows), len(wanted.parts)), bool)
    held = np.flatnonzero(rows >= 0)
    if len(held):
        now = cache.entries.parts.state[cache.entries.records(rows[held], wanted.parts)]
        empty[held] = now == PartState.EMPTY
        states[held[~empty[held].any(axis=1)]] = _HIT
        writing = (now == PartState.RESERVED).any(axis=1)
        states[held[writing]] = _PENDING
    unserved = np.flatnonzero(states == _RESERVED)
    records = _take_slots(cache, wanted, rows, hashes, empty, unserved)
    keys = unserved[: len(records)]
    states[unserved[len(records) :]] = _NO_SPACE
    cache.counters.keys_without_space += len(unserved) - len(records)
    which, columns = np.nonzero(empty[keys])
    parts = records[which, columns]
    return Reservation(parts, cache.entries.payload_addresses(parts), keys[which], columns, states)


def _take_slots(
    cache: Cache, wanted: Joined, rows: I64Array, hashes: U64Array, empty: BoolArray, at: I64Array
) -> I64Array:
    """Take slots for the `empty` wanted parts of the keys with indices `at`, in order; new keys get their `rows`.
    Returns the records, shape (keys, parts), of the keys that got all their slots: the others got none.

    One slot size after the other: the slots of one are taken before room is made for the next.
    """
    entries, tier, parts = cache.entries, cache.tier, cache.entries.parts
    keyspace = wanted.keyspaces[0][0]
    sizes = keyspace.part_pages[wanted.parts]
    num_new = (rows[at] < 0).cumsum()
    served = int(np.searchsorted(num_new, cache.scarcity.make_room(keyspace, int(num_new[-1:].sum())), side="right"))
    records: I64Array | None = None
    for size in sorted(set(sizes.tolist())):
        columns = sizes == size
        need = empty[at[:served]][:, columns].sum(axis=1).cumsum()
        room = tier.num_free(size)
        if served and room < need[-1]:
            room = cache.eviction.make_room(size, int(need[-1]))
        fits = int(np.searchsorted(need, room, side="right"))
        if records is None:
            new = at[:fits][rows[at[:fits]] < 0]
            counts = wanted.counts(new) if len(wanted.keyspaces) > 1 else [(keyspace, len(new))]
            try:
                rows[new] = entries.insert(counts, wanted.keys[new], hashes[new], wanted.positions[new])
            except LimitError:  # the index has no room for them, though memory has
                return np.zeros((0, len(wanted.parts)), np.int64)
            records = entries.records(rows[at[:fits]], wanted.parts)
        else:  # what was reserved for those that get no slots of this size; some parts have none yet
            undone = records[fits:][empty[at[fits:served]]]
            cache.abort(undone[parts.state[undone] == PartState.RESERVED])
        served, records = fits, records[:fits]
        chosen = records[:, columns][empty[at[:served]][:, columns]]
        parts.page[chosen] = tier.take(size, chosen.astype(np.uint32))
        parts.state[chosen] = PartState.RESERVED
        cache.counters.parts_reserved += len(chosen)
    return np.zeros((served, 0), np.int64) if records is None else records
