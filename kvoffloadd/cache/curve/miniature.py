"""A cache of another size in miniature: a policy runs on a sample of all keys, at a capacity that is scaled alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvoffloadd.cache.curve.diskqueue import DiskQueue
from kvoffloadd.cache.curve.prompt import AskedKeys, measuring
from kvoffloadd.cache.curve.sample import Thinned, restorable
from kvoffloadd.cache.curve.sampledmemory import SampledKeys, SampledMemory
from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.model import BoolArray, F64Array, U64Array

ROWS = 2048
"""The number of keys that a miniature holds at most, and half as many at least when it is full."""

BATCH_KEYS = 16
"""The number of sampled keys that make a batch: a call of the policy costs as much as some ten keys."""

PORTIONS = 16
"""The sample consists of this number of disjoint samples, whose spread tells how sure an estimate is."""

_PORTION_MASK = np.uint64(PORTIONS - 1)
_SHIFT_MAX = 40


@dataclass(slots=True, eq=False)
class Tally:
    """Counts tokens. `asked`, `hit`: of keys in the sample, as many as they stand for, by portion: those asked for, and
    the restorable ones among them. `exact`: of heavy keys, which count as held. `total`: all that were asked for.
    """

    asked: F64Array = field(default_factory=lambda: np.zeros(PORTIONS))
    hit: F64Array = field(default_factory=lambda: np.zeros(PORTIONS))
    exact: float = 0.0
    total: float = 0.0
    references: float = 0.0  # of keys in the sample

    def fade(self, share: float) -> None:
        """Leaves this share of all counts."""
        self.asked *= share
        self.hit *= share
        self.exact, self.total, self.references = self.exact * share, self.total * share, self.references * share


class Miniature:
    """Simulates one memory tier, and one disk tier below it if there is one.

    A key is in the sample if its hash is below 2**(64 - `shift`). The shift grows, and half of the keys leave, whenever
    more than `rows_max` would be held: so work and memory are bounded at each capacity.

    Keys of all sizes compete in one policy. The disk is given all that memory is given.
    """

    def __init__(
        self, make_policy: Callable[[int, int], Policy], memory_bytes: int, disk_bytes: int = 0, rows_max: int = ROWS
    ) -> None:
        """`make_policy`: as `create_policy`, from `(capacity_rows, max_rows)`."""
        self.memory_bytes, self.disk_bytes = memory_bytes, disk_bytes
        self.shift = 0
        self.filled = False
        """Whether keys had to go from the lowest tier."""
        self.tally = Tally()
        self._make_policy = make_policy
        self._rows_max = rows_max
        self._memory: SampledMemory | None = None  # made when the size of a key is known
        self._disk = DiskQueue()
        self._heavy_bytes = 0
        self._used: list[SampledKeys] = []
        self._stored: list[SampledKeys] = []
        self._in_batch: set[int] = set()

    @property
    def rate(self) -> float:
        """Returns the share of all keys that are in the sample."""
        return 2.0**-self.shift

    def ask(self, groups: Sequence[AskedKeys], heavy: Sequence[BoolArray]) -> None:
        """Counts what of a prompt could be restored, and uses what is held of it. `heavy`: which keys of each group
        count as held; they are in no sample that leaves keys out.
        """
        memory, at = self._begun(groups), measuring(groups)
        tokens = groups[at].tokens_per_key
        self.tally.total += len(groups[at].hashes) * tokens
        if self.shift:
            self.tally.exact += int(np.count_nonzero(heavy[at])) * tokens
        thinned = self._thin(groups, heavy)
        names = [group.names for group in thinned]
        if not any(names):
            return
        if not all(self._in_batch.isdisjoint(some) for some in names):
            self.settle()
        in_memory = [memory.held(some) for some in names]
        on_disk = [self._disk.held(some) for some in names]
        hits = restorable(thinned, [above | below for above, below in zip(in_memory, on_disk, strict=True)])
        self._count(thinned[at].hashes, hits, tokens / self.rate)
        for group, some, above, below in zip(thinned, names, in_memory, on_disk, strict=True):
            piece = SampledKeys(some, np.arange(len(some)), group.keys.key_bytes)
            self._add(self._used, piece.only(above))
            self._add(self._stored, piece.only(below & ~above))  # a read brings a key into memory
            self._disk.read(some)

    def store(self, groups: Sequence[AskedKeys], heavy: Sequence[BoolArray]) -> None:
        """Stores what is not held of a prompt."""
        memory = self._begun(groups)
        for group in self._thin(groups, heavy):
            names = group.names
            new = ~memory.held(names)
            new &= np.fromiter((name not in self._in_batch for name in names), np.bool_, len(names))
            self._add(self._stored, SampledKeys(names, np.arange(len(names)), group.keys.key_bytes).only(new))
        if not self.shift or len(self._in_batch) >= BATCH_KEYS:
            self.settle()

    def leave_out(self, names: Collection[int], heavy_bytes: int) -> None:
        """Removes these keys, which are heavy now. `heavy_bytes`: what all heavy keys take of the whole capacity."""
        self.settle()
        self._heavy_bytes = heavy_bytes
        if self.shift and self._memory is not None:
            self._memory.drop(names)
            self._disk.drop(names)

    def settle(self) -> None:
        """Gives the batch to the policy."""
        used, stored = self._used, self._stored
        self._used, self._stored, self._in_batch = [], [], set()
        if self._memory is None:
            return
        while self._is_crowded(self._memory, stored):
            self._halve(self._memory)
            used, stored = self._in_sample(used), self._in_sample(stored)
        evicted = self._memory.change(used, stored, self._scaled(self.memory_bytes))
        if self.disk_bytes:
            evicted = False
            for piece in stored:
                evicted |= self._disk.write(piece.names, piece.key_bytes, self._scaled(self.disk_bytes))
        self.filled |= evicted

    def _scaled(self, capacity_bytes: int) -> int:
        """Returns what a sample may take of this capacity."""
        return max(0, capacity_bytes - self._heavy_bytes * (self.shift > 0)) >> self.shift

    def _count(self, hashes: U64Array, hits: BoolArray, tokens: float) -> None:
        portions = (hashes & _PORTION_MASK).astype(np.int64)
        self.tally.references += len(portions)
        self.tally.asked += np.bincount(portions, minlength=PORTIONS) * tokens
        self.tally.hit += np.bincount(portions[hits], minlength=PORTIONS) * tokens

    def _add(self, pieces: list[SampledKeys], piece: SampledKeys) -> None:
        if piece.names:
            pieces.append(piece)
            self._in_batch.update(piece.names)

    # --- the sample ---

    def _begun(self, groups: Sequence[AskedKeys]) -> SampledMemory:
        """Returns the memory. The first keys decide about the sample, since others will be as large."""
        if self._memory is None:
            num_keys = sum(len(group.hashes) for group in groups)
            key_bytes = max(1, sum(len(group.hashes) * group.key_bytes for group in groups) // max(1, num_keys))
            while (self.memory_bytes + self.disk_bytes) // key_bytes >> self.shift > self._rows_max:
                self.shift += 1
            rows = max(1, self.memory_bytes // key_bytes >> self.shift)
            self._memory = SampledMemory(self._make_policy(rows, self._rows_max), self._rows_max)
        return self._memory

    def _thin(self, groups: Sequence[AskedKeys], heavy: Sequence[BoolArray]) -> list[Thinned]:
        found = []
        for group, counted in zip(groups, heavy, strict=True):
            if self.shift:
                indices = np.flatnonzero((group.hashes < self._limit) & ~counted)
            else:
                indices = np.arange(len(group.hashes))
            found.append(Thinned(group, indices, group.hashes[indices]))
        return found

    @property
    def _limit(self) -> np.uint64:
        return np.uint64((1 << (64 - self.shift)) - 1)

    def _is_crowded(self, memory: SampledMemory, stored: Sequence[SampledKeys]) -> bool:
        """Returns whether keys would fit whose rows do not."""
        new = sum(len(piece.names) for piece in stored)
        size = sum(len(piece.names) * piece.key_bytes for piece in stored)
        above = len(memory) + new > self._rows_max and memory.used_bytes + size <= self._scaled(self.memory_bytes)
        return (above or len(self._disk) + new > self._rows_max) and self.shift < _SHIFT_MAX

    def _halve(self, memory: SampledMemory) -> None:
        """Takes half of the keys out of the sample."""
        self.shift += 1
        memory.drop([name for name in memory.names() if name > self._limit])
        self._disk.drop([name for name in self._disk.names() if name > self._limit])

    def _in_sample(self, pieces: Sequence[SampledKeys]) -> list[SampledKeys]:
        limit = self._limit
        left = [piece.only(np.fromiter((n <= limit for n in piece.names), np.bool_)) for piece in pieces]
        return [piece for piece in left if piece.names]
