"""Which layers share block tables, as vLLM's hybrid cache manager forms its groups."""

from __future__ import annotations

from collections.abc import Mapping

from kvoffloadd.layout import LayerGroup, LayerSpec

ABOUT_EQUAL = 1.5
"""Kinds whose numbers of layers differ by less than this factor get groups of the larger one: a few unused slots cost
less than a second group of each kind.
"""


def form_groups(specs: Mapping[str, LayerSpec]) -> tuple[LayerGroup, ...]:
    """Groups of equal specs, each of as many layers as the smallest kind has; a group's n-th layer is on slot n.

    Groups come in the order in which the model first has their kind. A kind of several groups is dealt out in turn, so
    that the stages of a pipeline have some of each.
    """
    kinds: dict[LayerSpec, list[str]] = {}
    for layer, spec in specs.items():
        kinds.setdefault(spec, []).append(layer)
    size = slots_of([len(layers) for layers in kinds.values()])
    dealt: list[tuple[str, ...]] = []
    for layers in kinds.values():
        count = -(-len(layers) // size)
        dealt += [tuple(layers[at::count]) for at in range(count)]
    return tuple(LayerGroup(at, layers) for at, layers in enumerate(dealt))


def slots_of(counts: list[int]) -> int:
    """Layers of a group, for kinds with so many layers each."""
    return max(counts) if max(counts) < ABOUT_EQUAL * min(counts) else min(counts)
