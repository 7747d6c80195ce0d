"""KV caches of models in every layout, and rows of odd sizes, by each way of copying: a worker that writes and reads
through its layers' own views, a real daemon, the software driver. All bytes are compared, of all blocks.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kvoffloadd.client import Client, Group, GroupKind, Outcome
from kvoffloadd.model import I64Array, U8Array
from kvoffloadd.planner import Rank
from scripts.harness.arrangement import Arrangement, Gaps, scattered
from scripts.harness.copies import COUNTERS, WAYS, counted
from scripts.harness.daemon import Daemon
from scripts.harness.geometry import BLOCK_TOKENS, Geometry
from scripts.harness.groupshape import GroupShape, RefShape
from scripts.harness.kvmemory import KvMemory
from scripts.harness.models import named, small
from scripts.harness.places import GpuLine
from scripts.harness.planned import LAYOUTS, PlannedGeometry, planned_geometries
from tests.e2e import gpu_rank
from tests.e2e.daemons import make_daemon

pytestmark = pytest.mark.skipif(bool(gpu_rank.why_no_cuda()), reason=gpu_rank.why_no_cuda())

WAIT_S = 30.0
KEYS = {"dense": (9, 1), "chunks": (2, 8)}
"""By the kind of memory: how many, and of how many blocks each."""
EACH_KIND = 16
"""Layers of each kind, so that a block has rows enough for a run."""
STATES, UNEVEN = "qwen3-next-80b-a3b", "deepseek-v3.2"
MODELS = {
    "gpt-oss-120b": ("by-layer", "kv-apart", "cross-layer", "heads-first", "packed-rows"),
    STATES: ("by-layer", "cross-layer", "packed-pages", "packed-rows"),
    "deepseek-r1": ("by-layer", "packed-rows"),
    UNEVEN: ("by-layer", "cross-layer"),
}
"""Windows; states on attention's slots; latents; latents with an index, so that pages are of two sizes."""
ODD = "odd"
EVEN = ("by-layer", "kv-apart", "packed-pages")
"""The rows of a block lie evenly apart, if they are of one size. Those of the blocks of a key do in every layout."""
CASES = [(model, layout) for model, layouts in MODELS.items() for layout in layouts] + [(ODD, ODD)]


@functools.cache
def geometries(model: str) -> dict[str, PlannedGeometry]:
    """Returns geometries by layout. Two ranks have parts of what has heads or states."""
    config = named(model)
    if model == STATES:  # as many again: two of its attention layers share a page
        config = replace(config, kinds=config.kinds * 2)
    config = small(config, each_kind=EACH_KIND)
    ranks = 1 if config.is_mla else 2
    assert Rank(config, ranks, BLOCK_TOKENS).parts(config.kinds[0]) == ranks
    found = planned_geometries(model, config, 0, ranks=ranks)
    return {layout: geometry for geometry in found for layout in geometry.layouts}


def odd() -> Geometry:
    """Returns rows of odd sizes, at odd places, an odd number of bytes apart; one is longer than a kernel's longest."""
    shapes = (
        (GroupKind.FULL, 2, (RefShape(0, 257, 16), RefShape(1, 4001), RefShape(0, 1))),
        (GroupKind.SLIDING, 1, (RefShape(1, 13, 9), RefShape(0, 41), RefShape(1, 4096, 11))),
        (GroupKind.MAMBA, 1, (RefShape(1, (64 << 10) + 77), RefShape(0, 6, 8))),
    )
    groups = tuple(
        GroupShape(number, kind, BLOCK_TOKENS * blocks, 2 * (kind is GroupKind.SLIDING), blocks, (refs,), (0,))
        for number, (kind, blocks, refs) in enumerate(shapes)
    )
    return Geometry(ODD, 0, 32, 1, 2, False, groups)


class Share(NamedTuple):
    """A group's keys, what they hold on this rank, and two sets of blocks, each evenly apart: i64 (keys, blocks)."""

    keys: U8Array
    contents: U8Array
    stored: I64Array
    loaded: I64Array

    def shuffled(self, rng: np.random.Generator) -> Share:
        """The same keys in another order, to be loaded to other blocks."""
        order = rng.permutation(len(self.keys))
        return Share(self.keys[order], self.contents[order], self.loaded, self.stored[rng.permutation(len(order))])


class GpuRank:
    """A rank of a model, on a GPU."""

    def __init__(
        self, socket: Path, geometry: Geometry, number: int, layout: str, kind: str, rng: np.random.Generator
    ) -> None:
        keys, many = KEYS[kind]
        geometry = _of_several_blocks(geometry, many)
        blocks = [keys * shape.blocks_per_key for shape in geometry.groups]
        arrangement = _arranged(geometry, number, layout, 2 * sum(blocks), rng)
        self.memory = KvMemory(geometry, arrangement, rng, "", line=GpuLine(kind=kind))
        self.client = Client(socket, namespace=geometry.namespace(), deadline_s=WAIT_S)
        self.registration = self.client.register(self.memory.caches)
        self.shares: dict[int, Share] = {}
        first = 0
        for shape, count in zip(geometry.groups, blocks, strict=True):
            even = np.arange(first, first + 2 * count, 2).reshape(keys, shape.blocks_per_key)
            names = np.random.default_rng([geometry.number, shape.number]).integers(0, 256, (keys, 32), np.uint8)
            payload_bytes = shape.payload_bytes(shape.part_of_rank[number] or 0)
            contents = rng.integers(0, 256, (keys, payload_bytes), np.uint8)
            self.shares[shape.number] = Share(names, contents, even, even + 1)
            first += 2 * count

    def store(self) -> Outcome:
        for group, share in self.shares.items():
            self.memory.fill(group, share.stored, share.contents)
        wanted = {group: (share.keys, _ids(share.stored)) for group, share in self.shares.items()}
        return self.client.wait(self.client.store(self.registration, wanted), WAIT_S).outcome

    def load(self) -> Outcome:
        wanted = {group: (share.keys, _ids(share.loaded)) for group, share in self.shares.items()}
        outcome = self.client.wait(self.client.load(self.registration, wanted), WAIT_S).outcome
        for group, share in self.shares.items():
            self.memory.expect(group, share.loaded, share.contents)
        return outcome

    def shuffle(self, rng: np.random.Generator) -> None:
        """Chooses another order in which keys are loaded from now on, to the blocks that they were stored from."""
        self.shares = {group: share.shuffled(rng) for group, share in self.shares.items()}

    def close(self) -> None:
        """See `Daemon.welcome`."""
        self.client.close(WAIT_S, force=True)


def _arranged(geometry: Geometry, number: int, layout: str, num_blocks: int, rng: np.random.Generator) -> Arrangement:
    if isinstance(geometry, PlannedGeometry):
        arranged = geometry.arrange_blocks(number, num_blocks, layout)
        shapes = {shape.number: shape for shape in geometry.groups}
        return replace(arranged, groups=tuple(_as_in(shapes[group.group], group) for group in arranged.groups))
    gaps = Gaps(rng, padded=True)
    return scattered(geometry.groups, geometry.tensors, number, num_blocks, gaps, overlaid=geometry.overlaid)


def _of_several_blocks(geometry: Geometry, many: int) -> Geometry:
    """Returns the geometry with `many` times as many blocks in each key."""
    groups = tuple(
        replace(shape, blocks_per_key=many * shape.blocks_per_key, tokens_per_key=many * shape.tokens_per_key)
        for shape in geometry.groups
    )
    return replace(geometry, name=f"{geometry.name}-{many}", groups=groups)


def _as_in(shape: GroupShape, group: Group) -> Group:
    window = -(-group.window_keys // shape.blocks_per_key)
    return replace(group, blocks_per_key=shape.blocks_per_key, tokens_per_key=shape.tokens_per_key, window_keys=window)


def _ids(blocks: I64Array) -> I64Array:
    """Returns ids as jobs name them."""
    return blocks[:, 0] if blocks.shape[1] == 1 else blocks


@pytest.fixture(scope="module", params=list(WAYS))
def forced(request: pytest.FixtureRequest) -> Iterator[tuple[str, Daemon]]:
    """A way of copying, and a daemon that has no other."""
    way: str = request.param
    driver = {"faults": "packed,read_early,poison,jitter_ns=20000"}
    gpu_rank.extras()
    folder = Path(tempfile.mkdtemp(prefix="kvo-", dir="/tmp"))
    settings = ["memory.slab_bytes=2MiB", *(f"{name}={value}" for name, value in WAYS[way].items())]
    daemon = make_daemon(folder, *settings, memory="64MiB", driver=driver)
    yield way, daemon
    daemon.finish()


def test_no_layout_is_left_out() -> None:
    assert {layout for _, layout in CASES} == {*LAYOUTS, ODD}


@pytest.mark.parametrize("kind", ["dense", "chunks"])
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_bytes_are_right(forced: tuple[str, Daemon], model: str, layout: str, kind: str, seed: int) -> None:
    """Stored; loaded to other blocks; loaded in another order to those that they came from."""
    way, daemon = forced
    rng = np.random.default_rng(seed)
    geometry = odd() if model == ODD else geometries(model)[layout]
    workers = [
        daemon.welcome(GpuRank(daemon.socket, geometry, number, layout, kind, rng)) for number in range(geometry.ranks)
    ]
    before = counted(daemon.status())
    assert [worker.store() for worker in workers] == [Outcome.DONE] * geometry.ranks
    for worker in workers:
        assert worker.load() is Outcome.DONE
        assert worker.memory.compare_all() is None
        worker.shuffle(rng)
        assert worker.load() is Outcome.DONE
        assert worker.memory.compare_all() is None
    after = counted(daemon.status())
    moved = {name for name in after if after[name] > before[name]}
    if way == "pitched" and kind == "dense" and (layout not in EVEN or model == UNEVEN):
        moved |= {*COUNTERS[way]}  # where slots happen to lie evenly apart, too
    assert moved == {*COUNTERS[way]}
    workers[0].client.clear()
    daemon.leave_guests()
