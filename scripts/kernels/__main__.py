"""Compile the daemon's CUDA kernel for every architecture it is shipped for: `make kernels`.

NVRTC does it, which needs no GPU. The results are kept in the repository, with the digest of the source that they were
made from, so that neither users nor tests need a compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from kvoffloadd.device.cuda.kernel import FOLDER, NAME

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
"""The GPUs of data centres and workstations since 2020; others of a generation run what was made for an earlier one."""
PTX = "compute_80"
"""Of which drivers make code for whatever comes later."""
DIGEST = FOLDER / f"{NAME}.sha256"


def source() -> Path:
    """The kernel's source."""
    return FOLDER / f"{NAME}.cu"


def digest() -> str:
    """Of the source."""
    return hashlib.sha256(source().read_bytes()).hexdigest()


def compiled(architecture: str) -> bytes:
    """The cubin for `sm_*`, the PTX for `compute_*`. Raises RuntimeError with what the compiler says."""
    from cuda.bindings import nvrtc

    def check(result: tuple[object, ...]) -> object:
        if int(result[0]) != 0:  # type: ignore[call-overload]
            raise RuntimeError(f"{result[0]}: {log()}")
        return result[1] if len(result) > 1 else None

    def log() -> str:
        size = nvrtc.nvrtcGetProgramLogSize(program)[1]
        text = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, text)
        return text.decode()

    program = check(nvrtc.nvrtcCreateProgram(source().read_bytes(), source().name.encode(), 0, [], []))
    check(nvrtc.nvrtcCompileProgram(program, 2, [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]))
    cubin = architecture.startswith("sm_")
    size = check((nvrtc.nvrtcGetCUBINSize if cubin else nvrtc.nvrtcGetPTXSize)(program))
    code = bytearray(size)  # type: ignore[call-overload]
    check((nvrtc.nvrtcGetCUBIN if cubin else nvrtc.nvrtcGetPTX)(program, code))
    return bytes(code)


def main() -> int:
    """Exit status 0: all were compiled."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for old in FOLDER.glob(f"{NAME}.*"):
        if old.suffix in (".cubin", ".ptx"):
            old.unlink()
    for architecture in (*ARCHITECTURES, PTX):
        name = f"{NAME}.{architecture}.cubin" if architecture != PTX else f"{NAME}.ptx"
        code = compiled(architecture)
        (FOLDER / name).write_bytes(code)
        print(f"{name}: {len(code):,} bytes")
    DIGEST.write_text(f"{digest()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
