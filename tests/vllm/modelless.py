"""Runs vLLM's own scheduler with both halves of a connector, and no model: each step writes into the blocks what
identifies the tokens before, and looks first whether all that a model would read there is right.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from scripts.harness.daemon import Daemon

BLOCK = 32
WINDOW = 64
BLOCKS = 64
HEADS, HEAD = 2, 8  # as many KV heads as the model that is configured
PAGE_BYTES = 2 * BLOCK * HEADS * HEAD * 4
_TOKEN_WORDS = PAGE_BYTES // BLOCK // 8
_STEPS_MAX = 20_000


class Modelless:
    """An engine of one rank, and its daemon. `kind`: dense (two layers), hybrid (a full and a sliding layer in the same
    bytes), or a hybrid with the layer of a draft model: full drafts (a third layer), sliding drafts (the sliding one).
    `connector`: a `KVTransferConfig` as a map.
    """

    def __init__(self, model: str, kind: str, daemon: Daemon, connector: dict[str, Any]) -> None:
        self.daemon = daemon
        self.config = EngineArgs(
            model=model,
            kv_transfer_config=KVTransferConfig(**connector),
            block_size=BLOCK,
            max_model_len=640,
            max_num_batched_tokens=640,
            enable_prefix_caching=True,
            async_scheduling=False,
            disable_hybrid_kv_cache_manager=False,
        ).create_engine_config()
        self.config.cache_config.num_gpu_blocks = BLOCKS
        common = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": HEAD, "dtype": torch.float32}
        full = FullAttentionSpec(**common)
        if kind == "dense":
            groups = [KVCacheGroupSpec(["a", "b"], full)]
        else:
            sliding = SlidingWindowSpec(**common, sliding_window=WINDOW)
            groups = [
                KVCacheGroupSpec(["a"], full),
                KVCacheGroupSpec(["b"], sliding, is_eagle_group=kind == "sliding drafts"),
            ]
            if kind == "full drafts":
                groups.append(KVCacheGroupSpec(["c"], full, is_eagle_group=True))
        self._reach = [None if group.kv_cache_spec is full else WINDOW for group in groups]
        rows = max(len(group.layer_names) for group in groups)
        size = rows * BLOCKS * PAGE_BYTES
        tensors = [KVCacheTensor(size, list(group.layer_names), BLOCKS * PAGE_BYTES, PAGE_BYTES) for group in groups]
        self.cache = KVCacheConfig(BLOCKS, tensors, groups)
        # One allocation, as vLLM has it; layers of different groups have the same bytes of it.
        self._memory = torch.zeros(rows, BLOCKS, 2, BLOCK, HEADS, HEAD)
        self.layers = {name: self._memory[at] for group in groups for at, name in enumerate(group.layer_names)}
        self._names = [list(group.layer_names) for group in groups]
        block_size, hash_size = resolve_kv_cache_block_sizes(self.cache, self.config)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_size,
            hash_block_size=hash_size,
            log_stats=True,
        )
        with set_current_vllm_config(self.config):  # as vLLM's workers have it
            self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.cache)
            self.worker.register_kv_caches(self.layers)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self._count = 0
        self.began: dict[str, int] = {}
        """Request -> tokens that were not computed."""
        self.failed: set[str] = set()
        """Requests whose load has failed."""
        self.params: dict[str, Any] = {}
        """Request -> the `kv_transfer_params` of its answer."""

    # --- what an engine is asked ---

    def generate(self, prompts: list[list[int]], max_tokens: int = 4, **given: Any) -> list[int]:
        """Generates to the ends of the prompts, and of all transfers. Returns the tokens of each that were not
        computed.
        """
        names = self.add(prompts, max_tokens, **given)
        for _ in range(_STEPS_MAX):
            if not self.scheduler.has_requests():
                return [self.began[name] for name in names]
            if not self.step():
                time.sleep(0.001)
        raise AssertionError(f"{_STEPS_MAX} steps, and requests are left: {self.scheduler.requests}")

    def add(
        self,
        prompts: list[list[int]],
        max_tokens: int = 4,
        salt: str | None = None,
        params: dict[str, Any] | None = None,
        **given: Any,
    ) -> list[str]:
        """Requests that steps work on. `params`: their `kv_transfer_params`. `given`: more for a Request."""
        names = []
        for prompt in prompts:
            extra = None if params is None else {"kv_transfer_params": dict(params)}
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
            sampling.update_from_generation_config({}, 0)
            names.append(f"request-{self._count}")
            self._count += 1
            self.scheduler.add_request(
                Request(
                    names[-1],
                    list(prompt),
                    sampling,
                    pooling_params=None,
                    cache_salt=salt,
                    block_hasher=self._hasher,
                    **given,
                )
            )
        return names

    def forget(self) -> None:
        """Empty the engine's own prefix cache: what is cached then, the daemon had."""
        assert self.scheduler.reset_prefix_cache()

    def scribble(self) -> None:
        """The memory holds something else, as after a sleep."""
        self._memory.fill_(-1.0)

    def step(self) -> int:
        """Tokens that were computed."""
        plan = self.scheduler.schedule()
        self.worker.bind_connector_metadata(plan.kv_connector_metadata)
        self.worker.handle_preemptions(plan.kv_connector_metadata)
        if plan.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        sampled = [self._compute(name, count) for name, count in plan.num_scheduled_tokens.items()]
        if not plan.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(plan.finished_req_ids)
        self.failed |= results.failed_recving
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        names = list(plan.num_scheduled_tokens)
        numbers = {name: at for at, name in enumerate(names)}
        outputs = self.scheduler.update_from_output(
            plan, ModelRunnerOutput(names, numbers, sampled_token_ids=sampled, kv_connector_output=output)
        )
        self.params |= {
            one.request_id: one.kv_transfer_params for of_client in outputs.values() for one in of_client.outputs
        }
        return int(plan.total_num_scheduled_tokens)

    def close(self) -> None:
        """Ends both sessions."""
        self.worker.shutdown()
        self.scheduler.connector.shutdown()

    # --- the model that is none ---

    def _compute(self, name: str, count: int) -> list[int]:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens
        begin = end - count
        self.began[name] = min(begin, self.began.get(name, begin))
        words_before = _told(list(request.all_token_ids)[:end])
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for group, (table, reach) in enumerate(zip(tables, self._reach, strict=True)):
            first = 0 if reach is None else max(0, begin - reach + 1)
            for layer, words in enumerate(self._words(group)):
                for at in range(first, begin):
                    found = words[table[at // BLOCK], at % BLOCK].tolist()
                    assert set(found) == {words_before[at] + layer}, (
                        f"{name}: group {group}, token {at} of {begin} is wrong"
                    )
                for at in range(begin, end):
                    words[table[at // BLOCK], at % BLOCK] = words_before[at] + layer
        return [] if end < request.num_tokens else [(request.all_token_ids[-1] * 7 + 11) % 500]

    def _words(self, group: int) -> list[torch.Tensor]:
        """Returns for each layer i64 (blocks, tokens, words)."""
        layers = [self.layers[name] for name in self._names[group]]
        return [layer.view(torch.int64).view(BLOCKS, BLOCK, _TOKEN_WORDS) for layer in layers]


def is_connected(engine: Modelless) -> bool:
    """Whether its lookups reach the daemon."""
    return bool(engine.scheduler.connector.scheduler.manager._lookup_thread.connected)


def _told(tokens: list[int]) -> list[int]:
    """Returns for each token a number that names it and all before it."""
    digest = hashlib.blake2b(digest_size=7)
    numbers = []
    for token in tokens:
        digest.update(token.to_bytes(4, "little"))
        numbers.append(int.from_bytes(digest.digest(), "little") & ~0xFF)
    return numbers
