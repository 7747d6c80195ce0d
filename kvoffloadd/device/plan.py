"""Copy plans: turns block ids into copies. Pure: numpy arrays in and out; no I/O, no clock, no access to any address.

    GroupPlan.expand    block ids, payload addresses -> descriptors (memory address, payload address, size)
    make_copies         descriptors and a direction  -> Copies, neighbours coalesced
    split               Copies -> chunks for the threads of a lane
    split_payloads      the same, of payloads that are hashed while they are copied

All addresses and sizes are u64 arrays of one length. Copies are unordered: no result depends on their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from kvoffloadd.errors import BlockIdError, ExtentError, LimitError, UsageError
from kvoffloadd.model import NO_BLOCK, BoolArray, Direction, I64Array, Ref, U32Array, U64Array

DESCRIPTORS_PER_KEY_MAX = 1 << 20
CHUNK_BYTES = 64 << 20
CHUNK_DESCRIPTORS = 1024
"""The most bytes and copies of a chunk, so that no copy waits long for another's chunk to end."""

# A copy is cut at multiples of this: pieces stay long enough for streaming stores (see _copyruns.c).
_CUT_BYTES = 16 << 10
_ADDRESS_MAX = 1 << 63


class Tensor(NamedTuple):
    """A canonical tensor at its address in this process: `num_blocks` rows of `page_bytes`, `stride_bytes` apart."""

    base_address: int
    num_blocks: int
    page_bytes: int
    stride_bytes: int

    @property
    def end(self) -> int:
        """Returns the address after its last row."""
        return self.base_address + (self.num_blocks - 1) * self.stride_bytes + self.page_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """The tensors of a registration, checked once for all groups. `base`, `num_blocks`, `stride`: int64 `(tensors,)`;
    `pages`: their sizes in bytes.
    """

    base: I64Array
    num_blocks: I64Array
    stride: I64Array
    pages: list[int]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | tuple[int, int, int, int]]) -> Self:
        """Makes them. Raises ExtentError if a tensor's rows overlap or leave the address space."""
        for index, tensor in enumerate(tensors):
            _check_tensor(index, Tensor(*tensor))
        base, num_blocks, page, stride = np.array(list(tensors), np.int64).reshape(-1, 4).T
        return cls(base, num_blocks, stride, page.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """The part of a plan that all keys of a registered group share: one row per descriptor of a key, in payload order.

    A payload is ref-major: for ref r, block j of the key, run i it has the run's bytes at
    `blocks_per_key * sum(payload_bytes of the refs before r) + j * r.payload_bytes + i * r.length`,
    so that consecutive blocks of one tensor lie side by side in the payload as they do in the tensor.
    """

    blocks_per_key: int
    payload_bytes: int
    num_blocks: int  # ids at or above are refused: the smallest tensor that a ref names decides
    block: I64Array  # (descriptors,) j: the index of its block id among the key's
    base: U64Array  # (descriptors,) its address for block id 0
    stride: U64Array  # (descriptors,) bytes from one block id to the next
    offset: U64Array  # (descriptors,) its place in the payload
    size: U64Array  # (descriptors,)

    @classmethod
    def build(
        cls, tensors: Tensors | Sequence[Tensor | tuple[int, int, int, int]], refs: Sequence[Ref], blocks_per_key: int
    ) -> Self:
        """Builds the plan of a group. No refs: this rank has no part of it, and `expand` yields nothing.

        The caller must check that the tensors lie within their allocations. For many thousand refs this takes some
        milliseconds.

        Raises:
            ExtentError: a tensor's rows overlap or leave the address space; a ref names no tensor, leaves its tensor's
                page, has runs that overlap, or shares bytes with another ref.
            LimitError: more than `DESCRIPTORS_PER_KEY_MAX` descriptors in a key.
        """
        rows = tensors if isinstance(tensors, Tensors) else Tensors.of(tensors)
        checked = _checked(refs, rows)
        number, begin, length, count, apart = checked.T
        each = blocks_per_key * count
        descriptors = int(each.sum())
        if descriptors > DESCRIPTORS_PER_KEY_MAX:
            raise LimitError(f"a key has {descriptors} descriptors; at most {DESCRIPTORS_PER_KEY_MAX} are supported")
        _check_refs_apart(checked)
        place = np.cumsum(each * length) - each * length  # of each ref's bytes in the payload
        ref = np.repeat(np.arange(len(checked)), each)
        nth = np.arange(descriptors) - np.repeat(np.cumsum(each) - each, each)
        block = nth // count[ref] if blocks_per_key > 1 else np.zeros(descriptors, np.int64)
        run = nth - block * count[ref]
        return cls(
            blocks_per_key,
            int((each * length).sum()),
            int(rows.num_blocks[number].min()) if len(checked) else NO_BLOCK,
            block,
            (rows.base[number] + begin)[ref].astype(np.uint64) + (run * apart[ref]).astype(np.uint64),
            rows.stride[number][ref].astype(np.uint64),
            (place[ref] + nth * length[ref]).astype(np.uint64),
            length[ref].astype(np.uint64),
        )

    def expand(
        self, blocks: U32Array, payload_addresses: U64Array, low: int = 0, high: int | None = None
    ) -> tuple[U64Array, U64Array, U64Array]:
        """Returns the descriptors of some keys: memory addresses, payload addresses, sizes; u64 arrays of one length.

        `blocks`: u32 `(keys, blocks_per_key)`; NO_BLOCK entries yield no descriptors.
        `payload_addresses`: u64 `(keys,)`, where each key's `payload_bytes` begin.
        `low`, `high`: for each key, only the descriptors from `low` on, below `high`. The caller keeps their number
        low: each takes 24 bytes, and about 50 ns.

        Raises:
            BlockIdError: an id is not below `num_blocks`.
            UsageError: arrays of another shape or dtype.
        """
        keys = len(payload_addresses)
        if blocks.shape != (keys, self.blocks_per_key) or payload_addresses.shape != (keys,):
            raise UsageError(f"{blocks.shape} block ids, {self.blocks_per_key} a key, for {payload_addresses.shape}")
        if blocks.dtype != np.uint32 or payload_addresses.dtype != np.uint64:
            raise UsageError(f"block ids are u32 and addresses u64, not {blocks.dtype} and {payload_addresses.dtype}")
        outside = blocks >= self.num_blocks
        gaps = bool(outside.any())
        if gaps and bool((blocks[outside] != NO_BLOCK).any()):
            worst = int(blocks[outside & (blocks != NO_BLOCK)].max())
            raise BlockIdError(f"block id {worst}; the tensors have {self.num_blocks} blocks")
        block = self.block[low:high]
        if gaps:
            return self._expand_some(blocks, ~outside, payload_addresses, slice(low, high))
        memory = blocks.astype(np.uint64)[:, block]
        memory *= self.stride[low:high]
        memory += self.base[low:high]
        payload = payload_addresses[:, None] + self.offset[low:high]
        size = np.broadcast_to(self.size[low:high], memory.shape)
        return memory.reshape(-1), payload.reshape(-1), size.reshape(-1)

    def descriptors_of(self, blocks: U32Array) -> I64Array:
        """Returns how many descriptors `expand` yields for each of the keys with these block ids."""
        wanted = blocks != NO_BLOCK
        if wanted.all():
            return np.full(len(blocks), len(self.block))
        counts: I64Array = wanted @ np.bincount(self.block, minlength=self.blocks_per_key)
        return counts

    def _expand_some(
        self, blocks: U32Array, wanted: BoolArray, payload_addresses: U64Array, window: slice
    ) -> tuple[U64Array, U64Array, U64Array]:
        """Expands only the `wanted` blocks: the cost depends on their descriptors, not on those of all blocks."""
        block, base, stride = self.block[window], self.base[window], self.stride[window]
        by_block = np.argsort(block, kind="stable")
        counts = np.bincount(block, minlength=self.blocks_per_key)
        starts = np.cumsum(counts) - counts
        keys, columns = np.nonzero(wanted & (counts > 0))
        many = counts[columns]
        indices = np.repeat(starts[columns] - (np.cumsum(many) - many), many) + np.arange(many.sum())
        # In payload order, so that neighbours become one copy.
        order = np.sort(np.repeat(keys, many) * max(len(block), 1) + by_block[indices])
        key, row = np.divmod(order, max(len(block), 1))
        memory = blocks[key, block[row]].astype(np.uint64) * stride[row] + base[row]
        return memory, payload_addresses[key] + self.offset[window][row], self.size[window][row]


def _check_tensor(index: int, tensor: Tensor) -> None:
    if min(tensor.num_blocks, tensor.page_bytes, tensor.stride_bytes) < 1 or tensor.base_address < 0:
        raise ExtentError(f"tensor {index}: has no bytes")
    if tensor.num_blocks > 1 and tensor.stride_bytes < tensor.page_bytes:
        raise ExtentError(
            f"tensor {index}: rows of {tensor.page_bytes} bytes overlap, they are {tensor.stride_bytes} bytes apart"
        )
    if tensor.end > _ADDRESS_MAX:
        raise ExtentError(f"tensor {index}: extends beyond the address space")


def _check_ref(index: int, ref: Ref, pages: Sequence[int]) -> None:
    if not 0 <= ref.tensor < len(pages):
        raise ExtentError(f"ref {index}: names tensor {ref.tensor}, which does not exist (tensors: {len(pages)})")
    if ref.length < 1 or ref.count < 1 or ref.offset < 0 or ref.stride < 0:
        raise ExtentError(f"ref {index}: {ref.count} runs of {ref.length} bytes from {ref.offset}, {ref.stride} apart")
    if ref.count > 1 and ref.stride < ref.length:
        raise ExtentError(f"ref {index}: runs of {ref.length} bytes overlap, they are {ref.stride} bytes apart")
    if ref.end > pages[ref.tensor]:
        raise ExtentError(f"ref {index}: ends at byte {ref.end} of a page of {pages[ref.tensor]} bytes")


def _checked(refs: Sequence[Ref], tensors: Tensors) -> I64Array:
    """Returns rows of (tensor, offset, length, count, stride). Raises ExtentError for a ref that leaves its tensor's
    page, or has runs that overlap.
    """
    for index, ref in enumerate(refs):
        _check_ref(index, ref, tensors.pages)
    rows = [(ref.tensor, ref.offset, ref.length, ref.count, ref.stride if ref.count > 1 else 0) for ref in refs]
    return np.array(rows, np.int64).reshape(-1, 5)


def _check_refs_apart(refs: I64Array) -> None:
    """Raises ExtentError if two refs name the same byte: it would be stored twice and loaded twice, which is a race."""
    tensors = refs[:, 0]
    ordered = np.sort(tensors)
    for tensor in np.unique(ordered[1:][ordered[1:] == ordered[:-1]]).tolist():
        if runs_meet(refs[tensors == tensor, 1:]):
            raise ExtentError(f"refs to tensor {tensor} share bytes")


def runs_meet(refs: I64Array) -> bool:
    """Returns whether two runs share bytes. `refs`: rows of (offset, length, count, stride)."""
    refs = refs[np.argsort(refs[:, 0])]
    begin, length, count, stride = refs.T
    end = begin + (count - 1) * stride + length
    if bool((np.maximum.accumulate(end)[:-1] <= begin[1:]).all()):
        return False
    each = np.repeat(np.arange(len(refs)), count)
    nth = np.arange(len(each)) - np.repeat(np.cumsum(count) - count, count)
    return overlap((begin[each] + nth * stride[each]).astype(np.uint64), length[each].astype(np.uint64))


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Transfers in any order: u64 arrays `(copies,)`. `descriptors`: their number before coalescing."""

    src: U64Array
    dst: U64Array
    size: U64Array
    descriptors: int

    def __len__(self) -> int:
        return len(self.size)

    @property
    def total_bytes(self) -> int:
        """Returns the bytes that all of them move."""
        return int(self.size.sum())


@dataclass(frozen=True, slots=True, eq=False)
class PayloadCopies(Copies):
    """Copies of undivided payloads, each in the order of its bytes, and the destination of the checksums of the bytes
    read: the payloads' checksums, where they are copied whole.

    `counts`: u64 `(payloads,)`, the copies of each payload, which come one payload after the other. `digests`: u64
    `(payloads, 2)`, a view of the job's array, written by the thread that copies.
    """

    counts: U64Array
    digests: U64Array


def make_copies(direction: Direction, memory: U64Array, payload: U64Array, sizes: U64Array, descriptors: int) -> Copies:
    """Makes copies between worker memory and payloads, coalesced. Does not check destinations: see `overlap`."""
    src, dst = (memory, payload) if direction is Direction.STORE else (payload, memory)
    return Copies(*coalesce(src, dst, sizes), descriptors)


def coalesce(src: U64Array, dst: U64Array, size: U64Array) -> tuple[U64Array, U64Array, U64Array]:
    """Returns the same bytes in fewer copies: neighbours in the arrays that are neighbours on both sides in memory
    become one copy.

    Ascending runs first, then descending ones (blocks are often handed out from the end). The order is kept: sorting
    would cost more than all the rest of planning, and gain nothing on real block tables.
    """
    ascending = _ascending(src, dst, size)
    if ascending.any():
        begins, size = _merge(ascending, size)
        src, dst = src[begins], dst[begins]
    descending = (src[1:] + size[1:] == src[:-1]) & (dst[1:] + size[1:] == dst[:-1])
    if descending.any():
        begins, size = _merge(descending, size)
        lasts = np.append(begins[1:], len(src)) - 1
        src, dst = src[lasts], dst[lasts]
    return src, dst, size


def coalesce_payloads(
    src: U64Array, dst: U64Array, size: U64Array, counts: I64Array
) -> tuple[U64Array, U64Array, U64Array, I64Array]:
    """Coalesces within each payload; payload i has the next `counts[i]` copies. Returns the copies, and each payload's
    number of them.
    """
    if counts.max(initial=0) <= 1:
        return src, dst, size, counts
    joined = _ascending(src, dst, size)
    if not joined.any():
        return src, dst, size, counts
    ends = np.cumsum(counts)
    joined[ends[(ends > 0) & (ends < len(size))] - 1] = False
    begins, size = _merge(joined, size)
    return src[begins], dst[begins], size, np.diff(np.searchsorted(begins, ends), prepend=0)


def _ascending(src: U64Array, dst: U64Array, size: U64Array) -> BoolArray:
    """Returns, for each copy but the last, whether it ends where the next one begins, on both sides."""
    joined: BoolArray = (src[:-1] + size[:-1] == src[1:]) & (dst[:-1] + size[:-1] == dst[1:])
    return joined


def _merge(joined: BoolArray, size: U64Array) -> tuple[I64Array, U64Array]:
    """Returns where the merged runs begin, and their sizes. `joined[i]`: i and i + 1 become one."""
    begins = np.flatnonzero(np.concatenate([[True], ~joined]))
    return begins, np.add.reduceat(size, begins)


def concatenate(parts: Sequence[Copies]) -> Copies:
    """Returns all of them as one."""
    if len(parts) == 1:
        return parts[0]
    empty = np.empty(0, np.uint64)
    return Copies(
        np.concatenate([empty, *(part.src for part in parts)]),
        np.concatenate([empty, *(part.dst for part in parts)]),
        np.concatenate([empty, *(part.size for part in parts)]),
        sum(part.descriptors for part in parts),
    )


def overlap(begin: U64Array, size: U64Array) -> bool:
    """Returns whether two of these ranges share a byte."""
    end = begin + size
    if bool((end[:-1] <= begin[1:]).all()):
        return False
    # Sorted apart from each other: if ranges are disjoint, the i-th end lies before the (i + 1)-th begin, and if it
    # does for all i, then at each begin all earlier ranges but none have ended. Two sorts cost less than one argsort.
    if not bool(size.all()):  # ranges without bytes meet nothing, but would break the count
        begin, end = begin[size > 0], end[size > 0]
    return bool((np.sort(end)[:-1] > np.sort(begin)[1:]).any())


def split(
    copies: Copies,
    pieces: int,
    min_piece_bytes: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    chunk_descriptors: int = CHUNK_DESCRIPTORS,
) -> list[Copies]:
    """Returns chunks that can be copied at the same time: together the same bytes, none empty.

    There are about `pieces` of equal size, fewer if they would have less than `min_piece_bytes`, more where a chunk
    would exceed `chunk_bytes` or `chunk_descriptors` copies. A large copy is cut inside, at a multiple of 16 KiB from
    its start (so chunks may exceed their size by that much). The chunks' `descriptors` are in proportion to their
    bytes, and add up.

    Raises:
        UsageError: a bound below 1.
    """
    if min(pieces, min_piece_bytes, chunk_bytes, chunk_descriptors) < 1:
        raise UsageError(f"can't split into {pieces} pieces of {min_piece_bytes}, chunks of {chunk_bytes} bytes")
    total = copies.total_bytes
    if total == 0:
        return []
    count = max(min(pieces, total // min_piece_bytes), -(-total // chunk_bytes))
    if count <= 1 and len(copies) <= chunk_descriptors:
        return [copies]
    src, dst, sizes = copies.src, copies.dst, copies.size
    if not bool(sizes.all()):
        src, dst, sizes = src[sizes > 0], dst[sizes > 0], sizes[sizes > 0]
    starts = np.cumsum(sizes, dtype=np.uint64) - sizes  # in bytes from the first copy's start, like all offsets here
    cuts = _cuts(starts, np.array([total * index // count for index in range(1, count)], np.uint64))
    behind = np.searchsorted(starts, cuts, side="right")
    inside = starts[behind - 1] != cuts
    begins = starts
    if inside.any():
        behind, begins = behind[inside], np.insert(starts, behind[inside], cuts[inside])
        whole = np.insert(np.arange(len(starts)), behind, behind - 1)  # the index of the copy of each piece
        within = begins - starts[whole]
        src, dst, sizes = src[whole] + within, dst[whole] + within, np.diff(begins, append=np.uint64(total))
    chunks = []
    for lo, hi in _ranges([0, *np.searchsorted(begins, cuts).tolist(), len(begins)], chunk_descriptors):
        begin, end = int(begins[lo]), total if hi == len(begins) else int(begins[hi])
        descriptors = copies.descriptors * end // total - copies.descriptors * begin // total
        chunks.append(Copies(src[lo:hi], dst[lo:hi], sizes[lo:hi], descriptors))
    return chunks


def split_payloads(
    copies: Copies,
    pieces: int,
    min_piece_bytes: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    chunk_descriptors: int = CHUNK_DESCRIPTORS,
) -> list[Copies]:
    """Splits between payloads: `copies` is a PayloadCopies, and so are the chunks. They exceed `chunk_bytes` only if a
    payload has more than half of it, and `chunk_descriptors` only with a single payload.

    Raises:
        UsageError: a bound below 1, or other copies.
    """
    if min(pieces, min_piece_bytes, chunk_bytes, chunk_descriptors) < 1 or not isinstance(copies, PayloadCopies):
        raise UsageError("only copies of whole payloads can be split between them, with bounds above 0")
    total = copies.total_bytes
    if total == 0:
        return []
    ends = np.cumsum(copies.counts, dtype=np.int64)
    before = np.concatenate([np.zeros(1, np.uint64), np.cumsum(copies.size)])  # bytes before each copy
    starts = before[np.concatenate([[0], ends[:-1]])]  # of each payload, in bytes
    largest = int(np.diff(starts, append=np.uint64(total)).max())
    share_bytes = max(chunk_bytes - largest, chunk_bytes // 2, 1)
    count = max(min(pieces, total // min_piece_bytes), -(-total // share_bytes), -(-len(copies) // chunk_descriptors))
    # A cut is requested at a byte, and made before the payload that has this byte.
    wanted = np.array([total * index // count for index in range(1, count)], np.uint64)
    bounds = np.unique(np.concatenate([[0], np.searchsorted(starts, wanted, "right") - 1, [len(ends)]])).tolist()
    chunks = list[Copies]()
    first = 0
    for lo, hi in itertools.pairwise(bounds):
        while lo < hi:
            upto = min(max(int(np.searchsorted(ends, first + chunk_descriptors, "right")), lo + 1), hi)
            last = int(ends[upto - 1])
            begin, end = int(before[first]), int(before[last])
            descriptors = copies.descriptors * end // total - copies.descriptors * begin // total
            src, dst, size = copies.src[first:last], copies.dst[first:last], copies.size[first:last]
            counts, digests = copies.counts[lo:upto], copies.digests[lo:upto]
            chunks.append(PayloadCopies(src, dst, size, descriptors, counts, digests))
            lo, first = upto, last
    return chunks


def _cuts(starts: U64Array, wanted: U64Array) -> U64Array:
    """Moves the requested cuts down to where a cut is allowed."""
    begin = starts[np.searchsorted(starts, wanted, side="right") - 1]
    cuts = np.unique(wanted - (wanted - begin) % np.uint64(_CUT_BYTES))
    return cuts[cuts > 0]


def _ranges(bounds: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Returns the ranges between neighbours of `bounds`, in steps of at most `longest`."""
    for lo, hi in itertools.pairwise(bounds):
        for start in range(lo, hi, longest):
            yield start, min(start + longest, hi)
