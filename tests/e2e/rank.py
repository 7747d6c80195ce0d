"""A worker whose every byte is known: what a block holds is a function of its key, group, part and place in the key."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvoffloadd.client import (
    Client,
    Group,
    GroupKind,
    Job,
    JobResult,
    KvCache,
    NamespaceSpec,
    Ref,
    Timeline,
)
from kvoffloadd.model import NO_BLOCK, U8Array
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.places import GpuPlace
from tests.e2e.gpu_rank import Where

WAIT_S = HANG_S
NAMESPACE = NamespaceSpec(model="e2e")
PAGE = 4096
ANYWHERE = Where()

SIMPLE = (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, PAGE),)),)
"""One tensor whose rows are stored whole."""

ROWS = (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 3, 257, 16, 300),)),)
"""A block is 16 rows of an odd size, evenly apart."""

HYBRID = (
    Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 3000), Ref(1, 64, 32, 8, 128))),
    Group(1, GroupKind.SLIDING, 32, refs=(Ref(2, 4, 100, 3, 200), Ref(0, 3001, 77)), window_keys=2, blocks_per_key=2),
    Group(2, GroupKind.MAMBA, 64, refs=(Ref(3, 0, 9000),)),
)
"""Runs, strides, a tensor that two groups share, several blocks per key, payloads of three sizes."""

Keys = U8Array


def new_keys(rng: np.random.Generator, count: int) -> Keys:
    """u8 (count, 32)."""
    return rng.integers(0, 256, (count, 32), dtype=np.uint8)


def content(key: bytes, group: int, part: int, block: int, ref: int, size: int) -> U8Array:
    """The bytes of one ref of one block of a key."""
    name = key + bytes((group, part, block, ref))
    return np.frombuffer(hashlib.shake_128(name).digest(size), np.uint8)


class Rank:
    """A client with a registered KV cache. `groups`: what it registers; tensors are made to fit.

    `socket`: a daemon's path. Rows are further apart than they are long, and what lies between is watched too.
    """

    def __init__(
        self,
        socket: Path,
        groups: Sequence[Group] = SIMPLE,
        *,
        num_blocks: int = 64,
        name: str = "e2e_cache",
        timelines: Sequence[Timeline] = (),
        register: bool = True,
        where: Where = ANYWHERE,
        **options: Any,
    ) -> None:
        self.client = Client(socket, **{"namespace": NAMESPACE, **options})
        self.client.connect()
        refs = [ref for group in groups for ref in group.refs]
        pages = [max((r.end for r in refs if r.tensor == t), default=1) for t in range(1 + _last_tensor(refs))]
        self._groups = tuple(groups)
        self._timelines = timelines
        self._allocate(where, num_blocks, pages, name)
        self._again = partial(self._allocate, where, num_blocks, pages, name)
        if register:
            self.registration = self.client.register(self.cache)

    def _allocate(self, where: Where, num_blocks: int, pages: Sequence[int], name: str) -> None:
        self._place = where.memory(num_blocks, pages, name)
        # With what lies between the rows, which no copy may touch.
        self._rows = self._place.rows
        self.cache = KvCache(self._place.tensors, self._groups, self._timelines)

    def renew(self) -> None:
        """Give the memory back, which is registered no more; then make it again, and register it."""
        del self.registration, self.cache, self._place, self._rows
        gc.collect()
        self._again()
        self.registration = self.client.register(self.cache)

    @property
    def mapped_bytes(self) -> int:
        """What the daemon maps of it."""
        return sum(allocation.size_bytes for allocation in self.cache.allocations())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """An orderly end."""
        self.client.close(WAIT_S, force=True)

    # --- contents ---

    def blocks_of(self, group: int, first: int, keys: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Consecutive blocks from `first` on, as a job names them."""
        per_key = next(one.blocks_per_key for one in self._groups if one.group == group)
        ids = np.arange(first, first + keys * per_key)
        return ids if per_key == 1 else ids.reshape(keys, per_key)

    def fill(self, group: int, keys: Keys, blocks: np.ndarray[Any, Any]) -> None:
        """Compute the blocks, as an engine would."""
        self._look()
        for place, expected in self._places(group, keys, blocks):
            place[:] = expected
        self._publish(blocks)

    def wrong(self, group: int, keys: Keys, blocks: np.ndarray[Any, Any]) -> int:
        """How many bytes of these blocks are not those of the keys. NO_BLOCK is skipped."""
        self._look()
        return sum(int((place != expected).sum()) for place, expected in self._places(group, keys, blocks))

    def wipe(self) -> None:
        """Every byte becomes 0xEE."""
        for rows in self._rows:
            rows[:] = 0xEE
        self._place.publish()

    def fill_late(self, group: int, keys: Keys, blocks: np.ndarray[Any, Any], delay_s: float) -> None:
        """Does what `fill` does, but in the GPU's stream after a delay; returns at once."""
        self._look()
        for place, expected in self._places(group, keys, blocks):
            place[:] = expected
        self._publish(blocks, delay_s)

    def wipe_late(self, blocks: np.ndarray[Any, Any], delay_s: float) -> None:
        """Every byte of these blocks becomes 0xEE, see `fill_late`."""
        self._look()
        for rows in self._rows:
            rows[np.unique(blocks)] = 0xEE
        self._publish(blocks, delay_s)

    def clean(self) -> bool:
        """Whether every byte is as `wipe` left it."""
        self._look()
        return all(bool((rows == 0xEE).all()) for rows in self._rows)

    def wipe_loaded(self, group: int, blocks: np.ndarray[Any, Any]) -> None:
        """Undo a load, so that `clean` shows whether it touched anything else."""
        self._look()
        for place, _ in self._places(group, np.zeros((len(blocks), 32), np.uint8), blocks):
            place[:] = 0xEE
        self._publish(blocks)

    def _look(self) -> None:
        """Have in `_rows` what a GPU's memory holds."""
        self._place.fetch([(0, len(self._rows[0]))])

    def _publish(self, blocks: np.ndarray[Any, Any], delay_s: float | None = None) -> None:
        """Have in a GPU's memory what these blocks are in `_rows`; after a delay: without waiting for it."""
        if isinstance(self._place, GpuPlace):
            if delay_s is not None:
                self._place.gpu.delay(delay_s)
            runs = [(row, 1) for row in np.unique(blocks).tolist() if row != NO_BLOCK]
            self._place.publish(runs, late=delay_s is not None)

    def _places(self, group: int, keys: Keys, blocks: np.ndarray[Any, Any]) -> Iterator[tuple[U8Array, U8Array]]:
        for known in (one for one in self._groups if one.group == group):
            of_keys = np.asarray(blocks).reshape(len(keys), known.blocks_per_key).tolist()
            for key, ids in zip(keys, of_keys, strict=True):
                for block, row in enumerate(ids):
                    if row == NO_BLOCK:
                        continue
                    for number, ref in enumerate(known.refs):
                        expected = content(key.tobytes(), group, known.part, block, number, ref.payload_bytes)
                        yield from _runs(self._rows[ref.tensor][row], ref, expected)

    # --- jobs ---

    def begin_store(self, wanted: Mapping[int, tuple[Keys, np.ndarray[Any, Any]]], **options: Any) -> Job:
        """Fill the blocks and start to store them."""
        for group, (keys, blocks) in wanted.items():
            self.fill(group, keys, blocks)
        return self.client.store(self.registration, wanted, **options)

    def store(self, wanted: Mapping[int, tuple[Keys, np.ndarray[Any, Any]]], **options: Any) -> JobResult:
        """Fill the blocks, store them, wait."""
        return self.wait(self.begin_store(wanted, **options))

    def load(self, wanted: Mapping[int, tuple[Keys, np.ndarray[Any, Any]]], **options: Any) -> JobResult:
        """Load and wait."""
        return self.wait(self.client.load(self.registration, wanted, **options))

    def wait(self, job: Job) -> JobResult:
        return self.client.wait(job, WAIT_S)

    def store_keys(self, keys: Keys, group: int = 0, **options: Any) -> JobResult:
        """Store from the blocks from 0 on."""
        return self.store({group: (keys, self.blocks_of(group, 0, len(keys)))}, **options)

    def loads_right(self, keys: Keys, group: int = 0, **options: Any) -> bool:
        """Wipe everything, load all the keys, compare every byte."""
        blocks = self.blocks_of(group, 0, len(keys))
        self.wipe()
        result = self.load({group: (keys, blocks)}, **options)
        return str(result.outcome) == "done" and self.wrong(group, keys, blocks) == 0

    def states(self, keys: Keys, group: int = 0) -> list[int]:
        """Returns the state of each key, as a lookup answers it."""
        found: list[int] = self.client.lookup({group: keys}).states[0].tolist()
        return found


def _last_tensor(refs: Sequence[Ref]) -> int:
    return max((ref.tensor for ref in refs), default=0)


def _runs(row: U8Array, ref: Ref, expected: U8Array) -> Iterator[tuple[U8Array, U8Array]]:
    for run in range(ref.count):
        start = ref.offset + run * ref.stride
        yield row[start : start + ref.length], expected[run * ref.length : (run + 1) * ref.length]
