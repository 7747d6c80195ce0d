"""Engines of several tensor-parallel sizes and one daemon, without vLLM: what one stored, the others load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, KeyState, Outcome, Registration
from kvoffloadd.integrations.vllm.caches import announced, registered
from kvoffloadd.integrations.vllm.config import Platform, namespace_of
from kvoffloadd.integrations.vllm.parts import LayerFacts, share
from kvoffloadd.model import U8Array
from scripts.harness.daemon import Daemon
from tests.integrations.vllm.fakes import CacheRef, Caches, CacheSettings, CacheTensor, Config, GroupConfig, of_size
from tests.integrations.vllm.pages import ORDERS, Pages, torch

HEADS, BLOCKS, KEYS, PADDING = 4, 9, 3, 5
GROUPS = (GroupConfig(layer_names=("f0", "f1")), GroupConfig(layer_names=("s0", "s1"), group_id=1))
"""Full and sliding layers over the same rows, as vLLM has them."""
Wholes = list[U8Array]
"""Of each layer of a group u8 (keys, page of all heads)."""


@dataclass(eq=False)
class SizedRank:
    """Registered, with its tensors u8 (blocks, page)."""

    client: Client
    registration: Registration
    rows: list[U8Array]
    writes: bool


class SizedEngine:
    """Has `ranks` ranks, and a scheduler."""

    def __init__(self, daemon: Daemon, order: str, ranks: int, **options: Any) -> None:
        self._pages = Pages(order, HEADS, tokens=4, content=6)
        self._instance, self._daemon = os.urandom(16), daemon
        self._size = ranks
        config = self._config(0, options)
        self._scheduler = self._client(config)
        self._scheduler.register(announced(config))
        self.ranks = [self._rank(self._config(rank, options)) for rank in range(ranks)]

    def store(self, keys: U8Array, group: int, ids: list[int], wholes: Wholes, ranks: Sequence[int] = ()) -> None:
        """Stores keys as vLLM computes them, and as its worker stores them. `ranks`: these alone; none: all."""
        owns = self._owns()
        for at in ranks or range(len(owns)):
            rank, own = owns[at]
            for rows, whole in zip(rank.rows, wholes, strict=True):
                rows[ids, : len(own)] = whole[:, own]
            if rank.writes:
                self._done(rank, rank.client.store(rank.registration, {group: (keys, np.array(ids))}))

    def load(self, keys: U8Array, group: int, ids: list[int], wholes: Wholes) -> None:
        """Every byte of every rank is looked at."""
        for rank, own in self._owns():
            for rows in rank.rows:
                rows[:] = 0xEE
            expected = [rows.copy() for rows in rank.rows]
            for rows, whole in zip(expected, wholes, strict=True):
                rows[ids, : len(own)] = whole[:, own]
            self._done(rank, rank.client.load(rank.registration, {group: (keys, np.array(ids))}))
            for rows, wanted in zip(rank.rows, expected, strict=True):
                assert np.array_equal(rows, wanted)

    def new_blocks(self, rng: np.random.Generator) -> Wholes:
        """Pages of all heads."""
        page = self._pages.whole().size
        return [rng.integers(0, 256, (KEYS, page), dtype=np.uint8) for _ in GROUPS[0].layer_names]

    def hits(self, keys: U8Array, group: int) -> bool:
        """All of them."""
        states = self._scheduler.lookup({group: keys}).states[0]
        return bool((states == KeyState.HIT).all())

    def _owns(self) -> list[tuple[SizedRank, Any]]:
        return [(rank, self._pages.of_rank(at, self._size)) for at, rank in enumerate(self.ranks)]

    def _done(self, rank: SizedRank, job: Any) -> None:
        assert rank.client.wait(job, 15).outcome is Outcome.DONE

    def _config(self, rank: int, options: dict[str, Any]) -> Config:
        shards = min(self._size, HEADS)
        config = of_size(self._size, HEADS, rank=rank, worker_kv_bytes_per_block=(1 << 16) // shards, **options)
        return replace(config, groups=GROUPS, cache=CacheSettings(blocks_per_chunk=1))

    def _rank(self, config: Config) -> SizedRank:
        rank, ranks = config.parallel.rank, self._size
        mapping = self._pages.mapping(rank, ranks)
        page = mapping.local_page_size_bytes
        tensors = [torch.zeros(BLOCKS, page + PADDING, dtype=torch.int8) for _ in GROUPS[0].layer_names]
        refs = [[CacheRef(at, page, mapping) for at in range(len(tensors))] for _ in GROUPS]
        names = [name for group in GROUPS for name in group.layer_names]
        facts = LayerFacts.of({name: self._pages.tensor(ranks) for name in names})
        facts = replace(facts, spans={})  # of tensors without memory
        client = self._client(config)
        registration = client.register(registered(config, Caches([CacheTensor(one) for one in tensors], refs), facts))
        return SizedRank(client, registration, [one.numpy().view(np.uint8) for one in tensors], share(config).writes)

    def _client(self, config: Config) -> Client:
        spec = namespace_of(config, Platform("cpu", "0.32.0", "SD"), None)
        client = Client(self._daemon.socket, namespace=spec, instance=self._instance)
        client.connect()
        return self._daemon.welcome(client)


@pytest.mark.parametrize("order", ORDERS.values(), ids=list(ORDERS))
def test_every_size_loads_what_another_stored(daemon: Daemon, order: str, seed: int) -> None:
    """Pairs have a head's replica where there are 8 ranks."""
    rng = np.random.default_rng(seed)
    engines = [SizedEngine(daemon, order, ranks) for ranks in (1, 2, 8)]
    for storing in engines:
        for group in (0, 1):
            keys, wholes = rng.integers(0, 256, (KEYS, 32), dtype=np.uint8), storing.new_blocks(rng)
            assert not any(engine.hits(keys, group) for engine in engines)
            storing.store(keys, group, rng.permutation(BLOCKS)[:KEYS].tolist(), wholes)
            for engine in engines:
                assert engine.hits(keys, group)
                engine.load(keys, group, rng.permutation(BLOCKS)[:KEYS].tolist(), wholes)


@pytest.mark.parametrize(
    "other",
    [{"canonical_parts": 2}, {"canonical_layout": False}, {"agnostic": False}, {"kv_cache_layout": "LBNHC"}],
    ids=["other parts", "no option", "not by heads", "other order"],
)
def test_nothing_is_shared_with_others(daemon: Daemon, other: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, another = SizedEngine(daemon, "HNC", 1), SizedEngine(daemon, "HNC", 1, **other)
    keys, wholes = rng.integers(0, 256, (KEYS, 32), dtype=np.uint8), one.new_blocks(rng)
    one.store(keys, 0, [1, 2, 3], wholes)
    assert one.hits(keys, 0)
    assert not another.hits(keys, 0)
    another.store(keys, 0, [4, 5, 6], wholes)
    assert another.hits(keys, 0)
    another.load(keys, 0, [7, 8, 0], wholes)


def test_a_key_hits_when_all_parts_are_there(daemon: Daemon, seed: int) -> None:
    rng = np.random.default_rng(seed)
    one, two = SizedEngine(daemon, "NHC", 1), SizedEngine(daemon, "NHC", 2)
    keys, wholes = rng.integers(0, 256, (KEYS, 32), dtype=np.uint8), one.new_blocks(rng)
    two.store(keys, 0, [1, 2, 3], wholes, ranks=[1])
    assert not one.hits(keys, 0)
    two.store(keys, 0, [1, 2, 3], wholes, ranks=[0])
    one.load(keys, 0, [4, 5, 6], wholes)
