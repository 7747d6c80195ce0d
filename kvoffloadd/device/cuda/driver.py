"""The driver's calls of the hot path, called by pointer with numpy arrays: no Python object per copy."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np

from kvoffloadd.cudadriver import SUCCESS, CudaDriver
from kvoffloadd.device.pitched import Pitched
from kvoffloadd.errors import DeviceError
from kvoffloadd.model import Direction, U64Array

PITCH_MAX_BYTES = 0x7FFFFFFF
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of all known GPUs."""

_BATCH_VERSION = 12080
"""The version of the first cuMemcpyBatchAsync and cuMemcpy3DBatchAsync, with `failIdx`; newer drivers still support
them, so one form of each suffices.
"""

_STREAM_ORDER, _ANY_ORDER = 1, 3  # CUmemcpySrcAccessOrder: the source is read in the stream's order, or before
_BY_COPY_ENGINES = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE. Without it, drivers from CUDA 13.1 on may copy with the GPU's processors,
and delay the engine (release notes of CUDA 13.1). On CUDA 13.0 it makes no difference (docs/benchmarks/gpu.md).
"""
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver finds the kind of memory from the address
_POINTER = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: an access order, a location hint for each side (unused), flags."""

    _fields_: ClassVar = [
        ("order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    ]


_MEMCPY_2D = np.dtype(
    [
        (f"{side}_{name}", kind)
        for side in ("src", "dst")
        for name, kind in (
            ("x", "<u8"), ("y", "<u8"), ("type", "<u8"), ("host", "<u8"), ("device", "<u8"), ("array", "<u8"),
            ("pitch", "<u8"),
        )
    ]
    + [("width", "<u8"), ("height", "<u8")]
)  # fmt: skip
"""CUDA_MEMCPY2D: `type` has 4 bytes and 4 of padding; `x` and `y` stay 0."""


_MEMCPY_3D = np.dtype(
    [
        (f"{side}_{name}", "<u8")
        for side in ("src", "dst")
        for name in ("type", "address", "row_length", "layer_height", "hint")
    ]
    + [("width", "<u8"), ("height", "<u8"), ("depth", "<u8"), ("order", "<u4"), ("flags", "<u4")]
)
"""CUDA_MEMCPY3D_BATCH_OP, of pointers. Lengths are in elements, which are bytes between pointers: a row's length is the
distance of rows. `type` has 4 bytes and 4 of padding; a layer of height 0 is as high as the copy.
"""


class Driver(CudaDriver):
    """Extends `CudaDriver` by the calls that copies need. Raises DeviceError also for a driver that lacks any
    of them.
    """

    def __init__(self) -> None:
        super().__init__()
        word, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self.set_current = self._needed("cuCtxSetCurrent", 4000, pointer)
        self.record = self._needed("cuEventRecord", 2000, pointer, pointer)
        self.query = self._needed("cuEventQuery", 2000, pointer)
        self.query_stream = self._needed("cuStreamQuery", 2000, pointer)
        self._copy = self._needed("cuMemcpyAsync", 4000, word, word, size, pointer)
        batch = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        self._batch = self.entry("cuMemcpyBatchAsync", _BATCH_VERSION, *batch)
        self._pitched = self.entry("cuMemcpy2DAsync", 3020, pointer, pointer)
        runs = (size, pointer, pointer, ctypes.c_ulonglong, pointer)
        self._pitched_batch = self.entry("cuMemcpy3DBatchAsync", _BATCH_VERSION, *runs)
        self._attributes = {
            final: _Attributes(order=_ANY_ORDER if final else _STREAM_ORDER, flags=_BY_COPY_ENGINES)
            for final in (True, False)
        }
        self._attribute_starts = ctypes.c_size_t(0)

    @property
    def batches(self) -> bool:
        """Returns whether the driver has batched copies."""
        return self._batch is not None

    def copy_batch(
        self, src: U64Array, dst: U64Array, size: U64Array, stream: int, *, sources_final: bool = False
    ) -> int:
        """Submits copies in one call: contiguous u64 arrays of one length. Returns the CUresult. They are unordered
        among each other, and read their sources in the stream's order. `sources_final`: the sources hold their final
        bytes already, so the driver may read them earlier.
        """
        if self._batch is None:
            raise DeviceError("this driver has no cuMemcpyBatchAsync")
        failed_at, attributes = ctypes.c_size_t(), self._attributes[sources_final]
        status: int = self._batch(
            dst.ctypes.data, src.ctypes.data, size.ctypes.data, len(size),
            ctypes.byref(attributes), ctypes.byref(self._attribute_starts), 1, ctypes.byref(failed_at), stream,
        )  # fmt: skip
        return status

    def copy_each(self, src: U64Array, dst: U64Array, size: U64Array, stream: int) -> int:
        """Submits copies in one call each, until one is refused. Returns the last CUresult."""
        for one_src, one_dst, one_size in zip(src.tolist(), dst.tolist(), size.tolist(), strict=True):
            status: int = self._copy(one_dst, one_src, one_size, stream)
            if status != SUCCESS:
                return status
        return SUCCESS

    @property
    def pitches(self) -> bool:
        """Returns whether the driver has pitched copies."""
        return self._pitched is not None

    def copy_pitched(self, runs: Pitched, stream: int) -> int:
        """Submits the runs, without the rest, in one call each, until one is refused. Returns the last CUresult."""
        if self._pitched is None:
            raise DeviceError("this driver has no cuMemcpy2DAsync")
        copies = np.zeros(len(runs), _MEMCPY_2D)
        copies["src_type"] = copies["dst_type"] = _UNIFIED
        copies["src_device"], copies["dst_device"] = runs.src, runs.dst
        copies["src_pitch"], copies["dst_pitch"] = runs.src_pitch, runs.dst_pitch
        copies["width"], copies["height"] = runs.width, runs.height
        first = copies.ctypes.data
        for address in range(first, first + copies.nbytes, copies.itemsize):
            status: int = self._pitched(address, stream)
            if status != SUCCESS:
                return status
        return SUCCESS

    @property
    def pitched_batches(self) -> bool:
        """Returns whether the driver has batches of pitched copies."""
        return self._pitched_batch is not None

    def copy_pitched_batch(self, runs: Pitched, most: int, stream: int, *, sources_final: bool = False) -> int:
        """Submits the runs, without the rest, in calls of at most `most` each, until one is refused. Returns the last
        CUresult. `sources_final`, and the order: as `copy_batch`.
        """
        if self._pitched_batch is None:
            raise DeviceError("this driver has no cuMemcpy3DBatchAsync")
        copies, failed_at = np.zeros(len(runs), _MEMCPY_3D), ctypes.c_size_t()
        copies["src_type"] = copies["dst_type"] = _POINTER
        copies["src_address"], copies["dst_address"] = runs.src, runs.dst
        copies["src_row_length"], copies["dst_row_length"] = runs.src_pitch, runs.dst_pitch
        copies["width"], copies["height"], copies["depth"] = runs.width, runs.height, 1
        copies["order"] = _ANY_ORDER if sources_final else _STREAM_ORDER
        copies["flags"] = _BY_COPY_ENGINES
        for begin in range(0, len(copies), most):
            batch = copies[begin : begin + most]
            status: int = self._pitched_batch(len(batch), batch.ctypes.data, ctypes.byref(failed_at), 0, stream)
            if status != SUCCESS:
                return status
        return SUCCESS

    def _needed(self, name: str, version: int, *arguments: Any) -> Any:
        found = self.entry(name, version, *arguments)
        if found is None:
            raise DeviceError(f"this CUDA driver has no {name}: it is too old")
        return found


def host_side(direction: Direction, src: U64Array, dst: U64Array) -> U64Array:
    """Returns whichever of the two is this process's own memory: stores write it, loads read it."""
    return dst if direction is Direction.STORE else src


def device_side(direction: Direction, src: U64Array, dst: U64Array) -> U64Array:
    """Returns the other one, which workers share."""
    return src if direction is Direction.STORE else dst
