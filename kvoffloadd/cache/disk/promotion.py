"""Promotion: reads keys on disk into memory slots, and verifies them before they are served.

Event loop only. The read lanes of the disk's roots write into slots that are reserved here. When a root goes off, no
fetch waits for its reads any more: their slots are free at once, except those that a thread is writing. See `fetches`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.disk.diskkeyspaces import DiskKeyspace
from kvoffloadd.cache.lower.fetches import Fetch, Fetches, KeysBelow, PendingRead, ReadBatch, Urgency
from kvoffloadd.cache.lower.window import Window
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.stats.missreasons import Reason
from kvoffloadd.model import BoolArray, I64Array, KeyState, U8Array, U32Array, U64Array
from kvoffloadd.scheduling.lanes import Ticket
from kvoffloadd.storage.disk.records import DAMAGED, FAILED, GONE, NO_RESOURCES, NOT_READ, OK, READ
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.hashing import in_turns

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
PIECE_RECORDS = 128
PIECE_SHARE = 64
"""The maximum size of the reads of one ticket of a read lane: bytes, records, and a fraction (1/n) of memory, since a
disk that hangs keeps the slots that its threads read into.
"""

_RESERVED = int(KeyState.RESERVED)

WINDOW_SHARES: Final = {Urgency.LOAD: 8, Urgency.PIN: 16, Urgency.PREFETCH: 16}
"""The memory that may be reserved at once for reading, from all roots together: a fraction (1/n) of memory, by
urgency.
"""


@dataclass(slots=True, eq=False)
class DiskRead(PendingRead):
    """Describes the reads of one ticket of a read lane."""

    root: Root = field(kw_only=True)
    segment: int = field(kw_only=True)
    records: I64Array = field(kw_only=True)  # the source: record numbers of the catalog, in this segment
    reads: np.ndarray = field(kw_only=True)  # the source for the lane: an array of READ
    ticket: Ticket | None = None

    def cancel(self) -> bool:
        """Cancels the ticket, see `Ticket.cancel`."""
        return self.ticket is not None and self.ticket.cancel()


@dataclass(slots=True)
class PromotionCounters:
    """Counts what was read since the start."""

    keys: int = 0
    bytes: int = 0
    without_space: int = 0  # keys for which memory had no room
    # Records that did not come.
    damaged: int = 0  # verification failed
    unreadable: int = 0  # the disk gave an error
    cancelled: int = 0  # not read, and still on disk: no fetch waited any more, or the root did not answer
    no_resources: int = 0  # not read, and still on disk: the system had no descriptors or memory


class Promotion(Fetches):
    """Performs all reads from disk to memory."""

    def __init__(self, disk: DiskContents) -> None:
        super().__init__(disk.cache, disk.loop)
        self._disk = disk
        self.counters = PromotionCounters()
        capacity_bytes = disk.cache.tier.capacity_bytes
        self._piece_bytes = min(PIECE_BYTES, capacity_bytes // PIECE_SHARE)
        self._windows: dict[tuple[Root, int], Window[Fetch]] = {
            (root, urgent): Window(capacity_bytes // share // len(disk.roots))
            for root in disk.roots
            for urgent, share in WINDOW_SHARES.items()
        }

    @changing
    def give_up(self, root: Root) -> None:
        """Gives up the reads of a root that does not answer: no fetch waits for them any more."""
        for reading in list(self._readings.values()):
            for piece, ticket in list(reading.pieces.items()):
                if isinstance(piece, DiskRead) and piece.root is root:
                    reading.cancelled = True
                    if not ticket.cancel():
                        self._put_in_quarantine(reading, piece)

    def _windows_of(self, urgent: int) -> Iterable[Window[Fetch]]:
        return [window for (_, of), window in self._windows.items() if of == urgent]

    def _all_windows(self) -> Iterable[Window[Fetch]]:
        return self._windows.values()

    def _count_given_up(self, piece: PendingRead) -> None:
        self.counters.cancelled += len(piece.parts)

    def _count_keys(self, number: int) -> None:
        self.counters.keys += number

    def _hurry(self, reading: ReadBatch, fetch: Fetch) -> None:
        for piece in reading.pieces:
            if isinstance(piece, DiskRead) and piece.ticket is not None:
                piece.root.reader.lane.raise_priority(piece.ticket, fetch.flow, fetch.urgent)

    def _start(self, fetch: Fetch, wanted: KeysBelow, woken: Window[Fetch] | None) -> Window[Fetch] | None:
        keyspace = wanted.keyspace
        if keyspace.retired or keyspace.namespace.doubt:
            return None  # it was cleared in the meantime, or may have been
        found = self._cache.find(keyspace, wanted.keys)
        indices, rows = np.zeros(0, np.int64), np.zeros(0, np.int64)
        disk_keyspace = self._disk.of(keyspace)
        if disk_keyspace is not None:
            missing = np.flatnonzero(found.states == 0)
            rows = self._disk.catalog.find(disk_keyspace, wanted.keys[missing])
            indices, rows = missing[rows >= 0], rows[rows >= 0]
            there, needed = self._needed(keyspace, disk_keyspace, rows.astype(np.uint32))
            indices, rows = indices[there], rows[there]
            for root, num_bytes in needed.items():
                window = self._windows[root, fetch.urgent]
                if not window.has_room(num_bytes) or (window.is_busy and woken is None):
                    return window
        self._join_others(fetch, wanted, found)
        if len(indices):
            self._disk.catalog.mark_used(rows)
            self._read(fetch, KeysBelow(keyspace, wanted.keys[indices], wanted.positions[indices]), rows)
        return None

    def _needed(
        self, keyspace: Keyspace, disk_keyspace: DiskKeyspace, rows: U32Array
    ) -> tuple[BoolArray, Counter[Root]]:
        """Returns which of these catalog rows are on working roots, and how many bytes each root must read for them."""
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

    def _read(self, fetch: Fetch, wanted: KeysBelow, catalog_rows: I64Array) -> None:
        """Reserves slots and reads into them."""
        cache, catalog, keyspace = self._cache, self._disk.catalog, wanted.keyspace
        all_parts = np.arange(keyspace.schema.parts, dtype=np.uint16)
        reservation = reserve(cache, keyspace, wanted.keys, all_parts, 0, positions=wanted.positions)
        self.counters.without_space += int((reservation.states > _RESERVED).sum())
        parts = reservation.parts
        if not len(parts):
            return
        reading = self._begin(fetch, keyspace, parts)
        numbers = reservation.columns
        records = catalog.first[catalog_rows[reservation.keys]].astype(np.int64) + numbers
        reads = np.zeros(len(parts), READ)
        reads["page"] = catalog.page[records]
        reads["part"] = numbers
        reads["payload_bytes"] = np.asarray(keyspace.part_bytes, np.int64)[numbers]
        reads["address"] = reservation.addresses
        reads["key"] = wanted.keys[reservation.keys]
        for segment, piece in pieces(catalog.segment[records], reads, self._piece_bytes):
            self._submit(reading, segment, parts[piece], records[piece], reads[piece])

    def _submit(self, reading: ReadBatch, segment: int, parts: I64Array, records: I64Array, reads: np.ndarray) -> None:
        place, disk_keyspace = self._disk.segment(segment), self._disk.of(reading.keyspace)
        if place is None or disk_keyspace is None:  # its root went off, or it was cleared
            self._loop.call_soon(self._not_submitted, reading, parts)
            return
        root, found = place
        num_bytes = int(reads["payload_bytes"].sum())
        window = self._windows[root, reading.urgent]
        window.used_bytes += num_bytes
        piece = DiskRead(parts, window, num_bytes, root=root, segment=segment, records=records, reads=reads)
        settle = partial(self._settle, reading, piece)
        piece.ticket = root.reader.read(found, disk_keyspace.name, reads, reading.urgent, settle, reading.flow)
        reading.pieces[piece] = piece

    @changing
    def _not_submitted(self, reading: ReadBatch, parts: I64Array) -> None:
        self.counters.cancelled += len(parts)
        self._abort(reading, parts)
        self._count_down(reading, len(parts))

    @changing
    def _settle(self, reading: ReadBatch, piece: DiskRead, status: U8Array, digests: U64Array) -> None:
        """Ends a read: nothing accesses its slots any more."""
        piece.ticket = None  # the ticket refers to the piece: see `Collector`
        good = status == OK
        if not self._settle_read(reading, piece, good, digests):
            return
        self.counters.bytes += int(piece.reads["payload_bytes"][good].sum())
        if not good.all():
            self._count_failures(reading, piece, status)
        self._leave(reading, piece)

    def _count_failures(self, reading: ReadBatch, piece: DiskRead, status: U8Array) -> None:
        """Counts records that could not be read. Bad ones are dropped; the others can be read again."""
        catalog, counters = self._disk.catalog, self.counters
        damaged, unreadable, gone, cancelled, starved = (
            int((status == reason).sum()) for reason in (DAMAGED, FAILED, GONE, NOT_READ, NO_RESOURCES)
        )
        counters.damaged += damaged
        counters.unreadable += unreadable + gone
        counters.cancelled += cancelled
        counters.no_resources += starved
        bad = (status == DAMAGED) | (status == FAILED)
        # Only where the catalog still names this place: the record may have moved in the meantime.
        bad &= (catalog.segment[piece.records] == piece.segment) & (catalog.page[piece.records] == piece.reads["page"])
        self._disk.lose(piece.records[bad], Reason.CORRUPT)  # records that are gone are removed with their segment
        if damaged or unreadable:
            log.warning(
                "disk: %d of %d records of group %d failed verification; their keys are misses now",
                damaged + unreadable, len(status), reading.keyspace.schema.group,
            )  # fmt: skip
        if starved:
            log.warning("disk: %d records were not read: the system is out of descriptors or memory", starved)


def pieces(segments: U32Array, reads: np.ndarray, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, I64Array]]:
    """Splits reads into pieces for one ticket each: of one segment, by page, with bounded bytes and records. Returns
    the segment of each piece and the indices of its reads.
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
