"""A name for how payloads are laid out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.backend import Backend
from kvoffloadd.layout.spec import LayerGroup, LayerSpec, Mamba


def fingerprint(
    specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup], slots: Sequence[Sequence[Sequence[str]]] = ()
) -> str:
    """Hex name of how payloads are laid out, for a namespace's `layout`: equal sizes alone must never hit.

    It carries blocks, orders in memory, kernel blocks, dtypes, groups and `slots` (of each tensor the layers of each
    slot: what shares a tensor, and packs). Numbers of heads are not in it: they differ with the tensor-parallel size,
    which a namespace has a field of its own for. Raises UsageError for a backend whose order is not known.
    """
    said: list[object] = [tuple(tuple(tuple(slot) for slot in tensor) for tensor in slots)]
    for group in groups:
        said.append(("group", group.group, group.blocks_per_key))
        said += [(layer, *_laid_out(layer, specs[layer])) for layer in group.layers]
    return hashlib.blake2b(repr(said).encode(), digest_size=16).hexdigest()


def _laid_out(layer: str, spec: LayerSpec) -> tuple[object, ...]:
    if isinstance(spec, Mamba):
        return ("mamba", spec.block_size, tuple((state.shape, state.dtype) for state in spec.states))
    if not isinstance(spec.backend, Backend):
        raise UsageError(f"layer {layer}: its backend's order must be known to tell payloads apart")
    return (
        str(spec.kind),
        spec.window,
        spec.block_size,
        spec.head_size,
        spec.dtype,
        spec.kernel_blocks,
        spec.backend.memory,
        spec.backend.with_layers,
    )
