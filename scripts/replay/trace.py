"""Request traces, and how many hits a cache of a given size makes on them.

A trace is a list of requests; a request is the array of its block ids in prompt order, none of them twice. Prefix rule:
a reference hits when its block and all before it in the request are held. After each request the cache wants all its
blocks: those that are held are touched, the others stored, and blocks of the request under way are never victims.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.cache.policy import create_policy
from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array
from kvoffloadd.planner.trace import mixed, read_requests

NEVER = 1 << 62
SOON_SHARE = 0.02
"""Of the requests: what is used again within as many is used again soon."""


class Signal(Enum):
    """What a client reports of a request's blocks when it has ended."""

    NONE = "none"
    SOON = "soon"
    DROP = "drop"


def load_trace(path: Path) -> list[I64Array]:
    """The requests of a file that `planner.trace` reads, their blocks numbered from 0 on. Raises ConfigError."""
    return read_requests(path).numbered()


def num_blocks(requests: list[I64Array]) -> int:
    """Distinct blocks."""
    return len(np.unique(np.concatenate(requests))) if requests else 0


def num_references(requests: list[I64Array]) -> int:
    """Blocks asked for, over all requests."""
    return sum(len(r) for r in requests)


def key_hashes(ids: I64Array, seed: int = 0) -> U64Array:
    """A well-mixed u64 per id (the finaliser of splitmix64)."""
    return mixed(ids.astype(np.uint64), seed)


class PolicyCache:
    """A cache of `capacity` rows that evicts by a policy. Holds no bytes. Ids are below `ids_end`."""

    def __init__(self, policy: Policy, capacity: int, ids_end: int, seed: int = 0) -> None:
        self._policy = policy
        self._row = np.full(ids_end, -1, np.int64)
        self._owner = np.zeros(capacity, np.int64)
        self._free = np.arange(capacity, dtype=np.uint32)[::-1].copy()
        self._num_free = capacity
        self._busy = np.zeros(capacity, np.bool_)
        self._seed = seed

    def keep(self, ids: I64Array, *, soon: bool) -> None:
        """A client reports that these blocks of a prompt will be used again soon, or not at all."""
        rows = self._row[ids]
        self._policy.keep(rows[rows >= 0].astype(np.uint32), soon=soon)

    def request(self, ids: I64Array) -> int:
        """Serve one request, store what it lacked. Returns its hits."""
        positions = np.arange(len(ids), dtype=np.uint32)
        rows = self._row[ids]
        held = rows >= 0
        hits = len(ids) if held.all() else int(held.argmin())
        touched = rows[held].astype(np.uint32)
        self._policy.touch(touched, positions[held])
        missing = ids[~held]
        self._make_room(len(missing) - self._num_free, touched)
        stored = missing[: self._num_free]
        if len(stored):
            self._num_free -= len(stored)
            new = self._free[self._num_free : self._num_free + len(stored)].copy()
            self._row[stored] = new
            self._owner[new] = stored
            self._policy.insert(new, key_hashes(stored, self._seed), positions[~held][: len(stored)])
        return hits

    def _make_room(self, wanted: int, touched: U32Array) -> None:
        if wanted <= 0:
            return
        self._busy[touched] = True
        victims = self._policy.victims(wanted, self._evictable)
        self._busy[touched] = False
        self._policy.readmit(touched)
        self._policy.remove(victims)
        self._row[self._owner[victims]] = -1
        self._free[self._num_free : self._num_free + len(victims)] = victims
        self._num_free += len(victims)

    def _evictable(self, rows: U32Array) -> BoolArray:
        return ~self._busy[rows]


def simulate(
    requests: list[I64Array],
    policy: str | Callable[[int, int], Policy],
    capacity: int,
    *,
    seed: int = 0,
    signals: Sequence[Signal] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Hits of a cache with `capacity` blocks under a policy: its name, or a constructor `(capacity_rows, max_rows)`.

    `seed` picks the hashes of the blocks, which only ghost lists see. `signals`: what clients report of each request's
    blocks when it has ended. `progress` gets the number of requests that were served since its last call.
    """
    made = create_policy(policy, capacity, capacity) if isinstance(policy, str) else policy(capacity, capacity)
    known, ids_from_0 = np.unique(np.concatenate(requests) if requests else [], return_inverse=True)
    cache = PolicyCache(made, capacity, len(known), seed)
    hits = 0
    prompts = np.split(ids_from_0, np.cumsum([len(r) for r in requests])[:-1])
    for ids, signal in zip(prompts, signals or [Signal.NONE] * len(prompts), strict=True):
        hits += cache.request(ids)
        if signal is not Signal.NONE:
            cache.keep(ids, soon=signal is Signal.SOON)
        if progress is not None:
            progress(1)
    return hits


def perfect_signals(requests: list[I64Array]) -> list[Signal]:
    """What one would say who knew the future: whether another request goes on where this one ends.

    It does if it has this one's last full block; the last block may be a partial one, which never comes back.
    """
    signals, next_use = [Signal.NONE] * len(requests), dict[int, int]()
    for number in range(len(requests) - 1, -1, -1):
        ids = requests[number].tolist()
        after = next_use.get(ids[max(0, len(ids) - 2)], NEVER) if ids else NEVER
        if after == NEVER:
            signals[number] = Signal.DROP
        elif after - number <= SOON_SHARE * len(requests):
            signals[number] = Signal.SOON
        next_use.update(dict.fromkeys(ids, number))
    return signals


def half_right(signals: list[Signal], seed: int = 0) -> list[Signal]:
    """The same, but every second request, at random, has the signal of another one."""
    random = np.random.default_rng(seed)
    wrong = np.flatnonzero(random.random(len(signals)) < 0.5)
    mixed = list(signals)
    for at, other in zip(wrong.tolist(), random.permutation(wrong).tolist(), strict=True):
        mixed[at] = signals[other]
    return mixed


def _prefix_hits(ids: list[int], held: dict[int, Any]) -> int:
    hits = 0
    while hits < len(ids) and ids[hits] in held:
        hits += 1
    return hits


def lru_hits(requests: list[I64Array], capacity: int) -> int:
    """Hits of exact LRU, worked out without the policies' code: what theirs is checked against.

    A request's held blocks are touched last block first; then room is made; then the others are inserted, last first.
    """
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        ids = request.tolist()
        hits += _prefix_hits(ids, held)
        missing = [i for i in ids if i not in held]
        num_held = len(ids) - len(missing)
        for i in reversed(ids):
            if i in held:
                held.move_to_end(i)
        while len(held) > num_held and len(held) + len(missing) > capacity:
            held.popitem(last=False)
        for i in reversed(missing[: capacity - len(held)]):
            held[i] = None
    return hits


def belady_hits(requests: list[I64Array], capacity: int) -> int:
    """Hits of Belady's rule: the block whose next use is the farthest goes.

    Of blocks with the same next request, the last in its prompt goes first. Blocks of the request under way may go too,
    which is to bypass the cache: after each request it holds those blocks, of all held and all of the request, that
    are used next. With the prefix rule this is no proven optimum.
    """
    uses: dict[int, list[tuple[int, int]]] = {}
    for number in range(len(requests) - 1, -1, -1):
        for position, i in enumerate(requests[number].tolist()):
            uses.setdefault(i, []).append((number, position))
    held: dict[int, tuple[int, int]] = {}
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for request in requests:
        ids = request.tolist()
        hits += _prefix_hits(ids, held)
        for i in ids:
            uses[i].pop()
            held[i] = number, position = uses[i][-1] if uses[i] else (NEVER, 0)
            heapq.heappush(farthest, (-number, -position, i))
        while len(held) > capacity:
            number, position, i = heapq.heappop(farthest)
            if held.get(i) == (-number, -position):  # else the block was used since, or is gone
                del held[i]
    return hits


def ceiling_hits(requests: list[I64Array]) -> int:
    """Hits of a cache that never evicts: the references whose block, and all before it, were asked for before."""
    held: dict[int, None] = {}
    hits = 0
    for request in requests:
        ids = request.tolist()
        hits += _prefix_hits(ids, held)
        held.update(dict.fromkeys(ids))
    return hits
