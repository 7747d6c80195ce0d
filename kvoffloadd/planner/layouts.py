"""Lists the layouts that a rank's KV cache can have, each with the geometry that `kvoffloadd.layout` would register."""

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
"""The pack sizes that are compared where states set the page size."""

BLOCKS = 2
"""The number of blocks: geometry needs no more, and with only one it would not show which strides lie outside of
blocks.
"""


@dataclass(frozen=True)
class Layout:
    """A layout of a model's layers on one rank. `pack_size`: attention layers on a page."""

    name: str
    plan: Plan
    pack_size: int = 1

    @property
    def block_tokens(self) -> int:
        """Returns the tokens of a block: of the longest one, where groups differ."""
        return max(self.spec(group).block_size for group in range(self.num_groups))

    @property
    def num_groups(self) -> int:
        """Returns the number of groups of layers."""
        return len(self.plan.groups)

    def spec(self, group: int) -> LayerSpec:
        """Returns the spec of the layers of the group at this index."""
        return self.plan.specs[self.plan.groups[group].layers[0]]

    def reach(self, group: int) -> Reach:
        """Returns how far back the group looks."""
        spec = self.spec(group)
        return Reach(spec.group_kind, spec.block_size, spec.window if isinstance(spec, Attention) else 0)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Counts the descriptors of a block of each group, before any are merged."""
        return tuple(sum(ref.count for ref in group.refs) for group in self.plan.canonical.groups)

    @property
    def payloads(self) -> tuple[int, ...]:
        """Returns the bytes of a block of each group."""
        return tuple(group.payload_bytes for group in self.plan.canonical.groups)

    @property
    def needs_less(self) -> bool:
        """Returns whether a restore needs less of some group than is stored: the group has windows, chunks or
        states.
        """
        return any(self.reach(group).kind is not GroupKind.FULL for group in range(self.num_groups))

    @property
    def padding(self) -> tuple[int, ...]:
        """Returns the bytes of the engine's memory that a block of each group leaves unused."""
        return tuple(self.plan.block_bytes - payload for payload in self.payloads)

    @property
    def token_bytes(self) -> float:
        """Returns the bytes of a token in all groups, if everything is stored."""
        sizes = (self.spec(group).block_size for group in range(self.num_groups))
        return float(sum(Fraction(payload, size) for payload, size in zip(self.payloads, sizes, strict=True)))

    def stored_blocks(self, tokens: int) -> tuple[int, ...]:
        """Counts a prompt's blocks of each group if all of them are stored; a partial block has no key."""
        return tuple(tokens // self.spec(group).block_size for group in range(self.num_groups))

    def needed_blocks(self, tokens: int) -> tuple[int, ...]:
        """Counts the blocks of each group that a restore of the prompt's whole blocks needs."""
        end = tokens // self.block_tokens * self.block_tokens
        return tuple(len(self.reach(group).blocks(end)) for group in range(self.num_groups))

    def clipped_blocks(self, tokens: int) -> tuple[int, ...]:
        """Counts them for engines that leave room for a boundary within a block: windows need one more."""
        end = tokens // self.block_tokens * self.block_tokens
        reaches = map(self.reach, range(self.num_groups))
        sliding = [len(clip(range(end // reach.block_size), reach.window, reach.block_size))
                   if reach.kind is GroupKind.SLIDING else 0 for reach in reaches]  # fmt: skip
        return tuple(blocks or needed for blocks, needed in zip(sliding, self.needed_blocks(tokens), strict=True))

    def descriptors_of(self, blocks: Sequence[int]) -> int:
        """Returns what the daemon counts as descriptors of a store or load of these numbers of blocks of each group."""
        return descriptors([group.refs for group in self.plan.canonical.groups], blocks)


def possible_layouts(rank: Rank, pack_size: int = 0, num_blocks: int = BLOCKS) -> tuple[list[Layout], dict[str, str]]:
    """Returns all layouts that this rank's layers can have, and the reasons against the others.

    `pack_size`: one more pack size to compare; 0: none. Raises UsageError for states that fit on no page.
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
    """Returns whether several attention layers can lie on one page, as long as a state."""
    return model.is_hybrid and len(set(model.kinds)) == 2


def per_layer(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup], num_blocks: int) -> Plan:
    """Makes a tensor for each slot, in the order of its layers' backend; the n-th layers of all groups overlay each
    other.
    """
    views: dict[str, tuple[View, ...]] = {}
    tensors = []
    for index, slot in enumerate(nth_layers(groups)):
        page = max(specs[layer].page_bytes for layer in slot)
        for layer in slot:
            spec = specs[layer]
            views[layer] = (
                (own_view(layer, spec, num_blocks, index),)
                if isinstance(spec, Attention) and spec.page_bytes == page
                else shared_views(layer, spec, num_blocks, Place(index, page))
            )
        tensors.append(TensorPlan((num_blocks, page)))
    return Plan(num_blocks, tuple(tensors), views, dict(specs), tuple(groups))
