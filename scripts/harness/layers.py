"""The memory of an engine's layers: of whatever layout, with each layer's tensors, and every byte there is."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffloadd.layout import HOST, Attention, CanonicalCache, LayerGroup, LayerSpec, Mamba, Plan, State, canonicalise


@dataclass(frozen=True)
class LayerMemory:
    """`layers`: of each its tensor, or the list of those that it has. `flat`: int8, every byte there is."""

    specs: Mapping[str, LayerSpec]
    groups: Sequence[LayerGroup]
    layers: Mapping[str, Any]
    cache: CanonicalCache
    flat: Sequence[Any]


def allocated(plan: Plan, device: str = HOST) -> LayerMemory:
    """Allocates the memory as planned."""
    made = plan.allocate(device)
    return LayerMemory(plan.specs, plan.groups, made.layers, made.cache, [one.view(-1) for one in made.tensors])


def apart(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup], num_blocks: int) -> LayerMemory:
    """Puts K, V and each state into its own torch tensor: no layout at all."""
    torch: Any = importlib.import_module("torch")
    layers = {
        name: [torch.zeros(num_blocks, *one.shape, dtype=getattr(torch, one.dtype)) for one in _tensors(spec)]
        for name, spec in specs.items()
    }
    flat = [one.view(-1).view(torch.int8) for layer in layers.values() for one in layer]
    return LayerMemory(specs, groups, layers, canonicalise(layers, specs, groups), flat)


def _tensors(spec: LayerSpec) -> Sequence[State]:
    """Returns the tensors of a block."""
    match spec:
        case Attention():
            return 2 * (State((spec.block_size, spec.num_kv_heads, spec.head_size), spec.dtype),)
        case Mamba():
            return spec.states
        case _:
            raise TypeError(f"what tensors would {spec} have?")
