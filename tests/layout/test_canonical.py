"""An engine's tensors become canonical ones: strides decide, nothing is copied, nothing is listed twice."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import pytest

from kvoffloadd.client import Group, GroupKind, Ref, digest_layers
from kvoffloadd.errors import UsageError
from kvoffloadd.layout import (
    FLASH_NHD,
    LATENT,
    PACKED_HND,
    TRITON_NHD,
    Attention,
    CanonicalCache,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Mamba,
    Opaque,
    State,
    canonicalise,
    cross_layers,
)
from kvoffloadd.layout.spec import ITEM_BYTES
from kvoffloadd.model import Dtype
from tests.layout.models import layer, mamba, named, one_group
from tests.layout.oracle import check_moves, places

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8")


def flat(size: int) -> Any:
    return torch.zeros(size, dtype=torch.uint8)


def single(tensor: Any, spec: LayerSpec) -> CanonicalCache:
    return canonicalise({"l": tensor}, {"l": spec}, [LayerGroup(0, ("l",))])


def described(cache: CanonicalCache) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Describes each tensor: shape, strides, byte offset."""
    return [(tuple(one.shape), one.stride(), one.storage_offset()) for one in cache.tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 24])
def test_k_and_v_apart_are_two_tensors(dtype: str, start: int) -> None:
    """Whatever the dtype, whatever the storage offset."""
    spec = layer(dtype=dtype)
    memory = torch.zeros(start + 2 * 6 * 4 * 2 * 8, dtype=getattr(torch, dtype))
    tensor = memory[start:].view(2, 6, 4, 2, 8)
    item = tensor.element_size()
    cache = single(tensor, spec)
    half = 64 * item
    assert described(cache) == [((6, half), (half, 1), start * item), ((6, half), (half, 1), (start + 6 * 64) * item)]
    assert places(cache.groups[0]) == (Ref(0, 0, half), Ref(1, 0, half))
    assert cache.groups[0].payload_bytes == spec.payload_bytes
    assert all(one.dtype == torch.int8 and one.data_ptr() >= memory.data_ptr() for one in cache.tensors)
    assert cache.tensors[0].untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    check_moves([memory.view(torch.uint8)], {"l": tensor}, {"l": spec}, one_group({"l": spec}), cache, 6)


def test_the_same_shape_over_blocks_first_memory_is_one() -> None:
    memory = torch.zeros(6, 2, 4, 2, 8, dtype=torch.bfloat16)
    tensor = memory.transpose(0, 1)
    assert tuple(tensor.shape) == (2, 6, 4, 2, 8)
    cache = single(tensor, layer())
    assert described(cache) == [((6, 256), (256, 1), 0)]
    assert places(cache.groups[0]) == (Ref(0, 0, 256),)


@pytest.mark.parametrize("num_blocks", [1, 2, 16])
def test_numbers_of_blocks_that_look_like_something_else(num_blocks: int) -> None:
    spec = layer(block=16)
    for tensor in (
        torch.zeros(2, num_blocks, 16, 2, 8, dtype=torch.bfloat16),
        torch.zeros(num_blocks, 2, 16, 2, 8, dtype=torch.bfloat16).transpose(0, 1),
    ):
        cache = single(tensor, spec)
        assert {one.shape[0] for one in cache.tensors} == {num_blocks}
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        check_moves([memory], {"l": tensor}, {"l": spec}, one_group({"l": spec}), cache, num_blocks)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((6, 2, 4, 2, 8), layer(backend=TRITON_NHD)),
        ((6, 2, 4, 16), layer(backend=PACKED_HND)),
        ((6, 4, 24), Attention(4, 1, 24, "bfloat16", LATENT, LayerKind.MLA)),
        ((4, 6, 2, 16), layer(backend=1)),
    ],
    ids=["blocks-first", "packed", "latent", "tokens-first"],
)
def test_one_tensor_or_more(shape: tuple[int, ...], spec: Attention) -> None:
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    cache = single(tensor, spec)
    count = 4 if shape[0] == 4 else 1
    page = spec.page_bytes // count
    assert described(cache) == [((6, page), (page, 1), at * 6 * page) for at in range(count)]
    memory = tensor.view(torch.uint8).view(-1)
    check_moves([memory], {"l": tensor}, {"l": spec}, one_group({"l": spec}), cache, 6)


def test_padding_is_part_of_the_page_and_of_no_ref() -> None:
    spec = layer(backend=TRITON_NHD, padded_bytes=320)
    memory = flat(6 * 320)
    tensor = memory.view(torch.bfloat16).as_strided((6, 2, 4, 2, 8), (160, 64, 16, 8, 1))
    cache = single(tensor, spec)
    assert described(cache) == [((6, 320), (320, 1), 0)]
    assert places(cache.groups[0]) == (Ref(0, 0, 256),)
    check_moves([memory], {"l": tensor}, {"l": spec}, one_group({"l": spec}), cache, 6)


def test_a_last_page_whose_padding_is_not_there() -> None:
    memory = flat(5 * 320 + 256)
    tensor = memory.view(torch.bfloat16).as_strided((6, 2, 4, 2, 8), (160, 64, 16, 8, 1))
    assert described(single(tensor, layer(backend=TRITON_NHD))) == [((6, 256), (320, 1), 0)]


def test_mamba_states_lie_in_one_page() -> None:
    """conv 36 bytes, ssm 32 bytes, a page padded to 96."""
    spec = mamba(padded=96)
    memory = flat(6 * 96)
    conv = memory.view(torch.bfloat16).as_strided((6, 3, 6), (48, 6, 1))
    ssm = memory.view(torch.float32).as_strided((6, 2, 4), (24, 4, 1), 9)
    cache = single([conv, ssm], spec)
    assert described(cache) == [((6, 96), (96, 1), 0)]
    assert places(cache.groups[0]) == (Ref(0, 0, 68),)  # states that touch are one run
    check_moves([memory], {"l": [conv, ssm]}, {"l": spec}, one_group({"l": spec}), cache, 6)


def test_mamba_states_with_a_gap_are_a_run_each() -> None:
    memory = flat(6 * 96)
    conv = memory.view(torch.bfloat16).as_strided((6, 3, 6), (48, 6, 1))
    ssm = memory.view(torch.float32).as_strided((6, 2, 4), (24, 4, 1), 10)
    cache = single([conv, ssm], mamba(padded=96))
    assert places(cache.groups[0]) == (Ref(0, 0, 36), Ref(0, 40, 32))


def test_mamba_states_in_memories_of_their_own() -> None:
    conv, ssm = torch.zeros(6, 3, 6, dtype=torch.bfloat16), torch.zeros(6, 2, 4)
    cache = single([conv, ssm], mamba())
    assert places(cache.groups[0]) == (Ref(0, 0, 36), Ref(1, 0, 32))


def test_kernel_blocks_alone_in_a_tensor() -> None:
    spec = layer(block=16, backend=TRITON_NHD, kernel_blocks=4)
    tensor = torch.zeros(6 * 4, 2, 4, 2, 8, dtype=torch.bfloat16)
    cache = single(tensor, spec)
    assert described(cache) == [((6, 1024), (1024, 1), 0)]
    assert places(cache.groups[0]) == (Ref(0, 0, 1024),)
    check_moves([tensor.view(torch.uint8).view(-1)], {"l": tensor}, {"l": spec}, one_group({"l": spec}), cache, 6)


def test_kernel_blocks_inside_a_shared_tensor() -> None:
    """One layer's page is k runs of page/k, L * page/k apart."""
    specs = named("l", 3, layer(2, 1, block=16, dtype="uint8", backend=TRITON_NHD, kernel_blocks=4))
    memory = flat(4 * 3 * 64)
    layers = {f"l{at}": memory.as_strided((16, 2, 4, 2, 1), (48, 8, 2, 1, 1), at * 16) for at in range(3)}
    cache = canonicalise(layers, specs, [LayerGroup(at, (f"l{at}",)) for at in range(3)])
    assert described(cache) == [((4, 192), (192, 1), 0)]
    assert [places(group) for group in cache.groups] == [(Ref(0, at * 16, 16, 4, 48),) for at in range(3)]
    check_moves([memory], layers, specs, [LayerGroup(at, (f"l{at}",)) for at in range(3)], cache, 4)
    whole = canonicalise(layers, specs, one_group(specs))
    assert places(whole.groups[0]) == (Ref(0, 0, 192),)


def different_kernel_blocks() -> tuple[Any, dict[str, Any], dict[str, LayerSpec]]:
    """nb=4, L=3, page=64: layer a is slot 0 with k=1, layer b slot 1 with k=4."""
    memory = flat(4 * 3 * 64)
    layers = {
        "a": memory.as_strided((4, 2, 16, 2, 1), (192, 32, 2, 1, 1), 0),
        "b": memory.as_strided((16, 2, 4, 2, 1), (48, 8, 2, 1, 1), 16),
    }
    spec = layer(2, 1, block=16, dtype="uint8", backend=TRITON_NHD)
    return memory, layers, {"a": spec, "b": replace(spec, kernel_blocks=4)}


def test_layers_with_different_kernel_blocks_overlap_by_64_of_256_bytes() -> None:
    memory, layers, _ = different_kernel_blocks()
    layers["a"].fill_(1)
    assert int(memory.sum()) == 256
    assert int(layers["b"].sum()) == 64


def test_layers_of_one_group_with_different_kernel_blocks_are_refused() -> None:
    """Layer a has bytes 0 to 63 of a row of 192; b has 16 to 31, and more behind them."""
    _, layers, specs = different_kernel_blocks()
    with pytest.raises(UsageError, match=r"layers a and b of one group overlap .* 16 to 32 .* equal kernel blocks"):
        canonicalise(layers, specs, [LayerGroup(0, ("a", "b"))])


def test_different_groups_may_overlap_within_a_block() -> None:
    """A block id has one group at a time. b: 4 runs of 16 bytes from 16, 48 apart."""
    memory, layers, specs = different_kernel_blocks()
    groups = [LayerGroup(0, ("a",)), LayerGroup(1, ("b",))]
    cache = canonicalise(layers, specs, groups)
    assert described(cache) == [((4, 192), (192, 1), 0)]
    assert [places(group) for group in cache.groups] == [(Ref(0, 0, 64),), (Ref(0, 16, 16, 4, 48),)]
    check_moves([memory], layers, specs, groups, cache, 4)


def test_blocks_of_two_ids_that_overlap_are_refused_whatever_their_groups() -> None:
    """b's rows of 192 bytes begin 16 bytes behind a's: the last 16 of each are a's of the next block."""
    memory = flat(4 * 192 + 16)
    layers = {"a": memory.as_strided((4, 192), (192, 1)), "b": memory.as_strided((16, 48), (48, 1), 16)}
    spec = Opaque(16, 192)
    specs: dict[str, LayerSpec] = {"a": spec, "b": replace(spec, kernel_blocks=4)}
    with pytest.raises(UsageError, match=r"layers a and b interleave, but not in rows of one length: .*192 and 192"):
        canonicalise(layers, specs, [LayerGroup(0, ("a",)), LayerGroup(1, ("b",))])


# --- layers of kinds that are not known ---


@pytest.mark.parametrize("ratio", [1, 2])
def test_an_opaque_layer_is_stored_as_it_is(ratio: int) -> None:
    """3 x 4 items of float32 behind each block, 48 bytes, in any shape."""
    tensor = torch.zeros(6 * ratio, 3, 4 // ratio)
    spec = Opaque(16, 48, kernel_blocks=ratio)
    cache = single(tensor, spec)
    assert described(cache) == [((6, 48), (48, 1), 0)]
    assert cache.groups == (Group(0, GroupKind.FULL, 16, (Ref(0, 0, 48, layers=digest_layers(["l"])),)),)
    check_moves([tensor.view(torch.uint8).view(-1)], {"l": tensor}, {"l": spec}, one_group({"l": spec}), cache, 6)


def test_an_opaque_layer_of_every_dtype() -> None:
    """All of torch's, but those that are no plain bytes: quantised ones, whose tensors come with scales, and those
    whose elements torch keeps as parts of bytes.
    """
    names = {str(one).removeprefix("torch.") for one in vars(torch).values() if isinstance(one, torch.dtype)}
    parts = {name for name in names if re.fullmatch(r"u?int[1-7]|bits.*|qu?int.*", name)}
    for name in sorted(names - parts):
        memory = flat(6 * 48)
        dtype = getattr(torch, name)
        tensor = memory.view(dtype).view(6, 48 // dtype.itemsize)
        cache = single(tensor, Opaque(16, 48))
        assert (described(cache), places(cache.groups[0])) == ([((6, 48), (48, 1), 0)], (Ref(0, 0, 48),)), name
        assert cache.tensors[0].data_ptr() == memory.data_ptr()
    assert names - parts == set(ITEM_BYTES) >= set(get_args(Dtype)) - {""}


def test_an_opaque_layer_with_blocks_inside_and_several_tensors() -> None:
    """(2, 6, 8) float16 with blocks in dimension 1: 2 tensors of 16 bytes a block; and (1, 6, 5) of 5 bytes."""
    tensors = [torch.zeros(2, 6, 8, dtype=torch.float16), torch.zeros(1, 6, 5, dtype=torch.uint8)]
    spec = Opaque(16, 37, block_dim=1)
    cache = single(tensors, spec)
    assert places(cache.groups[0]) == (Ref(0, 0, 16), Ref(1, 0, 16), Ref(2, 0, 5))
    memory = [one.view(torch.uint8).view(-1) for one in tensors]
    check_moves(memory, {"l": tensors}, {"l": spec}, one_group({"l": spec}), cache, 6)


def test_an_opaque_layer_of_another_size_than_its_spec_says() -> None:
    with pytest.raises(UsageError, match=r"layer l: .* has 48 bytes a block, its spec says 44$"):
        single(torch.zeros(6, 12), Opaque(16, 44))
    with pytest.raises(UsageError, match=r"layer l: float32 \(6, 12\) .* has no dimension 2 that counts blocks"):
        single(torch.zeros(6, 12), Opaque(16, 48, block_dim=2))


def test_different_kernel_blocks_on_a_slot_of_their_own() -> None:
    """A Mamba layer (k=1) over an attention layer (k=4) that has its tensor for itself: nothing interleaves."""
    specs: dict[str, LayerSpec] = {
        "attention": layer(2, 2, block=16, dtype="uint8", backend=TRITON_NHD, kernel_blocks=4),
        "mamba": mamba(padded=128),
    }
    memory = flat(6 * 128)
    layers = {
        "attention": memory.view(24, 2, 4, 2, 2),
        "mamba": [
            memory.view(torch.bfloat16).as_strided((6, 3, 6), (64, 6, 1)),
            memory.view(torch.float32).as_strided((6, 2, 4), (32, 4, 1), 9),
        ],
    }
    groups = [LayerGroup(0, ("attention",)), LayerGroup(1, ("mamba",))]
    cache = canonicalise(layers, specs, groups)
    assert described(cache) == [((6, 128), (128, 1), 0)]
    check_moves([memory], layers, specs, groups, cache, 6)


def test_kernel_blocks_that_make_no_blocks() -> None:
    tensor = torch.zeros(30, 2, 4, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"layer l: bfloat16 .*30 kernel blocks are not a multiple of 4"):
        single(tensor, layer(block=16, backend=TRITON_NHD, kernel_blocks=4))


def test_a_tensor_of_several_groups_is_listed_once() -> None:
    tensor = torch.zeros(6, 2, 4, 2, 8, dtype=torch.bfloat16)
    specs: dict[str, LayerSpec] = {
        "full": layer(backend=TRITON_NHD),
        "sliding": layer(backend=TRITON_NHD, kind=LayerKind.SLIDING, window=9),
    }
    cache = canonicalise(
        {"full": tensor, "sliding": tensor.view(6, 2, 4, 2, 8)},
        specs,
        [LayerGroup(0, ("full",)), LayerGroup(1, ("sliding",), blocks_per_key=2)],
    )
    assert described(cache) == [((6, 256), (256, 1), 0)]
    full, sliding = (Ref(0, 0, 256, dtype="bfloat16", layers=digest_layers([layer])) for layer in specs)
    assert cache.groups == (
        Group(0, GroupKind.FULL, 4, (full,)),
        Group(1, GroupKind.SLIDING, 8, (sliding,), window_keys=1, blocks_per_key=2),
    )


def test_what_the_bytes_of_refs_are() -> None:
    """All refs of a group name all its layers, in the order of their bytes; elements of several types are not named."""
    specs: dict[str, LayerSpec] = {
        "b": layer(backend=TRITON_NHD),
        "a": layer(backend=TRITON_NHD),
        "m": mamba(block=4),
        "o": Opaque(4, 48),
    }
    groups = [LayerGroup(0, ("a", "b")), LayerGroup(1, ("m",)), LayerGroup(2, ("o",))]
    plan = cross_layers(specs, groups, 3)
    contents = {group.group: {(ref.dtype, ref.layers) for ref in group.refs} for group in plan.canonical.groups}
    assert contents == {
        0: {("bfloat16", digest_layers(["a", "b"]))},
        1: {("", digest_layers(["m"]))},
        2: {("", digest_layers(["o"]))},
    }


def test_a_layer_that_uses_another_ones_cache_adds_nothing() -> None:
    tensor = torch.zeros(6, 2, 4, 2, 8, dtype=torch.bfloat16)
    specs = named("l", 2, layer(backend=TRITON_NHD))
    cache = canonicalise({"l0": tensor, "l1": tensor}, specs, one_group(specs))
    assert (len(cache.tensors), cache.groups[0].payload_bytes) == (1, 256)


def test_layers_of_one_allocation_one_behind_the_other() -> None:
    """Layers outermost: a tensor each, over one storage."""
    memory = flat(3 * 6 * 256)
    layers = {f"l{at}": memory[at * 1536 :][:1536].view(torch.bfloat16).view(6, 2, 4, 16) for at in range(3)}
    specs = named("l", 3, layer(backend=PACKED_HND))
    cache = canonicalise(layers, specs, one_group(specs))
    assert described(cache) == [((6, 256), (256, 1), at * 1536) for at in range(3)]
    check_moves([memory], layers, specs, one_group(specs), cache, 6)


def test_blocks_outermost() -> None:
    memory = flat(6 * 3 * 256)
    typed = memory.view(torch.bfloat16)
    layers = {f"l{at}": typed.as_strided((6, 2, 4, 16), (384, 64, 16, 1), at * 128) for at in range(3)}
    specs = named("l", 3, layer(backend=PACKED_HND))
    cache = canonicalise(layers, specs, one_group(specs))
    assert described(cache) == [((6, 768), (768, 1), 0)]
    assert places(cache.groups[0]) == (Ref(0, 0, 768),)
    check_moves([memory], layers, specs, one_group(specs), cache, 6)


@pytest.mark.parametrize(
    ("order", "tensors"), [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 6), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 1)]
)
def test_every_order_of_one_allocation(order: str, tensors: int) -> None:
    """Layers, blocks, heads, tokens, contents: from many small pages in many tensors to one row of everything."""
    sizes = {"L": 3, "B": 6, "H": 2, "N": 4, "C": 16}
    memory = flat(3 * 6 * 256)
    whole = memory.view(torch.bfloat16).view([sizes[axis] for axis in order])
    whole = whole.permute([order.index(axis) for axis in "LBHNC"])
    layers = {f"l{at}": whole[at] for at in range(3)}
    specs = named("l", 3, layer(backend=PACKED_HND))
    cache = canonicalise(layers, specs, one_group(specs))
    page = 768 // tensors
    assert [tuple(one.shape) for one in cache.tensors] == [(6, page)] * tensors
    assert places(cache.groups[0]) == tuple(Ref(at, 0, page) for at in range(tensors))
    check_moves([memory], layers, specs, one_group(specs), cache, 6)


def test_pools_of_token_slots() -> None:
    """K and V in separate tensors, (slots, heads, size), and pages of 4 slots: a kernel block is one slot."""
    spec = layer(block=4, backend=0, kernel_blocks=4)
    pools = [torch.zeros(6 * 4, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    cache = single(pools, spec)
    assert described(cache) == [((6, 128), (128, 1), 0)] * 2
    assert places(cache.groups[0]) == (Ref(0, 0, 128), Ref(1, 0, 128))
    memory = [pool.view(-1).view(torch.uint8) for pool in pools]
    check_moves(memory, {"l": pools}, {"l": spec}, one_group({"l": spec}), cache, 6)
    with pytest.raises(UsageError, match=r"layer l: .* has 384 bytes a block, its spec says 256"):
        single([pools[0], torch.zeros(6 * 4, 4, 8, dtype=torch.bfloat16)], spec)
    with pytest.raises(UsageError, match="3 tensors, where its spec describes one"):
        single([*pools, pools[0]], spec)


def test_one_group_with_several_page_sizes() -> None:
    """4 layers of 32,768 and 2 of 16,384 bytes: 2 tensors, 2 refs, payload 163,840."""
    specs: dict[str, LayerSpec] = {
        **named("big", 4, Attention(16, 8, 64, "bfloat16", FLASH_NHD)),
        **named("small", 2, Attention(16, 4, 64, "bfloat16", FLASH_NHD)),
    }
    plan = cross_layers(specs, one_group(specs), 3)
    made = plan.allocate("meta")
    assert [tuple(one.shape) for one in made.cache.tensors] == [(3, 131072), (3, 32768)]
    assert places(made.cache.groups[0]) == (Ref(0, 0, 131072), Ref(1, 0, 32768))
    assert made.cache.groups[0].payload_bytes == 163840


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.zeros(1, 2, 4, 2, 8, dtype=torch.bfloat16).expand(6, 2, 4, 2, 8), "overlap; each must have"),
        (lambda: torch.zeros(6, 2, 1, 2, 8, dtype=torch.bfloat16).expand(6, 2, 4, 2, 8), "overlap"),
        (lambda: torch.zeros(999, dtype=torch.bfloat16).as_strided((6, 2, 4, 2, 8), (100, 64, 16, 8, 1)), "overlap"),
        (lambda: torch.zeros(6, 2, 4, 2, 4, dtype=torch.bfloat16), "has 128 bytes a block, its spec says 256"),
        (lambda: torch.zeros(6, 2, 4, 2, 8), "has 512 bytes a block, its spec says 256 of bfloat16"),
        (lambda: torch.zeros(6, 2, 2, 4, 8, dtype=torch.bfloat16), r"not of the backend's shape \(6, 2, 4, 2, 8\)"),
        (lambda: torch.zeros(6, 2, 4, 2, 8, dtype=torch.bfloat16).to_sparse(), "is not a dense torch tensor"),
        (lambda: torch.zeros(6, 2, 4, 2, 8, dtype=torch.uint4), "dtype 'uint4' is not known"),
        (lambda: [torch.zeros(6, 2, 4, 2, 8)] * 2, "2 tensors, where its spec describes one"),
        (lambda: "tensor", "a str is not a dense torch tensor"),
        (lambda: torch.zeros(0, 2, 4, 2, 8, dtype=torch.bfloat16), "0 kernel blocks are not a multiple"),
    ],
)
def test_what_cannot_be_expressed(tensor: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        single(tensor(), layer(backend=TRITON_NHD))


def test_refusals_name_the_layer_its_shape_and_strides() -> None:
    tensor = torch.zeros(999, dtype=torch.bfloat16).as_strided((6, 2, 4, 2, 8), (100, 64, 16, 8, 1))
    with pytest.raises(UsageError, match=r"layer l: bfloat16 \(6, 2, 4, 2, 8\) with strides \(100, 64, 16, 8, 1\)"):
        single(tensor, layer(backend=TRITON_NHD))


def test_a_dimension_of_blocks_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="has no dimension 7 that counts blocks"):
        single(torch.zeros(6, 128, dtype=torch.bfloat16), layer(backend=7))


def test_states_that_are_not_the_specs() -> None:
    conv, ssm = torch.zeros(6, 3, 6, dtype=torch.bfloat16), torch.zeros(6, 2, 4)
    for wrong in ([ssm, conv], [conv], [conv, ssm.half()]):
        with pytest.raises(UsageError, match=r"layer l: states .* are not those of"):
            single(wrong, mamba())
    overlapping = [torch.zeros(99).as_strided((6, 2, 4), (6, 4, 1))]
    with pytest.raises(UsageError, match=r"its blocks .* overlap"):
        single(overlapping, Mamba(16, (State((2, 4), "float32"),)))


def test_layers_of_one_group_that_share_bytes() -> None:
    memory = torch.zeros(6, 3, 64, dtype=torch.bfloat16)
    layers = {
        "a": memory.as_strided((6, 2, 4, 2, 8), (192, 64, 16, 8, 1), 0),
        "b": memory.as_strided((6, 2, 4, 2, 8), (192, 64, 16, 8, 1), 64),
    }
    specs: dict[str, LayerSpec] = dict.fromkeys(layers, layer(backend=TRITON_NHD))
    with pytest.raises(UsageError, match="layers a and b of one group overlap in the same block: bytes 128 to 256"):
        canonicalise(layers, specs, one_group(specs))
    assert len(canonicalise(layers, specs, [LayerGroup(0, ("a",)), LayerGroup(1, ("b",))]).tensors) == 1


def test_rows_of_two_lengths_over_the_same_bytes() -> None:
    memory = torch.zeros(6 * 128, dtype=torch.bfloat16)
    layers = {"a": memory.view(6, 2, 4, 2, 8), "b": memory.view(12, 2, 4, 2, 4)}
    specs: dict[str, LayerSpec] = {"a": layer(backend=TRITON_NHD), "b": layer(2, 4, backend=TRITON_NHD)}
    with pytest.raises(UsageError, match=r"layers a and b interleave, but not in rows of one length: .*256 and 128"):
        canonicalise(layers, specs, [LayerGroup(0, ("a",)), LayerGroup(1, ("b",))])


def test_a_layer_that_reaches_into_the_next_row() -> None:
    """b's last byte of a block is a's first of the next."""
    memory = flat(6 * 100 + 50)
    layers = {"a": memory.as_strided((6, 50), (100, 1)), "b": memory.as_strided((6, 50), (100, 1), 51)}
    specs: dict[str, LayerSpec] = dict.fromkeys(layers, Attention(1, 1, 25, "uint8", 0))
    with pytest.raises(UsageError, match="layers a and b interleave, but not in rows of one length"):
        canonicalise(layers, specs, [LayerGroup(0, ("a",)), LayerGroup(1, ("b",))])
    layers["b"] = memory.as_strided((6, 50), (100, 1), 50)
    assert len(canonicalise(layers, specs, one_group(specs)).tensors) == 1


def test_layers_of_one_group_with_different_numbers_of_blocks() -> None:
    layers = {"a": torch.zeros(6, 2, 4, 2, 8).bfloat16(), "b": torch.zeros(5, 2, 4, 2, 8).bfloat16()}
    specs: dict[str, LayerSpec] = dict.fromkeys(layers, layer(backend=TRITON_NHD))
    with pytest.raises(UsageError, match=r"its layers differ in how many blocks they have: \{'a': 6, 'b': 5\}"):
        canonicalise(layers, specs, one_group(specs))
    assert len(canonicalise(layers, specs, [LayerGroup(0, ("a",)), LayerGroup(1, ("b",))]).tensors) == 2


def test_layers_and_specs_that_differ() -> None:
    with pytest.raises(UsageError, match=r"not of the same layers: \['m'\]"):
        canonicalise({}, {"m": layer()}, [LayerGroup(0, ("m",))])


def test_layers_on_two_devices() -> None:
    specs = named("l", 2, layer(backend=TRITON_NHD))
    layers = {f"l{at}": torch.zeros(6, 2, 4, 2, 8, device=on).bfloat16() for at, on in enumerate(("cpu", "meta"))}
    with pytest.raises(UsageError, match="layer l1: it is on meta, others are on cpu"):
        canonicalise(layers, specs, one_group(specs))


def test_an_empty_group() -> None:
    with pytest.raises(UsageError, match="group 0 has no layers"):
        canonicalise({}, {}, [LayerGroup(0, ())])


# --- canonical tensors that an engine has already ---


def test_an_engines_own_canonical_form() -> None:
    memory = torch.zeros(6, 512, dtype=torch.int8)
    groups = (
        Group(0, GroupKind.FULL, 16, (Ref(0, 0, 200), Ref(1, 0, 100))),
        Group(1, GroupKind.MAMBA, 16, (Ref(0, 0, 50, 2, 100),)),
    )
    cache = CanonicalCache((memory[:, :256], memory[:, 256:]), groups)
    registered = cache.kv_cache()
    assert [(one.offset, one.page_bytes, one.stride_bytes) for one in registered.tensors] == [
        (0, 256, 512),
        (256, 256, 512),
    ]
    assert len(registered.allocations()) == 1
    assert [cache.groups[at].payload_bytes for at in range(2)] == [300, 100]


@pytest.mark.parametrize(
    ("tensor", "refs", "message"),
    [
        (lambda: torch.zeros(6, 64), (), r"tensor 0: torch.float32 \(6, 64\) .* is not canonical"),
        (lambda: torch.zeros(6, 64, dtype=torch.int8).t(), (), "is not canonical"),
        (lambda: torch.zeros(6, 8, 8, dtype=torch.int8), (), "is not canonical"),
        (lambda: torch.zeros(1, 64, dtype=torch.int8).expand(6, 64), (), "rows of 64 bytes, 0 apart, overlap"),
        (lambda: torch.zeros(6, 64, dtype=torch.int8), (Ref(0, 1, 64),), "extends beyond its page of 64 bytes"),
        (
            lambda: torch.zeros(6, 64, dtype=torch.int8),
            (Ref(1, 0, 64),),
            r"names tensor 1, which does not exist \(tensors: 1\)",
        ),
        (lambda: torch.zeros(6, 64, dtype=torch.int8), (Ref(0, 0, 9), Ref(0, 8, 4)), "bytes 8 to 9 .*named twice"),
        (lambda: torch.zeros(6, 64, dtype=torch.int8), (Ref(0, 0, 9, 3, 8),), "bytes 8 to 9 of tensor 0"),
    ],
)
def test_what_is_not_canonical(tensor: Any, refs: tuple[Ref, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CanonicalCache((tensor(),), (Group(0, GroupKind.FULL, 16, refs),))


def test_tensors_without_memory_cannot_be_registered() -> None:
    cache = single(torch.zeros(6, 2, 4, 2, 8, dtype=torch.bfloat16, device="meta"), layer(backend=TRITON_NHD))
    with pytest.raises(UsageError, match="tensors on meta have no memory"):
        cache.kv_cache()
