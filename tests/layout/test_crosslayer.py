"""Cross-layer tensors: shapes and strides of known models, and every byte of small ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvoffloadd.client import GroupKind, KvCache, Ref
from kvoffloadd.errors import UsageError
from kvoffloadd.layout import (
    FLASH_HND,
    FLASH_NHD,
    FLASHINFER_HND,
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
    Mamba,
    Opaque,
    State,
    cross_layers,
)
from tests.layout.models import gemma_2b, gpt_oss, layer, mamba, named, one_group
from tests.layout.oracle import check_plan, places

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")

OLD_FLASH = Backend("old-flash", FLASH_NHD.shape, FLASH_NHD.memory)
"""Has no order with layers."""


def strides(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


# --- figures of known models, on the meta device ---


def test_gpt_oss_tokens_first() -> None:
    specs, groups = gpt_oss(FLASH_NHD)
    assert specs["layers.0"].page_bytes == 32768
    made = cross_layers(specs, groups, 136756).allocate("meta")
    assert [strides(one) for one in made.tensors] == [((136756, 12, 32768), (393216, 32768, 1), 0)]
    for at in range(24):
        expected = ((2, 136756, 16, 8, 64), (8192, 196608, 512, 64, 1), at // 2 * 16384)
        assert strides(made.layers[f"layers.{at}"]) == expected
    assert [strides(one) for one in made.cache.tensors] == [((136756, 393216), (393216, 1), 0)]
    assert [places(group) for group in made.cache.groups] == [(Ref(0, 0, 393216),)] * 2


def test_gpt_oss_heads_first() -> None:
    specs, groups = gpt_oss(FLASH_HND)
    made = cross_layers(specs, groups, 136756).allocate("meta")
    assert [strides(one) for one in made.tensors] == [((136756, 8, 12, 4096), (393216, 49152, 4096, 1), 0)]
    expected = ((2, 136756, 16, 8, 64), (1024, 196608, 64, 24576, 1), 3 * 2048)
    assert strides(made.layers["layers.7"]) == expected


def test_gpt_oss_on_two_ranks_with_triton() -> None:
    specs, groups = gpt_oss(TRITON_HND, tensor_parallel=2)
    assert specs["layers.0"].page_bytes == 16384
    plan = cross_layers(specs, groups, 66511)
    made = plan.allocate("meta")
    assert [strides(one) for one in made.tensors] == [((66511, 4, 12, 4096), (196608, 49152, 4096, 1), 0)]
    for at in range(24):
        expected = ((66511, 2, 16, 4, 64), (98304, 1024, 64, 24576, 1), at // 2 * 2048)
        assert strides(made.layers[f"layers.{at}"]) == expected
    assert plan.canonical.layers["layers.3"] == (Ref(0, 4096, 4096, 4, 49152),)  # a run a head


@pytest.mark.parametrize(
    ("num_groups", "num_blocks", "tensor", "view"),
    [
        (1, 7842, (7842, 26, 65536), (16384, 851968, 1024, 256, 1)),
        (2, 15685, (15685, 13, 65536), (16384, 425984, 1024, 256, 1)),
    ],
)
def test_gemma_2b(num_groups: int, num_blocks: int, tensor: tuple[int, ...], view: tuple[int, ...]) -> None:
    specs, groups = gemma_2b(num_groups)
    plan = cross_layers(specs, groups, num_blocks)
    made = plan.allocate("meta")
    slots = tensor[1]
    assert [strides(one) for one in made.tensors] == [(tensor, (slots * 65536, 65536, 1), 0)]
    assert strides(made.layers["layers.0"]) == ((2, num_blocks, 16, 4, 256), view, 0)
    documented = made.tensors[0].view(torch.bfloat16).view(num_blocks, slots, 2, 16, 4, 256)
    last = documented[:, slots - 1].permute(1, 0, 2, 3, 4)
    assert strides(made.layers["layers.25"]) == strides(last)
    # Both sizes come of one budget, anywhere between these bounds.
    for budget, fits in ((13363118079, False), (13363118080, True), (13363970047, True), (13363970048, False)):
        both = [budget // cross_layers(*gemma_2b(count), 1).block_bytes for count in (1, 2)]
        assert (both == [7842, 15685]) is fits


# --- who shares a tensor with whom ---


def test_mixed_backends_with_equal_pages_share_slots() -> None:
    """8 heads of 64 in bf16, and 16 of 64 in fp8: 32,768 bytes a block each."""
    specs: dict[str, LayerSpec] = {
        "wide": Attention(16, 8, 64, "bfloat16", FLASH_NHD),
        "narrow": Attention(16, 16, 64, "float8_e4m3fn", PACKED_NHD, LayerKind.SLIDING, 64),
    }
    groups = [LayerGroup(0, ("wide",)), LayerGroup(1, ("narrow",))]
    plan = cross_layers(specs, groups, 5)
    assert [one.shape for one in plan.tensors] == [(5, 1, 32768)]
    made = check_plan(plan)
    assert strides(made.layers["wide"])[1] == (8192, 16384, 512, 64, 1)
    assert strides(made.layers["narrow"])[1] == (32768, 128, 2048, 1)
    assert len(made.cache.tensors) == 1


def test_layers_of_mixed_backends_lie_side_by_side_in_a_group() -> None:
    specs: dict[str, LayerSpec] = {"a": layer(backend=FLASH_NHD), "b": layer(4, dtype="uint8", backend=PACKED_HND)}
    plan = cross_layers(specs, one_group(specs), 5)
    assert plan.tensors[0].shape == (5, 2, 256)
    assert places(check_plan(plan).cache.groups[0]) == (Ref(0, 0, 512),)


def test_attention_and_mamba_make_two_page_sizes() -> None:
    specs: dict[str, LayerSpec] = {**named("a", 4, layer(block=16)), **named("m", 2, mamba())}
    groups = [LayerGroup(0, ("a0", "a1", "a2", "a3")), LayerGroup(1, ("m0", "m1"))]
    plan = cross_layers(specs, groups, 6)
    assert [one.shape for one in plan.tensors] == [(6, 4, 1024), (6, 2, 68)]
    check_plan(plan)


def test_mamba_states_on_attentions_slots() -> None:
    """Padded to the attention page, three slots, two Mamba layers: strides are those of the whole row."""
    specs: dict[str, LayerSpec] = {**named("a", 3, layer()), **named("m", 2, mamba(block=4, padded=256))}
    groups = [LayerGroup(0, ("a0", "a1", "a2")), LayerGroup(1, ("m0", "m1"))]
    plan = cross_layers(specs, groups, 6)
    assert [one.shape for one in plan.tensors] == [(6, 3, 256)]
    made = check_plan(plan)
    assert [strides(one) for one in made.layers["m1"]] == [((6, 3, 6), (384, 6, 1), 128), ((6, 2, 4), (192, 4, 1), 73)]
    assert places(made.cache.groups[1]) == (Ref(0, 0, 68, 2, 256),)
    assert plan.canonical.layers["m1"] == (Ref(0, 256, 36), Ref(0, 292, 32))


def test_a_last_group_with_fewer_layers() -> None:
    specs: dict[str, LayerSpec] = {
        **named("f", 3, layer()),
        **named("s", 2, layer(kind=LayerKind.SLIDING, window=9)),
    }
    groups = [LayerGroup(0, ("f0", "f1", "f2")), LayerGroup(1, ("s0", "s1"))]
    made = check_plan(cross_layers(specs, groups, 6))
    assert [places(group) for group in made.cache.groups] == [(Ref(0, 0, 768),), (Ref(0, 0, 512),)]


def test_a_last_group_with_fewer_layers_heads_first() -> None:
    specs: dict[str, LayerSpec] = {
        **named("f", 3, layer(backend=FLASH_HND)),
        **named("s", 2, layer(backend=FLASH_HND, kind=LayerKind.SLIDING, window=9)),
    }
    groups = [LayerGroup(0, ("f0", "f1", "f2")), LayerGroup(1, ("s0", "s1"))]
    made = check_plan(cross_layers(specs, groups, 6))
    assert [places(group) for group in made.cache.groups] == [(Ref(0, 0, 768),), (Ref(0, 0, 256, 2, 384),)]


@pytest.mark.parametrize(
    "backend",
    [
        OLD_FLASH,
        Backend("kv-outside", FLASH_NHD.shape, FLASH_NHD.memory, ("kv", "block", "layer", "token", "head", "dim")),
    ],
)
def test_isolated_layers_have_tensors_of_their_own(backend: Backend) -> None:
    """Layers before blocks, or blocks not first."""
    specs: dict[str, LayerSpec] = {**named("a", 2, layer(backend=backend)), **named("b", 2, layer())}
    plan = cross_layers(specs, one_group(specs), 6)
    assert [one.shape for one in plan.tensors] == [(6, 2, 256), (6, 256), (6, 256)]
    made = check_plan(plan)
    assert strides(made.layers["a1"]) == ((2, 6, 4, 2, 8), (384, 64, 16, 8, 1), 0)
    assert len(made.cache.tensors) == 5  # K and V of the isolated ones are apart
    assert places(made.cache.groups[0]) == (
        Ref(0, 0, 128),
        Ref(1, 0, 128),
        Ref(2, 0, 128),
        Ref(3, 0, 128),
        Ref(4, 0, 512),
    )


def test_pages_padded_in_bytes() -> None:
    for backend in (FLASH_NHD, FLASH_HND, TRITON_NHD, PACKED_HND):
        specs = named("l", 3, layer(backend=backend, padded_bytes=320))
        made = check_plan(cross_layers(specs, one_group(specs), 6))
        assert made.cache.tensors[0].shape == (6, 960)
        assert made.cache.groups[0].payload_bytes == 768
    alone = named("l", 1, layer(backend=Backend("old", TRITON_NHD.shape, TRITON_NHD.memory), padded_bytes=320))
    assert places(check_plan(cross_layers(alone, one_group(alone), 6)).cache.groups[0]) == (Ref(0, 0, 256),)


@pytest.mark.parametrize(
    "backend", [FLASH_NHD, FLASH_HND, TRITON_NHD, TRITON_HND, FLASHINFER_HND, PACKED_HND, PACKED_NHD, OLD_FLASH]
)
@pytest.mark.parametrize("ratio", [1, 4])
def test_every_backend(backend: Backend, ratio: int) -> None:
    specs = named("l", 3, layer(block=8, backend=backend, kernel_blocks=ratio))
    plan = cross_layers(specs, one_group(specs), 5)
    made = check_plan(plan)
    # The view is what the documents' construction gives: the tensor's own shape, a slice, a permutation.
    if backend.shares:
        axes = specs["l0"].axes(5) | {"layer": 3}  # type: ignore[union-attr]
        whole = made.tensors[0].view(-1).view(torch.bfloat16).view([axes[axis] for axis in backend.with_layers])
        inverse = [backend.with_layers.index(axis) for axis in ("layer", *backend.shape)]
        assert strides(made.layers["l2"]) == strides(whole.permute(inverse)[2])


def test_latent_layers() -> None:
    specs = named("l", 3, Attention(4, 1, 24, "bfloat16", LATENT, LayerKind.MLA))
    made = check_plan(cross_layers(specs, one_group(specs), 5))
    assert strides(made.layers["l1"]) == ((5, 4, 24), (288, 24, 1), 96)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8"])
def test_every_dtype(dtype: str) -> None:
    specs = named("l", 2, layer(dtype=dtype))
    made = check_plan(cross_layers(specs, one_group(specs), 5))
    assert str(made.layers["l0"].dtype) == f"torch.{dtype}"


def test_kernel_blocks_and_mamba_on_the_same_slots() -> None:
    """64 tokens that kernels see as 4 x 16. A page: 2 x 64 x 2 heads x 8 x 2 bytes = 4,096; 2 slots: rows of 8,192."""
    specs: dict[str, LayerSpec] = {
        **named("a", 2, layer(block=64, kernel_blocks=4)),
        **named("m", 2, mamba(block=64, padded=4096)),
    }
    groups = [LayerGroup(0, ("a0", "a1")), LayerGroup(1, ("m0", "m1"))]
    plan = cross_layers(specs, groups, 6)
    assert [one.shape for one in plan.tensors] == [(6, 2, 4096)]
    # Layer a1: kernel pages of 1,024 bytes, 2,048 apart. m1's page begins at 4,096, in the midst of them.
    assert plan.canonical.layers["a1"] == (Ref(0, 1024, 1024, 4, 2048),)
    assert [places(group) for group in plan.canonical.groups] == [(Ref(0, 0, 8192),), (Ref(0, 0, 68, 2, 4096),)]
    check_plan(plan)


def test_kernel_blocks_of_different_groups_share_a_tensor() -> None:
    """Also on slots that an engine names, and heads first."""
    for backend in (FLASH_NHD, FLASH_HND, FLASHINFER_HND):
        specs: dict[str, LayerSpec] = {
            **named("a", 2, layer(block=8, backend=backend, kernel_blocks=2)),
            **named("b", 3, layer(block=8, backend=backend, kernel_blocks=4, kind=LayerKind.SLIDING, window=9)),
        }
        groups = [LayerGroup(0, ("a0", "a1")), LayerGroup(1, ("b0", "b1", "b2"))]
        for slots in (None, [("a1", "b0"), ("b1", "a0"), ("b2",)]):
            plan = cross_layers(specs, groups, 6, slots)
            assert [one.bytes for one in plan.tensors] == [6 * 3 * 512]
            check_plan(plan)


def test_kernel_blocks_that_differ_in_a_group_have_tensors_of_their_own() -> None:
    """Those of the other groups follow them, each on a slot: no memory is lost."""
    specs: dict[str, LayerSpec] = {
        "a0": layer(),
        "a1": layer(kernel_blocks=2),
        "a2": layer(),
        **named("m", 3, mamba(block=4, padded=256)),
    }
    groups = [LayerGroup(0, ("a0", "a1", "a2")), LayerGroup(1, ("m0", "m1", "m2"))]
    plan = cross_layers(specs, groups, 6)
    lies = {name: (views[0].memory, views[0].offset) for name, views in plan.views.items()}
    assert lies == {
        "a0": (0, 0), "m0": (0, 0), "a2": (0, 256), "m2": (0, 256), "a1": (1, 0), "m1": (1, 0),
    }  # fmt: skip
    assert plan.block_bytes == 3 * 256
    check_plan(plan)


def test_an_opaque_layer_is_isolated() -> None:
    specs: dict[str, LayerSpec] = {**named("a", 2, layer()), "sink": Opaque(4, 100), "other": Opaque(4, 60, 9, 0, 4)}
    groups = [LayerGroup(0, ("a0", "sink", "a1")), LayerGroup(1, ("other",))]
    plan = cross_layers(specs, groups, 6)
    assert [one.shape for one in plan.tensors] == [(6, 2, 256), (6, 100), (6, 60)]
    made = check_plan(plan)
    assert strides(made.layers["sink"]) == ((6, 100), (100, 1), 0)
    assert strides(made.layers["other"]) == ((24, 15), (15, 1), 0)
    assert places(made.cache.groups[0]) == (Ref(0, 0, 512), Ref(1, 0, 100))
    assert (made.cache.groups[1].kind, made.cache.groups[1].window_keys) == (GroupKind.SLIDING, 2)
    with pytest.raises(UsageError, match="layer sink can't share a slot: it needs a separate tensor"):
        cross_layers(specs, groups, 6, slots=[("a0",), ("sink", "other"), ("a1",)])


# --- an engine's slots ---


def test_slots_that_an_engine_names() -> None:
    specs: dict[str, LayerSpec] = {**named("f", 2, layer()), **named("s", 2, layer(kind=LayerKind.SLIDING, window=9))}
    groups = [LayerGroup(0, ("f0", "f1")), LayerGroup(1, ("s0", "s1"))]
    plan = cross_layers(specs, groups, 5, slots=[("f0", "s1"), ("s0",), ("f1",)])
    made = check_plan(plan)
    assert [places(group) for group in made.cache.groups] == [(Ref(0, 0, 256, 2, 512),), (Ref(0, 0, 512),)]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (layer(), layer(backend=FLASH_HND), "can't share a slot: 256 bytes each against 2 heads first, 128 bytes each"),
        (layer(), layer(4), "256 bytes each against 512 bytes each; pad the smaller page, or use one order"),
        (layer(2, 8, backend=FLASH_HND), layer(4, 4, backend=FLASH_HND), "2 heads first, 128 .* 4 heads first, 64"),
        (layer(), layer(backend=OLD_FLASH), "layer b can't share a slot: it needs a separate tensor"),
    ],
)
def test_layers_that_cannot_share_a_slot(one: Attention, other: Attention, message: str) -> None:
    specs: dict[str, LayerSpec] = {"a": one, "b": replace(other, kind=LayerKind.SLIDING, window=9)}
    groups = [LayerGroup(0, ("a",)), LayerGroup(1, ("b",))]
    with pytest.raises(UsageError, match=message):
        cross_layers(specs, groups, 5, slots=[("a", "b")])
    apart = cross_layers(specs, groups, 5)  # left to itself, it gives them separate tensors
    assert len(apart.tensors) == 2
    check_plan(apart)


@pytest.mark.parametrize("kernel_blocks", [1, 4])
def test_two_layers_of_a_group_share_no_slot_behind_another_groups(kernel_blocks: int) -> None:
    specs = named("l", 3, layer(block=64))
    specs["l2"] = replace(layer(block=64), kernel_blocks=kernel_blocks)
    groups = [LayerGroup(0, ("l0",)), LayerGroup(1, ("l1", "l2"))]
    with pytest.raises(UsageError, match="l1 and l2 are of one group: they need separate slots"):
        cross_layers(specs, groups, 4, slots=[("l0", "l1", "l2")])


def test_slots_that_are_none() -> None:
    specs = named("l", 2, layer())
    groups = [LayerGroup(0, ("l0", "l1"))]
    with pytest.raises(UsageError, match="l0 and l1 are of one group: they need separate slots"):
        cross_layers(specs, groups, 5, slots=[("l0", "l1")])
    for slots in ([("l0",)], [("l0",), ("l1",), ()], [("l0",), ("l0",), ("l1",)]):
        with pytest.raises(UsageError, match="slots must name each layer once"):
            cross_layers(specs, groups, 5, slots=slots)


# --- refusals ---


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (layer(backend=1), "layer l: to allocate its tensor, its backend's order must be known"),
        (layer(backend=OLD_FLASH, padded_bytes=320), "pages can't be padded where kv lies outside of blocks"),
        (layer(3, backend=FLASH_HND, padded_bytes=400), "a page of 400 bytes is not 3 equal pieces of bfloat16"),
        (
            Mamba(16, (State((3,), "bfloat16"), State((2,), "float32")), 16),
            "layer l: float32 .* at byte 6, .* is misaligned",
        ),
        (Mamba(16, (State((2,), "float32"), State((3,), "bfloat16"))), "multiples of 4; put states with larger"),
    ],
)
def test_layers_that_cannot_be_placed(spec: LayerSpec, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cross_layers({"l": spec}, [LayerGroup(0, ("l",))], 5)


def test_no_blocks() -> None:
    with pytest.raises(UsageError, match="a cache needs at least 1 block, not 0"):
        cross_layers({"l": layer()}, [LayerGroup(0, ("l",))], 0)


# --- where it is allocated ---


def test_sealed_shared_memory_is_registered_as_it_is() -> None:
    specs, groups = {**named("a", 2, layer()), **named("b", 1, layer(4))}, [LayerGroup(0, ("a0", "a1", "b0"))]
    made = check_plan(cross_layers(specs, groups, 5), "host")
    registered = made.cache.kv_cache()
    assert isinstance(registered, KvCache)
    assert [one.spec(0).stride_bytes for one in registered.tensors] == [512, 512]
    # Nothing was moved: the allocations are those that were made.
    assert [one.allocation for one in registered.tensors] == [one.allocation for one in made.cache.owner]
    cache = made.cache
    del made
    assert len(cache.kv_cache().allocations()) == 2


def test_torchs_own_memory_is_moved_once() -> None:
    specs = named("a", 2, layer(backend=OLD_FLASH))
    made = cross_layers(specs, one_group(specs), 5).allocate("cpu")
    made.layers["a0"][1, 2] = 7
    registered = made.cache.kv_cache()
    assert len(registered.tensors) == 4
    assert len(registered.allocations()) == 2
    assert registered.tensors[1].array[2].view("u2").tolist() == [0x40E0] * 64  # type: ignore[attr-defined]
