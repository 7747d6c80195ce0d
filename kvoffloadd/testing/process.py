"""Child processes, their folders and logs, and their state in /proc."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvoffloadd.testing.wait import within

ROOT = Path(__file__).resolve().parents[2]
_SHM = "/dev/shm"
_SOCKET_BYTES_MAX = 100

# A child ends with this process, even if that is killed: SIGTERM on the parent's death, kept over the exec.
_LAUNCHER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


class DaemonError(Exception):
    """A daemon or a worker did not behave as required; the message ends with its log."""


def obey_signals() -> None:
    """Handles SIGTERM like Ctrl-C: everything is ended in order. Works also where a shell made SIGINT ignored."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder for one run, with a path short enough for a socket in it."""
    folder = tempfile.TemporaryDirectory(prefix="kvo-")
    if len(os.fsencode(folder.name)) + len("/kvo.sock.lock") > _SOCKET_BYTES_MAX:
        folder.cleanup()
        folder = tempfile.TemporaryDirectory(prefix="kvo-", dir="/tmp")
    return folder


def memory_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder for files that are memory, if there is a place for such."""
    return tempfile.TemporaryDirectory(prefix="kvo-", dir=_SHM if os.access(_SHM, os.W_OK) else None)


def module(name: str, *arguments: str) -> list[str]:
    """Returns the command of a module of this repository, for `spawn`, or for a process that has the `search_path`."""
    return [sys.executable, "-m", name, *arguments]


def search_path() -> str:
    """Returns PYTHONPATH for children: this process's, followed by this repository."""
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))


def spawn(
    command: Sequence[str],
    log: Path,
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a child process that is detached from the terminal, so that only this process receives Ctrl-C. Its stderr
    goes to `log`.

    `environment`: variables in addition to this process's. The child ends with the thread that calls this.
    """
    variables = {**os.environ, "PYTHONPATH": search_path(), **(environment or {})}
    launched = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    with log.open("ab") as stream:
        return subprocess.Popen(
            launched, stdin=stdin, stdout=stdout, stderr=stream, start_new_session=True, env=variables
        )


def end(child: subprocess.Popen[bytes], number: int, deadline_s: float) -> int:
    """Signals a child and waits for its end; sends SIGKILL at the deadline. Returns its exit status."""
    if child.poll() is None:
        child.send_signal(number)
    try:
        return child.wait(deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


# --- logs ---

_ENTRY = re.compile(r"^(?=\d\d:\d\d:\d\d\.\d+ )", re.MULTILINE)
_BAD = re.compile(r"\A\S+ +(ERROR|CRITICAL)\b|^Traceback|never awaited|never retrieved", re.MULTILINE)


def tail(log: Path, lines: int = 30) -> str:
    """Returns the end of a log file."""
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({error})"


def bad_entries(log: Path) -> list[str]:
    """Returns the errors in a daemon's log, including tracebacks."""
    entries = _ENTRY.split(log.read_text(encoding="utf-8", errors="replace"))
    return [entry.rstrip() for entry in entries if _BAD.search(entry)]


# --- /proc ---


def open_fds(pid: int) -> dict[int, str]:
    """Returns the open descriptors and their targets."""
    folder = Path(f"/proc/{pid}/fd")
    found = {}
    for entry in folder.iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except OSError:  # closed meanwhile
            continue
    return found


def mapped_memfds(pid: int, prefix: str) -> Counter[str]:
    """Counts the mappings of memfds with names that begin with `prefix`, by name."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    return Counter(re.findall(rf"/memfd:({re.escape(prefix)}\S*)", maps))


def rss_anon_bytes(pid: int) -> int:
    return status_bytes(pid, "RssAnon")


def status_bytes(pid: int, name: str) -> int:
    """Returns one of the sizes in a process's `status`; 0: it has none of that name."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def unmapped_within(pid: int, memory_name: str, limit_s: float) -> float | None:
    """Returns the seconds until the process has no mapping of such memfds any more; None: it still has one at the
    limit.
    """
    return within(lambda: not mapped_memfds(pid, memory_name), limit_s)
