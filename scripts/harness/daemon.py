"""A daemon as a child process on a private socket: its life, what it says, and what must be true at its end."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError
from scripts.harness.leaks import OBSERVER_ALONE, in_use, more_than
from scripts.harness.peer import RawPeer
from scripts.harness.process import (
    ROOT,
    DaemonError,
    bad_entries,
    end,
    mapped_memfds,
    open_fds,
    rss_anon_bytes,
    spawn,
    tail,
)
from scripts.harness.wait import HANG_S, until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

START_S = HANG_S
STOP_S = 30.0
CALL_S = 60.0
KVOFFLOADD = ("-m", "kvoffloadd")
Guest = TypeVar("Guest")


class Daemon:
    """`kvoffloadd serve` on a socket in `folder`, and an observer of it while it runs. As a context it runs within.

    What it is started with may be changed between two starts. `settings`: config values by section.key; `faults`: what
    to plant; `options`: more words of its command; `environment`: variables beside those of this process; `program`:
    what Python runs in place of the module. `expected_in_log`: a pattern of the errors that were asked for.
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
        self.expected_in_log = "(?!)"
        self.guests: list[Any] = []
        self._faults = faults
        self._options = options
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None
        self._observer: Client | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave_guests()
        self.stop()

    # --- its life ---

    def launch(self) -> None:
        """Start it, without waiting for anything."""
        self._leave()
        self._child = spawn(self._command(), self.log_path, environment=self._environment)

    def start(self) -> None:
        """Start it and wait until it answers. Raises DaemonError."""
        self.launch()
        self.await_answer()

    def await_answer(self) -> None:
        """Until it answers. Raises DaemonError."""
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
        """The same command once more, while this one lives, to its end."""
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
        """Of the run that was started last."""
        if self._child is None:
            raise DaemonError("the daemon was never started")
        return self._child

    @property
    def pid(self) -> int:
        """Of the run that was started last."""
        return self.child.pid

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def exit_status(self) -> int | None:
        """How it ended: None: it has not; negative: the signal that killed it."""
        return self.child.poll()

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def wait(self, deadline_s: float = STOP_S) -> int:
        """Its exit status, once it has ended by itself. Raises DaemonError at the deadline."""
        try:
            return self.child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise DaemonError(f"the daemon did not end within {deadline_s} s:\n{self.log()}") from None

    def stop(self) -> int:
        """SIGTERM, and SIGKILL if it takes too long; returns its exit status."""
        self._leave()
        return 0 if self._child is None else end(self._child, signal.SIGTERM, STOP_S)

    def kill(self) -> None:
        """SIGKILL; returns when the kernel has taken everything from it."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._leave()

    def destroy(self) -> None:
        """Whatever state it is in, with its folder."""
        self.leave_guests()
        self.kill()
        shutil.rmtree(self.socket.parent, ignore_errors=True)

    def _leave(self) -> None:
        if self._observer is not None:
            with suppress(ClientError):
                self._observer.close(1.0, force=True)
            self._observer = None

    # --- guests: closed before the daemon is looked at for the last time ---

    def peer(self) -> RawPeer:
        """A raw connection without a hello."""
        return self.welcome(RawPeer(self.socket))

    def welcome(self, guest: Guest) -> Guest:
        """Close this at the end, too."""
        self.guests.append(guest)
        return guest

    def leave_guests(self) -> None:
        """Close all of them, the last first."""
        while self.guests:
            guest = self.guests.pop()
            if hasattr(guest, "open_jobs"):
                with suppress(ClientError):
                    guest.close(5.0, force=True)
            else:
                guest.close()

    # --- what it says ---

    @property
    def observer(self) -> Client:
        """A session without a namespace, of the run that was started last."""
        if self._observer is None:
            raise DaemonError("the daemon does not run")
        return self._observer

    def log(self) -> str:
        """All that its runs have logged."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def tail(self) -> str:
        return tail(self.log_path)

    def status(self) -> dict[str, Any]:
        """As the observer gets it."""
        return self.observer.status()

    def state(self) -> dict[str, Any]:
        """What a request that is refused may not change."""
        status = self.status()
        kept = ("memory", "cache", "transfers", "running", "devices", "accounts", "instances", "namespaces")
        return {name: status[name] for name in kept} | {
            "sessions": [{**session, "requests": 0} for session in sorted(status["sessions"], key=_number)]
        }

    def verify(self, *, payloads: bool = False) -> tuple[str, ...]:
        return self.observer.verify(payloads=payloads).findings

    def clear(self) -> None:
        """All namespaces."""
        self.observer.clear(everything=True)

    def ping_s(self) -> float:
        """How long a bystander's ping takes."""
        begun = time.monotonic()
        self.observer.ping()
        return time.monotonic() - begun

    def sessions(self) -> list[dict[str, Any]]:
        """All but the observer's own."""
        return [session for session in self.status()["sessions"] if session["role"] != "observer"]

    def gpus(self) -> list[dict[str, Any]]:
        """What it says of the GPUs in use."""
        return [device for kind, device in self.status()["devices"].items() if kind.startswith("cuda:")]

    # --- what the kernel says ---

    def mapped(self, name: str) -> int:
        """Mappings of memfds of this name."""
        return mapped_memfds(self.pid, name)[name]

    def open_fds(self) -> int:
        return len(open_fds(self.pid))

    def rss_anon_bytes(self) -> int:
        return rss_anon_bytes(self.pid)

    # --- the audit ---

    def audit(self) -> None:
        """Nobody is left, nothing is charged or held, the self-audit finds nothing, the log tells of no bug.

        Raises DaemonError; TimeoutError: something is not given back.
        """
        self.leave_guests()
        until(lambda: not self._left(), "all that sessions used is given back, and nothing is left")
        if findings := self.verify(payloads=True):
            raise DaemonError(f"the self-audit has found: {'; '.join(findings)}\n{self.tail()}")
        self.check_log()

    def _left(self) -> list[str]:
        return more_than(OBSERVER_ALONE, in_use(self.status()))

    def check_log(self) -> None:
        """No bug of ours has shown itself. Raises DaemonError."""
        bad = [entry for entry in bad_entries(self.log_path) if not re.search(self.expected_in_log, entry)]
        if bad:
            raise DaemonError(f"the log tells of a bug: {bad}\n{self.log()}")

    def finish(self) -> None:
        """Audit it, then end it in order. Raises what `audit` does."""
        try:
            if self.alive:
                self.audit()
                if (status := self.stop()) != 0 or self.socket.exists():
                    raise DaemonError(f"it ended with status {status}, or left its socket:\n{self.log()}")
            self.check_log()
        finally:
            self.destroy()


def _number(session: dict[str, Any]) -> int:
    return int(session["session"])
