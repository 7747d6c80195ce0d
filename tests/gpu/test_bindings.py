"""Other versions of cuda-bindings than the venv's: what engines bring along works, too. `make test` installs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffloadd.testing.process import ROOT

pytestmark = pytest.mark.slow

VERSIONS = re.findall(r"^cuda-bindings==(\S+)$", (ROOT / "requirements-bindings.lock").read_text(), re.MULTILINE)
TIMEOUT_S = 300.0
SELECTED = (
    "tests/client/test_gpu.py",
    "tests/device/cuda",
    "tests/gpu/test_memory.py::test_what_one_worker_stored_another_loads",
    "tests/gpu/test_memory.py::test_memory_that_can_not_be_exported_is_refused_with_the_setting",
    "--deselect=tests/client/test_gpu.py::test_a_torch_tensor_of_the_cpu",  # takes seconds, and no bindings
)


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("version", VERSIONS)
def test_memory_is_shared_and_copied(version: str, driver_variables: dict[str, str]) -> None:
    folder = ROOT / "build" / f"cuda-bindings-{version}"
    if not (folder / ".ready").exists():
        pytest.skip(f"needs {folder.relative_to(ROOT)}, which `make test` makes")
    found = run(folder, "-c", "import cuda.bindings; print(cuda.bindings.__version__)")
    assert found.stdout.strip() == version, found.stderr
    done = run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SELECTED)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\b[1-9]\d+ passed", done.stdout), done.stdout[-4000:]
