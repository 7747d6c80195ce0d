"""Stands in for as much of SGLang as the adapter imports, in tests that have none."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.integrations.sglang.arguments import COUNTED, NAMES_HARMLESS

ADAPTER = "kvoffloadd.integrations.sglang"
_OURS = ("adapters", "engine", "files", "identity", "linker", "plugin", "start", "storage", "transfers", "weights")
"""Modules of the adapter that import SGLang's, or hold what one process knows."""


class PoolName(StrEnum):
    KV = "kv"
    SWA = "swa"
    MAMBA = "mamba"
    INDEXER = "indexer"


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: str
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    device_indices: Any = None


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class WeightUpdater:
    """`meanwhile`: what happens while it reads a model's files; whether it loads them."""

    meanwhile: Callable[[], bool] = staticmethod(lambda: True)

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None,
        weight_name_filter: Any = None,
        recapture_cuda_graph: bool = False,
    ) -> tuple[bool, str]:
        return self.meanwhile(), f"{model_path} {load_format} {recapture_cuda_graph}"

    def update_weights_from_tensor(self) -> str:
        return "updated"

    update_weights_from_ipc = receive_weights_from_distributed = update_weights_from_tensor
    load_weights_from_distributed = begin_weight_update = end_weight_update = update_weights_from_tensor


class Scheduler:
    """Loads whatever it loads when it is made."""


class Req:
    """A request. `lora_id` goes behind its extra key. `last_node`: the end of its prefix in the tree."""

    def __init__(self, rid: str, extra_key: str | None = None, lora_id: str | None = None) -> None:
        self.rid, self.lora_id = rid, lora_id
        self.extra_key = extra_key if lora_id is None else (extra_key or "") + lora_id
        self.last_node: Node | None = None
        self.storage_hit_length = self.host_hit_length = 0
        self.storage_hit_start: int | None = None
        self.host_hit_is_storage = self.retracted_stain = False
        self.kv_hints: Any = None
        self.origin_input_ids: list[int] = []
        self.is_finished = True

    def finished(self) -> bool:
        return self.is_finished

    def materialized_host_hit_len(self) -> int:
        return self.host_hit_length


def split_cached_prefix_by_tier(
    *,
    prefix_len: int,
    host_hit_len: int,
    storage_hit_len: int,
    storage_hit_start: int | None,
    host_hit_is_storage: bool,
) -> tuple[int, int, int]:
    """Tokens of a prefix by where they were: the device, the host, the storage."""
    assert storage_hit_start is None
    storage = host_hit_len if host_hit_is_storage else min(host_hit_len, storage_hit_len)
    return prefix_len - host_hit_len, host_hit_len - storage, storage


@dataclass(frozen=True)
class Node:
    """Represents a node of SGLang's tree: the names of its pages, and what stands before them."""

    keys: list[str]
    parent: Node | None = None

    @property
    def pages(self) -> int:
        """Counts the pages from the root on."""
        return len(self.keys) + (0 if self.parent is None else self.parent.pages)


class TreeCore:
    def get_hash_values(self, node: Node) -> list[str]:
        return node.keys

    def get_prefix_hash_values(self, node: Node) -> list[str]:
        parent = node.parent
        return [] if parent is None else [*self.get_prefix_hash_values(parent), *parent.keys]


class PrefillAdder:
    """Admits requests. `accounted`: those that it has counted, and how much of them was cached."""

    def __init__(self, tree_cache: Any) -> None:
        self.tree_cache = tree_cache
        self.accounted: list[tuple[str, int]] = []

    def _account_prefill_cache_admission(self, req: Req, prefix_len: int) -> None:
        self.accounted.append((req.rid, prefix_len))


class LoRAManager:
    """`meanwhile`: what happens while it reads an adapter's files."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def _load_lora_adapter(self, lora_ref: Any) -> str:
        self.meanwhile()
        return f"loaded {lora_ref.lora_id}"

    def _load_lora_adapter_from_tensors(self, lora_ref: Any, tensors: Any, config_dict: Any, added: Any = None) -> str:
        return f"received {lora_ref.lora_id}"


class HiCacheController:
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def reset(self) -> None:
        """SGLang's HiCache forgets its pages."""
        self.meanwhile()


class UnifiedRadixCache:
    page_size = 64

    def __init__(self) -> None:
        self.tree_core = TreeCore()
        self.released: list[tuple[str, bool]] = []

    def reset(self) -> None:
        """SGLang forgets its pages."""

    def on_release(self, req: Req, *, checkpointed: bool) -> None:
        """SGLang gives a request's place back."""
        self.released.append((req.rid, checkpointed))


class LayerWiseLoadCounter:
    """Which layers of a batch's loads have come."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.producer_index = -1
        self.futures: dict[int, list[Future[None]]] = {}

    def update_producer(self) -> int:
        self.producer_index += 1
        self.futures[self.producer_index] = [Future() for _ in range(self.num_layers)]
        return self.producer_index

    def complete(self, index: int, layer: int) -> None:
        self.futures[index][layer].set_result(None)

    def fail(self, index: int, error: BaseException) -> None:
        for future in self.futures[index]:
            future.set_exception(error)

    def finish(self, index: int) -> bool:
        return all(future.exception(20.0) is None for future in self.futures.pop(index, ()))

    def reset(self) -> None:
        self.futures.clear()


class UnifiedCacheLinker:
    def record_offload_ready(self) -> list[Any]:
        """When what the forward writes is there: events that SGLang has recorded."""
        return []


class HookType(StrEnum):
    BEFORE = "before"
    AFTER = "after"


class HookRegistry:
    """What plug-ins have asked for."""

    hooks: list[tuple[str, Any, HookType]]

    @classmethod
    def register(cls, target: str, hook: Any, kind: HookType) -> None:
        cls.hooks.append((target, hook, kind))


def no_group(**_: Any) -> Any:
    raise ValueError("SGLang has no builder")


@contextmanager
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """SGLang can be imported. Yields `arguments`, `parallel`, `features`, `memory` and `amx`, to change, and classes to
    call.
    """
    arguments: dict[str, Any] = dict.fromkeys((*COUNTED, *NAMES_HARMLESS))
    arguments |= {"model_path": "org/model", "device": "cpu", "tp_size": 1, "pp_size": 1}
    amx: list[bool] = []
    group = SimpleNamespace(world_size=1)
    parallel = SimpleNamespace(nnodes=1, attn_tp_group=group, attn_tp_rank=0, attn_tp_size=1, attn_dcp_size=1)
    features = SimpleNamespace(enable_memory_saver=False)
    memory = SimpleNamespace(enable_unified_memory=False)
    updater = type("WeightUpdater", (WeightUpdater,), {})
    tree = type("UnifiedRadixCache", (UnifiedRadixCache,), {})
    controller = type("HiCacheController", (HiCacheController,), {})
    manager = type("LoRAManager", (LoRAManager,), {})
    request = type("Req", (Req,), {"__init__": Req.__init__})
    account = PrefillAdder._account_prefill_cache_admission
    adder = type("PrefillAdder", (PrefillAdder,), {"_account_prefill_cache_admission": account})
    registry = type("HookRegistry", (HookRegistry,), {"hooks": []})
    modules: dict[str, dict[str, Any]] = {
        "srt.mem_cache.hicache_storage": {
            "HiCacheStorage": object,
            "HiCacheStorageConfig": object,
            "HiCacheStorageExtraInfo": object,
            "PoolHitPolicy": PoolHitPolicy,
            "PoolName": PoolName,
            "PoolTransfer": PoolTransfer,
            "PoolTransferResult": PoolTransferResult,
        },
        "srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
        "srt.managers.cache_controller": {"HiCacheController": controller},
        "srt.mem_cache.unified_radix_cache": {"UnifiedRadixCache": tree},
        "srt.mem_cache.hybrid_cache.linker_pool_assembler": {"resolve_hybrid_device_pool_group": no_group},
        "srt.mem_cache.unified_cache.unified_cache_linker": {
            "LayerWiseLoadCounter": LayerWiseLoadCounter,
            "UnifiedCacheLinker": UnifiedCacheLinker,
        },
        "srt.model_executor.model_runner_components.weight_updater": {"WeightUpdater": updater},
        "srt.managers.scheduler": {"Scheduler": type("Scheduler", (Scheduler,), {})},
        "srt.managers.schedule_batch": {"Req": request, "split_cached_prefix_by_tier": split_cached_prefix_by_tier},
        "srt.managers.schedule_policy": {"PrefillAdder": adder},
        "srt.lora.lora_manager": {"LoRAManager": manager},
        "srt.utils": {"cpu_has_amx_support": lambda: bool(amx)},
        "srt.arg_groups.overrides": {
            "declare_resolution": lambda arguments, source, **fields: arguments.declared.append((source, fields)),
            "resolving_view": lambda arguments: arguments,
        },
        "srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
        "srt.runtime_context": {
            "get_context": lambda: SimpleNamespace(resolved_server_args_dict=lambda: dict(arguments)),
            "get_device": lambda: SimpleNamespace(device=arguments["device"]),
            "get_exec": lambda: SimpleNamespace(features=features),
            "get_memory": lambda: memory,
            "get_parallel": lambda: parallel,
        },
    }
    for name, content in modules.items():
        for end in range(len(f"sglang.{name}".split("."))):
            package = ".".join(f"sglang.{name}".split(".")[: end + 1])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        for attribute, value in content.items():
            monkeypatch.setattr(sys.modules[f"sglang.{name}"], attribute, value, raising=False)
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.23")
    for module in _OURS:
        monkeypatch.delitem(sys.modules, f"{ADAPTER}.{module}", raising=False)
        monkeypatch.delattr(importlib.import_module(ADAPTER), module, raising=False)
    yield SimpleNamespace(
        arguments=arguments,
        amx=amx,
        manager=manager,
        request=request,
        adder=adder,
        parallel=parallel,
        features=features,
        memory=memory,
        updater=updater,
        tree=tree,
        controller=controller,
        registry=registry,
    )
    for module in _OURS:
        sys.modules.pop(f"{ADAPTER}.{module}", None)
