"""Running a function in a separate process, with softcuda for its driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests import softcuda

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 30

# Numpy's threads would make each fork a warning, and each start slower.
_SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1"}
_PROGRAM = "import importlib, sys; print(getattr(importlib.import_module(sys.argv[1]), sys.argv[2])())"


def run(
    program: Callable[[], object],
    faults: str = "",
    settings: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs the function; its process prints what it returns. `settings` are softcuda's, `variables` any others."""
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, program.__module__, program.__name__],
        env=os.environ | _SINGLE_THREADED | softcuda.environment(faults, **(settings or {})) | dict(variables or {}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def result(
    program: Callable[[], object],
    faults: str = "",
    settings: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """What the function returns, as text; it must not fail."""
    ended = run(program, faults, settings, variables)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout.strip()
