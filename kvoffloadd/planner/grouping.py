"""Decides which layers share block tables, as vLLM's hybrid cache manager forms its groups."""

from __future__ import annotations

from collections.abc import Mapping

from kvoffloadd.layout import LayerGroup, LayerSpec
from kvoffloadd.model import GroupKind

ABOUT_EQUAL = 1.5
"""Kinds with numbers of layers that differ by less than this factor get groups of the larger one: a few unused slots
cost less than a second group of each kind.
"""


def form_groups(specs: Mapping[str, LayerSpec]) -> tuple[LayerGroup, ...]:
    """Forms groups of equal specs, each with as many layers as the smallest kind has; a group's n-th layer is on slot
    n.

    Groups come in the order in which the model first has their kind. A kind of several groups is dealt out in turn, so
    that the stages of a pipeline have some of each.

    Layers that need the same of a prefix share a group whatever their pages' sizes, where these differ.
    """
    alike: dict[tuple[GroupKind, int, int], dict[int, list[str]]] = {}
    for layer, spec in specs.items():
        need = (spec.group_kind, getattr(spec, "window", 0), spec.block_size)
        alike.setdefault(need, {}).setdefault(spec.page_bytes, []).append(layer)
    if any(len(pages) > 1 for pages in alike.values()):
        return _groups_of_pages(list(alike.values()), list(specs))
    kinds: dict[LayerSpec, list[str]] = {}
    for layer, spec in specs.items():
        kinds.setdefault(spec, []).append(layer)
    size = slots_of([len(layers) for layers in kinds.values()])
    dealt: list[tuple[str, ...]] = []
    for layers in kinds.values():
        count = -(-len(layers) // size)
        dealt += [tuple(layers[index::count]) for index in range(count)]
    return _numbered(dealt)


def _numbered(groups: list[tuple[str, ...]]) -> tuple[LayerGroup, ...]:
    return tuple(LayerGroup(number, layers) for number, layers in enumerate(groups))


def _groups_of_pages(kinds: list[dict[int, list[str]]], order: list[str]) -> tuple[LayerGroup, ...]:
    """Forms the groups of kinds. `kinds`: the layers of each kind, by the size of their pages. `order`: all layers.

    A kind with as many layers of each page size is a pattern that repeats, and is dealt out in groups of some repeats.
    Kinds of one size are split down to the longest pattern of several sizes; other kinds are one group.
    """
    patterns = [pages for pages in kinds if len({len(layers) for layers in pages.values()}) == 1]
    longest = max((_repeats(pages) for pages in patterns if len(pages) > 1), default=0)
    size = _least_waste([_repeats(pages) for pages in patterns], longest) if longest else 0
    dealt: list[tuple[str, ...]] = []
    for pages in kinds:
        count = -(-_repeats(pages) // size) if size and pages in patterns else 1
        for index in range(count):
            members = {layer for layers in pages.values() for layer in layers[index::count]}
            dealt.append(tuple(layer for layer in order if layer in members))
    return _numbered(dealt)


def _repeats(pages: dict[int, list[str]]) -> int:
    return max(map(len, pages.values()))


def _least_waste(counts: list[int], least: int) -> int:
    """Returns the size, from `least` on, for which the counts need the fewest additional slots; among equals, the
    largest.
    """
    sizes = range(least, max(counts) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def slots_of(counts: list[int]) -> int:
    """Returns the layers of a group, for kinds with these numbers of layers."""
    return max(counts) if max(counts) < ABOUT_EQUAL * min(counts) else min(counts)
