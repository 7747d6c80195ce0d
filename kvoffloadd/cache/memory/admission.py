"""Reserving slots for very many keys over several turns of the event loop, which serves others in between.

Room is made first. Then the keys are inserted from the last to the first, as a policy takes a prompt, so that its
beginning is evicted last; if there is no room for all of them, or others take it meanwhile, from the first on. Then the
keys behind the first that got no slots give theirs back. A group that was cleared goes on in its new keyspace: what was
reserved before is of the cleared one, and found to be cleared when it is committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.finding import Finding
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.reservation import Reservation, Wanted, reserve_all
from kvoffloadd.model import I64Array, KeyState

STEP_KEYS = 4096
"""Keys and parts for which one step makes room, or takes slots: a few milliseconds."""

_RESERVED, _NO_SPACE = int(KeyState.RESERVED), int(KeyState.NO_SPACE)
_Slice = list[tuple[int, slice]]
"""Of which groups of the request which keys."""


class Admission:
    """What one request wants, and what of it is reserved so far. Run `steps` to the end for `reservations`, or
    `give_up`. Its groups are distinct, and each names a key once.
    """

    def __init__(self, cache: Cache, request: Sequence[Wanted]) -> None:
        self._cache = cache
        self._request = list(request)
        self._fits = True
        # What is there of its keys, at the beginning or found in a step, is not evicted to make room for the others.
        self._present = Finding(cache, [(wanted.keyspace, wanted.keys) for wanted in request])
        self._made: list[list[tuple[int, Reservation]]] = [[] for _ in request]  # by group: of keys from an index on

    @staticmethod
    def is_large(request: Sequence[Wanted]) -> bool:
        """Whether it takes more than one step."""
        return sum(map(_size, request)) > STEP_KEYS

    @property
    def num_parts(self) -> int:
        """Parts that are reserved by now."""
        return sum(len(made.parts) for group in self._made for _, made in group)

    @property
    def num_held(self) -> int:
        """How often rows are held now."""
        return self._present.num_held

    def steps(self) -> Iterator[None]:
        """Each reserves some. Raises as `reserve_all`."""
        yield from self._make_room()
        slices = list(_slices(self._request))
        if self._fits:
            yield from self._take(slices[::-1])
        if not self._fits:
            yield from self._take(slices)
        for number in range(len(self._request)):
            self._give_back_behind_gap(number)

    def _take(self, slices: list[_Slice]) -> Iterator[None]:
        """Reserve these, in this order."""
        for one in slices:
            wanted = [self._cut(number, keys) for number, keys in one]
            reserved = reserve_all(self._cache, wanted)
            for (number, keys), some, made in zip(one, wanted, reserved, strict=True):
                self._made[number].append((keys.start, made))
                others = (made.states != _RESERVED) & (made.states != _NO_SPACE)
                if others.any():  # some may have been stored meanwhile: the steps that follow must not evict them
                    self._present.hold(self._cache.entries.find(some.keyspace, some.keys[others]))
            without = sum(int(np.count_nonzero(made.states == _NO_SPACE)) for made in reserved)
            if self._fits and without:  # others were faster, or sizes of slots took each other's memory
                self._cache.counters.keys_without_space -= without  # they are tried again, from the first key on
                self._fits = False
                self._free()
                return
            yield

    def reservations(self) -> list[Reservation]:
        """The reservation of each group; the caller owns them from now on."""
        found = [_joined(sorted(made, key=lambda one: one[0])) for made in self._made]
        self._made = [[] for _ in self._request]
        self._present.release()
        return found

    def give_up(self) -> None:
        """Free all that is reserved, and hold nothing any more."""
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
        """Evict until there are free slots for all that the request lacks, or no more keys can go."""
        yield from self._present.steps()
        missing = Counter[int]()
        for wanted, rows in zip(self._request, self._present.rows(), strict=True):
            present = rows[rows >= 0]
            states = self._cache.entries.parts.state[self._cache.entries.records(present, wanted.parts)]
            lacking = len(rows) - len(present) + (states == PartState.EMPTY).sum(axis=0)
            for pages, count in zip(wanted.keyspace.part_pages[wanted.parts].tolist(), lacking.tolist(), strict=True):
                missing[pages] += count
        for pages, count in missing.items():
            while (free := self._cache.tier.num_free(pages)) < count:
                aim = min(count, free + STEP_KEYS)
                found = self._cache.eviction.make_room(pages, aim)
                yield
                if found < aim:
                    self._fits = False
                    break

    def _give_back_behind_gap(self, number: int) -> None:
        """Of one group: whatever is reserved behind the first key that got no slots."""
        states = _joined(sorted(self._made[number], key=lambda one: one[0])).states
        gaps = np.flatnonzero(states == _NO_SPACE)
        if not len(gaps):
            return
        made = []
        for begin, one in self._made[number]:
            behind = one.keys + begin > gaps[0]
            if behind.any():
                self._cache.abort(one.parts[behind])
                lost = np.unique(one.keys[behind])
                one.states[lost] = _NO_SPACE
                self._cache.counters.keys_without_space += len(lost)
                one = Reservation(
                    one.parts[~behind], one.addresses[~behind], one.keys[~behind], one.columns[~behind], one.states
                )
            made.append((begin, one))
        self._made[number] = made


def _size(wanted: Wanted) -> int:
    return len(wanted.keys) * len(wanted.parts)


def _slices(request: Sequence[Wanted]) -> Iterator[_Slice]:
    """All keys of the request, in order, each time about STEP_KEYS parts of them."""
    one, room = _Slice(), STEP_KEYS
    for number, wanted in enumerate(request):
        begin, width = 0, len(wanted.parts)
        while begin < len(wanted.keys):
            end = min(len(wanted.keys), begin + max(1, room // width))
            one.append((number, slice(begin, end)))
            room -= (end - begin) * width
            begin = end
            if room < width:
                yield one
                one, room = _Slice(), STEP_KEYS
    if one:
        yield one


def _joined(made: list[tuple[int, Reservation]]) -> Reservation:
    """Of consecutive keys, in order, each of them from an index on."""
    none: I64Array = np.zeros(0, np.int64)
    return Reservation(
        np.concatenate([none, *(one.parts for _, one in made)]),
        np.concatenate([none.astype(np.uint64), *(one.addresses for _, one in made)]),
        np.concatenate([none, *(one.keys + begin for begin, one in made)]),
        np.concatenate([none, *(one.columns for _, one in made)]),
        np.concatenate([none.astype(np.uint8), *(one.states for _, one in made)]),
    )
