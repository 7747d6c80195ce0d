"""Promotion: keys on disk are read into memory slots, verified, and only then served.

Event loop only. The read lanes of the disk's roots write into slots that are reserved here, and nowhere else; until a
payload is verified its part is in state WRITING, which nobody can read.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from kvoffloadd.cache.ghosts import Reason
from kvoffloadd.cache.index import distinct
from kvoffloadd.lanes import DAEMON, Flow
from kvoffloadd.model import KeyState
from kvoffloadd.tiers.disk.records import DAMAGED, OK, READ

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffloadd.cache.disk import Disk
    from kvoffloadd.cache.namespace import Space
    from kvoffloadd.lanes import Ticket
    from kvoffloadd.model import BoolArray, I64Array, U8Array, U32Array, U64Array
    from kvoffloadd.tiers.disk.root import Root

log = logging.getLogger(__name__)

SLICE_KEYS = 256
"""Keys that one turn of the loop reserves slots for."""

PIECE_BYTES = 4 << 20
PIECE_RECORDS = 128
"""What one ticket of a read lane reads at most."""

_RESERVED, _HIT = int(KeyState.RESERVED), int(KeyState.HIT)


class Urgency:
    """Of reads of one engine: what a job waits for, what a lease waits for, the rest. Plain ints."""

    LOAD: Final = 0
    PIN: Final = 1
    PREFETCH: Final = 2
    REWRITE: Final = 3
    VERIFY: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Away:
    """Keys of a space that are on disk, or on their way from there; `positions`: where each stands in its prompt."""

    space: Space
    keys: U64Array
    positions: U32Array


@dataclass(slots=True, eq=False)
class Fetch:
    """Somebody waits for keys. `rows`: what came, held until `done` has returned. `ended`: `done` was called, or never
    will be.
    """

    urgent: int
    done: Callable[[], None]
    slices: deque[Away]
    flow: Flow
    waiting: int = 0
    rows: list[U32Array] = field(default_factory=list)
    ended: bool = False


@dataclass(slots=True, eq=False)
class Reading:
    """Parts of one space that are being read. `rows` are held until its end; `left` parts are not settled yet."""

    id: int
    urgent: int
    flow: Flow
    rows: U32Array
    left: int
    waiters: list[Fetch]
    tickets: list[tuple[Root, Ticket]] = field(default_factory=list)


@dataclass(slots=True)
class PromotionCounters:
    """Since the start. `damaged`: records that did not verify; `unreadable`: those the disk gave an error for."""

    keys: int = 0
    bytes: int = 0
    without_space: int = 0
    damaged: int = 0
    unreadable: int = 0


class Promotion:
    """All that is on its way from disk to memory."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._cache = disk.cache
        self.counters = PromotionCounters()
        self._readings: dict[int, Reading] = {}
        self._fetches: set[Fetch] = set()
        self._next_id = 1

    @property
    def holds(self) -> int:
        """Rows held for what is being read, and for whoever waits."""
        readings = sum(len(reading.rows) for reading in self._readings.values())
        return readings + sum(len(rows) for fetch in self._fetches for rows in fetch.rows)

    @property
    def reserved(self) -> int:
        """Parts that are being read."""
        return sum(reading.left for reading in self._readings.values())

    def under_way(self, rows: I64Array) -> BoolArray:
        """Which of these memory rows are being read from disk."""
        found: BoolArray = self._cache.entries.reading[rows] != 0
        return found

    def fetch(self, away: list[Away], urgent: int, done: Callable[[], None], flow: Flow = DAEMON) -> Fetch:
        """Bring these keys into memory, as far as there is room. `done()` is called once, later: what came is held
        meanwhile, and looked up again tells what it was. Pair with `cancel` if nobody waits any more. `flow`: who asks.
        """
        slices: deque[Away] = deque()
        for one in away:
            for at in range(0, len(one.keys), SLICE_KEYS):
                span = slice(at, at + SLICE_KEYS)
                slices.append(Away(one.space, one.keys[span], one.positions[span]))
        fetch = Fetch(urgent, done, slices, flow)
        self._fetches.add(fetch)
        self._disk.loop.call_soon(self._advance, fetch)
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        """`done` is not called any more. What is being read goes on."""
        if not fetch.ended:
            fetch.ended = True
            self._let_go(fetch)

    # --- one slice a turn ---

    def _advance(self, fetch: Fetch) -> None:
        if fetch.ended:
            return
        if fetch.slices:
            self._start(fetch, fetch.slices.popleft())
            self._disk.loop.call_soon(self._advance, fetch)
        else:
            self._check_end(fetch)

    def _start(self, fetch: Fetch, away: Away) -> None:
        cache, space = self._cache, away.space
        if space.retired:
            return  # cleared meanwhile
        found = cache.find(space, away.keys)
        if len(found.hit_rows):  # somebody brought them meanwhile
            self._hold(fetch, found.hit_rows)
        held = found.rows[(found.rows >= 0) & ~found.hits]
        for number in distinct(cache.entries.reading[held]).tolist():
            if number:
                self._join(fetch, self._readings[number])
        if space.shelf is None:
            return
        missing = np.flatnonzero(found.states == 0)
        rows = self._disk.catalog.find(space.shelf, away.keys[missing])
        there = rows >= 0
        at, rows = missing[there], rows[there]
        if len(at):
            self._disk.catalog.mark_used(rows)
            self._read(fetch, Away(space, away.keys[at], away.positions[at]), rows)

    def _read(self, fetch: Fetch, away: Away, catalog_rows: I64Array) -> None:
        """Reserve slots and read into them."""
        cache, catalog, space = self._cache, self._disk.catalog, away.space
        wanted = np.arange(space.schema.parts, dtype=np.uint16)
        reservation = cache.reserve(space, away.keys, wanted, 0, positions=away.positions)
        mine = reservation.states == _RESERVED
        self.counters.without_space += int((reservation.states > _RESERVED).sum())
        parts = reservation.parts
        if not len(parts):
            return
        cache.begin(parts)
        rows = distinct(cache.entries.parts.row[parts])
        reading = Reading(self._next_id, fetch.urgent, fetch.flow, rows, len(parts), [])
        self._next_id = self._next_id % 0xFFFFFFFF + 1
        self._readings[reading.id] = reading
        cache.entries.reading[rows] = reading.id
        cache.entries.inherited[rows] = 1
        cache.hold(rows)
        self._join(fetch, reading)
        # Which key each part belongs to: rows are distinct, since the keys are.
        of_key = cache.entries.find(space, away.keys[mine])
        order = np.argsort(of_key)
        key_of_part = order[np.searchsorted(of_key[order], cache.entries.parts.row[parts])]
        numbers = parts - cache.entries.first[cache.entries.parts.row[parts]]
        records = catalog.first[catalog_rows[mine]][key_of_part].astype(np.int64) + numbers
        reads = np.zeros(len(parts), READ)
        reads["page"] = catalog.page[records]
        reads["part"] = numbers
        reads["payload_bytes"] = np.asarray(space.part_bytes, np.int64)[numbers]
        reads["address"] = cache.payload_addresses(parts)
        reads["key"] = away.keys[mine][key_of_part]
        for segment, piece in pieces(catalog.segment[records], reads):
            self._submit(reading, space, segment, parts[piece], records[piece], reads[piece])

    def _submit(
        self, reading: Reading, space: Space, segment: int, parts: I64Array, records: I64Array, reads: np.ndarray
    ) -> None:
        settle = partial(self._settle, reading, space, segment, parts, records, reads)
        place = self._disk.segment(segment)
        if place is None or space.shelf is None:
            self._disk.loop.call_soon(settle, np.full(len(parts), 2, np.uint8), np.zeros((len(parts), 2), np.uint64))
            return
        root, found = place
        ticket = root.reader.read(found, space.shelf.name, reads, reading.urgent, settle, reading.flow)
        reading.tickets.append((root, ticket))

    def _settle(
        self,
        reading: Reading,
        space: Space,
        segment: int,
        parts: I64Array,
        records: I64Array,
        reads: np.ndarray,
        status: U8Array,
        digests: U64Array,
    ) -> None:
        cache, catalog = self._cache, self._disk.catalog
        good = status == OK
        if good.any():
            generations = cache.entries.parts.generation[parts[good]]
            cache.commit(parts[good])
            cache.seal(parts[good], generations, digests[good])
            self.counters.bytes += int(reads["payload_bytes"][good].sum())
        if not good.all():
            bad = ~good
            cache.abort(parts[bad])
            damaged = int((status == DAMAGED).sum())
            self.counters.damaged += damaged
            self.counters.unreadable += int(bad.sum()) - damaged
            # Only where the catalog still means this place: the record may have moved on meanwhile.
            same = (catalog.segment[records] == segment) & (catalog.page[records] == reads["page"])
            self._disk.lose(records[bad & same], Reason.CORRUPT)
            log.warning(
                "disk: %d of %d records of group %d did not verify; they are misses now",
                int(bad.sum()), len(parts), space.schema.group,
            )  # fmt: skip
        reading.left -= len(parts)
        if not reading.left:
            self._end_reading(reading)

    def _end_reading(self, reading: Reading) -> None:
        entries = self._cache.entries
        entries.reading[reading.rows] = 0
        whole = entries.live(reading.rows)
        whole = whole[entries.complete(whole)]
        self.counters.keys += len(whole)
        del self._readings[reading.id]
        for fetch in reading.waiters:
            fetch.waiting -= 1
            if not fetch.ended:
                self._hold(fetch, whole)
        self._cache.unhold(reading.rows)
        for fetch in reading.waiters:
            self._check_end(fetch)

    # --- who waits ---

    def _join(self, fetch: Fetch, reading: Reading) -> None:
        if fetch in reading.waiters:
            return
        reading.waiters.append(fetch)
        fetch.waiting += 1
        if fetch.urgent < reading.urgent or fetch.flow != reading.flow:
            reading.urgent = min(fetch.urgent, reading.urgent)
            for root, ticket in reading.tickets:
                root.reader.lane.hasten(ticket, fetch.flow, fetch.urgent)

    def _hold(self, fetch: Fetch, rows: U32Array) -> None:
        self._cache.hold(rows)
        fetch.rows.append(rows)

    def _check_end(self, fetch: Fetch) -> None:
        if fetch.ended or fetch.slices or fetch.waiting:
            return
        fetch.ended = True
        fetch.done()
        self._let_go(fetch)

    def keep(self, fetch: Fetch, rows: U32Array) -> None:
        """Hold what the same request names and memory has, as long as the fetch goes on: it makes no room for it."""
        self._hold(fetch, rows)

    def _let_go(self, fetch: Fetch) -> None:
        fetch.slices.clear()
        self._fetches.discard(fetch)
        for rows in fetch.rows:
            self._cache.unhold(rows)
        fetch.rows.clear()


def pieces(segments: U32Array, reads: np.ndarray) -> list[tuple[int, I64Array]]:
    """Indices of what one ticket reads: one segment, by page, a bounded number of bytes and records."""
    order = np.lexsort((reads["page"], segments))
    ordered = segments[order]
    sizes = reads["payload_bytes"][order].astype(np.int64)
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    found = []
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(order)], strict=True):
        before = np.cumsum(sizes[begin:end]) - sizes[begin:end]
        by_bytes, by_count = before // PIECE_BYTES, np.arange(end - begin) // PIECE_RECORDS
        cuts = np.flatnonzero((by_bytes[1:] != by_bytes[:-1]) | (by_count[1:] != by_count[:-1])) + 1
        found += [(int(ordered[begin]), piece) for piece in np.split(order[begin:end], cuts)]
    return found
