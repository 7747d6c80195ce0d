"""One tensor whose row is one block across all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvoffloadd.client import Ref
from kvoffloadd.errors import UsageError
from kvoffloadd.layout import (
    FLASH_HND,
    FLASH_NHD,
    LATENT,
    Attention,
    Backend,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Opaque,
    cross_layers,
    packed_rows,
    uniform_type,
)
from tests.layout.models import gpt_oss, layer, mamba, named, one_group
from tests.layout.oracle import check_plan, places

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")


def latent(size: int) -> Attention:
    return Attention(4, 1, size, "uint8", LATENT, LayerKind.MLA)


def test_gpt_oss() -> None:
    """Row 1,572,864 bytes; 279 blocks are 279 descriptors of 438,829,056 bytes, not 3,348 or 6,696."""
    specs, groups = gpt_oss(FLASH_NHD, block=64)
    plan = packed_rows(specs, groups, 500)
    assert plan.block_bytes == 12 * 131072 == 1572864
    refs = places(plan.canonical.groups[0])
    assert refs == (Ref(0, 0, 1572864),)
    assert (279 * len(refs), 279 * plan.canonical.groups[0].payload_bytes) == (279, 438829056)
    for order, descriptors in ((("block", "kv"), 3348), (("kv", "block"), 6696)):
        inner = ("token", "head", "dim")
        old = Backend("old", (*order, *inner), (*order, *inner))  # no order with layers: a tensor each
        specs, groups = gpt_oss(old, block=64)
        apart = cross_layers(specs, groups, 500).canonical.groups[0]
        assert 279 * sum(ref.count for ref in apart.refs) == descriptors


def test_unused_slots_and_padding_are_in_no_ref() -> None:
    """Stale bytes of another group are neither stored nor overwritten."""
    specs: dict[str, LayerSpec] = {
        **named("f", 3, layer(padded_bytes=320)),
        **named("s", 2, layer(kind=LayerKind.SLIDING, window=9)),
        **named("m", 1, mamba(block=4)),
    }
    groups = [LayerGroup(0, ("f0", "f1", "f2")), LayerGroup(1, ("s0", "s1")), LayerGroup(2, ("m0",))]
    made = check_plan(packed_rows(specs, groups, 6))
    assert [tuple(one.shape) for one in made.cache.tensors] == [(6, 960)]
    assert [places(group) for group in made.cache.groups] == [
        (Ref(0, 0, 256, 3, 320),),
        (Ref(0, 0, 512),),
        (Ref(0, 0, 68),),
    ]


def test_pages_of_several_sizes() -> None:
    specs: dict[str, LayerSpec] = {"a": latent(64), "b": latent(16), "c": latent(24)}
    made = check_plan(packed_rows(specs, one_group(specs), 6))
    assert tuple(made.cache.tensors[0].shape) == (6, 416)
    assert made.layers["c"].stride() == (416, 24, 1)
    assert places(made.cache.groups[0]) == (Ref(0, 0, 416),)


def test_rows_are_dense_in_each_group() -> None:
    """Group 0: 8,192 + 1,024 + 1,024 = 10,240 bytes; group 1: 1,024 + 8,192 = 9,216. The row is as long as the longer
    one; with slots as long as their longest page it would be 8,192 + 8,192 + 1,024 = 17,408.
    """
    big, small = replace(latent(512), block_size=16), replace(latent(64), block_size=16)
    window = {"window": 9}
    specs: dict[str, LayerSpec] = {
        **{"a0": big, "a1": small, "a2": small},
        **{"b0": replace(small, **window), "b1": replace(big, **window)},  # type: ignore[arg-type]
    }
    groups = [LayerGroup(0, ("a0", "a1", "a2")), LayerGroup(1, ("b0", "b1"))]
    plan = packed_rows(specs, groups, 5)
    assert plan.block_bytes == 10240
    assert [places(group) for group in plan.canonical.groups] == [(Ref(0, 0, 10240),), (Ref(0, 0, 9216),)]
    assert plan.canonical.layers["b1"] == (Ref(0, 1024, 8192),)
    check_plan(plan)


def test_rows_are_rounded_up_to_what_their_dtypes_and_kernel_blocks_divide() -> None:
    """12 bytes, and 13 of another group: with items of 2 bytes in 2 kernel blocks rows are multiples of 4."""
    specs: dict[str, LayerSpec] = {
        "a": Attention(2, 1, 3, "bfloat16", LATENT, LayerKind.MLA, kernel_blocks=2),
        "b": Attention(1, 1, 13, "uint8", LATENT, LayerKind.MLA),
    }
    plan = packed_rows(specs, [LayerGroup(0, ("a",)), LayerGroup(1, ("b",))], 5)
    assert plan.block_bytes == 16
    check_plan(plan)


def test_groups_with_different_kernel_blocks_share_rows() -> None:
    """Kernel pages of 1,024 bytes of 3 layers in rows of 3 x 2,048; the group without kernel blocks is one run."""
    specs: dict[str, LayerSpec] = {
        **named("f", 3, layer(block=32, kernel_blocks=2)),
        **named("s", 2, layer(block=32, kind=LayerKind.SLIDING, window=9)),
        "m": mamba(block=32),
    }
    groups = [LayerGroup(0, ("f0", "f1", "f2")), LayerGroup(1, ("s0", "s1")), LayerGroup(2, ("m",))]
    plan = packed_rows(specs, groups, 5)
    assert plan.canonical.layers["f1"] == (Ref(0, 1024, 1024, 2, 3072),)
    assert [places(group) for group in plan.canonical.groups] == [
        (Ref(0, 0, 6144),),
        (Ref(0, 0, 4096),),
        (Ref(0, 0, 68),),
    ]
    check_plan(plan)


@pytest.mark.parametrize("backend", [FLASH_NHD, FLASH_HND])
def test_rows_of_kernel_blocks(backend: Backend) -> None:
    specs = named("l", 3, layer(block=8, backend=backend, kernel_blocks=2))
    made = check_plan(packed_rows(specs, one_group(specs), 6))
    assert places(made.cache.groups[0]) == (Ref(0, 0, 1536),)


def test_when_layers_share_rows_by_default() -> None:
    plain = named("l", 3, layer())
    latents: dict[str, LayerSpec] = {"a": latent(64), "b": latent(16)}
    assert uniform_type(latents, one_group(latents))
    indexed: dict[str, LayerSpec] = {"a": layer(4), "b": latent(16)}  # as MiniMax M3: heads, with an index
    assert uniform_type(indexed, one_group(indexed))
    unlike: dict[str, LayerSpec] = {"a": latent(64), "b": layer(4, kind=LayerKind.SLIDING, window=5)}
    assert not uniform_type(unlike, one_group(unlike))
    states: dict[str, LayerSpec] = {"a": mamba(), "b": mamba((1, 2))}
    assert not uniform_type(states, one_group(states))
    assert not uniform_type(plain, one_group(plain))
    assert not uniform_type(plain, [LayerGroup(0, ("l0", "l1")), LayerGroup(1, ("l2",))])


def test_groups_of_uniform_type_share_rows_whatever_their_block_sizes() -> None:
    """DeepSeek-V4 is like this: latents of two sizes, windows of another block size, and one group
    of other attention.
    """
    specs: dict[str, LayerSpec] = {
        "a0": latent(64),
        "a1": latent(16),
        "b0": replace(latent(64), window=9, block_size=2),
        "b1": replace(latent(64), window=9, block_size=2),
        "c": layer(kind=LayerKind.SLIDING, window=5, block=8),
    }
    groups = [LayerGroup(0, ("a0", "a1")), LayerGroup(1, ("b0", "b1")), LayerGroup(2, ("c",))]
    assert uniform_type(specs, groups)
    check_plan(packed_rows(specs, groups, 4))
    specs["m"] = mamba(block=4)
    assert not uniform_type(specs, [*groups, LayerGroup(3, ("m",))])
    # A group of two pages, each of a separate group.
    apart = {name: specs[name] for name in ("a0", "b0")}
    assert uniform_type(apart, [LayerGroup(0, ("a0",)), LayerGroup(1, ("b0",))])


def test_a_dense_model_shares_rows_on_request() -> None:
    """One group of 3 layers of 256 bytes: a row of 768."""
    specs = named("l", 3, layer())
    assert not uniform_type(specs, one_group(specs))
    made = check_plan(packed_rows(specs, one_group(specs), 6))
    assert places(made.cache.groups[0]) == (Ref(0, 0, 768),)


def test_what_cannot_share_rows() -> None:
    old = Backend("old", FLASH_NHD.shape, FLASH_NHD.memory)
    specs: dict[str, LayerSpec] = {"a": layer(), "b": layer(backend=old)}
    with pytest.raises(UsageError, match="layer b: its backend has no order with blocks first"):
        packed_rows(specs, one_group(specs), 6)
    specs = {"a": layer(), "b": layer(kernel_blocks=2)}
    with pytest.raises(UsageError, match="layers a and b of group 0 can't share rows: they have 1 and 2 kernel blocks"):
        packed_rows(specs, one_group(specs), 6)
    specs = {"a": layer(), "b": Opaque(4, 256)}
    with pytest.raises(UsageError, match="layer b: it is opaque, and needs a separate tensor"):
        packed_rows(specs, one_group(specs), 6)
    odd: dict[str, LayerSpec] = {"a": replace(latent(3), block_size=1), "b": layer(block=1)}
    with pytest.raises(UsageError, match=r"layer b: bfloat16 .* at byte 3, .* is misaligned"):
        packed_rows(odd, one_group(odd), 6)
    with pytest.raises(UsageError, match="a cache needs at least 1 block, not 0"):
        packed_rows({"a": layer()}, [LayerGroup(0, ("a",))], 0)
