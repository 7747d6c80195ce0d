"""Pushing puts complete, sealed keys into the remote store in the background, within a budget.

Event loop only. The store's client reads slots of rows that are held here until the put has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from kvoffloadd.agentwire.frames import HEADER_BYTES
from kvoffloadd.cache.lower.backlog import LOOK_AHEAD_S, Backlog, BacklogBatch, Budget
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.keytable import RowState
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.tombstones import Space
from kvoffloadd.cache.remote.contents import RemoteContents, RemotePlace
from kvoffloadd.model import BoolArray, U8Array, U32Array
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.storage.remote.transfers import Names, RemoteStatus

BATCH_BYTES = 16 << 20
BATCH_SHARE = 64
"""The limits of one put: bytes, and a fraction (1/n) of memory, since keys being put can't be evicted."""

GROWS: Final = 16
"""After a put that the store could not finish the limit is halved; after each other put it grows by one part in this
many of the maximum. A slow link has no time for the largest puts.
"""

PUT_S: Final = 60.0
"""A put that has not begun by then is dropped."""

PUTS_UNDER_WAY = 2
"""One put is under way while the next is prepared."""

PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 30.0
"""How long pushing pauses after the store had no room."""


@dataclass(slots=True, eq=False)
class PendingPush:
    """One batch under way. Its rows are held until its end."""

    batch: BacklogBatch
    place: RemotePlace
    is_put: bool = False  # the store's client reads the slots


@dataclass(slots=True)
class PushCounters:
    """Counts since the start. `not_pushed`: keys that were not put as intended, by reason."""

    keys: int = 0
    bytes: int = 0
    not_pushed: Counter[str] = field(default_factory=Counter)


class Pushing:
    """Keys that wait to be put, and the puts under way."""

    def __init__(self, remote: RemoteContents) -> None:
        self._remote = remote
        self._cache = remote.cache
        self._store = remote.store
        config = remote.config
        self.is_off = config.push == "never"
        self._counts_uses = config.push == "second-use"
        self._used: list[U32Array] = []
        self.counters = PushCounters()
        self._pushes: set[PendingPush] = set()
        self._ended = Changes()
        self._pause_s, self._paused_until_s = PAUSE_S_MIN, 0.0
        self._budget = Budget(config.write_bytes_per_s, 0)
        self._batch_bytes_max = min(
            BATCH_BYTES, remote.config.inflight_bytes // 4, self._cache.tier.capacity_bytes // BATCH_SHARE
        )
        self.backlog = Backlog(
            self._cache,
            self._missing,
            self.counters.not_pushed,
            on_evict=config.push == "evict",
            second_use=self._counts_uses,
            backlog_bytes=config.backlog_bytes,
            batch_bytes=self._batch_bytes_max,
        )

    @property
    def holds(self) -> int:
        """Rows that are being put."""
        return sum(len(push.batch.rows) for push in self._pushes)

    def used(self, rows: U32Array) -> None:
        """Notes keys used in memory; they are examined after the reply, so that no pin waits for it."""
        if not self._counts_uses:
            return
        if not self._used:
            self._remote.loop.call_soon(self._count_uses)
        self._used.append(rows)

    def evicted(self, rows: U32Array) -> None:
        """Takes note of complete keys that are about to leave memory."""
        self._count_uses()  # before the rows get other keys
        self.backlog.evicted(rows)

    def reset(self, rows: U32Array) -> None:
        """Resets rows that get new keys: the noted uses were of other keys, cleared or dropped since."""
        self._used = [used[~np.isin(used, rows)] for used in self._used]
        self.backlog.reset(rows)

    @changing
    def _count_uses(self) -> None:
        used, self._used = self._used, []
        for rows in used:
            self.backlog.used(self._cache.entries.live(rows))

    def _missing(self, keyspace: Keyspace, rows: U32Array) -> BoolArray:
        """Returns which of these keys are candidates: not keys that came from the store or were put before, nor
        payloads of an earlier run that are not verified yet.
        """
        place = self._remote.place(keyspace)
        if place is None or not len(rows):
            return np.zeros(len(rows), bool)
        entries = self._cache.entries
        records = entries.parts.run(entries.first[rows], keyspace.schema.parts)
        mask: BoolArray = ~self._remote.believed(rows, place) & (entries.parts.unverified[records] == 0).all(axis=1)
        return mask

    async def run(self) -> None:
        """Puts offered keys, until cancelled."""
        with changing:
            while True:
                await self._push_next()
                await asyncio.sleep(0)

    async def _push_next(self) -> None:
        """Puts the next batch. A separate frame, so that nothing refers to a keyspace while there is nothing to put."""
        if (batch := await self.backlog.next()) is not None:
            await self._push(batch)

    async def _push(self, batch: BacklogBatch) -> None:
        keyspace, rows = batch.keyspace, batch.rows
        place = self._remote.place(keyspace)
        if place is None:  # it was not None when the batch was taken
            self._drop(rows, "cleared")
            return
        entries, width = self._cache.entries, keyspace.schema.parts
        push = PendingPush(batch, place)
        self._cache.hold(rows)
        self._pushes.add(push)
        size = len(rows) * sum(keyspace.part_bytes)
        await self._until_ready(size + len(rows) * HEADER_BYTES)
        if keyspace.retired or not self._remote.is_current(place):
            self._settle(push, "cleared")
            return
        self._leave_deleted(push)
        rows, push.is_put = push.batch.rows, True
        if not len(rows):
            self._settle(push)
            return
        self._budget.spend(size, 1, self._remote.loop.time())
        records = entries.parts.run(entries.first[rows], width)
        addresses = entries.payload_addresses(records.ravel()).reshape(-1, width)
        names = Names(place.space, entries.index.keys[rows])
        digests = entries.parts.digest[records]
        done = partial(self._done, push)
        self._store.put(names, addresses, keyspace.part_bytes, digests, time.monotonic() + PUT_S, done)

    def _leave_deleted(self, push: PendingPush) -> None:
        """Leaves out keys that were deleted, or found corrupt, since the batch was taken."""
        live = self._cache.entries.state[push.batch.rows] == RowState.LIVE
        if not live.all():
            gone, push.batch = push.batch.rows[~live], push.batch.only(live)
            self._drop(gone, "cleared")
            self._cache.unhold(gone)

    def puts_deleted(self, space: Space) -> bool:
        """Returns whether keys of this space are being put that were deleted since."""
        state = self._cache.entries.state
        return any(
            push.is_put
            and (push.batch.keyspace.namespace.fingerprint, push.place.space.group) == (space[0], space[2])
            and bool((state[push.batch.rows] != RowState.LIVE).any())
            for push in self._pushes
        )

    async def _until_ready(self, num_bytes: int) -> None:
        """Waits until the store takes puts, has room for `num_bytes` under way, and the budget allows one more."""
        store, loop = self._store, self._remote.loop
        while True:
            now = loop.time()
            delay_s = max(self._budget.delay_s(now), self._paused_until_s - now)
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            elif not store.can_write():
                await store.changes.wait(PAUSE_S_MIN)
            elif len(self._pushes) > PUTS_UNDER_WAY or store.put_room_bytes() < num_bytes:
                await self._ended.wait(LOOK_AHEAD_S)
            else:
                return

    @changing
    def _done(self, push: PendingPush, status: U8Array) -> None:
        """Ends a batch, whose slots nothing reads any more."""
        batch, good = push.batch, status == RemoteStatus.OK
        # Retired rows, too: `reset` precedes their next key.
        self._remote.believe(batch.keyspace, batch.rows[good], push.place)
        self.counters.keys += int(np.count_nonzero(good))
        self.counters.bytes += int(np.count_nonzero(good)) * sum(batch.keyspace.part_bytes)
        for code in np.unique(status[~good]).tolist():
            self.counters.not_pushed[RemoteStatus(code).name.lower()] += int(np.count_nonzero(status == code))
        self._size_batches(broke_off=bool((status == RemoteStatus.FAILED).any()))
        if (status == RemoteStatus.NO_SPACE).any():
            self._paused_until_s = self._remote.loop.time() + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        elif good.any():
            self._pause_s = PAUSE_S_MIN
        self._settle(push)

    def _size_batches(self, *, broke_off: bool) -> None:
        """Adapts the limit of the next puts to the result of one."""
        least, most = self._batch_bytes_max // GROWS, self._batch_bytes_max
        size = self.backlog.batch_bytes
        self.backlog.batch_bytes = max(size // 2, least) if broke_off else min(size + most // GROWS, most)

    def _settle(self, push: PendingPush, reason: str = "") -> None:
        self._pushes.discard(push)
        rows = push.batch.rows
        self.backlog.settle(rows)
        if reason:
            self.counters.not_pushed[reason] += len(rows)
        self._cache.unhold(rows)
        self._ended.notify_all()

    def _drop(self, rows: U32Array, reason: str) -> None:
        self.backlog.settle(rows)
        self.counters.not_pushed[reason] += len(rows)
