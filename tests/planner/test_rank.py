"""What a rank has of a model: heads, states, parts, and how long a block gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffloadd.errors import ConfigError
from kvoffloadd.layout import LATENT, TRITON_NHD, Attention, LayerKind, Mamba
from kvoffloadd.planner import KV_DTYPES, Rank, read_model
from tests.planner.models import DEEPSEEK, GEMMA_3, GPT_OSS, LLAMA, QWEN, changed, model, rank


@pytest.mark.parametrize(
    ("name", "tp", "heads", "token_bytes", "parts"),
    [
        (GPT_OSS, 1, 8, 2048, 1),
        (GPT_OSS, 2, 4, 1024, 2),
        (GPT_OSS, 8, 1, 256, 8),
        (GPT_OSS, 16, 1, 256, 8),
        (LLAMA, 4, 2, 1024, 4),
        (QWEN, 2, 1, 1024, 2),
        (QWEN, 8, 1, 1024, 2),
        (DEEPSEEK, 1, 1, 1152, 1),
        (DEEPSEEK, 8, 1, 1152, 1),
    ],
)
def test_heads_are_split_or_repeated(name: str, tp: int, heads: int, token_bytes: int, parts: int) -> None:
    found = rank(name, tp)
    kind = LayerKind.MLA if name == DEEPSEEK else LayerKind.FULL
    assert (found.heads(kind).count, found.token_bytes) == (heads, token_bytes)
    assert found.parts(kind) == parts


def test_states_are_split() -> None:
    two, eight = rank(QWEN, 2), rank(QWEN, 8)
    assert [state.shape for state in two.states] == [(3, 6144), (32, 128, 128)]
    assert (two.state_bytes, eight.state_bytes) == (2_134_016, 2_134_016 // 4)
    assert two.parts(LayerKind.MAMBA) == 2
    assert rank(LLAMA).states == ()


@pytest.mark.parametrize(("pack", "tokens"), [(1, 2096), (2, 1056), (4, 528), (8, 272)])
def test_blocks_grow_until_they_fill_the_page(pack: int, tokens: int) -> None:
    """Qwen3.5-397B-A17B on two ranks, from its config."""
    assert rank(QWEN, 2).block_tokens(pack) == tokens
    assert rank(QWEN, 2, 4096).block_tokens(pack) == 4096
    assert rank(LLAMA).block_tokens(pack) == 16


def test_specs() -> None:
    found = rank(QWEN, 2).specs(TRITON_NHD)
    assert list(found)[:4] == ["layers.0", "layers.1", "layers.2", "layers.3"]
    state, full = found["layers.0"], found["layers.3"]
    assert isinstance(state, Mamba)
    assert isinstance(full, Attention)
    assert (state.page_bytes, state.payload_bytes) == (full.page_bytes, 2_134_016)
    assert full.page_bytes == 2096 * 1024
    packed = rank(QWEN, 2).specs(TRITON_NHD, 4)
    assert packed["layers.0"].page_bytes == 2_134_016 <= 4 * packed["layers.3"].page_bytes


def test_latents_have_a_backend_of_their_own() -> None:
    spec = rank(DEEPSEEK).specs(TRITON_NHD)["layers.0"]
    assert isinstance(spec, Attention)
    assert (spec.backend, spec.kind, spec.page_bytes) == (LATENT, LayerKind.MLA, 16 * 576 * 2)


def test_without_the_hybrid_manager_windows_are_full() -> None:
    kinds = {spec.kind for spec in rank(GEMMA_3, hybrid=False).specs(TRITON_NHD).values()}
    assert kinds == {LayerKind.FULL}
    with pytest.raises(ConfigError, match="leave --no-hybrid out"):
        rank(QWEN, hybrid=False)


@pytest.mark.parametrize(
    ("dtype", "token_bytes"), [("auto", 2048), ("float32", 4096), ("fp8", 1024), ("fp8_e5m2", 1024)]
)
def test_dtypes(dtype: str, token_bytes: int) -> None:
    assert dtype in KV_DTYPES
    assert rank(GPT_OSS, kv_dtype=dtype).token_bytes == token_bytes


def test_the_states_keep_their_dtype() -> None:
    assert rank(QWEN, 2, kv_dtype="fp8").state_bytes == 2_134_016


@pytest.mark.parametrize(
    ("name", "tp", "complaint"),
    [
        (GPT_OSS, 3, r"8 KV heads \(num_key_value_heads\) can't be split over 3 ranks; --tp 1, 2, 4, 8, 16, 32, 64 w"),
        (GPT_OSS, 12, r"can't be split over 12 ranks"),
        (DEEPSEEK, 3, r"16 heads \(num_attention_heads\) can't be split over 3 ranks; --tp 1, 2, 4, 8, 16 would work"),
        (QWEN, 32, r"16 linear_num_key_heads, 64 linear_num_value_heads can't be split over 32 ranks"),
        (GPT_OSS, 0, r"0 ranks"),
    ],
)
def test_what_does_not_divide(name: str, tp: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        rank(name, tp)


def test_a_dtype_that_is_not_said(tmp_path: Path) -> None:
    bare = read_model(changed(tmp_path, LLAMA, torch_dtype=...))
    assert Rank(bare, 1, 16).token_bytes == 4096  # 8 heads of 128, K and V, in bfloat16
    assert Rank(bare, 1, 16, "fp8").token_bytes == 2048
    scheme = read_model(changed(tmp_path, LLAMA, quantization_config={"kv_cache_scheme": {"num_bits": 8}}))
    with pytest.raises(ConfigError, match="quantization_config asks for a quantised KV cache"):
        Rank(scheme, 1, 16)
    assert Rank(scheme, 1, 16, "fp8").token_bytes == 2048
    with pytest.raises(ConfigError, match='--kv-dtype "int3" is not known; these are: auto, bfloat16'):
        Rank(model(LLAMA), 1, 16, "int3")
