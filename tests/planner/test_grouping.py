"""Groups, as vLLM's hybrid cache manager forms them."""

from __future__ import annotations

import pytest

from kvoffloadd.layout import TRITON_NHD, LayerKind, LayerSpec
from kvoffloadd.planner import form_groups
from tests.layout.models import layer, named
from tests.planner.models import DEEPSEEK, GEMMA_2, GEMMA_3, GPT_OSS, LLAMA, LLAMA_4, QWEN, rank

FULL, SLIDING, MAMBA = LayerKind.FULL, LayerKind.SLIDING, LayerKind.MAMBA


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        (GPT_OSS, [(SLIDING, 12), (FULL, 12)]),
        (GEMMA_2, [(SLIDING, 13), (FULL, 13)]),
        (GEMMA_3, [*[(SLIDING, 5)] * 5, (SLIDING, 4), (FULL, 5)]),
        (LLAMA, [(FULL, 32)]),
        (DEEPSEEK, [(LayerKind.MLA, 27)]),
        (QWEN, [*[(MAMBA, 15)] * 3, (FULL, 15)]),
        (LLAMA_4, [*[(LayerKind.CHUNKED, 12)] * 3, (FULL, 12)]),
    ],
)
def test_real_models(name: str, groups: list[tuple[LayerKind, int]]) -> None:
    specs = rank(name).specs(TRITON_NHD)
    found = form_groups(specs)
    assert [(specs[group.layers[0]].kind, len(group.layers)) for group in found] == groups
    assert sorted(layer for group in found for layer in group.layers) == sorted(specs)


@pytest.mark.parametrize("name", [GEMMA_2, GEMMA_3, LLAMA_4])
def test_without_the_hybrid_manager_there_is_one(name: str) -> None:
    specs = rank(name, hybrid=False).specs(TRITON_NHD)
    assert [len(group.layers) for group in form_groups(specs)] == [len(specs)]


def test_layers_are_dealt_out_in_turn() -> None:
    """29 sliding layers over 6 groups."""
    first = form_groups(rank(GEMMA_3).specs(TRITON_NHD))[0]
    assert first.layers == ("layers.0", "layers.7", "layers.14", "layers.21", "layers.28")


@pytest.mark.parametrize(
    ("full", "sliding", "groups"),
    [(12, 13, [12, 13]), (4, 5, [4, 5]), (4, 6, [4, 3, 3]), (10, 20, [10, 10, 10]), (2, 5, [2, 2, 2, 1])],
)
def test_kinds_that_are_about_equal_get_one_group_each(full: int, sliding: int, groups: list[int]) -> None:
    specs: dict[str, LayerSpec] = {
        **named("f", full, layer()),
        **named("s", sliding, layer(kind=SLIDING, window=8)),
    }
    assert [len(group.layers) for group in form_groups(specs)] == groups
