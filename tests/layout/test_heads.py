"""Parts of several tensor-parallel sizes: pure geometry, and bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.memory.composition import Composition
from kvoffloadd.errors import UsageError
from kvoffloadd.layout import (
    FLASH_HND,
    FLASH_NHD,
    LATENT,
    PACKED_HND,
    PACKED_NHD,
    TRITON_HND,
    TRITON_NHD,
    Attention,
    Backend,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Opaque,
    Share,
    View,
    canonical_geometry,
    canonicalise,
    cross_layers,
    packed_pages,
    share_of,
)
from kvoffloadd.model import Ref
from tests.layout.models import gpt_oss, layer, mamba, named, one_group
from tests.layout.oracle import gather, places, put_heads, rows_of

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")

OLD = Backend("old-flash", FLASH_NHD.shape, FLASH_NHD.memory)


def parts_of(backend: Backend, ranks: int, parts: int) -> list[tuple[Ref, ...]]:
    """Refs of the parts that the last of gpt-oss-20b's ranks holds of its first group."""
    specs, groups = gpt_oss(backend, tensor_parallel=ranks)
    share = share_of(LayerKind.FULL, 8, ranks - 1, ranks, parts)
    held = [replace(group, parts=share.parts, part=share.part, held=share.held) for group in groups]
    found = [group for group in cross_layers(specs, held, 3).canonical.groups if group.group == 0]
    assert [group.part for group in found] == list(range(share.part, parts))
    return [places(group) for group in found]


def test_gpt_oss_heads_first() -> None:
    """What ranks of four load of ranks of two is one run of 98,304 bytes a block; a single one loads two of 196,608."""
    assert parts_of(TRITON_HND, 2, 4) == [(Ref(0, 0, 98304),), (Ref(0, 98304, 98304),)]
    assert parts_of(TRITON_HND, 4, 4) == [(Ref(0, 0, 98304),)]
    assert parts_of(TRITON_HND, 1, 2) == [(Ref(0, 0, 196608),), (Ref(0, 196608, 196608),)]


def test_gpt_oss_tokens_first() -> None:
    """384 runs of 256 bytes a block."""
    for (ref,) in parts_of(FLASH_NHD, 2, 4):
        assert (ref.count, ref.length) == (384, 256)


@pytest.mark.parametrize(
    ("kind", "heads", "ranks", "expected"),
    [
        (LayerKind.FULL, 8, 2, [Share(2, 0, 1, True), Share(2, 1, 1, True)]),
        (
            LayerKind.SLIDING, 2, 4,
            [Share(2, 0, 1, True), Share(2, 0, 1, False), Share(2, 1, 1, True), Share(2, 1, 1, False)],
        ),
        (LayerKind.MLA, 1, 3, [Share(1, 0, 1, True), Share(1, 0, 1, False), Share(1, 0, 1, False)]),
    ],
)  # fmt: skip
def test_what_a_rank_has(kind: LayerKind, heads: int, ranks: int, expected: list[Share]) -> None:
    assert [share_of(kind, heads, rank, ranks) for rank in range(ranks)] == expected


def test_what_ranks_of_several_engines_have() -> None:
    """The engines have 8 heads in 4 parts."""
    assert share_of(LayerKind.FULL, 8, 0, 1, 4) == Share(4, 0, 4, True)
    assert [share_of(LayerKind.FULL, 8, rank, 2, 4) for rank in (0, 1)] == [
        Share(4, 0, 2, True),
        Share(4, 2, 2, True),
    ]
    assert share_of(LayerKind.FULL, 8, 3, 4, 4) == Share(4, 3, 1, True)
    assert share_of(LayerKind.FULL, 2, 3, 4, 2) == Share(2, 1, 1, False)
    assert share_of(LayerKind.MLA, 1, 1, 2, 4) == Share(1, 0, 1, False)
    for heads, ranks, parts in ((8, 8, 4), (8, 2, 3), (8, 1, 16), (8, 4, 2), (2, 4, 1)):
        with pytest.raises(UsageError, match=f"{heads} heads over {ranks} ranks can't be {parts} parts"):
            share_of(LayerKind.FULL, heads, 0, ranks, parts)


def test_what_cannot_be_sliced() -> None:
    with pytest.raises(UsageError, match="Mamba states can't be shared"):
        share_of(LayerKind.MAMBA, 8, 0, 2)
    with pytest.raises(UsageError, match="opaque layers can't be shared"):
        share_of(LayerKind.OPAQUE, 8, 0, 2)
    for heads, ranks in ((8, 3), (3, 2), (2, 3)):
        with pytest.raises(UsageError, match=f"{heads} heads can't be split over {ranks} ranks"):
            share_of(LayerKind.FULL, heads, 0, ranks)
    with pytest.raises(UsageError, match="rank 2 of 2"):
        share_of(LayerKind.FULL, 8, 2, 2)
    both: dict[str, LayerSpec] = {"a": layer(4), "m": mamba(), "c": layer(4, backend=0)}
    both["l"] = Attention(4, 1, 8, "uint8", LATENT, LayerKind.MLA)
    both["o"] = Opaque(4, 96)
    for name in ("m", "c", "l", "o"):
        with pytest.raises(UsageError, match=f"layer {name}: 2 parts of it are held, but where its heads lie is not"):
            canonical_geometry(*some_views(both, name), {0: 1 << 20})
    with pytest.raises(UsageError, match="layer a: 4 heads are not 3 equal parts"):
        cross_layers({"a": both["a"]}, [LayerGroup(0, ("a",), parts=6, part=3, held=3)], 2)
    for wrong in ({"parts": 2, "part": 1, "held": 2}, {"held": 0}, {"part": -1}, {"part": 1}):
        with pytest.raises(UsageError, match=r"group 0: .* parts from .* of"):
            cross_layers({"a": both["a"]}, [replace(LayerGroup(0, ("a",)), **wrong)], 2)  # type: ignore[arg-type]


def some_views(
    specs: dict[str, LayerSpec], name: str
) -> tuple[dict[str, list[View]], dict[str, LayerSpec], list[LayerGroup]]:
    """A layer of 2 blocks alone in memory; a rank holds two parts of it."""
    spec = specs[name]
    if isinstance(spec, Attention):
        shape = spec.shape(2) or (2, spec.payload_bytes // 2)
        views = [View(0, 0, shape, tuple(torch.empty(shape, device="meta").stride()), spec.dtype)]
    elif isinstance(spec, Opaque):
        views = [View(0, 0, (2, spec.block_bytes), (spec.block_bytes, 1), "int8")]
    else:
        shapes = [(2, *state.shape) for state in spec.states]
        views = [
            View(0, at << 12, shape, tuple(torch.empty(shape, device="meta").stride()), state.dtype)
            for at, (shape, state) in enumerate(zip(shapes, spec.states, strict=True))
        ]
    return {name: views}, {name: spec}, [LayerGroup(0, (name,), parts=2, held=2)]


PARTS = 4


def payloads(spec: Attention, ranks: int, whole: Any, layers: int, pack: int) -> list[tuple[bytes, Composition]]:
    """All parts of block 1, as these ranks store them, when layer l has whole[l]: (kv, token, head, dim)."""
    rank_spec = replace(spec, num_kv_heads=spec.num_kv_heads // ranks)
    specs: dict[str, LayerSpec] = named("l", layers, rank_spec)
    held = PARTS // ranks
    stored: list[tuple[bytes, Composition]] = []
    for rank in range(ranks):
        group = replace(one_group(specs)[0], parts=PARTS, part=rank * held, held=held)
        plan = cross_layers(specs, [group], 3) if not pack else packed_pages(specs, pack, 3)
        made = plan.allocate("cpu")
        for at in range(layers):
            heads = slice(rank * rank_spec.num_kv_heads, (rank + 1) * rank_spec.num_kv_heads)
            put_heads(made.layers[f"l{at}"], rank_spec, 1, whole[at][:, :, heads])
        cache = made.cache if not pack else canonicalise(made.layers, specs, [replace(group, layers=tuple(specs))])
        assert [known.part for known in cache.groups] == list(range(rank * held, rank * held + held))
        stored += [(gather(rows_of(cache), known.refs, 1), Composition.of(known.refs)) for known in cache.groups]
    return stored


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([FLASH_HND, FLASH_NHD, TRITON_HND, TRITON_NHD, PACKED_HND, PACKED_NHD, OLD]),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 2]),
    st.integers(0, 1 << 16),
)
def test_parts_are_the_same_whoever_stores_them(
    backend: Backend, layers: int, ratio: int, pack: int, seed: int
) -> None:
    """Whatever the order, and however many ranks there are: a single one, two, or four."""
    spec = Attention(4, 8, 3, "float16", backend, kernel_blocks=ratio)
    rng = np.random.default_rng(seed)
    whole = torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, (layers, 2, 4, 8, 3), dtype=np.int16))
    pack = 0 if backend is OLD else pack
    single = payloads(spec, 1, whole, layers, pack)
    assert len(set(single)) == PARTS
    assert {composition.dtypes for _, composition in single} == {"float16"}
    assert len({composition.layers for _, composition in single} - {b""}) == 1
    assert {len(payload) for payload, _ in single} == {layers * spec.payload_bytes // PARTS}
    assert single == payloads(spec, 2, whole, layers, pack) == payloads(spec, 4, whole, layers, pack)
