"""Plans memory for the layers of an engine that lets us allocate: which tensors, and where in them each layer lies."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffloadd.client import SharedTensor
from kvoffloadd.layout.cache import CanonicalCache, canonicalise
from kvoffloadd.layout.canonical import Canonical, canonical_geometry
from kvoffloadd.layout.geometry import View
from kvoffloadd.layout.spec import LayerGroup, LayerSpec, Mamba
from kvoffloadd.layout.torchviews import view_over

HOST = "host"
"""The device of sealed shared memory: daemons of any uid can register memory that is allocated there."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A contiguous int8 tensor. `shape`: (num_blocks, ...), its dimensions outermost in memory first."""

    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Returns the bytes of the whole tensor."""
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Plan:
    """Tensors, and views of them for every layer: one for an attention layer, one for each state of a Mamba layer.

    `canonical`: rows and refs, without any memory. Raises UsageError where layers would overlap.
    """

    num_blocks: int
    tensors: tuple[TensorPlan, ...]
    views: Mapping[str, tuple[View, ...]]
    specs: Mapping[str, LayerSpec]
    groups: tuple[LayerGroup, ...]
    canonical: Canonical = field(init=False)

    def __post_init__(self) -> None:
        sizes = {index: tensor.bytes for index, tensor in enumerate(self.tensors)}
        found = canonical_geometry(self.views, self.specs, self.groups, sizes)
        object.__setattr__(self, "canonical", found)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all tensors."""
        return sum(tensor.bytes for tensor in self.tensors) // self.num_blocks

    def allocate(self, device: str = HOST) -> Allocated:
        """Allocates zeros on a torch device ("cpu", "cuda:1", "meta"), or in sealed shared memory ("host"). Imports
        torch.

        Raises OSError, LimitError or torch's own error where there is not enough memory.
        """
        torch = importlib.import_module("torch")
        shared: list[SharedTensor] = []
        tensors: list[Any] = []
        for plan in self.tensors:
            if device == HOST:
                shared.append(SharedTensor.allocate(plan.shape[0], plan.bytes // plan.shape[0]))
                tensors.append(shared[-1].torch().view(plan.shape))
            else:
                tensors.append(torch.zeros(plan.shape, dtype=torch.int8, device=device))
        flat = [tensor.view(-1) for tensor in tensors]
        layers: dict[str, Any] = {}
        for layer, spec in self.specs.items():
            made = [view_over(flat[view.memory], view) for view in self.views[layer]]
            layers[layer] = made if isinstance(spec, Mamba) else made[0]
        cache = canonicalise(layers, self.specs, self.groups, owner=tuple(shared))
        return Allocated(self, tuple(tensors), layers, cache)


@dataclass(frozen=True)
class Allocated:
    """The memory of a plan. `tensors`: torch.int8, contiguous, as planned. `layers`: for each layer the tensor that its
    backend takes, or the list of its states' tensors: views of `tensors`. `cache`: the same memory in canonical form,
    ready to register.
    """

    plan: Plan
    tensors: tuple[Any, ...]
    layers: Mapping[str, Any]
    cache: CanonicalCache
