"""Repeat the tests of what threads drain, next to busy loops, with threads that are switched all the time.

A test that asserts what a thread has not done yet is green on an idle machine and red on a busy one. These modules look
at queues of lanes, of sealing, of copies, of disks and of adapters' threads. Exit status 0 only if all runs of all
tests were green; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvoffloadd.testing.output import ProgressBar, print_table
from kvoffloadd.testing.process import ROOT, module, spawn
from kvoffloadd.testing.program import carry_out
from scripts.harness.program import command_line
from scripts.threads import SWITCH_VARIABLE

SWITCH_S = "1e-6"
MODULES = (
    "tests/test_lanes.py",
    "tests/test_log.py",
    "tests/test_standarderror.py",
    "tests/agent/test_serve.py",
    "tests/cache/test_arrivals.py",
    "tests/cache/test_big_stores.py",
    "tests/cache/test_demotion.py",
    "tests/cache/test_disktier.py",
    "tests/cache/test_failing_roots.py",
    "tests/cache/test_hung_disk.py",
    "tests/cache/test_job_end.py",
    "tests/cache/test_promotion.py",
    "tests/cache/test_reclaim.py",
    "tests/cache/test_sealing.py",
    "tests/cache/test_verification.py",
    "tests/client/test_concurrency.py",
    "tests/device",
    "tests/integrations/sglang",
    "tests/integrations/vllm",
    "tests/metrics",
    "tests/server",
    "tests/storage/disk",
    "tests/storage/test_hashing.py",
)
"""What asserts the state of something that a thread changes."""
_BUSY = "while True: pass"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_ENDED = (0, 1)
"""Exit statuses of pytest that ran: all green, or not."""


@dataclass
class ThreadsReport:
    """How it went. `red`: how often each test was, of `times` runs."""

    times: int
    red: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.red and not self.errors

    def as_json(self) -> dict[str, object]:
        return {"good": self.is_good, "times": self.times, "red": dict(self.red), "errors": self.errors}

    def print(self) -> None:
        red = [("red", f"{count} of {self.times}", test) for test, count in self.red.most_common()]
        errors = [("error", "", error) for error in self.errors]
        verdict = ("verdict", "good" if self.is_good else "BAD", f"{self.times} runs of each test")
        print_table("threads", [red, errors, [verdict]], good=self.is_good)


@contextmanager
def busy(loops: int, folder: Path) -> Iterator[None]:
    """Runs `loops` processes that want a CPU all the time."""
    children = [spawn([sys.executable, "-I", "-S", "-c", _BUSY], folder / "busy.log") for _ in range(loops)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def run(given: argparse.Namespace, folder: Path) -> ThreadsReport:
    """All rounds."""
    report = ThreadsReport(given.times)
    words = ["-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "-n", str(given.workers), "--dist", "loadfile"]
    command = module("pytest", *words, *given.modules)
    with busy(given.busy, folder), ProgressBar("threads", given.times) as live:
        for number in range(given.times):
            log = folder / f"round-{number}.log"
            with log.open("wb") as stream:
                child = spawn(command, log, stdout=stream.fileno(), environment={SWITCH_VARIABLE: SWITCH_S})
                status = _end_of(child)
            output = log.read_text(encoding="utf-8", errors="replace")
            report.red.update(_FAILED.findall(output))
            if status not in _ENDED:
                report.errors.append(f"pytest ended with status {status}: {output[-300:]}")
            if status:
                sys.stderr.write(output[-8000:])
            live.show(number + 1, f"{report.red.total()} red")
    return report


def _end_of(child: subprocess.Popen[bytes]) -> int:
    """Tests have their own limits. An interrupt ends them."""
    try:
        return child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--times", type=int, default=20, help="runs of each test (default: %(default)s)")
    add("--busy", type=int, default=4, help="busy loops at the same time (default: %(default)s)")
    add("--workers", type=int, default=2, help="modules side by side (default: %(default)s)")
    add("modules", nargs="*", default=list(MODULES), metavar="MODULE", help="of tests, in place of all")
    given = parser.parse_args()
    if given.times < 1 or given.busy < 0 or given.workers < 0:
        parser.error("--times: at least 1; --busy and --workers: not below 0")
    missing = [name for name in given.modules if not (ROOT / name.partition("::")[0]).exists()]
    if missing:
        parser.error(f"there is no {', '.join(missing)}")
    return carry_out("threads", partial(run, given), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
