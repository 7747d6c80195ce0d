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
    cross_layers,
    packed_rows,
    packs_rows,
    uniform_type,
)
from tests.layout.models import gpt_oss, layer, mamba, named, one_group
from tests.layout.oracle import check_plan

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")


def latent(size: int) -> Attention:
    return Attention(4, 1, size, "uint8", LATENT, LayerKind.MLA)


def test_gpt_oss() -> None:
    """Row 1,572,864 bytes; 279 blocks are 279 descriptors of 438,829,056 bytes, not 3,348 or 6,696."""
    specs, groups = gpt_oss(FLASH_NHD, block=64)
    plan = packed_rows(specs, groups, 500)
    assert plan.block_bytes == 12 * 131072 == 1572864
    refs = plan.canonical.groups[0].refs
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
    assert [group.refs for group in made.cache.groups] == [
        (Ref(0, 0, 256, 3, 320),),
        (Ref(0, 0, 256, 2, 320),),
        (Ref(0, 0, 68),),
    ]


def test_pages_of_several_sizes() -> None:
    specs: dict[str, LayerSpec] = {"a": latent(64), "b": latent(16), "c": latent(24)}
    made = check_plan(packed_rows(specs, one_group(specs), 6))
    assert tuple(made.cache.tensors[0].shape) == (6, 416)
    assert made.layers["c"].stride() == (416, 24, 1)
    assert made.cache.groups[0].refs == (Ref(0, 0, 416),)


@pytest.mark.parametrize("backend", [FLASH_NHD, FLASH_HND])
def test_rows_of_kernel_blocks(backend: Backend) -> None:
    specs = named("l", 3, layer(block=8, backend=backend, kernel_blocks=2))
    made = check_plan(packed_rows(specs, one_group(specs), 6))
    assert made.cache.groups[0].refs == (Ref(0, 0, 1536),)


def test_when_layers_share_rows() -> None:
    plain = named("l", 3, layer())
    one, two = [LayerGroup(0, ("l0", "l1", "l2"))], [LayerGroup(0, ("l0", "l1")), LayerGroup(1, ("l2",))]
    for enabled in ("true", "True", "TRUE", True):
        assert packs_rows(plain, two, enabled)
        assert not packs_rows(plain, one, enabled)
    for disabled in ("false", "yes", "1", "", None, False):
        assert not packs_rows(plain, two, disabled)
    latents: dict[str, LayerSpec] = {"a": latent(64), "b": latent(16)}
    assert uniform_type(latents)
    assert packs_rows(latents, one)
    assert not uniform_type({"a": latent(64), "b": layer(4)})
    assert not uniform_type({"a": mamba(), "b": mamba((1, 2))})
    assert not uniform_type(plain)


def test_what_cannot_share_rows() -> None:
    old = Backend("old", FLASH_NHD.shape, FLASH_NHD.memory)
    specs: dict[str, LayerSpec] = {"a": layer(), "b": layer(backend=old)}
    with pytest.raises(UsageError, match="layer b: its backend has no order with blocks first"):
        packed_rows(specs, one_group(specs), 6)
    specs = {"a": layer(), "b": layer(kernel_blocks=2)}
    with pytest.raises(UsageError, match="layers a and b can't share rows: they have 1 and 2 kernel blocks"):
        packed_rows(specs, one_group(specs), 6)
    odd: dict[str, LayerSpec] = {"a": replace(latent(3), block_size=1), "b": layer(block=1)}
    with pytest.raises(UsageError, match=r"layer b: bfloat16 .* at byte 3, .* is misaligned"):
        packed_rows(odd, one_group(odd), 6)
    with pytest.raises(UsageError, match="0 blocks are no cache"):
        packed_rows({"a": layer()}, [LayerGroup(0, ("a",))], 0)
