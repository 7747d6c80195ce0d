"""Uses of keys that were answered and not counted yet. Event loop only.

To count a use in the eviction order takes longer than all else of a `pin`, and no answer depends on it. So uses wait
here for some milliseconds, and are counted together, which takes little longer than one. Before anything that reads or
changes the order, or takes keys away, they are counted at once: so the order is as if none had waited. A key that
several requests use in this time counts as used once, by the last of them: they are likely to have one cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.lowertier import LowerTier
from kvoffloadd.cache.memory.namespace import Keyspace, Queue
from kvoffloadd.cache.memory.parttable import PartTable
from kvoffloadd.model import BoolArray, I64Array, KeyState, U32Array

KEYS_MAX = 1 << 16
"""So many keys do not wait any longer, so that counting them takes some milliseconds."""

PIECE_KEYS = 1 << 13
"""More keys of one group are counted in pieces of so many, each as a prompt of its own, the last piece first, so that
the beginning is evicted last.
"""

STEP_KEYS = 1 << 11
"""Keys that one turn of the event loop counts (or one piece, if that is larger), unless the order is needed. So few
because their rows are not in the processor's caches while copies run.
"""

Used = tuple[Keyspace, LookupResult, int]
"""A group of a request, whose hits it uses, and the position of its first key in the prompt."""


class Uses:
    """`parts`, `first`, `lost`: columns of the table of keys. `touch`: notes a use of slots. `lower`: the tiers below.

    `wake`: called when the first use waits; `settle_due` is to be called soon then.
    """

    def __init__(
        self,
        parts: PartTable,
        first: U32Array,
        lost: BoolArray,
        touch: Callable[[U32Array], None],
        lower: list[LowerTier],
    ) -> None:
        self._touch = touch
        self._parts = parts
        self._first = first
        self._lost = lost
        self._lower = lower
        self._waiting: deque[tuple[Used, bool]] = deque()  # and whether they are lost instead
        self._num_keys = 0
        self.wake: Callable[[], object] = lambda: None
        self._is_awake = False

    @property
    def waiting(self) -> bool:
        """Whether uses were added that are not counted yet."""
        return bool(self._waiting)

    @changing
    def add(self, groups: Sequence[Used]) -> None:
        """One request uses the keys that hit, of each of its groups."""
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
        """One request asks for all keys of a prompt, and its first `reach` tokens can be restored. If something behind
        them is gone, the hits behind that serve nobody, now or later, unless it is stored again: these keys are lost,
        until they are used. What is there and does not hit, since it is in doubt or may not be held, comes back.

        `used`: the same groups, with those hits that the request uses now; None: all.
        """
        used = groups if used is None else used
        gone = _gone_from(groups, reach)
        if not gone or any((lookup.states == KeyState.PENDING).any() for _, lookup, _ in groups):
            return self.add(used)  # nothing is gone, or it comes just now
        end = max(reach, min(gone))
        self._add(_split(groups, end)[1], lost=True)
        self._add(_split(used, end)[0], lost=False)

    def settle(self) -> None:
        """Count all uses that were added."""
        if self._waiting:
            waiting, self._waiting, self._num_keys = self._waiting, deque(), 0
            self._count(waiting)

    def settle_losses(self) -> None:
        """Count all that waits, if keys are lost by some of it. A store asks for this: mostly, nothing is."""
        if any(lost for _, lost in self._waiting):
            self.settle()

    @changing
    def settle_due(self) -> bool:
        """Count some of those that wait. Returns whether others are left, so that this is to be called again."""
        self._settle_some()
        self._is_awake = bool(self._waiting)
        return self._is_awake

    def _settle_some(self) -> None:
        """Count those that were added first: one piece, and more up to STEP_KEYS."""
        some, room = list[tuple[Used, bool]](), STEP_KEYS
        while self._waiting and (not some or len(self._waiting[0][0][1].rows) <= room):
            some.append(self._waiting.popleft())
            room -= len(some[-1][0][1].rows)
        self._num_keys -= STEP_KEYS - room
        self._count(some)

    def _count(self, waiting: Iterable[tuple[Used, bool]]) -> None:
        for lost, some in groupby(waiting, key=itemgetter(1)):
            by_queue: dict[int, tuple[Queue, list[Used]]] = {}
            for used, _ in some:
                queue = used[0].queue
                if queue is not None and used[1].num_hits:
                    by_queue.setdefault(id(queue), (queue, []))[1].append(used)
            (self._lose if lost else self._use)(by_queue.values())

    def _lose(self, queues: Iterable[tuple[Queue, list[Used]]]) -> None:
        for queue, groups in queues:
            rows, _, _ = _joined(groups)
            self._lost[rows] = True
            queue.policy.lose(rows)
            for lower in self._lower:
                lower.lost(rows)

    def _use(self, queues: Iterable[tuple[Queue, list[Used]]]) -> None:
        for queue, groups in queues:
            rows, places, begins = _joined(groups)
            self._lost[rows] = False
            queue.policy.touch(rows, places, begins)
            self._touch(self._parts.page[self._first[rows]])
            for lower in self._lower:
                lower.used(rows)


def _split(groups: Sequence[Used], reach: int) -> tuple[list[Used], list[Used]]:
    """The same groups up to so many tokens, and those behind with hits."""
    before, behind = list[Used](), list[Used]()
    for keyspace, lookup, first in groups:
        at = max(0, reach // keyspace.schema.tokens_per_key - first)
        if lookup.hits[at:].any():
            behind.append((keyspace, _cut(lookup, slice(at, None)), first + at))
            lookup = _cut(lookup, slice(at))
        before.append((keyspace, lookup, first))
    return before, behind


def _gone_from(groups: Sequence[Used], reach: int) -> list[int]:
    """Where the first key behind so many tokens begins that memory lacks, in tokens, of each group that lacks any. A
    window lacks keys before that, which it has no need of.
    """
    found = []
    for keyspace, lookup, first in groups:
        tokens, begin = keyspace.schema.tokens_per_key, max(0, reach // keyspace.schema.tokens_per_key - first)
        absent = np.flatnonzero(lookup.rows[begin:] < 0)
        if len(absent):
            found.append((first + begin + int(absent[0])) * tokens)
    return found


def _cut(lookup: LookupResult, keys: slice) -> LookupResult:
    return LookupResult(lookup.rows[keys], lookup.states[keys], lookup.hits[keys])


def _pieces(used: Used) -> list[Used]:
    """The same uses, in pieces, the last one first."""
    keyspace, lookup, first = used
    if len(lookup.rows) <= PIECE_KEYS:
        return [used]
    pieces = [slice(begin, begin + PIECE_KEYS) for begin in range(0, len(lookup.rows), PIECE_KEYS)][::-1]
    return [(keyspace, _cut(lookup, one), first + one.start) for one in pieces]


def _joined(groups: list[Used]) -> tuple[U32Array, U32Array, I64Array | None]:
    """Rows of the keys that hit, each once, where it comes last; the position of each in its prompt, and where each
    group begins in them. Every group has a hit.
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
        # The first in reverse. So what two prompts have in common is used after what the earlier one has alone.
        last = np.sort(len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1])
        rows, places = rows[last], places[last]
        if begins is not None:
            begins = distinct(np.searchsorted(last, begins))
            begins = begins[begins < len(rows)]
    return rows.astype(np.uint32), places.astype(np.uint32), begins
