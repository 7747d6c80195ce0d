"""The models of the tests."""

from __future__ import annotations

import importlib

_MODELS = {
    "llama": "LlamaForCausalLM",
    "llama_eagle": "LlamaForCausalLMEagle",
    "gemma4_causal": "Gemma4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
}

EntryClass = [getattr(importlib.import_module(f"sglang.srt.models.{module}"), name) for module, name in _MODELS.items()]
