"""Engines of several tensor-parallel sizes on one daemon: what one stored, the others load, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, KeyState, NamespaceSpec, Outcome, Registration
from kvoffloadd.errors import RemoteError
from kvoffloadd.layout import (
    FLASH_HND,
    FLASH_NHD,
    TRITON_HND,
    Allocated,
    Attention,
    Backend,
    LayerGroup,
    LayerKind,
    LayerSpec,
    cross_layers,
    packed_rows,
    share_of,
)
from kvoffloadd.model import U8Array
from scripts.harness.daemon import Daemon
from tests.layout.models import named
from tests.layout.oracle import heads_of, put_heads, wipe

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")

BLOCKS, KEYS, HEADS, PARTS, WINDOW = 10, 4, 8, 4, 40
SPEC = Attention(16, HEADS, 8, "bfloat16", TRITON_HND)
MADE = {
    "heads first": (cross_layers, TRITON_HND),
    "flash, heads first": (cross_layers, FLASH_HND),
    "tokens first": (cross_layers, FLASH_NHD),
    "rows": (packed_rows, TRITON_HND),
}
Names = dict[int, U8Array]
"""Keys of each group, u8 (KEYS, 32)."""


@dataclass(eq=False)
class ShardedRank:
    """One rank of an engine, registered."""

    client: Client
    registration: Registration
    made: Allocated
    first_head: int


def model(backend: Backend, heads: int) -> tuple[dict[str, LayerSpec], list[LayerGroup]]:
    """3 full layers and 2 sliding ones."""
    full = replace(SPEC, backend=backend, num_kv_heads=heads)
    sliding = replace(full, kind=LayerKind.SLIDING, window=WINDOW)
    specs: dict[str, LayerSpec] = {**named("f", 3, full), **named("s", 2, sliding)}
    return specs, [LayerGroup(0, ("f0", "f1", "f2")), LayerGroup(1, ("s0", "s1"))]


class ShardedEngine:
    """Some ranks, each with its heads. `parts`: of each key in the namespace."""

    def __init__(self, daemon: Daemon, name: str, ranks: int, parts: int = PARTS) -> None:
        make, backend = MADE[name]
        specs, groups = model(backend, max(1, HEADS // ranks))
        instance = os.urandom(16)
        self.ranks = []
        for rank in range(ranks):
            share = share_of(LayerKind.FULL, HEADS, rank, ranks, parts)
            held = [replace(group, parts=parts, part=share.part, held=share.held) for group in groups]
            made = make(specs, held, BLOCKS).allocate()
            spec = NamespaceSpec(model="engines", layout=name)
            client = Client(daemon.socket, namespace=spec, instance=instance)
            client.connect()
            daemon.welcome(client)
            registration = client.register(made.cache.kv_cache())
            self.ranks.append(ShardedRank(client, registration, made, share.part * HEADS // parts))

    def compute(self, whole: Any, ids: list[int], kind: str) -> None:
        """Blocks of the layers of a kind: (layers, blocks, kv, token, head, dim), each rank has its heads."""
        for rank, layer, spec, values in self._shares(whole, kind):
            for block, of_block in zip(ids, values, strict=True):
                put_heads(rank.made.layers[layer], spec, block, of_block)

    def wrong(self, whole: Any, ids: list[int], kind: str) -> int:
        """Items of these blocks that are not those values."""
        bad = 0
        for rank, layer, spec, values in self._shares(whole, kind):
            for block, of_block in zip(ids, values, strict=True):
                bad += int((heads_of(rank.made.layers[layer], spec, block) != of_block).sum())
        return bad

    def _shares(self, whole: Any, kind: str) -> Iterator[tuple[ShardedRank, str, Attention, Any]]:
        for rank in self.ranks:
            for (layer, spec), values in zip(rank.made.plan.specs.items(), whole, strict=True):
                if layer[0] == kind and isinstance(spec, Attention):
                    yield rank, layer, spec, values[..., rank.first_head : rank.first_head + spec.num_kv_heads, :]

    def memory(self) -> list[Any]:
        """Every byte there is."""
        return [tensor.view(-1).view(torch.uint8) for rank in self.ranks for tensor in rank.made.tensors]

    def store(self, keys: Names, ids: list[int]) -> list[int]:
        """Stores by each rank; returns the bytes that each moved."""
        wanted = {group: (names, np.array(ids)) for group, names in keys.items()}
        results = [rank.client.wait(rank.client.store(rank.registration, wanted), 15) for rank in self.ranks]
        assert {one.outcome for one in results} == {Outcome.DONE}
        return [one.bytes for one in results]

    def load(self, keys: Names, ids: list[int]) -> None:
        wanted = {group: (names, np.array(ids)) for group, names in keys.items()}
        results = [rank.client.wait(rank.client.load(rank.registration, wanted), 15) for rank in self.ranks]
        assert {one.outcome for one in results} == {Outcome.DONE}

    def states(self, keys: Names) -> list[list[int]]:
        """Returns the states of each group's keys."""
        return [one.tolist() for one in self.ranks[0].client.lookup(keys).states]


def new_values(rng: np.random.Generator) -> Any:
    """Bits of all heads: (layers, blocks, kv, token, head, dim)."""
    shape = (5, KEYS, 2, SPEC.block_size, HEADS, SPEC.head_size)
    return torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, shape, dtype=np.int16))


def new_names(rng: np.random.Generator) -> Names:
    return {group: rng.integers(0, 256, (KEYS, 32), dtype=np.uint8) for group in (0, 1)}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("stored", [1, 2, 4])
def test_every_size_loads_what_another_stored(daemon: Daemon, name: str, stored: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    engines = {ranks: ShardedEngine(daemon, name, ranks) for ranks in (1, 2, 4)}
    keys, whole = new_names(rng), new_values(rng)
    for group, (kind, layers) in enumerate((("f", 3), ("s", 2))):
        ids = rng.permutation(BLOCKS)[:KEYS].tolist()
        engines[stored].compute(whole, ids, kind)
        moved = engines[stored].store({group: keys[group]}, ids)
        assert moved == [KEYS * layers * SPEC.payload_bytes // stored] * stored
        for engine in engines.values():
            assert engine.states({group: keys[group]}) == [[KeyState.HIT] * KEYS]
            before, target = wipe(engine.memory(), rng), rng.permutation(BLOCKS)[:KEYS].tolist()
            engine.load({group: keys[group]}, target)
            assert engine.wrong(whole, target, kind) == 0
            loaded = [one.clone() for one in engine.memory()]
            # The same blocks computed by the engine itself: no other byte may differ.
            for one, old in zip(engine.memory(), before, strict=True):
                one.copy_(old)
            engine.compute(whole, target, kind)
            assert all(torch.equal(*both) for both in zip(engine.memory(), loaded, strict=True))


def test_engines_must_agree_on_the_number_of_parts(daemon: Daemon) -> None:
    """Or one would take halves for quarters."""
    ShardedEngine(daemon, "heads first", 2)
    with pytest.raises(RemoteError, match=r"parts 4.* in this namespace, not .*parts 2"):
        ShardedEngine(daemon, "heads first", 2, parts=2)
