"""A system's own processes, started by the process that asks them: they end with it, by their process ids alone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvoffloadd.testing.process import DaemonError, end, spawn, tail


class Service:
    """One command, run from the folder where this process's Python is; started again as often as it is asked to."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        program, *words = command
        beside = Path(sys.executable).parent / program
        self._command = [str(beside if beside.exists() else program), *words]
        self._log = log
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Returns the pid of the run that was started last."""
        if self._child is None:
            raise DaemonError("it was never started")
        return self._child.pid

    def start(self) -> None:
        """Starts the service without waiting for anything."""
        self._child = spawn(self._command, self._log, environment=self._environment)

    def await_answer(self, ask: Callable[[], object], refused: tuple[type[Exception], ...], deadline_s: float) -> None:
        """Waits until `ask()` raises none of `refused` any more. Raises DaemonError: it has ended,
        or at the deadline.
        """
        until = time.monotonic() + deadline_s
        while True:
            try:
                ask()
            except refused as error:
                if self._child is None or self._child.poll() is not None:
                    raise DaemonError(f"{self._command[0]} has ended:\n{tail(self._log)}") from error
                if time.monotonic() > until:
                    raise DaemonError(f"{self._command[0]} does not answer:\n{tail(self._log)}") from error
                time.sleep(0.005)
            else:
                return

    def end(self, *, kill: bool, deadline_s: float) -> None:
        """SIGTERM, or SIGKILL; SIGKILL at the deadline. Returns when it has ended."""
        if self._child is not None:
            end(self._child, signal.SIGKILL if kill else signal.SIGTERM, deadline_s)


def free_port() -> int:
    """A TCP port of the loopback interface where nothing listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
