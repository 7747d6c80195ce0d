"""A daemon as a child process on a private socket, and what the kernel says of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
START_S = 30.0
STOP_S = 30.0
_SHM = "/dev/shm"
_SOCKET_BYTES_MAX = 100

# A child of ours ends with us, even if we are killed: SIGTERM on the parent's death, kept over the exec.
_LAUNCHER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


class DaemonError(Exception):
    """The daemon did not do what it must; the message ends with its log."""


def obey_signals() -> None:
    """SIGTERM is answered like Ctrl-C: everything is ended in order. Also where a shell had SIGINT ignored."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for one run, with a path short enough for a socket in it."""
    folder = tempfile.TemporaryDirectory(prefix="kvo-")
    if len(os.fsencode(folder.name)) + len("/kvo.sock.lock") > _SOCKET_BYTES_MAX:
        folder.cleanup()
        folder = tempfile.TemporaryDirectory(prefix="kvo-", dir="/tmp")
    return folder


def memory_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for files that are memory, if there is a place for such."""
    return tempfile.TemporaryDirectory(prefix="kvo-", dir=_SHM if os.access(_SHM, os.W_OK) else None)


def module(name: str, *arguments: str) -> list[str]:
    """The command of a module of this repository, for `spawn`, or for what has the `search_path`."""
    return [sys.executable, "-m", name, *arguments]


def search_path() -> str:
    """PYTHONPATH for children: this repository first, then what this process has."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def spawn(
    command: Sequence[str],
    log: Path,
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """A child process out of the terminal's reach, so that Ctrl-C is ours alone to answer. Its stderr goes to `log`.

    `environment`: variables beside those that this process has.
    """
    variables = {**os.environ, "PYTHONPATH": search_path(), **(environment or {})}
    launched = [sys.executable, "-c", _LAUNCHER, str(os.getpid()), *command]
    with log.open("ab") as stream:
        return subprocess.Popen(
            launched, stdin=stdin, stdout=stdout, stderr=stream, start_new_session=True, env=variables
        )


def end(child: subprocess.Popen[bytes], number: int, deadline_s: float) -> int:
    """Signal a child and wait for its end; SIGKILL at the deadline. Returns its exit status."""
    if child.poll() is None:
        child.send_signal(number)
    try:
        return child.wait(deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


class DaemonProcess:
    """`kvoffloadd serve` in `folder`. `settings`: config values by section.key; `faults`: what to plant. `environment`:
    as `spawn` has it.
    """

    def __init__(
        self,
        folder: Path,
        memory_bytes: int,
        settings: Mapping[str, str],
        faults: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._environment = environment
        self.socket = folder / "kvo.sock"
        self.log = folder / "daemon.log"
        self._command = [
            sys.executable, "-m", "kvoffloadd", "serve", "--socket", str(self.socket), "--memory", str(memory_bytes),
            *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
            *(("--faults", faults) if faults else ()),
        ]  # fmt: skip
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the run that was started last."""
        return -1 if self._child is None else self._child.pid

    def launch(self) -> None:
        """Start it, without waiting for anything."""
        self._child = spawn(self._command, self.log, environment=self._environment)

    def start(self) -> None:
        """Start it and wait until it answers. Raises DaemonError."""
        self.launch()
        self.await_answer()

    def await_answer(self) -> None:
        """Until it answers. Raises DaemonError."""
        assert self._child is not None
        until = time.monotonic() + START_S
        while True:
            try:
                with Client(self.socket, namespace=None, role="observer", connect_deadline_s=0.0) as observer:
                    observer.ping()
                    return
            except ClientError as error:
                if self._child.poll() is not None:
                    raise DaemonError(f"the daemon did not start:\n{tail(self.log)}") from error
                if time.monotonic() > until:
                    raise DaemonError(f"the daemon did not answer within {START_S:.0f} s:\n{tail(self.log)}") from error
            time.sleep(0.02)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.poll() is None

    @property
    def exit_status(self) -> int | None:
        """How it ended: None: it has not; negative: the signal that killed it."""
        return None if self._child is None else self._child.poll()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def stop(self) -> int:
        """SIGTERM; returns its exit status."""
        return 0 if self._child is None else end(self._child, signal.SIGTERM, STOP_S)


def tail(log: Path, lines: int = 30) -> str:
    """The end of a log file."""
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({error})"


# --- /proc -------------------------------------------------------------------------------------------


def open_fds(pid: int) -> dict[int, str]:
    """Open descriptors and what they are."""
    folder = Path(f"/proc/{pid}/fd")
    found = {}
    for entry in folder.iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except OSError:  # closed meanwhile
            continue
    return found


def mapped_memfds(pid: int, prefix: str) -> Counter[str]:
    """Mappings of memfds whose names begin with `prefix`, by name."""
    found: Counter[str] = Counter()
    mark = f"/memfd:{prefix}"
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        at = line.find(mark)
        if at >= 0:
            found[line[at + len("/memfd:") :].split(" ", 1)[0]] += 1
    return found


def rss_anon_bytes(pid: int) -> int:
    """Private memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def unmapped_within(pid: int, memory_name: str, limit_s: float) -> float | None:
    """Seconds from now until the daemon has no mapping of that memfd any more; None: it still had one at the limit."""
    began = time.monotonic()
    while True:
        mapped = mapped_memfds(pid, memory_name)
        now = time.monotonic() - began
        if not mapped:
            return now
        if now > limit_s:
            return None
        time.sleep(0.001)
