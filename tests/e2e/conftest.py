"""Fixtures of tests with real daemons."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kvoffloadd.testing.process import ROOT
from scripts.harness.daemon import Daemon
from tests.e2e.rank import Keys


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`spawn(daemon, what, keys, *options)` -> a victim whose job runs."""
    children: list[subprocess.Popen[str]] = []

    def start(daemon: Daemon, what: str, keys: Keys, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.e2e.victim", str(daemon.socket), what, keys.tobytes().hex(), *options]
        # In a separate group, so that a child of it can be ended, too.
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline().startswith("running")
        return child

    yield start
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
