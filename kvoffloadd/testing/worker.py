"""Runs a worker as a child process that answers one question after the other, in lines of JSON."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvoffloadd.testing.process import DaemonError, end, module, spawn, tail

END_S = 60.0


class WorkerProcess:
    """Runs the module `name` with `options`, its only argument. At most one question is open at a time.

    `python`: the interpreter; none: this process's. `environment`: as in `spawn`.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        log: Path,
        python: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        _, *words = module(name, json.dumps(options))
        command = [str(python or sys.executable), *words]
        self._child = spawn(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, environment=environment)
        if self._child.stdin is None or self._child.stdout is None:
            raise DaemonError("a worker was started without its pipes")
        self._questions, self._answers = self._child.stdin, self._child.stdout

    @property
    def pid(self) -> int:
        return self._child.pid

    def fileno(self) -> int:
        """Returns a descriptor that is readable when an answer has come, or the worker has ended."""
        return self._answers.fileno()

    def ask(self, question: dict[str, Any]) -> None:
        """Sends a question, without waiting. If the worker has ended, `answer` reports that."""
        with suppress(BrokenPipeError):
            self._questions.write(json.dumps(question).encode() + b"\n")
            self._questions.flush()

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Returns the next answer. Raises DaemonError if there is none, or the worker has ended."""
        ready, _, _ = select.select([self], [], [], limit_s)
        line = self._answers.readline() if ready else b""
        if not line:
            raise DaemonError(f"a worker does not answer:\n{tail(self._log)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        """Sends SIGKILL, without waiting for the worker's end: see `reap`."""
        self._child.kill()

    def reap(self) -> None:
        """Reaps the process after `kill`."""
        self._child.wait()
        self._close_pipes()

    def end(self) -> int:
        """Signals that no more questions come, and waits until the worker has closed its session. Returns its exit
        status.
        """
        self._close_questions()
        try:
            status = self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            status = end(self._child, signal.SIGKILL, 5.0)
        self._close_pipes()
        return status

    def _close_pipes(self) -> None:
        self._close_questions()
        self._answers.close()

    def _close_questions(self) -> None:
        with suppress(BrokenPipeError):  # it has ended before it had read everything
            self._questions.close()
