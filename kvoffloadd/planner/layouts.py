"""The layouts that a rank's KV cache can have, each with the geometry that `kvoffloadd.layout` would register."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvoffloadd.layout import (
    FLASH_NHD,
    TRITON_HND,
    TRITON_NHD,
    Attention,
    LayerGroup,
    LayerSpec,
    Plan,
    Reach,
    TensorPlan,
    View,
    clip,
    cross_layers,
    descriptors,
    packed_pages,
    packed_rows,
)
from kvoffloadd.layout.place import Place, own_view, shared_views
from kvoffloadd.layout.spec import nth_layers
from kvoffloadd.model import GroupKind
from kvoffloadd.planner.grouping import form_groups
from kvoffloadd.planner.modelconfig import ModelConfig
from kvoffloadd.planner.rank import Rank

KV_APART = "a tensor a layer, K and V apart"
PER_LAYER = "a tensor a layer, blocks first"
CROSS_LAYER = "cross-layer"
HEADS_FIRST = "cross-layer, heads first"
ROWS = "packed rows"
PAGES = "packed pages, {} layers"

PACK_SIZES = (2, 4, 8)
"""Which are compared where states set the page."""

BLOCKS = 2
"""Geometry needs no more: with one block, which strides lie outside of blocks would not show."""


@dataclass(frozen=True)
class Layout:
    """A layout of a model's layers on one rank. `pack_size`: attention layers on a page."""

    name: str
    plan: Plan
    pack_size: int = 1

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; of the longest one, where groups differ."""
        return max(self.spec(group).block_size for group in range(self.num_groups))

    @property
    def num_groups(self) -> int:
        """Groups of layers."""
        return len(self.plan.groups)

    def spec(self, group: int) -> LayerSpec:
        """What the layers of the group at this index are."""
        return self.plan.specs[self.plan.groups[group].layers[0]]

    def reach(self, group: int) -> Reach:
        """How far back the group looks."""
        spec = self.spec(group)
        return Reach(spec.group_kind, spec.block_size, spec.window if isinstance(spec, Attention) else 0)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Counts the descriptors of a block of each group, before any are merged."""
        return tuple(sum(ref.count for ref in group.refs) for group in self.plan.canonical.groups)

    @property
    def payloads(self) -> tuple[int, ...]:
        """Bytes of a block of each group."""
        return tuple(group.payload_bytes for group in self.plan.canonical.groups)

    @property
    def needs_less(self) -> bool:
        """A restore needs less of some group than is stored: it has windows, chunks or states."""
        return any(self.reach(group).kind is not GroupKind.FULL for group in range(self.num_groups))

    @property
    def padding(self) -> tuple[int, ...]:
        """Bytes of the engine's memory that a block of each group leaves unused."""
        return tuple(self.plan.block_bytes - payload for payload in self.payloads)

    @property
    def token_bytes(self) -> float:
        """Returns the bytes of a token in all groups, everything stored."""
        sizes = (self.spec(group).block_size for group in range(self.num_groups))
        return float(sum(Fraction(payload, size) for payload, size in zip(self.payloads, sizes, strict=True)))

    def stored_blocks(self, tokens: int) -> tuple[int, ...]:
        """Blocks of each group in a prompt, all of them stored; what is not a whole block has no key."""
        return tuple(tokens // self.spec(group).block_size for group in range(self.num_groups))

    def needed_blocks(self, tokens: int) -> tuple[int, ...]:
        """Blocks of each group that a restore of the prompt's whole blocks needs."""
        end = tokens // self.block_tokens * self.block_tokens
        return tuple(len(self.reach(group).blocks(end)) for group in range(self.num_groups))

    def clipped_blocks(self, tokens: int) -> tuple[int, ...]:
        """The same, as engines ask for it that leave room for a boundary within a block: one more of a window."""
        end = tokens // self.block_tokens * self.block_tokens
        reaches = map(self.reach, range(self.num_groups))
        sliding = [len(clip(range(end // reach.block_size), reach.window, reach.block_size))
                   if reach.kind is GroupKind.SLIDING else 0 for reach in reaches]  # fmt: skip
        return tuple(one or needed for one, needed in zip(sliding, self.needed_blocks(tokens), strict=True))

    def descriptors_of(self, blocks: Sequence[int]) -> int:
        """What the daemon will count as descriptors of a store or load of so many blocks of each group."""
        return descriptors([group.refs for group in self.plan.canonical.groups], blocks)


def possible_layouts(rank: Rank, pack_size: int = 0, num_blocks: int = BLOCKS) -> tuple[list[Layout], dict[str, str]]:
    """All layouts that this rank's layers can have, and why others are none of them.

    `pack_size`: to be among those compared; 0: no wish. Raises UsageError for states that can't lie on any page.
    """
    model = rank.model
    blocks_first = rank.specs(TRITON_NHD)
    groups = form_groups(blocks_first)
    found = [
        Layout(PER_LAYER, per_layer(blocks_first, groups, num_blocks)),
        Layout(CROSS_LAYER, cross_layers(blocks_first, groups, num_blocks)),
        Layout(ROWS, packed_rows(blocks_first, groups, num_blocks)),
    ]
    refused: dict[str, str] = {}
    if model.is_mla:
        refused |= dict.fromkeys((KV_APART, HEADS_FIRST), "MLA keeps one latent: there are no K and V, and no heads")
    elif model.is_hybrid:
        refused[KV_APART] = "states lie on the same pages, which must hold a block's K and V together"
        refused[HEADS_FIRST] = "states have no heads, and could not use the memory of attention's blocks"
    else:
        apart, heads_first = rank.specs(FLASH_NHD), rank.specs(TRITON_HND)
        found.insert(0, Layout(KV_APART, per_layer(apart, form_groups(apart), num_blocks)))
        found.insert(3, Layout(HEADS_FIRST, cross_layers(heads_first, form_groups(heads_first), num_blocks)))
    if model.is_hybrid:
        sizes = sorted({*PACK_SIZES, pack_size} - {0, 1}) if can_pack(model) else []
        for size in sizes:
            pages = packed_pages(rank.specs(TRITON_NHD, size), size, num_blocks)
            found.append(Layout(PAGES.format(size), pages, size))
    if not can_pack(model):
        refused["packed pages"] = "they are for models with states, and attention layers of one kind"
    return found, refused


def can_pack(model: ModelConfig) -> bool:
    """Whether several attention layers can lie on one page, as long as a state."""
    return model.is_hybrid and len(set(model.kinds)) == 2


def per_layer(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup], num_blocks: int) -> Plan:
    """A tensor for each slot, in the order of its layers' backend; the n-th layers of all groups overlay each other."""
    views: dict[str, tuple[View, ...]] = {}
    tensors = []
    for at, slot in enumerate(nth_layers(groups)):
        page = max(specs[layer].page_bytes for layer in slot)
        for layer in slot:
            spec = specs[layer]
            views[layer] = (
                (own_view(layer, spec, num_blocks, at),)
                if isinstance(spec, Attention) and spec.page_bytes == page
                else shared_views(layer, spec, num_blocks, Place(at, page))
            )
        tensors.append(TensorPlan((num_blocks, page)))
    return Plan(num_blocks, tuple(tensors), views, dict(specs), tuple(groups))
