"""Sealing: records the checksums of stored parts. A store brings the checksums that its copy has computed, and seals
step by step after its end. The hash lane computes the others, in turns for each engine.

Event loop only. The memory tier bounds the parts that wait for the lane: a part that lost its slot in the meantime
needs no checksum.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.progress import Progress
from kvoffloadd.model import BoolArray, I64Array, U16Array, U64Array
from kvoffloadd.scheduling.lanes import TURN_BYTES, Flow, Lane
from kvoffloadd.storage.hashing import hash_payloads

SEAL_URGENT = 1
"""The urgency of sealing: after the checks before loads (0), which jobs wait for; but with a separate share."""

TICKETS_PER_THREAD = 2
"""The tickets of one engine in the lane, per thread: one is hashed while the loop makes the next."""

BATCH_PARTS = 8192
"""The number of parts of a store that wait together, which bounds the work of finding the next turn of the lane."""

SIFT_PARTS = 4096
"""Waiting parts are looked through each time that their number has doubled and then risen by this many."""


@dataclass(slots=True, eq=False)
class UnsealedStore:
    """Describes a store that has parts left to seal."""

    number: int  # in `Sealing.stores`
    uid: int
    parts_left: int


class SealBatch(NamedTuple):
    """Lists waiting parts of one store, and their generations at its commit."""

    store: UnsealedStore
    parts: I64Array
    generations: U16Array


@dataclass(slots=True, eq=False)
class Sealing:
    """Seals stored parts. `stores`: those with parts left to seal. `unsealed`: the number of parts that wait, or are
    being hashed; `by_uid`: their number for each user.
    """

    cache: Cache
    lane: Lane
    stores: Progress = field(default_factory=Progress)
    unsealed: int = 0
    by_uid: Counter[int] = field(default_factory=Counter)
    _waiting: dict[Flow, deque[SealBatch]] = field(default_factory=dict)
    _tickets: dict[Flow, int] = field(default_factory=dict)
    _sift_at: int = SIFT_PARTS

    @changing
    def add(self, flow: Flow, parts: I64Array, generations: U16Array) -> None:
        """Adds parts that a store of this flow's engine has committed, with their generations at that time."""
        if not len(parts):
            return
        self._waiting.setdefault(flow, deque()).extend(self._begin(flow, parts, generations))
        if self.unsealed >= self._sift_at:
            self._sift()
        self._submit(flow)

    def seal_hashed(self, flow: Flow, parts: I64Array, generations: U16Array, digests: U64Array) -> Iterator[None]:
        """Adds parts as `add`, with checksums. They wait from now on; each step of the iterator seals some, including
        the last one.
        """
        return self._seal_steps(self._begin(flow, parts, generations), digests)

    def _seal_steps(self, batches: list[SealBatch], digests: U64Array) -> Iterator[None]:
        begin = 0
        for batch in batches:
            if begin:
                yield
            if self.lane.closing:  # so is the cache
                return
            end = begin + len(batch.parts)
            self._seal(batch, digests[begin:end])
            begin = end

    def _begin(self, flow: Flow, parts: I64Array, generations: U16Array) -> list[SealBatch]:
        if not len(parts):
            return []
        store = UnsealedStore(self.stores.begin(), flow.uid, len(parts))
        self.unsealed += len(parts)
        self.by_uid[flow.uid] += len(parts)
        starts = range(0, len(parts), BATCH_PARTS)
        return [
            SealBatch(store, parts[start : start + BATCH_PARTS], generations[start : start + BATCH_PARTS])
            for start in starts
        ]

    def _submit(self, flow: Flow) -> None:
        """Submits as many tickets of the flow as may be in the lane at a time, or none if the lane is closing: the
        waiting parts are then lost.
        """
        if self.lane.closing:
            return
        while flow in self._waiting and self._tickets.get(flow, 0) < TICKETS_PER_THREAD * self.lane.threads:
            batches, addresses, sizes = self._next_turn(flow)
            if not batches:
                return
            work = partial(hash_payloads, addresses, sizes)
            self._tickets[flow] = self._tickets.get(flow, 0) + 1
            self.lane.submit(
                work, partial(self._sealed, flow, batches), flow=flow, urgent=SEAL_URGENT, cost_bytes=int(sizes.sum())
            )

    def _next_turn(self, flow: Flow) -> tuple[list[SealBatch], U64Array, I64Array]:
        """Takes the flow's next parts to hash, about a turn of the lane, and the address and size of each payload."""
        entries, waiting = self.cache.entries, self._waiting[flow]
        taken, room = list[SealBatch](), TURN_BYTES
        taken_addresses, taken_sizes = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        while waiting and room > 0:
            batch = self._only(waiting[0])
            sizes, addresses = entries.payload_bytes(batch.parts), entries.payload_addresses(batch.parts)
            before = np.cumsum(sizes) - sizes
            count = int(np.searchsorted(before, room))
            if count < len(sizes):
                batch, waiting[0] = _cut(batch, count)
            else:
                waiting.popleft()
            if count:
                taken.append(batch)
                taken_addresses.append(addresses[:count])
                taken_sizes.append(sizes[:count])
                room -= int(sizes[:count].sum())
        if not waiting:
            del self._waiting[flow]
        return taken, np.concatenate(taken_addresses), np.concatenate(taken_sizes)

    def _only(self, batch: SealBatch) -> SealBatch:
        """Keeps the parts that are unchanged since their commit; the others no longer wait."""
        columns = self.cache.entries.parts
        same: BoolArray = (columns.generation[batch.parts] == batch.generations) & (
            columns.state[batch.parts] == PartState.COMMITTED
        )
        if same.all():
            return batch
        self._settle(batch.store, int((~same).sum()))
        return SealBatch(batch.store, batch.parts[same], batch.generations[same])

    def _sift(self) -> None:
        for flow, waiting in list(self._waiting.items()):
            kept = deque(batch for batch in map(self._only, waiting) if len(batch.parts))
            if kept:
                self._waiting[flow] = kept
            else:
                del self._waiting[flow]
        self._sift_at = 2 * self.unsealed + SIFT_PARTS

    @changing
    def _sealed(self, flow: Flow, batches: list[SealBatch], digests: U64Array | BaseException) -> None:
        self._tickets[flow] -= 1
        if not self._tickets[flow]:
            del self._tickets[flow]
        begin = 0
        for batch in batches:
            count = len(batch.parts)
            if isinstance(digests, BaseException):
                self._settle(batch.store, count)
            else:
                self._seal(batch, digests[begin : begin + count])
            begin += count
        self._submit(flow)

    def _seal(self, batch: SealBatch, digests: U64Array) -> None:
        self._settle(batch.store, len(batch.parts))
        sealed = self.cache.seal(batch.parts, batch.generations, digests)
        self.cache.sealed(sealed)  # the other parts have lost their slots, which may belong to other keys now

    def _settle(self, store: UnsealedStore, count: int) -> None:
        self.unsealed -= count
        self.by_uid[store.uid] -= count
        store.parts_left -= count
        if not store.parts_left:
            self.stores.end(store.number)


def _cut(batch: SealBatch, count: int) -> tuple[SealBatch, SealBatch]:
    store, parts, generations = batch
    return SealBatch(store, parts[:count], generations[:count]), SealBatch(store, parts[count:], generations[count:])
