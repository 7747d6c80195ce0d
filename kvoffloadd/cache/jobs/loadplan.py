"""Plans what a load copies, from its keys and the parts of them in memory. Planning changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.lowertiers import GroupLookup
from kvoffloadd.cache.memory.cache import NO_ROWS
from kvoffloadd.cache.memory.keys import spans
from kvoffloadd.cache.memory.keytable import KeyTable
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.device.plan import GroupPlan
from kvoffloadd.device.work import BlockList
from kvoffloadd.model import BoolArray, I64Array, U16Array, U32Array, U64Array

NO_PARTS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class GroupLoad:
    """Describes one group's share of a load, and the destination of its payloads."""

    keyspace: Keyspace
    keys: U64Array  # (n, WORDS)
    blocks: U32Array  # (n, blocks_per_key)
    parts: U16Array  # (held,) numbers of the parts that the rank holds
    plans: tuple[GroupPlan, ...]  # of the same parts
    # (n,) keys that the reply promised, since they hit or may come from below. Keys that were stored in the meantime
    # were not promised, and the job may not write to their blocks.
    wanted: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequest:
    """Describes a load that has keys below memory: these are fetched first, then the load is planned again."""

    groups: list[GroupLoad]
    below: list[GroupLookup]


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """Describes what a load copies. `parts` are in the order of the lists' payloads."""

    rows: U32Array  # the row of each part's key
    parts: I64Array  # record numbers
    lists: list[BlockList]  # by group: the destination of each part's payload
    lost: list[I64Array]  # by group: indices of the keys that are not copied


def plan_load(entries: KeyTable, groups: Sequence[GroupLoad], lookups: Sequence[LookupResult]) -> LoadPlan:
    """Plans the copy of the parts of these groups that are in memory now. `lookups` are those of their keys, from this
    turn of the event loop.
    """
    chosen, rows, parts, lost = [], [NO_ROWS.astype(np.int64)], [NO_PARTS], []
    for group, lookup in zip(groups, lookups, strict=True):
        mask = lookup.hits & group.wanted
        hits, width = np.flatnonzero(mask), len(group.parts)
        parts.append(entries.records(lookup.rows[hits], group.parts).ravel())
        if width == 1:
            keys, columns = hits, np.zeros(len(hits), np.int64)
        else:
            keys, columns = np.repeat(hits, width), np.tile(np.arange(width), len(hits))
        chosen.append((keys, columns))
        rows.append(lookup.rows[keys])
        lost.append(np.flatnonzero(~mask))
    records = np.concatenate(parts)
    addresses = entries.payload_addresses(records)  # of all groups at once: there may be hundreds
    lists = [
        BlockList(group.plans, group.blocks, keys, columns, addresses[span])
        for group, (keys, columns), span in zip(groups, chosen, spans(map(len, parts[1:])), strict=True)
    ]
    return LoadPlan(np.concatenate(rows).astype(np.uint32), records, lists, lost)
