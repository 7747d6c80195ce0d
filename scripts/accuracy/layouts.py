"""The memory of one engine in each layout: what its layers are, their tensors, and what is registered."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvoffloadd.client import GroupKind
from kvoffloadd.layout import (
    FLASHINFER_HND,
    TRITON_HND,
    TRITON_NHD,
    Attention,
    Backend,
    CanonicalCache,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Mamba,
    Plan,
    State,
    canonicalise,
    cross_layers,
    packed_pages,
    packed_rows,
)
from scripts.accuracy.model import (
    CONVOLUTION,
    FULL,
    HEAD_SIZE,
    HEADS,
    KINDS,
    NEAR,
    RECURRENCE,
    STATE_SIZE,
    TAPS,
    WIDTH,
    layer_name,
)
from scripts.accuracy.task import WINDOW

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

torch: Any = importlib.import_module("torch")

BLOCK = 8
"""Tokens."""

RECENT, STATE = State((TAPS, WIDTH), "bfloat16"), State((HEADS, STATE_SIZE), "float32")


@dataclass(frozen=True)
class Memory:
    """`layers`: of each its tensor, or the list of those that it has. `flat`: int8, every byte there is."""

    specs: Mapping[str, LayerSpec]
    groups: Sequence[LayerGroup]
    layers: Mapping[str, Any]
    cache: CanonicalCache
    flat: Sequence[Any]

    def wipe(self) -> None:
        """All that can be a number is none, so that whatever is read without having been loaded spoils an answer."""
        for one in self.flat:
            one.fill_(-1)


def described(backend: Backend | int, kernel_blocks: int = 1, *, windows: bool = True) -> dict[str, LayerSpec]:
    """The model's layers. `windows` False: those with one keep all their blocks, as in engines that have one kind of
    attention alone.
    """
    full = Attention(BLOCK, HEADS, HEAD_SIZE, "bfloat16", backend, kernel_blocks=kernel_blocks)
    kinds: dict[str, LayerSpec] = {
        FULL: full,
        NEAR: replace(full, kind=LayerKind.SLIDING, window=WINDOW) if windows else full,
        CONVOLUTION: Mamba(BLOCK, (RECENT,), padded_bytes=full.page_bytes),
        RECURRENCE: Mamba(BLOCK, (STATE,), padded_bytes=full.page_bytes),
    }
    return {layer_name(at): kinds[kind] for at, kind in enumerate(KINDS)}


def grouped(specs: Mapping[str, LayerSpec]) -> list[LayerGroup]:
    """Full attention, windows, states."""
    kinds = {kind: [name for name, spec in specs.items() if spec.group_kind is kind] for kind in GroupKind}
    return [LayerGroup(at, tuple(layers)) for at, layers in enumerate(filter(None, kinds.values()))]


def _apart(num_blocks: int) -> Memory:
    """K, V and each state in a tensor of its own."""
    specs = described(0)
    groups = grouped(specs)
    half = State((BLOCK, HEADS, HEAD_SIZE), "bfloat16")
    layers = {
        name: [
            torch.zeros(num_blocks, *one.shape, dtype=getattr(torch, one.dtype))
            for one in (spec.states if isinstance(spec, Mamba) else (half, half))
        ]
        for name, spec in specs.items()
    }
    flat = [one.view(-1).view(torch.int8) for layer in layers.values() for one in layer]
    return Memory(specs, groups, layers, canonicalise(layers, specs, groups), flat)


def _planned(plan: Plan) -> Memory:
    made = plan.allocate()
    return Memory(plan.specs, plan.groups, made.layers, made.cache, [one.view(-1) for one in made.tensors])


def _crossed(backend: Backend, kernel_blocks: int = 1) -> Callable[[int], Memory]:
    specs = described(backend, kernel_blocks)
    return lambda num_blocks: _planned(cross_layers(specs, grouped(specs), num_blocks))


def _rows(num_blocks: int) -> Memory:
    specs = described(FLASHINFER_HND)
    return _planned(packed_rows(specs, grouped(specs), num_blocks))


def _pages(num_blocks: int) -> Memory:
    """Layers on a page are of one kind."""
    return _planned(packed_pages(described(TRITON_HND, windows=False), 2, num_blocks))


LAYOUTS: dict[str, Callable[[int], Memory]] = {
    "by-layer": _apart,
    "cross-layer": _crossed(TRITON_NHD),
    "heads first": _crossed(TRITON_HND),
    "kernel blocks": _crossed(TRITON_NHD, 4),
    "packed-pages": _pages,
    "packed-rows": _rows,
}
"""Name -> memory for so many blocks."""
