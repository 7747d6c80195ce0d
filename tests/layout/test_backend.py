"""Orders of backends, and which dimension counts blocks."""

from __future__ import annotations

import pytest

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
    LayerKind,
)

ALL = (FLASHINFER_HND, FLASH_HND, FLASH_NHD, LATENT, PACKED_HND, PACKED_NHD, TRITON_HND, TRITON_NHD)


@pytest.mark.parametrize(
    ("backend", "order", "with_layers"),
    [
        (FLASH_NHD, (0, 1, 2, 3, 4), (2, 0, 1, 3, 4, 5)),
        (FLASH_HND, (0, 1, 3, 2, 4), (2, 4, 0, 1, 3, 5)),
        (TRITON_NHD, (0, 1, 2, 3, 4), (1, 0, 2, 3, 4, 5)),
        (TRITON_HND, (0, 1, 3, 2, 4), (1, 4, 0, 2, 3, 5)),
        (FLASHINFER_HND, (0, 1, 3, 2, 4), (1, 2, 4, 0, 3, 5)),
    ],
    ids=lambda one: one.name if isinstance(one, Backend) else None,
)
def test_orders_as_engines_write_them(backend: Backend, order: tuple[int, ...], with_layers: tuple[int, ...]) -> None:
    """Which of a backend's dimensions, and of those with layers first, is n-th in memory."""
    assert backend.memory == tuple(backend.shape[at] for at in order)
    assert backend.layered == tuple(("layer", *backend.shape)[at] for at in with_layers)


def test_what_heads_first_means() -> None:
    assert (FLASH_NHD.outside_layers, FLASH_HND.outside_layers) == ((), ("head",))
    assert FLASHINFER_HND.outside_layers == ("kv", "head")
    assert all(backend.shares for backend in ALL)


def test_a_backend_without_an_order_with_layers_keeps_its_own_behind_them() -> None:
    """Not the identity: a backend whose heads come first would be given a tensor that it misreads."""
    backend = Backend("old", FLASH_HND.shape, FLASH_HND.memory)
    assert backend.with_layers == ("layer", "kv", "block", "head", "token", "dim")
    assert not backend.shares


@pytest.mark.parametrize("backend", ALL, ids=lambda backend: backend.name)
def test_the_dimension_of_blocks(backend: Backend) -> None:
    kind = LayerKind.MLA if backend is LATENT else LayerKind.FULL
    spec = Attention(16, 1 if backend is LATENT else 8, 64, "bfloat16", backend, kind)
    assert (spec.shape(1003) or ()).index(1003) == backend.block_dim == spec.block_dim


@pytest.mark.parametrize(
    ("shape", "memory", "layered", "message"),
    [
        (("block", "block"), ("block", "block"), None, "must name each of its dimensions once"),
        (("kv", "token"), ("kv", "token"), None, "block included"),
        (("block", "planet"), ("block", "planet"), None, "must name"),
        (("block", "token"), ("block", "dim"), None, r"\('block', 'dim'\) is not an order of \('block', 'token'\)"),
        (("block", "token"), ("block", "token"), ("block", "token"), "is not an order of layer and"),
    ],
)
def test_what_is_no_backend(
    shape: tuple[str, ...], memory: tuple[str, ...], layered: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Backend("wrong", shape, memory, layered)
