"""The plug of vLLM's OffloadingConnector: `spec_name` KVOffloaddSpec, `spec_module_path` of this package."""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any, Literal

from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec, OffloadingWorker

from kvoffloadd.client import Client
from kvoffloadd.integrations.vllm import versions
from kvoffloadd.integrations.vllm.blocks import warn_of_states
from kvoffloadd.integrations.vllm.caches import announced
from kvoffloadd.integrations.vllm.config import (
    REACHES,
    STATES,
    Options,
    Platform,
    instance_of,
    namespace_of,
    refuse_adapters,
    unstable_hashes,
)
from kvoffloadd.integrations.vllm.event_thread import EventThread
from kvoffloadd.integrations.vllm.identity import attached
from kvoffloadd.integrations.vllm.keys import KeyNames, drafting_groups, salts_of
from kvoffloadd.integrations.vllm.lookup_thread import LookupThread
from kvoffloadd.integrations.vllm.manager import KVOffloaddManager, metric_definitions
from kvoffloadd.integrations.vllm.onehost import refuse_nodes
from kvoffloadd.integrations.vllm.parts import LayerFacts, by_heads, why_one_size
from kvoffloadd.integrations.vllm.versions import refuse_sleep
from kvoffloadd.integrations.vllm.worker import KVOffloaddWorker

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger("vllm.kvoffloadd")

_INSTRUCTION_SETS = {
    "avx2": "_is_avx2_supported",
    "avx512": "_is_avx512_supported",
    "avx512bf16": "_is_avx512_bf16_supported",
    "amx": "_is_amx_tile_supported",
}
_CONNECT_S = 10.0  # includes attaching an engine's memory


class KVOffloaddSpec(OffloadingSpec):
    """Makes the manager in the scheduler's process, a worker in each rank's.

    vLLM's own connector ends the engine when a load fails, as it does where the daemon dies: `KVOffloaddConnector`
    recomputes instead.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        """Checks the options; does not connect yet. Raises UsageError for invalid options, and where the engine's
        identity is not known.
        """
        super().__init__(config)
        self._options = Options.of(config.extra_config)
        self._identity = attached(config.extra_config)
        if STATES not in config.extra_config:  # vLLM's own connector
            refuse_adapters(config.extra_config)
        # True: vLLM has rank 0 alone store the bytes that all ranks hold alike.
        self.replicated_layout = bool(config.replicated_layout)
        self.layer_facts = LayerFacts()
        """Facts about this rank's layers. `KVOffloaddConnector` sets it before there is a worker."""
        self._seed = os.environ.get("PYTHONHASHSEED")
        self._namespace = namespace_of(config, _platform(), self._seed)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Returns the manager's counters."""
        return metric_definitions()

    def get_manager(self) -> OffloadingManager:
        """Makes the manager for the scheduler's process."""
        if unstable_hashes(self.config, self._seed):
            logger.warning(
                "kvoffloadd: block hashes differ from run to run; nothing will hit after a restart, nor in other "
                "engines. Set PYTHONHASHSEED to a number, or --prefix-caching-hash-algo sha256"
            )
        if self.config.canonical_layout and not by_heads(self.config):
            logger.warning(
                "kvoffloadd: canonical_layout is set, but engines of other tensor-parallel sizes share nothing with "
                "this one: %s",
                why_one_size(self.config),
            )
        lookup_thread = LookupThread(self._client("scheduler"), announced(self.config))
        groups = [group.group_id for group in self.config.groups]
        drafts = self._identity["drafts"]
        if drafts == self._identity["token"]:  # in doubt
            drafts += self.config.engine_id
        names = KeyNames(salts=salts_of(drafts, self._drafting()))
        event_thread = EventThread(self._client("observer"), groups) if self.config.enable_kv_cache_events else None
        has_windows = bool(self.config.extra_config.get(REACHES))
        return KVOffloaddManager(
            lookup_thread, groups, self._options, event_thread, has_windows=has_windows, names=names
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Makes the worker for a rank's process. Raises UsageError where vLLM would put the KV cache to sleep without
        notice, and where other ranks are on other hosts.
        """
        engine = get_current_vllm_config_or_none()
        if engine is not None and STATES not in self.config.extra_config:
            refuse_nodes(engine)
            warn_of_states(engine.cache_config.mamba_cache_mode, self.config.cache.blocks_per_chunk)
            refuse_sleep(engine, "OffloadingConnector tells no spec of it; KVOffloaddConnector with vLLM 0.33 follows")
        return KVOffloaddWorker(self._client("worker"), self.config, kv_caches, self._options, self.layer_facts)

    def _drafting(self) -> list[int]:
        """Returns the groups that have other bytes in an engine with another draft model."""
        if not self._identity["drafts"]:
            return []
        layers = {group.group_id: group.layer_names for group in self.config.groups}
        # In a pipeline a rank knows its own layers alone, and so does its scheduler.
        return list(layers) if self.config.parallel.pp_size > 1 else drafting_groups(layers, self._identity["layers"])

    def _client(self, role: Literal["scheduler", "worker", "observer"]) -> Client:
        return Client(
            self._options.socket,
            namespace=self._namespace,
            role=role,
            instance=instance_of(self.config.engine_id),
            deadline_s=max(_CONNECT_S, self._options.timeout_s),
            connect_deadline_s=0.0,
        )


def _platform() -> Platform:
    states: Any = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
    return Platform(_device(), versions.version(), str(states.get_conv_state_layout()))


def _device() -> str:
    """Returns the kind of device that computes. On CPUs the instruction sets decide which of vLLM's kernels are loaded
    (`CpuPlatform.import_kernels`), and in which order these keep the numbers of a block (`_get_attn_isa`): engines of
    different processors share nothing.
    """
    named = f"{current_platform.device_type} {os.uname().machine}"
    if current_platform.device_type != "cpu":
        return named
    cpu = importlib.import_module("torch").cpu
    return " ".join((named, *(name for name, has in _INSTRUCTION_SETS.items() if getattr(cpu, has, bool)())))
