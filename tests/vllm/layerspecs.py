"""Prints what vLLM's own classes keep of models, in a separate process: `python -m tests.vllm.layerspecs FOLDER`.

FOLDER has a folder with a config.json for each model, and gets one for each model type that transformers knows and vLLM
runs, with what the type's class has by default. Models are made on the meta device, without weights. What their layers
keep is one line of JSON: by folder either a list of layers or, as text, why vLLM can't make the model here.
"""

from __future__ import annotations

import enum
import importlib.machinery
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

MAPPINGS = ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "")
"""Of transformers, from model types to architectures: the first that names one that vLLM has."""

BESIDE: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["mamba"] * 28 + ["attention"] * 4},
    "lfm2": {"block_dim": 2560, "block_ff_dim": 12288, "conv_dim": 2560, "conv_dim_out": 2560},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid"},
}
"""By type: what published files have, and their class in transformers has not, or not so that a plan can be made."""


class Interpolation(enum.Enum):
    """The names that transformers looks up when it is imported."""

    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(7)


class Absent(types.ModuleType):
    """A module that has any name that is imported from it."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in_for_torchvision() -> None:
    """Classes of models that see import it for pictures, and there are none here. PyPI has no build of it for a torch
    without CUDA.
    """
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        module = Absent(f"torchvision{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        vars(module).update(__version__="0", InterpolationMode=Interpolation)
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def write_defaults(folder: Path) -> None:
    """A folder for each model type of transformers that vLLM has a class for."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from vllm.model_executor.models.registry import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    mappings = [
        getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES" if name else "MODEL_MAPPING_NAMES")
        for name in MAPPINGS
    ]
    for kind in CONFIG_MAPPING_NAMES:
        named = (mapping.get(kind) or () for mapping in mappings)
        names = [name for names in named for name in ([names] if isinstance(names, str) else names) if name in known]
        if names:
            config = CONFIG_MAPPING[kind]().to_dict() | BESIDE.get(kind, {}) | {"architectures": names[:1]}
            (folder / kind).mkdir()
            (folder / kind / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")


def layers_of(folder: Path) -> list[list[Any]]:
    """Returns, for each layer that keeps something, its kind, bytes of a token, and window; for one with states their
    shapes alone: their dtypes are those that the CPU's kernels want.
    """
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.utils.torch_utils import set_default_torch_dtype

    written = json.loads((folder / "config.json").read_text("utf-8"))
    ModelRegistry.models[written["architectures"][0]].load_model_cls()  # its own error, if it can't be imported
    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, dtype="bfloat16",
        enable_prefix_caching=True, attention_backend="CPU_MLA",  # for MLA; else it depends on the processor
    ).create_engine_config()  # fmt: skip
    start_alone(config)
    with set_current_vllm_config(config), torch.device("meta"), set_default_torch_dtype(torch.bfloat16):
        initialize_model(config)
    found = []
    for layer in get_layers_from_vllm_config(config, AttentionLayerBase).values():
        spec = None if getattr(layer, "kv_sharing_target_layer_name", None) else layer.get_kv_cache_spec(config)
        if spec is not None:
            found.append(described(spec))
    return found


def described(spec: Any) -> list[Any]:
    """Describes a spec of vLLM's: see `layers_of`."""
    kinds = {
        "FullAttentionSpec": "full",
        "SlidingWindowSpec": "sliding",
        "ChunkedLocalAttentionSpec": "chunked",
        "MLAAttentionSpec": "mla",
    }
    name = type(spec).__name__
    if name == "MambaSpec":
        return ["mamba", sorted(sorted(shape) for shape in spec.shapes)]
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return [kinds.get(name, name), spec.page_size_bytes // spec.block_size, window or 0]


def start_alone(config: Any) -> None:
    """Groups of one rank, once in a process: layers look up their place among ranks."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    if not torch.distributed.is_initialized():
        place = Path(tempfile.mkdtemp()) / "store"
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)


def main() -> None:
    folder = Path(sys.argv[1])
    stand_in_for_torchvision()
    from vllm.model_executor.models import registry

    # One process for all models, in which a class is imported once; vLLM would start one for each class.
    registry._run_in_subprocess = lambda call: call()
    write_defaults(folder)
    found: dict[str, Any] = {}
    for one in sorted(folder.iterdir()):
        try:
            found[one.name] = layers_of(one)
        except Exception as error:  # noqa: BLE001  # whatever a model's class raises is the answer
            found[one.name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
