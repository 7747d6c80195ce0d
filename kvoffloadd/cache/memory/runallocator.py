"""An allocator of runs of consecutive record numbers. Event loop only.

Numbers come in blocks, and no run crosses from one block into the next. A run that is given back waits in a list of its
width for its reuse: that costs next to nothing, and suits callers that always want the same widths. If lists grow long,
or other widths are short, their runs go to a map of free numbers instead. Neighbours join in the map without further
work, and runs of any width are cut from it, block by block.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import BoolArray, I64Array, U16Array, U32Array

BLOCK = 4096
"""The numbers of a block: several times the parts that a key may have."""

LISTED_MAX = 1 << 18
"""The limit of numbers in lists. Beyond it, runs that are given back go to the map. It bounds the work of emptying all
lists at once.
"""

BLOCKS_AT_ONCE = 16
VAIN_MAX = 1024
"""The number of blocks of the map that one step inspects. A call ends with its current result after this many blocks
without success.
"""


class RunAllocator:
    """Allocates runs of consecutive numbers below `max_records`, and takes them back whole."""

    def __init__(self, max_records: int) -> None:
        self.max_records = max_records
        self.used = 0
        """The end of the numbers: every number ever allocated is below it."""
        self.taken = 0
        """The count of allocated numbers."""
        self._listed: dict[int, list[U32Array]] = {}
        self._counts: Counter[int] = Counter()  # of runs in a list, by width
        self._num_listed = 0
        self._is_crowded = False
        blocks = -(-max_records // BLOCK)
        self._map: BoolArray = reserve_array((blocks * BLOCK,), np.bool_)  # free, and in no list
        self._longest: U16Array = reserve_array((blocks,), np.uint16)  # the map of a block has nothing longer

    def ready(self, width: int, wanted: int) -> int:
        """Returns how many of `wanted` runs can be allocated, regardless of runs that are given back until then. The
        result is lower than the actual number only if the call met too many blocks without success; the next call then
        goes on.
        """
        if self._is_crowded:  # some of the widths may not be in use any more
            self._unlist()
        for make in (self._cut, self._open, self._merge):
            if self._counts[width] >= wanted:
                break
            make(width, wanted - self._counts[width])
        return min(wanted, self._counts[width])

    def allocate(self, width: int, count: int) -> U32Array:
        """Returns the first number of each of `count` runs. The caller has made sure that they are `ready`."""
        runs: list[U32Array] = []
        pool = self._listed.get(width, [])
        left = count
        while left and pool:
            last = pool.pop()
            if len(last) > left:
                pool.append(last[left:])
                last = last[:left]
            runs.append(last)
            left -= len(last)
        self._counts[width] -= count - left
        self._num_listed -= (count - left) * width
        self.taken += (count - left) * width
        return np.concatenate(runs) if runs else np.zeros(0, np.uint32)

    def free(self, width: int, first: U32Array) -> None:
        if not len(first):
            return
        self.taken -= len(first) * width
        if self._num_listed + len(first) * width > LISTED_MAX:
            self._is_crowded = True  # emptying the lists here would take ready runs from later calls of that width
            self._put(width, first)
        else:
            self._list(width, first.copy())

    @staticmethod
    def of(first: U32Array | I64Array, width: int) -> I64Array:
        """Returns the (n, width) numbers of the runs that begin at `first`."""
        return first.astype(np.int64)[:, None] + np.arange(width, dtype=np.int64)

    def listed(self) -> I64Array:
        """Returns the numbers that are free and in a list."""
        pools = [self.of(first, width).ravel() for width, pool in self._listed.items() for first in pool]
        return np.concatenate([np.zeros(0, np.int64), *pools])

    def in_map(self, start: int, stop: int) -> BoolArray:
        """Returns which of these numbers are free and in no list."""
        return self._map[start:stop].copy()

    def memory_bytes(self) -> int:
        """Returns the bytes of the lists and the map."""
        return 4 * sum(self._counts.values()) + self.used + 2 * -(-self.used // BLOCK)

    def check(self) -> list[str]:
        """Returns a list of errors, empty if there are none. Walks everything."""
        findings = []
        listed = self.listed()
        counts = Counter({width: sum(map(len, pool)) for width, pool in self._listed.items()})
        if len(listed) != self._num_listed or counts != self._counts:
            findings.append(f"{len(listed)} numbers are listed, counted {self._num_listed}")
        mapped = int(np.count_nonzero(self._map[: self.used]))
        if len(listed) + mapped + self.taken != self.used:
            findings.append(f"{len(listed)} + {mapped} numbers are free, {self.used} - {self.taken} should be")
        is_free = self._map[listed]
        if is_free.any() or (np.diff(np.sort(listed)) == 0).any() or (len(listed) and listed.max() >= self.used):
            findings.append("a number is free twice, or was never given out")
        return findings

    def check_blocks(self, start: int, stop: int) -> list[str]:
        """Checks that the recorded longest run of each block between these numbers is not shorter than its runs."""
        blocks = np.arange(start // BLOCK, -(-stop // BLOCK))
        _, lengths, of = stretches(self._map.reshape(-1, BLOCK)[blocks])
        return ["a block has a longer run than it is known for"] if (lengths > self._longest[blocks[of]]).any() else []

    # --- inside ---

    def _list(self, width: int, first: U32Array) -> None:
        self._listed.setdefault(width, []).append(first)
        self._counts[width] += len(first)
        self._num_listed += len(first) * width

    def _unlist(self) -> None:
        """Moves all runs from lists to the map."""
        pools, self._listed = self._listed, {}
        self._counts.clear()
        self._num_listed, self._is_crowded = 0, False
        for width, pool in pools.items():
            if pool:
                self._put(width, np.concatenate(pool))

    def _put(self, width: int, first: U32Array) -> None:
        step = max(1, LISTED_MAX // width)
        for start in range(0, len(first), step):
            self._map[self.of(first[start : start + step], width)] = True
        ordered = np.sort(first // BLOCK)
        begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(ordered) else np.zeros(0, np.int64)
        blocks, count = ordered[begins], np.diff(begins, append=len(ordered))
        # In the worst case each of them, and one run more, was between two runs that were free before.
        longest = self._longest[blocks] * (count + 1) + width * count
        self._longest[blocks] = np.minimum(longest, BLOCK)

    def _cut(self, width: int, missing: int) -> None:
        """Moves runs from the map to the list, lowest first. Takes at least all of a block's runs, so that the block is
        not inspected for each run.
        """
        missing = max(missing, BLOCK // width)
        blocks = np.flatnonzero(self._longest[: -(-self.used // BLOCK)] >= width)
        vain = 0
        for start in range(0, len(blocks), BLOCKS_AT_ONCE):
            batch = blocks[start : start + BLOCKS_AT_ONCE]
            begins, lengths, of = stretches(self._map.reshape(-1, BLOCK)[batch])
            first, counts = pieces(batch[of] * BLOCK + begins, lengths, width, missing)
            self._map[self.of(first, width)] = False
            longest = np.zeros(len(batch), np.int64)
            np.maximum.at(longest, of, lengths - counts * width)
            self._longest[batch] = longest
            if len(first):
                self._list(width, first.astype(np.uint32))
                missing -= len(first)
            else:
                vain += len(batch)
            if missing <= 0 or vain >= VAIN_MAX:
                return

    def _open(self, width: int, missing: int) -> None:
        """Takes blocks into use that never were."""
        blocks = -(-missing // max(1, BLOCK // width))
        begin, self.used = self.used, min(self.used + blocks * BLOCK, self.max_records)
        if self.used > begin:
            self._map[begin : self.used] = True
            opened = slice(begin // BLOCK, -(-self.used // BLOCK))
            self._longest[opened] = np.minimum(BLOCK, self.used - np.arange(begin, self.used, BLOCK))
            self._cut(width, missing)

    def _merge(self, width: int, missing: int) -> None:
        """Adds runs from the lists of other widths."""
        missing += self._counts[width]
        self._unlist()
        self._cut(width, missing)


def stretches(free: BoolArray) -> tuple[I64Array, I64Array, I64Array]:
    """Returns begin, length and row of each longest run of True in the rows of an array."""
    padded = np.zeros((len(free), free.shape[1] + 2), bool)
    padded[:, 1:-1] = free
    flat = padded.ravel()
    edges = np.flatnonzero(flat[1:] != flat[:-1])  # edges into a run and out of it alternate
    begins, ends = edges[0::2], edges[1::2]
    return begins % padded.shape[1], ends - begins, begins // padded.shape[1]


def pieces(begins: I64Array, lengths: I64Array, width: int, wanted: int) -> tuple[I64Array, I64Array]:
    """Returns the first numbers of up to `wanted` runs of `width` within these stretches, and the number of runs in
    each.
    """
    ends = np.minimum((lengths // width).cumsum(), wanted)
    counts = np.diff(ends, prepend=0)
    first = np.repeat(begins, counts) + width * (np.arange(counts.sum()) - np.repeat(ends - counts, counts))
    return first, counts
