"""Copying many runs of bytes inside this process, without the GIL, by the fastest means at hand.

`native`: the compiled extension, through ctypes. `process_vm`: the kernel copies, for installations without a
compiler. `memmove`: one call per run, for sandboxes that forbid the former. All move the same bytes.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
from collections.abc import Callable

import numpy as np

from kvoffloadd.errors import DeviceError, UsageError
from kvoffloadd.model import U64Array

CopyRuns = Callable[[U64Array, U64Array, U64Array], None]

_IOV_MAX = 1024  # most iovecs the kernel takes in one call
_U64 = np.dtype(np.uint64)


def _load_native() -> CopyRuns | None:
    spec = importlib.util.find_spec("kvoffloadd.device._copyruns")
    if spec is None or spec.origin is None:
        return None
    try:
        function = ctypes.CDLL(spec.origin).kvo_copy_runs
    except (OSError, AttributeError):  # built for another machine, or not ours
        return None
    function.restype = None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)

    def native(src: U64Array, dst: U64Array, size: U64Array) -> None:
        src, dst, size = _checked(src, dst, size)
        function(src.ctypes.data, dst.ctypes.data, size.ctypes.data, len(size))

    return native


def _load_process_vm() -> CopyRuns | None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        readv = libc.process_vm_readv
    except AttributeError:
        return None
    readv.restype = ctypes.c_ssize_t
    readv.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)

    def process_vm(src: U64Array, dst: U64Array, size: U64Array) -> None:
        src, dst, size = _checked(src, dst, size)
        wanted = size > 0
        remote = np.stack([src[wanted], size[wanted]], axis=1)
        local = np.stack([dst[wanted], size[wanted]], axis=1)
        pid = os.getpid()  # now, not at import: this may be a forked child
        first = 0
        while first < len(local):
            to, of = local[first : first + _IOV_MAX], remote[first : first + _IOV_MAX]
            moved = readv(pid, to.ctypes.data, len(to), of.ctypes.data, len(of), 0)
            if moved <= 0:
                number = ctypes.get_errno() if moved < 0 else errno.EFAULT
                raise DeviceError(f"the kernel can't copy {len(to)} runs: {os.strerror(number)}")
            first += _advance(to, of, moved)

    try:
        _prove(process_vm)
    except DeviceError:  # EPERM or ENOSYS: a sandbox
        return None
    return process_vm


def _advance(to: U64Array, of: U64Array, moved: int) -> int:
    """How many iovecs are done with after `moved` bytes; the one after them, if begun, is shortened in place.

    The kernel moves at most 2 GiB a call, and stops where it likes.
    """
    ends = np.cumsum(to[:, 1])
    done = int(np.searchsorted(ends, np.uint64(moved), side="right"))
    if done < len(to):
        begun = np.uint64(moved) - (ends[done - 1] if done else np.uint64(0))
        for iovec in (to[done], of[done]):
            iovec[0] += begun
            iovec[1] -= begun
    return done


def _memmove(src: U64Array, dst: U64Array, size: U64Array) -> None:
    src, dst, size = _checked(src, dst, size)
    for s, d, n in zip(src.tolist(), dst.tolist(), size.tolist(), strict=True):
        ctypes.memmove(d, s, n)


def _checked(src: U64Array, dst: U64Array, size: U64Array) -> tuple[U64Array, U64Array, U64Array]:
    """The three arrays, contiguous: their numbers go to C unseen, so another dtype would be taken for addresses."""
    if not (src.shape == dst.shape == size.shape and size.ndim == 1 and src.dtype == dst.dtype == size.dtype == _U64):
        raise UsageError("runs are three u64 arrays of one length")
    return np.ascontiguousarray(src), np.ascontiguousarray(dst), np.ascontiguousarray(size)


def _prove(function: CopyRuns) -> None:
    """Copies one byte; raises what the function raises if it does not work here."""
    pair = np.array([1, 0], np.uint8)
    at = np.array([pair.ctypes.data], np.uint64)
    function(at, at + np.uint64(1), np.ones(1, np.uint64))
    if pair[1] != 1:
        raise DeviceError("a byte was copied and did not arrive")


def implementations() -> dict[str, CopyRuns]:
    """Those that work on this machine, the fastest first."""
    found = {"native": _load_native(), "process_vm": _load_process_vm(), "memmove": _memmove}
    return {name: function for name, function in found.items() if function is not None}


IMPLEMENTATION, _copy_runs = next(iter(implementations().items()))
"""Which one `copy_runs` uses."""


def copy_runs(src: U64Array, dst: U64Array, size: U64Array) -> None:
    """Copies `size[i]` bytes from address `src[i]` to address `dst[i]`, in any order. Blocks, without the GIL.

    u64 arrays of shape `(runs,)`. NOTHING IS CHECKED: that each run lies in memory which is mapped, stays mapped during
    the call and is the caller's to read or write, and that no destination overlaps a source or another destination,
    is the caller's duty. When the call returns, every thread that learns of it sees the bytes.

    Raises:
        UsageError: not three u64 arrays of one length.
        DeviceError: the kernel refused (`process_vm` alone).
    """
    _copy_runs(src, dst, size)
