"""The examples of docs/LAYOUTS.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import kvoffloadd.layout
from kvoffloadd.cache.memory.lookup import GroupHits, restorable_boundaries
from kvoffloadd.client import GroupKind, Ref
from kvoffloadd.layout import (
    FLASH_HND,
    FLASH_NHD,
    LATENT,
    TRITON_NHD,
    Attention,
    Backend,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Opaque,
    Reach,
    Rows,
    View,
    canonical_geometry,
    cross_layers,
    packed_block_size,
    packed_pages,
    packed_rows,
    share_of,
)
from kvoffloadd.model import GroupSchema
from tests.layout.models import layer, mamba, named, one_group
from tests.layout.oracle import places

TEXT = (Path(__file__).parents[2] / "docs" / "LAYOUTS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("strides", "rows"),
    [
        ((192, 64, 16, 8, 1), (Rows(0, 0, 3, 128, 128), Rows(0, 384, 3, 128, 128))),
        ((64, 128, 16, 8, 1), (Rows(0, 0, 3, 256, 256),)),
    ],
)
def test_strides_decide(strides: tuple[int, ...], rows: tuple[Rows, ...]) -> None:
    view = View(0, 0, (2, 3, 4, 2, 8), strides, "bfloat16")
    assert canonical_geometry({"l": [view]}, {"l": layer()}, [LayerGroup(0, ("l",))], {0: 768}).rows == rows


@pytest.mark.parametrize(
    ("backend", "sliding"), [(FLASH_NHD, Ref(0, 0, 512)), (FLASH_HND, Ref(0, 0, 256, 2, 384))], ids=["default", "heads"]
)
def test_one_tensor_for_many_layers(backend: Backend, sliding: Ref) -> None:
    specs: dict[str, LayerSpec] = {
        **named("f", 3, layer(backend=backend)),
        **named("s", 2, layer(backend=backend, kind=LayerKind.SLIDING, window=9)),
    }
    groups = [LayerGroup(0, ("f0", "f1", "f2")), LayerGroup(1, ("s0", "s1"))]
    plan = cross_layers(specs, groups, 2)
    assert plan.block_bytes == 768
    assert [places(group) for group in plan.canonical.groups] == [(Ref(0, 0, 768),), (sliding,)]


def test_mamba() -> None:
    specs: dict[str, LayerSpec] = {**named("a", 2, layer()), **named("m", 2, mamba(block=4, padded=256))}
    plan = cross_layers(specs, [LayerGroup(0, ("a0", "a1")), LayerGroup(1, ("m0", "m1"))], 2)
    assert places(plan.canonical.groups[1]) == (Ref(0, 0, 68, 2, 256),)
    assert 256 - 68 == 188


def test_kernel_blocks() -> None:
    specs = {name: layer(2, 1, block=16, dtype="uint8", backend=TRITON_NHD, kernel_blocks=4) for name in "abc"}
    plan = cross_layers(specs, one_group(dict(specs)), 2)
    assert (plan.block_bytes, plan.canonical.layers["b"]) == (192, (Ref(0, 16, 16, 4, 48),))
    assert plan.views["b"][0].shape[0] == 2 * 4
    assert f"block 3 is {', '.join(str(3 * 4 + at) for at in range(4))} to them" in TEXT


def test_kernel_blocks_of_one_group_under_mamba_of_another() -> None:
    attention = layer(2, 1, block=16, dtype="uint8", backend=TRITON_NHD, kernel_blocks=4)
    specs: dict[str, LayerSpec] = {**dict.fromkeys("abc", attention), "m": mamba((2, 8), (2, 4), padded=64)}
    groups = [LayerGroup(0, ("a", "b", "c")), LayerGroup(1, ("m",))]
    plan = cross_layers(specs, groups, 2, slots=[("a",), ("b", "m"), ("c",)])
    assert plan.canonical.layers["b"] == (Ref(0, 16, 16, 4, 48),)
    assert places(plan.canonical.groups[1]) == (Ref(0, 64, 64),)


def test_opaque_layers() -> None:
    specs: dict[str, LayerSpec] = {"a": layer(), "sink": Opaque(4, 100), "b": layer()}
    assert places(cross_layers(specs, one_group(specs), 2).canonical.groups[0]) == (Ref(0, 0, 512), Ref(1, 0, 100))


def test_packs() -> None:
    specs: dict[str, LayerSpec] = {**named("a", 5, layer()), **named("m", 4, mamba(block=4))}
    plan = packed_pages(specs, 2, 2)
    assert [one.shape for one in plan.tensors] == [(2, 512)] * 3
    assert [group.layers for group in plan.groups[1:]] == [("m0", "m2"), ("m1", "m3")]
    kernels = packed_pages(named("a", 5, layer(block=64, kernel_blocks=4)), 2, 2).canonical
    assert [ref.count for ref in kernels.groups[0].refs] == [1, 1, 4]
    assert kernels.layers["a4"] == places(kernels.groups[0])[2:3]
    assert [packed_block_size(2_134_016, 1024, pack) for pack in (4, 1)] == [528, 2096]


def test_rows() -> None:
    sizes = (64, 16, 24)
    specs: dict[str, LayerSpec] = {f"l{size}": Attention(4, 1, size, "uint8", LATENT, LayerKind.MLA) for size in sizes}
    plan = packed_rows(specs, one_group(specs), 2)
    assert (plan.block_bytes, places(plan.canonical.groups[0])) == (416, (Ref(0, 0, 416),))
    big, small = (Attention(16, 1, size, "uint8", LATENT, LayerKind.MLA) for size in (512, 64))
    specs = {"a0": big, "a1": small, "a2": small, "b0": small, "b1": big}
    plan = packed_rows(specs, [LayerGroup(0, ("a0", "a1", "a2")), LayerGroup(1, ("b0", "b1"))], 2)
    assert [places(group) for group in plan.canonical.groups] == [(Ref(0, 0, 10240),), (Ref(0, 0, 9216),)]
    assert plan.block_bytes == 10240


def test_windows() -> None:
    reach = Reach(GroupKind.SLIDING, 16, 24)
    assert (reach.blocks(48), reach.blocks(49), reach.blocks(49, local=2)) == (range(1, 3), range(1, 4), range(2, 4))
    for failed, blocks in ((62, [62]), (61, [])):
        valid = np.zeros(63, bool)
        valid[46:] = True
        valid[failed] = False
        full = GroupHits(GroupSchema(0, GroupKind.FULL, 64), 0, np.ones(63, bool))
        sliding = GroupHits(GroupSchema(1, GroupKind.SLIDING, 64, window_keys=16), 0, valid)
        assert (restorable_boundaries([full, sliding]) // 64).tolist() == blocks


@pytest.mark.parametrize(
    ("backend", "first", "second"),
    [
        (FLASH_HND, Ref(0, 0, 768), Ref(0, 768, 768)),
        (FLASH_NHD, Ref(0, 0, 32, 24, 64), Ref(0, 32, 32, 24, 64)),
    ],
)
def test_parts(backend: Backend, first: Ref, second: Ref) -> None:
    specs: dict[str, LayerSpec] = named("l", 3, layer(4, backend=backend))
    share = share_of(LayerKind.FULL, 8, 0, 2, 4)
    group = LayerGroup(0, tuple(specs), parts=share.parts, part=share.part, held=share.held)
    assert [places(known) for known in cross_layers(specs, [group], 2).canonical.groups] == [(first,), (second,)]


def test_names_in_the_document_exist() -> None:
    calls = set(re.findall(r"`?\b([a-z]+_[a-z_]+)\(", TEXT)) - {"kv_cache"}
    assert calls
    assert [name for name in calls if not hasattr(kvoffloadd.layout, name)] == []
