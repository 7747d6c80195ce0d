"""SGLang's memory without a model: real host pools of every kind (`pools.py`), and its tree over them (`trees.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.enginechild import ROOT
from tests.sglang.conftest import StartDaemon
from tests.sglang.engine import ENVIRONMENT

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

KINDS = ["dense", "uneven", "latent", "sparse", "windows", "states", "latent_and_states", "convolutions"]
KEYS = 3 * 5 + 10 + 4 * 7 + 1
"""Five pages each, and their indexes, or the last two pages' windows and states; and one of another format."""


def said(module: str, socket: Path) -> list[str]:
    """What a program printed, which has ended well."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(socket)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()


def test_what_one_rank_stores_another_loads(start_daemon: StartDaemon) -> None:
    """Each byte of the second rank's memory, through both of SGLang's interfaces; and formats are distinguished."""
    daemon = start_daemon(memory="128MiB")
    assert said("tests.sglang.pools", daemon.socket) == KINDS
    assert daemon.status()["cache"]["keys"] == KEYS


def test_what_one_tree_stores_another_has_back(start_daemon: StartDaemon) -> None:
    """Down from one device through host pools and storage, and up to another: full attention, windows, and states."""
    daemon = start_daemon(memory="128MiB")
    assert said("tests.sglang.trees", daemon.socket) == ["full", "windows", "states"]
