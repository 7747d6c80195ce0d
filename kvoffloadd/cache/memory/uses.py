"""Uses of keys that were answered and not counted yet. Event loop only.

To count a use in the eviction order takes longer than all else of a `pin`, and no answer depends on it. So uses wait
here for some milliseconds, and are counted together, which takes little longer than one. Before anything that reads or
changes the order, or takes keys away, they are counted at once: so the order is as if none had waited. A key that
several requests use in this time counts as used once, by the last of them: they are likely to have one cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.lowertier import LowerTier
from kvoffloadd.cache.memory.namespace import Keyspace, Queue
from kvoffloadd.cache.memory.parttable import PartTable
from kvoffloadd.model import I64Array, U32Array

KEYS_MAX = 1 << 16
"""So many keys do not wait any longer, so that counting them takes some milliseconds."""

STEP_KEYS = 1 << 13
"""Keys that one turn of the event loop counts, if nothing needs the order. More keys of one request are counted in
pieces of so many, each as a prompt of its own, the last piece first, so that the beginning is evicted last.
"""

Used = tuple[Keyspace, LookupResult, int]
"""A group of a request, whose hits it uses, and the position of its first key in the prompt."""


class Uses:
    """`parts`, `first`: columns of the table of keys. `touch`: notes a use of slots. `lower`: the tiers below.

    `wake`: called when the first use waits; `settle_due` is to be called soon then.
    """

    def __init__(
        self, parts: PartTable, first: U32Array, touch: Callable[[U32Array], None], lower: list[LowerTier]
    ) -> None:
        self._touch = touch
        self._parts = parts
        self._first = first
        self._lower = lower
        self._waiting: deque[Used] = deque()
        self._num_keys = 0
        self.wake: Callable[[], object] = lambda: None
        self._is_awake = False

    @property
    def waiting(self) -> bool:
        """Whether uses were added that are not counted yet."""
        return bool(self._waiting)

    def add(self, groups: Sequence[Used]) -> None:
        """One request uses the keys that hit, of each of its groups."""
        for used in groups:
            self._waiting += _pieces(used)
            self._num_keys += len(used[1].rows)
        while self._num_keys > KEYS_MAX:
            self._settle_some()
        if not self._is_awake:
            self._is_awake = True
            self.wake()

    def settle(self) -> None:
        """Count all uses that were added."""
        if self._waiting:
            waiting, self._waiting, self._num_keys = self._waiting, deque[Used](), 0
            self._count(waiting)

    def settle_due(self) -> bool:
        """Count some of those that wait. Returns whether others are left, so that this is to be called again."""
        self._settle_some()
        self._is_awake = bool(self._waiting)
        return self._is_awake

    def _settle_some(self) -> None:
        """Count those that were added first, STEP_KEYS or so."""
        some, room = list[Used](), STEP_KEYS
        while self._waiting and (not some or len(self._waiting[0][1].rows) <= room):
            some.append(self._waiting.popleft())
            room -= len(some[-1][1].rows)
        self._num_keys -= STEP_KEYS - room
        self._count(some)

    def _count(self, waiting: Iterable[Used]) -> None:
        queues: dict[int, tuple[Queue, list[Used]]] = {}
        for used in waiting:
            queue = used[0].queue
            if queue is not None and used[1].num_hits:
                queues.setdefault(id(queue), (queue, []))[1].append(used)
        for queue, groups in queues.values():
            rows, places, begins = _joined(groups)
            queue.policy.touch(rows, places, begins)
            self._touch(self._parts.page[self._first[rows]])
            for lower in self._lower:
                lower.used(rows)


def _pieces(used: Used) -> list[Used]:
    """The same uses, in pieces of at most STEP_KEYS keys, the last one first."""
    keyspace, lookup, first = used
    if len(lookup.rows) <= STEP_KEYS:
        return [used]
    pieces = [slice(begin, begin + STEP_KEYS) for begin in range(0, len(lookup.rows), STEP_KEYS)][::-1]
    rows, states, hits = lookup
    return [(keyspace, LookupResult(rows[one], states[one], hits[one]), first + one.start) for one in pieces]


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
