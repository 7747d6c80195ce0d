"""A job's copies in compact form: block ids and payload addresses, some bytes a block.

Descriptors take 24 bytes each, and a long prompt has millions. So they are made piece by piece, by the threads that
copy (see `chunked`), and live as long as their chunk. Immutable: any thread may ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvoffloadd.device.plan import (
    CHUNK_DESCRIPTORS,
    Copies,
    GroupPlan,
    PayloadCopies,
    coalesce_payloads,
    concatenate,
    make_copies,
)
from kvoffloadd.model import NO_BLOCK, BoolArray, Direction, I64Array, U32Array, U64Array

HASHED_DESCRIPTORS = 4 * CHUNK_DESCRIPTORS
"""The most descriptors of a payload that is hashed while it is copied: it is copied in one chunk."""

SMALL_DESCRIPTORS, SMALL_LISTS = 65_536, 8
"""Work of no more than that is expanded at once: it takes the event loop at most some milliseconds, and less than
threads, which wait for each other and for the loop between all steps.
"""


class Piece(NamedTuple):
    """Payloads `first` to `end` of one list; for each, the descriptors from `low` on, below `high`."""

    list_number: int
    first: int
    end: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockList:
    """Payloads of one group. `plans`: one for each part that the rank holds. For each payload, `keys` is its row in
    `blocks` (u32 `(rows, blocks_per_key)`, NO_BLOCK: not wanted), `columns` its plan, `addresses` its address. Payloads
    of a key lie side by side.
    """

    plans: tuple[GroupPlan, ...]
    blocks: U32Array
    keys: I64Array
    columns: I64Array
    addresses: U64Array

    def wanted(self) -> BoolArray:
        """Marks the payloads with at least one wanted block."""
        marks: BoolArray = (self.blocks != NO_BLOCK).any(axis=1)[self.keys]
        return marks

    def whole(self) -> BoolArray:
        """Marks the payloads with all blocks wanted."""
        every: BoolArray = (self.blocks != NO_BLOCK).all(axis=1)[self.keys]
        return every

    def only(self, mask: BoolArray) -> BlockList:
        """Returns the list with only the payloads in the mask."""
        if mask.all():
            return self
        return BlockList(self.plans, self.blocks, self.keys[mask], self.columns[mask], self.addresses[mask])

    def blocks_of_plans(self) -> list[int]:
        """Counts the blocks that each plan copies."""
        wanted = np.count_nonzero(self.blocks != NO_BLOCK, axis=1)[self.keys]
        if len(self.plans) == 1:
            return [int(wanted.sum())]
        return [int(wanted[self.columns == column].sum()) for column in range(len(self.plans))]

    def make(self, direction: Direction, rows: slice = slice(None), low: int = 0, high: int | None = None) -> Copies:
        """Makes the copies of these payloads, for each the descriptors from `low` on, below `high`; neighbours are
        coalesced.
        """
        keys, columns, addresses = self.keys[rows], self.columns[rows], self.addresses[rows]
        if len(self.plans) == 1:
            memory, payload, sizes = self.plans[0].expand(self.blocks[keys], addresses, low, high)
            return make_copies(direction, memory, payload, sizes, len(sizes))
        made = []
        for column, plan in enumerate(self.plans):
            mask = columns == column
            made.append(plan.expand(self.blocks[keys[mask]], addresses[mask], low, high))
        memory, payload, sizes = (np.concatenate(arrays) for arrays in zip(*made, strict=True))
        # A key's parts are often adjacent in memory as in their slots: next to each other in the arrays they become one
        # copy.
        order = np.argsort(payload, kind="stable")
        return make_copies(direction, memory[order], payload[order], sizes[order], len(sizes))

    def make_payloads(self, direction: Direction, rows: slice, digests: U64Array) -> PayloadCopies:
        """Makes the copies of these payloads, all undivided; `digests`: those of the payloads."""
        keys, columns, addresses = self.keys[rows], self.columns[rows], self.addresses[rows]
        if len(self.plans) == 1:
            blocks = self.blocks[keys]
            counts = self.plans[0].descriptors_of(blocks)
            memory, payload, sizes = self.plans[0].expand(blocks, addresses)
        else:
            by_plan = [columns == column for column in range(len(self.plans))]
            counts = np.empty(len(keys), np.int64)
            for plan, mask in zip(self.plans, by_plan, strict=True):
                counts[mask] = plan.descriptors_of(self.blocks[keys[mask]])
            starts = np.cumsum(counts) - counts
            memory, payload, sizes = np.empty((3, int(counts.sum())), np.uint64)
            for plan, mask in zip(self.plans, by_plan, strict=True):
                many = counts[mask]
                indices = np.repeat(starts[mask] - (np.cumsum(many) - many), many) + np.arange(many.sum())
                memory[indices], payload[indices], sizes[indices] = plan.expand(
                    self.blocks[keys[mask]], addresses[mask]
                )
        src, dst = (memory, payload) if direction is Direction.STORE else (payload, memory)
        src, dst, size, counts = coalesce_payloads(src, dst, sizes, counts)
        return PayloadCopies(src, dst, size, len(sizes), counts.astype(np.uint64), digests)


class BlockWork:
    """The copies of a job, or those of the payloads in the mask alone. See `base.Work`."""

    def __init__(self, lists: list[BlockList], mask: BoolArray | None = None) -> None:
        wanted = [block_list.wanted() for block_list in lists]
        if mask is not None:
            masks = np.split(mask, np.cumsum([len(block_list.keys) for block_list in lists])[:-1])
            wanted = [marks & left for marks, left in zip(wanted, masks, strict=True)]
        chosen = [block_list.only(marks) for block_list, marks in zip(lists, wanted, strict=True)]
        self._lists = [block_list for block_list in chosen if len(block_list.keys)]
        self.copied: BoolArray = np.concatenate([np.zeros(0, bool), *wanted])  # marks the copied ones of all payloads
        missing = np.count_nonzero(~self.copied)
        self.total_bytes = self.descriptors = 0
        for block_list in self._lists:
            blocks_of_plans = block_list.blocks_of_plans()
            missing += len(block_list.keys) * block_list.blocks.shape[1] - sum(blocks_of_plans)
            for plan, blocks in zip(block_list.plans, blocks_of_plans, strict=True):
                self.total_bytes += blocks * (plan.payload_bytes // plan.blocks_per_key)
                self.descriptors += blocks * (len(plan.size) // plan.blocks_per_key)
        plans = [plan for block_list in self._lists for plan in block_list.plans]
        self._widest = max((len(plan.size) for plan in plans), default=0)
        self._largest_bytes = max((plan.payload_bytes for plan in plans), default=0)
        self._whole = missing == 0
        self.small = max(self.descriptors, self._widest) <= SMALL_DESCRIPTORS and len(self._lists) <= SMALL_LISTS

    def pieces(self, most_descriptors: int, most_bytes: int) -> Iterator[Piece]:
        """See `base.Work`."""
        for number, block_list in enumerate(self._lists):
            widest = max(len(plan.size) for plan in block_list.plans)
            largest = max(plan.payload_bytes for plan in block_list.plans)
            many = min(most_descriptors // widest, most_bytes // largest)
            step = max(many - many % len(block_list.plans), 1)  # whole keys, so that their parts become one copy
            for first in range(0, len(block_list.keys), step):
                for low in range(0, widest, most_descriptors):
                    end = min(first + step, len(block_list.keys))
                    yield Piece(number, first, end, low, min(low + most_descriptors, widest))

    def make(self, direction: Direction, piece: Piece) -> Copies:
        """See `base.Work`."""
        return self._lists[piece.list_number].make(direction, slice(piece.first, piece.end), piece.low, piece.high)

    def make_all(self, direction: Direction) -> Copies:
        """See `base.Work`."""
        return concatenate([block_list.make(direction) for block_list in self._lists])

    def hashed(self, most_descriptors: int, most_bytes: int) -> HashedWork | None:
        """See `base.Work`."""
        if not self._whole or self._widest > most_descriptors or self._largest_bytes > most_bytes:
            return None
        return self.hashing()

    def hashing(self) -> HashedWork:
        """Returns the same work, with payloads that are hashed while they are copied: see `hashable`."""
        return HashedWork(self, self._lists)


class HashedWork:
    """Work with payloads that are hashed while they are copied. See `base.Work`; it makes `PayloadCopies`.

    `digests`: u64 `(payloads, 2)`, of those that are copied, in the order of the lists; complete when all has been
    copied. Only the thread that copies a piece writes its digests.
    """

    def __init__(self, work: BlockWork, lists: list[BlockList]) -> None:
        self.total_bytes, self.descriptors = work.total_bytes, work.descriptors
        self.small = work.small
        self.digests: U64Array = np.zeros((np.count_nonzero(work.copied), 2), np.uint64)
        self.pieces = work.pieces
        self._copied = work.copied
        self._lists = lists
        counts = [len(block_list.keys) for block_list in lists]
        self._firsts = np.cumsum([0, *counts]).tolist()

    def make(self, direction: Direction, piece: Piece) -> Copies:
        """See `base.Work`. The piece has whole payloads: all that `hashed` allows are whole."""
        return self._make(direction, piece.list_number, piece.first, piece.end)

    def make_all(self, direction: Direction) -> Copies:
        """See `base.Work`."""
        made = [self._make(direction, number, 0, len(block_list.keys)) for number, block_list in enumerate(self._lists)]
        if len(made) == 1:
            return made[0]
        copies = concatenate(made)
        counts = np.concatenate([np.zeros(0, np.uint64), *(piece_copies.counts for piece_copies in made)])
        return PayloadCopies(copies.src, copies.dst, copies.size, copies.descriptors, counts, self.digests)

    def hashed(self, most_descriptors: int, most_bytes: int) -> HashedWork:
        """See `base.Work`: returns itself."""
        del most_descriptors, most_bytes
        return self

    def found(self) -> U64Array:
        """Returns the digests, u64 `(payloads, 2)`, of all payloads of the lists: 0 where nothing is copied."""
        if len(self.digests) == len(self._copied):
            return self.digests
        digests = np.zeros((len(self._copied), 2), np.uint64)
        digests[self._copied] = self.digests
        return digests

    def _make(self, direction: Direction, number: int, first: int, end: int) -> PayloadCopies:
        base = self._firsts[number]
        digests = self.digests[base + first : base + end]
        return self._lists[number].make_payloads(direction, slice(first, end), digests)


def hashable(lists: Sequence[BlockList], most_bytes: int) -> BoolArray:
    """Marks the payloads with checksums that `BlockWork.hashing` finds: those that are copied whole. It divides no
    payload, so it marks none at all if one of them has more than `most_bytes`, or than HASHED_DESCRIPTORS.
    """
    plans = [plan for block_list in lists for plan in block_list.plans]
    if any(len(plan.size) > HASHED_DESCRIPTORS or plan.payload_bytes > most_bytes for plan in plans):
        return np.zeros(sum(len(block_list.keys) for block_list in lists), bool)
    return np.concatenate([np.zeros(0, bool), *(block_list.whole() for block_list in lists)])
