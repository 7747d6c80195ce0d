"""A KV cache in canonical form, over an engine's own memory, ready to be registered."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffloadd.client import GpuTensor, Group, KvCache, SharedTensor, Timeline
from kvoffloadd.client.memory.tensor import CanonicalTensor
from kvoffloadd.errors import UsageError
from kvoffloadd.layout.canonical import canonical_geometry
from kvoffloadd.layout.spec import LayerGroup, LayerSpec
from kvoffloadd.layout.torchviews import Storages, device_type
from kvoffloadd.model import Ref


@dataclass(frozen=True)
class CanonicalCache:
    """Canonical tensors and groups of refs.

    `tensors`: torch.int8 (num_blocks, page_bytes), row stride >= page_bytes, all on one device. An engine that already
    has such tensors constructs this itself; `canonicalise` makes it from layers. `owner`: keeps the memory shared.

    Raises UsageError for tensors of another form, and refs that leave their pages or overlap within a group.
    """

    tensors: tuple[Any, ...]
    groups: tuple[Group, ...]
    owner: object = None

    def __post_init__(self) -> None:
        for index, tensor in enumerate(self.tensors):
            strides = tuple(tensor.stride())
            if str(tensor.dtype) != "torch.int8" or tensor.ndim != 2 or strides[1] != 1:
                raise UsageError(
                    f"tensor {index}: {tensor.dtype} {tuple(tensor.shape)} with strides {strides} is not canonical: "
                    "torch.int8 (num_blocks, page_bytes), bytes of a page side by side"
                )
            if tensor.shape[0] > 1 and strides[0] < tensor.shape[1]:
                raise UsageError(f"tensor {index}: rows of {tensor.shape[1]} bytes, {strides[0]} apart, overlap")
        for group in self.groups:
            group.check_refs([tensor.shape[1] for tensor in self.tensors])
            _check_apart(group.group, group.refs)

    def kv_cache(self, timelines: Sequence[Timeline] = ()) -> KvCache:
        """Returns the argument of `Client.register`. CPU tensors that are not shared yet are moved to shared memory in
        place.

        Raises UsageError where memory can't be shared, as SharedTensor.adopt and GpuTensor.adopt do.
        """
        on = device_type(self.tensors)
        if on not in ("cpu", "cuda"):
            raise UsageError(f"tensors on {on} have no memory that could be registered; use cpu or cuda")
        adopt = GpuTensor.adopt if on == "cuda" else SharedTensor.adopt
        shared: list[CanonicalTensor] = [adopt(tensor) for tensor in self.tensors]
        return KvCache(shared, self.groups, timelines)


def _check_apart(group: int, refs: Sequence[Ref]) -> None:
    """Checks that no byte of a row is named twice. Raises UsageError."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for ref in refs:
        runs = [ref.offset + index * ref.stride for index in range(ref.count)]
        taken.setdefault(ref.tensor, []).extend((run, run + ref.length) for run in runs)
    for tensor, runs_of in taken.items():
        ordered = sorted(runs_of)
        for one, other in itertools.pairwise(ordered):
            if one[1] > other[0]:
                raise UsageError(f"group {group}: bytes {other[0]} to {one[1]} of tensor {tensor} are named twice")


def canonicalise(
    layers: Mapping[str, Any], specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup], owner: object = None
) -> CanonicalCache:
    """Makes a canonical cache of `layers`: for each the tensor that its backend uses; the list of its states' tensors;
    or of its K and V, where an engine keeps those apart. Copies nothing.

    Raises UsageError, naming the layer, its shape and strides, for layers that can't be expressed without a copy.
    """
    storages = Storages()
    views = {
        layer: tuple(
            storages.view(layer, state) for state in (tensor if isinstance(tensor, list | tuple) else [tensor])
        )
        for layer, tensor in layers.items()
    }
    found = canonical_geometry(views, specs, groups, storages.sizes)
    return CanonicalCache(tuple(storages.rows(rows) for rows in found.rows), found.groups, owner)
