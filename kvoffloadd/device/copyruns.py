"""Reads and writes memory that peers share, without the GIL, by the fastest means available.

A page of such memory may be gone at any moment: punched out, cut off with the end of its file, or never provided. An
access to it raises a signal that ends the process, so no other module of the daemon touches such memory: whatever a
peer does to it, only the one copy fails.

`native`: the C code of this project, which survives the signal. `process_vm`: the kernel copies, and returns an error
instead, for installations without a compiler. `bounce`: the kernel copies to a file and back, for sandboxes that forbid
`process_vm`. All move the same bytes; the other two reach about 0.4 and 0.3 of the throughput of `native`.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import numpy as np

from kvoffloadd.errors import DeviceError, UsageError
from kvoffloadd.model import BoolArray, U64Array
from kvoffloadd.native import loader

CopyRuns = Callable[[U64Array, U64Array, U64Array], None]
CopyPayloads = Callable[[U64Array, U64Array, U64Array, U64Array, U64Array], None]
ReadWords = Callable[[U64Array], tuple[U64Array, BoolArray]]

_IOV_MAX = 1024  # most iovecs the kernel takes in one call
_BOUNCE_BYTES = 256 << 10
_WORD = np.uint64(8)
_U64 = np.dtype(np.uint64)
_GONE = (
    "a page of the blocks' memory is gone, or was never there: it was punched out, cut off with the file, or not "
    "populated"
)
_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.pread, _libc.pwrite):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)


def _load_native() -> tuple[CopyRuns, ReadWords] | None:
    helper = loader.HELPER
    if helper is None:
        return None

    def native(src: U64Array, dst: U64Array, size: U64Array) -> None:
        if helper.copy_runs(*_checked(src, dst, size)) < len(size):
            raise DeviceError(_GONE)

    def words(addresses: U64Array) -> tuple[U64Array, BoolArray]:
        values, gone = np.empty(len(addresses), np.uint64), np.empty(len(addresses), bool)
        helper.read_words(addresses, values, gone)
        return values, gone

    return native, words


def _load_payloads() -> CopyPayloads | None:
    helper, xxh3 = loader.HELPER, loader.XXH3
    if helper is None or xxh3 is None:
        return None

    def payloads(src: U64Array, dst: U64Array, size: U64Array, counts: U64Array, digests: U64Array) -> None:
        src, dst, size = _checked(src, dst, size)
        counts = np.ascontiguousarray(counts)
        if counts.dtype != _U64 or counts.ndim != 1 or int(counts.sum()) != len(size):
            raise UsageError("the payloads' numbers of runs are u64, and add up to the runs")
        if not (digests.dtype == _U64 and digests.shape == (len(counts), 2) and digests.flags.c_contiguous):
            raise UsageError("digests are two contiguous u64 a payload")
        if helper.copy_payloads(xxh3.streaming, src, dst, size, counts, digests) < len(counts):
            raise DeviceError(_GONE)

    return payloads


def _load_process_vm() -> CopyRuns | None:
    try:
        readv = _libc.process_vm_readv
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
                _fail(ctypes.get_errno() if moved < 0 else errno.EFAULT)
            first += _advance(to, of, moved)

    try:
        _prove(process_vm)
    except DeviceError:  # EPERM or ENOSYS: a sandbox
        return None
    return process_vm


def _advance(to: U64Array, of: U64Array, moved: int) -> int:
    """Returns how many iovecs are complete after `moved` bytes; the next one, if begun, is shortened in place.

    The kernel moves at most 2 GiB a call, and may stop anywhere.
    """
    ends = np.cumsum(to[:, 1])
    done = int(np.searchsorted(ends, np.uint64(moved), side="right"))
    if done < len(to):
        begun = np.uint64(moved) - (ends[done - 1] if done else np.uint64(0))
        for iovec in (to[done], of[done]):
            iovec[0] += begun
            iovec[1] -= begun
    return done


def _bounce(src: U64Array, dst: U64Array, size: U64Array) -> None:
    src, dst, size = _checked(src, dst, size)
    fd = os.memfd_create("kvoffloadd-bounce", os.MFD_CLOEXEC)
    try:
        for s, d, n in zip(src.tolist(), dst.tolist(), size.tolist(), strict=True):
            for offset in range(0, n, _BOUNCE_BYTES):
                piece = min(n - offset, _BOUNCE_BYTES)
                for move, address in ((_libc.pwrite, s + offset), (_libc.pread, d + offset)):
                    if (moved := move(fd, address, piece, 0)) < piece:  # complete, unless a page is gone
                        _fail(ctypes.get_errno() if moved < 0 else errno.EFAULT)
    finally:
        os.close(fd)


def _fail(number: int) -> NoReturn:
    raise DeviceError(_GONE if number == errno.EFAULT else f"the kernel can't copy: {os.strerror(number)}")


def _read_words(copy: CopyRuns, addresses: U64Array) -> tuple[U64Array, BoolArray]:
    """Reads words. The kernel may copy a word byte by byte while it grows: of two values, the lower one was there."""
    values, gone = np.empty((2, len(addresses)), np.uint64), np.zeros(len(addresses), bool)
    for index in range(len(addresses)):
        word = addresses[index : index + 1]
        try:
            for row in values:
                copy(word, np.array([row[index:].ctypes.data], np.uint64), np.array([_WORD]))
        except DeviceError:
            gone[index] = True
    return values.min(axis=0), gone


def _checked(src: U64Array, dst: U64Array, size: U64Array) -> tuple[U64Array, U64Array, U64Array]:
    """Returns the three arrays, contiguous. C receives only their addresses, so another dtype would be misread."""
    if not (src.shape == dst.shape == size.shape and size.ndim == 1 and src.dtype == dst.dtype == size.dtype == _U64):
        raise UsageError("runs are three u64 arrays of one length")
    return np.ascontiguousarray(src), np.ascontiguousarray(dst), np.ascontiguousarray(size)


def _prove(function: CopyRuns) -> None:
    """Copies one byte; raises what the function raises if it does not work here."""
    pair = np.array([1, 0], np.uint8)
    address = np.array([pair.ctypes.data], np.uint64)
    function(address, address + np.uint64(1), np.ones(1, np.uint64))
    if pair[1] != 1:
        raise DeviceError("a byte was copied and did not arrive")


def implementations() -> dict[str, tuple[CopyRuns, ReadWords]]:
    """Returns those that work on this machine, the fastest first."""
    found: dict[str, tuple[CopyRuns, ReadWords]] = {}
    if (native := _load_native()) is not None:
        found["native"] = native
    for name, copy in (("process_vm", _load_process_vm()), ("bounce", _bounce)):
        if copy is not None:
            found[name] = copy, partial(_read_words, copy)
    return found


IMPLEMENTATION, (_copy_runs, _words) = next(iter(implementations().items()))
"""The implementation that `copy_runs` and `read_words` use."""


def copy_runs(src: U64Array, dst: U64Array, size: U64Array) -> None:
    """Copies `size[i]` bytes from address `src[i]` to address `dst[i]`, in any order. Blocks, without the GIL.

    u64 arrays of shape `(runs,)`. NOTHING IS CHECKED: the caller must ensure that each run lies in memory which is
    mapped, stays mapped during the call and may be read or written, and that no destination overlaps a source or
    another destination. Pages may be gone. Every thread that learns that the call has returned sees the bytes.

    Raises:
        UsageError: not three u64 arrays of one length.
        DeviceError: a page is gone; destinations have old, new or mixed bytes. Or the kernel refused.
    """
    _copy_runs(src, dst, size)


copy_payloads: CopyPayloads | None = _load_payloads()
"""Copies like `copy_runs`, and hashes what it reads: `(src, dst, size, counts, digests)`. Payload i consists of the
next `counts[i]` runs, u64 `(payloads,)`. Its xxh3_128, of all runs in this order, is written to `digests[i]`, u64
`(payloads, 2)`, high half first, as `storage.hashing` has it. The hashed bytes are those that are copied, or those of
the source immediately afterwards. None: `native` is not in use, or the package `xxhash` does not export its C
functions.

Raises like `copy_runs`, and MemoryError.
"""


def read_words(addresses: U64Array) -> tuple[U64Array, BoolArray]:
    """Returns the aligned u64 at each of these addresses, u64 `(words,)`, and a bool for each: its page is gone, and
    its value is meaningless. The addresses must be mapped, as for `copy_runs`.

    Other threads and processes may write them meanwhile. With `native`, a reader that sees a value also sees all that
    its writer wrote before it, on every architecture; with the others, on those that keep the order of writes (x86).

    Raises:
        UsageError: no u64 array of one dimension.
    """
    if addresses.ndim != 1 or addresses.dtype != _U64:
        raise UsageError("addresses are a u64 array of one dimension")
    return _words(np.ascontiguousarray(addresses))
