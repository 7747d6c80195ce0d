"""Break the program on purpose, one place at a time, and see whether the tests notice.

Runs the mutants that tests/mutants.toml writes down, and a random sample of those that the syntax of the core rooms
offers, each in a copy of the tree, against the tests that should fail with it. Exit status 0 if every mutant that is
written down was killed, and of the sample at least `--floor` percent; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from kvoffloadd.testing.output import ProgressBar, print_json, print_table
from scripts.harness.program import add_seed, command_line, seed_of
from scripts.mutants.mutations import Mutant, found, written

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = ROOT / "tests/mutants.toml"
ROOMS = {
    "kvoffloadd/cache": ("tests/cache",),
    "kvoffloadd/storage": ("tests/storage", "tests/cache"),
    "kvoffloadd/server": ("tests/server", "tests/e2e/test_smoke.py", "tests/e2e/test_registrations.py"),
}
LIMIT_S = 900.0
SHOWN = 40
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "gpu-bundle", "__pycache__", ".*_cache", ".hypothesis")
_TESTS_FAILED = 1


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant: "killed", "hung" (the tests did not end), "survived", "broken" (it can't be tested)."""

    mutant: Mutant
    end: str

    @property
    def noticed(self) -> bool:
        """Whether the tests noticed it."""
        return self.end in ("killed", "hung")


class Copies:
    """Copies of the tree, one for each mutant under test at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(count):
            shutil.copytree(ROOT, folder / str(number), ignore=_LEFT_OUT, symlinks=True)
            self._free.put(folder / str(number))

    @contextmanager
    def lend(self) -> Iterator[Path]:
        """One of them, for as long as it takes."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)


def fate_of(mutant: Mutant, copies: Copies) -> Fate:
    """Run its tests in a copy of the tree that has it."""
    with copies.lend() as copy:
        target = copy / mutant.file
        right = target.read_text(encoding="utf-8")
        target.write_text(mutant.source, encoding="utf-8")
        try:
            return Fate(mutant, _run(copy, mutant.tests))
        finally:
            target.write_text(right, encoding="utf-8")


def _run(copy: Path, tests: tuple[str, ...]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not vllm and not service"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests], cwd=copy, env=environment, capture_output=True, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode == _TESTS_FAILED or done.returncode < 0:  # the mutant may take the tests' process with it
        return "killed"
    return "survived" if done.returncode == 0 else "broken"


def run(mutants: list[Mutant], jobs: int) -> list[Fate]:
    """All of them, some at a time."""
    fates: list[Fate] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvoffloadd-mutants-") as folder,
        ThreadPoolExecutor(jobs) as pool,
        ProgressBar("mutants", len(mutants)) as live,
    ):
        copies = Copies(Path(folder), jobs)
        for fate in pool.map(lambda mutant: fate_of(mutant, copies), mutants):
            fates.append(fate)
            if not fate.noticed:
                live.print(f"{fate.mutant.name}: {fate.end}")
            survived = sum(not fate.noticed for fate in fates)
            live.show(len(fates), f"{len(fates) - survived} killed, {survived} not")
    return fates


def sample(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """Draws `count` mutants from all that the rooms offer."""
    pool = [mutant for room in rooms for mutant in found(room, ROOT, ROOMS[room])]
    return random.Random(seed).sample(pool, min(count, len(pool)))


def main() -> int:
    options = _arguments()
    seed = seed_of(options, "mutants")
    by_hand = [mutant for mutant in written(WRITTEN, ROOT) if options.only in mutant.name]
    drawn = sample(options.room or list(ROOMS), options.sample, seed)
    fates = run(by_hand + drawn, options.jobs)
    of_hand, of_sample = fates[: len(by_hand)], fates[len(by_hand) :]
    share = 100 * sum(fate.noticed for fate in of_sample) / len(of_sample) if of_sample else 100.0
    good = all(fate.noticed for fate in of_hand) and share >= options.floor
    left = [f"{fate.mutant.name}: {fate.end}" for fate in fates if not fate.noticed]
    if options.json:
        killed = sum(fate.noticed for fate in of_hand)
        print_json(
            {"good": good, "seed": seed, "written": len(of_hand), "written_killed": killed, "sampled": len(of_sample)}
            | {"sampled_killed_percent": round(share, 1), "survivors": left}
        )
    else:
        rows = [
            ("written down", f"{sum(fate.noticed for fate in of_hand)} of {len(of_hand)}", "killed"),
            ("sampled", f"{sum(fate.noticed for fate in of_sample)} of {len(of_sample)}", f"killed: {share:.1f} %"),
        ]
        survivors = [("", "", name) for name in left[:SHOWN]]
        print_table("mutants", [rows, survivors, [("verdict", "good" if good else "BAD", f"seed {seed}")]], good=good)
    return 0 if good else 1


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--only", default="", metavar="TEXT", help="of the mutants that are written down, those with this in the name")
    add("--sample", type=int, help="how many to draw from the syntax (default: 60, with --only none)")
    add("--room", action="append", choices=list(ROOMS), help="draw from this folder (default: from all)")
    add("--floor", type=float, default=90.0, help="percent of the sample to be killed (default: %(default)s)")
    add("--jobs", type=int, default=2, help="mutants under test at once (default: %(default)s)")
    add_seed(parser)
    given = parser.parse_args()
    if given.sample is None:
        given.sample = 0 if given.only else 60
    if min(given.sample, given.floor) < 0 or given.jobs < 1:
        parser.error("--sample and --floor: not below 0; --jobs: at least 1")
    return given


if __name__ == "__main__":
    sys.exit(main())
