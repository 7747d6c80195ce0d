"""vLLM's OffloadingConnector for engines that must outlive the daemon.

vLLM's own asserts that no load fails. Here a failed load is reported as `failed_recving`, which frees the request's
blocks, for any number of KV cache groups: loads are asynchronous, so none of the blocks was cached yet. vLLM looks up
the request's keys again then. Where the load failed in part, the daemon has dropped damaged keys, and those that it
still has are loaded: by vLLM's own rules the longest prefix that all groups have. Where it failed whole, nothing hits,
and all is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.vllm import versions
from kvoffloadd.integrations.vllm.adapters import RANK, AdapterNames, name_adapters, note_what_is_loaded
from kvoffloadd.integrations.vllm.config import DRAFTS, INSIDE, POLICY, REACHES, STATES, Options
from kvoffloadd.integrations.vllm.handoff import HandOff
from kvoffloadd.integrations.vllm.identity import IDENTITY
from kvoffloadd.integrations.vllm.manager import KVOffloaddManager
from kvoffloadd.integrations.vllm.onehost import RankHost, refuse_nodes, refuse_ranks_elsewhere
from kvoffloadd.integrations.vllm.parts import HEADS, LayerFacts, check_scheduler, heads_of
from kvoffloadd.integrations.vllm.versions import refuse_sleep

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvoffloadd")

_SYNC_LOADS = "sync_load_budget_bytes"
_PACKAGE = "kvoffloadd.integrations.vllm"
_WITHOUT_PREFIX_CACHING = "without_prefix_caching"
_ALIGNED = "align"  # MambaSpec.mamba_cache_mode


class KVOffloaddConnector(OffloadingConnector):
    """`kv_connector` KVOffloaddConnector. The plug-in registers it under this name."""

    connector_worker: OffloadingConnectorWorker | None
    _handoff: HandOff  # the scheduler's side has one

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Makes one half of the connector. Raises UsageError where vLLM would take the KV cache away without notice,
        and where a rank and its scheduler do not agree on the parts of a key.
        """
        transfer = vllm_config.kv_transfer_config
        if role is KVConnectorRole.SCHEDULER and transfer.kv_load_failure_policy != POLICY:
            logger.warning(
                "kvoffloadd: kv_load_failure_policy is %s: a request whose load fails ends with an error",
                transfer.kv_load_failure_policy,
            )
        extra = transfer.kv_connector_extra_config
        if extra.get(_SYNC_LOADS):
            raise UsageError(
                f"KVOffloaddConnector does not support {_SYNC_LOADS} above 0: a request that runs in the same step as "
                "its load can't be recomputed if the load fails"
            )
        if not versions.check().tells_of_sleep:
            refuse_sleep(vllm_config, "this vLLM tells no connector of it; 0.33 does")
        refuse_nodes(vllm_config)
        if not vllm_config.cache_config.enable_prefix_caching and not extra.get(_WITHOUT_PREFIX_CACHING):
            raise UsageError(
                "KVOffloaddConnector needs prefix caching, which is off: --no-enable-prefix-caching is set, or vLLM "
                "does not support prefix caching, and thus prompts that are loaded in part, for this model here (for "
                f'example MLA on CPUs). To load anyway, set "{_WITHOUT_PREFIX_CACHING}": true in '
                "kv_connector_extra_config"
            )
        _complete(vllm_config)
        specs = [group.kv_cache_spec for group in _scheduler_form(kv_cache_config).kv_cache_groups]
        extra[STATES] = _states(specs)
        extra[REACHES] = _reaches(specs)
        extra[DRAFTS] = _drafts(vllm_config, kv_cache_config)
        extra[HEADS] = heads_of(vllm_config)
        if extra[STATES]:
            _leave_one_block(extra)
        if role is KVConnectorRole.WORKER and vllm_config.lora_config is not None:
            note_what_is_loaded()
        super().__init__(vllm_config, role, kv_cache_config)
        self._is_inside = bool(extra.get(INSIDE))
        self._adapters: AdapterNames | None = None
        if self.connector_scheduler is not None and vllm_config.lora_config is not None:
            self._adapters = AdapterNames(Options.of(extra).fingerprint, extra[IDENTITY]["adapters"])
            name_adapters(self._adapters)
        if self.connector_scheduler is not None:
            self._handoff = HandOff(self.connector_scheduler, vllm_config, kv_cache_config)
        self._failed: set[str] = set()  # requests with a failed load, until vLLM has freed their blocks and retries
        self._lost: set[str] = set()  # requests with a load that some rank lost whole, until all ranks have ended it
        self._offered: set[str] = set()  # requests that may load again, until vLLM has blocks for that
        self._results: FailingWorker | None = None
        if self.connector_worker is not None:
            derived = build_offloading_config(vllm_config, _scheduler_form(kv_cache_config))
            check_scheduler(self.connector_worker.spec.config, derived)
            self._results = FailingWorker(self.connector_worker.spec, vllm_config, kv_cache_config)
            self.connector_worker = self._results

    def get_handshake_metadata(self) -> RankHost | None:
        """Returns the host of this rank; None inside a MultiConnector, which passes on the metadata of one
        connector.
        """
        return None if self._is_inside else RankHost.here()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes the hosts of all ranks, before the first request. Raises UsageError, which ends the engine's start."""
        if not self._is_inside:
            refuse_ranks_elsewhere(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the transfers that ended, including failed loads."""
        if self._results is None:
            return super().get_transfer_results(finished_req_ids)
        return self._results.transfer_results()

    def unregister_kv_caches(self) -> None:
        """Runs before the engine sleeps. Raises DeadlineError: it can't sleep, since the daemon may still use its
        blocks.
        """
        if self._results is not None:
            self._results.sleep()

    def restore_kv_caches(self) -> None:
        """Shares the same tensors, in other memory: the engine has woken up."""
        if self._results is not None:
            self._results.wake()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Runs in the scheduler: a request with a failed load computes, and stores, all that it does not load anew."""
        super().update_connector_output(connector_output)
        manager: KVOffloaddManager = self.scheduler.manager
        if isinstance(connector_output.kv_connector_worker_meta, WorkerMetadata):
            self._lost |= connector_output.kv_connector_worker_meta.lost
            if self._adapters is not None:
                self._adapters.replaced(connector_output.kv_connector_worker_meta.replaced)
        failed = connector_output.failed_recving or set()
        for request in (connector_output.finished_recving or set()) - failed:
            manager.load_succeeded(request)
        for request in failed:
            partial = request not in self._lost
            self._lost.discard(request)
            status = self.scheduler._req_status.get(request)
            if status is None:
                continue
            end = max((high for _low, high, _key in status.load_key_ranges), default=0)
            keys = {key for _low, _high, key in status.load_key_ranges}
            manager.load_failed(request, range(status.num_locally_computed_tokens, end), keys, partial=partial)
            if not status.req.is_finished():
                self._failed.add(request)
            for group_state in status.group_states:
                group_state.next_stored_chunk_idx = 0

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Makes a request step back from the head of its queue if it is looked up after its load failed and its blocks
        are free.

        vLLM looks at no request behind one that it finds no blocks for: those behind it may have loads that have ended,
        too, and hold the blocks that it needs, so that none would ever go on. Skipped once, it waits elsewhere.
        """
        name, manager = request.request_id, self.scheduler.manager
        if name in self._failed:
            self._failed.discard(name)
            return None, False
        if name in self._offered:
            # No blocks for its second load. vLLM still counts those of the first one as about to be taken, for itself
            # and for all that had failed loads: they would wait for each other. Requests that compute are not held up
            # by that.
            self._offered.discard(name)
            manager.give_up(name)
        found, between_steps = super().get_num_new_matched_tokens(request, num_computed_tokens)
        tokens = self._handoff.matched(request, num_computed_tokens, found)
        if tokens and manager.loads_again(name):
            self._offered.add(name)
        return tokens, between_steps if tokens == found else bool(tokens)

    def on_new_request(self, request: Request) -> None:
        """Starts a hand-over if another engine will answer the request's prompt."""
        self._handoff.begin(request)
        super().on_new_request(request)
        adapter = self._adapters.adapter_of(request) if self._adapters is not None else None
        if adapter is not None:
            self.scheduler._req_status[request.request_id].req_context.set_state(adapter)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plans the step's stores, with the tails of prompts for other engines."""
        metadata = super().build_connector_meta(scheduler_output)
        self._handoff.store(scheduler_output, metadata)
        return metadata

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Runs when the request has blocks for its prompt, and loads, with the tail of a prompt that was handed over,
        or computes. The manager learns what of the prompt the engine had itself.
        """
        with self._handoff.planning(request, num_external_tokens):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._offered.discard(request.request_id)
        status = self.scheduler._req_status[request.request_id]
        held = status.num_locally_computed_tokens + num_external_tokens
        self.scheduler.manager.allocated(request.request_id, held, loads=num_external_tokens > 0)
        self.scheduler.manager.touch(self._needed_keys(status), status.req_context)

    def _needed_keys(self, status: RequestOffloadState) -> list[OffloadKey]:
        """Returns the keys that a load would need of the tokens that the engine has in its own blocks: of windows and
        states those at the end alone.
        """
        tokens = status.num_locally_computed_tokens
        needed: list[OffloadKey] = []
        for group, state in zip(self.scheduler.config.kv_group_configs, status.group_states, strict=True):
            end = tokens // group.tokens_per_chunk
            window = group.load_window_size_in_chunks(tokens)
            needed += state.offload_keys[0 if window is None else max(0, end - window) : end]
        return needed

    def request_finished(self, request: Request, block_ids: list[int]) -> Any:
        """Does what `request_finished_all_groups` does, which vLLM calls unless the hybrid manager is off."""
        self._forget(request.request_id)
        delayed, params = super().request_finished(request, block_ids)
        return delayed, self._handoff.finished(request) or params

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> Any:
        """Ends the request, which may have been aborted before it was looked up again."""
        self._forget(request.request_id)
        delayed, params = super().request_finished_all_groups(request, block_ids)
        return delayed, self._handoff.finished(request) or params

    def _forget(self, request: str) -> None:
        self._failed.discard(request)
        self._offered.discard(request)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *arguments: Any, **named: Any) -> Any:
        """Builds the metrics. Runs in the front end's process, which makes no connector."""
        _complete(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments, **named)


@dataclass
class WorkerMetadata(OffloadingWorkerMetadata):
    """Metadata that ranks send to the scheduler. `lost`: requests with a load that failed, and not just in part.
    `replaced`: states of adapters that some rank has replaced by others.
    """

    lost: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        """Combines the metadata of two ranks."""
        both = super().aggregate(other)
        lost, replaced = self.lost | other.lost, self.replaced | other.replaced
        return WorkerMetadata(both.completed_jobs, both.transfer_stats, lost, replaced)


class FailingWorker(OffloadingConnectorWorker):
    """vLLM's worker half, which asserts that every transfer succeeds, with results that may be failures."""

    def __init__(self, *arguments: Any) -> None:
        """Passes its arguments on to vLLM's class."""
        super().__init__(*arguments)
        self._lost: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the tensors: vLLM makes bytes of the layers, and with them our worker, which needs their
        description.
        """
        self.spec.layer_facts = LayerFacts.of(kv_caches)
        super().register_kv_caches(kv_caches)

    def transfer_results(self) -> KVConnectorTransferResults:
        """Returns the transfers that ended since the last call. A store never fails for the scheduler: a dropped key is
        a miss later.
        """
        results = KVConnectorTransferResults()
        for ended in [] if self.worker is None else self.worker.get_finished():
            request = self._load_jobs.pop(ended.job_id, None)
            if ended.success and ended.transfer_size is not None and ended.transfer_time is not None:
                stats = self._connector_worker_meta.transfer_stats
                direction = stats.store if request is None else stats.load
                direction.record(ended.transfer_size, ended.transfer_time)
            self._connector_worker_meta.mark_completed(ended.job_id)
            if request is not None:
                results.finished_recving.add(request)
                if not ended.success:
                    results.failed_recving.add(request)
                    if not ended.partial:
                        self._lost.add(request)
        return results

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Adds the loads among the ended ones that were lost, and the adapters that were replaced since the last
        call.
        """
        meta = super().build_connector_worker_meta()
        replaced = RANK.tell()
        if meta is None:
            return WorkerMetadata(replaced=replaced) if replaced else None
        lost, self._lost = self._lost, set()
        return WorkerMetadata(meta.completed_jobs, meta.transfer_stats, lost, replaced)

    def sleep(self) -> None:
        """Stores and loads nothing until `wake`. Idempotent, as vLLM requires of both."""
        if self.worker is None:
            return
        self.worker.sleep()
        # Stores that vLLM has kept for the next step are dropped: by then these blocks hold something else.
        for job_id, source, destination in self._unsubmitted_store_jobs:
            self.worker.submit_store(job_id, source, destination)
        self._unsubmitted_store_jobs.clear()

    def wake(self) -> None:
        """Resumes: the KV cache is back."""
        if self.worker is not None:
            self.worker.wake()


def _scheduler_form(kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """Returns the scheduler's form of the config: a rank has specs of each layer, in wrappers."""
    return generate_scheduler_kv_cache_config([kv_cache_config])


def _states(specs: Sequence[KVCacheSpec]) -> list[int]:
    """Returns the groups that keep the state at the end of a request's full blocks alone, which vLLM hands over by
    itself.
    """
    return [index for index, spec in enumerate(specs) if getattr(spec, "mamba_cache_mode", None) == _ALIGNED]


def _leave_one_block(extra: dict[str, Any]) -> None:
    """Makes a key one block: vLLM keeps the state at the last full block of a prompt, where no longer chunk may end.

    Scheduler and ranks may be one process with one `extra`: the first of them removes the options, and warns.
    """
    given = [name for name in ("block_size", "blocks_per_chunk") if extra.pop(name, 1) != 1]
    if given:
        logger.warning(
            "kvoffloadd: %s is ignored: this model keeps states, and vLLM keeps only the one at the last full block of "
            "a prompt, so a key is one block",
            " and ".join(given),
        )


def _reaches(specs: Sequence[KVCacheSpec]) -> dict[int, int]:
    """Returns, for each group that does not need all keys of a prefix, how many tokens before its end it needs, by the
    rule of vLLM's scheduler (`get_sliding_window_size_in_chunks`). A state needs the last one.
    """
    found = {}
    for index, spec in enumerate(specs):
        if isinstance(spec, SlidingWindowSpec):
            found[index] = max(spec.sliding_window, spec.sliding_window - 1 + spec.extra_retained_tokens)
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            found[index] = spec.attention_chunk_size
        elif isinstance(spec, MambaSpec):
            found[index] = 1
    return found


def _drafts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[int]:
    """Returns the groups with layers of a draft model; vLLM gives up the last chunk of their hits. None in a pipeline:
    there only the rank that has these layers knows them.
    """
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return []
    return [index for index, group in enumerate(kv_cache_config.kv_cache_groups) if group.is_eagle_group]


def _complete(vllm_config: VllmConfig) -> None:
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra.setdefault("spec_name", "KVOffloaddSpec")
    extra.setdefault("spec_module_path", _PACKAGE)
