"""The memory of one engine in each layout: what its layers are, their tensors, and what is registered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvoffloadd.client import GroupKind
from kvoffloadd.layout import (
    FLASHINFER_HND,
    TRITON_HND,
    TRITON_NHD,
    Attention,
    Backend,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Mamba,
    State,
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
from scripts.harness.layers import LayerMemory, allocated, apart

BLOCK = 8
"""Tokens."""

RECENT, STATE = State((TAPS, WIDTH), "bfloat16"), State((HEADS, STATE_SIZE), "float32")


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


def _apart(num_blocks: int) -> LayerMemory:
    specs = described(0)
    return apart(specs, grouped(specs), num_blocks)


def _crossed(backend: Backend, kernel_blocks: int = 1) -> Callable[[int], LayerMemory]:
    specs = described(backend, kernel_blocks)
    return lambda num_blocks: allocated(cross_layers(specs, grouped(specs), num_blocks))


def _rows(num_blocks: int) -> LayerMemory:
    specs = described(FLASHINFER_HND)
    return allocated(packed_rows(specs, grouped(specs), num_blocks))


def _pages(num_blocks: int) -> LayerMemory:
    """Layers on a page are of one kind."""
    return allocated(packed_pages(described(TRITON_HND, windows=False), 2, num_blocks))


LAYOUTS: dict[str, Callable[[int], LayerMemory]] = {
    "by-layer": _apart,
    "cross-layer": _crossed(TRITON_NHD),
    "heads first": _crossed(TRITON_HND),
    "kernel blocks": _crossed(TRITON_NHD, 4),
    "packed-pages": _pages,
    "packed-rows": _rows,
}
"""Maps a layout's name to what allocates memory for a number of blocks."""
