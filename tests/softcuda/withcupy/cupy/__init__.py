"""What the daemon uses of CuPy, on the software driver: tests put the folder above this one on PYTHONPATH.

Only what is used is there, and it is strict: a binary that is not there or no ELF file, another function's name, other
types of arguments, or a launch outside of a stream is an error.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np

_library = ctypes.CDLL("libcuda.so.1")
_library.softcuda_move_rows.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32]
_thread = threading.local()


class CUDADriverError(RuntimeError):
    """As CuPy's."""


class Stream:
    """A stream made elsewhere, this thread's within `with`."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @staticmethod
    def from_external(stream: Any) -> Stream:
        version, handle = stream.__cuda_stream__()
        if version != 0:
            raise ValueError("an unknown version of the stream protocol")
        return Stream(handle)

    def __enter__(self) -> Stream:
        _thread.stream = self._handle
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _thread.stream = 0


class Function:
    """A kernel of a module."""

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        if [type(one) for one in args] != [np.uint64, np.uint64, np.uint32]:
            raise TypeError(f"move_rows takes a pointer, a u64 and a u32, not {args}")
        if min(grid) < 1 or min(block) < 1 or np.prod(block) > 1024:
            raise CUDADriverError(f"CUDA_ERROR_INVALID_VALUE: {grid} blocks of {block} threads")
        if not getattr(_thread, "stream", 0):
            raise CUDADriverError("CUDA_ERROR_INVALID_HANDLE: launched on the NULL stream")
        status = _library.softcuda_move_rows(_thread.stream, *(int(one) for one in args))
        if status:
            raise CUDADriverError(f"CUDA_ERROR_{status}")


class RawModule:
    """A module that was compiled before."""

    def __init__(self, *, path: str) -> None:
        if Path(path).read_bytes()[:4] != b"\x7fELF":
            raise CUDADriverError(f"CUDA_ERROR_INVALID_IMAGE: {path}")

    def get_function(self, name: str) -> Function:
        if name != "move_rows":
            raise CUDADriverError(f"CUDA_ERROR_NOT_FOUND: {name}")
        return Function()


def _device(_: int) -> AbstractContextManager[None]:
    return nullcontext()


cuda = SimpleNamespace(Stream=Stream, Device=_device)
