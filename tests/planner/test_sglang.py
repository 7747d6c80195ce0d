"""A plan for SGLang: its host pools against sums made by hand, its flags, and the settings that the daemon needs.

tests/sglang/test_plans.py asks SGLang itself about the pools of all published models.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd import cli
from kvoffloadd.cli.sglangplan import print_sglang_plan, sglang_plan_json
from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Outcome, Ref, SharedTensor
from kvoffloadd.errors import ConfigError, NoPlanError, RemoteError
from kvoffloadd.planner import PlanInputs, SglangPlan, Trace, make_sglang_plan, read_model
from kvoffloadd.planner.sglang import BUFFER_PROMPTS
from kvoffloadd.sglangnames import STORAGE
from scripts.harness.daemon import Daemon
from scripts.harness.published import CONFIGS
from scripts.sglang import storage_options
from tests.planner.models import DATA, DEEPSEEK, GEMMA_3, GIB, GPT_OSS, LLAMA, QWEN, changed, path_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "SGLANG.md"
TRACE = Trace(requests=10, median_tokens=1000, p90_tokens=4000, block_tokens=512, unique_blocks=90_000, references=1)
MIB = 1 << 20
PAGE = 64


def plan(path: Path, trace: Trace | None = None, **terms: Any) -> SglangPlan:
    inputs: dict[str, Any] = {"block_size": PAGE, "memory_bytes": 64 * GIB}
    return make_sglang_plan(read_model(path), PlanInputs(**inputs | terms), trace)


def published(folder: Path, name: str, **terms: Any) -> SglangPlan:
    return plan(changed(folder, name), **terms)


def pools(made: SglangPlan) -> dict[str, tuple[int, int, int]]:
    """Layers, payload and parts, by name."""
    return {pool.name: (pool.layers, pool.payload_bytes, pool.parts) for pool in made.pools}


# --- pools ----------------------------------------------------------------------------------------------


def test_one_pool() -> None:
    """2 (K and V) x 8 heads x 128 x 2 bytes, 32 layers, 64 tokens; half of the heads on each of two ranks."""
    assert pools(plan(path_of(LLAMA))) == {"kv": (32, 8 * MIB, 1)}
    assert pools(plan(path_of(LLAMA), tp=2)) == {"kv": (32, 4 * MIB, 2)}
    assert pools(plan(path_of(LLAMA), tp=16)) == {"kv": (32, MIB, 16)}, "a head on each rank, two have the same one"
    assert pools(plan(path_of(LLAMA), kv_dtype="fp8", block_size=128)) == {"kv": (32, 8 * MIB, 1)}


def test_windows_have_a_pool_where_sglang_says_so() -> None:
    """2 x 8 x 64 x 2 x 64 tokens x 12 layers, twice. Gemma 3's are in the pool of all: 2 x 4 x 256 x 2 x 64 x 34."""
    made = plan(path_of(GPT_OSS))
    assert pools(made) == {"kv": (12, 1_572_864, 1), "swa": (12, 1_572_864, 1)}
    (prompt,) = made.prompts
    assert (prompt.stored_bytes, prompt.needed_bytes) == (250 * 1_572_864, 127 * 1_572_864)
    joined = plan(path_of(GPT_OSS), hybrid=False)
    assert pools(joined) == {"kv": (24, 3_145_728, 1)}
    assert "--disable-hybrid-swa-memory" in joined.flags
    made = plan(path_of(GEMMA_3))
    assert pools(made) == {"kv": (34, 8_912_896, 1)}
    assert any("windows are in the one pool" in note for note in made.assumed)


def test_latents_are_stored_once(tmp_path: Path) -> None:
    """(512 + 64) x 2 x 64 x 27 layers. With an index, 132 bytes more; in fp8 656 for the latent."""
    assert pools(plan(path_of(DEEPSEEK), tp=2)) == {"kv": (27, 1_990_656, 1)}
    made = published(tmp_path, "deepseek-v3.2", tp=8)
    assert pools(made) == {"kv": (61, 61 * 64 * 1152, 1), "indexer": (61, 61 * 64 * 132, 1)}
    made = published(tmp_path, "deepseek-v3.2", tp=8, kv_dtype="fp8")
    assert pools(made) == {"kv": (61, 61 * 64 * 656, 1), "indexer": (61, 61 * 64 * 132, 1)}
    made = published(tmp_path, "glm-5.2")
    assert pools(made)["indexer"] == (21, 21 * 64 * 132, 1), "the other layers use their neighbours'"


def test_a_state_is_stored_for_a_prompt(tmp_path: Path) -> None:
    """Convolution 3 x (2*16*128 + 32*128) x 2 bytes, recurrent 32 x 128 x 128 in float32; 36 layers."""
    made = published(tmp_path, "qwen3-next-80b-a3b")
    state = 36 * (49_152 + 2_097_152)
    assert pools(made) == {"kv": (12, 1_572_864, 1), "mamba": (36, state, 1)}
    assert made.prompts[0].stored_bytes == 125 * 1_572_864 + state
    assert plan(path_of(QWEN), tp=2).pools[1].parts == 2
    halved = plan(changed(tmp_path, "qwen3-next-80b-a3b", mamba_ssm_dtype="bfloat16"))
    assert pools(halved)["mamba"][1] == 36 * (49_152 + 1_048_576)


def test_layers_without_a_cache_of_their_own_take_room(tmp_path: Path) -> None:
    """2 x 2 x 256 x 2 x 64, of all 35 layers."""
    assert pools(published(tmp_path, "gemma-3n-e4b")) == {"kv": (35, 35 * 131_072, 1)}


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_pools_that_the_storage_refuses(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="refuses SGLang's pools for DeepSeek V4"):
        published(tmp_path, name)


def test_pages_of_one_token(tmp_path: Path) -> None:
    made = published(tmp_path, "lfm2-1.2b")
    assert made.flags[:2] == ("--page-size", "1")
    assert made.pools[0].payload_bytes == 6 * 2048
    assert any("only with --page-size 1:" in warning for warning in made.warnings)


def test_an_index_wants_whole_pages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pages of 64"):
        published(tmp_path, "glm-5", block_size=96)


# --- what must be started -------------------------------------------------------------------------------


def test_flags_are_those_that_are_tested_and_documented() -> None:
    flags = plan(path_of(LLAMA), tp=2, kv_dtype="fp8").flags
    assert flags[:6] == ("--page-size", "64", "--tp-size", "2", "--kv-cache-dtype", "fp8_e4m3")
    given = dict(zip(flags, (*flags[1:], ""), strict=True))
    tested = storage_options()
    assert json.loads(tested.pop("hicache_storage_backend_extra_config")) == STORAGE
    assert tested.pop("hicache_write_policy") == "write_through", "which is SGLang's default"
    for name, value in tested.items():
        flag = f"--{name.replace('_', '-')}"
        assert flag in flags and value in (True, given[flag])
    documented = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    for flag, value in given.items():
        if flag.startswith("--hicache") and flag != "--hicache-storage-backend-extra-config":
            assert f"{flag} {value}" in documented


def test_large_payloads_need_large_slabs(tmp_path: Path) -> None:
    """A state of Nemotron-H is 102 MB; slabs have 64 MiB. No setting is needed where pages fit."""
    made = published(tmp_path, "nemotron-h-8b")
    assert made.settings == {"memory.slab_bytes": "98MiB"}
    assert made.pools[1].payload_bytes == 24 * (61_440 + 4_194_304) <= 98 * MIB
    assert (made.held[0].prompts[0] or 0) > 0
    assert plan(path_of(LLAMA)).settings == {}
    # 40 MiB in slabs of 64: a third would be lost.
    assert plan(path_of(LLAMA), block_size=320).settings == {"memory.slab_bytes": "40MiB"}
    made = plan(path_of(LLAMA), block_size=2560, disk_bytes=1 << 40)
    assert made.settings == {"memory.slab_bytes": "320MiB", "disk.segment_bytes": "1280MiB"}
    assert (made.held[1].prompts[0] or 0) > 0


@pytest.mark.slow
def test_a_daemon_takes_what_the_plan_is_for(start_daemon: Callable[..., Daemon]) -> None:
    """Pages of 16 MiB, which do not fit the slabs that a small memory has."""
    made = plan(path_of(LLAMA), block_size=128, memory_bytes=128 * MIB)
    assert made.settings == {"memory.slab_bytes": "16MiB"}
    (pool,) = made.pools
    half = pool.payload_bytes // 2
    memory = [SharedTensor.allocate(2, half) for _ in range(2)]
    groups = [Group(0, GroupKind.FULL, 128, refs=tuple(Ref(at, 0, half) for at in range(2)))]

    def stores(daemon: Daemon) -> Outcome:
        with Client(daemon.socket, namespace=NamespaceSpec(model="planned")) as client:
            registration = client.register(KvCache(memory, groups))
            job = client.store(registration, {0: (bytes(range(64)), np.arange(2, dtype=np.uint32))})
            return client.wait(job, 60.0).outcome

    with pytest.raises(RemoteError, match=r"memory\.slab_bytes"):
        stores(start_daemon("memory.slab_bytes=0", memory="128MiB"))
    settings = [f"{name}={value}" for name, value in made.settings.items()]
    assert stores(start_daemon(*settings, memory="128MiB")) is Outcome.DONE


def test_memory_of_sglangs_own() -> None:
    """1.2 times the KV cache on each GPU, mapped twice; 16 prompts of 125 pages of 8 MiB."""
    made = plan(path_of(LLAMA), tp=8, gpu_cache_bytes=100 * GIB)
    assert dataclasses.astuple(made.host)[::2] == (120 * GIB, 8 * 2 * 120 * GIB)
    assert plan(path_of(LLAMA)).host.least_gb == -(-BUFFER_PROMPTS * 125 * 8 * MIB // 10**9)
    assert made.settings == {}
    made = plan(path_of(LLAMA), tp=8, gpu_cache_bytes=500 * GIB)
    assert made.settings == {"limits.mapped_bytes": f"{8 * 2 * 600 << 10}MiB"}
    assert plan(path_of(DEEPSEEK), tp=16).settings == {}


def test_many_ranks_need_many_sessions(tmp_path: Path) -> None:
    assert published(tmp_path, "deepseek-r1", tp=128).settings["limits.sessions"] == "384"


def test_what_memory_holds() -> None:
    made = plan(path_of(LLAMA), disk_bytes=1 << 40)
    memory, disk = made.held
    assert (memory.blocks, memory.tokens) == (8192, 8192 * PAGE)
    assert memory.prompts == memory.needed == (8192 // 125,)
    assert disk.tokens > memory.tokens
    short = plan(path_of(LLAMA), memory_bytes=GIB)
    assert any("one can find no room for the other" in warning for warning in short.warnings)
    shorter = plan(path_of(LLAMA), memory_bytes=GIB // 2, prompt_tokens=8000)
    assert any("less than one prompt" in warning for warning in shorter.warnings)
    assert any("no fewer than 256" in warning for warning in plan(path_of(LLAMA), prompt_tokens=200).warnings)


def test_terms_that_are_not_sglangs() -> None:
    with pytest.raises(ConfigError, match="--attn-pack-size is not for SGLang"):
        plan(path_of(QWEN), pack_size=4)
    assert any("--share-tp" in warning for warning in plan(path_of(LLAMA), share_tp=True).warnings)


# --- what is shown --------------------------------------------------------------------------------------


REFUSED = ("deepseek-v4", "longcat", "minicpm3", "minimax-m3", "ring", "step-3.5")


@pytest.mark.parametrize("name", [path.stem for path in DATA.glob("*.json")] + sorted(CONFIGS))
@pytest.mark.parametrize("trace", [None, TRACE])
def test_fits_100_columns(name: str, trace: Trace | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name.startswith(REFUSED):
        with pytest.raises(NoPlanError, match="--engine sglang: "):
            plan(changed(tmp_path, name))
        return
    made = plan(changed(tmp_path, name), trace, tp=2, disk_bytes=2 << 40, gpu_cache_bytes=60 * GIB)
    print_sglang_plan(made)
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 100
    for words in ("host pools", "what the daemon holds", "to start", "assumed"):
        assert words in output
    start = output.split("\nto start\n")[1].split("\n\n")
    assert shlex.split(start[0])[:4] == ["kvoffloadd", "serve", "--memory", "64GiB"]
    _, _, _, _, model, report, *flags = shlex.split(start[1].replace("\\\n", ""))
    assert (model, report) == ("MODEL", "--enable-cache-report")
    assert [word for word in flags if not word.startswith("{")] == list(made.flags[:-1])
    assert json.loads(flags[-1]) == STORAGE == json.loads(made.flags[-1])
    found = json.loads(json.dumps(sglang_plan_json(made)))
    assert found["flags"] == list(made.flags)
    assert found["page_tokens"] == made.page_tokens


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model-config", str(path_of(GPT_OSS)), "--engine", "sglang", "--tp", "2", "--memory", "64GiB"]
    assert cli.main([*asked, "--gpu-cache", "40GiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["engine"], found["page_tokens"], found["host_pools"]["default_bytes"]) == ("sglang", 64, 48 * GIB)
    assert [(pool["name"], pool["needed_pages"]) for pool in found["pools"]] == [("kv", None), ("swa", 2)]
    assert cli.main([*asked, "--block-size", "128"]) == 0
    output = capsys.readouterr().out
    assert "gpt_oss with SGLang, 2 ranks" in output
    assert "--page-size 128" in output
    assert cli.main(["plan", "--model-config", str(path_of(LLAMA)), "--gpu-cache", "40GiB"]) == 2
    assert "--gpu-cache needs --engine sglang" in capsys.readouterr().err
