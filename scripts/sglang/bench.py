"""What a storage costs SGLang where nothing hits: per request, the time of its calls in each of SGLang's threads.

Real engines on the CPU: with `KVOffloaddStorage` and a daemon, the same with its daemon dead, and with SGLang's own
`file` backend. All the same tiny model and random prompts that were not asked before, one at a time; rounds
alternate. Threads share Python's lock with the scheduler, so that what each of them takes of the processor counts, too.

Run it with the Python of `make test-sglang`. With `--seat linker` it is `KVOffloaddLinker` in place of the storage,
whose calls all come from the scheduler's thread.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from kvoffloadd.testing.figures import median_ratio, p50, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import DaemonError, obey_signals, private_folder
from kvoffloadd.testing.program import EXIT_BAD, EXIT_USAGE
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.figures import at_most, judged, print_bounds
from scripts.harness.program import benchmark_line, show_result
from scripts.sglang import storage_options
from scripts.sglang.timed import HOOKS, LINKER_METHODS, OURS, SCHEDULER, STORAGE_METHODS

TIMED = "scripts.sglang.timed"
PAGE = 8
KEYS = 125
"""Of a prompt: as many as 8,000 tokens are in pages of 64, which a CPU would compute for too long."""
TOKENS = KEYS * PAGE + 1
"""The last one SGLang computes in any case."""
ANSWER_TOKENS = 2
VOCABULARY = 512
_FIRST_TOKEN = 3
MEMORY = "64MiB"
QUIET_S = 1.5
"""After a prompt: SGLang stores it some time after its answer, which is not to meet the next one."""
TELL_S = 60.0

OUR, DEAD, FILE = "kvoffloadd", "daemon dead", "SGLang's file"

FIGURES = {
    "scheduler_ms": "scheduler, our calls",
    "hooks_ms": "scheduler, its tree",
    "wait_ms": "lookup's answer after",
    "lookup_ms": "lookups",
    "lookup_processor_ms": "on the processor",
    "store_ms": "stores",
    "store_processor_ms": "on the processor",
    "threads_processor_ms": "other threads' processor",
}
"""Of a request, in milliseconds."""

LOOKUPS = ("batch_exists", "batch_exists_v2", "lookup")
STORES = ("batch_set", "batch_set_v1", "batch_set_v2", "offload")


class TimedEngine(NamedTuple):
    """An engine, and the folder for its timings."""

    engine: Any
    folder: Path

    def signal(self, number: int) -> None:
        """All its processes: one that has nothing to do spins, and would take a core from the one that is measured."""
        os.killpg(self.engine.child.pid, number)

    def ask(self, prompts: list[list[int]]) -> dict[str, Any]:
        """What was timed of these, one after the other. Raises DaemonError if anything hit."""
        self.tell()
        for prompt in prompts:
            (found,) = self.engine.generate([prompt], ANSWER_TOKENS)
            if found.cached:
                raise DaemonError(f"a prompt that nobody has asked before hits: {found.cached} tokens")
            time.sleep(QUIET_S)
        return self.tell()

    def tell(self) -> dict[str, Any]:
        """What was timed since the last time."""
        result = self.folder / "timings.json"
        result.unlink(missing_ok=True)
        os.kill(int((self.folder / "pid").read_text(encoding="utf-8")), signal.SIGUSR2)
        until(result.exists, "the engine writes its timings", TELL_S)
        timings: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return timings


def options_of(who: str, seat: str, socket: Path, folder: Path) -> dict[str, Any]:
    """`storage` of the engine, timed."""
    extra: dict[str, Any] = {"timings": str(folder), "prefetch_threshold": PAGE, "timeout_s": 30.0}
    if who == FILE:
        options = storage_options(**extra, class_name="HiCacheFile", module_path=TIMED)
        config = json.loads(options["hicache_storage_backend_extra_config"])
        config |= {"file_storage_path": str(folder / "files")}
        del config["interface_v1"]  # it has the older interface alone
        return options | {"hicache_storage_backend_extra_config": json.dumps(config)}
    if seat == "linker":
        options = importlib.import_module("scripts.sglang").linker_options(timings=str(folder), socket=str(socket))
        options["unified_cache_external_linker_config"]["linker_module_path"] = TIMED
        return dict(options)
    return storage_options(socket=str(socket), module_path=TIMED, **extra)


def figures_of(timings: dict[str, Any], requests: int) -> dict[str, float]:
    """Returns the figures of one round: milliseconds for each request."""
    calls: list[tuple[str, str, list[list[float]]]] = [(one[0], one[1], one[2]) for one in timings["calls"]]
    ours = {*STORAGE_METHODS, *LINKER_METHODS}

    def spent(at: int, methods: set[str], thread: str = "") -> float:
        times = (t for where, method, t in calls if method in methods and (not thread or where == thread))
        return sum(one[at] for rows in times for one in rows) / requests * 1e3

    others = sum(took for name, took in timings["processor_s"].items() if name != SCHEDULER)
    return {
        "scheduler_ms": spent(0, ours, SCHEDULER),
        "hooks_ms": spent(0, set(HOOKS), SCHEDULER),
        "wait_ms": p50(timings["waits_s"]) * 1e3 if timings["waits_s"] else 0.0,
        "lookup_ms": spent(0, set(LOOKUPS)),
        "lookup_processor_ms": spent(1, set(LOOKUPS)),
        "store_ms": spent(0, set(STORES)),
        "store_processor_ms": spent(1, set(STORES)),
        "threads_processor_ms": others / requests * 1e3,
    }


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all; the first one warms up."""
    # Not at the top: of the tests' engine there is need in SGLang's venv alone.
    from tests.sglang.engine import SglangEngine
    from tests.vllm import models

    who = [OUR, DEAD, *([FILE] if given.seat == "storage" else [])]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in who}
    rng = random.Random(1)
    with private_folder() as name, ExitStack() as stack, ProgressBar("bench_sglang", given.rounds + 1) as live:
        folder = Path(name)
        model = models.write("dense", folder)
        settings = {"memory.slab_bytes": str(1 << 20), "log.level": "warning"}
        daemon = stack.enter_context(Daemon(folder, MEMORY, settings))
        benches = {}
        for number, one in enumerate((OUR, *who[2:])):
            place = folder / f"timings-{number}"
            place.mkdir()
            engine = SglangEngine(
                model, folder / f"engine-{number}.log", storage=options_of(one, given.seat, daemon.socket, place),
                page_size=PAGE, max_total_tokens=3 * 1024,
            )  # fmt: skip
            benches[one] = TimedEngine(stack.enter_context(engine), place)
            benches[one].signal(signal.SIGSTOP)
        sessions = 1 if given.seat == "linker" else 3
        for number in range(given.rounds + 1):
            for one in who[:: -1 if number % 2 else 1]:
                live.show(number, f"round {number} of {given.rounds}, {one}")
                bench = benches[OUR if one == DEAD else one]
                prompts = [
                    [rng.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(TOKENS)] for _ in range(given.requests)
                ]
                bench.signal(signal.SIGCONT)
                _set_daemon(daemon, alive=one != DEAD, sessions=0 if one == FILE else sessions)
                figures = figures_of(bench.ask(prompts), given.requests)
                bench.signal(signal.SIGSTOP)
                if number:
                    rounds[one].append(figures)
        _set_daemon(daemon, alive=True, sessions=0)
        for bench in benches.values():
            bench.signal(signal.SIGCONT)
    cases = {
        one: {name: [round(pick(run[name] for run in runs), 3) for pick in (statistics.median, min, max)]
              for name in FIGURES}
        for one, runs in rounds.items()
    }  # fmt: skip
    bounds = []
    ratio = 0.0
    if FILE in rounds:
        ratio = median_ratio(*([one["threads_processor_ms"] for one in rounds[case]] for case in (OUR, FILE)))
        bounds.append(at_most("processor time of the threads, of the file backend's", ratio, 1.0))
    shape = {"tokens": TOKENS, "keys": KEYS, "requests": given.requests, "rounds": given.rounds, "seat": given.seat}
    return judged({**shape, "cases": cases, "ratio_to_limit": round(ratio, 3)}, bounds)


def _set_daemon(daemon: Daemon, *, alive: bool, sessions: int) -> None:
    """Kill it, or have it run and wait until the engine is back."""
    if not alive:
        daemon.kill()
        return
    if not daemon.alive:
        daemon.start()
    until(lambda: len(daemon.sessions()) >= sessions, "the engine is connected")


def show(result: dict[str, Any]) -> None:
    print(f"{result['tokens']:,} tokens, {result['keys']} keys, nothing hits; ms for one request\n")
    cases = result["cases"]
    print_grid(
        "median of rounds",
        ("", *cases),
        [(text, *(f"{one[figure][0]:.2f}" for one in cases.values())) for figure, text in FIGURES.items()],
    )
    print()
    print_grid(
        "least and most of a round",
        ("", *cases),
        [
            (text, *("{:.1f} to {:.1f}".format(*one[figure][1:]) for one in cases.values()))
            for figure, text in FIGURES.items()
        ],
    )
    if result["bounds"]:
        print()
        print_bounds(result)


def main() -> int:
    parser = benchmark_line(__doc__)
    add = parser.add_argument
    add("--requests", type=int, default=8, help="measured in each case and round (default: %(default)s)")
    add("--rounds", type=int, default=5, help="in addition to one that warms up (default: %(default)s)")
    add("--seat", choices=("storage", "linker"), default="storage", help="which of ours (default: %(default)s)")
    given = parser.parse_args()
    if given.requests < 1 or given.rounds < 1:
        parser.error("--requests, --rounds: at least 1")
    if importlib.util.find_spec("sglang") is None:
        print("bench_sglang: no SGLang here: run this with the Python of `make test-sglang`", file=sys.stderr)
        return EXIT_USAGE
    if given.seat == "linker" and "KVOffloaddLinker" not in importlib.import_module(OURS).__all__:
        print("bench_sglang: this kvoffloadd has no linker for SGLang", file=sys.stderr)
        return EXIT_USAGE
    obey_signals()
    try:
        result = run(given)
    except DaemonError as error:
        print(f"bench_sglang: {error}", file=sys.stderr)
        return EXIT_BAD
    except KeyboardInterrupt:
        return EXIT_BAD
    return show_result(result, given, show)
