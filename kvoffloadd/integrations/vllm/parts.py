"""Determines which part of each key a rank holds, so that engines of several tensor-parallel sizes share their keys.

With vLLM's `canonical_layout` a part of a key is an equal range of the model's KV heads. vLLM's mapping of a layer
describes which bytes of the page of all heads a rank's page has. A part is cut out of that in canonical order, so that
it is the same bytes whatever the size of the engine. Without it, or where vLLM can't map pages, a rank's whole page is
its part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kvoffloadd.client import Ref, digest_layers
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.vllm.spans import Span
from kvoffloadd.layout import LayerKind, Share, share_of
from kvoffloadd.layout.geometry import Run, merged, refs_of
from kvoffloadd.model import Dtype, common_dtype, dtype_named

HEADS = "kvoffloadd_heads"
"""Key of extra_config under which `KVOffloaddConnector` puts how many KV heads the model has in all."""

CANONICAL_PARTS = "canonical_parts"
"""Key of extra_config: how many parts a key has with `canonical_layout`; as many as KV heads if it is not set."""

_MAPPED = (None, "LBHNC", "LBNHC")
"""KV cache layouts in which a layer's page is one run of bytes; None: vLLM has not named it."""

_Fragment = tuple[int, int, int]
"""Offset in the canonical page, offset in the rank's page, length: in bytes."""


def heads_of(vllm_config: Any) -> int:
    """Returns the model's KV heads, of all ranks together; 1 with MLA, which has a latent that every rank holds
    whole.
    """
    model = vllm_config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Facts about a rank's layers, by their names, derived from the engine's tensors. `repeats`: see `head_repeats`;
    `dtypes`: of their elements; `spans`: where their tensors lie. A layer may be missing: then it is not known.
    """

    repeats: Mapping[str, int] = field(default_factory=dict)
    dtypes: Mapping[str, Dtype] = field(default_factory=dict)
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Mapping[str, Any]) -> Self:
        """Derives the facts. `layers`: the engine's tensors; of a layer with states a list of them."""
        states = {
            layer: tensors if isinstance(tensors, list | tuple) else [tensors] for layer, tensors in layers.items()
        }
        dtypes = {layer: common_dtype(dtype_named(state.dtype) for state in found) for layer, found in states.items()}
        spans = {layer: [Span.of(state) for state in found] for layer, found in states.items()}
        return cls(head_repeats(layers), dtypes, spans)

    def named(self, refs: Sequence[Ref], layers: Sequence[str]) -> list[Ref]:
        """Returns the refs, which are of these layers, with the known facts about their bytes."""
        dtype, digest = common_dtype(self.dtypes.get(layer, "") for layer in layers), digest_layers(layers)
        return [replace(ref, dtype=dtype, layers=digest) for ref in refs]


def why_one_size(config: Any) -> str:
    """Returns why engines of other tensor-parallel sizes can't share with this one; empty if they can.

    `config`: vLLM's OffloadingConfig; the result is the same for the scheduler's and the ranks'.
    """
    parallel = config.parallel
    if not config.canonical_layout:
        return "canonical_layout is not set"
    if parallel.world_size != parallel.tp_size or parallel.dcp_size > 1:
        return "with pipeline or context parallelism a rank has other layers or tokens, not other heads alone"
    if config.kv_cache_layout not in _MAPPED:
        return f"vLLM does not map pages of the KV cache layout {config.kv_cache_layout}; it does those of LBHNC"
    if not parallel.is_parallelism_agnostic:
        return (
            "vLLM can't map the pages of some layer: it keeps states (Mamba and the like), is quantised by token and "
            f"head, or its KV heads can't be split over {parallel.tp_size} ranks"
        )
    return ""


def by_heads(config: Any) -> bool:
    """Returns whether a part is a range of heads, the same for engines of all tensor-parallel sizes.

    `config`: vLLM's OffloadingConfig.
    """
    return not why_one_size(config)


def check_scheduler(config: Any, derived: Any) -> None:
    """Checks that scheduler and ranks agree on the parts: with `canonical_layout` each computes them. If layers of one
    group differ, vLLM describes only the first one to its scheduler, which may be one that it can map: nothing would
    ever hit.

    `config`: a rank's OffloadingConfig; `derived`: the one that it would derive from the scheduler's description.
    Raises UsageError.
    """
    known, expected = ((by_heads(one), one.replicated_layout) for one in (config, derived))
    if config.canonical_layout and known != expected:
        raise UsageError(
            "canonical_layout: layers that share block tables differ, and vLLM can't map the pages of some; the "
            "scheduler does not know this, and would look for other parts than the ranks store; remove "
            "canonical_layout from kv_connector_extra_config, then engines of the same tensor-parallel size share"
        )


def share(config: Any) -> Share:
    """Returns this rank's share of each key. `config`: vLLM's OffloadingConfig; a scheduler's has rank 0.

    Raises UsageError for impossible parts, and where the number of heads is not known.
    """
    parallel, extra = config.parallel, config.extra_config
    parts = extra.get(CANONICAL_PARTS)
    if parts is not None and (isinstance(parts, bool) or not isinstance(parts, int) or parts < 1):
        raise UsageError(
            f"kv_connector_extra_config: {CANONICAL_PARTS} must be a number of parts above 0, not {parts!r}"
        )
    if parts is not None and not config.canonical_layout:
        raise UsageError(f'kv_connector_extra_config: {CANONICAL_PARTS} needs "canonical_layout": true')
    if config.canonical_layout and HEADS not in extra:
        raise UsageError(
            "canonical_layout needs KVOffloaddConnector: vLLM's own connector does not tell a spec the number of KV "
            "heads"
        )
    if by_heads(config):
        heads = int(extra[HEADS])
        try:
            return share_of(LayerKind.FULL, heads, parallel.rank, parallel.tp_size, parts or heads)
        except UsageError as error:
            raise UsageError(f"kv_connector_extra_config: {CANONICAL_PARTS}: {error}") from None
    if config.replicated_layout:
        # Without canonical_layout vLLM has rank 0 alone store, and sends no store to another one.
        return Share(1, 0, 1, writes=not config.canonical_layout or parallel.rank == 0)
    return Share(parallel.world_size, parallel.rank, 1, writes=True)


def head_repeats(layers: Mapping[str, Any]) -> dict[str, int]:
    """Returns how often a layer's page goes through all heads: once if they lie before tokens, else with every token,
    and for K and V apart where these are. The strides of its tensor show it.

    `layers`: the engine's tensors, as vLLM maps them: (block, head, token, content) or (block, K or V, token, head,
    content). Others are left out.
    """
    found = {}
    for layer, tensor in layers.items():
        if isinstance(tensor, list | tuple) or tensor.ndim not in (4, 5):
            continue
        head, others = (1, (2,)) if tensor.ndim == 4 else (3, (1, 2))
        repeats, strides = 1, tensor.stride()
        for dim in others:
            if strides[dim] >= strides[head]:
                repeats *= int(tensor.shape[dim])
        found[layer] = repeats
    return found


def held_refs(layers: Sequence[str], refs: Sequence[Any], facts: LayerFacts, held: Share) -> list[list[Ref]]:
    """Returns the refs of each part that the rank holds, in canonical order, layer after layer.

    `layers`, `refs`: of a group, vLLM's CanonicalKVCacheRefs. Raises UsageError, naming the layer, where a page can't
    be cut into parts.
    """
    if len(layers) != len(refs):
        raise _uncut(", ".join(layers), "vLLM moves the pages of all layers as one")
    parts: list[list[Ref]] = [[] for _ in range(held.held)]
    # A layer that uses another one's cache adds nothing but its name.
    pages: dict[tuple[int, Any], list[str]] = {}
    for layer, ref in zip(layers, refs, strict=True):
        pages.setdefault((ref.tensor_idx, ref.mapping), []).append(layer)
    for (tensor, mapping), names in pages.items():
        layer = names[0]
        if mapping is None or not mapping.parallelism_agnostic:
            raise _uncut(layer, "vLLM can't tell which heads its bytes belong to")
        known = facts.repeats.get(layer, 1 if held.parts == 1 else 0)
        for part, runs in zip(parts, _cut(layer, mapping, known, held), strict=True):
            part += facts.named(refs_of(tensor, runs), names)
    return parts


def whole_refs(layers: Sequence[str], refs: Sequence[Any], facts: LayerFacts) -> list[Ref]:
    """Returns the refs of whole pages. Layers of a group may be named with the same bytes (a packed row): those are
    moved once.

    `layers`, `refs`: see `held_refs`; a single ref is of all layers.
    """
    of_all = len(refs) == 1
    pages: dict[tuple[int, int], list[str]] = {}
    for index, ref in enumerate(refs):
        names = layers if of_all else layers[index : index + 1] if len(layers) == len(refs) else ()
        pages.setdefault((ref.tensor_idx, ref.page_size_bytes), []).extend(names)
    return [named for (tensor, size), names in pages.items() for named in facts.named([Ref(tensor, 0, size)], names)]


def _cut(layer: str, mapping: Any, repeats: int, held: Share) -> list[list[Run]]:
    """Returns where the held parts lie in the rank's page, each in canonical order."""
    page, pieces = mapping.canonical_page_size_bytes, repeats * held.parts
    if not pieces or page % pieces:
        raise _uncut(layer, f"a page of {page} bytes is not {held.parts} equal parts")
    piece = page // pieces
    if held.held * repeats * piece != mapping.local_page_size_bytes:
        has = f"{mapping.local_page_size_bytes} of the {page} bytes of a page"
        raise _uncut(layer, f"a rank with {held.held} of {held.parts} parts has {has}")
    fragments = sorted(_fragments(mapping.runs))
    found = []
    for part in range(held.part, held.part + held.held):
        starts = range(part * piece, page, held.parts * piece)
        runs = [run for start in starts for run in _local(layer, fragments, start, start + piece)]
        if runs != sorted(runs):
            raise _uncut(layer, f"its bytes of part {part} are not in canonical order")
        found.append(merged(runs))
    return found


def _fragments(runs: Sequence[Any]) -> Iterator[_Fragment]:
    """Yields the fragments of `runs`, vLLM's CopyRuns."""
    for run in runs:
        for index in range(run.num_fragments):
            canonical = run.canonical_offset + index * run.canonical_stride
            yield canonical, run.local_offset + index * run.local_stride, run.fragment_size


def _local(layer: str, fragments: Sequence[_Fragment], start: int, end: int) -> Iterator[Run]:
    """Yields where bytes `start` to `end` of the canonical page lie in the rank's page."""
    position = start
    while position < end:
        found = bisect_right(fragments, position, key=lambda fragment: fragment[0]) - 1
        canonical, local, length = fragments[max(found, 0)]
        if not canonical <= position < canonical + length:
            raise _uncut(layer, f"byte {position} of its canonical page is not on this rank, which should have it")
        size = min(end, canonical + length) - position
        yield local + position - canonical, size
        position += size


def _uncut(layer: str, why: str) -> UsageError:
    return UsageError(
        f"canonical_layout: layer {layer} can't be cut by heads: {why}; remove canonical_layout from "
        "kv_connector_extra_config, then engines of the same tensor-parallel size share"
    )
