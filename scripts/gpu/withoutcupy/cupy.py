"""What the daemon uses of CuPy, by the driver alone: the check measures the kernel where CuPy is not installed, too.

The folder of this file goes on PYTHONPATH.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvoffloadd.cudadriver import CudaDriver

_driver = CudaDriver()
_sizes = (ctypes.c_uint,) * 7  # of the grid, of a block, of shared memory
_launch = _driver.entry("cuLaunchKernel", 4000, ctypes.c_void_p, *_sizes, *(ctypes.c_void_p,) * 3)
_thread = threading.local()


class Stream:
    """A stream made elsewhere, this thread's within `with`."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @staticmethod
    def from_external(stream: Any) -> Stream:
        return Stream(stream.__cuda_stream__()[1])

    def __enter__(self) -> Stream:
        _thread.stream = self._handle
        return self

    def __exit__(self, *_: object) -> None:
        _thread.stream = 0


class Function:
    """A kernel of a module."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        values = [np.ctypeslib.as_ctypes_type(one.dtype)(int(one)) for one in args]
        at = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = (*grid, 1, 1)[:3] + (*block, 1, 1)[:3]
        _driver.check("cuLaunchKernel", _launch(self._handle, *sizes, 0, _thread.stream, at, None))


class RawModule:
    """A module that was compiled before, loaded into the current context."""

    def __init__(self, *, path: str) -> None:
        image = ctypes.create_string_buffer(Path(path).read_bytes())  # PTX ends with a NUL
        self._module = _driver.call("cuModuleLoadData", ctypes.addressof(image))

    def get_function(self, name: str) -> Function:
        return Function(int(_driver.call("cuModuleGetFunction", self._module, name.encode())))


def _device(_: int) -> AbstractContextManager[None]:
    return nullcontext()


cuda = SimpleNamespace(Stream=Stream, Device=_device)
