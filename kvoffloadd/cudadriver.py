"""The CUDA driver API: loaded when first asked for, called by name, errors raised.

The daemon and the client both use it. cuda-bindings from 12.9.1 on releases the GIL in every call; older ones hold it,
so the extras exclude them. Importing this file loads nothing of CUDA.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from enum import IntEnum
from importlib.machinery import PathFinder
from typing import Any

from kvoffloadd.errors import DeviceError

SUCCESS, NOT_READY = 0, 600

_STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "CONTEXT_IS_DESTROYED",
        "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE",
        "INVALID_PC", "LAUNCH_FAILED", "EXTERNAL_DEVICE", "CONTAINED", "MPS_CLIENT_TERMINATED", "DEVICE_UNAVAILABLE",
        "DEINITIALIZED", "UNKNOWN",
    )
)  # fmt: skip
"""After one of these every further call fails: only a new process helps (CUDA driver API, CUresult). A call that is
given an object of another process may return some of them for that reason alone: `context_works` distinguishes the
cases.
"""


_GIL_FREE = (12, 9, 1)
"""The first cuda-bindings that release the GIL in all calls."""


def holds_gil(bindings_version: str) -> bool:
    """Returns whether that version of cuda-bindings blocks all threads for the duration of a call."""
    return tuple(int(number) for number in re.findall(r"\d+", bindings_version)[:3]) < _GIL_FREE


def has_bindings() -> bool:
    """Returns whether cuda-bindings is installed. Imports nothing, and reads the disk."""
    found = PathFinder.find_spec("cuda")
    # Looked for in its folders, by its own name: by the full one, `cuda` would have to be imported.
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return PathFinder.find_spec("bindings", places) is not None


def _unnamed_result(error: Exception) -> int | None:
    """Returns the CUresult for which cuda-bindings have no name: 13.5 raise ValueError("950 is not a valid CUresult"),
    12.9 and 13.0 KeyError(950). None: the error is of another kind.
    """
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], int):
        return error.args[0]
    found = re.fullmatch(r"(\d+) is not a valid CUresult", str(error))
    return int(found[1]) if found else None


class PointerAttribute(IntEnum):
    """Names the members of the driver API's CUpointer_attribute that are queried, each of at most 8 bytes."""

    MEMORY_TYPE = 2
    DEVICE_ORDINAL = 9
    IS_LEGACY_CUDA_IPC_CAPABLE = 10
    ALLOWED_HANDLE_TYPES = 14
    MAPPING_SIZE = 18
    MAPPING_BASE_ADDR = 19


class CudaError(DeviceError):
    """A driver call failed. `name`: name of the CUresult. `sticky`: the error may last for as long as the
    process does.
    """

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name
        self.sticky = name in _STICKY


class CudaDriver:
    """libcuda.so.1, initialised. `api`: the module cuda.bindings.driver.

    Raises:
        DeviceError: cuda-bindings is not installed, or there is no driver, or it does not work.
    """

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DeviceError(
                f"cuda-bindings is not installed ({error}): in a checkout, pip install '.[cuda13]'"
            ) from None
        try:
            (status,) = self.api.cuInit(0)
        except RuntimeError as error:  # cuda-bindings: the library can't be loaded
            raise DeviceError(f"no CUDA driver was found: {error}") from None
        self.check("cuInit", int(status))
        self._attribute = self.entry("cuPointerGetAttribute", 4000, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a driver function by name. Returns None, its value, or a tuple of its values. Blocks for as long as the
        call takes.

        Raises:
            CudaError: it failed.
            DeviceError: the driver, or cuda-bindings in this version, does not have it, or has another form of it.
        """
        try:
            status, *values = getattr(self.api, name)(*arguments)
        except (AttributeError, RuntimeError, TypeError, ValueError, KeyError) as error:
            if (number := _unnamed_result(error)) is not None:
                raise CudaError(name, self.name_of(number)) from error
            raise DeviceError(f"{name} can't be called with cuda-bindings {self.bindings_version}: {error}") from error
        if int(status) != SUCCESS:
            raise CudaError(name, status.name)
        return values[0] if len(values) == 1 else tuple(values) or None

    def check(self, call: str, status: int) -> None:
        """Raises CudaError for the status of a call by pointer, unless it is success."""
        if status != SUCCESS:
            raise CudaError(call, self.name_of(status))

    def name_of(self, status: int) -> str:
        """Returns the name of a CUresult, or its number if it is newer than cuda-bindings."""
        try:
            return str(self.api.CUresult(status).name)
        except ValueError:
            return f"CUresult {status}"

    def entry(self, name: str, version: int, *arguments: Any) -> Any:
        """Returns a driver function by pointer, in the form of that version of CUDA, for arguments of these ctypes; it
        returns a CUresult and releases the GIL. None: the driver has none.
        """
        try:
            address, _ = self.call("cuGetProcAddress", name.encode(), version, 0)
        except CudaError:
            return None
        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(address)) if int(address) else None

    def attribute(self, which: PointerAttribute, address: int) -> int:
        """Returns what the driver knows of an address. Called by pointer, since each version of cuda-bindings knows
        other attributes.

        Raises:
            CudaError: the driver knows nothing of the address, or not this.
            DeviceError: it has no such call.
        """
        if self._attribute is None:
            raise DeviceError("this CUDA driver has no cuPointerGetAttribute: it is too old")
        value = ctypes.c_uint64()
        self.check("cuPointerGetAttribute", self._attribute(ctypes.byref(value), which, address))
        return value.value

    @property
    def bindings_version(self) -> str:
        """Returns the version of cuda-bindings."""
        return str(importlib.import_module("cuda.bindings").__version__)

    def context_works(self) -> bool:
        """Returns whether the current context can still be used. Blocks until all submitted work of the context has
        ended.
        """
        try:
            self.call("cuCtxSynchronize")
        except CudaError:
            return False
        return True

    def pci_address(self, ordinal: int) -> str:
        """Returns the address of a GPU of this process's numbering, in the form of /sys/bus/pci/devices. Raises
        CudaError.
        """
        device, names = self.call("cuDeviceGet", ordinal), self.api.CUdevice_attribute
        domain, bus, slot = (
            int(self.call("cuDeviceGetAttribute", getattr(names, f"CU_DEVICE_ATTRIBUTE_PCI_{name}_ID"), device))
            for name in ("DOMAIN", "BUS", "DEVICE")
        )
        return f"{domain:04x}:{bus:02x}:{slot:02x}.0"

    def uuid(self, ordinal: int) -> bytes:
        """Returns the 16 bytes that name a GPU of this process's numbering, the same in all processes."""
        found = self.call("cuDeviceGetUuid", self.call("cuDeviceGet", ordinal))
        return bytes(found.bytes)[:16]
