"""Tests SGLang's own host pools, without a model: what one rank stores of its pages, another one loads into its own.

A program, since SGLang's state belongs to a process: `python -m tests.sglang.pools SOCKET [KIND]...`. It ends with 0
if every byte of the second rank's memory is as it should be, as SGLang's own code reads its pools.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvoffloadd.errors import UsageError
from scripts.sglang import storage_options

PAGE = 64
SLOTS = 640
STORED = [7, 2, 3, 9, 0]
LOADED = [1, 8, 4, 0, 6]
"""Pages of the two ranks' pools, in the order of their keys."""

_COMMON = {"page_size": PAGE, "device": "cpu", "enable_memory_saver": False}
_HEADS = {"size": SLOTS, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 32, "layer_num": 3}
_LATENT = {"size": SLOTS, "dtype": torch.bfloat16, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "layer_num": 3}

Pools = dict[str, Any]


def configure(socket: str) -> None:
    """Configures SGLang as an engine's command line would. SGLang's plug-in for CPUs is installed."""
    importlib.import_module("sglang_on_cpu").install()
    server = importlib.import_module("sglang.srt.server_args")
    arguments = server.ServerArgs(
        model_path="none",
        device="cpu",
        page_size=PAGE,
        hicache_ratio=1.5,
        **storage_options(socket=socket, timeout_s=60.0),
    )
    server.set_global_server_args_for_scheduler(arguments)
    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    alone = SimpleNamespace(world_size=1)
    parallel.override_permanently(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_tp_rank=0, attn_tp_size=1, attn_tp_group=alone
    )


# --- pools, as SGLang's assembler makes them --------------------------------------------------------


def device_pool(name: str, **shape: Any) -> Any:
    return getattr(importlib.import_module("sglang.srt.mem_cache.memory_pool"), name)(**shape, **_COMMON)


def assembler() -> Any:
    return importlib.import_module("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler")


def of_keys_and_values(draft_layers: int = 0, **changed: Any) -> Any:
    pool, *drafts = (
        device_pool("MHATokenToKVPool", **_HEADS | changed | layers)
        for layers in ({}, *[{"layer_num": 1}] * draft_layers)
    )
    return assembler().build_kv_host_pool(kv_pool=pool, page_size=PAGE, mtp_draft_device_pools=tuple(drafts))


def of_states(ssm: str = "bfloat16", **shape: Any) -> Any:
    mamba = importlib.import_module("sglang.srt.configs.mamba_utils")
    memory = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    shape = {
        **{"tp_world_size": 1, "intermediate_size": 96, "n_groups": 1, "num_heads": 3, "head_dim": 32},
        **{"state_size": 16, "conv_kernel": 4},
        **shape,
    }
    dtype = mamba.Mamba2StateDType(conv=torch.bfloat16, temporal=getattr(torch, ssm))
    layers = [0, 2, 4]
    pool = memory.MambaPool(
        size=16,
        spec_state_size=0,
        cache_params=mamba.Mamba2CacheParams(shape=mamba.Mamba2StateShape.create(**shape), layers=layers, dtype=dtype),
        mamba_layer_ids=layers,
        device="cpu",
    )
    (info,) = pool.get_device_pool_infos()
    return assembler().build_mamba_host_pool(pool, info, host_size=0, layout="page_first_direct")


def dense() -> Pools:
    return {"kv": of_keys_and_values()}


def uneven() -> Pools:
    """Values are narrower than keys."""
    return {"kv": of_keys_and_values(v_head_dim=16)}


def latent() -> Pools:
    pool = device_pool("MLATokenToKVPool", **_LATENT)
    return {"kv": assembler().build_kv_host_pool(kv_pool=pool, page_size=PAGE)}


def sparse() -> Pools:
    """One of three layers has no index."""
    skipped = {"index_head_dim": 128, "kv_cache_dim": 80, "skip_topk_layers": [False, True, False]}
    pool = device_pool("DSATokenToKVPool", **_LATENT, **skipped)
    kv = assembler().build_kv_host_pool(kv_pool=pool, page_size=PAGE)
    _, indexer = pool.host_pool_decls()
    index = indexer.host_pool_builder.build(
        decl=indexer, anchor_host=kv, allocator_type="shm", packed_draft_device_pools=()
    )
    return {"kv": kv, "indexer": index}


def windows() -> Pools:
    return {"kv": of_keys_and_values(), "swa": of_keys_and_values(layer_num=5, size=SLOTS + PAGE)}


def states() -> Pools:
    return {"kv": of_keys_and_values(), "mamba": of_states()}


def latent_and_states() -> Pools:
    """Makes the pools that Kimi Linear has."""
    return {**latent(), "mamba": of_states(ssm="float32")}


def convolutions() -> Pools:
    """States of convolutions alone, as LFM2 has them."""
    return {"kv": of_keys_and_values(), "mamba": of_states(state_size=0)}


KINDS: dict[str, Callable[[], Pools]] = {
    kind.__name__: kind for kind in (dense, uneven, latent, sparse, windows, states, latent_and_states, convolutions)
}

RESTORABLE = {"windows": [5], "states": [4, 5], "latent_and_states": [4, 5], "convolutions": [4, 5]}
"""Lengths that can be restored where of side pools the last two pages are stored: windows are two pages, states one."""


# --- a rank, as SGLang's controller starts one ------------------------------------------------------


class PoolsRank:
    """Its pools hold noise."""

    def __init__(self, pools: Pools, seed: int, *, is_mla: bool = False, **config: Any) -> None:
        interface = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        factory = importlib.import_module("sglang.srt.mem_cache.storage").StorageBackendFactory
        self.pools = pools
        alone = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        given = {
            "is_mla_model": is_mla,
            "enable_storage_metrics": True,
            "is_page_first_layout": False,
            "model_name": "none",
            "extra_config": extra_config(),
        }
        made = interface.HiCacheStorageConfig(**alone | given | config)
        self.storage = factory.create_backend("dynamic", made, pools["kv"])
        self.storage.register_mem_pool_host(pools["kv"])
        for name, pool in pools.items():
            self.storage.register_mem_host_pool_v2(pool, interface.PoolName(name))
        self.storage.on_host_pools_registered()
        fill(pools, seed)

    def needed(self, name: str) -> Any:
        """SGLang's question for what a prompt needs of a side pool."""
        trailing = {"mamba": 1, "swa": 2}
        return self.transfer(name, ["?"] * trailing.get(name, 8), [])

    def transfer(self, name: str, keys: list[str], pages: list[int]) -> Any:
        """Makes a transfer that names pages of a side pool as SGLang does."""
        interface = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        policy = interface.PoolHitPolicy.ALL_PAGES if name == "indexer" else interface.PoolHitPolicy.TRAILING_PAGES
        pool = interface.PoolName(name)
        return interface.PoolTransfer(pool, slots(self.pools[name], pages), keys=keys, hit_policy=policy)


def extra_config() -> dict[str, Any]:
    memory = importlib.import_module("sglang.srt.runtime_context").get_memory()
    given: dict[str, Any] = json.loads(memory.hicache_storage_backend_extra_config)
    return given


def slots(pool: Any, pages: list[int]) -> torch.Tensor:
    size = pool.page_size
    each: torch.Tensor = torch.tensor(pages, dtype=torch.int64)[:, None] * size + torch.arange(size)
    return each.reshape(-1)


def fill(pools: Pools, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for memory in mapped(pools):
        memory[:] = rng.integers(0, 256, memory.size, np.uint8)


def mapped(pools: Pools) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """All bytes of the pools' memfds."""
    for pool in pools.values():
        for memory in pool.allocator.mms:
            yield np.frombuffer(memory, np.uint8)


def copy_page(source: Any, page: int, target: Any, to: int) -> None:
    """Copies a page by SGLang's account of where it lies. It can't flatten pages whose keys and
    values differ in size.
    """
    if isinstance(getattr(source, "kv_buffer", None), tuple):
        target.k_buffer[to], target.v_buffer[to] = source.k_buffer[page], source.v_buffer[page]
    else:
        target.set_from_flat_data_page(
            to * target.page_size, source.get_data_page(page * source.page_size, flat=True).clone()
        )


# --- what is checked --------------------------------------------------------------------------------


def names(count: int) -> list[str]:
    return [np.random.default_rng(page).bytes(32).hex() for page in range(count)]


def check(kind: str) -> None:
    make = KINDS[kind]
    is_mla = kind in ("latent", "sparse")
    storing, loading = PoolsRank(make(), 1, is_mla=is_mla), PoolsRank(make(), 2, is_mla=is_mla)
    expected = make()
    fill(expected, 2)
    keys, more = names(len(STORED)), names(8)[len(STORED) :]
    side = [name for name in storing.pools if name != "kv"]
    # Of states and windows the last pages alone are stored.
    kept = {name: slice(0, None) if name == "indexer" else slice(3, None) for name in side}
    asked = [storing.transfer(name, keys[kept[name]], STORED[kept[name]]) for name in side]

    assert storing.storage.batch_exists(keys) == 0
    assert storing.storage.batch_set_v2(asked) == {name: [True] * len(keys[kept[name]]) for name in side}
    assert storing.storage.batch_set_v1(keys, slots(storing.pools["kv"], STORED)) == [True] * len(keys)

    assert loading.storage.batch_exists(keys + more) == len(keys)
    found = loading.storage.batch_exists_v2(keys + more, [loading.needed(name) for name in side])
    assert found.kv_hit_pages == len(keys), found
    assert found.restorable_prefix_pages == RESTORABLE.get(kind, [1, 2, 3, 4, 5]), found

    pages = slots(loading.pools["kv"], [*LOADED, 2, 3, 5])
    assert loading.storage.batch_get_v1(keys + more, pages) == [True] * len(keys) + [False] * len(more)
    to_load = [loading.transfer(name, keys[kept[name]], LOADED[kept[name]]) for name in side]
    assert loading.storage.batch_get_v2(to_load) == {name: [True] * len(keys[kept[name]]) for name in side}

    for name, pool in storing.pools.items():
        kept_pages = kept.get(name, slice(0, None))
        for page, to in zip(STORED[kept_pages], LOADED[kept_pages], strict=True):
            copy_page(pool, page, expected[name], to)
    for found_bytes, right in zip(mapped(loading.pools), mapped(expected), strict=True):
        assert (found_bytes == right).all(), f"{(found_bytes != right).sum()} bytes of {right.size} are wrong"
    storing.storage.close()
    loading.storage.close()


def check_formats() -> None:
    """States of two types of one size are not each other's."""
    keys = names(len(STORED) + 1)[-1:]
    one = PoolsRank({"kv": of_keys_and_values(), "mamba": of_states("bfloat16")}, 1)
    other = PoolsRank({"kv": of_keys_and_values(), "mamba": of_states("float16")}, 2)
    assert one.storage.batch_set_v1(keys, slots(one.pools["kv"], [3])) == [True]
    assert one.storage.batch_exists(keys) == 1
    assert other.storage.batch_exists(keys) == 0
    one.storage.close()
    other.storage.close()


def check_refusals() -> None:
    """What is not supported is refused before anything is shared, with the flag to change."""
    context = importlib.import_module("sglang.srt.runtime_context")
    logical = importlib.import_module("sglang.srt.mem_cache.memory_pool_host").LogicalHostPool
    layout = "page_first_direct"
    refused("--pp-size 2", dense(), pp_size=2)
    refused("--attn-cp-size 2", dense(), attn_cp_size=2)
    refused("--dcp-size 2", latent(), is_mla=True, tp_size=2, dcp_size=2, logical_page_size=2 * PAGE)
    with context.get_parallel().override(nnodes=2):
        refused("--nnodes 2", dense())
    refused("--speculative-algorithm", {"kv": of_keys_and_values(draft_layers=1)})
    refused("--speculative-algorithm", {**dense(), "draft": of_keys_and_values()})
    refused("is not supported", {"kv": logical(SLOTS, PAGE, layout)})  # DeepSeek V4's
    refused("is not supported", {**dense(), "deepseek_v4_c4": of_keys_and_values()})
    for other in ("layer_first", "page_first", "page_head"):
        with context.get_memory().override(hicache_mem_layout=other):
            refused("--hicache-mem-layout page_first_direct", dense())
    with context.get_memory().override(hicache_storage_backend="file"):
        refused('"allocator": "shm"', dense())
    refused('"interface_v1": 1', dense(), extra_config=extra_config() | {"interface_v1": 0})


def refused(words: str, pools: Pools, **config: Any) -> None:
    try:
        PoolsRank(pools, 1, **config)
    except UsageError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"it was not refused: {words}")


if __name__ == "__main__":
    configure(sys.argv[1])
    for kind in sys.argv[2:] or KINDS:
        check(kind)
        print(kind, flush=True)
    check_formats()
    check_refusals()
