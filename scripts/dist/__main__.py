"""Build the wheel and the source package, check them, and use each from a bare venv of every Python at hand.

Pythons are looked for on the PATH and below ~/.pyenv; a version that pyproject.toml promises and that is not there is
named in the table, and is no failure. The source package is installed with a compiler and without. Exit status 0 if
everything is as it must be, 1 if not, 2 for wrong usage. Needs the package index that pip uses.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvoffloadd.testing.output import ProgressBar, print_json, print_table
from kvoffloadd.testing.process import obey_signals
from kvoffloadd.testing.program import EXIT_BAD, EXIT_INTERRUPTED
from scripts.dist.interpreters import Interpreter, at_hand, probe, promised_versions
from scripts.dist.packages import DistError, Packages, build, check_content, check_metadata, check_stable_abi
from scripts.dist.release import ASSIGNMENT, ROOT, VERSION_FILE
from scripts.dist.trial import KINDS, Outcome, try_out
from scripts.harness.program import command_line


@dataclass(frozen=True, slots=True)
class Report:
    """What was built, and what became of it."""

    version: str
    packages: Packages
    findings: Mapping[str, list[str]]
    outcomes: list[Outcome]
    skipped: Mapping[str, str]
    """For each version of Python that was not used, the reason."""

    @property
    def is_good(self) -> bool:
        """Returns whether nothing is wrong. Packages that no Python has run are not good."""
        return bool(self.outcomes) and not self.problems

    @property
    def problems(self) -> list[str]:
        """Returns everything that is wrong."""
        found = [f"{name}: {text}" for name, texts in self.findings.items() for text in texts]
        failed = [one for one in self.outcomes if one.problem]
        return found + [f"Python {one.interpreter.release}, {one.kind.name}: {one.problem}" for one in failed]

    def as_json(self) -> dict[str, object]:
        """Returns the result by stable names."""
        trials = [
            {"python": one.interpreter.release, "package": one.kind.name, "seconds": round(one.seconds, 1)}
            | {"problem": one.problem}
            for one in self.outcomes
        ]
        return {
            "good": self.is_good, "version": self.version, "wheel": self.packages.wheel.name,
            "source": self.packages.source.name, "findings": dict(self.findings), "trials": trials,
            "skipped": dict(self.skipped),
        }  # fmt: skip

    def print(self) -> None:
        """Prints a table, and below it what is wrong."""
        files = [
            (name, f"{path.stat().st_size / 1024:,.0f} KiB", remark)
            for name, path, remark in (
                ("wheel", self.packages.wheel, self.packages.tag),
                ("source package", self.packages.source, self.packages.source.name),
            )
        ]
        checks = [(name, "WRONG" if texts else "good", "") for name, texts in self.findings.items()]
        trials = [
            (f"Python {one.interpreter.release}", "FAILED" if one.problem else "good", _remark(one))
            for one in self.outcomes
        ]
        absent = [(f"Python {version}", "-", reason) for version, reason in self.skipped.items()]
        verdict = [("verdict", "good" if self.is_good else "BAD", str(self.packages.wheel.parent))]
        print_table(f"kvoffloadd {self.version}", [files, checks, trials, absent, verdict], good=self.is_good)
        for problem in self.problems:
            sys.stdout.write(problem + "\n")


def _remark(outcome: Outcome) -> str:
    used = "" if outcome.problem else ": demo, serve, status"
    return f"{outcome.kind.name}{used}; {outcome.seconds:.0f} s"


def version_of(root: Path) -> str:
    """Returns the version that the package has, without importing it."""
    assigned = ASSIGNMENT.search((root / VERSION_FILE).read_text(encoding="utf-8"))
    if assigned is None:
        raise DistError(f"{VERSION_FILE} has no __version__")
    return assigned[1]


def named(path: Path) -> Interpreter:
    """Returns the interpreter that the user has named. Raises DistError unless the wheel is made for it."""
    found, oldest = probe(path), promised_versions(ROOT / "pyproject.toml")[0]
    if found is None or found.version < oldest:
        raise DistError(f"--python {path}: does not run, or is no CPython {oldest} or newer with the GIL")
    return found


def pythons(options: argparse.Namespace) -> tuple[list[Interpreter], dict[str, str]]:
    """Returns the interpreters to use, and why others are not used. Raises DistError."""
    promised = promised_versions(ROOT / "pyproject.toml")
    if options.quick:
        this = probe(Path(sys.executable))
        found, reason = [this] if this else [], "not used: --quick"
    else:
        found, reason = [*map(named, options.python)], "not at hand"
        chosen = {one.version for one in found}
        found += [one for version, one in at_hand(os.environ, promised[0]).items() if version not in chosen]
    there = {one.version for one in found}
    reasons = {str(version): reason for version in promised if version not in there}
    unable = {one.release: "has no module venv or ensurepip" for one in found if not one.makes_venvs}
    return sorted((one for one in found if one.makes_venvs), key=lambda one: one.version), reasons | unable


def carry_out(options: argparse.Namespace, scratch: Path) -> Report:
    """Builds, checks and tries out. Raises DistError."""
    version, (interpreters, skipped) = version_of(ROOT), pythons(options)
    packages = build(ROOT, scratch, options.out.resolve())
    findings = {
        "metadata": check_metadata(packages),
        "stable ABI": check_stable_abi(packages),
        "content": check_content(packages, version),
    }
    kinds = KINDS[:1] if options.quick else KINDS
    constraints = ROOT / "requirements-dev.lock" if options.quick else None
    outcomes: list[Outcome] = []
    with ProgressBar("dist", len(interpreters) * len(kinds)) as live:
        for interpreter in interpreters:
            for kind in kinds:
                live.show(len(outcomes), f"Python {interpreter.release}, {kind.name}")
                package = packages.source if kind.from_source else packages.wheel
                # A socket's path is short, and TMPDIR may be anywhere.
                with tempfile.TemporaryDirectory(prefix="kvo-dist-", dir="/tmp") as folder:
                    outcomes.append(try_out(interpreter, kind, package, version, constraints, Path(folder)))
    return Report(version, packages, findings, outcomes, skipped)


def main() -> int:
    options = _arguments()
    obey_signals()
    try:
        with tempfile.TemporaryDirectory(prefix="kvo-dist-") as scratch:
            report = carry_out(options, Path(scratch))
    except DistError as error:
        print(f"dist: {error}", file=sys.stderr)
        return EXIT_BAD
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if options.json:
        print_json(report.as_json())
    else:
        report.print()
    return 0 if report.is_good else EXIT_BAD


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "dist", help="where the packages go (default: dist)")
    add(
        "--python",
        type=Path,
        action="append",
        default=[],
        help="use this interpreter, in place of one of its version that is at hand; repeatable",
    )
    add("--quick", action="store_true", help="only the wheel, this Python, and the packages that CI tests with")
    options = parser.parse_args()
    if options.quick and options.python:
        parser.error("--quick tries this Python alone: --python can't be used with it")
    return options


if __name__ == "__main__":
    sys.exit(main())
