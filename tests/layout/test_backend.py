"""Orders of backends, and which dimension counts blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

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
    LayerKind,
    probe_block_dim,
)

ALL = (FLASH_HND, FLASH_NHD, LATENT, PACKED_HND, PACKED_NHD, TRITON_HND, TRITON_NHD)


def test_flash_attentions_orders_with_layers() -> None:
    """As the backend itself writes them: which of its dimensions, and of those with layers first, is n-th in memory."""
    shape = FLASH_NHD.shape
    assert Backend.from_orders("flash-nhd", shape, (0, 1, 2, 3, 4), (2, 0, 1, 3, 4, 5)) == FLASH_NHD
    assert Backend.from_orders("flash-hnd", shape, (0, 1, 3, 2, 4), (2, 4, 0, 1, 3, 5)) == FLASH_HND


def test_what_heads_first_means() -> None:
    assert (FLASH_NHD.outside_layers, FLASH_HND.outside_layers) == ((), ("head",))
    assert all(backend.shares for backend in ALL)


def test_a_backend_is_asked_for_its_order_with_layers() -> None:
    orders = {False: (0, 1, 2, 3, 4), True: (2, 0, 1, 3, 4, 5)}
    assert Backend.probe("flash-nhd", FLASH_NHD.shape, orders.__getitem__) == FLASH_NHD


@pytest.mark.parametrize("error", [NotImplementedError, AttributeError, TypeError, ValueError])
def test_one_that_has_none_keeps_its_own_order_behind_layers(error: type[Exception]) -> None:
    """Not the identity: a backend whose heads come first would be given a tensor that it misreads."""

    def order(layers: bool) -> Sequence[int]:
        if layers:
            raise error("no layers")
        return (0, 1, 3, 2, 4)

    backend = Backend.probe("old", FLASH_HND.shape, order)
    assert backend.layered is None
    assert backend.with_layers == ("layer", "kv", "block", "head", "token", "dim")
    assert not backend.shares


@pytest.mark.parametrize("num_blocks", [1, 2, 16])
@pytest.mark.parametrize("backend", ALL, ids=lambda backend: backend.name)
def test_the_dimension_of_blocks_is_found_whatever_their_number(backend: Backend, num_blocks: int) -> None:
    """With 2 blocks K and V look like it, with 16 the tokens of a block do: the real shape is never searched."""
    kind = LayerKind.MLA if backend is LATENT else LayerKind.FULL
    spec = Attention(16, 1 if backend is LATENT else 8, 64, "bfloat16", backend, kind)
    asked = []

    def shape_of(count: int) -> Sequence[int]:
        asked.append(count)
        return spec.shape(count) or ()

    dim = probe_block_dim(shape_of)
    assert dim == backend.block_dim == spec.block_dim
    assert (spec.shape(num_blocks) or ())[dim] == num_blocks
    assert num_blocks not in asked


def test_no_dimension_of_blocks() -> None:
    with pytest.raises(UsageError, match=r"no single dimension counts blocks: .* the shape is \(2000006, 16\)"):
        probe_block_dim(lambda count: (2 * count, 16))
    with pytest.raises(UsageError, match="no single dimension"):
        probe_block_dim(lambda count: (count, count))


@pytest.mark.parametrize(
    ("shape", "memory", "layered", "said"),
    [
        (("block", "block"), ("block", "block"), None, "must name each of its dimensions once"),
        (("kv", "token"), ("kv", "token"), None, "block included"),
        (("block", "planet"), ("block", "planet"), None, "must name"),
        (("block", "token"), ("block", "dim"), None, r"\('block', 'dim'\) is no order of \('block', 'token'\)"),
        (("block", "token"), ("block", "token"), ("block", "token"), "is no order of layer and"),
    ],
)
def test_what_is_no_backend(
    shape: tuple[str, ...], memory: tuple[str, ...], layered: tuple[str, ...] | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        Backend("wrong", shape, memory, layered)


def test_a_permutation_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"\(0, 0\) is no order of the 2 dimensions"):
        Backend.from_orders("wrong", ("block", "token"), (0, 0))
