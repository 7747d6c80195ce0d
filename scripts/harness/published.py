"""Configs of the open models most in use, cut down to what the KV cache depends on.

Numbers alone, each from the `config.json` that its publisher has on Hugging Face, in the repository named next to it.
"""

from __future__ import annotations

Config = dict[str, object]

BF16 = {"torch_dtype": "bfloat16"}


def dense(model_type: str, layers: int | None, hidden: int, heads: int, kv_heads: int | None, **more: object) -> Config:
    """A model whose layers are alike, but for what `more` changes. None: another key has it."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **BF16,
        **more,
    }


def latent(model_type: str, heads: int, **more: object) -> Config:
    """61 layers of MLA, as DeepSeek V3 has them."""
    return dense(model_type, 61, 7168, heads, heads, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128, **more)


def text(model_type: str, config: Config) -> Config:
    """Puts the text model's keys into a separate map, as models with vision have them."""
    return {"model_type": model_type, "text_config": config, **BF16}


def text_type(config: Config) -> str:
    """The model type of the text model."""
    inner = config.get("text_config", config)
    assert isinstance(inner, dict)
    return str(inner["model_type"])


def dsa(**more: object) -> Config:
    """78 layers of MLA with an index, as GLM-5 has them."""
    return dense(
        "glm_moe_dsa", 78, 6144, 64, 64, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=256, head_dim=64,
        index_head_dim=128, index_n_heads=32, index_topk=2048, num_nextn_predict_layers=1, **more,
    )  # fmt: skip


def gemma_4(layers: int, hidden: int, heads: int, kv_heads: int, full_kv_heads: int) -> Config:
    """Five sliding layers and a full one in turn, the latter with fewer and larger heads."""
    return text(
        "gemma4",
        dense(
            "gemma4_text", layers, hidden, heads, kv_heads, head_dim=256, global_head_dim=512, sliding_window=1024,
            num_global_key_value_heads=full_kv_heads, attention_k_eq_v=True, num_kv_shared_layers=0,
            use_bidirectional_attention="vision", layer_types=SIXTH_FULL[:layers],
        ),
    )  # fmt: skip


MAMBA_8B = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
SPARSE, HEAVY = 4, 128
SIXTH_FULL = (["sliding_attention"] * 5 + ["full_attention"]) * 10
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]

CONFIGS: dict[str, Config] = {
    # meta-llama/Llama-3.3-70B-Instruct, as Llama-3.1-70B
    "llama-3.3-70b": dense("llama", 80, 8192, 64, 8),
    # meta-llama/Llama-4-Maverick-17B-128E-Instruct
    "llama-4-maverick": text(
        "llama4", dense("llama4_text", 48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192, no_rope_layers=[])
    ),
    # Qwen/Qwen2.5-7B-Instruct
    "qwen2.5-7b": dense(
        "qwen2", 28, 3584, 28, 4, use_sliding_window=False, sliding_window=131_072, max_window_layers=28
    ),
    # Qwen/Qwen3-8B
    "qwen3-8b": dense("qwen3", 36, 4096, 32, 8, head_dim=128, use_sliding_window=False, max_window_layers=36),
    # Qwen/Qwen3-32B
    "qwen3-32b": dense("qwen3", 64, 5120, 64, 8, head_dim=128, use_sliding_window=False, max_window_layers=64),
    # Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b": dense("qwen3_moe", 48, 2048, 32, 4, head_dim=128),
    # Qwen/Qwen3-235B-A22B
    "qwen3-235b-a22b": dense("qwen3_moe", 94, 4096, 64, 4, head_dim=128),
    # Qwen/Qwen3-Next-80B-A3B-Instruct
    "qwen3-next-80b-a3b": dense(
        "qwen3_next", 48, 2048, 16, 2, head_dim=256, full_attention_interval=4, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    ),
    # openai/gpt-oss-120b, which names no dtype
    "gpt-oss-120b": dense(
        "gpt_oss", 36, 2880, 64, 8, head_dim=64, sliding_window=128, torch_dtype=None,
        layer_types=["sliding_attention", "full_attention"] * 18,
    ),
    # google/gemma-2-27b-it
    "gemma-2-27b": dense("gemma2", 46, 4608, 32, 16, head_dim=128, sliding_window=4096),
    # google/gemma-3-27b-it, which leaves the pattern to its class
    "gemma-3-27b": text("gemma3", dense("gemma3_text", 62, 5376, 32, 16, head_dim=128, sliding_window=1024)),
    # google/gemma-3n-E4B-it
    "gemma-3n-e4b": text(
        "gemma3n",
        dense(
            "gemma3n_text", 35, 2048, 8, 2, head_dim=256, sliding_window=512, num_kv_shared_layers=15,
            layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        ),
    ),
    # mistralai/Mistral-Small-3.2-24B-Instruct-2506, as 3.1
    "mistral-small-3.2": text("mistral3", dense("mistral", 40, 5120, 32, 8, head_dim=128, sliding_window=None)),
    # mistralai/Mixtral-8x7B-Instruct-v0.1
    "mixtral-8x7b": dense("mixtral", 32, 4096, 32, 8, sliding_window=None),
    # deepseek-ai/DeepSeek-R1, as DeepSeek-V3
    "deepseek-r1": latent("deepseek_v3", 128, num_nextn_predict_layers=1),
    # deepseek-ai/DeepSeek-V3.2
    "deepseek-v3.2": latent(
        "deepseek_v32", 128, index_head_dim=128, index_n_heads=64, index_topk=2048, num_nextn_predict_layers=1
    ),
    # deepseek-ai/DeepSeek-V4-Flash; its last ratio is that of the layer that guesses ahead
    "deepseek-v4-flash": dense(
        "deepseek_v4", 43, 4096, 64, 1, head_dim=512, qk_rope_head_dim=64, sliding_window=128, index_head_dim=128,
        compress_ratios=[0, 0, *[SPARSE, HEAVY] * 20, SPARSE, 0], num_nextn_predict_layers=1,
    ),
    # deepseek-ai/DeepSeek-V4-Pro
    "deepseek-v4-pro": dense(
        "deepseek_v4", 61, 7168, 128, 1, head_dim=512, qk_rope_head_dim=64, sliding_window=128, index_head_dim=128,
        compress_ratios=[HEAVY, *[HEAVY, SPARSE] * 30, 0], num_nextn_predict_layers=1,
    ),
    # zai-org/GLM-5, as GLM-5.1
    "glm-5": dsa(),
    # zai-org/GLM-5.2, where only some layers have an index themselves
    "glm-5.2": dsa(index_topk_freq=4, index_skip_topk_offset=3, index_topk_pattern=None),
    # google/gemma-4-31B-it
    "gemma-4-31b": gemma_4(60, 5376, 32, 16, 4),
    # google/gemma-4-26B-A4B
    "gemma-4-26b-a4b": gemma_4(30, 2816, 16, 8, 2),
    # moonshotai/Kimi-Linear-48B-A3B-Instruct
    "kimi-linear-48b-a3b": dense(
        "kimi_linear", 27, 2304, 32, 32, head_dim=72, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128,
        linear_attn_config={
            "full_attn_layers": KIMI_FULL, "kda_layers": [at for at in range(1, 28) if at not in KIMI_FULL],
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        },
    ),
    # zai-org/GLM-4.6, as GLM-4.5
    "glm-4.6": dense("glm4_moe", 92, 5120, 96, 8, head_dim=128, num_nextn_predict_layers=1),
    # moonshotai/Kimi-K2-Instruct
    "kimi-k2": latent("kimi_k2", 64),
    # MiniMaxAI/MiniMax-M2
    "minimax-m2": dense("minimax_m2", 62, 3072, 48, 8, head_dim=128, attn_type_list=[1] * 62, num_mtp_modules=3),
    # MiniMaxAI/MiniMax-M3
    "minimax-m3": text(
        "minimax_m3_vl",
        dense(
            "minimax_m3_text", 60, 6144, 64, 4, head_dim=128, num_mtp_modules=1,
            sparse_attention_config={
                "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4,
                "sparse_block_size": 128, "sparse_topk_blocks": 16, "sparse_attention_freq": [0] * 3 + [1] * 57,
            },
        ),
    ),
    # stepfun-ai/Step-3.5-Flash, whose list of layers goes on with three that guess ahead
    "step-3.5-flash": dense(
        "step3p5", 45, 4096, 64, None, num_attention_groups=8, head_dim=128, sliding_window=512,
        layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 12, num_nextn_predict_layers=3,
        attention_other_setting={
            "attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 8,
            "head_dim": 128,
        },
    ),
    # meituan-longcat/LongCat-Flash-Chat
    "longcat-flash": dense(
        "longcat_flash", None, 6144, 64, None, num_layers=28, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128,
    ),
    # inclusionAI/Ring-flash-linear-2.0
    "ring-flash-linear-2.0": dense("bailing_moe_linear", 32, 4096, 32, 4, head_dim=128, layer_group_size=8),
    # openbmb/MiniCPM3-4B
    "minicpm3-4b": dense(
        "minicpm3", 62, 2560, 40, 40, kv_lora_rank=256, q_lora_rank=768, qk_nope_head_dim=64, qk_rope_head_dim=32
    ),
    # microsoft/phi-4
    "phi-4": dense("phi3", 40, 5120, 40, 10, sliding_window=None),
    # ibm-granite/granite-4.0-h-small
    "granite-4.0-h-small": dense(
        "granitemoehybrid", 40, 4096, 32, 8, mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128,
        mamba_d_conv=4, mamba_expand=2,
        layer_types=["attention" if at in (5, 15, 25, 35) else "mamba" for at in range(40)],
    ),
    # nvidia/Nemotron-H-8B-Base-8K
    "nemotron-h-8b": dense(
        "nemotron_h", 52, 4096, 32, 8, attention_head_dim=128, hybrid_override_pattern=MAMBA_8B, mamba_num_heads=128,
        mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4,
    ),
    # LiquidAI/LFM2-1.2B
    "lfm2-1.2b": dense(
        "lfm2", 16, 2048, 32, 8, conv_L_cache=3, conv_dim=2048, full_attn_idxs=[2, 5, 8, 10, 12, 14]
    ),
    # tiiuae/Falcon-H1-7B-Instruct
    "falcon-h1-7b": dense(
        "falcon_h1", 44, 3072, 12, 2, head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128,
        mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2,
    ),
}  # fmt: skip
