"""Runs a script as a user would, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 270.0
"""For a script that hangs; below the limit of a test."""


@dataclass(frozen=True)
class Done:
    """Exit status, the JSON object from standard output (empty if there was none), and standard error."""

    status: int
    figures: dict[str, Any]
    said: str


def run_script(name: str, *arguments: str, limit_s: float = LIMIT_S) -> Done:
    """With `--json`."""
    # The package may not be installed where the tests run.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment)
    return Done(done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr)
