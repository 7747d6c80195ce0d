"""The conservation laws of the cache, checked from its columns. Walks everything: for tests, `verify` and drills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.cache.entries import RowState
from kvoffloadd.cache.parts import PartState
from kvoffloadd.model import slot_pages

if TYPE_CHECKING:
    from kvoffloadd.cache.cache import Cache
    from kvoffloadd.cache.entries import Entries
    from kvoffloadd.model import I64Array, U32Array


def check(cache: Cache, holds: int, reserved: int) -> list[str]:
    """What is wrong; nothing: an empty list.

    `holds` is the number of rows that all read leases and running loads name, `reserved` the number of parts that all
    write leases and running stores own.
    """
    entries = cache.entries
    rows = np.flatnonzero(entries.state[: entries.index.rows_end] != RowState.FREE).astype(np.uint32)
    records = _records(entries, rows)
    filled = records[entries.parts.state[records] != PartState.EMPTY]
    in_flight = np.isin(entries.parts.state[filled], (PartState.RESERVED, PartState.WRITING))
    findings = [
        *entries.index.check(),
        *cache.tier.check(entries.parts.page[filled], _sizes(entries, filled), filled.astype(np.uint32)),
        *_check_rows(entries, rows),
        *_check_spaces(cache, rows),
        *_check_ledger(cache, rows),
    ]
    if int(entries.leases[rows].sum()) != holds:
        findings.append(
            f"leases: keys are held {int(entries.leases[rows].sum())} times, leases and loads account for {holds}"
        )
    if int(in_flight.sum()) != reserved:
        findings.append(f"leases: {int(in_flight.sum())} parts are in flight, leases and stores account for {reserved}")
    stranded = np.count_nonzero(entries.parts.state) - len(filled)
    if stranded:
        findings.append(f"parts: {stranded} records hold a slot that no key owns")
    return findings


def _records(entries: Entries, rows: U32Array) -> I64Array:
    runs = [entries.parts.run(entries.first[rows[at]], s.schema.parts).ravel() for s, at in entries.by_space(rows)]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)


def _sizes(entries: Entries, records: I64Array) -> I64Array:
    rows = entries.parts.row[records]
    sizes = np.zeros(len(records), np.int64)
    for space, at in entries.by_space(rows):
        pages = np.array([slot_pages(size) for size in space.part_bytes], np.int64)
        sizes[at] = pages[records[at] - entries.first[rows[at]]]
    return sizes


def _check_rows(entries: Entries, rows: U32Array) -> list[str]:
    findings = []
    live = rows[entries.state[rows] == RowState.LIVE]
    if len(live) + len(rows[entries.state[rows] == RowState.RETIRED]) != len(entries.index):
        findings.append(f"rows: {len(rows)} are in use, the index has given out {len(entries.index)}")
    for space, at in entries.by_space(rows):
        records = entries.parts.run(entries.first[rows[at]], space.schema.parts)
        if (entries.parts.row[records] != rows[at][:, None]).any():
            findings.append(f"parts: records of group {space.schema.group} belong to other keys")
        missing = (entries.parts.state[records] < PartState.COMMITTED).sum(axis=1)
        if (missing != entries.missing[rows[at]]).any():
            findings.append(f"rows: missing parts of group {space.schema.group} are miscounted")
        found = entries.index.find(space.id, entries.index.keys[rows[at]])
        is_live = entries.state[rows[at]] == RowState.LIVE
        if (found[is_live] != rows[at][is_live]).any():
            findings.append(f"index: a live key of group {space.schema.group} is not found")
        if (found[~is_live] == rows[at][~is_live]).any():
            findings.append(f"index: a retired key of group {space.schema.group} is found")
    return findings


def _check_spaces(cache: Cache, rows: U32Array) -> list[str]:
    findings = []
    entries = cache.entries
    counted = {space.id: at for space, at in entries.by_space(rows)}
    for space in entries.spaces.values():
        mine = rows[counted[space.id]] if space.id in counted else rows[:0]
        live = entries.live(mine)
        complete = int(entries.complete(live).sum())
        if (len(mine), complete) != (space.rows, space.keys):
            findings.append(f"space {space.id}: {len(mine)} rows, {complete} keys; counted {space.rows}, {space.keys}")
        records = entries.parts.run(entries.first[mine], space.schema.parts)
        sizes = np.broadcast_to(np.asarray(space.part_bytes, np.int64), records.shape)
        held_bytes = int(sizes[entries.parts.state[records] >= PartState.COMMITTED].sum())
        if held_bytes != space.bytes:
            findings.append(f"space {space.id}: {held_bytes} bytes committed, counted {space.bytes}")
    queued = sum(len(queue.policy) for queue in cache.eviction.queues.values())
    live_rows = len(entries.live(rows))
    if queued != live_rows:
        findings.append(f"eviction: policies hold {queued} keys, {live_rows} are live")
    return findings


def _check_ledger(cache: Cache, rows: U32Array) -> list[str]:
    entries = cache.entries
    records = _records(entries, entries.live(rows))
    sealed = records[entries.parts.state[records] == PartState.SEALED]
    mine = entries.parts.row[sealed]
    return cache.tier.ledger.check(
        entries.parts.page[sealed],
        entries.index.keys[mine],
        entries.parts.digest[sealed],
        entries.index.space[mine].astype(np.int64),
        sealed - entries.first[mine],
    )
