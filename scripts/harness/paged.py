"""Layers' tensors as a model's code uses them: by block, token and head, whatever their order in memory."""

from __future__ import annotations

from typing import Any

from kvoffloadd.layout import Attention, Backend


def keys_and_values(layer: Any, spec: Attention) -> tuple[Any, Any]:
    """The layer's K and V, as its backend has them, seen as (kernel block, token, head, dim). `layer`: its tensor, or
    the list of its K and V.
    """
    if not isinstance(spec.backend, Backend):
        keys, values = layer
        return keys, values
    axes = spec.backend.shape
    if "pair" in axes:
        axes = tuple("dim" if axis == "pair" else axis for axis in axes)
        both = layer.split(spec.head_size, axes.index("dim"))
    else:
        both = layer.unbind(axes.index("kv"))
        axes = tuple(axis for axis in axes if axis != "kv")
    keys, values = (one.permute([axes.index(axis) for axis in ("block", "token", "head", "dim")]) for one in both)
    return keys, values
