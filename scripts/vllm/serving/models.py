"""Models of `bench_serving`, with random weights. Usage: `-m scripts.vllm.serving.models KIND TOKENS FOLDER`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 512
FIRST_TOKEN = 3  # the ones before it are special
BLOCK_TOKENS = 32
WINDOW = 128
_HEADS, _HEAD_DIM, _FLOAT_BYTES = 4, 128, 4


@dataclass(frozen=True, slots=True)
class Kind:
    """`config`, `model`: classes of `transformers`. `more`: what the config is given in addition to what all are given.

    `windowed`: layers with a sliding window, in addition to `full` ones.
    """

    config: str
    model: str
    full: int
    windowed: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        """KV cache of a token in all layers, in float32."""
        return (self.full + self.windowed) * 2 * _HEADS * _HEAD_DIM * _FLOAT_BYTES

    def needed_share(self, tokens: int) -> float:
        """How much of the KV cache of a prompt the next token needs, in whole blocks: of windows their end alone."""
        blocks = -(-tokens // BLOCK_TOKENS)
        window = min(WINDOW // BLOCK_TOKENS + 1, blocks)
        return (self.full * blocks + self.windowed * window) / ((self.full + self.windowed) * blocks)


KINDS = {
    "hybrid": Kind(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        full=2,
        windowed=10,
        more={
            "query_pre_attn_scalar": _HEAD_DIM,
            "sliding_window": WINDOW,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        },
    ),
    "dense": Kind("LlamaConfig", "LlamaForCausalLM", full=4),
}
"""By name. Heads are large for so few parameters: handing KV over must take a time that shows next to what a CPU
computes. "hybrid" has five layers with windows for each one with full attention, as Gemma 3 has.
"""


def write(kind: Kind, tokens: int, path: Path) -> None:
    """The folder of a model for prompts of `tokens` tokens, and their answers."""
    import torch
    import transformers

    config = getattr(transformers, kind.config)(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=kind.full + kind.windowed,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=2 * tokens,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        # Large weights: what a model answers then depends on all that it has read.
        initializer_range=0.2,
        tie_word_embeddings=False,
        **kind.more,
    )
    torch.manual_seed(0)
    getattr(transformers, kind.model)(config).to(torch.bfloat16).save_pretrained(path)


if __name__ == "__main__":
    write(KINDS[sys.argv[1]], int(sys.argv[2]), Path(sys.argv[3]))
