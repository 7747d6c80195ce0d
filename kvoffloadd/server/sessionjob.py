"""One job of a session: what it was asked for, and what its completion tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvoffloadd.cache.jobs.job import Completion, CopyOptions, Job, LoadPlan
from kvoffloadd.cache.lower import GroupLookup
from kvoffloadd.cache.memory.cache import NO_ROWS, Cache
from kvoffloadd.cache.memory.keys import spans
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.progress import Progress
from kvoffloadd.device.work import BlockList
from kvoffloadd.model import BoolArray, I64Array, Outcome, U32Array, U64Array
from kvoffloadd.protocol.messages import Completed
from kvoffloadd.server.registration import RegisteredGroup, Registration

NO_PARTS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class GroupJob:
    """One group's share of a job, checked."""

    keyspace: Keyspace
    registered: RegisteredGroup
    keys: U64Array  # (n, WORDS)
    blocks: U32Array  # (n, blocks_per_key)
    first: int  # position of the first key in its prompt


class Charge(NamedTuple):
    """Bytes that a job is charged until its end."""

    outbox_bytes: int  # for its completion, reserved in the outbox
    job_bytes: int  # for what it holds in memory, to its uid


@dataclass(slots=True, eq=False)
class SessionJob:
    """A peer's store, and what its completion needs."""

    id: int
    registration: Registration
    options: CopyOptions
    charge: Charge
    # By group: of each payload that is copied the index of its key, as often as the rank holds parts of it; and the
    # indices of keys that are not copied.
    chosen: list[I64Array]
    lost: list[I64Array]
    remark: str = ""  # for the peer's people, if nothing goes wrong
    job: Job | None = None  # once it is under way
    counted: list[tuple[Progress, int]] = field(default_factory=list)  # its number in each `Progress` it is counted in

    def failed(self, result: Completion) -> list[I64Array]:
        """By group, the indices of the keys that were not stored or loaded."""
        if result.outcome not in (Outcome.DONE, Outcome.PARTIAL):
            return [np.union1d(chosen, lost) for chosen, lost in zip(self.chosen, self.lost, strict=True)]
        if not len(result.bad):
            return self.lost
        masks = np.split(result.bad, np.cumsum([len(chosen) for chosen in self.chosen])[:-1])
        return [np.union1d(chosen[m], lost) for chosen, lost, m in zip(self.chosen, self.lost, masks, strict=True)]


@dataclass(slots=True, eq=False)
class SessionLoad(SessionJob):
    """A peer's load, and what its completion needs."""

    cache: Cache = field(kw_only=True)
    groups: list[GroupJob] = field(kw_only=True)
    # By group: which keys the reply promised, since they hit or may come from below. Keys that were stored meanwhile
    # were not promised, and the job may not write to their blocks.
    wanted: list[BoolArray] = field(kw_only=True)
    lookups: list[LookupResult] = field(kw_only=True)  # by group, from the request; empty: to be looked up again
    below: list[GroupLookup] = field(kw_only=True)  # none: nothing may come

    def resolve(self) -> LoadPlan:
        """Plan what the job copies as things stand, and set `chosen` and `lost`. Called at once, and a second time when
        the tiers below memory are through. After the last call the job has no use for its keys, nor for their keyspace.
        """
        last = not (self.lookups and self.below)
        lookups = self.lookups or self.cache.find_all([(group.keyspace, group.keys) for group in self.groups])
        masks = [lookup.hits & mask for lookup, mask in zip(lookups, self.wanted, strict=True)]
        chosen, rows, parts = [], [NO_ROWS.astype(np.int64)], [NO_PARTS]
        for group, mask, lookup in zip(self.groups, masks, lookups, strict=True):
            hits, width = np.flatnonzero(mask), len(group.registered.parts)
            parts.append(self.cache.entries.records(lookup.rows[hits], group.registered.parts).ravel())
            if width == 1:
                keys, columns = hits, np.zeros(len(hits), np.int64)
            else:
                keys, columns = np.repeat(hits, width), np.tile(np.arange(width), len(hits))
            chosen.append((keys, columns))
            rows.append(lookup.rows[keys])
        records = np.concatenate(parts)
        addresses = self.cache.entries.payload_addresses(records)  # of all groups at once: there may be hundreds
        lists = [
            BlockList(group.registered.plans, group.blocks, keys, columns, addresses[span])
            for group, (keys, columns), span in zip(self.groups, chosen, spans(map(len, parts[1:])), strict=True)
        ]
        plan = LoadPlan(np.concatenate(rows).astype(np.uint32), records, lists)
        lost = [np.flatnonzero(~mask) for mask in masks]
        # Together, at the end: what the job's end reads is whole, whatever fails before.
        self.chosen, self.lost, self.lookups = [one.keys for one in lists], lost, []
        if last:
            self.groups, self.below = [], []
        return plan


def completed(request: SessionJob, result: Completion) -> Completed:
    """What the peer is told at the job's end."""
    failed = request.failed(result)
    outcome = result.outcome
    if outcome is Outcome.DONE and any(map(len, failed)):
        outcome = Outcome.PARTIAL
    return Completed(
        job=request.id,
        outcome=outcome.value,  # type: ignore[arg-type]  # LOST is the client library's alone
        bytes=result.bytes,
        seconds=result.seconds,
        failed=[indices.astype("<u4").tobytes() for indices in failed],
        reason=(result.reason or request.remark)[:200],
    )
