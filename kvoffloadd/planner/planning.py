"""Derives a plan from a model and the terms that it runs under: layouts compared, and what the tiers hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvoffloadd.config import Config, suitable_slab_bytes
from kvoffloadd.errors import ConfigError, UsageError
from kvoffloadd.layout import LayerKind, uniform_type
from kvoffloadd.planner.advice import recommend, warnings
from kvoffloadd.planner.capacity import INDEX_BYTES_PER_KEY, DiskSpace, MemorySpace, demand_of
from kvoffloadd.planner.layouts import Layout, can_pack, possible_layouts
from kvoffloadd.planner.modelconfig import ModelConfig
from kvoffloadd.planner.rank import Rank
from kvoffloadd.planner.trace import Trace

DEFAULTS = Config()
"""The daemon's defaults."""

PROMPT_TOKENS = 8000
"""A typical prompt, if none is given: a chat of some turns, or a few pages of documents."""


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The terms that a model runs under. `pack_size`: 0: not given. `disk_bytes`: 0 for no disk. `gpu_cache_bytes`:
    bytes of the engine's KV cache on each GPU; 0: not known.

    `hybrid`, `kv_dtype`, `block_size`, `tp`: as in `Rank`. `share_tp`: other tensor-parallel sizes that read the stored
    keys, too.
    """

    memory_bytes: int = DEFAULTS.memory.capacity_bytes
    slab_bytes: int = 0
    disk_bytes: int = 0
    segment_bytes: int = DEFAULTS.disk.segment_bytes
    block_size: int = 16
    tp: int = 1
    pack_size: int = 0
    kv_dtype: str = "auto"
    hybrid: bool = True
    share_tp: bool = False
    prompt_tokens: int = PROMPT_TOKENS
    gpu_cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt length. `stored_bytes`: bytes on all ranks, with all groups stored for every block; `needed_bytes`:
    bytes that a restore of its whole blocks needs.
    """

    name: str
    tokens: int
    blocks: int
    stored_bytes: int
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class HeldPrompts:
    """The prompts that a tier holds. `blocks`: times the tokens of a block in all groups, all stored.

    `prompts`: for each prompt how many whole ones, with everything stored; `needed`: how many with only the part stored
    that a restore needs. None: they have no whole block.
    """

    tier: str
    capacity_bytes: int
    blocks: int
    tokens: int
    keys: int
    index_bytes: int
    prompts: tuple[int | None, ...]
    needed: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """A plan for engines with blocks. `layout`: the layout that groups and capacities apply to: that of today's
    engines, or the packs of `pack_size`.

    `parts`: parts of a key of each group. `refused`: names of layouts, and why they are impossible. `rows_by_default`:
    engines that pack rows do so unless configured otherwise.
    """

    rank: Rank
    terms: PlanInputs
    trace: Trace | None
    layout: Layout
    parts: tuple[int, ...]
    layouts: tuple[Layout, ...]
    refused: dict[str, str]
    rows_by_default: bool
    recommended: Layout
    prompts: tuple[Prompt, ...]
    held: tuple[HeldPrompts, ...]
    warnings: tuple[str, ...]
    assumed: tuple[str, ...]

    @property
    def token_bytes(self) -> float:
        """Returns what a token takes in all groups, on all ranks, if everything is stored."""
        return float(
            sum(
                Fraction(parts * payload, self.layout.spec(group).block_size)
                for group, (parts, payload) in enumerate(zip(self.parts, self.layout.payloads, strict=True))
            )
        )


def make_plan(model: ModelConfig, terms: PlanInputs, trace: Trace | None = None) -> CapacityPlan:
    """Makes a plan. `trace`: its median prompt takes precedence over `terms.prompt_tokens`. Raises ConfigError for
    contradictory terms.
    """
    rank = Rank(model, terms.tp, terms.block_size, terms.kv_dtype, terms.hybrid)
    if terms.pack_size and not can_pack(model):
        raise ConfigError(
            "--attn-pack-size is only for models with states and attention layers of one kind; leave it out"
        )
    layers = len(model.kinds) - model.count(LayerKind.MAMBA)
    if terms.pack_size > layers:
        raise ConfigError(f"--attn-pack-size {terms.pack_size}: there are {layers} attention layers to be packed")
    try:
        layouts, refused = possible_layouts(rank, terms.pack_size)
    except UsageError as error:
        raise ConfigError(f"no layout can hold this model's layers: {error}") from None
    layout = next(candidate for candidate in layouts if candidate.pack_size == max(1, terms.pack_size))
    parts = tuple(rank.parts(layout.spec(group).kind) for group in range(layout.num_groups))
    lengths = prompt_lengths(terms, trace)
    memory = memory_space(terms)
    spaces = spaces_of(terms, memory)
    held = tuple(_held(name, space, layout, parts, list(lengths.values())) for name, space in spaces)
    typical = next(iter(lengths.values()))
    return CapacityPlan(
        rank, terms, trace, layout, parts, tuple(layouts), refused,
        uniform_type(layout.plan.specs, layout.plan.groups),
        recommend(layouts, layout, typical, terms.share_tp),
        prompts=tuple(_prompt(name, tokens, layout, parts) for name, tokens in lengths.items()),
        held=held,
        warnings=(*_unshared(rank, terms), *warnings(layout, rank, memory, typical, held[0].prompts[0] or 0)),
        assumed=tuple(_assumed(rank, layout, terms, trace)),
    )  # fmt: skip


def prompt_lengths(terms: PlanInputs, trace: Trace | None) -> dict[str, int]:
    """Returns lengths in tokens, by name; the first one counts."""
    return {"median": trace.median_tokens, "p90": trace.p90_tokens} if trace else {"typical": terms.prompt_tokens}


def memory_space(terms: PlanInputs) -> MemorySpace:
    """Returns the space of the memory tier."""
    return MemorySpace(terms.memory_bytes, terms.slab_bytes or suitable_slab_bytes(terms.memory_bytes))


def spaces_of(terms: PlanInputs, memory: MemorySpace) -> list[tuple[str, MemorySpace | DiskSpace]]:
    """Returns the tiers by name, `memory` first."""
    disk = [("disk", DiskSpace(terms.disk_bytes, terms.segment_bytes))] if terms.disk_bytes else []
    return [("memory", memory), *disk]


def _unshared(rank: Rank, terms: PlanInputs) -> list[str]:
    """Returns why the keys can't be shared as asked."""
    if terms.share_tp and rank.model.is_hybrid:
        return [
            "states are no heads: ranks of other tensor-parallel sizes can't read what is stored, despite --share-tp"
        ]
    return []


def _prompt(name: str, tokens: int, layout: Layout, parts: Sequence[int]) -> Prompt:
    stored, needed = (
        sum(count * p * payload for count, p, payload in zip(blocks, parts, layout.payloads, strict=True))
        for blocks in (layout.stored_blocks(tokens), layout.needed_blocks(tokens))
    )
    return Prompt(name, tokens, tokens // layout.block_tokens, stored, needed)


def _held(
    name: str, space: MemorySpace | DiskSpace, layout: Layout, parts: Sequence[int], lengths: Sequence[int]
) -> HeldPrompts:
    def times(blocks: Sequence[int]) -> int | None:
        demand = demand_of(zip(blocks, parts, layout.payloads, strict=True))
        return space.holds(demand) if demand else None

    once = layout.stored_blocks(layout.block_tokens)
    blocks = times(once) or 0
    return HeldPrompts(
        tier=name,
        capacity_bytes=space.capacity_bytes,
        blocks=blocks,
        tokens=blocks * layout.block_tokens,
        keys=blocks * sum(once),
        index_bytes=blocks * sum(once) * INDEX_BYTES_PER_KEY,
        prompts=tuple(times(layout.stored_blocks(tokens)) for tokens in lengths),
        needed=tuple(times(layout.needed_blocks(tokens)) for tokens in lengths),
    )


def _assumed(rank: Rank, layout: Layout, terms: PlanInputs, trace: Trace | None) -> list[str]:
    """Returns the assumptions that the figures rest on."""
    model = rank.model
    assumptions = [*model.assumed, *_of_ranks(model, terms.tp)]
    if rank.dtype == "float32":
        assumptions.append(
            "float32 is the checkpoint's; engines often run such models in bfloat16: --kv-dtype bfloat16"
        )
    if model.ratios and rank.is_packed and terms.kv_dtype == "auto":
        assumptions.append(
            "the cache is in fp8 with its scales, as engines keep this model's: --kv-dtype bfloat16 for others"
        )
    if model.full_heads is not None:
        assumptions.append(
            "layers come before blocks in memory, as with vLLM's connectors: it forms other groups if they do not"
        )
    if not terms.hybrid:
        assumptions.append("windows and chunks count as full attention, since the hybrid cache manager is off")
    assumptions.append("a key is one block of one group; what is stored is stored for all groups and every full block")
    if layout.needs_less:
        assumptions.append("of windows and states a restore needs less than is stored: both figures are shown")
    if trace is not None:
        assumptions.append(
            f"the trace's prompts are blocks of {trace.block_tokens} tokens; the last of each is counted as full"
        )
    return assumptions


def _of_ranks(model: ModelConfig, tp: int) -> list[str]:
    """Returns the demand of this number of tensor-parallel ranks."""
    assumptions = []
    if tp > 1:
        assumptions.append(
            f"all {tp} ranks are on this host, and share one daemon; bytes of prompts are those of all ranks"
        )
    if model.is_mla:
        return [*assumptions, "all ranks have the same latents: one of them stores them"] if tp > 1 else assumptions
    for count in dict.fromkeys(model.heads(kind).count for kind in model.attention_kinds):
        if count < tp:
            of = "" if model.full_heads is None else f" where layers have {count}"
            assumptions.append(f"{tp // count} ranks have the same KV head{of}: one of them stores it")
    return assumptions
