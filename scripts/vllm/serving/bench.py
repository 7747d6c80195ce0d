"""What a prefill and a decode engine serve when they hand prompts over through the daemon, with and without groups.

Real vLLM engines on the CPU, each in its own process with one thread; prompts much longer than the model's
sliding windows. Three cases: a decode engine without connector, which computes everything itself; a prefill engine
before it, where each KV cache group is stored and loaded by itself, of windows what they need; and the same without
groups, as vLLM is with `disable_hybrid_kv_cache_manager`: all layers are one group with full attention.

First one request at a time, then as many as there are clients. All answers must be those of the engine that computes,
or the script ends with status 1. The limit of a TTFT is that of a prompt which the engine's own prefix cache has, and
memcpy of the bytes that are loaded instead. Run it with the Python that has vLLM and kvoffloadd.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffloadd.bench.memory import Memcpy
from kvoffloadd.testing.figures import median_ratio, p50, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import DaemonError, module, obey_signals, private_folder
from kvoffloadd.testing.program import EXIT_BAD, EXIT_USAGE
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.figures import at_most, judged, print_bounds
from scripts.harness.program import benchmark_line, show_result
from scripts.vllm import transfer_config
from scripts.vllm.serving.engine import EngineOptions
from scripts.vllm.serving.figures import (
    FIGURES,
    LOAD_FIGURES,
    MIB,
    ServingRound,
    TransferTotals,
    differing,
    figures_of,
    rows,
)
from scripts.vllm.serving.models import BLOCK_TOKENS, FIRST_TOKEN, KINDS, VOCABULARY, WINDOW
from scripts.vllm.serving.pair import EngineProcess, Pair, Prompt

VERSION = "0.32"
ALONE, GROUPS, NO_GROUPS = "no hand-over", "with groups", "without groups"
STEP_TOKENS = 1024
SLAB_BYTES = 16 * MIB
COPIES = 5
WRITE_S = 600.0
PATIENCE = {"timeout_s": 200.0, "wait_s": 60.0, "job_deadline_s": 200.0}
"""A slow machine is no reason for a miss."""


@dataclass(frozen=True, slots=True)
class ServingBench:
    """The engines of all cases, and the daemon."""

    daemon: Daemon
    pairs: dict[str, Pair]
    memcpy: Memcpy
    given: argparse.Namespace

    def round(self, case: str, prompts: list[Prompt]) -> ServingRound:
        """All of one case. Raises DaemonError where an engine did not have what it must have, or loaded nothing."""
        pair, answer = self.pairs[case], self.given.answer
        repeat = Pair(pair.decode, None)
        before = self.daemon.status()
        single, own = [], []
        for prompt in prompts:
            single += pair.serve([prompt], answer, "single", 1)
            own += repeat.serve([prompt], answer, "single", 1)
        after = self._settled()
        if min(one.cached for one in own) < (self.given.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS:
            raise DaemonError(f"{case}: the engine's own cache did not have a prompt that it has just answered")
        store, load = (TransferTotals.between(before, after, way, len(prompts)) for way in ("store", "load"))
        if pair.prefill is not None and not load.jobs:
            raise DaemonError(
                f"{case}: no prompt was handed over: all requests came before the stores, or these failed"
            )
        self.daemon.clear()
        begun_s = time.monotonic()
        busy = pair.serve(prompts, answer, "busy", self.given.clients)
        busy_s = time.monotonic() - begun_s
        self._settled()
        self.daemon.clear()
        memcpy_s = p50(self.memcpy.seconds(int(load.bytes)) for _ in range(COPIES)) if load.bytes else 0.0
        return ServingRound(single, own, busy, busy_s, store, load, memcpy_s)

    def _settled(self) -> dict[str, Any]:
        """Waits until no job runs. Returns the status then."""
        until(lambda: not self.daemon.status()["running"]["jobs"], "all is stored")
        return self.daemon.status()


def options_of(case: str, model: Path, socket: Path, given: argparse.Namespace) -> EngineOptions:
    """Returns the options of an engine; those of a pair have the same."""
    engine = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",  # with fewer bits, the order of sums decides between tokens that are nearly equal
        "max_model_len": given.tokens + given.answer,
        "block_size": BLOCK_TOKENS,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": max(given.clients, 2),
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if case == NO_GROUPS:
        engine["disable_hybrid_kv_cache_manager"] = True
    connector = None
    if case != ALONE:
        connector = transfer_config("connector", socket=str(socket), block_size=BLOCK_TOKENS, **PATIENCE)
    return EngineOptions(engine, connector)


def write_model(given: argparse.Namespace, folder: Path) -> Path:
    """Has a separate process write it: the libraries take seconds to load and warn a lot."""
    path = folder / "model"
    command = module("scripts.vllm.serving.models", given.model, str(given.tokens + given.answer), str(path))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WRITE_S)
    if done.returncode:
        raise DaemonError(f"the model was not written:\n{done.stderr}")
    return path


def start(given: argparse.Namespace, folder: Path, stack: ExitStack) -> ServingBench:
    """A daemon that has room for all prompts of a phase, and engines, which start at once."""
    prompt_bytes = (given.tokens + BLOCK_TOKENS) * KINDS[given.model].token_bytes
    memory_bytes = (given.requests + 4) * prompt_bytes // SLAB_BYTES * SLAB_BYTES + 4 * SLAB_BYTES
    settings = {"memory.slab_bytes": str(SLAB_BYTES), "log.level": "warning"}
    daemon = stack.enter_context(Daemon(folder, memory_bytes, settings))
    model = write_model(given, folder)
    engines: list[EngineProcess] = []

    def launch(case: str, role: str) -> EngineProcess:
        name = f"{role} {case}".replace(" ", "-")
        engines.append(stack.enter_context(EngineProcess(folder, name, options_of(case, model, daemon.socket, given))))
        return engines[-1]

    handing = (GROUPS, *([NO_GROUPS] if KINDS[given.model].windowed else []))
    pairs = {case: Pair(launch(case, "decode"), launch(case, "prefill")) for case in handing}
    pairs = {ALONE: Pair(launch(ALONE, "decode"), None), **pairs}
    for engine in engines:
        engine.await_start()
    sessions = len(handing) * 2 * 2  # of two engines, each with a scheduler and a rank
    until(lambda: len(daemon.sessions()) >= sessions, "all engines are connected")
    return ServingBench(daemon, pairs, Memcpy(prompt_bytes), given)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all; the first one warms up."""
    rng = random.Random(1)
    with private_folder() as name, ExitStack() as stack, ProgressBar("bench_serving", given.rounds + 1) as live:
        live.show(0, "starting the engines")
        bench = start(given, Path(name), stack)
        cases: dict[str, list[ServingRound]] = {case: [] for case in bench.pairs}
        wrong = dict.fromkeys(bench.pairs, 0)
        for number in range(given.rounds + 1):
            prompts = [
                [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(given.tokens)] for _ in range(given.requests)
            ]
            found: dict[str, ServingRound] = {}
            for case in [*bench.pairs][:: -1 if number % 2 else 1]:
                live.show(number + len(found) / len(bench.pairs), f"round {number} of {given.rounds}, {case}")
                found[case] = bench.round(case, prompts)
            for case, one in found.items():
                wrong[case] += sum(differing(found[ALONE].single, had) for had in (one.single, one.own, one.busy))
                if number:
                    cases[case].append(one)
    return result_of(given, cases, wrong)


def result_of(given: argparse.Namespace, cases: dict[str, list[ServingRound]], wrong: dict[str, int]) -> dict[str, Any]:
    """What is shown. `wrong`: answers that are not those of the engine that computes."""
    bounds = [at_most(f"{case}: answers that differ", count, 0) for case, count in wrong.items()]

    def add(what: str, figures: dict[str, list[float]], one: str, other: str, bound: float) -> None:
        bounds.append(at_most(f"{one}: {what} of {other}", median_ratio(figures[one], figures[other]), bound))

    ttfts = {case: [p50(one.ttft_s for one in round_.single) for round_ in rounds] for case, rounds in cases.items()}
    loaded = {case: [round_.load.job_bytes for round_ in rounds] for case, rounds in cases.items()}
    for case in cases:
        if case != ALONE:
            add("TTFT", ttfts, case, ALONE, 1.0)
    if NO_GROUPS in cases:
        needed = math.ceil(KINDS[given.model].needed_share(given.tokens) * 100) / 100
        add("bytes of a load", loaded, GROUPS, NO_GROUPS, needed)
    figures = {case: figures_of(rounds) for case, rounds in cases.items()}
    names = ("model", "tokens", "answer", "clients", "requests", "rounds")
    shape = {name: getattr(given, name) for name in names} | {"window_tokens": WINDOW, "block_tokens": BLOCK_TOKENS}
    limit = figures[GROUPS]["ratio_to_limit"]
    return judged({**shape, "cases": figures, "wrong_answers": sum(wrong.values()), "ratio_to_limit": limit}, bounds)


def show(result: dict[str, Any]) -> None:
    windows = f", windows of {result['window_tokens']} in most layers" if KINDS[result["model"]].windowed else ""
    print(f"{result['tokens']:,} tokens{windows}; answers of {result['answer']} tokens; figures of one request\n")
    cases = result["cases"]
    print_grid("one request at a time", ("", *cases), rows(cases, FIGURES))
    print()
    print_grid(f"{result['clients']} clients", ("", *cases), rows(cases, LOAD_FIGURES))
    print_bounds(result)


def main() -> int:
    parser = benchmark_line(__doc__)
    add = parser.add_argument
    add("--model", choices=KINDS, default="hybrid", help="dense: full attention alone (default: %(default)s)")
    add("--requests", type=int, default=12, help="in each case, phase and round (default: %(default)s)")
    add("--rounds", type=int, default=3, help="in addition to one that warms up (default: %(default)s)")
    # Two tokens behind the last whole block: the engine's own prefix cache leaves two to compute, a hand-over one.
    add("--tokens", type=int, default=64 * BLOCK_TOKENS + 2, help="of a prompt (default: %(default)s)")
    add("--answer", type=int, default=32, metavar="TOKENS", help="of an answer (default: %(default)s)")
    add("--clients", type=int, default=4, help="at once, in the second phase (default: %(default)s)")
    given = parser.parse_args()
    if min(given.requests, given.rounds, given.clients) < 1 or given.tokens <= BLOCK_TOKENS or given.answer < 2:
        parser.error(
            f"--requests, --rounds, --clients: at least 1; --tokens: more than {BLOCK_TOKENS}; --answer: at least 2"
        )
    if importlib.util.find_spec("vllm") is None:
        print(f"bench_serving: no vLLM here: run this with the Python of `make test-vllm` ({VERSION})", file=sys.stderr)
        return EXIT_USAGE
    obey_signals()
    try:
        result = run(given)
    except DaemonError as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return EXIT_BAD
    except KeyboardInterrupt:
        return EXIT_BAD
    status = show_result(result, given, show)
    return EXIT_BAD if result["wrong_answers"] else status
