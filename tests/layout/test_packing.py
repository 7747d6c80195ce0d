"""Several attention layers on one page."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvoffloadd.client import Ref
from kvoffloadd.errors import UsageError
from kvoffloadd.layout import (
    FLASH_HND,
    FLASH_NHD,
    FLASHINFER_HND,
    Backend,
    LayerSpec,
    Mamba,
    Opaque,
    Plan,
    State,
    packed_block_size,
    packed_pages,
)
from tests.layout.models import layer, mamba, named
from tests.layout.oracle import check_plan, places

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")


def hybrid(attention: int, states: int, pack: int, *, blocks: int = 5, backend: Backend = FLASH_NHD) -> Plan:
    """Pages of 256 bytes a layer, and states of 68."""
    specs: dict[str, LayerSpec] = {
        **named("a", attention, layer(backend=backend)),
        **named("m", states, mamba(block=4)),
    }
    return packed_pages(specs, pack, blocks)


@pytest.mark.parametrize(("pack", "tokens"), [(1, 2096), (2, 1056), (4, 528), (8, 272)])
def test_how_long_a_block_is(pack: int, tokens: int) -> None:
    """Qwen3.5-397B-A17B-FP8 on two ranks."""
    assert packed_block_size(2_134_016, 1024, pack) == tokens
    assert pack * tokens * 1024 >= 2_134_016 > pack * (tokens - 16) * 1024


def test_15_attention_and_45_mamba_layers() -> None:
    plan = hybrid(15, 45, 4)
    assert len(plan.tensors) == 4
    assert len(plan.groups) == 1 + 12
    assert sorted(len(group.layers) for group in plan.groups[1:]) == [3] * 3 + [4] * 9
    states = [f"m{at}" for at in range(45)]
    assert [group.layers for group in plan.groups[1:]] == [tuple(states[at::12]) for at in range(12)]
    lies = Counter((views[0].memory, name[0]) for name, views in plan.views.items())
    assert [(lies[at, "a"], lies[at, "m"]) for at in range(4)] == [(4, 12)] * 3 + [(3, 9)]
    used = sum(plan.specs[name].page_bytes for name in plan.groups[0].layers)
    assert plan.block_bytes - used == plan.specs["a0"].page_bytes  # one layer's space is wasted
    check_plan(plan)


def test_before_packing() -> None:
    plan = hybrid(15, 45, 1)
    assert len(plan.tensors) == 15
    assert [len(group.layers) for group in plan.groups] == [15, 15, 15, 15]
    check_plan(plan)


@pytest.mark.parametrize("pack", [1, 2, 4])
def test_strides_of_a_pack(pack: int) -> None:
    """K/V and block strides are easily confused: every byte is looked at too."""
    bs, h, d = 4, 2, 8
    plan = hybrid(5, 3, pack, blocks=7)
    made = check_plan(plan)
    for at in range(5):
        one = made.layers[f"a{at}"]
        assert tuple(one.shape) == (2, 7, bs, h, d)
        assert one.stride() == (bs * h * d, 2 * bs * h * d * pack, h * d, d, 1)
        assert one.storage_offset() == at % pack * 2 * bs * h * d


@pytest.mark.parametrize("pack", [1, 2, 4])
def test_strides_of_a_pack_heads_first(pack: int) -> None:
    bs, h, d = 4, 2, 8
    made = check_plan(hybrid(5, 3, pack, blocks=7, backend=FLASH_HND))
    for at in range(5):
        one = made.layers[f"a{at}"]
        assert tuple(one.shape) == (2, 7, bs, h, d)
        assert one.stride() == (bs * d, 2 * bs * h * d * pack, d, pack * 2 * bs * d, 1)
        assert one.storage_offset() == at % pack * 2 * bs * d


def test_blocks_are_whole_pages() -> None:
    """Memory of 8 pages that 4 layers share holds 8 blocks, not 32."""
    assert hybrid(4, 0, 4).block_bytes == 4 * 256
    made = hybrid(4, 0, 4, blocks=8).allocate("meta")
    assert [tuple(one.shape) for one in made.cache.tensors] == [(8, 1024)]


def test_canonically_a_pack_is_one_tensor() -> None:
    made = hybrid(4, 2, 4).allocate("meta")
    assert [(tuple(one.shape), one.stride()) for one in made.cache.tensors] == [((5, 1024), (1024, 1))]
    assert places(made.cache.groups[0]) == (Ref(0, 0, 1024),)


def test_three_of_four_layers_heads_first_are_two_runs() -> None:
    """(0, 1536) and (2048, 1536) of 4,096 bytes: 2 heads, 512 bytes of each layer and head."""
    specs = named("a", 3, layer(2, 8, block=16, backend=FLASH_HND))
    made = check_plan(packed_pages(specs, 4, 5))
    assert [tuple(one.shape) for one in made.cache.tensors] == [(5, 4096)]
    assert places(made.cache.groups[0]) == (Ref(0, 0, 1536, 2, 2048),)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("backend", [FLASH_NHD, FLASH_HND])
def test_packs_with_kernel_blocks(ratio: int, backend: Backend) -> None:
    specs = named("a", 5, layer(backend=backend, kernel_blocks=ratio))
    check_plan(packed_pages(specs, 2, 5))


@pytest.mark.parametrize("backend", [FLASH_NHD, FLASH_HND, FLASHINFER_HND])
@pytest.mark.parametrize(("block", "ratio"), [(64, 4), (2096, 131)])
def test_kernel_blocks_of_16_tokens_in_packs_with_mamba_on_the_pages(backend: Backend, block: int, ratio: int) -> None:
    """A page of 4 layers: 4 x 2 x tokens x 2 heads x 1 byte; states take 4 x block x 2 of it."""
    attention = layer(2, 1, block=block, dtype="uint8", backend=backend, kernel_blocks=ratio)
    state = Mamba(block, (State((block, 2), "float32"),))
    plan = packed_pages({**named("a", 5, attention), **named("m", 3, state)}, 4, 3)
    page = 4 * 2 * block * 2
    assert [one.shape for one in plan.tensors] == [(3, page)] * 2
    assert [group.layers for group in plan.groups[1:]] == [("m0", "m2"), ("m1",)]
    # Layer a1's kernel pages, 2 x 16 x 2 = 64 bytes, are 4 x 64 apart.
    if backend is FLASH_NHD:
        assert plan.canonical.layers["a1"] == (Ref(0, 64, 64, ratio, 256),)
    check_plan(plan)


def test_what_cannot_be_packed() -> None:
    both: dict[str, LayerSpec] = {"a": layer(), "b": layer(4)}
    with pytest.raises(UsageError, match="layers a and b can't be packed: pages of 256 and 512 bytes"):
        packed_pages(both, 2, 5)
    with pytest.raises(UsageError, match="0 attention layers can't be packed by 2"):
        packed_pages({"m": mamba()}, 2, 5)
    with pytest.raises(UsageError, match="1 attention layers can't be packed by 0"):
        packed_pages({"a": layer()}, 0, 5)
    big: dict[str, LayerSpec] = {"a": layer(), "m": mamba((99, 6), block=4)}
    with pytest.raises(UsageError, match=r"layer m: a state of 1220 bytes does not fit a page of 512: 2 attention"):
        packed_pages(big, 2, 5)
    with pytest.raises(UsageError, match=r"sizes must be positive: 10, 0, 1"):
        packed_block_size(10, 0, 1)
    mixed: dict[str, LayerSpec] = {"a": layer(kernel_blocks=2), "b": layer(kernel_blocks=1), "c": layer()}
    with pytest.raises(UsageError, match="layers b and a of one group overlap in the same block"):
        packed_pages(mixed, 3, 5)
    with pytest.raises(UsageError, match="a cache needs at least 1 block, not 0"):
        packed_pages({"a": layer()}, 1, 0)
    isolated = named("a", 2, layer(backend=Backend("old", FLASH_NHD.shape, FLASH_NHD.memory)))
    with pytest.raises(UsageError, match="layer a0: its backend has no order with blocks first"):
        packed_pages(isolated, 2, 5)
    with pytest.raises(UsageError, match="layer sink is not an attention layer"):
        packed_pages({"a": layer(), "sink": Opaque(4, 256)}, 2, 5)
