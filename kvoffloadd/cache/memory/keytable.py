"""The table of keys: each key's row in the index, part records and slots, from insertion to the end of its last lease.

Event loop only. A retired key (evicted, cleared, corrupt) leaves the index at once. Its slots stay until no lease holds
it and no copy writes it; then they are freed, and its row number can be used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from kvoffloadd.cache.memory.barren import BarrenBlocks
from kvoffloadd.cache.memory.claimedkeys import ClaimedKeys
from kvoffloadd.cache.memory.deferredtouches import DeferredTouches
from kvoffloadd.cache.memory.held import HeldMemory
from kvoffloadd.cache.memory.index import Index, count_down, count_up, distinct
from kvoffloadd.cache.memory.keys import pack
from kvoffloadd.cache.memory.keyspaces import Keyspaces
from kvoffloadd.cache.memory.lowertier import LowerTier
from kvoffloadd.cache.memory.namespace import Keyspace, Queue
from kvoffloadd.cache.memory.parttable import PartState, PartTable
from kvoffloadd.cache.memory.tierevents import TierEvents
from kvoffloadd.cache.stats.missreasons import MissReasons, Reason
from kvoffloadd.errors import InternalError
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import PAGE_BYTES, BoolArray, I64Array, Tier, U8Array, U16Array, U32Array, U64Array
from kvoffloadd.native import loader
from kvoffloadd.storage.memory import MemoryTier

SCAN_ROWS, STEP_ROWS = 65_536, 8192
"""The number of rows per step of a walk that reads them, and of a walk that changes them: no step blocks the loop for
long.
"""


class RowState:
    """Names the states of a row number. Plain ints."""

    FREE: Final = 0  # unused
    LIVE: Final = 1  # in the index
    RETIRED: Final = 2  # out of the index, but still held by a lease or a copy


class KeyTable:
    """Holds all keys. Rows and part records are plain numbers; their data is in the columns here."""

    def __init__(self, tier: MemoryTier, seed: int) -> None:
        # Every row has at least one slot, and a slot at least one page.
        max_rows = tier.num_pages + 1
        self.tier = tier
        self.max_rows = max_rows
        self.index = Index(max_rows, seed)
        self.ghosts = MissReasons(seed)
        # Complete keys have a page for each record and could never take more than a quarter of this: see `scarcity`.
        self.parts = PartTable(4 * max_rows + (1 << 16))
        self.records_by_uid: Counter[int] = Counter()
        # Columns, by row.
        self.first: U32Array = reserve_array((max_rows,), np.uint32)  # its first part record
        self.missing: U16Array = reserve_array((max_rows,), np.uint16)  # parts that are not committed
        self.leases: U32Array = reserve_array((max_rows,), np.uint32)  # the number of holds
        self.state: U8Array = reserve_array((max_rows,), np.uint8)  # a `RowState`
        self.inherited: U8Array = reserve_array((max_rows,), np.uint8)  # 1: stored by an earlier run, not by this one
        # Whether a key before it in its prompt was missing at the last request for it: then it can't be restored.
        self.lost: BoolArray = reserve_array((max_rows,), np.bool_)
        self.lower: list[LowerTier] = []
        self.num_retired = 0  # rows in state RETIRED
        self.keyspaces = Keyspaces()
        self.claimed = ClaimedKeys(max_rows, seed, lambda keyspace: int(keyspace.part_pages.sum()))
        self.on_claimed: Callable[[U32Array], None] = lambda rows: None  # called when claimed keys have come
        self.uses = DeferredTouches(self.parts, self.first, self.lost, tier.touch, self.claimed, self.lower)
        self.held = HeldMemory(self.keyspaces, tier.num_pages)
        self.barren = BarrenBlocks(self.keyspaces, self.parts.runs.max_records)
        self.events = TierEvents(self.holds_keys)

    # --- beginning ---

    def insert(
        self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array, hashes: U64Array, positions: U32Array
    ) -> U32Array:
        """Makes live rows with EMPTY parts for keys that are not in memory: for each keyspace in turn, the given number
        of the keys. All keys have the same number of parts and the same queue, and there is room for rows and parts.
        `hashes`: the results of `Index.hash`.

        Raises:
            InternalError: a keyspace is retired: its keys would never be found, nor freed.
            LimitError: too many keys have almost equal hashes. Nothing was inserted.
        """
        for keyspace, _ in keyspaces:
            self.check_current(keyspace)
        width, numbers, begins = keyspaces[0][0].schema.parts, numbers_of(keyspaces), begins_of(keyspaces)
        rows = self.index.insert(numbers, keys, hashes)
        first = self.first[rows] = self.parts.runs.allocate(width, len(rows))
        self.parts.row[self.parts.run(first, width)] = rows[:, None]
        for keyspace, count in keyspaces:
            self.records_by_uid[keyspace.namespace.uid] += count * width
            keyspace.rows += count
        self.missing[rows] = width
        self.leases[rows] = self.inherited[rows] = 0
        self.state[rows] = RowState.LIVE
        self.lost[rows] = False
        for lower in self.lower:
            lower.reset(rows)
        if queue := keyspaces[0][0].queue:
            self.uses.settle()
            queue.policy.insert(rows, hashes, positions, begins)
        if self.claimed and len(came := self.claimed.came(keyspaces, keys, rows)):
            self.on_claimed(came)
        return rows

    def commit(self, parts: I64Array) -> tuple[I64Array, U32Array]:
        """Marks parts as valid. Returns those that have live keys, and the rows of all."""
        rows = self.parts.row[parts]
        self.parts.state[parts] = PartState.COMMITTED
        count_down(self.missing, rows)
        every = distinct(rows)
        self.account(parts, committed=+1, reserved=-1)
        kept: I64Array = parts[self.state[rows] == RowState.LIVE]
        self.record_change(every[(self.state[every] == RowState.LIVE) & (self.missing[every] == 0)], added=True)
        if len(kept) < len(parts):
            self.free_retired(every)
        return kept, every

    def records(self, rows: I64Array | U32Array, parts: U16Array) -> I64Array:
        """Returns record numbers, shape (rows, parts)."""
        records: I64Array = self.first[rows].astype(np.int64)[:, None] + parts.astype(np.int64)[None, :]
        return records

    def check_current(self, keyspace: Keyspace) -> None:
        """Raises InternalError if no keys may be added to the keyspace: such a call is a bug of the caller."""
        if keyspace.retired or self.keyspaces.get(keyspace.id) is not keyspace:
            raise InternalError(f"space {keyspace.id} of {keyspace.namespace.label} is retired")

    # --- queries, one result per row ---

    def find(self, keyspace: Keyspace, keys: U64Array) -> I64Array:
        """Returns the row of each key, or -1. Keys of a retired keyspace have no rows."""
        return self.find_all([(keyspace, len(keys))], keys)

    def find_all(self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array) -> I64Array:
        """Returns the rows of keys of several keyspaces, as `find`: each keyspace comes with the number of its keys."""
        rows = self.index.find(numbers_of(keyspaces), keys)
        if len(keyspaces) == 1 and not keyspaces[0][0].retired:
            return rows
        begin = 0
        for keyspace, count in keyspaces:
            if keyspace.retired:
                rows[begin : begin + count] = -1
            begin += count
        return rows

    def find_for_insert(self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array) -> tuple[I64Array, U64Array]:
        """Returns the rows as `find_all`, and the hashes of all keys, before the keys without a row are inserted.

        Raises:
            InternalError: a keyspace is retired.
        """
        for keyspace, _ in keyspaces:
            self.check_current(keyspace)
        numbers = numbers_of(keyspaces)
        hashes = self.index.hash(numbers, keys)
        return self.index.find(numbers, keys, hashes), hashes

    def states(self, rows: I64Array) -> tuple[U8Array, bool]:
        """Returns HIT for each row with all parts committed, MISS for other rows and for -1; and whether there are
        other rows.
        """
        states = np.empty(len(rows), np.uint8)
        if loader.HELPER is not None:
            return states, loader.HELPER.mark_hits(rows, self.missing, states) > 0
        held = rows >= 0
        np.logical_and(held, self.missing[rows] == 0, out=states)  # row -1 reads some other row
        return states, bool(np.count_nonzero(held) > np.count_nonzero(states))

    def count_leases(self, rows: U32Array, by: int) -> None:
        """Adds `by` to the holds of each row, for each time it is named."""
        if by < 0 and self.barren:
            self.barren.let_go(self.first[rows], self.index.keyspace[rows])
        keyspaces, held = self.index.keyspace, self.held.rows
        if loader.HELPER is not None:
            loader.HELPER.add_counts(self.leases, np.ascontiguousarray(rows, np.uint32), by, keyspaces, held)
            return
        every = distinct(rows)
        before = self.leases[every] > 0
        (count_up if by > 0 else count_down)(self.leases, rows)
        now = self.leases[every] > 0
        np.add.at(held, keyspaces[every], now.astype(np.int64) - before)

    def unheld_pages(self, rows: U32Array) -> int:
        """Returns the pages of those of these keys that are not held, each once."""
        fresh = distinct(rows[self.leases[rows] == 0])
        return int(self.keyspaces.pages[self.index.keyspace[fresh]].sum())

    def complete(self, rows: I64Array | U32Array) -> BoolArray:
        """Returns whether all parts of each key are committed."""
        flags: BoolArray = self.missing[rows] == 0
        return flags

    def has_committed(self, rows: I64Array | U32Array) -> BoolArray:
        """Returns whether a part of each key is committed."""
        flags = self.complete(rows)
        others = np.flatnonzero(~flags)
        for width, indices in self.by_width(rows[others]):
            state = self.parts.state[self.parts.run(self.first[rows[others[indices]]], width)]
            flags[others[indices]] = (state >= PartState.COMMITTED).any(axis=1)
        return flags

    def holds_keys(self, keyspace: Keyspace, keys: U64Array) -> BoolArray:
        """Returns which of the keys are complete in memory."""
        rows = self.find(keyspace, keys)
        held: BoolArray = rows >= 0
        held[held] = self.complete(rows[held])
        return held

    def in_flight(self, rows: I64Array | U32Array) -> BoolArray:
        """Returns whether a part of each key is reserved or being written."""
        flags = np.zeros(len(rows), bool)
        unready = np.flatnonzero(self.missing[rows] > 0)
        for width, indices in self.by_width(rows[unready]):
            state = self.parts.state[self.parts.run(self.first[rows[unready[indices]]], width)]
            flags[unready[indices]] = (state == PartState.RESERVED).any(axis=1)
        return flags

    def evictable(self, rows: U32Array) -> BoolArray:
        """Returns whether each key is live, not held and not in flight."""
        flags: BoolArray = (self.leases[rows] == 0) & (self.state[rows] == RowState.LIVE)
        unheld = np.flatnonzero(flags)
        flags[unheld] = ~self.in_flight(rows[unheld])
        return flags

    def expendable(self, rows: U32Array) -> BoolArray:
        """Returns whether each key is evictable, and no claim keeps it."""
        flags = self.evictable(rows)
        return flags & ~self.claimed.is_claimed(rows) if self.claimed else flags

    def vacant(self, rows: U32Array) -> BoolArray:
        """Returns whether no part of each key has a slot."""
        flags = np.zeros(len(rows), bool)
        for width, indices in self.by_width(rows):
            states = self.parts.state[self.parts.run(self.first[rows[indices]], width)]
            flags[indices] = (states == PartState.EMPTY).all(axis=1)
        return flags

    def owners(self, records: I64Array) -> I64Array:
        """Returns the row of the key that has each of these records; -1 for a free record, which still names its former
        row.
        """
        rows = self.parts.row[records].astype(np.int64)
        rows[self.state[rows] == RowState.FREE] = -1
        used = np.flatnonzero(rows >= 0)
        numbers = records[used] - self.first[rows[used]]
        strange = (numbers < 0) | (numbers >= self.widths(rows[used]))
        rows[used[strange]] = -1
        return rows

    def live(self, rows: U32Array) -> U32Array:
        """Returns those of the rows that are live."""
        subset: U32Array = rows[self.state[rows] == RowState.LIVE]
        return subset

    # --- removal ---

    def retire(self, rows: U32Array, why: int = Reason.EVICTED) -> None:
        """Removes live keys from the index. Slots that are held or being written are freed later."""
        if not len(rows):
            return
        self.uses.settle()
        self.record_change(rows[self.complete(rows)], added=False, why=why)
        self.index.remove(rows)
        for queue, indices in self.by_queue(rows):
            queue.policy.remove(rows[indices])
        if self.claimed:
            self.claimed.went(rows)
        self.state[rows] = RowState.RETIRED
        self.num_retired += len(rows)
        self.free_retired(rows)
        held = rows[self.state[rows] == RowState.RETIRED]
        for width, indices in self.by_width(held):  # their slots are not free yet, but a successor must not find them
            records = self.parts.run(self.first[held[indices]], width).ravel()
            self.tier.slot_records.erase(self.parts.page[records[self.parts.state[records] == PartState.SEALED]])

    def free_retired(self, rows: U32Array) -> None:
        """Frees slots, records and numbers of those of these rows that are retired and not held."""
        retired = self.state[rows] == RowState.RETIRED
        if not retired.any():
            return
        rows = distinct(rows[retired & (self.leases[rows] == 0)])
        rows = rows[~self.in_flight(rows)]
        if not len(rows):
            return
        for width, indices in self.by_width(rows):
            records = self.parts.run(self.first[rows[indices]], width).ravel()
            self.vacate(records[self.parts.state[records] != PartState.EMPTY])
            self.parts.runs.free(width, self.first[rows[indices]])
        for keyspace, indices in self.by_keyspace(rows):
            self.records_by_uid[keyspace.namespace.uid] -= len(indices) * keyspace.schema.parts
            keyspace.rows -= len(indices)
            self.keyspaces.let_go(keyspace)
        self.state[rows] = RowState.FREE
        self.num_retired -= len(rows)
        self.index.free(rows)

    def vacate(self, parts: I64Array) -> None:
        """Frees the slots of these parts, in any state."""
        if not len(parts):
            return
        valid = parts[self.parts.state[parts] >= PartState.COMMITTED]
        count_up(self.missing, self.parts.row[valid])
        self.account(valid, committed=-1)
        if len(valid) < len(parts):
            self.account(parts[self.parts.state[parts] == PartState.RESERVED], reserved=-1)
        self.tier.give(self.parts.page[parts])
        self.parts.state[parts] = PartState.EMPTY
        self.parts.unverified[parts] = 0
        self.parts.generation[parts] += np.uint16(1)

    # --- counts and events ---

    def account(self, parts: I64Array, *, committed: int = 0, reserved: int = 0) -> None:
        """Counts, for each keyspace, the bytes of these parts that are committed (+1) or vacated (-1), and the pages of
        their slots that are reserved (+1), or no longer reserved (-1). What is neither is not taken any more.
        """
        rows = self.parts.row[parts]
        if (committed or reserved < 0) and self.barren:
            self.barren.let_go(self.first[rows], self.index.keyspace[rows])
        for keyspace, indices in self.by_keyspace(rows):
            numbers = 0 if keyspace.schema.parts == 1 else parts[indices] - self.first[rows[indices]]
            if committed:
                keyspace.bytes += committed * _total(keyspace.part_bytes, numbers, len(indices))
            pages = _total(keyspace.part_pages, numbers, len(indices))
            self.held.reserved[keyspace.id] += reserved * pages
            keyspace.take((committed + reserved) * pages)

    def payload_addresses(self, parts: I64Array) -> U64Array:
        """Returns u64 addresses of the parts' payloads, valid while the parts are held."""
        return self.parts.page[parts].astype(np.uint64) * np.uint64(PAGE_BYTES) + np.uint64(self.tier.address)

    def payload_bytes(self, parts: I64Array) -> I64Array:
        """Returns the size of each part's payload."""
        rows = self.parts.row[parts]
        sizes = np.zeros(len(parts), np.int64)
        for keyspace, indices in self.by_keyspace(rows):
            each = np.asarray(keyspace.part_bytes, np.int64)
            sizes[indices] = each[parts[indices] - self.first[rows[indices]]]
        return sizes

    def record_change(self, rows: U32Array, *, added: bool, why: int = Reason.EVICTED) -> None:
        """Records that complete keys were added or removed: updates the counts and the reasons of later misses, and
        emits an event if the namespace has listeners.
        """
        by_namespace: dict[bytes, list[tuple[Keyspace, I64Array]]] = {}
        for keyspace, indices in self.by_keyspace(rows):
            keyspace.keys += len(indices) if added else -len(indices)
            by_namespace.setdefault(keyspace.namespace.fingerprint, []).append((keyspace, indices))
        for fingerprint, keyspaces in by_namespace.items():
            group = groups_of([(keyspace, len(indices)) for keyspace, indices in keyspaces])
            keys = self.index.keys.take(rows[np.concatenate([indices for _, indices in keyspaces])], axis=0)
            hashes = self.ghosts.hash(group, keys)
            if added:
                self.ghosts.came(keyspaces[0][0].namespace.uid, fingerprint, hashes)
            else:
                self.ghosts.went(fingerprint, hashes, why)
            for keyspace, indices in keyspaces if keyspaces[0][0].namespace.listeners else ():
                self.events.changed(keyspace, self.index.keys[rows[indices]], Tier.MEMORY, added=added)

    def packed(self, rows: U32Array, keyspace: Keyspace) -> bytes:
        """Returns the rows' keys packed, `key_bytes` each."""
        return pack(self.index.keys[rows], keyspace.namespace.key_bytes)

    def memory_bytes(self) -> int:
        """Returns the used bytes of index, part records and row columns."""
        per_row = self.first.itemsize + self.missing.itemsize + self.leases.itemsize + self.state.itemsize
        return self.index.memory_bytes() + self.parts.memory_bytes() + self.index.rows_end * per_row

    # --- walks ---

    def scan(self, keyspace: Keyspace) -> Iterator[U32Array]:
        """Yields the rows of a keyspace that are not free, a bounded number per step. Ends early when none is left."""
        for start in range(0, self.index.rows_end, STEP_ROWS):
            if not keyspace.rows:
                return
            yield self.scan_step(keyspace, start, STEP_ROWS)

    def scan_step(self, keyspace: Keyspace, start: int, count: int) -> U32Array:
        """Returns the rows of a keyspace that are not free, among the `count` rows from `start` on."""
        end = min(start + count, self.index.rows_end)
        used = (self.index.keyspace[start:end] == keyspace.id) & (self.state[start:end] != RowState.FREE)
        return (np.flatnonzero(used) + start).astype(np.uint32)

    def by_keyspace(self, rows: I64Array | U32Array) -> Iterator[tuple[Keyspace, I64Array]]:
        """Groups rows by keyspace: yields each keyspace with the indices of its rows in `rows`."""
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
        for number, indices in zip(numbers, np.split(order, begins), strict=True):
            yield self.keyspaces[number], indices

    def by_queue(self, rows: U32Array) -> Iterator[tuple[Queue, I64Array]]:
        """Groups rows by the queue of their keyspace, as `by_keyspace`. Leaves out rows of keyspaces that have no
        queue.
        """
        queues: dict[int, tuple[Queue, list[I64Array]]] = {}
        for keyspace, indices in self.by_keyspace(rows):
            if keyspace.queue:
                queues.setdefault(id(keyspace.queue), (keyspace.queue, []))[1].append(indices)
        for queue, groups in queues.values():
            yield queue, np.concatenate(groups)

    def widths(self, rows: I64Array | U32Array) -> U16Array:
        """Returns the number of parts of each key."""
        widths: U16Array = self.keyspaces.widths[self.index.keyspace[rows]]
        return widths

    def by_width(self, rows: I64Array | U32Array) -> Iterator[tuple[int, I64Array]]:
        """Groups rows by the number of parts of their keys, as `by_keyspace`."""
        widths = self.widths(rows)
        if len(widths) and (widths == widths[0]).all():
            yield int(widths[0]), np.arange(len(widths))
            return
        for width in distinct(widths).tolist():
            yield width, np.flatnonzero(widths == width)


# --- keys of several groups of a request as one array, one group after the other: fixed costs are paid once ---


def _total(sizes: list[int] | I64Array, numbers: int | I64Array, count: int) -> int:
    """Returns the sum of the sizes with these numbers; `count` times the size if there is only one number."""
    return count * int(sizes[numbers]) if isinstance(numbers, int) else int(np.asarray(sizes, np.int64)[numbers].sum())


def numbers_of(keyspaces: Sequence[tuple[Keyspace, int]]) -> int | U16Array:
    """Returns the number of the keyspace if there is only one, or else one number per key, for each keyspace's count of
    keys in turn.
    """
    if len(keyspaces) == 1:
        return keyspaces[0][0].id
    return np.repeat(np.array([keyspace.id for keyspace, _ in keyspaces], np.uint16), [count for _, count in keyspaces])


def groups_of(keyspaces: Sequence[tuple[Keyspace, int]]) -> int | U64Array:
    """Returns group numbers as `numbers_of`: the numbers that groups have in their namespace."""
    if len(keyspaces) == 1:
        return keyspaces[0][0].schema.group
    return np.repeat(
        np.array([keyspace.schema.group for keyspace, _ in keyspaces], np.uint64), [count for _, count in keyspaces]
    )


def begins_of(keyspaces: Sequence[tuple[Keyspace, int]]) -> I64Array | None:
    """Returns where the keys of each keyspace begin, for those that have keys; None if there is only one keyspace."""
    if len(keyspaces) == 1:
        return None
    counts = np.array([count for _, count in keyspaces if count], np.int64)
    begins: I64Array = np.cumsum(counts) - counts
    return begins
