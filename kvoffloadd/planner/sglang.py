"""Derives from a model how to start SGLang and the daemon, and what the tiers hold of SGLang's pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvoffloadd.config import MIB
from kvoffloadd.errors import ConfigError, NoPlanError
from kvoffloadd.model import PAGE_BYTES, slot_bytes
from kvoffloadd.planner.advice import WASTEFUL
from kvoffloadd.planner.capacity import INDEX_BYTES_PER_KEY, DiskSpace, MemorySpace, demand_of
from kvoffloadd.planner.hostpools import (
    CONV_DTYPE,
    PAGES_OF_ONE,
    REFUSED,
    SAYS_NO_STATE_DTYPE,
    STATE_DTYPE,
    WINDOWS_APART,
    HostPool,
    host_pools,
    page_tokens_of,
)
from kvoffloadd.planner.modelconfig import ModelConfig
from kvoffloadd.planner.planning import (
    DEFAULTS,
    HeldPrompts,
    PlanInputs,
    Prompt,
    memory_space,
    prompt_lengths,
    spaces_of,
)
from kvoffloadd.planner.rank import KV_DTYPES, Rank
from kvoffloadd.planner.trace import Trace
from kvoffloadd.sglangnames import STORAGE, STORAGE_FLAG
from kvoffloadd.units import format_bytes

PAGE_TOKENS = 64
"""Tokens of SGLang's pages by default: the size that its kernels for MLA and for indexes require, and those for heads
accept.
"""

HOST_RATIO = 1.2
"""The value of SGLang's `--hicache-ratio` where host memory is only a buffer: a multiple of the KV cache on the GPU."""

MAPPED_TIMES = 2
"""A host pool is mapped once for loads and once for stores."""

SESSIONS_PER_RANK = 3
"""The sessions for lookups, loads and stores."""

CALL_PAGES = 128
"""The pages that SGLang loads or stores at a time."""

THRESHOLD_TOKENS = 256
"""SGLang looks up nothing shorter, unless `prefetch_threshold` has another value."""

RECORD_EXTRA_BYTES = 3 * PAGE_BYTES
"""A segment's headers and footer, in addition to the slot of its only record."""

SEGMENT_RECORDS = 4
"""Records of the largest payload in a segment that is enlarged for them: at most one of them is lost at its end."""

GB = 10**9
"""The unit of `--hicache-size`."""

BUFFER_PROMPTS = 16
"""The prompts on their way between a GPU and the daemon that a smaller host pool is sized for."""

STORAGE_FLAGS = (
    "--enable-hierarchical-cache",
    *("--hicache-mem-layout", "page_first_direct"),
    *("--hicache-io-backend", "direct"),
    *("--hicache-host-memory-mode", "buffer_only"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-storage-backend", "dynamic"),
    *(STORAGE_FLAG, json.dumps(STORAGE)),
)
"""The flags of every engine with the storage."""


@dataclass(frozen=True, slots=True)
class HostPoolSizes:
    """The sizes of SGLang's host pools on one rank. `default_bytes`: with its default ratio; 0: the size of the KV
    cache on a GPU is not known. `least_gb`: a `--hicache-size` that holds some prompts on their way. `mapped_bytes`:
    what all ranks' pools take of the daemon's limit; 0 as above.
    """

    default_bytes: int
    least_gb: int
    mapped_bytes: int


@dataclass(frozen=True, slots=True)
class SglangPlan:
    """A plan for SGLang. `flags`: SGLang's, in addition to the model's path. `settings`: the daemon's settings, by
    section.key, that must differ from the defaults.
    """

    rank: Rank
    terms: PlanInputs
    trace: Trace | None
    pools: tuple[HostPool, ...]
    flags: tuple[str, ...]
    settings: dict[str, str]
    host: HostPoolSizes
    prompts: tuple[Prompt, ...]
    held: tuple[HeldPrompts, ...]
    warnings: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def model_flags(self) -> tuple[str, ...]:
        """Returns those of `flags` that depend on the model and on the terms."""
        return self.flags[: -len(STORAGE_FLAGS)]

    @property
    def page_tokens(self) -> int:
        """Returns the tokens of a page, and so of a key."""
        return self.rank.block_size

    @property
    def needs_less(self) -> bool:
        """Returns whether a restore needs less of some pool than is stored."""
        return any(pool.needed_tokens for pool in self.pools)


def make_sglang_plan(model: ModelConfig, terms: PlanInputs, trace: Trace | None = None) -> SglangPlan:
    """Makes a plan for SGLang. `terms.block_size`: tokens of a page. Raises ConfigError for contradictory terms, and
    for a model with pools that the storage refuses.
    """
    if model.model_type in REFUSED:
        raise NoPlanError(f"--engine sglang: {REFUSED[model.model_type]}")
    if terms.pack_size:
        raise ConfigError("--attn-pack-size is not for SGLang: its host pools have pages of tokens and states apart")
    terms = replace(terms, block_size=page_tokens_of(model, terms.block_size))
    rank = Rank(model, terms.tp, terms.block_size, terms.kv_dtype, terms.hybrid)
    if model.block_multiple > 1 and terms.block_size % model.block_multiple:
        raise ConfigError(f"--block-size {terms.block_size}: SGLang has pages of {model.block_multiple} for this model")
    pools = host_pools(rank)
    lengths = prompt_lengths(terms, trace)
    prompts = tuple(_prompt(name, tokens, pools, terms.block_size) for name, tokens in lengths.items())
    needed = _needed(pools, terms)
    spaces = spaces_of(needed, memory_space(needed))
    held = tuple(_held(name, space, pools, prompts, terms.block_size) for name, space in spaces)
    return SglangPlan(
        rank=rank,
        terms=terms,
        trace=trace,
        pools=pools,
        flags=_flags(rank, terms),
        settings=_settings(terms, needed),
        host=_host_memory(pools, terms, prompts[0].tokens),
        prompts=prompts,
        held=held,
        warnings=tuple(_warnings(rank, terms, pools, held[0], prompts[0])),
        assumed=tuple(_assumed(rank, terms, pools)),
    )


# --- what to start --------------------------------------------------------------------------------------


def _flags(rank: Rank, terms: PlanInputs) -> tuple[str, ...]:
    found = ["--page-size", str(rank.block_size)]
    if rank.tp > 1:
        found += ["--tp-size", str(rank.tp)]
    if KV_DTYPES[terms.kv_dtype]:
        found += ["--kv-cache-dtype", "fp8_e4m3" if terms.kv_dtype == "fp8" else terms.kv_dtype]
    if not terms.hybrid:
        found.append("--disable-hybrid-swa-memory")
    return (*found, *STORAGE_FLAGS)


def _settings(given: PlanInputs, needed: PlanInputs) -> dict[str, str]:
    """Returns values in the config's notation."""
    found = {}
    if needed.slab_bytes != memory_space(given).slab_bytes:
        found["memory.slab_bytes"] = _size(needed.slab_bytes)
    if needed.segment_bytes != given.segment_bytes:
        found["disk.segment_bytes"] = _size(needed.segment_bytes)
    if _mapped_bytes(given) > DEFAULTS.limits.mapped_bytes:
        found["limits.mapped_bytes"] = _size(_mapped_bytes(given))
    if SESSIONS_PER_RANK * given.tp > DEFAULTS.limits.sessions:
        found["limits.sessions"] = str(SESSIONS_PER_RANK * given.tp)
    return found


def _size(size: int) -> str:
    return f"{_whole_mib(size) // MIB}MiB"


def _needed(pools: Sequence[HostPool], terms: PlanInputs) -> PlanInputs:
    """Chooses slabs and segments that suit the memory, unless the largest payload does not fit, or leaves a quarter of
    a slab and more unused.
    """
    slab, segment = memory_space(terms).slab_bytes, terms.segment_bytes
    largest = max(slot_bytes(pool.payload_bytes) for pool in pools)
    if largest > slab or slab % largest > WASTEFUL * slab:
        slab = _whole_mib(largest * max(1, slab // largest))
    if terms.disk_bytes and largest + RECORD_EXTRA_BYTES > segment:
        segment = _whole_mib(largest * SEGMENT_RECORDS)
    return replace(terms, slab_bytes=slab, segment_bytes=segment)


def _whole_mib(size: int) -> int:
    return -(-size // MIB) * MIB


def _host_memory(pools: Sequence[HostPool], terms: PlanInputs, prompt_tokens: int) -> HostPoolSizes:
    prompt_bytes = sum(pool.stored_keys(prompt_tokens, terms.block_size) * pool.payload_bytes for pool in pools)
    return HostPoolSizes(
        int(terms.gpu_cache_bytes * HOST_RATIO), -(-BUFFER_PROMPTS * prompt_bytes // GB) or 1, _mapped_bytes(terms)
    )


def _mapped_bytes(terms: PlanInputs) -> int:
    return int(terms.gpu_cache_bytes * HOST_RATIO) * MAPPED_TIMES * terms.tp


# --- what the daemon holds ------------------------------------------------------------------------------


def _prompt(name: str, tokens: int, pools: Sequence[HostPool], page: int) -> Prompt:
    stored = sum(pool.stored_keys(tokens, page) * pool.parts * pool.payload_bytes for pool in pools)
    needed = sum(pool.needed_keys(tokens, page) * pool.parts * pool.payload_bytes for pool in pools)
    return Prompt(name, tokens, tokens // page, stored, needed)


def _held(
    name: str, space: MemorySpace | DiskSpace, pools: Sequence[HostPool], prompts: Sequence[Prompt], page: int
) -> HeldPrompts:
    def times(keys: Sequence[int]) -> int | None:
        demand = demand_of((count, pool.parts, pool.payload_bytes) for count, pool in zip(keys, pools, strict=True))
        return space.holds(demand) if demand else None

    once = [0 if pool.is_state else 1 for pool in pools]
    blocks = times(once) or 0
    return HeldPrompts(
        tier=name,
        capacity_bytes=space.capacity_bytes,
        blocks=blocks,
        tokens=blocks * page,
        keys=blocks * sum(once),
        index_bytes=blocks * sum(once) * INDEX_BYTES_PER_KEY,
        prompts=tuple(times([pool.stored_keys(prompt.tokens, page) for pool in pools]) for prompt in prompts),
        needed=tuple(times([pool.needed_keys(prompt.tokens, page) for pool in pools]) for prompt in prompts),
    )


# --- sentences ------------------------------------------------------------------------------------------


def _warnings(
    rank: Rank, terms: PlanInputs, pools: Sequence[HostPool], memory: HeldPrompts, prompt: Prompt
) -> list[str]:
    found = []
    model = rank.model
    if model.model_type in PAGES_OF_ONE:
        found.append(
            "SGLang caches this model's prompts only with --page-size 1: a key for each token, of "
            f"{format_bytes(pools[0].payload_bytes)}. This has not been tested"
        )
    elif model.is_mla or model.is_hybrid or model.indexed:
        found.append("not tested with a real engine: SGLang's CPU engine, on which the storage was tested, has no such")
    if prompt.tokens < max(THRESHOLD_TOKENS, rank.block_size):
        found.append(
            f"a typical prompt has {prompt.tokens:,} tokens: SGLang looks for no fewer than {THRESHOLD_TOKENS} in its "
            'storage, unless "prefetch_threshold" in the JSON says less, and stores only whole pages'
        )
    if memory.prompts[0] is not None and memory.prompts[0] < 1:
        found.append(
            f"memory holds less than one prompt of {prompt.tokens:,} tokens: its first pages are evicted before its "
            "last are stored; raise --memory"
        )
    elif memory.blocks < 2 * CALL_PAGES:
        found.append(
            f"SGLang stores {CALL_PAGES} pages at a time and loads as many: memory holds {memory.blocks:,}, so that "
            "one can find no room for the other; raise --memory"
        )
    if terms.share_tp:
        found.append("engines of other tensor-parallel sizes don't share with SGLang's, despite --share-tp")
    return found


def _assumed(rank: Rank, terms: PlanInputs, pools: Sequence[HostPool]) -> list[str]:
    model = rank.model
    assumptions = [*model.assumed]
    if rank.dtype == "float32":
        assumptions.append(
            "float32 is the checkpoint's; engines often run such models in bfloat16: --kv-dtype bfloat16"
        )
    if model.sharing:
        assumptions.append(
            f"SGLang's pools have all layers, the last {len(model.sharing)} too, though nothing is in them"
        )
    windows = model.window or model.chunk
    if windows and not (rank.hybrid and model.model_type in WINDOWS_APART):
        assumptions.append(f"windows are in the one pool of all layers, as SGLang has them for {model.model_type}")
    if model.linear is not None:
        dtype = "" if model.model_type in SAYS_NO_STATE_DTYPE else model.state_dtype
        assumptions.append(
            f"states are {CONV_DTYPE} (convolution) and {dtype or STATE_DTYPE}, as SGLang has them unless it is told "
            "otherwise; one is stored for each prompt, at the end of its last whole page"
        )
    if model.indexed and rank.is_packed:
        assumptions.append("latents in fp8 have scales beside them; some of SGLang's kernels keep 576 bytes without")
    elif model.indexed:
        assumptions.append(
            "latents are in bfloat16, which is SGLang's choice up to Hopper; on Blackwell it takes --kv-dtype fp8"
        )
    if terms.tp > 1:
        assumptions.append(
            f"all {terms.tp} ranks are on this host, and share one daemon; bytes of prompts are those of all ranks"
        )
    if model.is_mla and terms.tp > 1:
        assumptions.append("all ranks have the same latents: one of them stores them")
    assumptions.append("a key is one page of one pool; every whole page of a prompt is stored")
    if any(pool.needed_tokens for pool in pools):
        assumptions.append("for windows, a restore needs less than may be stored: both figures are shown")
    return assumptions
