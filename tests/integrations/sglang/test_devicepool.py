"""SGLang's device pools become canonical tensors, like the storage's host pools; some are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.cache.memory.composition import UNKNOWN, Composition
from kvoffloadd.client import SharedTensor, digest_layers
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.sglang.devicepool import ModelPools, device_pools, found_pools
from kvoffloadd.integrations.sglang.hostpool import host_pools
from kvoffloadd.integrations.sglang.pools import Pools, TpRank
from tests.integrations.sglang import fakes
from tests.integrations.sglang.fakedevice import (
    DSATokenToKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    SWAKVPool,
    components,
    entry,
    params,
    torch,
)

PAGE, PAGES = 4, 6
ALONE = TpRank(0, 1)


def nothing() -> Any:
    raise ValueError("SGLang has no builder")


def found_of(kvcache: Any, *names: str, assembled: Any = nothing, **more: Any) -> ModelPools:
    return found_pools(kvcache, params(kvcache, PAGE, **more), components("FULL", *names), assembled)


def pools_of(kvcache: Any, *names: str, rank: TpRank = ALONE, assembled: Any = nothing) -> Pools:
    return device_pools(found_of(kvcache, *names, assembled=assembled), rank)


def test_a_page_is_a_row_of_each_layer() -> None:
    pool = MHATokenToKVPool(PAGES, PAGE)
    found = pools_of(pool, rank=TpRank(1, 2))
    (group,) = found.caches.groups
    assert (group.group, group.tokens_per_key, group.parts, group.part) == (0, PAGE, 2, 1)
    tensors = [tensor for tensor in found.caches.tensors if isinstance(tensor, SharedTensor)]
    assert [(tensor.num_blocks, tensor.page_bytes) for tensor in tensors] == [(PAGES, PAGE * 2 * 8 * 2)] * 4
    assert [ref.tensor for ref in group.refs] == [0, 1, 2, 3]
    pool.v_buffer[1][3 * PAGE : 4 * PAGE] = 1.0
    assert tensors[3].array[3].any(), "SGLang's own tensors are what is shared"
    assert not tensors[3].array[2].any()
    assert not tensors[2].array.any()
    assert found.pools["kv"].pages == PAGES


def test_windows_are_a_group_of_their_own() -> None:
    found = found_of(SWAKVPool(PAGES, PAGE), "SWA")
    assert found.layers == 4
    pools = device_pools(found, ALONE)
    assert {group.group: len(group.refs) for group in pools.caches.groups} == {0: 2, 1: 6}
    assert {name: pool.group for name, pool in pools.pools.items()} == {"kv": 0, "swa": 1}


def test_latents_are_the_same_on_all_ranks() -> None:
    (group,) = pools_of(MLATokenToKVPool(PAGES, PAGE), rank=TpRank(1, 2)).caches.groups
    assert (group.parts, group.part, group.payload_bytes) == (1, 0, 2 * PAGE * 16 * 2)


def test_what_sglang_assembles_itself() -> None:
    latents, states = MLATokenToKVPool(PAGES, PAGE), MambaPool(9)
    rows = [state[layer] for state in states.states for layer in range(3)]
    group = SimpleNamespace(
        num_layers=5, entries=[entry("mamba", states, rows, 1, 1), entry("kv", latents, latents.kv_buffer, PAGE, PAGE)]
    )
    found = found_of(SimpleNamespace(), "MAMBA", assembled=lambda: group)
    assert found.layers == 5
    pools = device_pools(found, TpRank(1, 2))
    groups = {group.group: group for group in pools.caches.groups}
    assert {number: (one.parts, one.part) for number, one in groups.items()} == {0: (1, 0), 2: (2, 1)}
    assert groups[2].payload_bytes == 3 * (5 + 4) * 4
    states_named = digest_layers([f"mamba.{at}" for at in range(6)])
    assert {(ref.dtype, ref.layers) for ref in groups[2].refs} == {("float32", states_named)}
    assert (pools.pools["mamba"].tokens, pools.pools["mamba"].pages) == (1, 9)
    sparse = DSATokenToKVPool(PAGES, PAGE)
    indexes = entry("indexer", sparse, sparse.index_k_with_scale_buffer, PAGE, 1, source="kv")
    group = SimpleNamespace(num_layers=2, entries=[entry("kv", sparse, sparse.kv_buffer, PAGE, PAGE), indexes])
    pools = pools_of(sparse, assembled=lambda: group)
    assert {one.group: one.payload_bytes for one in pools.caches.groups} == {0: 2 * PAGE * 16 * 2, 3: 2 * PAGE * 4}
    assert pools.pools["indexer"].pages == PAGES


def host_pools_of(kind: type[fakes.HostPool], device: Any, runs: list[int]) -> Pools:
    """The host pool that SGLang makes for a device pool."""
    pool: Any = kind(3, PAGE, runs)
    for name in ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim"):
        setattr(pool, name, getattr(device, name, None))
    pool.dtype = torch.bfloat16
    return host_pools({"kv": pool}, ALONE, replicated=False)


def compositions(pools: Pools) -> list[Composition]:
    """Returns the compositions as the daemon compares them."""
    return [Composition.of(group.refs) for group in pools.caches.groups]


def test_both_seats_say_the_same_of_the_same_bytes() -> None:
    same = MHATokenToKVPool(PAGES, PAGE), MHATokenToKVPool(PAGES, PAGE, 2, 2, (8, 16)), MHATokenToKVPool(PAGES, PAGE, 4)
    for pool in same:
        runs = [PAGE * pool.layer_num * 2 * dim * 2 for dim in (pool.head_dim, pool.v_head_dim)]
        host, device = host_pools_of(fakes.MHATokenToKVPoolHost, pool, runs), pools_of(pool)
        assert host.shapes == device.shapes
        assert compositions(host) == compositions(device) != [UNKNOWN]
    latents = MLATokenToKVPool(PAGES, PAGE)
    host, device = host_pools_of(fakes.MLATokenToKVPoolHost, latents, [PAGE * 2 * 16 * 2]), pools_of(latents)
    assert host.shapes == device.shapes
    assert compositions(host) == compositions(device) != [UNKNOWN]


def test_pools_whose_bytes_differ_have_other_shapes() -> None:
    half = MHATokenToKVPool(PAGES, PAGE)
    half.k_buffer, half.v_buffer = (
        [one.to(torch.float16) for one in layers] for layers in (half.k_buffer, half.v_buffer)
    )
    made = [
        MHATokenToKVPool(PAGES, PAGE),
        MHATokenToKVPool(PAGES, PAGE, layers=1),
        MHATokenToKVPool(PAGES, PAGE, layers=4, heads=1),
        MHATokenToKVPool(PAGES, PAGE, heads=4, dims=(4, 4)),
        MHATokenToKVPool(PAGES, PAGE, dims=(4, 12)),
        MLATokenToKVPool(PAGES, PAGE, layers=4),
        half,
    ]
    assert len({pools_of(pool).shapes for pool in made}) == len(made)


def test_what_is_refused_is_told_with_its_flag() -> None:
    scaled, head_first, vectors = (MHATokenToKVPool(PAGES, PAGE) for _ in range(3))
    scaled.k_scale_buffer = [torch.zeros(1)]
    head_first.kv_cache_layout = "hnd"
    vectors.k_buffer = [buffer.unflatten(2, (2, 4)) for buffer in vectors.k_buffer]
    other_page = MHATokenToKVPool(PAGES, 2 * PAGE)
    for pool, words in (
        (scaled, "--kv-cache-dtype"),
        (head_first, "SGLANG_USE_HND_KVCACHE"),
        (vectors, "SGLANG_AITER_KV_CACHE_LAYOUT"),
        (other_page, "SGLang's tree 4"),
        (MHATokenToKVPool(PAGES, PAGE, layers=0), "no layers"),
        (SimpleNamespace(), "--enable-unified-memory"),
    ):
        with pytest.raises(UsageError, match=words):
            found_of(pool)
    with pytest.raises(UsageError, match="--speculative-algorithm"):
        found_of(MHATokenToKVPool(PAGES, PAGE), sidecar_draft_device_pools=(object(),))
    unknown = SimpleNamespace(num_layers=1, entries=[entry("deepseek_v4_c4", object(), [torch.zeros(2, 2)], PAGE, 1)])
    with pytest.raises(UsageError, match="does not know device pools 'deepseek_v4_c4'"):
        found_of(SimpleNamespace(), assembled=lambda: unknown)
    states = MambaPool(2)
    alone = SimpleNamespace(num_layers=1, entries=[entry("mamba", states, states.states[0], 1, 1)])
    with pytest.raises(UsageError, match="no pool for keys and values"):
        found_of(SimpleNamespace(), assembled=lambda: alone)
