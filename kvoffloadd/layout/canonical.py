"""Converts an engine's views to the daemon's form: canonical tensors, each listed once, and the groups' refs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvoffloadd.client import Group, digest_layers
from kvoffloadd.errors import UsageError
from kvoffloadd.layout.backend import HEAD, Backend
from kvoffloadd.layout.geometry import Rows, RowSegment, Run, View, merged, refs_of, segments
from kvoffloadd.layout.spec import Attention, LayerGroup, LayerSpec, Mamba, Opaque, check_groups, item_bytes
from kvoffloadd.model import Dtype, Ref, common_dtype, dtype_named


@dataclass(frozen=True, slots=True)
class Canonical:
    """The result of a conversion. `rows`: the canonical tensors. `groups`: ready to register, one for each part that
    the rank holds; refs in the order of the rows' bytes, neighbouring layers merged, no padding. `layers`: the refs of
    each layer alone.
    """

    rows: tuple[Rows, ...]
    groups: tuple[Group, ...]
    layers: Mapping[str, tuple[Ref, ...]]


def canonical_geometry(
    views: Mapping[str, Sequence[View]],
    specs: Mapping[str, LayerSpec],
    groups: Sequence[LayerGroup],
    memory_bytes: Mapping[int, int],
) -> Canonical:
    """Converts `views`: one for each layer, or for each of its states; `memory_bytes`: size of the memory they lie in.

    Raises UsageError, naming the layer, its shape and strides, for layers that can't be expressed without a copy.
    """
    check_groups(specs, groups)
    if views.keys() != specs.keys():
        raise UsageError(f"views and specs are not of the same layers: {sorted(views.keys() ^ specs.keys())}")
    found: list[RowSegment] = []
    for layer, spec in specs.items():
        found += _layer_segments(layer, spec, views[layer])
    clusters = _clusters(found)
    rows = _whole_rows(clusters, memory_bytes)
    runs = _runs_by_layer(found, rows)
    refs = {layer: tuple(_refs(by_tensor.items())) for layer, by_tensor in runs.items()}
    known = [
        _group(group, group.part + index, specs, _held_runs(group, index, specs, views, rows) or runs, rows)
        for group in groups
        for index in range(group.held)
    ]
    return Canonical(tuple(rows), tuple(known), refs)


def _layer_segments(layer: str, spec: LayerSpec, views: Sequence[View]) -> list[RowSegment]:
    if isinstance(spec, Mamba):
        expected = [(state.shape, item_bytes(state.dtype)) for state in spec.states]
        there = [(view.shape[1:], item_bytes(view.dtype)) for view in views]
        if expected != there:
            described = ", ".join(str(view) for view in views)
            raise UsageError(f"layer {layer}: states {described} are not those of {spec.states}, blocks first")
        return [segment for view in views for segment in segments(layer, view, 0, 1)]
    if isinstance(spec, Attention):
        _check_attention(layer, spec, views)
    else:
        _check_bytes(layer, spec, views)
    return [segment for view in views for segment in segments(layer, view, spec.block_dim, spec.kernel_blocks)]


def _held_runs(
    group: LayerGroup,
    index: int,
    specs: Mapping[str, LayerSpec],
    views: Mapping[str, Sequence[View]],
    rows: Sequence[Rows],
) -> dict[str, dict[int, list[Run]]]:
    """Returns the runs of the heads that are the part at this place among those that the rank holds; none: it holds one
    part.
    """
    if group.held == 1:
        return {}
    found: list[RowSegment] = []
    for layer in group.layers:
        spec = specs[layer]
        if not isinstance(spec, Attention) or not isinstance(spec.backend, Backend) or HEAD not in spec.backend.shape:
            raise UsageError(f"layer {layer}: {group.held} parts of it are held, but where its heads lie is not known")
        if spec.num_kv_heads % group.held:
            raise UsageError(f"layer {layer}: {spec.num_kv_heads} heads are not {group.held} equal parts")
        heads, dim = spec.num_kv_heads // group.held, spec.backend.shape.index(HEAD)
        for view in views[layer]:
            found += segments(layer, view.narrow(dim, index * heads, heads), spec.block_dim, spec.kernel_blocks)
    return _runs_by_layer(found, rows)


def _check_attention(layer: str, spec: Attention, views: Sequence[View]) -> None:
    """Checks that the layer has one tensor, as the backend indexes it; where the backend is not known, K and V may also
    be in one each.
    """
    described = " and ".join(map(str, views))
    known = isinstance(spec.backend, Backend)
    if len(views) != 1 and (known or len(views) != 2):
        raise UsageError(f"layer {layer}: {described}: {len(views)} tensors, where its spec describes one")
    _check_bytes(layer, spec, views)
    count = views[0].shape[spec.block_dim]
    expected = spec.shape(count // spec.kernel_blocks)
    if expected is not None and expected != views[0].shape and count % spec.kernel_blocks == 0:
        raise UsageError(f"layer {layer}: {described} is not of the backend's shape {expected}")


def _check_bytes(layer: str, spec: Attention | Opaque, views: Sequence[View]) -> None:
    """Checks that the layer's tensors count blocks in the spec's dimension, and have its bytes of each."""
    described = " and ".join(map(str, views))
    if not all(0 <= spec.block_dim < len(view.shape) for view in views):
        raise UsageError(f"layer {layer}: {described} has no dimension {spec.block_dim} that counts blocks")
    per_block = sum(_bytes_behind(view, spec.block_dim) for view in views) * spec.kernel_blocks
    wrong_items = isinstance(spec, Attention) and {item_bytes(view.dtype) for view in views} != {item_bytes(spec.dtype)}
    if per_block != spec.payload_bytes or wrong_items:
        of_dtype = f" of {spec.dtype}" if isinstance(spec, Attention) else ""
        raise UsageError(
            f"layer {layer}: {described} has {per_block} bytes a block, its spec says {spec.payload_bytes}{of_dtype}"
        )


def _bytes_behind(view: View, block_dim: int) -> int:
    sizes = (size for dim, size in enumerate(view.shape) if dim != block_dim)
    return item_bytes(view.dtype) * math.prod(sizes)


def _clusters(found: Sequence[RowSegment]) -> list[list[RowSegment]]:
    """Gathers the segments of one tensor, in the order in which layers first use them.

    Rows of different blocks have no bytes in common then. Within a block, layers of different groups may overlap,
    whatever their kernel blocks: a block id has one group at a time. Those of one group may not (`_check_apart`).
    """
    first = {id(segment): index for index, segment in enumerate(found)}
    clusters: list[list[RowSegment]] = []
    by_memory = sorted(
        found, key=lambda item: (item.rows.memory, item.rows.num_blocks, item.rows.stride_bytes, item.rows.offset)
    )
    for segment in by_memory:
        if clusters and _fits(clusters[-1], segment):
            clusters[-1].append(segment)
        else:
            clusters.append([segment])
    return sorted(clusters, key=lambda cluster: min(first[id(segment)] for segment in cluster))


def _fits(cluster: Sequence[RowSegment], segment: RowSegment) -> bool:
    """Returns whether the segment lies in the rows that the cluster has begun."""
    head, rows = cluster[0].rows, segment.rows
    same = (head.memory, head.num_blocks, head.stride_bytes) == (rows.memory, rows.num_blocks, rows.stride_bytes)
    return same and rows.offset + rows.page_bytes <= head.offset + head.stride_bytes


def _whole_rows(clusters: Sequence[Sequence[RowSegment]], memory_bytes: Mapping[int, int]) -> list[Rows]:
    """Returns one tensor for each cluster, its rows as long as memory allows, so that padding is part of them."""
    tight = []
    for cluster in clusters:
        head = cluster[0].rows
        page = max(segment.rows.offset + segment.rows.page_bytes for segment in cluster) - head.offset
        tight.append(Rows(head.memory, head.offset, head.num_blocks, page, head.stride_bytes))
    ordered = sorted(range(len(tight)), key=lambda index: (tight[index].memory, tight[index].offset))
    whole = list(tight)
    for index, behind in zip(ordered, [*ordered[1:], None], strict=True):
        rows = tight[index]
        limit = memory_bytes[rows.memory]
        if rows.end > limit:
            raise UsageError(f"layer {clusters[index][0].layer} extends beyond its memory of {limit} bytes")
        if behind is not None and tight[behind].memory == rows.memory:
            limit = tight[behind].offset
            if rows.end > limit:
                raise UsageError(
                    f"layers {clusters[index][0].layer} and {clusters[behind][0].layer} interleave, but not in rows of "
                    f"one length: blocks are {rows.stride_bytes} and {tight[behind].stride_bytes} bytes apart; "
                    "pad pages to one size, or give them separate memory"
                )
        if rows.end - rows.page_bytes + rows.stride_bytes <= limit:
            whole[index] = Rows(rows.memory, rows.offset, rows.num_blocks, rows.stride_bytes, rows.stride_bytes)
    return whole


def _runs_by_layer(found: Sequence[RowSegment], rows: Sequence[Rows]) -> dict[str, dict[int, list[Run]]]:
    """Returns for each layer its runs in each tensor."""
    runs: dict[str, dict[int, list[Run]]] = {}
    for segment in found:
        tensor = _tensor_of(segment, rows)
        start = segment.rows.offset - rows[tensor].offset
        placed = [(start + offset, length) for offset, length in segment.runs]
        runs.setdefault(segment.layer, {}).setdefault(tensor, []).extend(placed)
    for layer, by_tensor in runs.items():
        for tensor, placed in by_tensor.items():
            by_tensor[tensor] = sorted(placed)
            _check_apart([(layer, run) for run in placed])
    return runs


def _tensor_of(segment: RowSegment, rows: Sequence[Rows]) -> int:
    """Returns the tensor that holds the segment, found by its first row, since first rows do not overlap."""
    begin, end = segment.rows.offset, segment.rows.offset + segment.rows.page_bytes
    return next(
        index
        for index, candidate in enumerate(rows)
        if candidate.memory == segment.rows.memory
        and candidate.offset <= begin
        and end <= candidate.offset + candidate.page_bytes
    )


def _refs(by_tensor: Iterable[tuple[int, Sequence[Run]]]) -> list[Ref]:
    return [ref for tensor, runs in sorted(by_tensor) for ref in refs_of(tensor, runs)]


def _group(
    group: LayerGroup,
    part: int,
    specs: Mapping[str, LayerSpec],
    runs: Mapping[str, Mapping[int, list[Run]]],
    rows: Sequence[Rows],
) -> Group:
    by_tensor: dict[int, list[tuple[str, Run]]] = {}
    seen: set[tuple[int, tuple[Run, ...]]] = set()
    for layer in group.layers:
        for tensor, placed in runs[layer].items():
            # A layer that uses another one's cache adds nothing to the payload.
            if (tensor, tuple(placed)) not in seen:
                by_tensor.setdefault(tensor, []).extend((layer, run) for run in placed)
            seen.add((tensor, tuple(placed)))
    if len({rows[tensor].num_blocks for tensor in by_tensor}) > 1:
        counts = {layer: rows[next(iter(runs[layer]))].num_blocks for layer in group.layers}
        raise UsageError(f"group {group.group}: its layers differ in how many blocks they have: {counts}")
    for placed_by in by_tensor.values():
        _check_apart(placed_by)
    spec = specs[group.layers[0]]
    tokens_per_key = spec.block_size * group.blocks_per_key
    refs = _refs((tensor, merged([run for _, run in placed])) for tensor, placed in by_tensor.items())
    # Which layers are neighbours, and one ref, depends on how many parts the rank holds: all refs name all layers.
    dtype, digest = common_dtype(_dtype(specs[layer]) for layer in group.layers), digest_layers(_in_order(by_tensor))
    return Group(
        group=group.group,
        kind=spec.group_kind,
        tokens_per_key=tokens_per_key,
        refs=tuple(replace(ref, dtype=dtype, layers=digest) for ref in refs),
        window_keys=spec.window_keys(tokens_per_key),
        blocks_per_key=group.blocks_per_key,
        parts=group.parts,
        part=part,
    )


def _in_order(by_tensor: Mapping[int, Sequence[tuple[str, Run]]]) -> list[str]:
    """Returns the layers in the order in which a payload has the first bytes of each."""
    placed = [(tensor, run, layer) for tensor, runs in by_tensor.items() for layer, run in runs]
    return list(dict.fromkeys(layer for _, _, layer in sorted(placed)))


def _dtype(spec: LayerSpec) -> Dtype:
    """Returns the dtype of a layer's elements."""
    if isinstance(spec, Mamba):
        return common_dtype(dtype_named(state.dtype) for state in spec.states)
    return dtype_named(spec.dtype) if isinstance(spec, Attention) else ""


def _check_apart(placed: Sequence[tuple[str, Run]]) -> None:
    """Checks that no two runs of a block overlap: one group's layers can't use the same bytes."""
    ordered = sorted(placed, key=lambda item: item[1])
    for (one, (offset, length)), (other, (begin, size)) in itertools.pairwise(ordered):
        if offset + length > begin:
            end = min(offset + length, begin + size)
            raise UsageError(
                f"layers {one} and {other} of one group overlap in the same block: bytes {begin} to {end} "
                "of its row belong to both; layers of a group need separate slots, and equal kernel blocks where they "
                "share a tensor"
            )
