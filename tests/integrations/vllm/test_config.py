"""Whatever changes the bytes of a block, or who knows its name, changes the namespace."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.client import NamespaceSpec
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.vllm.config import (
    IDENTITY,
    REACHES,
    identity_of,
    instance_of,
    namespace_of,
    unstable_hashes,
)
from tests.integrations.vllm.fakes import Cache, Config, GroupConfig, Model, Parallel, of_size

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
        replace(BASE, extra_config={REACHES: {0: 128}}),
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


def test_sizes_share_one_where_parts_are_heads() -> None:
    """8 heads; a rank's blocks are the smaller, the more ranks there are, until each has one head."""
    made = [named(of_size(ranks, 8, worker_kv_bytes_per_block=4096 // min(ranks, 8))) for ranks in (1, 2, 4, 8, 16)]
    assert set(made) == {made[0]}
    assert made[0].parallel == "canonical v1 in 8 parts"


def test_one_latent_is_as_long_whatever_the_size() -> None:
    """MLA's: how many ranks vLLM takes for replicas of one another does not matter."""
    made = [named(of_size(ranks, 1, replicated_layout=alike)) for ranks, alike in ((1, False), (1, True), (4, True))]
    assert set(made) == {made[0]}


@pytest.mark.parametrize(
    "other",
    [
        of_size(2, 8, canonical_parts=4),
        of_size(2, 4),
        of_size(2, 8, worker_kv_bytes_per_block=8192),
        replace(of_size(2, 8), kv_cache_layout="LBNHC"),
        replace(of_size(2, 8), canonical_layout=False),
        of_size(2, 8, agnostic=False),
    ],
)
def test_other_parts_have_another(other: Config) -> None:
    assert named(other) != named(of_size(2, 8))


def test_where_parts_are_no_heads_the_size_is_named() -> None:
    made = [named(of_size(ranks, 8, agnostic=False)) for ranks in (1, 2)]
    assert [one.parallel for one in made] == ["tp1 pp1 pcp1 dcp1 of 1", "tp2 pp1 pcp1 dcp1 of 2"]
    pipeline = replace(of_size(2, 8), parallel=Parallel(world_size=4, pp_size=2, is_parallelism_agnostic=True))
    assert named(pipeline).parallel.startswith("tp2 pp2")


def test_options_that_cannot_be() -> None:
    for wrong in (0, -1, True, "8", 2.0):
        with pytest.raises(UsageError, match="canonical_parts must be a number of parts"):
            named(of_size(1, 8, canonical_parts=wrong))
    with pytest.raises(UsageError, match='canonical_parts needs "canonical_layout": true'):
        named(replace(BASE, extra_config={"canonical_parts": 2}))
    with pytest.raises(UsageError, match=r"canonical_parts: 8 heads over 4 ranks can't be 6 parts: .* 8 parts always"):
        named(of_size(4, 8, canonical_parts=6))
    with pytest.raises(UsageError, match="canonical_layout needs KVOffloaddConnector"):
        named(replace(BASE, canonical_layout=True))
