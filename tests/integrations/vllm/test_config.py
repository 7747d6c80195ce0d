"""Whatever changes the bytes of a block, or who knows its name, changes the namespace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffloadd.client import NamespaceSpec
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.vllm.config import (
    REACHES,
    Options,
    Platform,
    instance_of,
    namespace_of,
    refuse_adapters,
    unstable_hashes,
)
from tests.integrations.vllm.fakes import CacheSettings, Config, GroupConfig, Model, Parallel, identified, of_size

BASE = Config()
PLATFORM = Platform("cpu", "0.32.0", "SD")


def named(config: Config, seed: str | None = None) -> NamespaceSpec:
    return namespace_of(config, PLATFORM, seed)


def test_ranks_and_engines_share_one() -> None:
    assert named(BASE) == named(replace(BASE, parallel=Parallel(rank=1), engine_id="another"))


@pytest.mark.parametrize(
    "changed",
    [
        replace(BASE, model=Model(dtype="fp8")),
        replace(BASE, cache=CacheSettings(blocks_per_chunk=4)),
        replace(BASE, parallel=Parallel(tp_size=4, world_size=4)),
        replace(BASE, groups=(GroupConfig(tokens_per_block=32),)),
        replace(BASE, groups=(GroupConfig(layer_names=("b", "a")),)),
        replace(BASE, kv_cache_layout="LHBNC"),
        replace(BASE, worker_kv_bytes_per_block=8192),
        replace(BASE, extra_config=identified() | {"revision": "main"}),
        replace(BASE, extra_config=identified(model="org/other")),
        replace(BASE, extra_config=identified(weights="files:other")),
        replace(BASE, extra_config=identified(dtype="float16")),
        replace(BASE, extra_config=identified(fields="others")),
        replace(BASE, extra_config=identified(hash="sha256_cbor")),
        replace(BASE, extra_config=identified(doubt="the model's files have changed")),
        replace(BASE, extra_config=identified() | {REACHES: {0: 128}}),
    ],
)
def test_what_differs_has_another(changed: Config) -> None:
    assert named(changed) != named(BASE)


@pytest.mark.parametrize(
    "changed",
    [
        Platform("cuda", "0.32.0", "SD"),
        Platform("cpu", "0.32.1", "SD"),
        Platform("cpu", "0.32.0+cpu", "SD"),
        Platform("cpu", "0.32.0rc1", "SD"),
        Platform("cpu", "0.32.0", "DS"),
    ],
)
def test_what_computes_is_named(changed: Platform) -> None:
    """It is named by its whole version: what a patch release mends must not be found again."""
    assert namespace_of(BASE, changed, None) != named(BASE)


def test_the_order_of_states_is_named_where_there_may_be_some() -> None:
    """Engines that are known to have none share: vLLM turns states around for connectors, whatever the model is."""
    for reaches, differs in ((None, True), ({1: 1}, True), ({}, False)):
        config = replace(BASE, extra_config=identified() | ({} if reaches is None else {REACHES: reaches}))
        one, other = (namespace_of(config, replace(PLATFORM, convolutions=order), None) for order in ("SD", "DS"))
        assert (one != other) is differs


def test_the_place_of_a_model_is_no_part() -> None:
    """vLLM's name of a local model is its path, which may be another on each host."""
    assert named(replace(BASE, model=Model(name="/elsewhere"))) == named(BASE)


@pytest.mark.parametrize("field", ["adapters", "drafts", "layers", "places", "seen", "token"])
def test_what_is_named_by_keys_is_no_part(field: str) -> None:
    """Adapters and drafts have separate keys; a token counts where there is a doubt."""
    assert named(replace(BASE, extra_config=identified(**{field: "another"}))) == named(BASE)


def test_in_doubt_it_is_the_engines_own() -> None:
    """Its processes agree, and its next start does not."""
    made = [named(replace(BASE, extra_config=identified(doubt="files", token=token))) for token in ("a", "a", "b")]
    assert made[0] == made[1] != made[2]
    replica = replace(BASE, extra_config=identified(doubt="files", token="a"), engine_id="engine_dp1")
    assert named(replica) != made[0]


def test_adapters_need_our_connector() -> None:
    refuse_adapters(identified())
    with pytest.raises(UsageError, match="KVOffloaddSpec can't tell which LoRA adapter"):
        refuse_adapters(identified(adapters="rank 16"))


def test_how_files_are_named_can_be_chosen() -> None:
    assert Options.of({}).fingerprint is Fingerprint.AUTO
    assert Options.of({"fingerprint": "contents"}).fingerprint is Fingerprint.CONTENTS
    with pytest.raises(UsageError, match="kv_connector_extra_config: fingerprint must be"):
        Options.of({"fingerprint": "times"})


def test_random_hashes_are_the_engines_own() -> None:
    config = replace(BASE, extra_config=identified(hash="xxhash"))
    assert unstable_hashes(config, None)
    assert not unstable_hashes(config, "0")
    assert named(config) != named(replace(config, engine_id="another"))
    assert named(config, "0") == named(replace(config, engine_id="another"), "0") != named(config, "1")


def test_long_names_fit() -> None:
    assert len(named(replace(BASE, extra_config=identified(model="m" * 600))).model) < 512


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
        named(replace(BASE, extra_config=identified() | {"canonical_parts": 2}))
    with pytest.raises(UsageError, match=r"canonical_parts: 8 heads over 4 ranks can't be 6 parts: .* 8 parts always"):
        named(of_size(4, 8, canonical_parts=6))
    with pytest.raises(UsageError, match="canonical_layout needs KVOffloaddConnector"):
        named(replace(BASE, canonical_layout=True))
