"""What a load asks of a GPU's driver by each way of copying, counted over the chunks that the daemon would make.

Blocks lie anywhere in the engine's memory, and payloads anywhere in the daemon's: only what is in the same block lies
side by side, or evenly apart. Each way has all of the rows, whatever their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvoffloadd.config import Config
from kvoffloadd.device.chunked import PIECE_DESCRIPTORS, Chunks
from kvoffloadd.device.cuda.driver import PITCH_MAX_BYTES
from kvoffloadd.device.pitched import Pitched, pitch
from kvoffloadd.device.plan import Copies, GroupPlan, Tensor, Tensors, split
from kvoffloadd.device.work import BlockList, BlockWork
from kvoffloadd.model import Direction, I64Array, slot_bytes
from kvoffloadd.planner.layouts import Layout

_ENGINE, _ARENA = 1 << 40, 1 << 46
"""Where the engine's memory begins, and the daemon's."""
_END = np.array([1 << 62], np.uint64)
_APART = 2
"""Blocks and slots are taken so far apart that no two are neighbours."""
_SEED = 1

_Cut = Callable[[Copies], list[Copies]]


@dataclass(frozen=True, slots=True)
class Operations:
    """Counts the operations of a load. `copies`: one by one, that is, descriptors after neighbours are merged;
    `batches`: calls, if they are submitted so. `runs`: pitched copies, and `rest`: copies in no run.
    """

    descriptors: int
    copies: int
    batches: int
    runs: int
    rest: int


def load_operations(layout: Layout, tokens: int, config: Config | None = None) -> Operations:
    """Counts the operations of one rank's load of what a restore of `tokens` tokens needs. All of its tensors are in
    one allocation, one behind the other, with room for twice as many blocks.
    """
    config = config or Config()
    work = _work(layout, layout.needed_blocks(tokens))
    single = _chunks(work, config, partial(_cut_single, config))
    pitched = [_runs(chunk) for chunk in _chunks(work, config, partial(_cut_pitched, config), at_once=False)]
    sizes = [len(chunk) for chunk in single]
    return Operations(
        descriptors=work.descriptors,
        copies=sum(sizes),
        batches=len(sizes),
        runs=sum(map(len, pitched)),
        rest=sum(len(runs.rest) for runs in pitched),
    )


def _work(layout: Layout, blocks: tuple[int, ...]) -> BlockWork:
    """Work for `blocks` blocks of each group, at places of no order."""
    rng = np.random.default_rng(_SEED)
    places = rng.permutation(sum(blocks)) * _APART
    tensors = _tensors(layout, max(len(places) * _APART, 1))
    groups = layout.plan.canonical.groups
    slots = _ARENA + rng.permutation(len(places)) * (_APART * slot_bytes(max(layout.payloads)))
    lists, first = [], 0
    for group, count in zip(groups, blocks, strict=True):
        span = slice(first, first + count)
        plan = GroupPlan.build(tensors, group.refs, 1)
        lists.append(_block_list(plan, places[span], slots[span]))
        first += count
    return BlockWork(lists)


def _block_list(plan: GroupPlan, blocks: I64Array, slots: I64Array) -> BlockList:
    rows = np.arange(len(blocks))
    return BlockList((plan,), blocks.astype(np.uint32)[:, None], rows, np.zeros_like(rows), slots.astype(np.uint64))


def _tensors(layout: Layout, num_blocks: int) -> Tensors:
    """The layout's tensors, with `num_blocks` blocks."""
    plan = layout.plan
    starts = _ENGINE + np.cumsum([0, *(tensor.bytes // plan.num_blocks * num_blocks for tensor in plan.tensors)])
    tensors = []
    for rows in plan.canonical.rows:
        before, within = divmod(rows.offset, rows.num_blocks * rows.stride_bytes)  # K and V may lie apart
        base = int(starts[rows.memory]) + before * num_blocks * rows.stride_bytes + within
        tensors.append(Tensor(base, num_blocks, rows.page_bytes, rows.stride_bytes))
    return Tensors.of(tensors)


def _chunks(work: BlockWork, config: Config, cut: _Cut, *, at_once: bool = True) -> Iterator[Copies]:
    """Yields chunks as the threads of the daemon's lanes take them. `at_once`: see `Chunks`."""
    found: list[Copies] = []
    chunks = Chunks(work, Direction.LOAD, cut, config.copy.chunk_bytes, at_once=at_once)
    while chunks.copy_next(found.append):
        yield from found
        found.clear()
    yield from found


# --- as `RowCopier` has it, with one way forced ---


def _cut_single(config: Config, copies: Copies) -> list[Copies]:
    return split(copies, 1, 1, chunk_bytes=config.copy.chunk_bytes, chunk_descriptors=config.cuda.batch_descriptors)


def _cut_pitched(config: Config, copies: Copies) -> list[Copies]:
    if not len(copies):
        return []
    runs = _runs(copies)
    most = config.cuda.batch_descriptors * len(copies) // max(len(runs) + len(runs.rest), 1)
    most = min(most, PIECE_DESCRIPTORS)
    return split(copies, 1, 1, chunk_bytes=config.copy.chunk_bytes, chunk_descriptors=most)


def _runs(copies: Copies) -> Pitched:
    return pitch(copies, _END, _END, pitch_max_bytes=PITCH_MAX_BYTES)
