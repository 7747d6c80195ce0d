"""Any layout: what a store takes and a load writes are the bytes of the engine's own tensors, and no others."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.errors import UsageError
from kvoffloadd.layout import (
    Attention,
    Backend,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Mamba,
    Opaque,
    State,
    View,
    canonical_geometry,
    canonicalise,
    cross_layers,
    packed_pages,
    packed_rows,
)
from tests.layout.models import named
from tests.layout.oracle import check_moves, check_plan

pytestmark = pytest.mark.slow

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")

DTYPES = st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8"])
SHAPES = st.sampled_from(
    [
        ("kv", "block", "token", "head", "dim"),
        ("block", "kv", "token", "head", "dim"),
        ("block", "head", "token", "pair"),
    ]
)
FAST = settings(max_examples=100, deadline=None)


@st.composite
def backends(draw: st.DrawFn, shares: bool | None = None) -> Backend:
    """Any order of any shape. `shares`: blocks first, and layers somewhere behind them."""
    shape = draw(SHAPES)
    memory = draw(st.permutations(shape))
    if shares is None:
        shares = draw(st.booleans())
    if not shares:
        return Backend("random", shape, tuple(memory), None)
    inner = [axis for axis in memory if axis != "block"]
    at = draw(st.integers(0, len(inner) - 1))
    return Backend("random", shape, ("block", *inner), ("block", *inner[:at], "layer", *inner[at:]))


@st.composite
def attention(draw: st.DrawFn, *, block: int, shares: bool | None = None) -> Attention:
    """A small layer; padded where its order can be."""
    ratio = draw(st.sampled_from([one for one in (1, 2, 4) if block % one == 0]))
    backend = draw(backends(shares))
    heads, size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    spec = Attention(block, heads, size, draw(DTYPES), backend, kernel_blocks=ratio)
    if backend.memory[0] == "block" and draw(st.booleans()):
        pieces = 4 * ratio * block * heads * size * 2  # divides whatever lies outside of layers
        spec = replace(spec, padded_bytes=-(-spec.payload_bytes // pieces) * pieces + pieces)
    return spec


@st.composite
def hybrids(draw: st.DrawFn) -> tuple[dict[str, LayerSpec], list[LayerGroup]]:
    """Groups of layers of several specs: full, sliding, Mamba."""
    block = draw(st.sampled_from([1, 4, 8]))
    pool = draw(st.lists(attention(block=block), min_size=1, max_size=3))
    specs: dict[str, LayerSpec] = {}
    groups = []
    for number in range(draw(st.integers(1, 3))):
        names = []
        for at in range(draw(st.integers(1, 3))):
            spec = draw(st.sampled_from(pool))
            names.append(f"g{number}.{at}")
            specs[names[-1]] = replace(spec, kind=LayerKind.SLIDING, window=9) if number else spec
        groups.append(LayerGroup(number, tuple(names)))
    if draw(st.booleans()):
        states = (State((2, draw(st.integers(1, 3))), "float32"), State((draw(st.integers(1, 4)), 2), "bfloat16"))
        state = Mamba(block, states)
        pages = [spec.page_bytes for spec in pool if spec.page_bytes >= state.page_bytes and spec.page_bytes % 4 == 0]
        specs |= named("m", 2, replace(state, padded_bytes=draw(st.sampled_from([0, *pages]))))
        groups.append(LayerGroup(9, ("m0", "m1")))
    if draw(st.booleans()):
        ratio, size = draw(st.integers(1, 3)), draw(st.integers(1, 9))
        specs["o"] = Opaque(block, ratio * size, kernel_blocks=ratio)
        groups[0] = replace(groups[0], layers=(*groups[0].layers, "o"))
    return specs, groups


@FAST
@given(hybrids(), st.integers(1, 5), st.integers(0, 1 << 16))
def test_cross_layer_tensors(model: tuple[dict[str, LayerSpec], list[LayerGroup]], blocks: int, seed: int) -> None:
    check_plan(cross_layers(*model, blocks), seed=seed)


@FAST
@given(st.data(), st.integers(1, 5), st.integers(1, 7), st.integers(1, 4), st.integers(0, 1 << 16))
def test_packs(data: st.DataObject, blocks: int, layers: int, pack: int, seed: int) -> None:
    spec = data.draw(attention(block=4, shares=True))
    specs: dict[str, LayerSpec] = named("a", layers, replace(spec, padded_bytes=0))
    page = specs["a0"].page_bytes * pack
    if page % 4 == 0:  # states take half the page, in separate blocks
        state = State((page // 8, 1), "float32")
        specs |= named("m", data.draw(st.integers(0, 5)) if page >= 8 else 0, Mamba(4, (state,)))
    check_plan(packed_pages(specs, pack, blocks), seed=seed)


@FAST
@given(st.data(), st.integers(1, 5), st.integers(0, 1 << 16))
def test_rows(data: st.DataObject, blocks: int, seed: int) -> None:
    spec = data.draw(attention(block=4, shares=True))
    other = data.draw(attention(block=4, shares=True))
    other = replace(other, kernel_blocks=spec.kernel_blocks, dtype=spec.dtype, padded_bytes=0)
    count = data.draw(st.integers(1, 3))
    specs: dict[str, LayerSpec] = named("a", count, replace(spec, padded_bytes=0)) | named("b", 2, other)
    groups = [LayerGroup(0, tuple(specs))]
    if data.draw(st.booleans()):
        ratio = data.draw(st.sampled_from([1, 2, 4]))
        specs["b0"] = specs["b1"] = replace(other, kind=LayerKind.SLIDING, window=3, kernel_blocks=ratio)
        groups = [LayerGroup(0, tuple(name for name in specs if name[0] == "a")), LayerGroup(1, ("b0", "b1"))]
    check_plan(packed_rows(specs, groups, blocks), seed=seed)


@FAST
@given(st.data(), st.integers(1, 5), st.integers(0, 9), st.integers(0, 1 << 16))
def test_tensors_that_an_engine_allocated(data: st.DataObject, blocks: int, lead: int, seed: int) -> None:
    """Any order of dimensions, at any offset; the spec defines only which of them counts blocks."""
    spec = data.draw(attention(block=4, shares=False))
    shape = spec.shape(blocks) or ()
    order = data.draw(st.permutations(range(len(shape))))
    size = 1
    for one in shape:
        size *= one
    memory = torch.zeros(lead + size, dtype=getattr(torch, spec.dtype))
    inner = memory[lead:].view([shape[at] for at in order])
    tensor = inner.permute([order.index(at) for at in range(len(shape))])
    specs: dict[str, LayerSpec] = {"l": replace(spec, backend=spec.block_dim, padded_bytes=0)}
    cache = canonicalise({"l": tensor}, specs, [LayerGroup(0, ("l",))])
    groups = [LayerGroup(0, ("l",))]
    check_moves([memory.view(torch.uint8)], {"l": tensor}, specs, groups, cache, blocks, seed)


@FAST
@given(st.data(), st.integers(1, 4), st.integers(2, 12), st.integers(0, 12))
def test_layers_anywhere_over_one_memory(data: st.DataObject, blocks: int, quarter: int, gap: int) -> None:
    """Layers of two groups at any place, as any number of kernel blocks: refused exactly if bytes would be shared."""
    stride = 4 * quarter
    specs: dict[str, LayerSpec] = {}
    views: dict[str, list[View]] = {}
    owned: dict[str, list[set[int]]] = {}
    for name in ("a0", "a1", "b0", "b1"):
        if name[1] == "0":
            ratio = usual = data.draw(st.sampled_from([1, 2, 4]))
            cut = data.draw(st.integers(1, stride // ratio - 1))
            start, room = gap, cut
        else:
            ratio = data.draw(st.sampled_from([usual, usual, usual, 1, 2, 4]))
            start, room = gap + cut, max(1, stride // ratio - cut)
        pitch = stride // ratio
        size = data.draw(st.integers(1, min(room, pitch)))
        start += data.draw(st.sampled_from([0, 0, 0, 0, 0, 1, 5]))
        specs[name] = Opaque(4, ratio * size, kernel_blocks=ratio)
        views[name] = [View(0, start, (blocks * ratio, size), (pitch, 1), "int8")]
        runs = [[start + (block * ratio + at) * pitch for at in range(ratio)] for block in range(blocks)]
        owned[name] = [{run + at for run in one for at in range(size)} for one in runs]
    groups = [LayerGroup(0, ("a0", "a1")), LayerGroup(1, ("b0", "b1"))]
    pairs = list(itertools.combinations(owned, 2))
    overlaps = [(one, other) for one, other in pairs if one[0] == other[0] and owned[one][0] & owned[other][0]]
    between_ids = any(
        owned[one][block] & owned[other][another]
        for one, other in pairs
        for block, another in itertools.permutations(range(blocks), 2)
    )
    begin, end = min(min(one[0]) for one in owned.values()), max(max(one[0]) for one in owned.values())
    try:
        found = canonical_geometry(views, specs, groups, {0: gap + (blocks + 3) * stride})
    except UsageError:
        assert overlaps or between_ids or end - begin >= stride  # blocks that do not nest can't be rows
        return
    # A layer may use another one's cache as it is.
    assert all(owned[one] == owned[other] for one, other in overlaps)
    assert not between_ids
    for name, refs in found.layers.items():
        for block in range(blocks):
            rows = [found.rows[ref.tensor].offset + block * found.rows[ref.tensor].stride_bytes for ref in refs]
            assert owned[name][block] == {
                row + ref.offset + run * ref.stride + at
                for row, ref in zip(rows, refs, strict=True)
                for run in range(ref.count)
                for at in range(ref.length)
            }
