"""Adapters for the model "dense", with random weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

_SHAPES = {"q_proj": (256, 256), "k_proj": (256, 128), "v_proj": (256, 128), "o_proj": (256, 256)}
_LAYERS, _RANK = 4, 8

OPTIONS: dict[str, Any] = {
    "enable_lora": True,
    "lora_backend": "torch_native",
    "max_lora_rank": _RANK,
    "lora_target_modules": list(_SHAPES),
    "max_loras_per_batch": 2,
}
"""Of SGLang's `Engine`."""


def train(folder: Path, seed: int) -> None:
    """Write an adapter there, or another one in its place. Equal seeds give equal adapters."""
    torch: Any = importlib.import_module("torch")
    safetensors: Any = importlib.import_module("safetensors.torch")
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(_LAYERS):
        for module, (inputs, outputs) in _SHAPES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = 0.3 * torch.randn(_RANK, inputs, generator=numbers)
            tensors[f"{name}.lora_B.weight"] = 0.3 * torch.randn(outputs, _RANK, generator=numbers)
    folder.mkdir(exist_ok=True)
    safetensors.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 16, "target_modules": list(_SHAPES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
