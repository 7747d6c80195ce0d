"""vLLM's VllmConfig without vLLM: dataclasses with just the fields that were judged, and a model's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvoffloadd.integrations.vllm.fields import ELSEWHERE, HARMLESS, PARTS, SECTIONS

MODEL_LAYERS = 4


def judged(section: str) -> list[str]:
    """Returns all fields of a section that have been judged."""
    left_out = (one.fields for one in (*HARMLESS, *ELSEWHERE) if one.section == section)
    return sorted(PARTS.get(section, frozenset()).union(*left_out))


def section(name: str, base: type = object, **values: Any) -> Any:
    """One of vLLM's sections: all fields that were judged, and any others of `values`."""
    fields = dict.fromkeys(judged(name), None) | values
    made = dataclasses.make_dataclass(name.title(), fields, bases=(base,))
    return made(**fields)


class _Model:
    def get_total_num_hidden_layers(self) -> int:
        return MODEL_LAYERS


def model_config(folder: Path | str, **values: Any) -> Any:
    """A ModelConfig of the model that is there."""
    config = SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "default"}, architectures=["Llama"])
    standard = {
        "model": str(folder),
        "hf_config": config,
        "hf_text_config": config,
        "dtype": "torch.bfloat16",
        "max_model_len": 4096,
        "generation_config": "auto",
        "model_impl": "auto",
    }
    return section("model", _Model, **standard | values)


def vllm_config(folder: Path | str, values: Mapping[str, Any] | None = None, **sections: Any) -> Any:
    """A VllmConfig. `values`: "section.field" -> what it is. `sections`: of VllmConfig, in place of the standard."""
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in (values or {}).items():
        of, _, field = name.partition(".")
        by_section.setdefault(of, {})[field] = value
    made = {
        field: section(name, **by_section.get(name, {}))
        for field, name in SECTIONS.items()
        if name in ("attention", "parallel", "mamba", "kernel", "device")
    }
    made["model_config"] = model_config(folder, **by_section.get("model", {}))
    cache = {"prefix_caching_hash_algo": "sha256"} | by_section.get("cache", {})
    made["cache_config"] = section("cache", **cache)
    load = {"load_format": "auto", "model_loader_extra_config": {}} | by_section.get("load", {})
    made["load_config"] = section("load", **load)
    return section("engine", **made | by_section.get("engine", {}) | sections)


def with_files(folder: Path) -> Path:
    """A model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(b"old")
    return folder
