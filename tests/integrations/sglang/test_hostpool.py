"""SGLang's host pools become canonical tensors; some are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Ref, SharedTensor, digest_layers
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.sglang.hostpool import host_pools
from kvoffloadd.integrations.sglang.pools import PagePool, TpRank
from tests.integrations.sglang.fakes import (
    DSAIndexerPoolHost,
    HostPool,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
)

ALONE = TpRank(0, 1)


def test_keys_and_values_of_a_page_are_one_key() -> None:
    pool = MHATokenToKVPoolHost(6, 64, [4096, 4096])
    found = host_pools({"kv": pool}, TpRank(1, 2), replicated=False)
    (group,) = found.caches.groups
    layers = digest_layers(["kv.k.0", "kv.k.1", "kv.v.0", "kv.v.1"])
    assert list(group.refs) == [Ref(at, 0, 4096, dtype="bfloat16", layers=layers) for at in (0, 1)]
    assert (group.tokens_per_key, group.parts, group.part) == (64, 2, 1)
    pool.rows[1][3] = 7
    tensors = [tensor for tensor in found.caches.tensors if isinstance(tensor, SharedTensor)]
    assert (tensors[1].array[3] == 7).all()
    assert [tensor.num_blocks for tensor in tensors] == [6, 6]
    assert len(found.caches.allocations()) == 1


def test_each_pool_is_a_group_of_a_number_of_its_own() -> None:
    pools: dict[str, HostPool] = {
        "indexer": DSAIndexerPoolHost(6, 64, [640]),
        "mamba": MambaPoolHost(5, 1, [300, 200], together=False),
        "kv": MLATokenToKVPoolHost(6, 64, [6400]),
    }
    found = host_pools(pools, TpRank(1, 2), replicated=True)
    groups = {group.group: group for group in found.caches.groups}
    assert {name: pool.group for name, pool in found.pools.items()} == {"kv": 0, "mamba": 2, "indexer": 3}
    assert {number: (group.parts, group.part) for number, group in groups.items()} == {0: (1, 0), 2: (2, 1), 3: (1, 0)}
    assert {group.tokens_per_key for group in groups.values()} == {64}
    assert groups[2].payload_bytes == 500
    assert [shape[0] for shape in found.shapes] == ["kv", "mamba", "indexer"]
    described = {number: {(ref.dtype, ref.layers) for ref in group.refs} for number, group in groups.items()}
    assert described == {
        0: {("bfloat16", digest_layers(["kv.0", "kv.1"]))},
        2: {("", digest_layers(["mamba.0", "mamba.1"]))},
        3: {("", digest_layers(["indexer.0"]))},
    }


def test_blocks_of_slots() -> None:
    pool = PagePool(0, 4, 10)
    slots = np.array([8, 9, 10, 11, 0, 1, 2, 3])
    found = pool.blocks(slots, 2)
    assert found is not None
    assert found.tolist() == [2, 0]
    assert pool.blocks(slots, 3) is None
    assert pool.blocks(slots[1:5], 1) is None
    assert pool.blocks(slots + 40, 2) is None
    assert pool.blocks(slots[[0, 1, 3, 2, 4, 5, 6, 7]], 2) is None
    assert pool.blocks(np.empty(0, np.int64), 1) is None


@pytest.mark.parametrize(
    ("name", "kind", "what"),
    [
        ("kv", MHATokenToKVPoolHost, "dtype"),
        ("kv", MHATokenToKVPoolHost, "head_dim"),
        ("kv", MLATokenToKVPoolHost, "kv_lora_rank"),
        ("mamba", MambaPoolHost, "temporal_dtype"),
        ("mamba", MambaPoolHost, "conv_state_shapes"),
        ("indexer", DSAIndexerPoolHost, "indexer_dtype"),
        ("indexer", DSAIndexerPoolHost, "kv_lora_rank"),
    ],
)
def test_formats_of_one_size_differ(name: str, kind: type[HostPool], what: str) -> None:
    shapes = []
    for value in (8, 16):
        pools = {"kv": MHATokenToKVPoolHost(6, 64, [4096, 4096])} | {name: kind(6, 64, [4096, 4096])}
        setattr(pools[name], what, value)
        shapes.append(host_pools(pools, ALONE, replicated=False).shapes)
    assert shapes[0] != shapes[1]


def test_orders_of_heads_and_tokens_differ() -> None:
    pools = [MHATokenToKVPoolHost(6, 64, [4096, 4096]) for _ in range(3)]
    for pool, order in zip(pools, ("nhd", "hnd"), strict=False):
        layout = SimpleNamespace(value=order)
        pool._buffer_infos = [SimpleNamespace(buffers=SimpleNamespace(layout=layout))]  # type: ignore[attr-defined]
    usual, other, untold = (host_pools({"kv": pool}, ALONE, replicated=False).shapes for pool in pools)
    assert usual == untold
    assert usual != other


def refused(**changes: Any) -> str:
    """Returns the error for a pool that is otherwise good."""
    pool = MHATokenToKVPoolHost(6, 64, [4096, 4096])
    for name, value in changes.items():
        setattr(pool, name, value)
    with pytest.raises(UsageError) as error:
        host_pools({"kv": pool}, TpRank(0, 1), replicated=False)
    return str(error.value)


def test_what_is_refused_is_told_with_its_flag() -> None:
    assert "--hicache-mem-layout page_first_direct" in refused(layout="layer_first")
    assert '"allocator": "shm"' in refused(allocator=object())
    assert "where all bytes of a page lie" in refused(size_per_token=129)
    outside = MHATokenToKVPoolHost(6, 64, [4096, 4096])
    assert "lie outside" in refused(get_page_buffer_meta=outside.get_page_buffer_meta)

    def uneven(indices: Any) -> Any:
        addresses, sizes = outside.get_page_buffer_meta(indices)
        return [address + 8 * int(indices[0] > 64) for address in addresses], sizes

    assert "equal distances" in refused(get_page_buffer_meta=uneven)

    def unable(_: Any) -> Any:
        raise NotImplementedError("slot states")

    assert "slot states" in refused(get_page_buffer_meta=unable)
    drafts = "without --speculative-algorithm"
    assert drafts in refused(target_layer_num=1)
    assert drafts in refused(mtp_draft_buffer_infos=("layer",))
    assert "lie outside" in refused(target_layer_num=2, get_page_buffer_meta=outside.get_page_buffer_meta)
    for name, kind in (("draft", MHATokenToKVPoolHost), ("kv", MambaPoolHost), ("deepseek_v4_c4", HostPool)):
        pools = {"kv": MHATokenToKVPoolHost(6, 64, [64, 64]), name: kind(6, 64, [64, 64])}
        with pytest.raises(UsageError, match="speculative" if name == "draft" else "not supported"):
            host_pools(pools, TpRank(0, 1), replicated=False)
    with pytest.raises(UsageError, match="no pool"):
        host_pools({}, TpRank(0, 1), replicated=False)
