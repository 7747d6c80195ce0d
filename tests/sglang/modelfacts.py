"""Prints what SGLang makes of models' config.json: `python -m tests.sglang.modelfacts FOLDER TP`, a separate process.

FOLDER has a folder with a config.json for each model; SGLang's facts of all come as one line of JSON. SGLang needs
`architectures`, which numbers alone do not have, and now and then a key that does not matter for the KV cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = 64
ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
"""By the config's outer `model_type`."""

WITH_WINDOWS = {
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "laguna": "LagunaForCausalLM",
    "mellum": "MellumForCausalLM",
}
"""Others, of which no numbers were published here: by the text model's `model_type`."""

BESIDE = {"max_position_embeddings": 8192, "vocab_size": 1000, "qk_nope_head_dim": 128}


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """Completes the config with what SGLang wants to read."""
    return {**BESIDE, **config, "architectures": [ARCHITECTURES[str(config["model_type"])]]}


def facts(folder: Path, tp: int) -> dict[str, Any]:
    """`pools` by name: layers, and bytes of a page (of "mamba" of a state) in bfloat16."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import (
        AttentionArch,
        ModelConfig,
        dsa_layer_skips_topk,
        get_dsa_index_head_dim,
        is_deepseek_dsa,
    )
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import dsa_indexer_bytes_per_token_per_layer

    model = ModelConfig(str(folder))
    states = mambaish_config(model)
    layers = max(model.num_hidden_layers, model.num_attention_layers)
    if states is not None:
        layers = len(list(states.full_attention_layer_ids))
    pools = {}
    if model.attention_arch is AttentionArch.MLA:
        pools["kv"] = layers, layers * PAGE * (model.kv_lora_rank + model.qk_rope_head_dim) * 2
    elif model.is_hybrid_swa:
        full, apart = model.full_attention_layer_ids, model.swa_attention_layer_ids
        pools["kv"] = len(full), len(full) * _heads(model.get_num_kv_heads(tp), model.head_dim, model.v_head_dim)
        heads = _heads(model.get_swa_num_kv_heads(tp), model.swa_head_dim, model.swa_v_head_dim)
        pools["swa"] = len(apart), len(apart) * heads
    else:
        pools["kv"] = layers, layers * _heads(model.get_num_kv_heads(tp), model.head_dim, model.v_head_dim)
    if states is not None:
        cache = states.mamba2_cache_params
        pools["mamba"] = len(list(cache.layers)), cache.mamba_cache_per_req
    if is_deepseek_dsa(model.hf_config):
        own = sum(not dsa_layer_skips_topk(model.hf_config, at) for at in range(layers))
        each = dsa_indexer_bytes_per_token_per_layer(
            index_head_dim=get_dsa_index_head_dim(model.hf_config), quant_block_size=DSATokenToKVPool.quant_block_size
        )
        pools["indexer"] = own, own * PAGE * each
    return {"pools": pools, "page_of_one": _wants_pages_of_one(model.hf_config, states)}


def windows_apart() -> list[str]:
    """Returns model types of `WITH_WINDOWS` whose windows have a separate pool."""
    from sglang.srt.configs.model_config import is_hybrid_swa_model

    return [kind for kind, name in WITH_WINDOWS.items() if is_hybrid_swa_model([name])]


def _heads(count: int, size: int, size_of_values: int) -> int:
    return PAGE * count * (size + size_of_values) * 2


def _wants_pages_of_one(config: Any, states: Any) -> bool:
    """SGLang keeps states of longer pages for some architectures alone."""
    from sglang.srt.arg_groups import overrides

    return states is not None and config.architectures[0] not in overrides._MAMBA_EXTRA_BUFFER_ARCHS


def main() -> None:
    from sglang.srt.runtime_context import get_parallel

    folders, tp = Path(sys.argv[1]), int(sys.argv[2])
    with get_parallel().override(attn_tp_size=tp, enable_cp_tp_group_sharing=False):
        found = {folder.name: facts(folder, tp) for folder in sorted(folders.iterdir())}
    print(json.dumps({"models": found, "windows_apart": windows_apart()}))


if __name__ == "__main__":
    main()
