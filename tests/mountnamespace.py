"""A mount namespace in which /run and /tmp are empty, so that commands find no daemon but those that a test starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

from kvoffloadd.testing.wait import HANG_S, until

ROOT = Path(__file__).parents[1]
USER, OTHER = 4101, 4102
"""Users of the namespace, who need no entry in /etc/passwd."""

_TOOLS = ("unshare", "nsenter", "setpriv")


def why_not(hidden: Iterable[str]) -> str:
    """Why no such namespace can be made here; empty: it can."""
    if os.geteuid() != 0:
        return "only root can mount, and become other users"
    missing = [tool for tool in _TOOLS if not any(Path(f, tool).exists() for f in ("/usr/bin", "/bin", "/usr/sbin"))]
    if missing:
        return f"util-linux has no {missing[0]} here"
    inside = [place for place in hidden if any(Path(path).is_relative_to(place) for path in (ROOT, sys.prefix))]
    return f"this checkout, or its Python, is below {inside[0]}" if inside else ""


class MountNamespace:
    """The namespace, from its start to its end. `hidden`: the directories that are empty in it.

    Commands get `HOME` and `PATH`, and of the variables that a test gives; none of the tester's session.
    """

    def __init__(self, hidden: Sequence[str] = ("/run", "/tmp")) -> None:
        mounts = " && ".join(f"mount -t tmpfs -o mode={_mode(place)} tmpfs {place}" for place in hidden)
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", f"{mounts} && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        self._holder.kill()
        self._holder.communicate()

    def inside(self, uid: int = 0) -> list[str]:
        """The words before a command that run it in the namespace, as this user. It ends with the tests."""
        entered = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", f"--wd={ROOT}", "--"]
        return [*entered, "setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--pdeathsig=TERM"]

    def run(
        self, *command: str, uid: int = 0, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(
            [*self.inside(uid), *command],
            env=_variables(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=HANG_S,
        )  # fmt: skip

    def kvoffloadd(
        self, *words: str, uid: int = 0, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs the command line, as a user types it."""
        return self.run(sys.executable, "-m", "kvoffloadd", *words, uid=uid, environment=environment)

    def serve(
        self, *words: str, log: Path, uid: int = 0, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a daemon, and returns when it serves, or has ended. The namespace's end kills it."""
        begun = log.stat().st_size if log.exists() else 0
        with log.open("ab") as stream:
            child = subprocess.Popen(
                [*self.inside(uid), sys.executable, "-m", "kvoffloadd", "serve", *words],
                env=_variables(environment), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                start_new_session=True,
            )  # fmt: skip
        self._children.append(child)
        until(
            lambda: child.poll() is not None or b"serving at " in log.read_bytes()[begun:], "the daemon serves", HANG_S
        )
        return child


def stop(child: subprocess.Popen[bytes]) -> int:
    """Ends a daemon in order; returns its exit status."""
    child.send_signal(signal.SIGTERM)
    return child.wait(HANG_S)


def _mode(place: str) -> str:
    return "1777" if place == "/tmp" else "0755"


def _variables(environment: Mapping[str, str] | None) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    return {**kept, "HOME": "/", **(environment or {})}
