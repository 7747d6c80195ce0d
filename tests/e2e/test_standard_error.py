"""Tests a daemon whose log is not read: it serves, stops and ends as any other."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffloadd.client import Client
from kvoffloadd.testing.process import ROOT
from kvoffloadd.testing.wait import HANG_S, until

pytestmark = pytest.mark.slow

PIPE_BYTES = 4096
_F_SETPIPE_SZ = 1031

Serve = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def serve(socket_dir: Path) -> Iterator[Serve]:
    """`serve(stderr, *words)` -> a daemon that has just been launched."""
    children: list[subprocess.Popen[bytes]] = []

    def start(stderr: int, *words: str) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "kvoffloadd", "serve", "--memory", "16MiB"),
            *("--socket", str(socket_dir / "kvo.sock"), *words),
        ]
        children.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=stderr))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that has no room."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, _F_SETPIPE_SZ, PIPE_BYTES)
    os.write(writer, b"x" * (PIPE_BYTES - 1) + b"\n")
    yield reader, writer
    os.close(reader)
    os.close(writer)


def observer(socket_dir: Path) -> Client:
    client = Client(socket_dir / "kvo.sock", namespace=None, role="observer", connect_deadline_s=HANG_S)
    client.connect()
    return client


def test_a_log_that_nobody_reads_costs_no_service(serve: Serve, full_pipe: tuple[int, int], socket_dir: Path) -> None:
    child = serve(full_pipe[1])
    with observer(socket_dir) as client:
        for _ in range(20):
            child.send_signal(signal.SIGHUP)  # logs a line
            client.ping()
        status = client.status()
    assert status["server"]["log_lines_lost"] == 0  # they wait
    child.send_signal(signal.SIGTERM)
    assert child.wait(HANG_S) == 0


def test_a_log_that_is_read_late_is_whole(serve: Serve, full_pipe: tuple[int, int], socket_dir: Path) -> None:
    reader, writer = full_pipe
    child = serve(writer)
    with observer(socket_dir) as client:
        child.send_signal(signal.SIGHUP)
        client.ping()
    data = b""
    while b"reloaded: nothing has changed" not in data:
        data += os.read(reader, 1 << 16)
    assert b": serving at " in data
    child.send_signal(signal.SIGTERM)
    while not data.endswith(b"closed\n"):
        data += os.read(reader, 1 << 16)
    assert child.wait(HANG_S) == 0
    assert b"lines of the log are lost" not in data


def test_lines_that_are_lost_are_counted(serve: Serve, socket_dir: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    child = serve(full)
    os.close(full)
    with observer(socket_dir) as client:
        until(lambda: client.status()["server"]["log_lines_lost"] >= 1, "a line is lost")
    child.send_signal(signal.SIGTERM)
    assert child.wait(HANG_S) == 0


def test_a_start_that_fails_ends_though_nobody_reads_why(serve: Serve, full_pipe: tuple[int, int]) -> None:
    assert serve(full_pipe[1], "--policy", "none-such").wait(HANG_S) == 2
    assert serve(full_pipe[1], "--set", "log.level=loud").wait(HANG_S) == 2


def test_a_watchdog_s_abort_ends_it_though_nobody_reads_the_stacks(
    serve: Serve, full_pipe: tuple[int, int], socket_dir: Path
) -> None:
    child = serve(full_pipe[1])
    with observer(socket_dir) as client:
        client.ping()
    child.send_signal(signal.SIGABRT)
    assert child.wait(HANG_S) == -signal.SIGABRT
