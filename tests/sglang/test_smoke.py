"""Tests `scripts sglang_smoke` as a user runs it: what it reports of daemons that are good, forgetful and absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.testing.wait import until
from tests.enginechild import ROOT
from tests.sglang.conftest import StartDaemon
from tests.sglang.engine import ENVIRONMENT, OPTIONS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

PROMPTS = {"prompts": 2, "tokens": 300, "answer": 4}
CACHED = 2 * 256
"""Tokens of whole pages of 64 of the prompts."""


class Smoke:
    """A run of it. `model`: a folder."""

    def __init__(self, model: Path, socket: Path, log: Path) -> None:
        engine = json.dumps({**OPTIONS, "hicache_ratio": 1.5})
        words = [f"--model={model}", f"--socket={socket}", f"--engine={engine}", "--json"]
        words += [f"--{name}={value}" for name, value in PROMPTS.items()]
        with log.open("wb") as stream:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "scripts", "sglang_smoke", *words],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT},
                stdout=subprocess.PIPE,
                stderr=stream,
                start_new_session=True,
            )
        self._log = log

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Its exit status, report and words."""
        out, _ = self._child.communicate(timeout=900)
        _, begun, report = out.decode().rpartition("{\n")  # SGLang may have written before it
        found = json.loads(begun + report) if begun else {}
        return self._child.returncode, found, self._log.read_text(errors="replace")


def test_good(start_daemon: StartDaemon, model: Callable[[str], Path], tmp_path: Path) -> None:
    daemon = start_daemon(memory="256MiB")
    status, report, log = Smoke(model("dense"), daemon.socket, tmp_path / "log").end()
    assert (status, report.get("good"), report.get("from_daemon")) == (0, True, CACHED), log[-4000:]


def test_a_daemon_that_forgets(start_daemon: StartDaemon, model: Callable[[str], Path], tmp_path: Path) -> None:
    daemon = start_daemon(memory="256MiB")
    smoke = Smoke(model("dense"), daemon.socket, tmp_path / "log")

    def forget() -> bool:
        if daemon.status()["cache"]["keys"]:
            daemon.clear()
        return smoke.ended

    until(forget, "it has ended", 900.0)
    status, report, log = smoke.end()
    assert (status, report.get("good"), report.get("from_daemon")) == (1, False, 0), log[-4000:]


def test_no_daemon(model: Callable[[str], Path], tmp_path: Path) -> None:
    status, report, log = Smoke(model("dense"), tmp_path / "none", tmp_path / "log").end()
    assert (status, report) == (1, {})
    assert "sglang_smoke: no daemon" in log
