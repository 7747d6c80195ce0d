"""Layers whose bytes vLLM's canonical caches have, and layers whose bytes they leave out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.vllm.spans import Span, check_covered
from tests.integrations.vllm.fakes import CacheRef, CacheTensor

torch = pytest.importorskip("torch")

BLOCKS, PAGE = 6, 256


@dataclass(frozen=True)
class Layers:
    """Views of a memory of (BLOCKS, PAGE) bytes, and what is named of it."""

    named: Any
    page_bytes: int
    views: tuple[Any, ...]


def memory() -> Any:
    return torch.zeros(BLOCKS, PAGE, dtype=torch.int8)


def half(rows: Any, at: int) -> Any:
    """One of two layers on a page: (blocks, heads, tokens, content) of float32."""
    return rows[:, at * 128 : (at + 1) * 128].view(torch.float32).unflatten(1, (2, 4, 4))


def whole(rows: Any, kernel_blocks: int = 1) -> Any:
    return rows.view(BLOCKS * kernel_blocks, -1).view(torch.float32).unflatten(1, (2, -1, 4))


def covered() -> dict[str, Layers]:
    rows = memory()
    return {
        "whole page": Layers(rows, PAGE, (whole(rows),)),
        "two layers on a page": Layers(rows, PAGE, (half(rows, 0), half(rows, 1))),
        "kernel blocks": Layers(rows, PAGE, (whole(rows, 4),)),
        "states on a padded page": Layers(rows, 96, (rows[:, :32], rows[:, 32:96].view(torch.float32))),
        "a page within a row": Layers(rows[:, 128:], 128, (half(rows, 1),)),
        "one block": Layers(rows[:1], PAGE, (whole(rows)[::BLOCKS],)),
    }


def left_out() -> dict[str, Layers]:
    rows, others = memory(), memory()
    heads_outside = rows.view(-1).view(torch.float32).view(2, BLOCKS, 8, 4).transpose(0, 1)
    return {
        "another memory": Layers(rows, PAGE, (whole(others),)),
        "before the page": Layers(rows[:, 128:], 128, (half(rows, 0),)),
        "behind the page": Layers(rows[:, :128], 128, (half(rows, 1),)),
        "the end of the page": Layers(rows, PAGE - 4, (whole(rows),)),
        "the last kernel block": Layers(rows, PAGE - 4, (whole(rows, 4),)),
        "heads outside of blocks": Layers(rows, PAGE, (heads_outside,)),
        "other steps": Layers(rows, PAGE, (rows.view(-1)[: BLOCKS * 128].view(BLOCKS, 128),)),
        "fewer blocks": Layers(rows, PAGE, (whole(rows)[: BLOCKS - 1],)),
        "a block without row": Layers(rows[: BLOCKS - 1], PAGE, (whole(rows),)),
        "one of two states": Layers(rows, 96, (rows[:, :32], rows[:, 96:128])),
    }


def check(case: Layers) -> None:
    spans = {"layer": [Span.of(view) for view in case.views]}
    check_covered(["layer", "unknown"], [CacheRef(0, case.page_bytes, None)], [CacheTensor(case.named)], spans)


@pytest.mark.parametrize("name", covered())
def test_layers_whose_bytes_are_named(name: str) -> None:
    check(covered()[name])


@pytest.mark.parametrize("name", left_out())
def test_layers_whose_bytes_are_left_out_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"layer layer: .*incomplete"):
        check(left_out()[name])


def test_any_of_a_group_s_pages_may_have_them() -> None:
    """Packs of layers are separate tensors."""
    packs = [memory(), memory()]
    spans = {f"{pack}{at}": [Span.of(half(rows, at))] for pack, rows in enumerate(packs) for at in range(2)}
    tensors, refs = [CacheTensor(rows) for rows in packs], [CacheRef(at, PAGE, None) for at in range(2)]
    check_covered(list(spans), refs, tensors, spans)
    with pytest.raises(UsageError, match="layer 10: "):
        check_covered(list(spans), refs[:1], tensors, spans)
