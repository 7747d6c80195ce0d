"""Prompts that one engine computes and another one answers: the scheduler's side, for the tails of these alone.

vLLM's own scheduler stores and loads whole chunks of any request. A tail is stored where a request's
`kv_transfer_params` announce that another engine will answer its prompt, and looked up where they announce that another
one has computed it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, OffloadKey, make_offload_key

from kvoffloadd.integrations.vllm.blocks import NULL_BLOCK
from kvoffloadd.integrations.vllm.config import INSIDE
from kvoffloadd.integrations.vllm.expectation import COMPUTED_AT
from kvoffloadd.integrations.vllm.tails import HandedPrompt, filled, tail_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        GroupOffloadConfig,
        OffloadingConnectorScheduler,
        RequestOffloadState,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvoffloadd")

REMOTE_DECODE = "do_remote_decode"
"""Key in `kv_transfer_params`: another engine will answer this prompt. The word is vLLM's, and so is the next."""

REMOTE_PREFILL = "do_remote_prefill"
"""Key in `kv_transfer_params`: another engine has computed the prompt."""


class HandOff:
    """One engine's hand-overs. All methods belong to the scheduler's thread."""

    def __init__(
        self, scheduler: OffloadingConnectorScheduler, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self._scheduler = scheduler
        self._groups: tuple[GroupOffloadConfig, ...] = scheduler.config.kv_group_configs
        self._hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._keeps_states = any(group.requires_cow_source for group in self._groups)
        # There another connector may hand prompts over, by the same words, and vLLM allows for one answer to them.
        self._is_off = bool(vllm_config.kv_transfer_config.kv_connector_extra_config.get(INSIDE))
        self._refusal = _refusal(scheduler, vllm_config, kv_cache_config)
        self._logged: set[str] = set()  # refusals that were logged
        self._prompts: dict[str, HandedPrompt] = {}
        self._computing: set[str] = set()  # prompts for other engines, until they are finished
        self._computed: set[str] = set()  # those of them that have their last token computed by a step
        self._stored: set[str] = set()  # and all stores of the prompt planned
        self._loading: set[str] = set()  # requests that were promised a tail, until vLLM plans the load

    # --- the engine that computes --------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Begins a new request. Where groups keep states, its last token is left to the other engine, which needs the
        state before that one; the answer of this engine is then to a shorter prompt.
        """
        if not self._asks(request, REMOTE_DECODE) or request.num_prompt_tokens < 2:
            return
        if self._keeps_states:
            if request.skip_reading_prefix_cache:
                return
            self._prompt_of(request)  # the name is that of the whole prompt
            # A separate list: an engine in one process with its front end has the caller's own list.
            request.prompt_token_ids = request.prompt_token_ids[:-1]
            del request._all_token_ids[-1:]
            request.num_prompt_tokens -= 1
            request.max_tokens = 1
        self._computing.add(request.request_id)

    def store(self, output: SchedulerOutput, metadata: OffloadingConnectorMetadata) -> None:
        """Stores the tails of prompts that get their last token computed by this step: once more after a preemption,
        since there may have been a reset, after which nothing old is found.
        """
        for name in self._computing & output.num_scheduled_tokens.keys():
            status = self._scheduler._req_status[name]
            begin = status.req.num_computed_tokens
            if begin < status.req.num_prompt_tokens <= begin + output.num_scheduled_tokens[name]:
                self._computed.add(name)
                if self._store(status, output.kv_connector_block_state.get_block_ids(name), metadata):
                    self._stored.add(name)

    def _store(
        self, status: RequestOffloadState, table: tuple[list[int], ...], metadata: OffloadingConnectorMetadata
    ) -> bool:
        """Plans the store of a prompt's tail. Returns whether all keys that the other engine looks up will be
        stored.
        """
        prompt = self._prompt_of(status.req)
        if status.max_offload_tokens is not None and status.max_offload_tokens < prompt.loaded_tokens:
            return False
        keys = {group.group_idx: self._tail(prompt, group) for group in self._groups}
        wanted = [key for key in keys.values() if key is not None]
        planned = self._scheduler.manager.prepare_store(wanted, status.req_context) if wanted else None
        if planned is None or not planned.keys_to_store:
            return not wanted
        blocks: list[list[int]] = []
        fenced: list[int] = []
        deferred: list[int] = []
        for group in self._groups:
            if keys[group.group_idx] not in planned.keys_to_store:
                blocks.append([])
                continue
            first, end = self._tail_blocks(prompt, group)
            held = table[group.group_idx][first:end]
            # As in vLLM: before one of these blocks gets other contents, the store is waited for.
            (deferred if group.sliding_window_size_in_chunks is None else fenced).extend(set(held) - {NULL_BLOCK})
            blocks.append(filled(held, self._scheduler.config.blocks_per_chunk))
        source = GPULoadStoreSpec(
            [block for held_blocks in blocks for block in held_blocks],
            group_sizes=[len(held_blocks) for held_blocks in blocks],
            block_indices=[self._tail_blocks(prompt, group)[0] for group in self._groups],
        )
        job = self._scheduler._generate_job_id()
        self._scheduler._jobs[job] = TransferJobStatus(
            req_id=status.req.request_id,
            pending_count=self._scheduler.config.num_workers,
            keys=set(planned.keys_to_store),
            is_store=True,
            deferred_fence_block_ids=deferred,
            fenced_block_ids=fenced or None,
        )
        for block in fenced:
            self._scheduler._block_id_to_pending_jobs.setdefault(block, set()).add(job)
        status.transfer_jobs.add(job)
        metadata.store_jobs[job] = TransferJob(
            req_id=status.req.request_id, src_spec=source, dst_spec=planned.store_spec
        )
        return True

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Returns the parameters for the other engine's request, if this prompt was computed for one."""
        name = request.request_id
        self._prompts.pop(name, None)
        self._computing.discard(name)
        self._loading.discard(name)
        is_stored, is_computed = name in self._stored, name in self._computed
        self._stored.discard(name)
        self._computed.discard(name)
        if not is_computed:
            return None
        return {REMOTE_PREFILL: True, REMOTE_DECODE: False} | ({COMPUTED_AT: time()} if is_stored else {})

    # --- the engine that answers ---------------------------------------------------------------------

    def matched(self, request: Request, local_tokens: int, found_tokens: int | None) -> int | None:
        """Returns how many tokens behind the engine's own `local_tokens` can be loaded; None: not known yet.

        `found_tokens`: vLLM's answer to that, which counts whole chunks alone.
        """
        name = request.request_id
        self._loading.discard(name)
        if not self._asks(request, REMOTE_PREFILL):
            return found_tokens
        status = self._scheduler._req_status[name]
        prompt = self._prompt_of(request)
        wanted = prompt.loaded_tokens - local_tokens
        if status.transfer_jobs or request.skip_reading_prefix_cache or request.num_tokens != prompt.tokens:
            return found_tokens
        if wanted <= (found_tokens or 0):
            return found_tokens
        if status.max_load_tokens is not None and status.max_load_tokens < wanted:
            return found_tokens
        answers = self._look_up(status, prompt, local_tokens)
        if LookupResult.MISS in answers:
            return found_tokens
        if found_tokens is None or answers - {LookupResult.HIT}:
            return None
        status.partial_tail_boundary = None  # vLLM's own tail, that of a state, ends before this one
        self._loading.add(name)
        return wanted

    @contextmanager
    def planning(self, request: Request, external_tokens: int) -> Iterator[None]:
        """Puts a tail that was promised behind the request's keys while vLLM plans a load of `external_tokens`."""
        name = request.request_id
        status = self._scheduler._req_status.get(name)
        if status is None or name not in self._loading:
            yield
            return
        self._loading.discard(name)
        prompt = self._prompts[name]
        if status.num_locally_computed_tokens + external_tokens != prompt.loaded_tokens:
            yield
            return
        former = [state.offload_keys for state in status.group_states]
        for group, state in zip(self._groups, status.group_states, strict=True):
            tail = self._tail(prompt, group)
            if tail is not None:
                state.offload_keys = [*state.offload_keys[: prompt.whole_chunks(group.tokens_per_chunk)], tail]
        try:
            yield
        finally:
            for group, state, keys in zip(self._groups, status.group_states, former, strict=True):
                state.offload_keys = keys
                # The end of the tail's chunk may be stored once it is there.
                whole = prompt.whole_chunks(group.tokens_per_chunk)
                state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, whole)

    def _look_up(self, status: RequestOffloadState, prompt: HandedPrompt, local_tokens: int) -> set[LookupResult]:
        """Looks up the tails first: without them the rest need not be looked up. Both are what the other engine
        stores.
        """
        tails = [key for key in (self._tail(prompt, group) for group in self._groups) if key is not None]
        for key in tails:
            status.req_context.set_offload_key_position(key, prompt.loaded_tokens)
        chunks: list[OffloadKey] = []
        for group, state in zip(self._groups, status.group_states, strict=True):
            window = group.load_window_size_in_chunks(prompt.loaded_tokens)
            chunks += state.offload_keys[prompt.needed_chunks(group.tokens_per_chunk, local_tokens, window)]
        manager, context = self._scheduler.manager, status.req_context
        manager.expect([*tails, *chunks], context)
        answers = {manager.lookup(key, context) for key in tails}
        if LookupResult.MISS not in answers:
            answers |= {manager.lookup(key, context) for key in chunks}
        return answers

    # --- names ---------------------------------------------------------------------------------------

    def _asks(self, request: Request, word: str) -> bool:
        params = request.kv_transfer_params
        if self._is_off or not params or not params.get(word):
            return False
        refusal = self._refusal or self._refusal_of(request)
        if refusal and refusal not in self._logged:
            self._logged.add(refusal)
            logger.warning("kvoffloadd: the last, partial chunks of prompts are computed by both engines: %s", refusal)
        return not refusal

    def _refusal_of(self, request: Request) -> str:
        """Returns why a prompt has no tail, on either engine; empty: it has."""
        if self._keeps_states and (request.prompt_embeds is not None or request.mm_features):
            return "of a model that keeps states, the last token can't be taken off prompts with embeddings or images"
        return ""

    def _prompt_of(self, request: Request) -> HandedPrompt:
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            tokens = request.num_prompt_tokens
            name = tail_name(self._hash_of(request, tokens), tokens)
            prompt = self._prompts[request.request_id] = HandedPrompt(name, tokens)
        return prompt

    def _hash_of(self, request: Request, tokens: int) -> bytes:
        """Returns vLLM's chain of hashes, with a last link for tokens that fill no block. Salt, LoRA and images are in
        it.
        """
        whole, rest = divmod(tokens, self._scheduler.config.tokens_per_hash)
        parent = request.block_hashes[whole - 1] if whole else None
        if parent is not None and not rest:
            return bytes(parent)
        begin = tokens - rest
        extra_keys, _ = generate_block_hash_extra_keys(request, begin, tokens, 0)
        return bytes(hash_block_tokens(self._hash, parent, request.all_token_ids[begin:tokens], extra_keys))

    def _tail(self, prompt: HandedPrompt, group: GroupOffloadConfig) -> OffloadKey | None:
        if not prompt.has_tail(group.tokens_per_chunk):
            return None
        return make_offload_key(prompt.name, group.group_idx)

    def _tail_blocks(self, prompt: HandedPrompt, group: GroupOffloadConfig) -> tuple[int, int]:
        first = prompt.whole_chunks(group.tokens_per_chunk) * self._scheduler.config.blocks_per_chunk
        return first, -(-prompt.loaded_tokens // group.tokens_per_block)


def _refusal(scheduler: OffloadingConnectorScheduler, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Returns why this engine neither stores nor loads tails; empty: it does."""
    groups = scheduler.config.kv_group_configs
    parallel = vllm_config.parallel_config
    if len(groups) < len(kv_cache_config.kv_cache_groups):
        return "some groups of layers are not offloaded at all"
    if vllm_config.speculative_config is not None:
        return "draft models write into the last block once more"
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
        return "ranks have tokens of their own (context parallel)"
    if any(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) for group in groups):
        return "vLLM cuts loads of this model to whole blocks"
    for group in groups:
        windowed = group.sliding_window_size_in_chunks is not None and not group.requires_cow_source
        if windowed and not isinstance(group.kv_cache_spec, SlidingWindowSpec):
            return f"{type(group.kv_cache_spec).__name__} keeps other blocks than a window's"
    return ""
