"""As much of SGLang as the adapter imports, for tests that have none."""

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

from kvoffloadd.integrations.sglang.namespace import DRAFT, KERNELS, MODEL

ADAPTER = "kvoffloadd.integrations.sglang"
_OURS = ("engine", "linker", "plugin", "start", "storage", "transfers", "weights")
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
    def update_weights_from_disk(self) -> str:
        return "updated"

    update_weights_from_tensor = update_weights_from_ipc = update_weights_from_disk
    receive_weights_from_distributed = load_weights_from_distributed = update_weights_from_disk
    begin_weight_update = end_weight_update = update_weights_from_disk


class HiCacheController:
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def reset(self) -> None:
        """SGLang's HiCache forgets its pages."""
        self.meanwhile()


class UnifiedRadixCache:
    def reset(self) -> None:
        """SGLang forgets its pages."""


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
    """SGLang can be imported. Yields `parallel`, `features` and `memory`, to change, and classes to call."""
    arguments: dict[str, Any] = dict.fromkeys((*MODEL, *KERNELS, *DRAFT))
    arguments |= {"model_path": "org/model", "revision": None, "device": "cpu"}
    bag = SimpleNamespace(**arguments)
    group = SimpleNamespace(world_size=1)
    parallel = SimpleNamespace(nnodes=1, attn_tp_group=group, attn_tp_rank=0, attn_tp_size=1, attn_dcp_size=1)
    features = SimpleNamespace(enable_memory_saver=False)
    memory = SimpleNamespace(enable_unified_memory=False)
    updater = type("WeightUpdater", (WeightUpdater,), {})
    tree = type("UnifiedRadixCache", (UnifiedRadixCache,), {})
    controller = type("HiCacheController", (HiCacheController,), {})
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
        "srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
        "srt.runtime_context": {
            "get_device": lambda: bag,
            "get_exec": lambda: SimpleNamespace(kernel=bag, features=features),
            "get_memory": lambda: memory,
            "get_model": lambda: bag,
            "get_parallel": lambda: parallel,
            "get_spec": lambda: bag,
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
