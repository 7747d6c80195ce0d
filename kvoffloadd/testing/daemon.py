"""Runs a daemon as a child process on a private socket, and reads its answers and log."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError
from kvoffloadd.testing.process import ROOT, DaemonError, end, spawn, tail
from kvoffloadd.testing.wait import HANG_S, within

START_S = HANG_S
STOP_S = 30.0
CALL_S = 60.0
KVOFFLOADD = ("-m", "kvoffloadd")


class OwnDaemon:
    """`kvoffloadd serve` on a socket in `folder`, and an observer session while it runs. As a context manager it runs
    the daemon within the context.

    The attributes may change between two starts. `settings`: config values by section.key; `faults`: the faults to
    plant; `options`: further words of its command; `environment`: variables in addition to this process's; `program`:
    the program that Python runs in place of the module.
    """

    def __init__(
        self,
        folder: Path,
        memory: int | str,
        settings: Mapping[str, str] | None = None,
        faults: str = "",
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = KVOFFLOADD,
    ) -> None:
        self.socket = folder / "kvo.sock"
        self.log_path = folder / "daemon.log"
        self.memory = memory
        self.settings = dict(settings or {})
        self.program = program
        self._faults = faults
        self._options = options
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None
        self._observer: Client | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- its life ---

    def launch(self) -> None:
        """Starts it, without waiting for anything."""
        self._leave()
        self._child = spawn(self._command(), self.log_path, environment=self._environment)

    def start(self) -> None:
        """Starts it and waits until it answers. Raises DaemonError."""
        self.launch()
        self.await_answer()

    def await_answer(self) -> None:
        """Waits until it answers. Raises DaemonError."""
        limit = time.monotonic() + START_S
        while True:
            observer = Client(self.socket, namespace=None, role="observer", deadline_s=CALL_S, connect_deadline_s=0.0)
            try:
                observer.connect()
            except ClientError as error:
                if not self.alive:
                    raise DaemonError(f"the daemon did not start:\n{self.log()}") from error
                if time.monotonic() > limit:
                    raise DaemonError(f"the daemon did not answer within {START_S:.0f} s:\n{self.log()}") from error
                time.sleep(0.01)
            else:
                self._observer = observer
                return

    def run_another(self) -> subprocess.CompletedProcess[str]:
        """Runs the same command once more to its end, while this one lives."""
        return subprocess.run(self._command(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=START_S)

    def _command(self) -> list[str]:
        return [
            *(sys.executable, *self.program, "serve", "--socket", str(self.socket), "--memory", str(self.memory)),
            *(word for name, value in self.settings.items() for word in ("--set", f"{name}={value}")),
            *(("--faults", self._faults) if self._faults else ()),
            *self._options,
        ]

    @property
    def child(self) -> subprocess.Popen[bytes]:
        """Returns the process of the run that was started last."""
        if self._child is None:
            raise DaemonError("the daemon was never started")
        return self._child

    @property
    def pid(self) -> int:
        """Returns the pid of the run that was started last."""
        return self.child.pid

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def exit_status(self) -> int | None:
        """Returns how it ended. None: it has not; negative: the signal that killed it."""
        return self.child.poll()

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def wait(self, deadline_s: float = STOP_S) -> int:
        """Returns its exit status, once it has ended by itself. Raises DaemonError at the deadline."""
        try:
            return self.child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise DaemonError(f"the daemon did not end within {deadline_s} s:\n{self.log()}") from None

    def stop(self) -> int:
        """Sends SIGTERM, and SIGKILL if it takes too long; returns its exit status."""
        self._leave()
        return 0 if self._child is None else end(self._child, signal.SIGTERM, STOP_S)

    def kill(self) -> None:
        """Sends SIGKILL; returns when the kernel has released all of its resources."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._leave()

    def _leave(self) -> None:
        if self._observer is not None:
            with suppress(ClientError):
                self._observer.close(1.0, force=True)
            self._observer = None

    # --- its answers and its log ---

    @property
    def observer(self) -> Client:
        """Returns a session without a namespace, of the run that was started last."""
        if self._observer is None:
            raise DaemonError("the daemon does not run")
        return self._observer

    def log(self) -> str:
        """Returns the log of all its runs."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def says(self, text: str) -> bool:
        """Returns whether it has logged this. The newest lines may still wait for the thread that writes them."""
        return within(lambda: text in self.log() or not self.alive, HANG_S) is not None and text in self.log()

    def tail(self) -> str:
        return tail(self.log_path)

    def status(self) -> dict[str, Any]:
        """Returns the status as the observer gets it."""
        return self.observer.status()

    def verify(self, *, payloads: bool = False) -> tuple[str, ...]:
        return self.observer.verify(payloads=payloads).findings

    def clear(self) -> None:
        """Clears all namespaces."""
        self.observer.clear(everything=True)

    def ping_s(self) -> float:
        """Returns how long a bystander's ping takes."""
        begun = time.monotonic()
        self.observer.ping()
        return time.monotonic() - begun
