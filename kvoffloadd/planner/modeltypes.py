"""Lists the known models: those that were compared with an engine or worked out by hand, since a plan of any other
would look as right as theirs.
"""

from __future__ import annotations

from kvoffloadd.errors import NoPlanError
from kvoffloadd.planner.fields import Fields

COMPARED = frozenset({
    "arcee", "aria_text", "axk1", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3", "ernie4_5",
    "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text",
    "glm", "glm4", "glm4_moe", "glm4v_text", "glm_ocr_text", "gpt_neox", "gpt_oss", "granite", "granite_swa",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hyperclovax", "jais2", "lfm2", "llama",
    "llama4_text", "longcat_flash", "minicpm3", "minimax_m2", "ministral3", "mistral", "mixtral", "olmo", "olmo2",
    "olmo3", "olmoe", "paddleocr_vl_text", "phi", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text",
    "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "seed_oss", "smollm3",
    "stablelm", "starcoder2", "vaultgemma",
})  # fmt: skip
"""The types of text models that `tests/vllm/test_plans.py` compares with vLLM's own specs, layer by layer."""

BY_HAND = frozenset({
    "bailing_moe_linear", "deepseek_v32", "deepseek_v4", "gemma3n_text", "glm_moe_dsa", "kimi_k2",
    "kimi_linear", "minimax_m3_text", "mllama_text_model", "nemotron_h", "phimoe", "step3p5",
})  # fmt: skip
"""The types that vLLM's CPU build can't make, or not from what their class has: sums by hand are in the planner's
tests.
"""

KNOWN = COMPARED | BY_HAND

WRAPPERS = frozenset({
    "aria", "audioflamingo3", "cohere2_vision", "exaone4_5", "gemma3", "gemma3n", "gemma4", "glm4v", "glm_ocr",
    "glmasr", "granite_speech", "granite_speech_plus", "idefics3", "internvl", "llama4", "llava", "llava_next",
    "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "mistral3", "mllama", "paddleocr_vl", "qwen2_5_vl",
    "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "smolvlm",
})  # fmt: skip
"""The types around a text model; only the layers of the text model keep something of the tokens."""

ENCODERS = frozenset({
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "new",
    "nomic_bert", "roberta", "siglip", "xlm-roberta",
})  # fmt: skip
"""The types that attend to all of a text at once."""


def check_type(fields: Fields) -> None:
    """Raises NoPlanError for a model of an unknown type, and for an encoder."""
    encodes = {
        "model_type": fields.model_type in ENCODERS,
        "use_bidirectional_attention": fields.get("use_bidirectional_attention") in (True, "all"),
        "is_causal": fields.get("is_causal") is False,
    }
    if fields.model_type not in KNOWN | ENCODERS:
        raise fields.unknown("model_type", f"= {fields.model_type!r} is not known")
    if fields.wrapper is not None and str(fields.wrapper) not in WRAPPERS:
        raise fields.unknown("model_type", f"= {fields.wrapper!r} around a text model is not known")
    for key in (key for key, is_so in encodes.items() if is_so):
        problem = f"= {fields.get(key)!r}: it is an encoder, and keeps nothing of its tokens"
        raise NoPlanError(str(fields.error(key, problem)))
