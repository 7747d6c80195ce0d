"""The table of keys: each key's row in the index, part records and slots, from insertion to the end of its last lease.

Event loop only. A key that is retired (evicted, cleared, corrupt) is out of the index at once, but its slots stay
until no lease holds it and no copy writes it; then they are freed, and its row number can be used again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvoffloadd.cache.memory.index import Index, count_up, distinct
from kvoffloadd.cache.memory.keys import pack
from kvoffloadd.cache.memory.keyspaces import Keyspaces
from kvoffloadd.cache.memory.lowertier import LowerTier, NoLowerTier
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace, Queue
from kvoffloadd.cache.memory.parttable import PartState, PartTable
from kvoffloadd.cache.stats.missreasons import MissReasons, Reason
from kvoffloadd.errors import InternalError
from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array, U64Array
from kvoffloadd.sharedmem import reserve_array
from kvoffloadd.storage.memory import MemoryTier

EVENTS_MAX = 65_536
SCAN_ROWS, STEP_ROWS = 65_536, 8192
"""Rows that one step of a walk looks at, so that none holds the loop for long: to tell of them, and to change them."""


class RowState:
    """FREE: the number is unused. LIVE: in the index. RETIRED: out of it, but still held by somebody. Plain ints."""

    FREE: Final = 0
    LIVE: Final = 1
    RETIRED: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Keys (packed, of one namespace and group) that became complete, or went."""

    namespace: Namespace
    group: int
    added: bytes
    removed: bytes


class KeyTable:
    """All keys held. Rows and part records are plain numbers; what they mean is in the columns here."""

    def __init__(self, tier: MemoryTier, seed: int) -> None:
        # Every row has at least one slot, and a slot at least one page.
        max_rows = tier.num_pages + 1
        self.tier = tier
        self.max_rows = max_rows
        self.index = Index(max_rows, seed)
        self.ghosts = MissReasons(seed)
        # Four times what complete keys could ever take, which have a page for each record: see `scarcity`.
        self.parts = PartTable(4 * max_rows + (1 << 16))
        self.records_by_uid: Counter[int] = Counter()
        self.first: U32Array = reserve_array((max_rows,), np.uint32)
        self.missing: U16Array = reserve_array((max_rows,), np.uint16)
        self.leases: U32Array = reserve_array((max_rows,), np.uint32)
        self.state: U8Array = reserve_array((max_rows,), np.uint8)
        self.inherited: U8Array = reserve_array((max_rows,), np.uint8)  # not stored in this run: from a pool or a disk
        self.lower: LowerTier = NoLowerTier()
        self.keyspaces = Keyspaces()
        self.events: deque[Event] = deque()
        self.events_lost = 0

    # --- beginning ---

    def insert(
        self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array, hashes: U64Array, positions: U32Array
    ) -> U32Array:
        """New live rows with EMPTY parts, for keys that are not held: of each keyspace in turn so many. All have as
        many parts and the same queue, and there is room for rows and parts. `hashes`: what the index says of them.

        Raises:
            InternalError: a keyspace is retired: nobody would find its keys, and nothing would end them.
            LimitError: too many keys have almost equal hashes. Nothing was inserted.
        """
        for keyspace, _ in keyspaces:
            self.check_current(keyspace)
        width = keyspaces[0][0].schema.parts
        rows = self.index.insert(numbers_of(keyspaces), keys, hashes)
        self.first[rows] = self.parts.allocate(width, rows)
        for keyspace, count in keyspaces:
            self.records_by_uid[keyspace.namespace.uid] += count * width
        self.missing[rows] = width
        self.leases[rows] = self.inherited[rows] = 0
        self.lower.reset(rows)
        self.state[rows] = RowState.LIVE
        for keyspace, count in keyspaces:
            keyspace.rows += count
        if queue := keyspaces[0][0].queue:
            queue.policy.insert(rows, hashes, positions, begins_of(keyspaces))
        return rows

    def records(self, rows: I64Array | U32Array, parts: U16Array) -> I64Array:
        """(rows, parts) record numbers."""
        found: I64Array = self.first[rows].astype(np.int64)[:, None] + parts.astype(np.int64)[None, :]
        return found

    def check_current(self, keyspace: Keyspace) -> None:
        """Raises InternalError if the keyspace is not one that keys may come to: whoever asks should have known."""
        if keyspace.retired or self.keyspaces.get(keyspace.id) is not keyspace:
            raise InternalError(f"space {keyspace.id} of {keyspace.namespace.label} is retired")

    # --- questions, one answer per row ---

    def find(self, keyspace: Keyspace, keys: U64Array) -> I64Array:
        """The row of each key, or -1; in a keyspace that is retired there are none."""
        return np.full(len(keys), -1, np.int64) if keyspace.retired else self.index.find(keyspace.id, keys)

    def find_all(
        self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array, hashes: U64Array | None = None
    ) -> I64Array:
        """The same for keys of several keyspaces: of each in turn so many; `hashes` as in `Index.find`."""
        rows = self.index.find(numbers_of(keyspaces), keys, hashes)
        begin = 0
        for keyspace, count in keyspaces:
            if keyspace.retired:
                rows[begin : begin + count] = -1
            begin += count
        return rows

    def complete(self, rows: I64Array | U32Array) -> BoolArray:
        """All parts committed."""
        found: BoolArray = self.missing[rows] == 0
        return found

    def in_flight(self, rows: I64Array | U32Array) -> BoolArray:
        """A part is reserved or being written."""
        flags = np.zeros(len(rows), bool)
        unready = np.flatnonzero(self.missing[rows] > 0)
        for width, at in self.by_width(rows[unready]):
            state = self.parts.state[self.parts.run(self.first[rows[unready[at]]], width)]
            flags[unready[at]] = ((state == PartState.RESERVED) | (state == PartState.WRITING)).any(axis=1)
        return flags

    def evictable(self, rows: U32Array) -> BoolArray:
        """Live, not leased, not in flight."""
        yes: BoolArray = (self.leases[rows] == 0) & (self.state[rows] == RowState.LIVE)
        at = np.flatnonzero(yes)
        yes[at] = ~self.in_flight(rows[at])
        return yes

    def vacant(self, rows: U32Array) -> BoolArray:
        """No part has a slot."""
        flags = np.zeros(len(rows), bool)
        for width, at in self.by_width(rows):
            flags[at] = (self.parts.state[self.parts.run(self.first[rows[at]], width)] == PartState.EMPTY).all(axis=1)
        return flags

    def owners(self, records: I64Array) -> I64Array:
        """The row of the key that has each of these records, or -1: one that is free names whose it was."""
        rows = self.parts.row[records].astype(np.int64)
        rows[self.state[rows] == RowState.FREE] = -1
        used = np.flatnonzero(rows >= 0)
        numbers = records[used] - self.first[rows[used]]
        strange = (numbers < 0) | (numbers >= self.widths(rows[used]))
        rows[used[strange]] = -1
        return rows

    def live(self, rows: U32Array) -> U32Array:
        """Those of the rows that are live."""
        found: U32Array = rows[self.state[rows] == RowState.LIVE]
        return found

    # --- the end ---

    def retire(self, rows: U32Array, why: int = Reason.EVICTED) -> None:
        """No lookup finds these live keys any more; what is held or being written stays until it is let go."""
        if not len(rows):
            return
        self.record_change(rows[self.complete(rows)], added=False, why=why)
        self.index.remove(rows)
        for queue, at in self.by_queue(rows):
            queue.policy.remove(rows[at])
        self.state[rows] = RowState.RETIRED
        self.free_retired(rows)
        held = rows[self.state[rows] == RowState.RETIRED]
        for width, at in self.by_width(held):  # their slots are not given back yet, but nobody may inherit them
            records = self.parts.run(self.first[held[at]], width).ravel()
            self.tier.slot_records.erase(self.parts.page[records[self.parts.state[records] == PartState.SEALED]])

    def free_retired(self, rows: U32Array) -> None:
        """Free the retired ones of these rows that nothing holds: their slots, records and numbers."""
        gone = self.state[rows] == RowState.RETIRED
        if not gone.any():
            return
        rows = distinct(rows[gone & (self.leases[rows] == 0)])
        rows = rows[~self.in_flight(rows)]
        if not len(rows):
            return
        for width, at in self.by_width(rows):
            records = self.parts.run(self.first[rows[at]], width).ravel()
            self.vacate(records[self.parts.state[records] != PartState.EMPTY])
            self.parts.free(width, self.first[rows[at]])
        for keyspace, at in self.by_keyspace(rows):
            self.records_by_uid[keyspace.namespace.uid] -= len(at) * keyspace.schema.parts
            keyspace.rows -= len(at)
            self.keyspaces.let_go(keyspace)
        self.state[rows] = RowState.FREE
        self.index.free(rows)

    def vacate(self, parts: I64Array) -> None:
        """Free the slots of these parts, whatever they hold."""
        if not len(parts):
            return
        valid = parts[self.parts.state[parts] >= PartState.COMMITTED]
        count_up(self.missing, self.parts.row[valid])
        self.account(valid, -1)
        self.tier.give(self.parts.page[parts])
        self.parts.state[parts] = PartState.EMPTY
        self.parts.unverified[parts] = 0
        self.parts.generation[parts] += np.uint16(1)

    # --- accounts ---

    def account(self, parts: I64Array, sign: int) -> None:
        """Committed bytes of each keyspace, `parts` being committed (+1) or vacated (-1)."""
        rows = self.parts.row[parts]
        for keyspace, at in self.by_keyspace(rows):
            if keyspace.schema.parts == 1:
                keyspace.bytes += sign * len(at) * keyspace.part_bytes[0]
                continue
            numbers = parts[at] - self.first[rows[at]]
            keyspace.bytes += sign * int(np.asarray(keyspace.part_bytes, np.int64)[numbers].sum())

    def record_change(self, rows: U32Array, *, added: bool, why: int = Reason.EVICTED) -> None:
        """Count complete keys that came or went, and note the event for namespaces that somebody listens to."""
        by_namespace: dict[bytes, list[tuple[Keyspace, I64Array]]] = {}
        for keyspace, at in self.by_keyspace(rows):
            keyspace.keys += len(at) if added else -len(at)
            by_namespace.setdefault(keyspace.namespace.fingerprint, []).append((keyspace, at))
        for fingerprint, keyspaces in by_namespace.items():
            group = groups_of([(keyspace, len(at)) for keyspace, at in keyspaces])
            keys = self.index.keys[rows[np.concatenate([at for _, at in keyspaces])]]
            if added:
                self.ghosts.came(keyspaces[0][0].namespace.uid, fingerprint, group, keys)
            else:
                self.ghosts.went(fingerprint, group, keys, why)
            for keyspace, at in keyspaces if keyspaces[0][0].namespace.listeners else ():
                mine = self.index.keys[rows[at]]
                mine = mine[~self.lower.holds_keys(keyspace, mine)]  # they did not come, and do not go
                self.emit_event(keyspace, mine, added=added)

    def emit_event(self, keyspace: Keyspace, keys: U64Array, *, added: bool) -> None:
        """An event for those who listen: these keys can be served from now on, or no more."""
        if not len(keys):
            return
        packed = pack(keys, keyspace.namespace.key_bytes)
        came, went = (packed, b"") if added else (b"", packed)
        self.events.append(Event(keyspace.namespace, keyspace.schema.group, came, went))
        if len(self.events) > EVENTS_MAX:
            self.events.popleft()
            self.events_lost += 1

    def packed(self, rows: U32Array, keyspace: Keyspace) -> bytes:
        """The rows' keys, `key_bytes` each."""
        return pack(self.index.keys[rows], keyspace.namespace.key_bytes)

    def memory_bytes(self) -> int:
        """Bytes of index, part records and row columns in use."""
        per_row = self.first.itemsize + self.missing.itemsize + self.leases.itemsize + self.state.itemsize
        return self.index.memory_bytes() + self.parts.memory_bytes() + self.index.rows_end * per_row

    # --- walks ---

    def scan(self, keyspace: Keyspace) -> Iterator[U32Array]:
        """Rows of a keyspace that are not free, a bounded number per step. Ends early when there are none."""
        for start in range(0, self.index.rows_end, STEP_ROWS):
            if not keyspace.rows:
                return
            yield self.scan_step(keyspace, start, STEP_ROWS)

    def scan_step(self, keyspace: Keyspace, start: int, count: int) -> U32Array:
        """Rows of a keyspace that are not free, among the `count` rows from `start` on."""
        end = min(start + count, self.index.rows_end)
        mine = (self.index.keyspace[start:end] == keyspace.id) & (self.state[start:end] != RowState.FREE)
        return (np.flatnonzero(mine) + start).astype(np.uint32)

    def by_keyspace(self, rows: I64Array | U32Array) -> Iterator[tuple[Keyspace, I64Array]]:
        """Positions in `rows`, by keyspace."""
        keyspaces = self.index.keyspace[rows]
        if not len(keyspaces):
            return
        if (keyspaces == keyspaces[0]).all():
            yield self.keyspaces[int(keyspaces[0])], np.arange(len(keyspaces))
            return
        order = np.argsort(keyspaces, kind="stable")
        ordered = keyspaces[order]
        begins = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        numbers = ordered[np.append(0, begins)].tolist()
        for number, at in zip(numbers, np.split(order, begins), strict=True):
            yield self.keyspaces[number], at

    def by_queue(self, rows: U32Array) -> Iterator[tuple[Queue, I64Array]]:
        """Positions in `rows`, by the queue that their keyspace has, if it has one."""
        queues: dict[int, tuple[Queue, list[I64Array]]] = {}
        for keyspace, at in self.by_keyspace(rows):
            if keyspace.queue:
                queues.setdefault(id(keyspace.queue), (keyspace.queue, []))[1].append(at)
        for queue, places in queues.values():
            yield queue, np.concatenate(places)

    def widths(self, rows: I64Array | U32Array) -> U16Array:
        """How many parts each key has."""
        found: U16Array = self.keyspaces.widths[self.index.keyspace[rows]]
        return found

    def by_width(self, rows: I64Array | U32Array) -> Iterator[tuple[int, I64Array]]:
        """Positions in `rows`, by the number of parts that a key has."""
        widths: U16Array = self.keyspaces.widths[self.index.keyspace[rows]]
        if len(widths) and (widths == widths[0]).all():
            yield int(widths[0]), np.arange(len(widths))
            return
        for width in distinct(widths).tolist():
            yield width, np.flatnonzero(widths == width)


# --- keys of several groups of one request as one list, one group behind the other: what they cost is paid once ---


def numbers_of(keyspaces: Sequence[tuple[Keyspace, int]]) -> int | U16Array:
    """The number of the keyspace, if it is one; else of each key's: of each keyspace in turn so many keys."""
    if len(keyspaces) == 1:
        return keyspaces[0][0].id
    return np.repeat(np.array([keyspace.id for keyspace, _ in keyspaces], np.uint16), [count for _, count in keyspaces])


def groups_of(keyspaces: Sequence[tuple[Keyspace, int]]) -> int | U64Array:
    """The same with the numbers that groups have in their namespace."""
    if len(keyspaces) == 1:
        return keyspaces[0][0].schema.group
    return np.repeat(
        np.array([keyspace.schema.group for keyspace, _ in keyspaces], np.uint64), [count for _, count in keyspaces]
    )


def begins_of(keyspaces: Sequence[tuple[Keyspace, int]]) -> I64Array | None:
    """Where the keys of each keyspace begin that has some; None: there is one keyspace."""
    if len(keyspaces) == 1:
        return None
    counts = np.array([count for _, count in keyspaces if count], np.int64)
    begins: I64Array = np.cumsum(counts) - counts
    return begins
