"""Tiny models with random weights, made on the spot: one of each kind of KV cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512
_WRITE_S = 600.0

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    ),
    "one-head": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    ),
    "hybrid": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
    "windows": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 512,
            "global_head_dim": 64,
            "num_global_key_value_heads": 2,
            # SGLang's names for heads of sliding layers.
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 64,
            "swa_v_head_dim": 64,
        },
    ),
    "mla": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "head_dim": 64,
            "first_k_dense_replace": 3,
            "n_routed_experts": 4,
        },
    ),
    "linear": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "packs": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "layer_types": ["linear_attention", "full_attention"] * 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "conv": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 256,
            "block_dim": 256,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
    ),
}
"""Name -> config class and model class of `transformers`, and what they are given: full attention with grouped heads,
with one KV head for all, sliding windows of 128 tokens beside full
attention (Gemma 3, which SGLang keeps in one pool, and 4, which it does not), one latent vector a token, states of
linear attention beside one layer of full attention and beside as many as there are of them, and states of short
convolutions.
"""

OTHER = "dense-other"
"""As "dense", with other weights."""
KINDS[OTHER] = KINDS["dense"]


def write(kind: str, folder: Path, python: str = sys.executable) -> Path:
    """Returns the model's folder. A separate process writes it: the libraries take seconds to load and warn a lot.

    `python`: of a venv that has them.
    """
    path = folder / kind
    if not path.exists():
        command = [python, "-m", __name__, kind, str(path)]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=_WRITE_S
        )
        assert done.returncode == 0, done.stderr
    return path


def write_adapter(path: Path, seed: int) -> Path:
    """A LoRA adapter for "dense", with random weights; over the one that is there."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    made = {}
    for layer in range(4):
        for module, rows in (("q_proj", 256), ("v_proj", 128)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            made[f"{at}.lora_A.weight"] = rng.normal(0, 0.2, (8, 256)).astype(np.float32)
            made[f"{at}.lora_B.weight"] = rng.normal(0, 0.2, (rows, 8)).astype(np.float32)
    path.mkdir(exist_ok=True)
    save_file(made, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    return path


def _write(kind: str, path: Path) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    config_class, model_class, shape = KINDS[kind]
    config = getattr(transformers, config_class)(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        # Large weights: what a model answers then depends on all that it has read.
        initializer_range=0.02 if kind == "mla" else 0.2,
        tie_word_embeddings=False,
        **shape,
    )
    torch.manual_seed(int(kind == OTHER))
    model = getattr(transformers, model_class)(config).to(torch.bfloat16)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    part = path.with_suffix(".part")
    model.save_pretrained(part)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(part)
    part.rename(path)


if __name__ == "__main__":
    _write(sys.argv[1], Path(sys.argv[2]))
