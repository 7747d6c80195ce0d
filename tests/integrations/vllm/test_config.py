"""Whatever changes the bytes of a block, or who knows its name, changes the namespace."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.client import NamespaceSpec
from kvoffloadd.integrations.vllm.config import IDENTITY, identity_of, instance_of, namespace_of, unstable_hashes


@dataclass(frozen=True)
class Model:
    name: str = "org/model"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Cache:
    tokens_per_hash: int = 16
    blocks_per_chunk: int = 2


@dataclass(frozen=True)
class Parallel:
    rank: int = 0
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1


@dataclass(frozen=True)
class GroupConfig:
    tokens_per_block: int = 16
    layer_names: tuple[str, ...] = ("a", "b")
    group_id: int = 0


@dataclass(frozen=True)
class Config:
    """As vLLM's OffloadingConfig."""

    groups: tuple[GroupConfig, ...] = (GroupConfig(),)
    worker_kv_bytes_per_block: int = 4096
    extra_config: dict[str, Any] = field(default_factory=dict)
    engine_id: str = "engine"
    model: Model = Model()
    cache: Cache = Cache()
    parallel: Parallel = Parallel()
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"


BASE = Config()


def named(config: Config, seed: str | None = None) -> NamespaceSpec:
    return namespace_of(config, "cpu", "0.32", seed)


def test_ranks_and_engines_share_one() -> None:
    assert named(BASE) == named(replace(BASE, parallel=Parallel(rank=1), engine_id="another"))


@pytest.mark.parametrize(
    "changed",
    [
        replace(BASE, model=Model(name="org/other")),
        replace(BASE, model=Model(dtype="fp8")),
        replace(BASE, cache=Cache(blocks_per_chunk=4)),
        replace(BASE, parallel=Parallel(tp_size=4, world_size=4)),
        replace(BASE, groups=(GroupConfig(tokens_per_block=32),)),
        replace(BASE, groups=(GroupConfig(layer_names=("b", "a")),)),
        replace(BASE, kv_cache_layout="LHBNC"),
        replace(BASE, worker_kv_bytes_per_block=8192),
        replace(BASE, extra_config={"revision": "main"}),
        replace(BASE, extra_config={IDENTITY: {"revision": "v2"}}),
        replace(BASE, extra_config={IDENTITY: {"model": "awq {}"}}),
    ],
)
def test_what_differs_has_another(changed: Config) -> None:
    assert named(changed) != named(BASE)


def engine(**changed: Any) -> SimpleNamespace:
    """As vLLM's VllmConfig, where it matters."""
    standard: dict[str, Any] = {
        "revision": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "hf_overrides": {},
        "hf_config_path": None,
        "hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default"}),
        "max_model_len": 4096,
        "multimodal_config": None,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**standard | changed),
        load_config=SimpleNamespace(load_format=changed.get("load_format", "auto")),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=changed.get("hash", "sha256")),
        kv_transfer_config=SimpleNamespace(engine_id=changed.get("engine_id", "one")),
    )


LONG = SimpleNamespace(rope_parameters={"full_attention": {"rope_type": "longrope", "short_factor": [1.0]}})


@pytest.mark.parametrize(
    "changed",
    [
        {"revision": "v2"},
        {"dtype": "torch.float16"},
        {"quantization": "awq"},
        {"hf_overrides": {"rope_theta": 1.0}},
        {"hf_overrides": len},
        {"hf_config_path": "/elsewhere"},
        {"hf_text_config": LONG},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"num_crops": 4})},
        {"load_format": "dummy"},
        {"hash": "xxhash"},
    ],
)
def test_engines_that_differ_have_another(changed: dict[str, Any]) -> None:
    assert identity_of(engine(**changed)) != identity_of(engine())


def test_lengths_matter_where_they_decide_how_keys_are_rotated() -> None:
    assert identity_of(engine(max_model_len=8192)) == identity_of(engine())
    long = [identity_of(engine(hf_text_config=LONG, max_model_len=length)) for length in (4096, 8192)]
    assert long[0] != long[1]


def test_a_function_is_the_engines_own() -> None:
    """Nobody can tell whether two of them do the same."""
    made = [identity_of(engine(hf_overrides=len, engine_id=name)) for name in ("one", "one", "two")]
    assert made[0] == made[1] != made[2]


def test_random_hashes_are_the_engines_own() -> None:
    config = replace(BASE, extra_config={IDENTITY: {"hash": "xxhash"}})
    assert unstable_hashes(config, None)
    assert not unstable_hashes(config, "0")
    assert named(config) != named(replace(config, engine_id="another"))
    assert named(config, "0") == named(replace(config, engine_id="another"), "0") != named(config, "1")


def test_a_directory_is_named_by_its_files(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    config = replace(BASE, model=Model(name=str(tmp_path)))
    before = named(config)
    assert named(config) == before
    os.utime(weights, ns=(1, 1))
    assert named(config) != before


def test_long_names_fit() -> None:
    assert len(named(replace(BASE, model=Model(name="m" * 600))).model) < 512


def test_instances_have_sixteen_bytes_of_their_own() -> None:
    assert len(instance_of("a")) == 16
    assert instance_of("a") != instance_of("b")
