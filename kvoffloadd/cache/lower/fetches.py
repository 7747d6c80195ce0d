"""Fetches: requests wait for keys that a tier below memory has, while batches of them are read into slots.

Event loop only. A tier's threads and processes write only to slots that are reserved here; until a payload is verified
its part is in state RESERVED, which no lookup hits.

A tier may never answer. Windows bound the slots that it could keep. A read that has not begun is cancelled when no
fetch waits for it any more. A read that has begun may write into its slots at any time: if no fetch waits for its end,
they are quarantined until then.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np

from kvoffloadd.cache.lower.window import Window
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.keytable import RowState
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import KEY_BYTES_MAX, BoolArray, I64Array, U32Array, U64Array
from kvoffloadd.scheduling.lanes import DAEMON, Flow
from kvoffloadd.scheduling.turns import Continuation, Turns

SLICE_KEYS = 256
"""The number of keys that one turn of the loop reserves slots for."""

SLICES_PER_WINDOW = 4


class Urgency:
    """The order among the reads of one engine. Plain ints."""

    LOAD: Final = 0  # a job waits
    PIN: Final = 1  # a lease waits
    PREFETCH: Final = 2
    REWRITE: Final = 3  # of a disk's segment that is reclaimed


@dataclass(frozen=True, slots=True, eq=False)
class KeysBelow:
    """Distinct keys of a keyspace that a tier below memory has, or that are under way from there."""

    keyspace: Keyspace
    keys: U64Array
    positions: U32Array  # of each key in its prompt


def keys_below(keyspace: Keyspace, keys: U64Array, first: int, below: BoolArray) -> KeysBelow:
    """Returns the distinct keys of the mask with their positions in the prompt. `first`: that of the first key."""
    indices = np.flatnonzero(below)
    once = np.unique(keys[indices].view(np.dtype((np.void, KEY_BYTES_MAX))).ravel(), return_index=True)[1]
    indices = indices[np.sort(once)]
    return KeysBelow(keyspace, np.ascontiguousarray(keys[indices]), (indices + first).astype(np.uint32))


class Cancellable(Protocol):
    """A read that may not have begun."""

    def cancel(self) -> bool:
        """Returns True if nothing touches its slots from now on, False if it has begun and owns them until it ends."""


@dataclass(slots=True, eq=False)
class PendingRead:
    """Some parts of a batch that are read together."""

    parts: I64Array  # the destination: record numbers in memory
    window: Window[Fetch]
    num_bytes: int  # of the window
    quarantined: bool = False  # no fetch waits for it any more, but the read may still write to its slots


@dataclass(slots=True, eq=False)
class Fetch:
    """A request's wait for keys of a lower tier."""

    urgent: int
    done: Callable[[], None]
    slices: deque[KeysBelow]  # keys that it has not begun with
    flow: Flow
    readings: dict[ReadBatch, list[KeysBelow]] = field(default_factory=dict)  # with keys to begin anew after each
    rows: list[U32Array] = field(default_factory=list)  # fetched rows, held until `done` has returned
    lookups: int = 0  # answers that it waits for, before its keys are known
    idle: bool = False  # it has found `slices` empty
    ended: bool = False  # `done` was called, or never will be
    turn: Continuation | None = None  # with its next slice


@dataclass(slots=True, eq=False)
class ReadBatch:
    """Parts of one keyspace that are being read."""

    id: int
    urgent: int
    flow: Flow
    keyspace: Keyspace
    rows: U32Array  # held until its end
    left: int  # parts that are not settled yet
    waiters: list[Fetch]
    pieces: dict[PendingRead, Cancellable] = field(default_factory=dict)
    cancelled: bool = False  # some parts will not come: no fetch waited for it, or the tier does not answer


class Fetches(ABC):
    """All reads from one lower tier to memory that are under way."""

    def __init__(self, cache: Cache, loop: asyncio.AbstractEventLoop) -> None:
        self._cache = cache
        self._loop = loop
        self._turns = Turns(loop)
        self._readings: dict[int, ReadBatch] = {}
        # By row of memory: the number of the reading that fills it; 0: none.
        self._reading: U32Array = reserve_array((cache.entries.max_rows,), np.uint32)
        self._fetches: set[Fetch] = set()
        self._quarantine: set[PendingRead] = set()
        self._next_id = 1

    # --- tier-specific operations ---

    @abstractmethod
    def _windows_of(self, urgent: int) -> Iterable[Window[Fetch]]:
        """Returns the windows of this urgency."""

    @abstractmethod
    def _all_windows(self) -> Iterable[Window[Fetch]]:
        """Returns all windows."""

    @abstractmethod
    def _start(self, fetch: Fetch, wanted: KeysBelow, woken: Window[Fetch] | None) -> Window[Fetch] | None:
        """Begins to read the keys of a slice, and joins readings of other fetches. Returns a window that has no room
        for it, with nothing changed.
        """

    @abstractmethod
    def _count_given_up(self, piece: PendingRead) -> None:
        """Counts reads that go on without a waiting fetch."""

    @abstractmethod
    def _count_keys(self, number: int) -> None:
        """Counts keys that came whole."""

    @abstractmethod
    def _hurry(self, reading: ReadBatch, fetch: Fetch) -> None:
        """Raises the urgency of a reading that a more urgent fetch, or one of another engine, joins."""

    # --- figures ---

    @property
    def holds(self) -> int:
        """Rows held for readings and for fetches."""
        readings = sum(len(reading.rows) for reading in self._readings.values())
        return readings + sum(len(rows) for fetch in self._fetches for rows in fetch.rows)

    @property
    def reserved(self) -> int:
        """Parts that are being read, or in quarantine."""
        quarantined = sum(len(piece.parts) for piece in self._quarantine)
        return quarantined + sum(reading.left for reading in self._readings.values())

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of slots that can't be used before the tier has answered."""
        return sum(piece.num_bytes for piece in self._quarantine)

    def reset(self, rows: U32Array) -> None:
        """Resets rows that get new keys."""
        self._reading[rows] = 0

    def under_way(self, rows: I64Array) -> BoolArray:
        """Returns which of these memory rows are being read."""
        mask: BoolArray = self._reading[rows] != 0
        return mask

    # --- requests ---

    @changing
    def fetch(self, wanted: list[KeysBelow], urgent: int, done: Callable[[], None], flow: Flow = DAEMON) -> Fetch:
        """Brings these keys into memory, as far as there is room. Calls `done()` once, later: during the call the
        fetched rows are held, and a new lookup finds them. Call `cancel` to stop waiting. `flow`: the flow that pays
        for the lanes.
        """
        fetch = Fetch(urgent, done, self._slices(wanted, urgent), flow)
        self._fetches.add(fetch)
        self._go_on_later(fetch)
        return fetch

    def _slices(self, wanted: list[KeysBelow], urgent: int) -> deque[KeysBelow]:
        slices: deque[KeysBelow] = deque()
        for group in wanted:
            limit_bytes = min(window.limit_bytes for window in self._windows_of(urgent))
            step = min(SLICE_KEYS, max(1, limit_bytes // SLICES_PER_WINDOW // max(1, sum(group.keyspace.part_bytes))))
            for start in range(0, len(group.keys), step):
                span = slice(start, start + step)
                slices.append(KeysBelow(group.keyspace, group.keys[span], group.positions[span]))
        return slices

    @changing
    def cancel(self, fetch: Fetch) -> None:
        """Stops a fetch without calling `done`. Reads without another fetch are cancelled, unless they have begun."""
        if fetch.ended:
            return
        fetch.ended = True
        for reading in list(fetch.readings):
            reading.waiters.remove(fetch)
            if not reading.waiters:
                reading.cancelled = True
                for ticket in list(reading.pieces.values()):
                    ticket.cancel()
        fetch.readings.clear()
        self._let_go(fetch)

    @changing
    def keep(self, fetch: Fetch, rows: U32Array) -> None:
        """Holds these rows during the fetch, which must not evict keys that the same request names."""
        self._hold(fetch, rows)

    # --- one slice a turn ---

    def _go_on_later(self, fetch: Fetch) -> None:
        """Schedules the fetch's next turn: users and engines take turns, however many fetches each has."""
        if fetch.turn is None:
            fetch.turn = Continuation(self._turns, fetch.flow, partial(self._advance, fetch))
        fetch.turn.later()

    @changing
    def _advance(self, fetch: Fetch, woken: Window[Fetch] | None = None) -> None:
        """Begins the next slice. `woken`: the window that the fetch waited for; its turn ends with this call."""
        full = None
        if not fetch.slices:
            fetch.idle = True
            self._check_end(fetch)
        elif (full := self._start(fetch, fetch.slices[0], woken)) is None:
            fetch.slices.popleft()
            self._go_on_later(fetch)
        elif woken is not None:
            full.wait_first(fetch)
        else:
            wanted = fetch.slices[0]
            full.wait(fetch, fetch.flow, len(wanted.keys) * sum(wanted.keyspace.part_bytes))
        if woken is not None and full is not woken:  # there may be room for another waiter
            for window in self._all_windows() if full is None else (woken,):
                self._wake(window)

    def _wake(self, window: Window[Fetch]) -> None:
        """Wakes the next fetch of a window with more room, or with an ended turn."""
        while (fetch := window.next()) is not None:
            if not fetch.ended:
                self._loop.call_soon(self._advance, fetch, window)
                return

    def _join_others(self, fetch: Fetch, wanted: KeysBelow, found: LookupResult) -> None:
        """Holds keys of a slice that are in memory by now, and waits for keys that other fetches read."""
        if len(found.hit_rows):  # these were read or stored meanwhile
            self._hold(fetch, found.hit_rows)
        held = np.flatnonzero((found.rows >= 0) & ~found.hits)
        numbers = self._reading[found.rows[held]]
        for number in distinct(numbers[numbers != 0]).tolist():
            same = held[numbers == number]
            keys = KeysBelow(wanted.keyspace, wanted.keys[same], wanted.positions[same])
            self._join(fetch, self._readings[number], keys)

    # --- readings ---

    def _begin(self, fetch: Fetch, keyspace: Keyspace, parts: I64Array) -> ReadBatch:
        """Begins to read reserved parts of distinct keys, for a fetch."""
        entries = self._cache.entries
        rows = distinct(entries.parts.row[parts])
        reading = ReadBatch(self._next_id, fetch.urgent, fetch.flow, keyspace, rows, len(parts), [])
        self._next_id = self._next_id % 0xFFFFFFFF + 1
        self._readings[reading.id] = reading
        self._reading[rows] = reading.id
        entries.inherited[rows] = 1
        self._cache.hold(rows)
        self._join(fetch, reading, None)
        return reading

    def _settle_read(self, reading: ReadBatch, piece: PendingRead, good: BoolArray, digests: U64Array) -> bool:
        """Ends a read: nothing touches its slots any more, and these of its parts were verified. Returns False if it
        was in quarantine, and is useless.
        """
        if piece.quarantined:
            self._quarantine.remove(piece)
            self._cache.abort(piece.parts)
            return False
        if good.any():
            parts = piece.parts[good]
            generations = self._cache.entries.parts.generation[parts]
            self._cache.commit(parts)
            self._cache.seal(parts, generations, digests[good])
        if not good.all():
            self._abort(reading, piece.parts[~good])
        return True

    def _abort(self, reading: ReadBatch, parts: I64Array) -> None:
        """Frees the slots of parts that did not come."""
        rows = distinct(self._cache.entries.parts.row[parts])
        self._cache.abort(parts)
        self._let_retired_go(reading, rows)

    def _let_retired_go(self, reading: ReadBatch, rows: U32Array) -> None:
        """Unholds keys that are retired before the reading ends: memory does not bound rows without slots."""
        entries = self._cache.entries
        retired = np.intersect1d(rows[entries.state[rows] == RowState.RETIRED], reading.rows)
        reading.rows = np.setdiff1d(reading.rows, retired)
        self._reading[retired] = 0
        self._cache.unhold(retired)

    def _put_in_quarantine(self, reading: ReadBatch, piece: PendingRead) -> None:
        """Quarantines the slots of a read that does not end. Its keys are misses, and can be stored again in other
        slots.
        """
        piece.quarantined = True
        self._quarantine.add(piece)
        self._count_given_up(piece)
        entries = self._cache.entries
        rows = distinct(entries.parts.row[piece.parts])
        entries.retire(entries.live(rows))
        self._let_retired_go(reading, rows)
        self._leave(reading, piece)

    def _leave(self, reading: ReadBatch, piece: PendingRead) -> None:
        del reading.pieces[piece]
        self._give_room(piece)
        self._count_down(reading, len(piece.parts))

    def _give_room(self, piece: PendingRead) -> None:
        piece.window.used_bytes -= piece.num_bytes
        self._wake(piece.window)

    def _count_down(self, reading: ReadBatch, parts: int) -> None:
        reading.left -= parts
        if not reading.left:
            self._end_reading(reading)

    def _end_reading(self, reading: ReadBatch) -> None:
        entries = self._cache.entries
        self._reading[reading.rows] = 0
        whole = entries.live(reading.rows)
        whole = whole[entries.complete(whole)]
        self._count_keys(len(whole))
        del self._readings[reading.id]
        for fetch in reading.waiters:
            self._look_again(fetch, fetch.readings.pop(reading))
            self._hold(fetch, whole)
        self._cache.unhold(reading.rows)
        for fetch in reading.waiters:
            self._check_end(fetch)

    # --- fetches ---

    def _join(self, fetch: Fetch, reading: ReadBatch, wanted: KeysBelow | None) -> None:
        """Makes a fetch wait for a reading. `wanted`: its keys in it, if another fetch has begun the reading."""
        joined = reading in fetch.readings
        again = fetch.readings.setdefault(reading, [])
        if wanted is not None and reading.cancelled:
            again.append(wanted)
        if joined:
            return
        reading.waiters.append(fetch)
        if fetch.urgent < reading.urgent or fetch.flow != reading.flow:
            reading.urgent = min(fetch.urgent, reading.urgent)
            self._hurry(reading, fetch)

    def _look_again(self, fetch: Fetch, wanted: list[KeysBelow]) -> None:
        """Retries keys of a reading that was cancelled before this fetch joined. Only these: unreadable keys would fail
        again. The retries end, since each needs another fetch that began a reading and cancelled it.
        """
        fetch.slices.extend(wanted)
        if wanted and fetch.idle:
            fetch.idle = False
            self._go_on_later(fetch)

    def _hold(self, fetch: Fetch, rows: U32Array) -> None:
        self._cache.hold(rows)
        fetch.rows.append(rows)

    def _check_end(self, fetch: Fetch) -> None:
        if fetch.ended or fetch.slices or fetch.readings or fetch.lookups:
            return
        fetch.ended = True
        fetch.done()
        self._let_go(fetch)

    def _let_go(self, fetch: Fetch) -> None:
        fetch.slices.clear()
        self._fetches.discard(fetch)
        fetch.turn = None  # it refers to the fetch: see `Collector`
        for rows in fetch.rows:
            self._cache.unhold(rows)
        fetch.rows.clear()
