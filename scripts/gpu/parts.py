"""One part of `gpu_check`: a command in its own process, which may crash or hang.

Needs nothing but Python's own library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.gpu import DAEMON_SAYS, RESULTS_VARIABLE

Tell = Callable[[dict[str, Any]], None]

_SET_CHILD_SUBREAPER = 36
TERM_S = 6.0
"""A benchmark that is asked to end gives its daemon up in order, and prints what it has."""
_POLL_S = 0.2
_LAST_LINES = 40


@dataclass(frozen=True, slots=True)
class Part:
    """What is run. `min_s`: with less time left it is not begun. `tests`: it is a run of pytest, else it prints one
    JSON object. Its time limit is no failure where it has then printed its cases, or, with `may_be_cut`, where tests
    have passed and none has failed. `missing`: why it can't be run here; empty: it can. `variables`: of its
    environment.
    """

    name: str
    title: str
    command: Sequence[str]
    limit_s: float
    min_s: float = 10.0
    tests: bool = False
    may_be_cut: bool = False
    missing: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Ended:
    """How it went. `state`: "ran", "failed", "crashed", "timed out", "cut short", "skipped" (it can't run here) or
    "not run" (for time). `figures`: the JSON
    object that it printed at its end; `tests`, `cases`: a row for each that ended. `last_lines` are from its log,
    `daemon_lines` from its daemons' logs.
    """

    part: Part
    state: str
    seconds: float = 0.0
    remark: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    tests: list[dict[str, Any]] = field(default_factory=list)
    cases: list[dict[str, Any]] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    daemon_lines: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """It ran, or was not meant to."""
        return self.state in ("ran", "cut short", "skipped", "not run")

    def count(self, outcome: str) -> int:
        """Tests of that outcome."""
        return sum(test["outcome"] == outcome for test in self.tests)

    def wrong_bytes(self) -> int:
        """Counts the wrong bytes of all cases."""
        return sum(int(case.get("wrong_bytes", 0)) for case in self.cases)

    def rows(self) -> list[dict[str, Any]]:
        """Returns rows as lines of results.jsonl."""
        state = {"part": self.part.name, "state": self.state, "seconds": round(self.seconds, 2), "remark": self.remark}
        name = {"part": self.part.name}
        figures = [{"figures": self.figures}] if self.figures else [{"case": case} for case in self.cases]
        return [state, *({**name, **row} for row in (*self.tests, *figures))]


def adopt_orphans() -> None:
    """Makes what a part leaves behind a child of this process from now on, which ends it."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(
    part: Part,
    limit_s: float,
    environment: Mapping[str, str],
    log: Path,
    tell: Tell = lambda _: None,
    spared: frozenset[int] = frozenset(),
) -> Ended:
    """Runs it, for `limit_s` at most. What it prints goes to the end of `log`. `tell` gets each row as it comes. All
    children that this process has afterwards are ended but those `spared`, by their ids.
    """
    with tempfile.TemporaryDirectory(prefix="kvo-gpu-") as name:
        out, rows = Path(name, "out"), Path(name, "rows")
        began = time.monotonic()
        with out.open("wb") as stdout, log.open("ab") as stderr:
            stderr.write(f"\n===== {part.name}: {' '.join(part.command)}\n".encode())
            stderr.flush()
            first = stderr.tell()
            child = subprocess.Popen(
                part.command,
                env={**environment, **part.variables, RESULTS_VARIABLE: str(rows)},
                stdin=subprocess.DEVNULL,
                stdout=stderr if part.tests else stdout,
                stderr=stderr,
                start_new_session=True,
            )
            status = _await(child, limit_s, _Reader(rows, tell), spared)
        ended = Ended(part, "ran", time.monotonic() - began)
        kept = [row for line in _text(rows).splitlines() if (row := _object(line))]
        ended.tests = [row for row in kept if "test" in row]
        ended.cases = [row["case"] for row in kept if "case" in row]
        with log.open("rb") as printed:
            printed.seek(first)
            lines = printed.read().decode(errors="replace").splitlines()
        ended.daemon_lines = [line for line in lines if line.startswith(DAEMON_SAYS)][-_LAST_LINES:]
        ended.last_lines = [line for line in lines if not line.startswith(DAEMON_SAYS)][-_LAST_LINES:]
        ended.figures = _object(_text(out))
    _judge(ended, status, limit_s)
    return ended


class _Reader:
    """Passes on the rows of a file that another process writes."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self._path = path
        self._tell = tell
        self._passed_on = 0

    def read(self) -> None:
        """Those that are new."""
        whole, _, _ = _text(self._path).rpartition("\n")  # the last line may still be written
        lines = whole.splitlines()
        new, self._passed_on = lines[self._passed_on :], len(lines)
        for line in new:
            self._tell(json.loads(line))


def _await(
    child: subprocess.Popen[bytes], limit_s: float, rows: _Reader, spared: frozenset[int] = frozenset()
) -> int | None:
    """Its exit status; None: it was ended at the limit. Nothing of it is left that SIGKILL ends."""
    until = time.monotonic() + limit_s
    status = None
    while status is None and time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(min(_POLL_S, max(until - time.monotonic(), 0.0)))
        rows.read()
    _end_group(child.pid)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process that the driver does not let go
        child.wait(TERM_S)
    _end_orphans(spared)
    rows.read()
    return status


def _end_group(leader: int) -> None:
    """The session that it began: politely, then not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)
        until = time.monotonic() + TERM_S
        while time.monotonic() < until:
            os.killpg(leader, 0)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-leader, os.WNOHANG)
            time.sleep(0.02)
        os.killpg(leader, signal.SIGKILL)


def _end_orphans(spared: frozenset[int]) -> None:
    """Ends processes in sessions that they made, such as daemons: they are this process's children now."""
    until = time.monotonic() + TERM_S
    with contextlib.suppress(ChildProcessError):
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            left = set(_children()) - spared
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if time.monotonic() < until else signal.SIGKILL)
            if time.monotonic() > until + TERM_S:  # a process that the driver does not let go
                return
            time.sleep(0.05)


def _children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in _text(task / "children").split()]


def _judge(ended: Ended, status: int | None, limit_s: float) -> None:
    if status is None:
        was_well = bool(ended.figures and ended.cases)
        if ended.part.may_be_cut:
            was_well = ended.count("passed") > 0 and not ended.count("failed")
        ended.state, ended.remark = "cut short" if was_well else "timed out", f"ended after {limit_s:.0f} s"
    elif status < 0:
        ended.state, ended.remark = "crashed", f"by signal {-status}"
    elif status:
        reason = next((line.strip() for line in reversed(ended.last_lines) if line.strip()), "see log.txt")
        ended.state, ended.remark = "failed", f"exit status {status}: {reason}"
    elif not ended.part.tests and not ended.figures:
        ended.state, ended.remark = "failed", "it printed no result"
    if ended.tests:
        counts = f"{ended.count('passed')} passed, {ended.count('failed')} failed, {ended.count('skipped')} skipped"
        ended.remark = f"{counts}; {ended.remark}" if ended.remark else counts


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
