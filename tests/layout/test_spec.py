"""What layers and groups may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvoffloadd.errors import UsageError
from kvoffloadd.layout import (
    FLASH_NHD,
    LATENT,
    Attention,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Mamba,
    Opaque,
    State,
    layer_kind,
)
from kvoffloadd.layout.spec import check_groups
from kvoffloadd.model import GroupKind
from tests.layout.models import layer, mamba, one_group

GOOD = Attention(16, 8, 64, "bfloat16", FLASH_NHD)


@pytest.mark.parametrize(
    ("dtype", "item"),
    [("bfloat16", 2), ("float16", 2), ("float32", 4), ("float8_e4m3fn", 1), ("float8_e5m2", 1), ("uint8", 1)],
)
def test_sizes_of_a_page(dtype: str, item: int) -> None:
    spec = replace(GOOD, dtype=dtype)
    assert spec.payload_bytes == spec.page_bytes == 2 * 16 * 8 * 64 * item
    assert replace(spec, padded_bytes=1 << 20).page_bytes == 1 << 20
    assert Attention(16, 1, 576, dtype, LATENT, LayerKind.MLA).page_bytes == 16 * 576 * item


def test_shapes() -> None:
    assert GOOD.shape(5) == (2, 5, 16, 8, 64)
    assert replace(GOOD, kernel_blocks=4).shape(5) == (2, 20, 4, 8, 64)
    assert replace(GOOD, backend=3).shape(5) is None


def test_entries_that_stand_for_several_tokens() -> None:
    """DeepSeek V4: 256 tokens are 64 entries of 584 bytes, or 2 where an entry is 128 tokens."""
    spec = Attention(256, 1, 584, "uint8", LATENT, LayerKind.MLA, tokens_per_entry=4)
    assert (spec.payload_bytes, spec.shape(5)) == (64 * 584, (5, 64, 584))
    assert replace(spec, tokens_per_entry=128).shape(5) == (5, 2, 584)
    assert replace(spec, kernel_blocks=2).shape(5) == (10, 32, 584)
    assert spec.window_keys(256) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float12"}, "dtype 'float12' is not known; these are: bfloat16"),
        ({"kind": "linear"}, "layers of kind 'linear' are not known; these are: full, sliding, chunked, mla, mamba"),
        ({"kind": LayerKind.MAMBA}, "an attention layer can't be of kind mamba"),
        ({"head_size": 0}, "sizes of a layer must be positive"),
        ({"kernel_blocks": 3}, "16 tokens are not 3 equal kernel blocks"),
        ({"tokens_per_entry": 3}, "16 tokens are not 1 equal kernel blocks of whole entries"),
        ({"tokens_per_entry": 8, "kernel_blocks": 4}, "16 tokens are not 4 equal kernel blocks"),
        ({"tokens_per_entry": 0}, "sizes of a layer must be positive"),
        ({"kind": LayerKind.SLIDING}, "kind sliding with a window of 0"),
        ({"window": 5}, "kind full with a window of 5"),
        ({"kind": LayerKind.MLA}, "MLA has one head, not 8"),
        ({"padded_bytes": 100}, "a page of 32768 bytes can't be padded to 100"),
        ({"padded_bytes": 32769, "kernel_blocks": 2}, "not 2 equal kernel pages"),
        ({"backend": LATENT}, "backend latent .* does not hold a layer of full"),
    ],
)
def test_what_is_no_attention_layer(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(GOOD, **changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": ()}, "must be positive"),
        ({"states": (State((0, 4), "uint8"),)}, "must be positive"),
        ({"states": (State((4,), "int3"),)}, "dtype 'int3' is not known"),
        ({"kind": LayerKind.FULL}, "a Mamba layer can't be of kind full"),
        ({"padded_bytes": 3}, "can't be padded to 3"),
    ],
)
def test_what_is_no_mamba_layer(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Mamba(**{"block_size": 16, "states": (State((4,), "uint8"),), **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_bytes": 0}, "must be positive"),
        ({"window": -1}, "must be positive"),
        ({"kind": LayerKind.FULL}, "an opaque layer can't be of kind full"),
        ({"kernel_blocks": 5}, "a page of 96 bytes is not 5 equal kernel pages"),
    ],
)
def test_what_is_no_opaque_layer(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Opaque(**{"block_size": 16, "block_bytes": 96, **options})


def test_unknown_kinds_are_refused_by_name_and_may_be_opaque() -> None:
    with pytest.raises(UsageError, match=r"'cross_attention' are not known; .* Opaque layer may be of any kind"):
        layer_kind("cross_attention")


def test_what_groups_need_of_a_prefix() -> None:
    """24/16 -> 2, 17/16 -> 1, 1024/64 -> 16, 1025/64 -> 16 keys."""
    for window, tokens, keys in ((24, 16, 2), (17, 16, 1), (1024, 64, 16), (1025, 64, 16), (1, 16, 0)):
        sliding = replace(GOOD, kind=LayerKind.SLIDING, window=window)
        assert (sliding.group_kind, sliding.window_keys(tokens)) == (GroupKind.SLIDING, keys)
    chunked = replace(GOOD, kind=LayerKind.CHUNKED, window=8192)
    assert (chunked.group_kind, chunked.window_keys(64)) == (GroupKind.CHUNKED, 128)
    latent = Attention(64, 1, 576, "uint8", LATENT, LayerKind.MLA)
    assert (latent.group_kind, latent.window_keys(64)) == (GroupKind.FULL, 0)
    assert replace(latent, window=128).group_kind is GroupKind.SLIDING
    for opaque, kind, keys in ((Opaque(64, 9), GroupKind.FULL, 0), (Opaque(64, 9, 1025), GroupKind.SLIDING, 16)):
        assert (opaque.group_kind, opaque.window_keys(64)) == (kind, keys)
    assert (GOOD.group_kind, mamba().group_kind, mamba().window_keys(16)) == (GroupKind.FULL, GroupKind.MAMBA, 0)


def test_groups_that_do_not_fit_their_layers() -> None:
    specs: dict[str, LayerSpec] = {"a": layer(), "b": layer(kind=LayerKind.SLIDING, window=9), "c": layer(block=8)}
    with pytest.raises(
        UsageError, match=r"a \(full, window 0, 4 .*b \(sliding, window 9, 4 .*can't share block tables"
    ):
        check_groups(specs, [LayerGroup(0, ("a", "b"))])
    with pytest.raises(UsageError, match="can't share block tables"):
        check_groups(specs, [LayerGroup(0, ("a", "c"))])
    with pytest.raises(UsageError, match="layers b, c are in no group: they would never be stored"):
        check_groups(specs, [LayerGroup(0, ("a",))])
    with pytest.raises(UsageError, match="layer d is not described"):
        check_groups(specs, [LayerGroup(0, ("d",))])
    with pytest.raises(UsageError, match="layer a is in group 0 and in group 1"):
        check_groups(specs, [LayerGroup(0, ("a",)), LayerGroup(1, ("a",))])
    check_groups({"a": layer()}, one_group({"a": layer()}))
