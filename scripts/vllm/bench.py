"""What a request of 32k tokens costs vLLM's scheduler: through this daemon, and through vLLM's own tiering.

Real engines on the CPU, each in its own process: with `KVOffloaddConnector` and with `KVOffloaddSpec`, next to a
daemon that the script starts, and with vLLM's `TieringOffloadingSpec` and its file system tier, whose GPU copies are
done by torch instead. All the same model (one layer, random weights, attention left out), chunks and prompts. One
request at a time is measured, while another one decodes and a step takes at least `--step-ms`, as on a GPU.

Three cases: prompts that were not asked before, which are computed and stored; prompts that are in memory; prompts
that are on disk alone. Run it with the Python that has vLLM and kvoffloadd.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from kvoffloadd.testing.disk import disk_folder, disk_settings
from kvoffloadd.testing.figures import median_ratio, p99, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import DaemonError, module, obey_signals, private_folder, spawn, tail
from kvoffloadd.testing.program import EXIT_BAD, EXIT_USAGE
from scripts.harness.daemon import Daemon
from scripts.harness.figures import at_most, judged, print_bounds
from scripts.harness.program import benchmark_line, show_result
from scripts.vllm import ENVIRONMENT, transfer_config

VERSION = "0.32"
WHO = ("connector", "spec", "tiering")
CASES = ("new", "memory", "disk")
FIGURES = {
    "lookup_s": "lookups",
    "step_end_s": "on_schedule_end",
    "alloc_s": "update_state_after_alloc",
    "prepare_store_s": "prepare_store",
    "connector_s": "all of the connector",
    "processor_s": "the same, on the processor",
    "answer_s": "first lookup to answer",
}
"""Of a sample of `timed`, and what they are called here."""
BLOCK_TOKENS = 32
TOKENS = 32 << 10
LAST_TOKENS = 8  # no whole chunk: they are computed whatever was loaded
BLOCK_BYTES = 4 << 10
HEAD_DIM = BLOCK_BYTES // (BLOCK_TOKENS * 2 * 2)
STEP_TOKENS = 2048
MIB = 1 << 20
DISK_BYTES = 2 << 30
RUN_S = 900.0

Samples = list[dict[str, Any]]


class PromptCounts(NamedTuple):
    """`fresh`, `again`: prompts computed first, and requests for the last `rotation` of them after that; the first
    `rotation` of those warm up.
    """

    fresh: int
    again: int
    rotation: int
    memory_bytes: int


def settings_of(requests: int) -> dict[str, PromptCounts]:
    """Memory for everything; and memory for two and a half prompts of the six that are asked for in turn."""
    prompt = TOKENS // BLOCK_TOKENS * BLOCK_BYTES
    everything = PromptCounts(requests, requests + 4, 4, (requests + 4) * prompt)
    little = PromptCounts(6, requests + 6, 6, prompt * 5 // 2)
    return {"memory": everything, "disk": little}


def write_model(folder: Path) -> Path:
    """A config; vLLM makes random weights by itself."""
    path = folder / "model"
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 2 * HEAD_DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2 * TOKENS,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def connector_of(who: str, chunk: int, place: str, memory_bytes: int) -> dict[str, Any]:
    """`kv_transfer_config`. `place`: the daemon's socket, or the folder of vLLM's tier."""
    if who != "tiering":
        return transfer_config(who, socket=place, block_size=chunk)
    extra = {
        "block_size": chunk,
        "spec_name": "TieringOnCpu",
        "spec_module_path": "scripts.vllm.tiering",
        "secondary_tiers": [{"type": "fs", "root_dir": place}],
        "cpu_bytes_to_use": memory_bytes,
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def run_engine(options: dict[str, Any], folder: Path, name: str) -> Samples:
    """Runs an engine in a separate process, to its end. Raises DaemonError if it does not come to one."""
    log, result = folder / f"{name}.log", folder / f"{name}.json"
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    child = spawn(module("scripts.vllm.timed", json.dumps(options), str(result)), log, environment=environment)
    try:
        status = child.wait(RUN_S)
    except subprocess.TimeoutExpired:
        status = -1
    finally:
        child.kill()
        child.wait()
    if status != 0:
        raise DaemonError(f"the engine with {name} did not come to its end:\n{tail(log)}")
    samples: Samples = json.loads(result.read_text(encoding="utf-8"))
    return samples


def run_setting(who: str, setting: PromptCounts, model: Path, folder: Path, given: argparse.Namespace) -> Samples:
    """Runs one engine on a separate disk folder, with a separate daemon if it needs one."""
    with ExitStack() as stack:
        disk = Path(stack.enter_context(disk_folder(given.disk)))
        place = str(disk)
        if who != "tiering":
            values = disk_settings(disk, DISK_BYTES) | {"memory.slab_bytes": str(MIB), "memory.policy": "lru"}
            place = str(stack.enter_context(Daemon(folder, setting.memory_bytes, values)).socket)
        engine = {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": TOKENS + 1024,
            "block_size": BLOCK_TOKENS,
            # One prompt and the other request: the engine's own cache never has what is asked next.
            "num_gpu_blocks_override": TOKENS // BLOCK_TOKENS + 96,
            "max_num_batched_tokens": STEP_TOKENS,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        options = {
            "engine": engine,
            "connector": connector_of(who, given.chunk, place, setting.memory_bytes),
            "tokens": TOKENS + LAST_TOKENS,
            "step_s": given.step_ms / 1e3,
            "fresh": setting.fresh,
            "again": setting.again,
            "rotation": setting.rotation,
            "seed": 1,
            "socket": "" if who == "tiering" else place,
        }
        return run_engine(options, folder, who)


def cases_of(name: str, setting: PromptCounts, samples: Samples, who: str) -> dict[str, Samples]:
    """Samples by case. Raises DaemonError where they are not what they are taken for."""
    fresh = [sample for sample in samples if sample["fresh"]]
    again = [sample for sample in samples if not sample["fresh"]][setting.rotation :]
    if any(sample["hit_tokens"] for sample in fresh) or any(sample["hit_tokens"] != TOKENS for sample in again):
        raise DaemonError(f"{who}, {name}: hits of {sorted({sample['hit_tokens'] for sample in again})} tokens")
    if name == "disk":
        if min(sample["lookups"] for sample in again) < 2:
            raise DaemonError(f"{who}: a prompt that was to be on disk was in memory")
        return {"disk": again}
    return {"new": fresh, "memory": again}


def figures_of(samples: Samples) -> dict[str, float]:
    """Returns the figures of one run: mean and p99 in milliseconds, and how often a request was asked for."""
    found = {"lookups": statistics.mean(sample["lookups"] for sample in samples)}
    for figure in FIGURES:
        values = [sample[figure] * 1e3 for sample in samples]
        found[f"{figure[:-2]}_mean_ms"] = statistics.mean(values)
        found[f"{figure[:-2]}_p99_ms"] = p99(values)
    return found


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all; medians over the rounds."""
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {case: {who: [] for who in given.who} for case in CASES}
    settings = settings_of(given.requests)
    total, done = given.rounds * len(settings) * len(given.who), 0
    with private_folder() as name, ProgressBar("bench_vllm", total) as live:
        folder = Path(name)
        model = write_model(folder)
        for number in range(given.rounds):
            for setting_name, setting in settings.items():
                for who in given.who[:: -1 if number % 2 else 1]:
                    live.show(done, f"round {number + 1} of {given.rounds}, {who}, {setting_name}")
                    samples = run_setting(who, setting, model, folder, given)
                    for case, chosen in cases_of(setting_name, setting, samples, who).items():
                        rounds[case][who].append(figures_of(chosen))
                    done += 1
    cases = {
        case: {
            who: {name: round(statistics.median(one[name] for one in runs), 3) for name in runs[0]}
            for who, runs in by_who.items()
        }
        for case, by_who in rounds.items()
    }
    ours = [who for who in given.who if who != "tiering"]
    beside = ours if "tiering" in given.who else []
    ratios = {
        (case, who): median_ratio(*([one["connector_mean_ms"] for one in rounds[case][x]] for x in (who, "tiering")))
        for case in CASES
        for who in beside
    }
    bounds = [at_most(f"{who}, {case}: time of tiering", ratio, 1.0) for (case, who), ratio in ratios.items()]
    shape = {"tokens": TOKENS + LAST_TOKENS, "chunk": given.chunk, "requests": given.requests, "rounds": given.rounds}
    worst = round(max(ratios.values(), default=0.0), 3)
    return judged({**shape, "step_ms": given.step_ms, "cases": cases, "ratio_to_limit": worst}, bounds)


def show(result: dict[str, Any]) -> None:
    titles = {"new": "computed and stored", "memory": "in memory", "disk": "on disk"}
    keys = TOKENS // result["chunk"]
    print(f"{result['tokens']:,} tokens, {keys:,} keys; ms of the scheduler's thread for one request\n")
    for case, by_who in result["cases"].items():
        print_grid(
            titles[case],
            ("mean and p99, ms", *(column for who in by_who for column in (who, ""))),
            [
                *(
                    (
                        text,
                        *(f"{one[f'{figure[:-2]}_{at}_ms']:.2f}" for one in by_who.values() for at in ("mean", "p99")),
                    )
                    for figure, text in FIGURES.items()
                ),
                ("asked for, times", *(text for one in by_who.values() for text in (f"{one['lookups']:.1f}", ""))),
            ],
        )
        print()
    if result["bounds"]:
        print_bounds(result)


def main() -> int:
    parser = benchmark_line(__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=50, help="measured in each case (default: %(default)s)")
    add("--rounds", type=int, default=3, help="runs of everything (default: %(default)s)")
    add("--chunk", type=int, default=BLOCK_TOKENS, help="tokens of a key (default: %(default)s)")
    add("--step-ms", type=float, default=10.0, help="a step of the engine at least (default: %(default)s)")
    add("--disk", type=Path, metavar="FOLDER", help="where the disk tiers are (default: /var/tmp)")
    add("--who", nargs="+", choices=WHO, default=list(WHO), help="only these")
    given = parser.parse_args()
    if given.requests < 2 or given.rounds < 1 or TOKENS % given.chunk or given.chunk % BLOCK_TOKENS:
        parser.error(f"--requests: at least 2; --rounds: at least 1; --chunk: {BLOCK_TOKENS} times a power of 2")
    if importlib.util.find_spec("vllm") is None:
        print(f"bench_vllm: no vLLM here: run this with the Python of `make test-vllm` ({VERSION})", file=sys.stderr)
        return EXIT_USAGE
    obey_signals()
    try:
        result = run(given)
    except DaemonError as error:
        print(f"bench_vllm: {error}", file=sys.stderr)
        return EXIT_BAD
    except KeyboardInterrupt:
        return EXIT_BAD
    return show_result(result, given, show)
