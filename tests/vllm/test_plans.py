"""What `kvoffloadd plan` takes models to keep, against vLLM's own specs of their layers, for every model type that the
installed transformers and vLLM's CPU build can make. No weights, no engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.errors import NoPlanError
from kvoffloadd.layout import TRITON_NHD, Attention, LayerSpec, Mamba
from kvoffloadd.planner import Rank, read_model
from kvoffloadd.planner.modeltypes import COMPARED, WRAPPERS
from tests.enginechild import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

ASK_S = 1700.0  # a minute of one core, when it is idle
BLOCK = 16

CAN_NOT_BE_MADE: dict[str, tuple[str, ...]] = {
    # Packages that are not installed for these tests.
    "No module named 'mistral_common'": (
        "granite4_vision", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "voxtral",
    ),
    "No module named 'numba'": ("inkling_mm_model", "inkling_text"),
    "requires the timm library": ("gemma3n",),
    # Kernels of GPUs.
    "Sparse Attention is not supported on CPU": ("deepseek_v32", "glm_moe_dsa"),
    "no valid sparse MLA backend": ("hy_v4",),
    "supported only for CUDA, XPU and ROCm": ("nemotron_h",),
    "module 'triton' has no attribute 'set_allocator'": ("olmo_hybrid",),
    # Classes that read numbers off their weights, or files next to the config.
    "Cannot copy out of meta tensor": ("apertus", "bloom"),
    "Tensor.item() cannot be called on meta tensors": ("gemma3n_text",),
    "Can't load image processor": ("emu3", "hunyuan_vl"),
    "Can't load feature extractor": ("vibevoice_asr",),
    # Kinds that vLLM turns down with these settings.
    "Model Runner V1 does not support: diffusion models": ("diffusion_gemma",),
    "--mamba-block-size can only be set with": ("glm5_next", "kimi_linear"),
    # Keys that published files have, and the class in transformers has not, or has of another form.
    "has no attribute '": (
        "afmoe", "ernie4_5_vl_moe", "gemma4", "glm4_moe_lite", "glm4v_moe", "gte", "lfm2_vl", "mimo_v2_flash",
        "minimax_m3_vl", "nemotron_h_omni", "nomic_bert", "qwen3_vl_moe", "qwen4_exp", "step3p7",
    ),
    "AssertionError": ("cohere_compass", "muse_glimmer_assistant", "qwen4_exp_text"),
    "unsupported operand type": ("hunyuan_v1_dense", "hunyuan_v1_moe", "qianfan_ocr"),
    "Found unknown kwargs": ("dbrx",),
    "entries must be in ('sparse', 'dense')": ("deepseek_v4",),
    "requires a vision configuration": ("gemma4_unified",),
    "first_k_dense_replace not exist": ("hy_v3",),
    "'NoneType' object is not subscriptable": ("lfm2_moe",),
    "total_num_kv_heads\n  Input should be a valid integer": ("nemotron",),
}  # fmt: skip
"""Why vLLM's CPU build can't make models of these types, in its own words, and the types."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Any]:
    """Returns by model type what vLLM reports of its layers, or why it can't."""
    environment = {
        **os.environ,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.layerspecs", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=ASK_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_types_that_can_not_be_made_are_listed(said: dict[str, Any]) -> None:
    """The list has the reasons: what can be made with a newer vLLM, or fails for another reason,
    must be taken from it.
    """
    failed = {kind: why for kind, why in said.items() if isinstance(why, str)}
    listed = {kind: why for why, kinds in CAN_NOT_BE_MADE.items() for kind in kinds}
    assert failed.keys() == listed.keys(), {kind: why for kind, why in failed.items() if kind not in listed}
    other = {kind: failed[kind] for kind, why in listed.items() if why not in failed[kind]}
    assert other == {}


def test_layers_are_those_that_vllm_makes(said: dict[str, Any], folder: Path) -> None:
    """This holds for each known type; the others are refused, so that each plan was compared."""
    theirs, planned, compared = {}, {}, set()
    for kind, layers in said.items():
        if isinstance(layers, str):
            continue
        try:
            model = read_model(folder / kind / "config.json")
        except NoPlanError:
            continue
        compared |= {kind, model.model_type}
        theirs[kind] = Counter(map(str, layers))
        planned[kind] = Counter(str(_described(spec)) for spec in Rank(model, 1, BLOCK).specs(TRITON_NHD).values())
    assert planned == theirs
    assert compared == COMPARED | (WRAPPERS & compared)


def _described(spec: LayerSpec) -> list[Any]:
    """Describes a spec as `layerspecs` does."""
    if isinstance(spec, Mamba):
        return ["mamba", sorted(sorted(state.shape) for state in spec.states)]
    assert isinstance(spec, Attention)
    return [str(spec.kind), spec.payload_bytes // spec.block_size, spec.window]
