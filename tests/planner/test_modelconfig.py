"""config.json: what is understood, and what is refused by the key's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvoffloadd.errors import ConfigError, NoPlanError
from kvoffloadd.layout import LayerKind
from kvoffloadd.planner import read_model
from kvoffloadd.planner.modeltypes import BY_HAND, COMPARED, ENCODERS, KNOWN, WRAPPERS
from kvoffloadd.planner.states import LinearHeads
from scripts.harness.published import CONFIGS, text_type
from tests.planner.models import (
    DATA,
    DEEPSEEK,
    GEMMA_2,
    GEMMA_3,
    GPT_OSS,
    LLAMA,
    LLAMA_4,
    QWEN,
    changed,
    model,
    path_of,
)

FULL, SLIDING, CHUNKED, MAMBA, MLA = (
    LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.MAMBA, LayerKind.MLA,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kinds", "kv_heads", "head_size", "window"),
    [
        (LLAMA, {FULL: 32}, 8, 128, 0),
        (GPT_OSS, {SLIDING: 12, FULL: 12}, 8, 64, 128),
        (GEMMA_2, {SLIDING: 13, FULL: 13}, 4, 256, 4096),
        (GEMMA_3, {SLIDING: 29, FULL: 5}, 4, 256, 1024),
        (QWEN, {MAMBA: 45, FULL: 15}, 2, 256, 0),
        (DEEPSEEK, {MLA: 27}, 1, 576, 0),
        (LLAMA_4, {CHUNKED: 36, FULL: 12}, 8, 128, 0),
    ],
)
def test_real_models(name: str, kinds: dict[LayerKind, int], kv_heads: int, head_size: int, window: int) -> None:
    found = model(name)
    assert {kind: found.count(kind) for kind in found.kinds} == kinds
    assert (found.kv_heads, found.head_size, found.window) == (kv_heads, head_size, window)
    assert found.dtype == "bfloat16"
    assert found.is_mla == (MLA in kinds)
    assert found.is_hybrid == (MAMBA in kinds)


def test_every_config_of_the_data_is_read() -> None:
    assert len([read_model(path) for path in DATA.glob("*.json")]) == 7


@pytest.mark.parametrize(
    ("name", "full"),
    [(GPT_OSS, [1, 3, 5]), (GEMMA_2, [1, 3, 5]), (GEMMA_3, [5, 11, 17]), (QWEN, [3, 7, 11]), (LLAMA_4, [3, 7, 11])],
)
def test_which_layers_are_full(name: str, full: list[int]) -> None:
    kinds = model(name).kinds
    assert [at for at, kind in enumerate(kinds) if kind is FULL][:3] == full


def test_what_a_model_class_fills_in_is_said() -> None:
    """The published gemma-3-4b has neither heads nor a pattern in its file."""
    assumed = " ".join(model(GEMMA_3).assumed)
    for key in ("sliding_window_pattern = 6", "num_key_value_heads = 4", "head_dim = 256"):
        assert key in assumed
    assert model(GPT_OSS).assumed == ()


def test_defaults(tmp_path: Path) -> None:
    """There are as many KV heads as heads; a head is its part of the hidden size."""
    found = read_model(changed(tmp_path, LLAMA, num_key_value_heads=..., torch_dtype="torch.float16"))
    assert (found.kv_heads, found.head_size, found.dtype) == (32, 128, "float16")


def test_layers_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    found = read_model(changed(tmp_path, QWEN, mtp_num_hidden_layers=1))
    assert found.kinds == model(QWEN).kinds
    assert "mtp_num_hidden_layers: layers that only guess tokens ahead are left out" in found.assumed


def test_the_newer_name_of_the_dtype_goes_first(tmp_path: Path) -> None:
    assert read_model(changed(tmp_path, LLAMA, dtype="float16")).dtype == "float16"


def test_a_null_is_absent(tmp_path: Path) -> None:
    found = read_model(changed(tmp_path, LLAMA, sliding_window=None, head_dim=None, layer_types=None))
    assert (found.head_size, found.count(FULL)) == (128, 32)


@pytest.mark.parametrize(
    ("keys", "sliding"),
    [
        ({"use_sliding_window": False}, 0),
        ({"use_sliding_window": True, "max_window_layers": 30}, 2),
        ({"model_type": "mistral"}, 32),
        ({"model_type": "cohere2", "sliding_window_pattern": 4}, 24),
        ({"model_type": "gemma2"}, 16),
    ],
)
def test_windows_without_layer_types(tmp_path: Path, keys: dict[str, object], sliding: int) -> None:
    found = read_model(changed(tmp_path, LLAMA, sliding_window=4096, **keys))
    assert found.count(SLIDING) == sliding
    inclusive = keys.get("model_type") == "cohere2"  # whose window leaves out the token that looks back
    assert found.window == (4096 + inclusive if sliding else 0)


def test_chunks(tmp_path: Path) -> None:
    rotary = [1, 1, 1, 0] * 12
    found = read_model(changed(tmp_path, LLAMA_4, no_rope_layers=rotary, no_rope_layer_interval=...))
    assert (found.kinds, found.chunk) == (model(LLAMA_4).kinds, 8192)
    listed = ["chunked_attention"] * 47 + ["full_attention"]
    assert read_model(changed(tmp_path, LLAMA_4, layer_types=listed)).count(FULL) == 1


def test_an_empty_list_of_rotary_layers_is_what_the_class_has(tmp_path: Path) -> None:
    """The published file of Scout has this: three chunked layers, then a full one."""
    path = changed(tmp_path, LLAMA_4, no_rope_layers=[], no_rope_layer_interval=...)
    assert read_model(path).kinds == model(LLAMA_4).kinds
    assert "no_rope_layer_interval = 4 is not in the file" in " ".join(read_model(path).assumed)


@pytest.mark.parametrize("name", [GPT_OSS, QWEN])
def test_a_model_that_does_not_say_its_dtype(tmp_path: Path, name: str) -> None:
    """gpt-oss-120b and others: engines run them in bfloat16, and the plan reports this assumption."""
    found = read_model(changed(tmp_path, name, dtype=..., torch_dtype=...))
    assert found.dtype == "bfloat16"
    assert "dtype is not in the file: taken to be bfloat16" in " ".join(found.assumed)


def test_layers_that_attend_to_an_image_keep_nothing_of_the_tokens(tmp_path: Path) -> None:
    """Llama 3.2 11B Vision: 8 of the 40 layers cross; they are listed in the file, or left to the class."""
    crossing = [3, 8, 13, 18, 23, 28, 33, 38]
    for keys in ({"cross_attention_layers": crossing}, {"model_type": "mllama_text_model"}):
        found = read_model(changed(tmp_path, LLAMA, num_hidden_layers=40, **keys))
        assert found.kinds == (FULL,) * 32
        assert "8 layers that attend to an image are left out" in " ".join(found.assumed)


def test_a_list_of_nothing_but_softmax(tmp_path: Path) -> None:
    """MiniMax M2 lists its 62 layers, all of one kind."""
    keys = {"model_type": "minimax_m2", "num_hidden_layers": 62, "attn_type_list": [1] * 62, "num_mtp_modules": 3}
    found = read_model(changed(tmp_path, LLAMA, **keys))
    assert found.kinds == (FULL,) * 62
    assert "num_mtp_modules: layers that only guess tokens ahead are left out" in found.assumed


def test_a_window_as_long_as_the_context(tmp_path: Path) -> None:
    """Phi-3.5-MoE: every layer has it."""
    found = read_model(changed(tmp_path, LLAMA, model_type="phimoe", sliding_window=131_072))
    assert (found.kinds, found.window) == ((SLIDING,) * 32, 131_072)


@pytest.mark.parametrize(
    ("keys", "kv_heads"),
    [
        ({"multi_query": True, "new_decoder_architecture": False}, 1),  # 7B
        ({}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 8),  # 40B
        ({"multi_query": False}, 71),
    ],
)
def test_falcon(tmp_path: Path, keys: dict[str, object], kv_heads: int) -> None:
    """71 heads of 64; the older ones share one head of K and V."""
    shape = {"model_type": "falcon", "num_attention_heads": 71, "hidden_size": 4544, "num_key_value_heads": ...}
    found = read_model(changed(tmp_path, LLAMA, head_dim=..., **shape, **keys))
    assert (found.kv_heads, found.head_size) == (kv_heads, 64)


def test_linear_layers(tmp_path: Path) -> None:
    """They may be a list instead of an interval; states have the model's dtype where the file has no other, which is
    noted.
    """
    listed = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 15
    path = changed(tmp_path, QWEN, layer_types=listed, full_attention_interval=..., mamba_ssm_dtype=...)
    found = read_model(path)
    assert found.kinds == model(QWEN).kinds
    assert isinstance(found.linear, LinearHeads)
    assert (found.linear.dtype, found.linear.conv_channels) == ("bfloat16", 12_288)
    assert "mamba_ssm_dtype is not in the file" in " ".join(found.assumed)


@pytest.mark.parametrize("form", [{"kv_cache_scheme": {"num_bits": 8}}, {"kv_cache_quant_algo": "FP8"}])
def test_a_quantised_cache_is_noticed(tmp_path: Path, form: dict[str, object]) -> None:
    assert read_model(changed(tmp_path, LLAMA, quantization_config=form)).kv_quantised
    assert not read_model(changed(tmp_path, LLAMA, quantization_config={"quant_method": "fp8"})).kv_quantised


@pytest.mark.parametrize(
    ("name", "keys", "complaint"),
    [
        (LLAMA, {"num_hidden_layers": ...}, r"config.json: num_hidden_layers is missing; it must be a whole number"),
        (LLAMA, {"num_attention_heads": ...}, r"num_attention_heads is missing"),
        (LLAMA, {"num_attention_heads": 30}, r"head_dim is missing, and 4096 \(hidden_size\) is not 30 equal heads"),
        (LLAMA, {"num_hidden_layers": True}, r"num_hidden_layers = True must be a whole number above 0"),
        (LLAMA, {"num_hidden_layers": 1 << 40}, r"num_hidden_layers = \d+ must be at most 10000"),
        (LLAMA, {"num_key_value_heads": 1 << 31}, r"num_key_value_heads = \d+ must be at most 10000"),
        (LLAMA, {"hidden_size": 1 << 70}, r"hidden_size = \d+ must be at most \d+$"),
        (LLAMA, {"head_dim": -1}, r"head_dim = -1 must be a whole number"),
        (LLAMA, {"torch_dtype": "int4"}, r"torch_dtype = 'int4' is not known; these are: bfloat16, float16, float32"),
        (LLAMA, {"torch_dtype": 16}, r"torch_dtype = 16 must be text"),
        (LLAMA, {"layer_types": "full"}, r"layer_types = 'full' must be a list"),
        (LLAMA, {"sliding_window": 4096}, r"sliding_window does not say which layers .*'llama'.*; add layer_types"),
        (LLAMA, {"v_head_dim": 64}, r"v_head_dim is not understood: K has heads of 128"),
        (
            LLAMA,
            {"num_kv_shared_layers": 32},
            r"num_kv_shared_layers = 32 must be less than num_hidden_layers, 32",
        ),
        (
            LLAMA,
            {"multi_query": True, "num_key_value_heads": ...},
            r"multi_query is not understood; add num_key_value_",
        ),
        (GPT_OSS, {"layer_types": ["full_attention"]}, r"layer_types has 1 entries, num_hidden_layers says 24"),
        (
            GPT_OSS,
            {"layer_types": ["rolling"] * 24},
            r"layer_types has 'rolling', which is not known; these are: full_",
        ),
        (GPT_OSS, {"sliding_window": ...}, r"sliding_window is missing"),
        (
            GPT_OSS,
            {"layer_types": ["linear_attention"] * 24},
            r"layer_types has no attention layer, so that its groups",
        ),
        (GEMMA_3, {"num_hidden_layers": 0}, r"text_config.num_hidden_layers = 0 must be a whole number"),
        (QWEN, {"full_attention_interval": ...}, r"layer_types is missing: which layers are linear\?"),
        (QWEN, {"linear_conv_kernel_dim": ...}, r"linear_conv_kernel_dim is missing"),
        (LLAMA, {"attn_type_list": [1, 0] * 16}, r"attn_type_list is not understood, unless it is a list of 32 ones"),
        (LLAMA, {"attn_type_list": [1]}, r"attn_type_list is not understood, unless it is a list of 32 ones"),
        (
            LLAMA,
            {"cross_attention_layers": [32]},
            r"cross_attention_layers must be a list of layers, each from 0 to 31",
        ),
        (DEEPSEEK, {"qk_rope_head_dim": ...}, r"qk_rope_head_dim is missing"),
        (DEEPSEEK, {"index_head_dim": 128}, r"index_head_dim is not understood: its layers keep an index"),
        (LLAMA, {"compress_ratios": [4] * 32}, r"compress_ratios is not understood: its layers keep compressed tokens"),
        (
            LLAMA,
            {"compress_ratios": [4] * 31, "model_type": "deepseek_v4", "head_dim": 512},
            r"compress_ratios must have 32 entries or more, each 0, 1, 4 or 128",
        ),
        (
            LLAMA,
            {"hybrid_override_pattern": "M-X", "num_hidden_layers": 3},
            r"hybrid_override_pattern must be 3 letters, each one of M \* - E",
        ),
        (DEEPSEEK, {"sliding_window": 5, "model_type": "mistral"}, r"kv_lora_rank with layers of kind sliding is not"),
        (
            LLAMA_4,
            {"no_rope_layer_interval": ..., "model_type": "llama"},
            r"attention_chunk_size does not say which layers are chunked",
        ),
        (LLAMA_4, {"no_rope_layers": [1, 2]}, r"no_rope_layers must be a list of 48 zeros and ones"),
        (
            GEMMA_2,
            {"use_sliding_window": True, "max_window_layers": -1, "model_type": "qwen2"},
            r"max_window_layers = -1",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, keys: dict[str, object], complaint: str) -> None:
    hidden = {key: ... for key in ("head_dim",) if name == LLAMA and key not in keys}
    with pytest.raises(ConfigError, match=complaint):
        read_model(changed(tmp_path, name, **hidden, **keys))


@pytest.mark.parametrize("kind", ["", "rwkv", "jamba", "mamba2", "qwen3_nextt", "Llama", "next_years"])
def test_a_type_that_is_not_known(tmp_path: Path, kind: str) -> None:
    """However plain its keys are."""
    with pytest.raises(
        NoPlanError, match=f"model_type = '{kind}' is not known, so that its groups can't be worked out"
    ):
        read_model(changed(tmp_path, LLAMA, model_type=kind))


def test_a_type_around_a_known_one_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    inner = json.loads(path_of(LLAMA).read_text("utf-8"))
    for outer, known in (("llava", True), ("next_years_vl", False), (None, True), (["llava"], False)):
        path.write_text(json.dumps({"model_type": outer, "text_config": inner}), encoding="utf-8")
        if known:
            assert read_model(path).kinds == model(LLAMA).kinds
        else:
            with pytest.raises(
                NoPlanError, match=r"model_type = .*(next_years_vl|'llava'\]).* around a text model is not known"
            ):
                read_model(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "bert"}, "model_type = 'bert': it is an encoder, and keeps nothing of its tokens"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True: it is an encoder"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all': it is an encoder"),
        ({"is_causal": False}, "is_causal = False: it is an encoder"),
    ],
)
def test_an_encoder_keeps_nothing(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    with pytest.raises(NoPlanError, match=message):
        read_model(changed(tmp_path, LLAMA, **keys))
    causal = changed(tmp_path, LLAMA, is_causal=True, use_bidirectional_attention="vision")
    assert read_model(causal).kinds == model(LLAMA).kinds


def test_the_lists_of_types() -> None:
    """One of each known type was worked out by hand, or is compared with vLLM (tests/vllm/test_plans.py)."""
    here = {"mllama_text_model", "phimoe"}  # above
    published = {text_type(config) for config in CONFIGS.values()}
    assert (published - COMPARED) | here == BY_HAND
    assert not COMPARED & BY_HAND
    assert not KNOWN & (ENCODERS | WRAPPERS)


def test_what_is_no_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config.json: No such file or directory; name a model's config.json"):
        read_model(path)
    for text, complaint in (("{", "not JSON"), ("[1]", "not a JSON object"), ("\xff", "not JSON")):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=complaint):
            read_model(path)
