"""Collects uses of keys that were answered and not counted yet. Event loop only.

To count a use in the eviction order takes longer than the rest of a `pin`, and no answer depends on it. So uses wait
here for a few milliseconds, and are counted together, which takes little longer than one. Before an operation that
reads or changes the order, or removes keys, they are counted at once, so the order is the same as without the wait. A
key that several requests use in this time counts as used once, by the last of them: the requests are likely to have one
cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.claimedkeys import ClaimedKeys
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.lowertier import LowerTier
from kvoffloadd.cache.memory.namespace import Keyspace, Queue
from kvoffloadd.cache.memory.parttable import PartTable
from kvoffloadd.model import BoolArray, I64Array, KeyState, U32Array

KEYS_MAX = 1 << 16
"""The maximum number of keys that wait, so that counting them takes a few milliseconds."""

PIECE_KEYS = 1 << 13
"""The size of the pieces in which more keys of one group are counted: each piece as a separate prompt, the last piece
first, so that the beginning is evicted last.
"""

STEP_KEYS = 1 << 12
"""The number of keys that one turn of the event loop counts (or one piece, if it is larger), unless the order is
needed. It is small because the rows are not in the processor's caches while copies run.
"""

Used = tuple[Keyspace, LookupResult, int]
"""A group of a request, the lookup that has its hits, and the position of its first key in the prompt."""


class DeferredTouches:
    """Collects uses and losses of keys, and counts them later.

    `parts`, `first`, `lost`: columns of the table of keys. `touch`: notes a use of slots. `claimed`: what claims keep,
    which stays out of the eviction order. `lower`: the tiers below.
    `wake`: called when the first use waits; `settle_due` must be called soon then.
    """

    def __init__(
        self,
        parts: PartTable,
        first: U32Array,
        lost: BoolArray,
        touch: Callable[[U32Array], None],
        claimed: ClaimedKeys,
        lower: list[LowerTier],
    ) -> None:
        self._touch = touch
        self._claimed = claimed
        self._parts = parts
        self._first = first
        self._lost = lost
        self._lower = lower
        self._waiting: deque[tuple[Used, bool]] = deque()  # the flag: they are lost, not used
        self._num_keys = 0
        self.wake: Callable[[], object] = lambda: None
        self._is_awake = False

    @property
    def waiting(self) -> bool:
        """Returns whether uses were added that are not counted yet."""
        return bool(self._waiting)

    @changing
    def add(self, groups: Sequence[Used]) -> None:
        """Adds the uses of one request: the keys that hit, of each of its groups."""
        self._add(groups, lost=False)

    def _add(self, groups: Sequence[Used], *, lost: bool) -> None:
        for used in groups:
            self._waiting += [(piece, lost) for piece in _pieces(used)]
            self._num_keys += len(used[1].rows)
        while self._num_keys > KEYS_MAX:
            self._settle_some()
        if not self._is_awake:
            self._is_awake = True
            self.wake()

    @changing
    def add_prompt(self, groups: Sequence[Used], reach: int, used: Sequence[Used] | None = None) -> None:
        """Adds a request for all keys of a prompt that can restore its first `reach` tokens. If a later key is gone,
        the hits after it serve no request, now or later, unless it is stored again: these hits are lost until they are
        used. Keys that are in memory and do not hit, since they are in doubt or may not be held, come back and are not
        gone.

        `used`: the same groups, with those hits that the request uses now; None: all.
        """
        used = groups if used is None else used
        gone = _gone_from(groups, reach)
        if not gone or any((lookup.states == KeyState.PENDING).any() for _, lookup, _ in groups):
            return self._add(used, lost=False)  # no key is gone, or it is on its way
        end = max(reach, min(gone))
        self._add(_split(groups, end)[1], lost=True)
        self._add(_split(used, end)[0], lost=False)

    def settle(self) -> None:
        """Counts all uses that were added."""
        if self._waiting:
            waiting, self._waiting, self._num_keys = self._waiting, deque(), 0
            self._count(waiting)

    def settle_losses(self) -> None:
        """Counts all waiting uses if some keys among them are lost. A store calls this; mostly, there are none."""
        if any(lost for _, lost in self._waiting):
            self.settle()

    @changing
    def settle_due(self) -> bool:
        """Counts some of the waiting uses. Returns whether others are left, so that this must be called again."""
        self._settle_some()
        self._is_awake = bool(self._waiting)
        return self._is_awake

    def _settle_some(self) -> None:
        """Counts the oldest uses: one piece, and more up to STEP_KEYS."""
        batch, room = list[tuple[Used, bool]](), STEP_KEYS
        while self._waiting and (not batch or len(self._waiting[0][0][1].rows) <= room):
            batch.append(self._waiting.popleft())
            room -= len(batch[-1][0][1].rows)
        self._num_keys -= STEP_KEYS - room
        self._count(batch)

    def _count(self, waiting: Iterable[tuple[Used, bool]]) -> None:
        for lost, group in groupby(waiting, key=itemgetter(1)):
            by_queue: dict[int, tuple[Queue, list[Used]]] = {}
            for used, _ in group:
                queue = used[0].queue
                if queue is not None and used[1].num_hits:
                    by_queue.setdefault(id(queue), (queue, []))[1].append(used)
            (self._lose if lost else self._use)(by_queue.values())

    def _lose(self, queues: Iterable[tuple[Queue, list[Used]]]) -> None:
        for queue, groups in queues:
            rows, _, _ = _joined(groups)
            self._lost[rows] = True
            queue.policy.lose(rows)
            if self._claimed and len(kept := rows[self._claimed.is_claimed(rows)]):
                queue.policy.set_aside(kept)
            for lower in self._lower:
                lower.lost(rows)

    def _use(self, queues: Iterable[tuple[Queue, list[Used]]]) -> None:
        for queue, groups in queues:
            rows, places, begins = _joined(groups)
            self._lost[rows] = False
            queue.policy.touch(rows, places, begins)
            if self._claimed and len(kept := self._claimed.used(rows)):
                queue.policy.set_aside(kept)
            self._touch(self._parts.page[self._first[rows]])
            for lower in self._lower:
                lower.used(rows)


def _split(groups: Sequence[Used], reach: int) -> tuple[list[Used], list[Used]]:
    """Splits the groups at this number of tokens: returns the groups up to there, and those after it that have hits."""
    before, behind = list[Used](), list[Used]()
    for keyspace, lookup, first in groups:
        boundary = max(0, reach // keyspace.schema.tokens_per_key - first)
        if lookup.hits[boundary:].any():
            behind.append((keyspace, _cut(lookup, slice(boundary, None)), first + boundary))
            lookup = _cut(lookup, slice(boundary))
        before.append((keyspace, lookup, first))
    return before, behind


def _gone_from(groups: Sequence[Used], reach: int) -> list[int]:
    """Returns, for each group that lacks keys after the first `reach` tokens, where the first missing key begins, in
    tokens. A window may lack earlier keys, which it does not need.
    """
    found = []
    for keyspace, lookup, first in groups:
        if lookup.num_hits == len(lookup.hits):
            continue
        tokens, begin = keyspace.schema.tokens_per_key, max(0, reach // keyspace.schema.tokens_per_key - first)
        absent = np.flatnonzero(lookup.rows[begin:] < 0)
        if len(absent):
            found.append((first + begin + int(absent[0])) * tokens)
    return found


def _cut(lookup: LookupResult, keys: slice) -> LookupResult:
    return LookupResult(lookup.rows[keys], lookup.states[keys], lookup.hits[keys])


def _pieces(used: Used) -> list[Used]:
    """Splits the same uses into pieces, the last one first."""
    keyspace, lookup, first = used
    if len(lookup.rows) <= PIECE_KEYS:
        return [used]
    pieces = [slice(begin, begin + PIECE_KEYS) for begin in range(0, len(lookup.rows), PIECE_KEYS)][::-1]
    return [(keyspace, _cut(lookup, piece), first + piece.start) for piece in pieces]


def _joined(groups: list[Used]) -> tuple[U32Array, U32Array, I64Array | None]:
    """Returns the rows of the keys that hit, each once, at its last occurrence; the position of each in its prompt; and
    where each group begins in them. Every group has a hit.
    """
    hits = [np.flatnonzero(lookup.hits) for _, lookup, _ in groups]
    rows = np.concatenate([lookup.rows[indices] for (_, lookup, _), indices in zip(groups, hits, strict=True)])
    places = np.concatenate([indices + first for (_, _, first), indices in zip(groups, hits, strict=True)])
    begins = None
    if len(hits) > 1:
        counts = np.array([len(indices) for indices in hits], np.int64)
        begins = np.cumsum(counts) - counts
    ordered = np.sort(rows)
    if (ordered[1:] == ordered[:-1]).any():
        # Finds the last occurrence in the reversed order. So the common keys of two prompts count as used after the
        # keys that only the earlier one has.
        last = np.sort(len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1])
        rows, places = rows[last], places[last]
        if begins is not None:
            begins = distinct(np.searchsorted(last, begins))
            begins = begins[begins < len(rows)]
    return rows.astype(np.uint32), places.astype(np.uint32), begins
