"""Tests and measures the CUDA device on a machine with one GPU: one command, no network, under nine minutes.

Every part is a command in its own process with a time limit: a crash or a hang costs that part alone. What does
not fit into the budget is reported as not run. The output folder (--out, else $OUT, else build/gpu-check) gets

    report.md        tables, rewritten after every part
    results.jsonl    a line for each part, each test and each benchmark; of one that was cut, for each case
    bandwidth.svg    bandwidth by size of rows
    log.txt          what the parts and their daemons printed

Exit status 1 if a part failed, bytes were wrong, a bound was missed, or too few GPU tests passed (unless their time was
up: then the report notes it, and `--again` runs them again). `make gpu-check`
makes the environment; without make, `python3 -m scripts.gpu.environment VENV BUNDLE` does.

On a machine that is lent for minutes: `--plan first`, then `--plan second`, then `--again FOLDER...`, which runs what
those have not brought to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.gpu import SOFT_VARIABLE
from scripts.gpu.environment import MACHINES_BINDINGS
from scripts.gpu.machine import held_open, machine, said_at_the_end
from scripts.gpu.parts import TERM_S, Ended, Part, adopt_orphans, run
from scripts.gpu.report import all_bounds, write
from scripts.gpu.screen import Screen

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 520.0
GPU_TESTS_MIN, SOFT_TESTS_MIN = 30, 24
"""Fewer that ran and passed prove nothing. The software driver can't do those of torch."""

PLANS = {
    "first": ("contact", "raw", "copy", "tests", "pinning", "paths", "life"),
    "second": ("interference", "gather", "stress", "e2e", "submit", "hunt", "bindings"),
}
"""Each fits into the budget."""

CASES_SHARE = 0.7
"""Of a benchmark's time: it begins no case later, so that what it has measured comes out."""

QUICK_LIMITS = 4
"""Times as long, for small sizes on machines that are slow: nothing is cut there but what hangs."""

STRESS_S, QUICK_STRESS_S = 30, 5
SOFT_SIZES = ("--bytes", "16MiB", "--rounds", "1")
FIRST_TESTS = ("memory", "order", "deaths", "pinning", "users")
"""Of tests/gpu, before the others."""

_PYTEST = (
    *(sys.executable, "-m", "pytest", "-v", "--maxfail=6", "-p", "no:cacheprovider", "-p", "scripts.gpu.results"),
    *("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"),
)
_NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Whatever the machine has of them stays out."""


def parts_of(arguments: argparse.Namespace) -> Iterator[Part]:
    """Yields the parts in the order of what reveals most in least time: the later ones may not be reached."""

    def bench(name: str, title: str, limit_s: float) -> Part:
        options = ["--seconds", f"{CASES_SHARE * limit_s:.0f}", *(SOFT_SIZES if arguments.soft else ())]
        if arguments.quick or (arguments.soft and name == "contact"):
            options = ["--quick"]
        command = (sys.executable, "-m", f"scripts.gpu.bench_{name}", "--json", *options)
        return Part(name, title, command, limit_s * (QUICK_LIMITS if arguments.quick else 1))

    yield bench("contact", "What the machine and its driver say", 90)
    yield bench("raw", "Small rows: the driver alone, beside the daemon", 60)
    yield bench("copy", "Stores and loads by size of rows", 70)
    yield _tests()
    yield bench("pinning", "Pinned memory: what stands still meanwhile, and kinds of it", 45)
    yield bench("paths", "The daemon by each of its paths", 70)
    yield bench("life", "Deaths, small jobs", 40)
    yield bench("interference", "Kernels beside copies", 60)
    yield bench("gather", "Small rows gathered by the worker, beside a decode loop", 75)
    yield _stress(arguments)
    yield _e2e(arguments)
    yield bench("submit", "The processor's cost of a descriptor", 25)
    yield bench("hunt", "Batches that never end", 60)
    yield _bindings()


def _tests() -> Part:
    first = [f"tests/gpu/test_{name}.py" for name in FIRST_TESTS]
    command = (*_PYTEST, "-m", "gpu", *first, "tests/gpu")
    return Part("tests", "Tests on the GPU", command, 140, tests=True, may_be_cut=True, variables=_NO_PLUGINS)


def _stress(arguments: argparse.Namespace) -> Part:
    seconds = QUICK_STRESS_S if arguments.quick else STRESS_S
    command = [sys.executable, "-m", "scripts", "stress", "--device", "cuda", "--seconds", str(seconds)]
    command += ["--workers", "4", "--kill-workers", "--json", *(["--software-driver"] if arguments.soft else [])]
    return Part("stress", "Stress with killed workers", command, seconds + 40, min_s=seconds + 15)


def _bindings() -> Part:
    """The tests of sharing once more with the cuda-bindings that an engine on this machine uses."""
    folder = Path(sys.prefix) / MACHINES_BINDINGS
    tests = ("tests/gpu/test_memory.py", "-m", "gpu", "-k", "stored_another_loads or not_be_exported")
    missing = "" if folder.is_dir() else "the machine has no cuda-bindings beside the bundle's version"
    variables = {**_NO_PLUGINS, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    title = "Sharing memory, with the machine's own cuda-bindings"
    return Part("bindings", title, (*_PYTEST, *tests), 40, tests=True, missing=missing, variables=variables)


def _e2e(arguments: argparse.Namespace) -> Part:
    tests = ROOT / "tests" / "e2e"
    command = (*_PYTEST, "-k", "cuda", f"{tests}/test_smoke.py" if arguments.quick else str(tests))
    title = "End-to-end tests with GPU memory"
    return Part("e2e", title, command, 150, min_s=30, tests=True, may_be_cut=True, variables=_NO_PLUGINS)


def environment_of(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the environment of the parts: they can import the repository and its scripts, and use
    the chosen driver.
    """
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH", "")]))
    found[SOFT_VARIABLE] = "1" if arguments.soft else "0"
    if arguments.soft:
        from tests import softcuda

        found.update(softcuda.environment())
    return found


def names_of(arguments: argparse.Namespace) -> set[str] | None:
    """Returns the names of the parts that were asked for; None: all were. Raises SystemExit as `unfinished` does."""
    if arguments.again:
        return unfinished(arguments.again)
    if arguments.plan:
        return set(PLANS[arguments.plan])
    return set(arguments.only) if arguments.only else None


def unfinished(folders: Sequence[Path]) -> set[str]:
    """Returns the parts that earlier checks, with these output folders, have not brought to a good end. Of a part in
    several of them the last one counts. Raises SystemExit: a folder has no results.
    """
    states: dict[str, str] = {}
    for folder in folders:
        try:
            lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise SystemExit(f"gpu-check: {error}") from None
        states.update((row["part"], row["state"]) for row in map(json.loads, lines) if "state" in row)
    return {name for name, state in states.items() if state not in ("ran", "skipped")}


def verdict_of(ended: list[Ended], arguments: argparse.Namespace, *, complete: bool) -> tuple[str, bool]:
    """Returns the verdict in words, and whether all is well so far."""
    problems = [f"{one.part.name}: {one.state}, {one.remark}" for one in ended if not one.is_good]
    least = SOFT_TESTS_MIN if arguments.soft else GPU_TESTS_MIN
    problems += [
        f"only {one.count('passed')} GPU tests ran and passed, of at least {least}"
        for one in ended
        if one.part.name == "tests" and one.state != "cut short" and one.count("passed") < least
    ]
    problems += [f"{one.part.name}: {one.wrong_bytes()} wrong bytes" for one in ended if one.wrong_bytes()]
    if not (arguments.soft or arguments.quick):  # bounds are for a GPU and for full sizes
        problems += [
            f"{name}: bound missed: {bound['what']}: {bound['value']}, not {bound['kind']} {bound['bound']}"
            for name, bound in all_bounds(ended)
            if not bound["kept"]
        ]
    partial = ("not run", "skipped", "cut short")
    skipped = [f"{one.part.name} {one.state}: {one.remark}" for one in ended if one.state in partial]
    state = "All is well." if not problems else f"{len(problems)} problems:"
    lines = [state if complete else f"Under way. {state}", *(f"- {line}" for line in (*problems, *skipped))]
    if arguments.soft:
        lines.append("- on the software driver: figures mean nothing, bounds are not judged")
    return "\n".join(lines), not problems


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = names_of(arguments)
    with contextlib.nullcontext() if arguments.soft else held_open() as holder:
        return check(arguments, chosen, holder)


def check(arguments: argparse.Namespace, chosen: set[str] | None, holder: int | None) -> int:
    """Runs the chosen parts, and returns the exit status. `holder`: the id of a child to be left alone."""
    out: Path = arguments.out.resolve()  # before the folder changes
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    log.write_bytes(b"")
    began = time.monotonic()
    adopt_orphans()
    os.chdir(ROOT)
    environment = environment_of(arguments)
    heading = "GPU check" + (", software driver" if arguments.soft else "") + (", quick" if arguments.quick else "")
    facts = machine()
    ended: list[Ended] = []
    decides = not (arguments.soft or arguments.quick)
    wanted = [part for part in parts_of(arguments) if chosen is None or part.name in chosen]
    screen = Screen(heading, facts, len(wanted))
    unreached = [Ended(part, "not run", remark="not reached yet") for part in wanted]
    write(out, heading, facts, unreached, "Under way.", [], decides=decides)
    for number, part in enumerate(wanted):
        # Each has its turn, also where this one has to be ended.
        later_s = sum(later.min_s + TERM_S for later in wanted[number + 1 :] if not later.missing)
        left_s = arguments.budget - (time.monotonic() - began) - later_s
        screen.begin(part, min(part.limit_s, left_s), left_s)
        ended.append(_one(part, left_s, environment, log, screen, holder))
        screen.end(ended[-1])
        verdict, _ = verdict_of(ended, arguments, complete=False)
        write(out, heading, facts, [*ended, *unreached[number + 1 :]], verdict, [], decides=decides)
    verdict, good = verdict_of(ended, arguments, complete=True)
    facts.append(("seconds, in all", f"{time.monotonic() - began:.0f}"))
    write(out, heading, facts, ended, verdict, said_at_the_end(), decides=decides)
    screen.close(verdict, out / "report.md")
    return 0 if good else 1


def _one(
    part: Part,
    left_s: float,
    environment: dict[str, str],
    log: Path,
    screen: Screen,
    holder: int | None,
) -> Ended:
    if part.missing:
        return Ended(part, "skipped", remark=f"because {part.missing}")
    if left_s < part.min_s:
        return Ended(part, "not run", remark=f"only {max(left_s, 0):.0f} s of the budget were left")
    spared = frozenset() if holder is None else frozenset([holder])
    return run(part, min(part.limit_s, left_s), environment, log, screen.row, spared)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check")
    parser.add_argument("--out", type=Path, default=default, help="the output folder (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds in all (default: %(default).0f)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="*", metavar="PART", help="these parts alone")
    which.add_argument("--plan", choices=PLANS, help="the parts of one of several commands of nine minutes")
    which.add_argument(
        "--again", nargs="+", type=Path, metavar="FOLDER", help="what earlier checks with these output folders lack"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, which show only that it runs")
    parser.add_argument("--soft", action="store_true", help="on the software driver of tests/softcuda, without a GPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
