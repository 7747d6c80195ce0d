"""Checks the conservation laws of the cache from its columns. Walks everything: for tests, `verify` and drills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.keyspaces import NOBODY, NUMBERS
from kvoffloadd.cache.memory.keytable import KeyTable, RowState
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.model import BoolArray, I64Array, U32Array

STEP_ROWS = 8_192
"""The number of rows, records or slots that one step inspects, so that no step blocks the loop for more than a few
milliseconds.
"""


def check(cache: Cache, holds: int, reserved: int) -> list[str]:
    """Returns a list of errors, empty if there are none.

    `holds` is the number of rows that all read leases and running loads name, `reserved` the number of parts that all
    write leases and running stores own.
    """
    return [finding for found in steps(cache, lambda: (holds, reserved)) for finding in found]


def steps(cache: Cache, accounts: Callable[[], tuple[int, int]]) -> Iterator[list[str]]:
    """Checks in steps, as `check`. Each step's findings are true at its moment: the cache may change before the next
    one.

    `accounts` returns `holds` and `reserved`; the step that needs them calls it.
    """
    entries, tier = cache.entries, cache.tier
    yield _check_counts(entries, *accounts())
    yield _check_spaces(cache)
    yield _check_bytes(entries)
    yield _check_held(entries)
    yield cache.retention.check()
    yield cache.tombstones.check()
    yield entries.index.check_table()
    yield tier.check_pools()
    for start in _spans(lambda: entries.index.rows_end, STEP_ROWS):
        used = np.flatnonzero(entries.state[start : start + STEP_ROWS] != RowState.FREE)
        yield _check_rows(cache, (used + start).astype(np.uint32))
    for start in _spans(lambda: entries.parts.runs.used, STEP_ROWS):
        yield _check_records(entries, start, min(start + STEP_ROWS, entries.parts.runs.used))
    num_slabs = max(1, STEP_ROWS // tier.slab_pages)
    for start in _spans(lambda: tier.num_slabs, num_slabs):
        yield _check_slots(cache, range(start, min(start + num_slabs, tier.num_slabs)))


def _spans(end: Callable[[], int], step: int) -> Iterator[int]:
    """Yields 0, `step`, ... up to the current result of `end`."""
    start = 0
    while start < end():
        yield start
        start += step


# --- of one moment: counts of everything ---------------------------------------------------------------


def _check_counts(entries: KeyTable, holds: int, reserved: int) -> list[str]:
    findings = [f"parts: {finding}" for finding in entries.parts.runs.check()]
    end = entries.index.rows_end
    rows, held = int(np.count_nonzero(entries.state[:end])), int(entries.leases[:end].sum())
    if rows != len(entries.index):
        findings.append(f"rows: {rows} are in use, the index has given out {len(entries.index)}")
    live = int(np.count_nonzero(entries.state[:end] == RowState.LIVE))
    if live != entries.index.num_found:
        findings.append(f"index: it finds {entries.index.num_found} rows, {live} are live")
    if rows - live != entries.num_retired:
        findings.append(f"rows: {rows - live} are retired, counted {entries.num_retired}")
    if held != holds:
        findings.append(f"leases: keys are held {held} times, leases and loads account for {holds}")
    state = entries.parts.state[: entries.parts.runs.used]
    in_flight = int(np.count_nonzero(state == PartState.RESERVED))
    if in_flight != reserved:
        findings.append(f"leases: {in_flight} parts are in flight, leases and stores account for {reserved}")
    taken = Counter[int]()
    for keyspace in list(entries.keyspaces.values()):
        taken[keyspace.namespace.uid] += keyspace.rows * keyspace.schema.parts
    if taken.total() != entries.parts.runs.taken:
        findings.append(f"parts: keys have {taken.total()} records, {entries.parts.runs.taken} are given out")
    if +taken != +entries.records_by_uid:
        findings.append("parts: the records of a user are miscounted")
    if (entries.owners(entries.parts.runs.listed()) >= 0).any():
        findings.append("parts: a key has free records")
    return findings


def _check_spaces(cache: Cache) -> list[str]:
    findings = []
    entries = cache.entries
    state = entries.state[: entries.index.rows_end]
    keyspaces = entries.index.keyspace[: len(state)]
    end = 1 + max(entries.keyspaces, default=0)
    live = state == RowState.LIVE
    rows = np.bincount(keyspaces[state != RowState.FREE], minlength=end)
    keys = np.bincount(keyspaces[live & (entries.missing[: len(state)] == 0)], minlength=end)
    for keyspace in list(entries.keyspaces.values()):
        found, counted = (int(rows[keyspace.id]), int(keys[keyspace.id])), (keyspace.rows, keyspace.keys)
        if found != counted:
            findings.append(f"space {keyspace.id}: {found} rows and keys, counted {counted}")
        if keyspace.retired and not keyspace.rows:
            findings.append(f"space {keyspace.id}: retired, without rows, and still on the table")
    current = [keyspace for namespace in cache.namespaces.values() for keyspace in namespace.keyspaces.values()]
    findings += [
        f"space {keyspace.id}: of a namespace, but retired or not on the table"
        for keyspace in current
        if keyspace.retired or not entries.keyspaces.has(keyspace)
    ]
    findings += cache.namespaces.check()
    if rows.sum() != rows[list(entries.keyspaces)].sum():
        findings.append("rows: some are of spaces that there are not")
    queued = sum(len(queue.policy) for queue in cache.eviction.queues.values())
    if queued != np.count_nonzero(live):
        findings.append(f"eviction: policies hold {queued} keys, {np.count_nonzero(live)} are live")
    sizes = Counter(size for keyspace in entries.keyspaces.values() for size in keyspace.slots)
    if sizes != cache.eviction.sizes:
        findings.append(f"eviction: spaces use slots of {len(sizes)} sizes, counted {len(cache.eviction.sizes)}")
    aside = sum(queue.policy.num_aside for queue in cache.eviction.queues.values())
    if aside > entries.claimed.num_rows and not cache.eviction.any_aside:
        findings.append(f"eviction: {aside} keys are set aside, and would stay there")
    in_flight = int(np.count_nonzero(entries.parts.state[: entries.parts.runs.used] == PartState.RESERVED))
    in_use = int(np.count_nonzero(live & (entries.leases[: len(state)] > 0))) + in_flight
    claimed = entries.claimed.num_rows
    if aside > in_use + claimed:
        findings.append(f"eviction: {aside} keys are set aside, at most {in_use} are in use and {claimed} are claimed")
    return findings


def _check_bytes(entries: KeyTable) -> list[str]:
    end = 1 + max(entries.keyspaces, default=0)
    state = entries.parts.state[: entries.parts.runs.used]
    committed, taken = state >= PartState.COMMITTED, state != PartState.EMPTY
    taken_pages = _of_keyspaces(entries, end, taken, lambda keyspace: keyspace.part_pages.tolist()).tolist()
    held_bytes = _of_keyspaces(entries, end, committed, lambda keyspace: keyspace.part_bytes).tolist()
    findings = [
        f"space {keyspace.id}: {held_bytes[keyspace.id]} bytes committed, counted {keyspace.bytes}"
        for keyspace in list(entries.keyspaces.values())
        if held_bytes[keyspace.id] != keyspace.bytes
    ]
    findings += [
        f"space {keyspace.id}: {taken_pages[keyspace.id]} pages of slots taken, counted {keyspace.taken_pages}"
        for keyspace in list(entries.keyspaces.values())
        if taken_pages[keyspace.id] != keyspace.taken_pages
    ]
    return findings + entries.keyspaces.quotas.check(entries.keyspaces)


def _check_held(entries: KeyTable) -> list[str]:
    """Checks the counts on which the shares of users depend."""
    findings, end = [], entries.index.rows_end
    held = np.bincount(entries.index.keyspace[:end][entries.leases[:end] > 0], minlength=NUMBERS)
    if not np.array_equal(held, entries.held.rows):
        findings.append("held: the keys of a keyspace that are held are miscounted")
    in_flight = entries.parts.state[: entries.parts.runs.used] == PartState.RESERVED
    reserved = _of_keyspaces(entries, NUMBERS, in_flight, lambda keyspace: keyspace.part_pages.tolist())
    if not np.array_equal(reserved, entries.held.reserved):
        findings.append("held: the pages of a keyspace that are reserved are miscounted")
    for number, keyspace in list(entries.keyspaces.items()):
        noted = int(entries.keyspaces.pages[number]), int(entries.keyspaces.uids[number])
        if noted != (found := (int(keyspace.part_pages.sum()), keyspace.namespace.uid)):
            findings.append(f"held: space {number} has {found} pages a key and uid, noted are {noted}")
    uids = entries.keyspaces.uids
    if np.count_nonzero(uids != NOBODY) != len(entries.keyspaces):
        findings.append("held: a space that there is not has a user")
    findings += [
        f"held: the spaces of uid {uid} are not those that are noted"
        for uid in entries.keyspaces.by_uid
        if not np.array_equal(entries.keyspaces.numbers_of(uid), np.flatnonzero(uids == uid))
    ]
    return findings


def _of_keyspaces(
    entries: KeyTable, end: int, counts: BoolArray, sizes_of: Callable[[Keyspace], list[int]]
) -> I64Array:
    """Returns the sum, for each keyspace below `end`, of the sizes of its parts over the records that count."""
    base, sizes = np.zeros(end, np.int64), [0]
    for keyspace in list(entries.keyspaces.values()):
        base[keyspace.id] = len(sizes)
        sizes += sizes_of(keyspace)
    parts, records = entries.parts, np.flatnonzero(counts)
    of = entries.index.keyspace[parts.row[records]].astype(np.int64)
    positions = base[np.minimum(of, end - 1)] + records - entries.first[parts.row[records]]
    each = np.array(sizes, np.float64)[np.clip(positions, 0, len(sizes) - 1)]  # exact: sums are far below 2^53
    found: I64Array = np.bincount(of, weights=each, minlength=end).astype(np.int64)
    return found


# --- of one row, record or slot after the other ----------------------------------------------------------


def _check_rows(cache: Cache, rows: U32Array) -> list[str]:
    """Checks that each row has the records that it names, that these have the slots, that slots and records agree with
    the pool, and that lookups find the row.
    """
    entries, tier = cache.entries, cache.tier
    parts, findings = entries.parts, []
    found_at = entries.index.find(entries.index.keyspace[rows], entries.index.keys[rows])
    taken, sizes, live = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for keyspace, indices in entries.by_keyspace(rows):
        own_rows = rows[indices]
        records = parts.run(entries.first[own_rows], keyspace.schema.parts)
        if (parts.row[records] != own_rows[:, None]).any():
            findings.append(f"parts: records of group {keyspace.schema.group} belong to other keys")
        missing = (parts.state[records] < PartState.COMMITTED).sum(axis=1)
        if (missing != entries.missing[own_rows]).any():
            findings.append(f"rows: missing parts of group {keyspace.schema.group} are miscounted")
        found = found_at[indices]
        is_live = entries.state[own_rows] == RowState.LIVE
        if (found[is_live] != own_rows[is_live]).any():
            findings.append(f"index: a live key of group {keyspace.schema.group} is not found")
        if (found[~is_live] == own_rows[~is_live]).any():
            findings.append(f"index: a retired key of group {keyspace.schema.group} is found")
        pages = np.broadcast_to(keyspace.part_pages, records.shape)
        filled = parts.state[records] != PartState.EMPTY
        if not filled.any(axis=1).all():  # there are only as many row numbers as there can be slots
            findings.append(f"rows: a key of group {keyspace.schema.group} has no slot")
        taken.append(records[filled])
        sizes.append(pages[filled])
        live.append(records[is_live].ravel())
    records = np.concatenate(taken)  # of all keyspaces at once: there may be hundreds with few keys each
    findings += tier.check_slots(parts.page[records], np.concatenate(sizes), records.astype(np.uint32))
    return findings + _check_sealed(cache, np.concatenate(live))


def _check_sealed(cache: Cache, records: I64Array) -> list[str]:
    """Checks what a successor would find of these parts of live keys."""
    entries = cache.entries
    sealed = records[entries.parts.state[records] == PartState.SEALED]
    rows = entries.parts.row[sealed]
    return cache.tier.slot_records.check(
        entries.parts.page[sealed],
        entries.index.keys[rows],
        entries.parts.digest[sealed],
        entries.index.keyspace[rows].astype(np.int64),
        sealed - entries.first[rows],
    )


def _check_records(entries: KeyTable, start: int, stop: int) -> list[str]:
    """Checks that each record that is not empty belongs to a key, and that no record of a key is free."""
    owned = entries.owners(np.arange(start, stop)) >= 0
    findings = [f"parts: {finding}" for finding in entries.parts.runs.check_blocks(start, stop)]
    stranded = int(np.count_nonzero((entries.parts.state[start:stop] != PartState.EMPTY) & ~owned))
    if stranded:
        findings.append(f"parts: {stranded} records hold a slot that no key owns")
    if (entries.parts.runs.in_map(start, stop) & owned).any():
        findings.append("parts: a key has free records")
    return findings


def _check_slots(cache: Cache, slabs: range) -> list[str]:
    """Checks that each owned slot belongs to its owner, and that a successor finds exactly the slots that are sealed
    and belong to live keys.
    """
    findings = []
    entries = cache.entries
    pages, owners = cache.tier.owned(slabs)
    state = entries.parts.state[owners]
    if ((entries.parts.page[owners] != pages) | (state == PartState.EMPTY)).any():
        findings.append("memory: a slot is owned by a part that does not have it")
    expected = pages[(state == PartState.SEALED) & (entries.state[entries.parts.row[owners]] == RowState.LIVE)]
    written = cache.tier.slot_records.written(slabs)
    if not np.array_equal(written, expected):
        findings.append(f"slot records: {len(written)} slots have records, {len(expected)} are sealed and can be found")
    return findings
