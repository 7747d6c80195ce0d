"""What an engine computes with, by vLLM's own configurations. Not collected: `test_identity` runs it with each
release's Python. No model is run; folders hold a config each.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.config
import vllm.envs
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from kvoffloadd.integrations.vllm import environment, identity, plugin, spec
from kvoffloadd.integrations.vllm.fields import ANY_LENGTH, ELSEWHERE, HARMLESS, PARTS, is_judged
from kvoffloadd.integrations.vllm.identity import IDENTITY, attached, fields_of
from scripts.vllm import transfer_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CONFIGS = {
    "engine": "VllmConfig",
    "model": "ModelConfig",
    "multimodal": "MultiModalConfig",
    "cache": "CacheConfig",
    "load": "LoadConfig",
    "attention": "AttentionConfig",
    "parallel": "ParallelConfig",
    "mamba": "MambaConfig",
    "kernel": "KernelConfig",
    "device": "DeviceConfig",
    "lora": "LoRAConfig",
    "speculative": "SpeculativeConfig",
}
"""Section -> vLLM's class."""

COMMON: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "dtype": "bfloat16"},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "other": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "states": {
        **{"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 4},
        **{"linear_conv_kernel_dim": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
        **{"shared_expert_intermediate_size": 128, "full_attention_interval": 4},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (made / name).mkdir()
        (made / name / "config.json").write_text(json.dumps(COMMON | config))
    return made


def config_of(model: Path, route: str = "connector", **options: Any) -> Any:
    """A VllmConfig as engines make it, with which the plug-in has run."""
    options = {"enforce_eager": True, "max_model_len": 1024} | options
    connector = KVTransferConfig(**transfer_config(route), engine_id="engine")
    arguments = EngineArgs(model=str(model), skip_tokenizer_init=True, kv_transfer_config=connector, **options)
    return arguments.create_engine_config()


def said(config: Any) -> dict[str, Any]:
    """What two engines must have in common to share."""
    found = dict(config.kv_transfer_config.kv_connector_extra_config[IDENTITY])
    assert not found["doubt"]
    del found["token"]
    return found


def _draft(folder: Path, name: str) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder / name), "num_speculative_tokens": 2}


BLOCKS = {"weight": "fp8_per_block_static", "activation": "fp8_per_block_dynamic"}
TENSORS = {"weight": "fp8_per_tensor_static", "activation": "fp8_per_tensor_dynamic"}
SHARDED: dict[str, Any] = {"load_format": "sharded_state"}
APART: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mamba_ssm_cache_dtype": ("states", {"mamba_ssm_cache_dtype": "float16"}, {"mamba_ssm_cache_dtype": "bfloat16"}),
    "mamba_cache_dtype": ("states", {"mamba_cache_dtype": "float16"}, {"mamba_cache_dtype": "bfloat16"}),
    "kv_cache_dtype_skip_layers": (
        "dense",
        {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
        {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]},
    ),
    "quantization_config, layers": (
        "dense",
        {"quantization": "fp8_per_tensor", "quantization_config": {"ignore": []}},
        {"quantization": "fp8_per_tensor", "quantization_config": {"ignore": ["re:.*q_proj.*"]}},
    ),
    "quantization_config, kinds": (
        "dense",
        {"quantization_config": {"linear": BLOCKS}},
        {"quantization_config": {"linear": TENSORS}},
    ),
    "load_format": ("dense", {}, SHARDED),
    "model_loader_extra_config": (
        "dense",
        SHARDED | {"model_loader_extra_config": {"pattern": "a-{rank}-{part}.safetensors"}},
        SHARDED | {"model_loader_extra_config": {"pattern": "b-{rank}-{part}.safetensors"}},
    ),
    "code_revision": ("dense", {}, {"code_revision": "other"}),
    "model_impl": ("dense", {"model_impl": "vllm"}, {"model_impl": "transformers"}),
    "quantization": ("dense", {}, {"quantization": "fp8_per_tensor"}),
    "hf_overrides": ("dense", {}, {"hf_overrides": {"rope_theta": 5.0}}),
    "override_generation_config": ("dense", {}, {"override_generation_config": {"attn_temperature_tuning": True}}),
}
"""Name -> a model, and options of two engines that must not share."""

ALIKE: dict[str, dict[str, Any]] = {
    "lengths": {"max_model_len": 512},
    "batches": {"max_num_seqs": 3, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 50},
    "answers": {"seed": 7, "max_logprobs": 5, "served_model_name": "another"},
    "adapters": {"enable_lora": True},
}
"""Name -> options in which an engine may differ from another one and share what has no adapter."""


@pytest.mark.parametrize("name", APART)
def test_engines_that_must_not_share(name: str, folder: Path) -> None:
    model, one, other = APART[name]
    assert said(config_of(folder / model, **one)) != said(config_of(folder / model, **other))


@pytest.mark.parametrize("name", ALIKE)
def test_engines_that_share(name: str, folder: Path) -> None:
    one, other = config_of(folder / "dense"), config_of(folder / "dense", **ALIKE[name])
    assert fields_of(one) == fields_of(other)
    assert said(one) == said(other) | {"adapters": ""}


def test_engines_that_differ_in_the_draft(folder: Path) -> None:
    """They share what the target computes."""
    models = ("dense", "dense", "other")
    drafts = [said(config_of(folder / "dense", speculative_config=_draft(folder, one))) for one in models]
    for one in drafts:
        del one["draft_places"], one["draft_seen"]
    names = [one.pop("drafts") for one in drafts]
    assert names[0] == names[1] != names[2]
    assert drafts[0] == drafts[2]


@pytest.mark.parametrize("section", CONFIGS)
def test_every_field_is_judged(section: str) -> None:
    """A field that is not judged is part of the identity; this test demands that it is judged."""
    fields = [field.name for field in dataclasses.fields(getattr(vllm.config, CONFIGS[section]))]
    assert [field for field in fields if not is_judged(section, field)] == []


def test_no_section_is_left_out() -> None:
    assert PARTS.keys() | {one.section for one in (*HARMLESS, *ELSEWHERE)} == set(CONFIGS)


@pytest.mark.parametrize("kind", sorted(ANY_LENGTH))
def test_models_of_any_length_do_not_read_theirs(kind: str) -> None:
    """A line of vLLM's source for each: there is none."""
    transformers = importlib.import_module("transformers.models.auto.modeling_auto")
    architecture = transformers.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    architecture = architecture if isinstance(architecture, str) else architecture[0]
    assert architecture in ModelRegistry.models
    file = importlib.import_module(ModelRegistry.models[architecture].module_name).__file__
    assert file is not None
    assert "max_model_len" not in Path(file).read_text(encoding="utf-8")


# --- what the adapter takes from vLLM ---


@pytest.mark.parametrize("route", ["connector", "spec"])
def test_the_plug_in_runs_where_configurations_are_made(route: str, folder: Path) -> None:
    config = config_of(folder / "dense", route)
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert attached(extra)["doubt"] == ""
    (folder / "dense" / "new.safetensors").write_bytes(b"new")
    assert "have changed" in attached(extra)["doubt"]
    (folder / "dense" / "new.safetensors").unlink()


def test_inside_a_multiconnector(folder: Path) -> None:
    inner = [transfer_config("connector"), {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]
    connector = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": inner}
    )
    EngineArgs(
        model=str(folder / "dense"), skip_tokenizer_init=True, kv_transfer_config=connector
    ).create_engine_config()
    extra = connector.kv_connector_extra_config["connectors"][0]["kv_connector_extra_config"]
    assert extra[IDENTITY]["weights"].startswith("files:")
    assert IDENTITY not in connector.kv_connector_extra_config


def test_the_identity_is_the_same_each_time(folder: Path) -> None:
    assert said(config_of(folder / "states")) == said(config_of(folder / "states"))


def test_engines_without_the_connector_are_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Iterator[Any]:
        raise AssertionError("nobody has asked for it")

    monkeypatch.setattr(plugin, "identity_of", fail)
    config = EngineArgs(model=str(folder / "dense"), skip_tokenizer_init=True).create_engine_config()
    assert config.kv_transfer_config is None


def test_where_adapters_are_named() -> None:
    assert list(inspect.signature(kv_cache_utils._gen_lora_extra_hash_keys).parameters) == ["request"]
    assert list(inspect.signature(WorkerLoRAManager._load_adapter).parameters) == ["self", "lora_request"]
    source = inspect.getsource(kv_cache_utils.generate_block_hash_extra_keys)
    assert re.search(r"_gen_lora_extra_hash_keys\(request\)", source)
    assert list(inspect.signature(EngineCore.add_lora).parameters) == ["self", "lora_request"]
    assert list(inspect.signature(EngineCore.remove_lora).parameters) == ["self", "lora_id"]
    assert list(inspect.signature(EngineCore.add_request).parameters)[:2] == ["self", "request"]
    assert {"method", "args"} <= set(inspect.signature(Executor.collective_rpc).parameters)
    assert isinstance(Executor.is_sleeping, property)


def test_requests_can_be_hashed_again() -> None:
    """This happens before the scheduler has one."""
    hashed: list[int] = []

    def hasher(request: Request) -> list[Any]:
        hashed.append(len(request.block_hashes))
        return [b"hash"]

    request = Request("r", [1, 2], SamplingParams(max_tokens=1), None, block_hasher=hasher)
    request.block_hashes.clear()
    request.update_block_hashes()
    assert (hashed, request.block_hashes) == ([0, 0], [b"hash"])


def test_loaders_that_read_the_model_alone() -> None:
    loaders = importlib.import_module("vllm.model_executor.model_loader")._LOAD_FORMAT_TO_MODEL_LOADER
    assert set(loaders) >= identity._OF_MODEL
    assert set(loaders) - identity._OF_MODEL == {"ipc_cache", "modelexpress", "tensorizer"}


def test_processors_of_other_instruction_sets_have_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that vLLM asks for, where it chooses kernels, or the order of what these keep of a block."""
    here = spec._device()
    assert here.startswith("cpu ")
    attention = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    asking = (attention._get_attn_isa, CpuPlatform.import_kernels, CpuPlatform.get_attn_backend_cls)
    asked = {name for one in asking for name in re.findall(r"torch\.cpu\.(_is_\w+)", inspect.getsource(one))}
    assert {"_is_amx_tile_supported", "_is_avx512_supported"} <= asked <= set(spec._INSTRUCTION_SETS.values())
    for name in asked:
        has = getattr(torch.cpu, name)()
        with monkeypatch.context() as patched:
            patched.setattr(torch.cpu, name, lambda has=has: not has)
            assert spec._device() != here


# --- environment ---


def test_variables_are_vllms() -> None:
    """No judgement of one that it does not have, in neither release; and those without its prefix are all known."""
    known = set(vllm.envs.environment_variables)
    assert {name for name in known if not name.startswith("VLLM_")} <= environment.OTHERS_HARMLESS
    judged = {f"VLLM_{name}" for left in (*environment.HARMLESS, *environment.ELSEWHERE) for name in left.names}
    assert judged - known <= GONE_OR_COMING[vllm.__version__[:4]] | {"VLLM_DIST_IDENT"}


GONE_OR_COMING = {
    "0.32": {
        *("VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT", "VLLM_CHAT_TEMPLATE_FUEL", "VLLM_HTTP_MAX_REQUEST_BODY_SIZE"),
        *("VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES", "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB"),
        "VLLM_REQUEST_BODY_LOG_LEVEL",
    },
    "0.33": {"VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"},
}
"""Release -> variables that the other one alone has."""


def test_the_order_of_states_that_vllm_chooses_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM chooses it with other connectors, on CPUs."""
    found = []
    for order in ("SD", "DS"):
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", order)
        mamba_utils.get_conv_state_layout.cache_clear()
        found.append(spec._platform())
    mamba_utils.get_conv_state_layout.cache_clear()
    assert [one.convolutions for one in found] == ["SD", "DS"]
    assert found[0].vllm == vllm.__version__


def test_engines_that_differ_in_variables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = said(config_of(folder / "dense"))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    assert said(config_of(folder / "dense")) == before
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    assert said(config_of(folder / "dense")) != before
