"""The kernel that moves rows within a GPU's memory, `kernels/move_rows.cu`, loaded and launched through CuPy.

It is compiled ahead (`make kernels`), for each architecture and as PTX for later ones, so that neither a compiler nor a
cache directory is needed.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.errors import DeviceError

FOLDER = Path(__file__).parent / "kernels"
NAME = "move_rows"
PIECE_BYTES = 4096
"""What a warp moves, as in the source."""

_WARPS_PER_BLOCK, _WARP = 8, 32
_BLOCKS_PER_PROCESSOR = 2
_PROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute


class _Stream(NamedTuple):
    """A CUDA stream, as the CUDA stream protocol has it."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class RowKernel:
    """On one GPU, whose context is current in the threads that use it. Any thread may launch it."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """Blocks while it is loaded.

        Raises:
            DeviceError: CuPy is not installed, or does not load it.
        """
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise DeviceError(f"CuPy is not installed ({error}): in a checkout, pip install '.[cuda13]'") from None
        except Exception as error:  # whatever a package raises that does not fit another one
            raise DeviceError(f"CuPy can't be imported: {error!r}") from error
        attribute, device = driver.api.CUdevice_attribute, driver.call("cuDeviceGet", ordinal)
        processors, major, minor = (
            int(driver.call("cuDeviceGetAttribute", attribute(which), device))
            for which in (_PROCESSORS, _MAJOR, _MINOR)
        )
        self._most_blocks = processors * _BLOCKS_PER_PROCESSOR
        binary = binary_of(major, minor)
        try:
            with self._cupy.cuda.Device(ordinal):
                self._function = self._cupy.RawModule(path=str(binary)).get_function(NAME)
        except Exception as error:  # its errors have no base of their own, and some are of Python's kinds
            raise DeviceError(f"CuPy can't load {binary.name}: {error!r}") from error
        self._ordinal = ordinal

    def launch(self, rows_address: int, count: int, longest_bytes: int, stream: int) -> None:
        """Queue it on the stream. `rows_address`: in the GPU's memory, `count` times (from, to, bytes), u64 each.
        `longest_bytes`: of the longest row.

        Raises:
            DeviceError: CuPy, or the driver, refuses it.
        """
        pieces = -(-longest_bytes // PIECE_BYTES)
        blocks = min(-(-count * pieces // _WARPS_PER_BLOCK), self._most_blocks)
        cuda = self._cupy.cuda
        # CuPy 13 has no from_external, and 14 warns of ExternalStream.
        make = getattr(cuda.Stream, "from_external", None)
        arguments = np.uint64(rows_address), np.uint64(count), np.uint32(pieces)
        try:
            on = make(_Stream(stream)) if make else cuda.ExternalStream(stream, self._ordinal)
            with cuda.Device(self._ordinal), on:
                self._function((blocks,), (_WARPS_PER_BLOCK * _WARP,), arguments)
        except Exception as error:  # as above; an error of another kind would fail the job, and each one after it
            raise DeviceError(f"CuPy can't launch {NAME}: {error!r}") from error


def binary_of(major: int, minor: int) -> Path:
    """The file for a GPU of this compute capability: compiled for it, or for an earlier one of its generation, or PTX,
    which the driver compiles.
    """
    for number in range(minor, -1, -1):
        found = FOLDER / f"{NAME}.sm_{major}{number}.cubin"
        if found.exists():
            return found
    return FOLDER / f"{NAME}.ptx"
