"""Figures that were published for layouts of two models, counted by a daemon that copies blocks of the true sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvoffloadd.client import Client, Group, KvCache, NamespaceSpec, Outcome, SharedTensor
from kvoffloadd.model import U8Array
from kvoffloadd.planner.layouts import KV_APART, PER_LAYER, ROWS, Layout, possible_layouts
from scripts.harness.daemon import Daemon
from tests.planner.models import GEMMA_3, GPT_OSS, rank

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 64
FEW_BLOCKS, LOADED_BLOCKS = 4, 6 * 17 + 63
"""Of the worker. Several keys may be stored from a block, but only one loaded to it; what is counted is the same."""
WAIT_S = 120.0

Wanted = Mapping[int, int]
"""The last so many keys of a group."""


@pytest.fixture
def large(start_daemon: Callable[..., Daemon]) -> Daemon:
    """Starts a daemon with room for a prompt."""
    return start_daemon("memory.slab_bytes=64MiB", memory="704MiB")


def layout_of(name: str, layout: str, num_blocks: int) -> Layout:
    found, _ = possible_layouts(rank(name, block_size=BLOCK_TOKENS), num_blocks=num_blocks)
    return next(one for one in found if one.name == layout)


def kv_cache(layout: Layout, change: Callable[[Sequence[Group]], Sequence[Group]]) -> KvCache:
    """Memory as planned, and what the plan registers of it."""
    plan = layout.plan
    memory = [SharedTensor.allocate(1, tensor.bytes) for tensor in plan.tensors]
    tensors = []
    for rows in plan.canonical.rows:
        whole = memory[rows.memory].array[0, rows.offset :][: rows.num_blocks * rows.stride_bytes]
        tensors.append(SharedTensor.adopt(whole.reshape(rows.num_blocks, rows.stride_bytes)[:, : rows.page_bytes]))
    return KvCache(tensors, change(plan.canonical.groups))


@dataclass
class FiguresWorker:
    """One prompt's keys, and a KV cache."""

    daemon: Daemon
    layout: Layout
    change: Callable[[Sequence[Group]], Sequence[Group]] = tuple

    def __enter__(self) -> FiguresWorker:
        # Each in a separate namespace.
        namespace = NamespaceSpec(model="figures", layout=f"{self.layout.name} {id(self)}")
        self.client = Client(self.daemon.socket, namespace=namespace, deadline_s=WAIT_S)
        self.registration = self.client.register(kv_cache(self.layout, self.change))
        return self

    def __exit__(self, *_: object) -> None:
        self.client.clear()
        self.client.close()

    def counted(self, direction: str, wanted: Wanted) -> tuple[int, int]:
        """A job of these keys: descriptors and bytes, by the daemon's own count."""
        before = self.daemon.status()["transfers"][direction]
        submit = self.client.store if direction == "store" else self.client.load
        blocks = np.arange(sum(wanted.values())) % self.layout.plan.num_blocks
        transfers = {}
        for group, count in wanted.items():
            transfers[group] = _keys(group, count), blocks[:count]
            blocks = blocks[count:]
        job = submit(self.registration, transfers, deadline_s=WAIT_S)
        assert self.client.wait(job, WAIT_S).outcome is Outcome.DONE
        after = self.daemon.status()["transfers"][direction]
        return after["descriptors"] - before["descriptors"], after["bytes"] - before["bytes"]


def _keys(group: int, count: int) -> U8Array:
    """The last of a prompt's keys are the same, however many there are."""
    return np.random.default_rng(group).integers(0, 256, (300, 32), np.uint8)[-count:]


@pytest.mark.parametrize(("layout", "descriptors"), [(ROWS, 279), (PER_LAYER, 3348), (KV_APART, 6696)])
def test_gpt_oss(large: Daemon, layout: str, descriptors: int) -> None:
    """279 blocks of one group are 438,829,056 bytes, whatever the layout."""
    with FiguresWorker(large, layout_of(GPT_OSS, layout, FEW_BLOCKS)) as worker:
        assert worker.counted("store", {1: 279}) == (descriptors, 438_829_056)


def test_gemma_3(large: Daemon) -> None:
    """63 blocks: 4,284 descriptors if all are moved, 1,616 with windows as engines clip them."""
    layout = layout_of(GEMMA_3, KV_APART, LOADED_BLOCKS)
    clipped = dict(enumerate(layout.clipped_blocks(63 * BLOCK_TOKENS)))
    assert clipped == {**dict.fromkeys(range(6), 17), 6: 63}
    with FiguresWorker(large, layout) as worker:
        assert worker.counted("store", dict.fromkeys(range(7), 63))[0] == 4284
        assert worker.counted("load", clipped)[0] == 1616


def test_gemma_3_with_an_unused_slot_that_is_moved(large: Daemon) -> None:
    """1,650: what was published counts the slot that the last group of windows leaves unused."""

    def padded(groups: Sequence[Group]) -> Sequence[Group]:
        return [replace(group, refs=groups[0].refs) for group in groups]

    clipped = {**dict.fromkeys(range(6), 17), 6: 63}
    with FiguresWorker(large, layout_of(GEMMA_3, KV_APART, LOADED_BLOCKS), padded) as worker:
        worker.counted("store", clipped)
        assert worker.counted("load", clipped)[0] == 1650
