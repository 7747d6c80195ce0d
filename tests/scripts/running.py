"""Runs a script as a user would, in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from kvoffloadd.testing.process import ROOT
from kvoffloadd.testing.wait import HANG_S

LIMIT_S = 4.5 * HANG_S
"""For a script that hangs; below the limit of a test."""


@dataclass(frozen=True)
class Done:
    """Exit status, the JSON object from standard output (empty if there was none), and standard error."""

    status: int
    figures: dict[str, Any]
    said: str


def run_script(name: str, *arguments: str, limit_s: float = LIMIT_S) -> Done:
    """Runs a script with `--json`."""
    command = [sys.executable, str(ROOT / "scripts"), name, *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    return Done(done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr)
