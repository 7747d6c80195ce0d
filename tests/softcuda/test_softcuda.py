"""Softcuda does what NVIDIA's bindings expect of a driver."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver")

from kvoffloadd.testing.wait import HANG_S
from tests import softcuda
from tests.softcuda import programs, sharing
from tests.softcuda.running import ROOT, result

PROGRAMS = [
    programs.devices, programs.contexts, programs.memory, programs.asynchrony, programs.written_values,
    programs.registrations, programs.batches, programs.pitched_copies, programs.pitched_batches,
    programs.raw_batch_of_cuda_12, programs.raw_batch_of_cuda_13,
    sharing.shared_with_a_peer, sharing.filled_by_a_peer, sharing.exporter_is_killed, sharing.chunks,
    programs.unusable_after_fork, programs.many_threads, programs.exit_with_all_open,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.__name__ for program in PROGRAMS])
def test_it_works(program: Callable[[], None]) -> None:
    assert result(program) == "None"


@pytest.mark.parametrize(
    ("program", "settings"),
    [
        (programs.memory_is_limited, {"memory_bytes": 4 << 20}),
        (programs.slow_and_limited_registration, {"register_max_bytes": 1 << 20, "register_ns_per_gib": 10**11}),
        (sharing.chunks_to_a_peer, {"memory_bytes": 16 << 30}),
    ],
)
def test_it_works_with_settings(program: Callable[[], None], settings: dict[str, int | str]) -> None:
    assert result(program, settings=settings) == "None"


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [("1,0", 2, "1 0"), ("1", 2, "1"), ("2,x,1", 3, "2"), ("0,5,1", 2, "0")],
)
def test_visible_devices(visible: str, devices: int, seen: str) -> None:
    assert result(programs.visible, settings={"devices": devices}, variables={"CUDA_VISIBLE_DEVICES": visible}) == seen


@pytest.mark.parametrize("visible", ["", "-1", "0,0"])
def test_no_visible_device(visible: str) -> None:
    assert result(programs.no_device, variables={"CUDA_VISIBLE_DEVICES": visible}) == "100"


@pytest.mark.parametrize(
    ("driver_version", "found"),
    [(13000, "500 0 0 0 500 500"), (12080, "500 0 0 0 500 500"), (12060, "500 500 500 0 500 500")],
)
def test_functions_by_version(driver_version: int, found: str) -> None:
    assert result(programs.addresses, settings={"driver_version": driver_version}) == found


def test_every_function_is_exported_under_its_names() -> None:
    listed = re.findall(r"X\((\w+), \d+, (\w+)\)", (Path(softcuda.__file__).parent / "functions.c").read_text())
    library = ctypes.CDLL(str(softcuda.build()))
    assert len(listed) > 70
    assert [name for names in listed for name in names if not hasattr(library, name)] == []


def test_it_can_be_loaded_into_a_process() -> None:
    program = "from tests import softcuda; softcuda.load(); from tests.softcuda import programs; programs.preloaded()"
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, check=True, timeout=HANG_S)


@pytest.mark.slow
def test_it_can_be_built_by_several_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        paths = {future.result() for future in [pool.submit(softcuda.build) for _ in range(2)]}
    assert [*tmp_path.rglob("*.*")] == [*paths]
    folder = next(iter(paths)).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert softcuda.build() in paths
    folder.chmod(0o777)
    with pytest.raises(softcuda.SoftCudaError, match="own folder"):
        softcuda.build()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    made = softcuda.environment("no_batch", misuse="error", devices=3)
    folder = str(softcuda.build().parent)
    assert made == {
        "LD_LIBRARY_PATH": f"{folder}:/before",
        "SOFTCUDA_FAULTS": "no_batch",
        "SOFTCUDA_MISUSE": "error",
        "SOFTCUDA_DEVICES": "3",
    }


def test_counters_are_those_of_the_header() -> None:
    header = (Path(softcuda.__file__).parent / "softcuda.h").read_text()
    struct = re.search(r"struct softcuda_counters \{(.*?)\}", header, re.DOTALL)
    assert struct
    names = re.findall(r"\b(?!uint64_t)\w+", struct[1])
    assert [field[0] for field in softcuda.Counters._fields_] == names
