"""Sealing: the checksums of what was stored. A store brings those that its copy has found, and seals step by step when
it has ended. The others are taken in the hash lane, each engine's in its own turns.

Event loop only. What waits for the lane is bounded by the memory tier: a part that lost its slot meanwhile needs no
checksum.
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
from kvoffloadd.lanes import TURN_BYTES, Flow, Lane
from kvoffloadd.model import BoolArray, I64Array, U16Array, U64Array
from kvoffloadd.storage.hashing import hash_payloads

SEAL_URGENT = 1
"""Behind the checks before loads (0), which jobs wait for; but with a share of its own."""

TICKETS_PER_THREAD = 2
"""In the lane, of one engine: one is hashed while the loop makes the next."""

BATCH_PARTS = 8192
"""Parts of a store that wait together: what a turn of the lane takes is found among no more at a time."""

SIFT_PARTS = 4096
"""Parts that wait are looked through each time that so many, and as many as are there, have come."""


class SealBatch(NamedTuple):
    """Parts of one store that wait, and their generations at the time. `number`: of the store, rising."""

    number: int
    parts: I64Array
    generations: U16Array


@dataclass(slots=True, eq=False)
class Sealing:
    """`stores`: those of which something is left to seal. `unsealed`: parts that wait, or are hashed; `by_uid`: of each
    user.
    """

    cache: Cache
    lane: Lane
    stores: Progress = field(default_factory=Progress)
    unsealed: int = 0
    by_uid: Counter[int] = field(default_factory=Counter)
    _waiting: dict[Flow, deque[SealBatch]] = field(default_factory=dict)
    _tickets: dict[Flow, int] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)  # by a store's number: parts that are not sealed yet
    _uids: dict[int, int] = field(default_factory=dict)  # of the same stores
    _sift_at: int = SIFT_PARTS

    @changing
    def add(self, flow: Flow, parts: I64Array, generations: U16Array) -> None:
        """These parts have been committed by a store of this flow's engine; they had these generations then."""
        if not len(parts):
            return
        self._waiting.setdefault(flow, deque()).extend(self._begin(flow, parts, generations))
        if self.unsealed >= self._sift_at:
            self._sift()
        self._submit(flow)

    def seal_hashed(self, flow: Flow, parts: I64Array, generations: U16Array, digests: U64Array) -> Iterator[None]:
        """The same, with checksums. They wait from now on; each step of the iterator seals some."""
        return self._seal_steps(self._begin(flow, parts, generations), digests)

    def _seal_steps(self, batches: list[SealBatch], digests: U64Array) -> Iterator[None]:
        at = 0
        for batch in batches:
            if self.lane.closing:  # so is the cache
                return
            end = at + len(batch.parts)
            self._seal(batch, digests[at:end])
            at = end
            yield

    def _begin(self, flow: Flow, parts: I64Array, generations: U16Array) -> list[SealBatch]:
        if not len(parts):
            return []
        number = self.stores.begin()
        self._left[number], self._uids[number] = len(parts), flow.uid
        self.unsealed += len(parts)
        self.by_uid[flow.uid] += len(parts)
        starts = range(0, len(parts), BATCH_PARTS)
        return [SealBatch(number, parts[at : at + BATCH_PARTS], generations[at : at + BATCH_PARTS]) for at in starts]

    def _submit(self, flow: Flow) -> None:
        """As many tickets of the flow as may be in the lane at a time; none if it is closing: what waits is lost."""
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
        """What is hashed next of the flow, about a turn of the lane, and the address and bytes of each payload."""
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
        """Those of the parts that still are what they were; the others are not waited for any more."""
        columns = self.cache.entries.parts
        same: BoolArray = (columns.generation[batch.parts] == batch.generations) & (
            columns.state[batch.parts] == PartState.COMMITTED
        )
        if same.all():
            return batch
        self._settle(batch.number, int((~same).sum()))
        return SealBatch(batch.number, batch.parts[same], batch.generations[same])

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
        at = 0
        for batch in batches:
            count = len(batch.parts)
            if isinstance(digests, BaseException):
                self._settle(batch.number, count)
            else:
                self._seal(batch, digests[at : at + count])
            at += count
        self._submit(flow)

    def _seal(self, batch: SealBatch, digests: U64Array) -> None:
        self._settle(batch.number, len(batch.parts))
        sealed = self.cache.seal(batch.parts, batch.generations, digests)
        self.cache.sealed(sealed)  # others have lost their slots, which may be those of other keys by now

    def _settle(self, number: int, count: int) -> None:
        self.unsealed -= count
        self._left[number] -= count
        self.by_uid[self._uids[number]] -= count
        if not self._left[number]:
            del self._left[number], self._uids[number]
            self.stores.end(number)


def _cut(batch: SealBatch, count: int) -> tuple[SealBatch, SealBatch]:
    number, parts, generations = batch
    return SealBatch(number, parts[:count], generations[:count]), SealBatch(number, parts[count:], generations[count:])
