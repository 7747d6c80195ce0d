"""Where neither cuda-bindings nor CuPy nor torch is installed, everything but GPUs works."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvoffloadd.config import Config, CudaConfig
from kvoffloadd.cudadriver import CudaDriver, has_bindings, holds_gil
from kvoffloadd.errors import DeviceError
from kvoffloadd.server.context import Context
from kvoffloadd.testing.wait import HANG_S

ROOT = Path(__file__).parents[1]

IMPORT_ALL = """
import importlib, pkgutil, sys
import kvoffloadd
for module in pkgutil.walk_packages(kvoffloadd.__path__, "kvoffloadd."):
    # An engine's classes are subclassed there: without that engine they can't be imported anywhere.
    if not module.name.rpartition(".")[2].startswith("_") and not module.name.startswith("kvoffloadd.integrations."):
        importlib.import_module(module.name)
print(len(sys.modules))
"""

STORE_AND_LOAD = """
import sys
import numpy as np
from pathlib import Path
from tests.e2e.daemons import make_daemon
from tests.e2e.rank import Rank, new_keys

daemon = make_daemon(Path(sys.argv[1]))
with Rank(daemon.socket) as rank:
    keys = new_keys(np.random.default_rng(0), 8)
    rank.store_keys(keys)
    assert rank.loads_right(keys)
    print(rank.client.status()["devices"].keys(), sorted(rank.client.features))
daemon.finish()
"""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which these packages can't be imported, by any process."""
    for name in ("cuda", "cupy", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}


def python(bare: dict[str, str], code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_module_can_be_imported(bare: dict[str, str]) -> None:
    assert int(python(bare, IMPORT_ALL)) > 100


@pytest.mark.slow
def test_a_host_worker_stores_and_loads(bare: dict[str, str], socket_dir: Path) -> None:
    devices_and_features = python(bare, STORE_AND_LOAD, str(socket_dir))
    assert "host" in devices_and_features
    assert "cuda" not in devices_and_features


@pytest.mark.parametrize(
    ("version", "holds"),
    [
        ("12.8.0", True),
        ("12.9.0", True),
        ("12.9.1", False),
        ("12.9.10", False),
        ("13.0.3", False),
        ("13.5.0rc1", False),
    ],
)
def test_versions_of_cuda_bindings_that_hold_the_gil(version: str, holds: bool) -> None:
    assert holds_gil(version) is holds


def test_bindings_are_found_without_their_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    assert not has_bindings()
    for name, found in (("cccl", False), ("bindings", True)):  # of one namespace
        (tmp_path / "cuda" / name).mkdir(parents=True)
        importlib.invalidate_caches()
        assert has_bindings() is found
    assert "cuda" not in sys.modules


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("installed", [False, True])
def test_a_welcome_announces_gpus_where_they_may_be_used(enabled: bool, installed: bool) -> None:
    config = Config(cuda=CudaConfig(enabled=enabled))
    context = SimpleNamespace(config=config, disk=None, remote=None, has_cuda_bindings=installed)
    assert ("cuda" in Context.features(cast(Context, context))) is (enabled and installed)


def test_whoever_asks_for_a_gpu_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DeviceError, match=r"in a checkout, pip install"):
        CudaDriver()
