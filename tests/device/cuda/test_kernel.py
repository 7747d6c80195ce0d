"""The kernel's source as the CPU makes it: rows of any size and alignment. And its binaries: of this very source."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.kernel import FOLDER, NAME, PIECE_BYTES, RowKernel, binary_of
from kvoffloadd.errors import DeviceError
from scripts.harness.gpu import Gpu
from scripts.kernels import __main__ as kernels

SIZES = (1, 2, 3, 4, 7, 15, 16, 17, 31, 64, 100, 255, 1024, 4095, 4096, 4097, 6000, 8192, 20_000)


@pytest.fixture(scope="module")
def move_rows(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The source, compiled as C with checks of what has no defined meaning."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("kernel") / "move_rows.so"
    flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover=all", "-fPIC")
    command = ["cc", *flags, "-x", "c", "-shared", str(kernels.source()), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    loaded = ctypes.CDLL(str(library))
    loaded.move_rows.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32]
    loaded.move_rows.restype = None
    return loaded


@pytest.mark.parametrize("apart", [0, 1, 4, 8], ids=lambda apart: f"sides {apart} bytes apart")
def test_rows_of_any_size_at_any_place(move_rows: ctypes.CDLL, seed: int, apart: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = (rng.integers(0, 256, 1 << 20, dtype=np.uint8) for _ in range(2))
    expected, rows, at = target.copy(), [], 64
    for size in rng.permutation(np.repeat(SIZES, 3)).tolist():
        begin = at + int(rng.integers(0, 16))
        expected[begin + apart : begin + apart + size] = source[begin : begin + size]
        rows.append((source.ctypes.data + begin, target.ctypes.data + begin + apart, size))
        at = begin + size + 40
    table = np.array(rows, np.uint64)
    move_rows.move_rows(table.ctypes.data, len(table), -(-max(SIZES) // PIECE_BYTES))
    assert (target == expected).all()


def test_the_binaries_are_of_this_source() -> None:
    """`make kernels` compiles them anew."""
    assert kernels.DIGEST.read_text(encoding="ascii").strip() == kernels.digest()


def test_a_binary_for_each_architecture() -> None:
    names = {path.name for path in FOLDER.glob(f"{NAME}.sm_*.cubin")}
    assert names == {f"{NAME}.{architecture}.cubin" for architecture in kernels.ARCHITECTURES}
    assert all((FOLDER / name).read_bytes()[:4] == b"\x7fELF" for name in names)
    text = (FOLDER / f"{NAME}.ptx").read_text(encoding="ascii")
    assert f".target sm_{kernels.PTX.removeprefix('compute_')}" in text
    assert f".visible .entry {NAME}(" in text


@pytest.mark.parametrize("architecture", [name for name in kernels.ARCHITECTURES if len(name) == len("sm_90")])
def test_drivers_of_cuda_12_load_the_binaries(architecture: str) -> None:
    """By the kind and version of ABI in the file's head; CUDA 13 writes others. Later GPUs have newer drivers."""
    assert (FOLDER / f"{NAME}.{architecture}.cubin").read_bytes()[7:9] == b"\x33\x07"


@pytest.mark.parametrize(
    ("capability", "name"),
    [((9, 0), "sm_90.cubin"), ((8, 7), "sm_86.cubin"), ((12, 1), "sm_120.cubin"), ((7, 5), "ptx"), ((13, 0), "ptx")],
)
def test_which_binary_a_gpu_runs(capability: tuple[int, int], name: str) -> None:
    """Code for an earlier GPU of the same generation runs; of another one the PTX does."""
    found: Path = binary_of(*capability)
    assert found.name == f"{NAME}.{name}"
    assert found.exists()


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError, AttributeError, MemoryError, OSError])
@pytest.mark.parametrize("fails", ["load", "launch"])
def test_whatever_a_package_raises_is_an_error_of_the_device(
    gpu: Gpu, driver: Driver, monkeypatch: pytest.MonkeyPatch, fails: str, error: type[Exception]
) -> None:
    """Copies go on without the kernel then: CuPy's OutOfMemoryError is a MemoryError, its CompileException no
    RuntimeError.
    """

    def fail(*_: Any, **__: Any) -> Any:
        raise error("a version that does not fit")

    def load(*, path: str) -> Any:
        return fail() if fails == "load" else SimpleNamespace(get_function=lambda _: fail)

    cuda = SimpleNamespace(Stream=SimpleNamespace(from_external=nullcontext), Device=nullcontext)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=load, cuda=cuda))
    with pytest.raises(DeviceError, match="a version that does not fit"):
        RowKernel(driver, 0).launch(1 << 40, 1, 1, 1)
