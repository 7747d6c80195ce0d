"""`kvoffloadd top` as a program: once, as JSON, at a terminal, without a daemon, and over its restart."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.harness.daemon import Daemon
from tests.e2e.rank import Rank

LIMIT_S = 30.0


def top(daemon: Daemon | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = daemon.socket if isinstance(daemon, Daemon) else daemon
    command = [sys.executable, "-m", "kvoffloadd", "top", "--socket", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)


class Terminal:
    """The program at a terminal of 80 columns."""

    def __init__(self, daemon: Daemon) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
        command = [sys.executable, "-m", "kvoffloadd", "top", "--socket", str(daemon.socket), "--interval", "0.2"]
        self.child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self._said = b""

    def until(self, text: str) -> None:
        """Waits until it has shown that, after what was waited for last."""
        end = time.monotonic() + LIMIT_S
        while text.encode() not in self._said:
            assert time.monotonic() < end, self._said[-3000:].decode(errors="replace")
            ready, _, _ = select.select([self._master], [], [], 0.1)
            if ready:
                self._said += os.read(self._master, 65536)
        self._said = self._said.partition(text.encode())[2]

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._master)


@pytest.fixture
def open_terminal() -> Iterator[Callable[[Daemon], Terminal]]:
    made: list[Terminal] = []

    def start(daemon: Daemon) -> Terminal:
        made.append(Terminal(daemon))
        return made[-1]

    yield start
    for terminal in made:
        terminal.close()


def test_once_is_one_picture(daemon: Daemon) -> None:
    rank: Rank = daemon.welcome(Rank(daemon.socket))
    done = top(daemon, "--once", "--interval", "0.2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "serving" in done.stdout
    assert "instances 1" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 200
    assert rank.mapped_bytes


@pytest.mark.slow
def test_json_is_one_object_a_line(daemon: Daemon) -> None:
    done = top(daemon, "--once", "--json", "--interval", "0.3")
    (line,) = done.stdout.splitlines()
    shown = json.loads(line)
    assert shown["pid"] == daemon.pid
    assert shown["interval_s"] == pytest.approx(0.3, abs=0.25)
    assert shown["tiers"][0]["capacity_bytes"] == 32 << 20
    assert {"throughput", "lookups", "instances", "lanes", "roots", "loop", "slow_jobs"} <= set(shown)


@pytest.mark.slow
def test_a_picture_can_be_kept(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "top.svg"
    done = top(daemon, "--once", "--interval", "0.2", "--svg", str(path))
    assert done.returncode == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<svg")
    assert "kvoffloadd" in text


@pytest.mark.slow
def test_a_picture_that_can_not_be_kept(daemon: Daemon, tmp_path: Path) -> None:
    done = top(daemon, "--once", "--interval", "0.2", "--svg", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == f"kvoffloadd: --svg {tmp_path}: Is a directory\n"


@pytest.mark.slow
def test_sigterm_leaves_the_terminal_as_it_was(
    start_daemon: Callable[..., Daemon], open_terminal: Callable[[Daemon], Terminal]
) -> None:
    terminal = open_terminal(start_daemon())
    terminal.until("serving")
    terminal.child.terminate()
    terminal.until("\x1b[?1049l")
    assert terminal.child.wait(LIMIT_S) == 0


def test_no_daemon_is_told_at_once_when_once_is_asked(socket_dir: Path) -> None:
    done = top(socket_dir / "none.sock", "--once")
    assert (done.returncode, done.stdout) == (3, "")
    assert "none.sock" in done.stderr


@pytest.mark.slow
def test_at_a_terminal_it_outlives_the_daemon_and_ends_with_q(
    start_daemon: Callable[..., Daemon], open_terminal: Callable[[Daemon], Terminal]
) -> None:
    daemon = start_daemon()
    terminal = open_terminal(daemon)
    terminal.until("serving")
    assert daemon.stop() == 0
    terminal.until("waiting")
    terminal.until("gone")
    daemon.start()
    terminal.until("serving")
    terminal.press("q")
    assert terminal.child.wait(LIMIT_S) == 0


@pytest.mark.parametrize(("text", "why"), [("0", "not between"), ("0.01", "less than 0.1"), ("x", "not a number")])
def test_intervals_that_make_no_sense(tmp_path: Path, text: str, why: str) -> None:
    done = top(tmp_path / "x.sock", "--interval", text)
    assert done.returncode == 2
    assert why in done.stderr
