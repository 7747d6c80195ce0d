"""Promotion: keys on disk are read into memory slots, verified, and only then served.

Event loop only. The read lanes of the disk's roots write into slots that are reserved here, and nowhere else; until a
payload is verified its part is in state RESERVED, which no lookup hits.

A disk may never answer. The slots that it could keep are bounded by windows. A read is cancelled when no fetch waits
for it any more, and when its root goes off no fetch waits: its slots are free at once. A read that a thread is inside
can't be cancelled: it may write into its slots at any time, so that they are quarantined until it ends.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from kvoffloadd.cache.disk.catalog import DiskKeyspace
from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.disk.window import Window
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.keytable import RowState
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.stats.missreasons import Reason
from kvoffloadd.lanes import DAEMON, Flow, Ticket
from kvoffloadd.model import BoolArray, I64Array, KeyState, U8Array, U32Array, U64Array
from kvoffloadd.sharedmem import reserve_array
from kvoffloadd.storage.disk.records import DAMAGED, FAILED, NO_RESOURCES, NOT_READ, OK, READ
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.hashing import in_turns

log = logging.getLogger(__name__)

SLICE_KEYS = 256
"""Keys that one turn of the loop reserves slots for."""

PIECE_BYTES = 4 << 20
PIECE_RECORDS = 128
PIECE_SHARE = 64
"""What one ticket of a read lane reads at most: bytes, records, and a fraction (1/n) of memory, since a disk that hangs
keeps the slots of what its threads read.
"""

SLICES_PER_WINDOW = 4

_RESERVED, _HIT = int(KeyState.RESERVED), int(KeyState.HIT)


class Urgency:
    """The order among the reads of one engine. Plain ints."""

    LOAD: Final = 0  # a job waits
    PIN: Final = 1  # a lease waits
    PREFETCH: Final = 2
    REWRITE: Final = 3  # of a segment that is reclaimed


WINDOW_SHARES: Final = {Urgency.LOAD: 8, Urgency.PIN: 16, Urgency.PREFETCH: 16}
"""By urgency, a fraction (1/n) of memory: what may be reserved at once for reading, from all roots together."""


@dataclass(frozen=True, slots=True, eq=False)
class KeysOnDisk:
    """Keys of a keyspace that are on disk, or on their way from there."""

    keyspace: Keyspace
    keys: U64Array
    positions: U32Array  # of each key in its prompt


@dataclass(slots=True, eq=False)
class Fetch:
    """A request's wait for keys on disk."""

    urgent: int
    done: Callable[[], None]
    slices: deque[KeysOnDisk]  # keys that it has not begun with
    flow: Flow
    readings: dict[ReadBatch, list[KeysOnDisk]] = field(default_factory=dict)  # with keys to begin anew after each
    rows: list[U32Array] = field(default_factory=list)  # what came, held until `done` has returned
    idle: bool = False  # it has found `slices` empty
    ended: bool = False  # `done` was called, or never will be


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
    pieces: dict[PendingRead, Ticket] = field(default_factory=dict)
    cancelled: bool = False  # some parts will not come: no fetch waited for it, or a root does not answer


@dataclass(slots=True, eq=False)
class PendingRead:
    """What one ticket of a read lane reads."""

    root: Root
    segment: int
    parts: I64Array  # where to: record numbers in memory
    records: I64Array  # where from: record numbers of the catalog, in this segment
    reads: np.ndarray  # the same for the lane: an array of READ
    window: Window[Fetch]
    num_bytes: int  # of the window
    quarantined: bool = False  # no fetch waits for it any more, but the disk may still write


@dataclass(slots=True)
class PromotionCounters:
    """What was read since the start."""

    keys: int = 0
    bytes: int = 0
    without_space: int = 0  # keys that memory had no room for
    # Records that did not come.
    damaged: int = 0  # they did not verify
    unreadable: int = 0  # the disk gave an error
    cancelled: int = 0  # not read, and still on disk: no fetch waited any more, or the root did not answer
    no_resources: int = 0  # not read, and still on disk: the system had no descriptors or memory


class Promotion:
    """All reads from disk to memory that are under way."""

    def __init__(self, disk: DiskContents) -> None:
        self._disk = disk
        self._cache = disk.cache
        self.counters = PromotionCounters()
        self._readings: dict[int, ReadBatch] = {}
        # By row of memory: the number of the reading that fills it; 0: none.
        self._reading: U32Array = reserve_array((disk.cache.entries.max_rows,), np.uint32)
        self._fetches: set[Fetch] = set()
        self._quarantine: set[PendingRead] = set()
        self._next_id = 1
        capacity_bytes = disk.cache.tier.capacity_bytes
        self._piece_bytes = min(PIECE_BYTES, capacity_bytes // PIECE_SHARE)
        self._windows: dict[tuple[Root, int], Window[Fetch]] = {
            (root, urgent): Window(capacity_bytes // share // len(disk.roots))
            for root in disk.roots
            for urgent, share in WINDOW_SHARES.items()
        }

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
        """Bytes of slots that can't be used before a disk has answered."""
        return sum(piece.num_bytes for piece in self._quarantine)

    def reset(self, rows: U32Array) -> None:
        """These rows are used for new keys."""
        self._reading[rows] = 0

    def under_way(self, rows: I64Array) -> BoolArray:
        """Which of these memory rows are being read from disk."""
        mask: BoolArray = self._reading[rows] != 0
        return mask

    def fetch(self, on_disk: list[KeysOnDisk], urgent: int, done: Callable[[], None], flow: Flow = DAEMON) -> Fetch:
        """Bring these keys into memory, as far as there is room. `done()` is called once, later: during the call what
        came is held, and a new lookup finds it. Call `cancel` to wait no longer. `flow`: whose share of the lanes.
        """
        slices: deque[KeysOnDisk] = deque()
        for group in on_disk:
            limit_bytes = min(window.limit_bytes for (_, of), window in self._windows.items() if of == urgent)
            step = min(SLICE_KEYS, max(1, limit_bytes // SLICES_PER_WINDOW // max(1, sum(group.keyspace.part_bytes))))
            for at in range(0, len(group.keys), step):
                span = slice(at, at + step)
                slices.append(KeysOnDisk(group.keyspace, group.keys[span], group.positions[span]))
        fetch = Fetch(urgent, done, slices, flow)
        self._fetches.add(fetch)
        self._disk.loop.call_soon(self._advance, fetch)
        return fetch

    def cancel(self, fetch: Fetch) -> None:
        """`done` is not called any more. Reads without another fetch are cancelled, unless a thread is at them."""
        if fetch.ended:
            return
        fetch.ended = True
        for reading in fetch.readings:
            reading.waiters.remove(fetch)
            if not reading.waiters:
                reading.cancelled = True
                for ticket in reading.pieces.values():
                    ticket.cancel()
        fetch.readings.clear()
        self._let_go(fetch)

    def give_up(self, root: Root) -> None:
        """This root does not answer: no fetch waits for its reads any more."""
        for reading in list(self._readings.values()):
            for piece, ticket in list(reading.pieces.items()):
                if piece.root is root:
                    reading.cancelled = True
                    if not ticket.cancel():
                        self._put_in_quarantine(reading, piece)

    # --- one slice a turn ---

    def _advance(self, fetch: Fetch, woken: Window[Fetch] | None = None) -> None:
        """Begin with the next slice. `woken`: the window that the fetch waited for; its turn ends with this call."""
        full = None
        if not fetch.slices:
            fetch.idle = True
            self._check_end(fetch)
        elif (full := self._start(fetch, fetch.slices[0], woken)) is None:
            fetch.slices.popleft()
            self._disk.loop.call_soon(self._advance, fetch)
        elif woken is not None:
            full.wait_first(fetch)
        else:
            on_disk = fetch.slices[0]
            full.wait(fetch, fetch.flow, len(on_disk.keys) * sum(on_disk.keyspace.part_bytes))
        if woken is not None and full is not woken:  # there may be room for another one
            for window in self._windows.values() if full is None else (woken,):
                self._wake(window)

    def _wake(self, window: Window[Fetch]) -> None:
        """There is more room in the window, or a turn is over: the next fetch goes on."""
        while (fetch := window.next()) is not None:
            if not fetch.ended:
                self._disk.loop.call_soon(self._advance, fetch, window)
                return

    def _start(self, fetch: Fetch, on_disk: KeysOnDisk, woken: Window[Fetch] | None) -> Window[Fetch] | None:
        """Begin to read the keys of a slice, and join readings that others have begun. Returns a window that has no
        room for it: then nothing was done.
        """
        cache, keyspace = self._cache, on_disk.keyspace
        if keyspace.retired:
            return None  # cleared meanwhile
        found = cache.find(keyspace, on_disk.keys)
        at, rows = np.zeros(0, np.int64), np.zeros(0, np.int64)
        disk_keyspace = self._disk.of(keyspace)
        if disk_keyspace is not None:
            missing = np.flatnonzero(found.states == 0)
            rows = self._disk.catalog.find(disk_keyspace, on_disk.keys[missing])
            at, rows = missing[rows >= 0], rows[rows >= 0]
            there, needed = self._needed(keyspace, disk_keyspace, rows.astype(np.uint32))
            at, rows = at[there], rows[there]
            for root, num_bytes in needed.items():
                window = self._windows[root, fetch.urgent]
                if not window.has_room(num_bytes) or (window.is_busy and woken is None):
                    return window
        if len(found.hit_rows):  # read or stored meanwhile
            self._hold(fetch, found.hit_rows)
        held = np.flatnonzero((found.rows >= 0) & ~found.hits)
        numbers = self._reading[found.rows[held]]
        for number in distinct(numbers[numbers != 0]).tolist():
            same = held[numbers == number]
            self._join(fetch, self._readings[number], KeysOnDisk(keyspace, on_disk.keys[same], on_disk.positions[same]))
        if len(at):
            self._disk.catalog.mark_used(rows)
            self._read(fetch, KeysOnDisk(keyspace, on_disk.keys[at], on_disk.positions[at]), rows)
        return None

    def _needed(
        self, keyspace: Keyspace, disk_keyspace: DiskKeyspace, rows: U32Array
    ) -> tuple[BoolArray, Counter[Root]]:
        """Which of these catalog rows are on roots that work, and how many bytes each root is to read for them."""
        catalog = self._disk.catalog
        segments = catalog.segment[catalog.places(disk_keyspace, rows)]
        sizes = np.asarray(keyspace.part_bytes, np.int64)
        there = np.ones(len(rows), bool)
        needed: Counter[Root] = Counter()
        for number in distinct(segments.ravel()).tolist():
            here = segments == number
            place = self._disk.segment(number)
            if place is None:
                there &= ~here.any(axis=1)
            else:
                needed[place[0]] += int((here * sizes).sum())
        return there, needed

    def _read(self, fetch: Fetch, on_disk: KeysOnDisk, catalog_rows: I64Array) -> None:
        """Reserve slots and read into them."""
        cache, catalog, keyspace = self._cache, self._disk.catalog, on_disk.keyspace
        wanted = np.arange(keyspace.schema.parts, dtype=np.uint16)
        reservation = reserve(cache, keyspace, on_disk.keys, wanted, 0, positions=on_disk.positions)
        reserved = reservation.states == _RESERVED
        self.counters.without_space += int((reservation.states > _RESERVED).sum())
        parts = reservation.parts
        if not len(parts):
            return
        rows = distinct(cache.entries.parts.row[parts])
        reading = ReadBatch(self._next_id, fetch.urgent, fetch.flow, keyspace, rows, len(parts), [])
        self._next_id = self._next_id % 0xFFFFFFFF + 1
        self._readings[reading.id] = reading
        self._reading[rows] = reading.id
        cache.entries.inherited[rows] = 1
        cache.hold(rows)
        self._join(fetch, reading, None)
        # Which key each part belongs to: rows are distinct, since the keys are.
        of_key = cache.entries.find(keyspace, on_disk.keys[reserved])
        order = np.argsort(of_key)
        key_of_part = order[np.searchsorted(of_key[order], cache.entries.parts.row[parts])]
        numbers = parts - cache.entries.first[cache.entries.parts.row[parts]]
        records = catalog.first[catalog_rows[reserved]][key_of_part].astype(np.int64) + numbers
        reads = np.zeros(len(parts), READ)
        reads["page"] = catalog.page[records]
        reads["part"] = numbers
        reads["payload_bytes"] = np.asarray(keyspace.part_bytes, np.int64)[numbers]
        reads["address"] = cache.entries.payload_addresses(parts)
        reads["key"] = on_disk.keys[reserved][key_of_part]
        for segment, at in pieces(catalog.segment[records], reads, self._piece_bytes):
            self._submit(reading, segment, parts[at], records[at], reads[at])

    def _submit(self, reading: ReadBatch, segment: int, parts: I64Array, records: I64Array, reads: np.ndarray) -> None:
        place, disk_keyspace = self._disk.segment(segment), self._disk.of(reading.keyspace)
        if place is None or disk_keyspace is None:  # its root went off, or it was cleared
            self._disk.loop.call_soon(self._not_submitted, reading, parts)
            return
        root, found = place
        num_bytes = int(reads["payload_bytes"].sum())
        window = self._windows[root, reading.urgent]
        window.used_bytes += num_bytes
        piece = PendingRead(root, segment, parts, records, reads, window, num_bytes)
        settle = partial(self._settle, reading, piece)
        ticket = root.reader.read(found, disk_keyspace.name, reads, reading.urgent, settle, reading.flow)
        reading.pieces[piece] = ticket

    def _not_submitted(self, reading: ReadBatch, parts: I64Array) -> None:
        self.counters.cancelled += len(parts)
        self._abort(reading, parts)
        self._count_down(reading, len(parts))

    def _settle(self, reading: ReadBatch, piece: PendingRead, status: U8Array, digests: U64Array) -> None:
        """A read has ended: nothing touches its slots any more."""
        if piece.quarantined:
            self._quarantine.remove(piece)
            self._cache.abort(piece.parts)
            return
        good = status == OK
        if good.any():
            parts = piece.parts[good]
            generations = self._cache.entries.parts.generation[parts]
            self._cache.commit(parts)
            self._cache.seal(parts, generations, digests[good])
            self.counters.bytes += int(piece.reads["payload_bytes"][good].sum())
        if not good.all():
            self._abort(reading, piece.parts[~good])
            self._count_failures(reading, piece, status)
        self._leave(reading, piece)

    def _abort(self, reading: ReadBatch, parts: I64Array) -> None:
        """Free the slots of parts that did not come."""
        rows = distinct(self._cache.entries.parts.row[parts])
        self._cache.abort(parts)
        self._let_retired_go(reading, rows)

    def _let_retired_go(self, reading: ReadBatch, rows: U32Array) -> None:
        """Unhold those of these keys that are retired before the reading ends: rows that have no slots any more are not
        bounded by memory.
        """
        entries = self._cache.entries
        retired = np.intersect1d(rows[entries.state[rows] == RowState.RETIRED], reading.rows)
        reading.rows = np.setdiff1d(reading.rows, retired)
        self._reading[retired] = 0
        self._cache.unhold(retired)

    def _count_failures(self, reading: ReadBatch, piece: PendingRead, status: U8Array) -> None:
        """Count records that did not come. Bad ones are dropped; the others can be tried again."""
        catalog, counters = self._disk.catalog, self.counters
        damaged, unreadable, cancelled, starved = (
            int((status == reason).sum()) for reason in (DAMAGED, FAILED, NOT_READ, NO_RESOURCES)
        )
        counters.damaged += damaged
        counters.unreadable += unreadable
        counters.cancelled += cancelled
        counters.no_resources += starved
        bad = (status == DAMAGED) | (status == FAILED)
        # Only where the catalog still means this place: the record may have moved on meanwhile.
        bad &= (catalog.segment[piece.records] == piece.segment) & (catalog.page[piece.records] == piece.reads["page"])
        self._disk.lose(piece.records[bad], Reason.CORRUPT)
        if damaged or unreadable:
            log.warning(
                "disk: %d of %d records of group %d did not verify; they are misses now",
                damaged + unreadable, len(status), reading.keyspace.schema.group,
            )  # fmt: skip
        if starved:
            log.warning("disk: %d records were not read: the system has no descriptors or memory to spare", starved)

    def _put_in_quarantine(self, reading: ReadBatch, piece: PendingRead) -> None:
        """Keep the slots of a read that does not end. Its keys are misses, and can be stored again in other slots."""
        piece.quarantined = True
        self._quarantine.add(piece)
        self.counters.cancelled += len(piece.parts)
        entries = self._cache.entries
        rows = distinct(entries.parts.row[piece.parts])
        entries.retire(entries.live(rows))
        self._let_retired_go(reading, rows)
        self._leave(reading, piece)

    def _leave(self, reading: ReadBatch, piece: PendingRead) -> None:
        del reading.pieces[piece]
        piece.window.used_bytes -= piece.num_bytes
        self._wake(piece.window)
        self._count_down(reading, len(piece.parts))

    def _count_down(self, reading: ReadBatch, parts: int) -> None:
        reading.left -= parts
        if not reading.left:
            self._end_reading(reading)

    def _end_reading(self, reading: ReadBatch) -> None:
        entries = self._cache.entries
        self._reading[reading.rows] = 0
        whole = entries.live(reading.rows)
        whole = whole[entries.complete(whole)]
        self.counters.keys += len(whole)
        del self._readings[reading.id]
        for fetch in reading.waiters:
            self._look_again(fetch, fetch.readings.pop(reading))
            self._hold(fetch, whole)
        self._cache.unhold(reading.rows)
        for fetch in reading.waiters:
            self._check_end(fetch)

    # --- fetches ---

    def _join(self, fetch: Fetch, reading: ReadBatch, on_disk: KeysOnDisk | None) -> None:
        """Have a fetch wait for a reading. `on_disk`: its keys in it, if another fetch has begun the reading."""
        joined = reading in fetch.readings
        again = fetch.readings.setdefault(reading, [])
        if on_disk is not None and reading.cancelled:
            again.append(on_disk)
        if joined:
            return
        reading.waiters.append(fetch)
        if fetch.urgent < reading.urgent or fetch.flow != reading.flow:
            reading.urgent = min(fetch.urgent, reading.urgent)
            for piece, ticket in reading.pieces.items():
                piece.root.reader.lane.raise_priority(ticket, fetch.flow, fetch.urgent)

    def _look_again(self, fetch: Fetch, on_disk: list[KeysOnDisk]) -> None:
        """Begin anew with keys whose reading was cancelled before this fetch joined. Only these: what could not be read
        would fail again. It ends, since each time another fetch must have begun a reading and cancelled it.
        """
        fetch.slices.extend(on_disk)
        if on_disk and fetch.idle:
            fetch.idle = False
            self._disk.loop.call_soon(self._advance, fetch)

    def _hold(self, fetch: Fetch, rows: U32Array) -> None:
        self._cache.hold(rows)
        fetch.rows.append(rows)

    def _check_end(self, fetch: Fetch) -> None:
        if fetch.ended or fetch.slices or fetch.readings:
            return
        fetch.ended = True
        fetch.done()
        self._let_go(fetch)

    def keep(self, fetch: Fetch, rows: U32Array) -> None:
        """Hold these rows as long as the fetch goes on: it must not evict what the same request names."""
        self._hold(fetch, rows)

    def _let_go(self, fetch: Fetch) -> None:
        fetch.slices.clear()
        self._fetches.discard(fetch)
        for rows in fetch.rows:
            self._cache.unhold(rows)
        fetch.rows.clear()


def pieces(segments: U32Array, reads: np.ndarray, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, I64Array]]:
    """Split reads into pieces for one ticket each: of one segment, by page, with bounded bytes and records. Returns the
    segment of each piece and the indices of its reads.
    """
    order = np.lexsort((reads["page"], segments))
    ordered = segments[order]
    sizes = reads["payload_bytes"][order].astype(np.int64)
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    split = []
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(order)], strict=True):
        turns = in_turns(order[begin:end], sizes[begin:end], max(piece_bytes, 1), PIECE_RECORDS)
        split += [(int(ordered[begin]), piece) for piece in turns]
    return split
