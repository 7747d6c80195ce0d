"""Reserves slots: what a request wants them for (`Wanted`), the slots that it gets (`Reservation`), and reservations of
very many keys in steps (`Admission`). Event loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvoffloadd.cache.memory.cache import NO_ROWS, Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.keys import join_keys, spans
from kvoffloadd.cache.memory.namespace import Keyspace, Queue
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.quota import UNBOUNDED
from kvoffloadd.cache.memory.steppedlookup import SteppedLookup
from kvoffloadd.errors import LimitError, SchemaError
from kvoffloadd.model import BoolArray, I64Array, KeyState, U8Array, U16Array, U32Array, U64Array
from kvoffloadd.scheduling.steps import Steps

STEP_KEYS = 4096
"""The number of keys and parts for which one step makes room, or takes slots: a few milliseconds."""

_RESERVED, _HIT, _PENDING, _NO_SPACE = (
    int(state) for state in (KeyState.RESERVED, KeyState.HIT, KeyState.PENDING, KeyState.NO_SPACE)
)
_Slice = list[tuple[int, slice]]
"""Names keys by the number of their group in the request and a slice."""


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Describes what was reserved, key by key and part by part, with four numbers for each payload."""

    parts: I64Array  # its record number
    addresses: U64Array  # where the payload must be written
    keys: I64Array  # the index of its key among the keys of the request
    columns: I64Array  # the index of its part among the parts that are wanted
    states: U8Array  # a `KeyState` for each key of the request


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Names parts of some keys of a keyspace for which slots are wanted."""

    keyspace: Keyspace
    keys: U64Array  # distinct
    parts: U16Array
    positions: U32Array  # of each key in its prompt

    @classmethod
    def from_first(cls, keyspace: Keyspace, keys: U64Array, parts: U16Array, first: int) -> Wanted:
        """Makes a `Wanted` for keys that follow one another in their prompt, from this position on."""
        return cls(keyspace, keys, parts, np.arange(first, first + len(keys), dtype=np.uint32))

    def is_like(self, other: Wanted) -> bool:
        """Returns whether the keys of both take the same slots."""
        a, b = self.keyspace, other.keyspace
        return a.queue is b.queue and a.part_bytes == b.part_bytes and np.array_equal(self.parts, other.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Joins the like groups of one request into one list of keys, one group after the other."""

    keyspaces: list[tuple[Keyspace, int]]  # and the number of keys in each
    keys: U64Array
    parts: U16Array
    positions: U32Array

    @classmethod
    def of(cls, groups: Sequence[Wanted]) -> Joined:
        """Joins one or more groups."""
        keyspaces, first = [(wanted.keyspace, len(wanted.keys)) for wanted in groups], groups[0]
        keys, positions = first.keys, first.positions
        if len(groups) > 1:
            keys = join_keys(wanted.keys for wanted in groups)
            positions = np.concatenate([wanted.positions for wanted in groups])
        return cls(keyspaces, keys, first.parts, positions)

    def counts(self, indices: I64Array) -> list[tuple[Keyspace, int]]:
        """Returns how many of the keys with these indices, ascending, are in each keyspace."""
        ends = np.cumsum([count for _, count in self.keyspaces])
        numbers = np.diff(np.searchsorted(indices, ends), prepend=0).tolist()
        return [(keyspace, number) for (keyspace, _), number in zip(self.keyspaces, numbers, strict=True)]

    def split(self, made: Reservation) -> list[Reservation]:
        """Returns the reservation of each group."""
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


def reserve_in_steps(cache: Cache, request: Sequence[Wanted]) -> Steps[list[Reservation]]:
    """Reserves as `reserve_all`, in steps. The caller owns what is reserved; steps that are closed early leave nothing
    reserved.
    """
    if sum(map(_size, request)) <= STEP_KEYS:
        return reserve_all(cache, request)
    with changing:
        admission = Admission(cache, request)
        cache.unfinished.add(admission)
        try:
            yield  # the caller's checks of the keys have taken about a step's time
            yield from admission.steps()
            return admission.reservations()
        except BaseException:
            admission.give_up()
            raise
        finally:
            cache.unfinished.discard(admission)


def reserve(
    cache: Cache, keyspace: Keyspace, keys: U64Array, parts: U16Array, first: int, positions: U32Array | None = None
) -> Reservation:
    """Reserves as `reserve_all`, for one group. `first` is the position of its first key; `positions` has the position
    of each key.
    """
    if positions is None:
        return reserve_all(cache, [Wanted.from_first(keyspace, keys, parts, first)])[0]
    return reserve_all(cache, [Wanted(keyspace, keys, parts, positions)])[0]


@changing
def reserve_all(
    cache: Cache, request: Sequence[Wanted], *, take: bool = True, beside_pages: int = 0
) -> list[Reservation]:
    """Reserves slots for what one request wants, in key order. Evicts what is needed and some to spare, but nothing
    that the request names. The groups of the request are distinct. Without `take`, reserves nothing and only returns
    the states.

    States: RESERVED; HIT (these parts are in memory); PENDING (another request has reserved some of them); NO_SPACE for
    the keys of a group after the last one that could be served, and for all if the index can't hold those that are new.
    No user gets more than it may hold (see `HeldMemory`); `beside_pages` that the caller holds do not count. No quota
    is exceeded: within it, others of its own keys go first.

    Raises:
        SchemaError: no rank has registered a wanted part yet.
        InternalError: a keyspace is retired.
    """
    for wanted in request:
        unknown = [p for p in wanted.parts.tolist() if not wanted.keyspace.part_bytes[p]]
        if unknown:
            raise SchemaError(f"no rank has registered part {unknown[0]} of group {wanted.keyspace.schema.group} yet")
    joined = [Joined.of(groups) for groups in _alike(request)]
    found = [cache.entries.find_for_insert(groups.keyspaces, groups.keys) for groups in joined]
    present = np.concatenate([NO_ROWS, *(rows[rows >= 0].astype(np.uint32) for rows, _ in found)])
    left = cache.entries.held.left(request[0].keyspace.namespace.uid, beside_pages) if take and request else 0
    if len(present):
        cache.hold(present)
        _find_again(cache, joined, found)
    reserved = []
    for groups, places in zip(joined, found, strict=True):
        made = _reserve(cache, groups, *places, left)
        left -= _pages_of(groups, made) if left < UNBOUNDED else 0
        reserved.append(made)
    if len(present):
        cache.unhold(present)
    if len(joined) == len(request):
        return reserved  # no two groups are alike
    return [r for groups, joint in zip(joined, reserved, strict=True) for r in groups.split(joint)]


def _find_again(cache: Cache, joined: Sequence[Joined], found: Sequence[tuple[I64Array, U64Array]]) -> None:
    """Marks lost keys as in use again, since the missing keys before them are stored again."""
    cache.uses.settle_losses()
    lost = cache.entries.lost
    for groups, (rows, _) in zip(joined, found, strict=True):
        again = np.flatnonzero((rows >= 0) & lost[rows])
        queue = groups.keyspaces[0][0].queue
        if len(again) and queue is not None:
            cache.uses.settle()
            again = again[lost[rows[again]]]  # the other keys were used in the meantime
            lost[rows[again]] = False
            queue.policy.touch(rows[again].astype(np.uint32), groups.positions[again])
            cache.set_claimed_aside(rows[again].astype(np.uint32))
            for lower in cache.entries.lower:
                lower.found_again(rows[again].astype(np.uint32))


def _alike(request: Sequence[Wanted]) -> list[list[Wanted]]:
    """Collects consecutive groups with keys that take the same slots: joined, they pay the fixed costs once, not for
    each group.
    """
    alike: list[list[Wanted]] = []
    for wanted in request:
        if alike and wanted.is_like(alike[-1][0]):
            alike[-1].append(wanted)
        else:
            alike.append([wanted])
    return alike


def _pages_of(wanted: Joined, made: Reservation) -> int:
    """Returns the number of pages that the slots of these parts take."""
    return int(wanted.keyspaces[0][0].part_pages[wanted.parts[made.columns]].sum())


def _reserve(cache: Cache, wanted: Joined, rows: I64Array, hashes: U64Array, left: int) -> Reservation:
    """Reserves as `reserve_all`, for groups that are alike, up to `left` pages. `rows` has the row of each key, -1 for
    new keys, which get their rows here.
    """
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
    allowed, keyspace = len(unserved), wanted.keyspaces[0][0]
    if left < UNBOUNDED or keyspace.quotas:
        pages = (empty[unserved] @ keyspace.part_pages[wanted.parts]).cumsum()
        allowed = int(np.searchsorted(pages, left, side="right"))
        if keyspace.quotas and allowed:
            room = cache.quota_room.make_room(keyspace.quotas, int(pages[allowed - 1]))
            for quota in keyspace.quotas:
                fits = int(np.searchsorted(pages[:allowed], quota.room_pages, side="right"))
                quota.keys_refused += allowed - fits
            allowed = int(np.searchsorted(pages[:allowed], room, side="right"))
    records = _take_slots(cache, wanted, rows, hashes, empty, unserved[:allowed])
    keys = unserved[: len(records)]
    states[unserved[len(records) :]] = _NO_SPACE
    cache.counters.keys_without_space += len(unserved) - len(records)
    which, columns = np.nonzero(empty[keys])
    parts = records[which, columns]
    return Reservation(parts, cache.entries.payload_addresses(parts), keys[which], columns, states)


def _take_slots(
    cache: Cache, wanted: Joined, rows: I64Array, hashes: U64Array, empty: BoolArray, indices: I64Array
) -> I64Array:
    """Takes slots for the `empty` wanted parts of the keys at `indices`, in order; new keys get their `rows`.
    Returns the records, shape (keys, parts), of the keys that got all their slots; the other keys got none.

    The slot sizes follow one another: the slots of one size are taken before room is made for the next.
    """
    entries, tier, parts = cache.entries, cache.tier, cache.entries.parts
    keyspace = wanted.keyspaces[0][0]
    sizes = keyspace.part_pages[wanted.parts]
    num_new = (rows[indices] < 0).cumsum()
    served = int(np.searchsorted(num_new, cache.scarcity.make_room(keyspace, int(num_new[-1:].sum())), side="right"))
    records: I64Array | None = None
    for size in sorted(set(sizes.tolist())):
        columns = sizes == size
        need = empty[indices[:served]][:, columns].sum(axis=1).cumsum()
        room = tier.num_free(size)
        if served and room < need[-1]:
            room = cache.eviction.make_room(size, int(need[-1]), keyspace.queue)
        fits = int(np.searchsorted(need, room, side="right"))
        if records is None:
            new = indices[:fits][rows[indices[:fits]] < 0]
            counts = wanted.counts(new) if len(wanted.keyspaces) > 1 else [(keyspace, len(new))]
            try:
                rows[new] = entries.insert(counts, wanted.keys[new], hashes[new], wanted.positions[new])
            except LimitError:  # the index has no room for the keys, though memory has
                return np.zeros((0, len(wanted.parts)), np.int64)
            records = entries.records(rows[indices[:fits]], wanted.parts)
        else:  # undoes what was reserved for keys that get no slots of this size; some parts have none yet
            undone = records[fits:][empty[indices[fits:served]]]
            cache.abort(undone[parts.state[undone] == PartState.RESERVED])
        served, records = fits, records[:fits]
        chosen = records[:, columns][empty[indices[:served]][:, columns]]
        parts.page[chosen] = tier.take(size, chosen.astype(np.uint32))
        parts.state[chosen] = PartState.RESERVED
        entries.account(chosen, reserved=+1)
        cache.counters.parts_reserved += len(chosen)
    return np.zeros((served, 0), np.int64) if records is None else records


class Admission:
    """Reserves slots for very many keys of one request, in steps. Run `steps` to the end for `reservations`, or call
    `give_up`. The groups of the request are distinct, and each names a key once.

    The steps make room first. Then they insert the keys from the last to the first, as a policy takes a prompt, so that
    its beginning is evicted last. If there is no room for all keys, or other requests take it in the meantime, they
    insert the keys from the first on, and take no slots after the first key of a group that got none. A group that is
    cleared goes on in its new keyspace: slots that were reserved before belong to the cleared one, which the commit
    detects.
    """

    def __init__(self, cache: Cache, request: Sequence[Wanted]) -> None:
        self._cache = cache
        self._request = list(request)
        self._fits = True
        self._gaps: set[int] = set()  # groups with a key that got no slots
        # Its keys that were in memory at the beginning, or that a step finds, are not evicted to make room for the
        # others.
        self._present = SteppedLookup(cache, [(wanted.keyspace, wanted.keys) for wanted in request])
        self._made: list[list[tuple[int, Reservation]]] = [[] for _ in request]  # by group: of keys from an index on

    @property
    def num_reserved(self) -> int:
        """Returns the number of parts that are reserved now."""
        return sum(len(made.parts) for group in self._made for _, made in group)

    @property
    def num_held(self) -> int:
        """Returns how often rows are held now."""
        return self._present.num_held

    def steps(self) -> Iterator[None]:
        """Reserves some of the keys in each step. Raises as `reserve_all`."""
        yield from self._make_room()
        slices = list(_slices(self._request))
        if self._fits:
            yield from self._take(slices[::-1])
        if not self._fits:
            yield from self._take(slices)

    def _take(self, slices: list[_Slice]) -> Iterator[None]:
        """Reserves these slices, in this order. Evicts nothing for keys after a gap in their group."""
        for piece in slices:
            behind = [(number, keys) for number, keys in piece if number in self._gaps]
            without = self._reserve([(number, keys) for number, keys in piece if number not in self._gaps], take=True)
            without += self._reserve(behind, take=False)
            if self._fits and without:  # other requests were faster, or slot sizes took each other's memory
                self._cache.counters.keys_without_space -= without  # the next try begins with the first key
                self._fits = False
                self._free()
                return
            yield

    def _reserve(self, piece: _Slice, *, take: bool) -> int:
        """Reserves these keys. Returns how many of them got no slots."""
        without = 0
        wanted = [self._cut(number, keys) for number, keys in piece]
        reserved = reserve_all(self._cache, wanted, take=take, beside_pages=self._present.pages)
        for (number, keys), group, made in zip(piece, wanted, reserved, strict=True):
            self._made[number].append((keys.start, made))
            others = (made.states != _RESERVED) & (made.states != _NO_SPACE)
            if others.any():  # some may have been stored in the meantime: the next steps must not evict them
                self._present.hold(self._cache.entries.find(group.keyspace, group.keys[others]))
            lacking = int(np.count_nonzero(made.states == _NO_SPACE))
            if lacking and not self._fits:
                self._gaps.add(number)
            without += lacking
        return without

    def reservations(self) -> list[Reservation]:
        """Returns the reservation of each group; the caller owns them from now on."""
        found = [_joined(sorted(made, key=lambda item: item[0])) for made in self._made]
        self._made = [[] for _ in self._request]
        self._present.release()
        return found

    def give_up(self) -> None:
        """Frees all that is reserved, and ends all holds."""
        self._free()
        self._present.release()

    def _free(self) -> None:
        for group in self._made:
            for _, made in group:
                self._cache.abort(made.parts)
            group.clear()

    def _cut(self, number: int, keys: slice) -> Wanted:
        wanted = self._request[number]
        namespace, group = wanted.keyspace.namespace, wanted.keyspace.schema.group
        if wanted.keyspace.retired and group in namespace.keyspaces:
            wanted = self._request[number] = replace(wanted, keyspace=namespace.keyspaces[group])
        return Wanted(wanted.keyspace, wanted.keys[keys], wanted.parts, wanted.positions[keys])

    def _make_room(self) -> Iterator[None]:
        """Evicts keys until there are free slots for all that the request lacks, or no more keys can be evicted."""
        yield from self._present.steps()
        missing, asking = Counter[int](), dict[int, Queue | None]()
        by_group = iter(self._present.rows())
        for groups in _alike(self._request):
            wanted, rows = groups[0], np.concatenate([next(by_group) for _ in groups])
            present = rows[rows >= 0]
            states = self._cache.entries.parts.state[self._cache.entries.records(present, wanted.parts)]
            lacking = len(rows) - len(present) + (states == PartState.EMPTY).sum(axis=0)
            for pages, count in zip(wanted.keyspace.part_pages[wanted.parts].tolist(), lacking.tolist(), strict=True):
                missing[pages] += count
                asking[pages] = wanted.keyspace.queue
        uid, wanted_pages = self._request[0].keyspace.namespace.uid, sum(size * n for size, n in missing.items())
        if wanted_pages > self._cache.entries.held.left(uid, self._present.pages):
            self._fits = False  # the user may not have all slots: each slice makes the room that it may
            return
        yield
        yield from self._make_room_in_quotas(wanted_pages)
        if not self._fits:
            return
        for pages, count in missing.items():
            while (free := self._cache.tier.num_free(pages)) < count:
                aim = min(count, free + STEP_KEYS)
                found = self._cache.eviction.make_room(pages, aim, asking[pages])
                yield
                if found < aim:
                    self._fits = False
                    break

    def _make_room_in_quotas(self, pages: int) -> Iterator[None]:
        """Evicts keys under the quotas of the request until it fits into these; without success, each slice makes the
        room that it may.
        """
        quotas, room = self._request[0].keyspace.quotas, 0
        while quotas and room < pages:
            is_too_much = pages > min(quota.max_pages for quota in quotas)
            before, room = room, 0 if is_too_much else self._cache.quota_room.make_room(quotas, pages)
            if room <= before:
                self._fits = False
                break
            yield


def _size(wanted: Wanted) -> int:
    return len(wanted.keys) * len(wanted.parts)


def _slices(request: Sequence[Wanted]) -> Iterator[_Slice]:
    """Yields all keys of the request, in order, about STEP_KEYS parts of them at a time."""
    piece, room = _Slice(), STEP_KEYS
    for number, wanted in enumerate(request):
        begin, width = 0, len(wanted.parts)
        while begin < len(wanted.keys):
            end = min(len(wanted.keys), begin + max(1, room // width))
            piece.append((number, slice(begin, end)))
            room -= (end - begin) * width
            begin = end
            if room < width:
                yield piece
                piece, room = _Slice(), STEP_KEYS
    if piece:
        yield piece


def _joined(made: list[tuple[int, Reservation]]) -> Reservation:
    """Joins the reservations of consecutive keys; each comes with the index of its first key."""
    none: I64Array = np.zeros(0, np.int64)
    return Reservation(
        np.concatenate([none, *(reservation.parts for _, reservation in made)]),
        np.concatenate([none.astype(np.uint64), *(reservation.addresses for _, reservation in made)]),
        np.concatenate([none, *(reservation.keys + begin for begin, reservation in made)]),
        np.concatenate([none, *(reservation.columns for _, reservation in made)]),
        np.concatenate([none.astype(np.uint8), *(reservation.states for _, reservation in made)]),
    )
