"""Reading and writing memory that peers share, without the GIL, by the fastest means at hand.

A page of such memory may be gone at any moment: punched out, cut off with the end of its file, or never provided. To
touch it is a signal that ends the process, so nothing else in the daemon does: whatever a peer does to its memory, the
one copy fails.

`native`: the compiled extension, through ctypes; it survives the signal. `process_vm`: the kernel copies, and returns
an error instead, for installations without a compiler. `bounce`: the kernel copies to a file and back, for sandboxes
that forbid the former. All move the same bytes; per GB/s of `native` the others have about 0.4 and 0.3.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import numpy as np
import xxhash

from kvoffloadd.errors import DeviceError, UsageError
from kvoffloadd.model import BoolArray, U64Array
from kvoffloadd.xxh3 import find_function

CopyRuns = Callable[[U64Array, U64Array, U64Array], None]
CopyPayloads = Callable[[U64Array, U64Array, U64Array, U64Array, U64Array], None]
ReadWords = Callable[[U64Array], tuple[U64Array, BoolArray]]

_IOV_MAX = 1024  # most iovecs the kernel takes in one call
_BOUNCE_BYTES = 256 << 10
_WORD = np.uint64(8)
_ALIGNED = 64  # what _copyruns.c wants of a destination, to hash on the way
_U64 = np.dtype(np.uint64)
_GONE = (
    "a page of the blocks' memory is gone, or was never there: it was punched out, cut off with the file, or not "
    "populated"
)
_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.pread, _libc.pwrite):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)


def _load_library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("kvoffloadd.device._copyruns")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:  # built for another machine
        return None
    return library if all(hasattr(library, name) for name in ("kvo_copy_runs", "kvo_read_words")) else None


def _load_native() -> tuple[CopyRuns, ReadWords] | None:
    library = _load_library()
    if library is None:
        return None
    copy, read = library.kvo_copy_runs, library.kvo_read_words
    pointer, count = ctypes.c_void_p, ctypes.c_uint64
    copy.restype, copy.argtypes = count, (pointer, pointer, pointer, count)
    read.restype, read.argtypes = None, (pointer, pointer, pointer, count)

    def native(src: U64Array, dst: U64Array, size: U64Array) -> None:
        src, dst, size = _checked(src, dst, size)
        if copy(src.ctypes.data, dst.ctypes.data, size.ctypes.data, len(size)) < len(size):
            raise DeviceError(_GONE)

    def words(addresses: U64Array) -> tuple[U64Array, BoolArray]:
        values, gone = np.empty(len(addresses), np.uint64), np.empty(len(addresses), bool)
        read(addresses.ctypes.data, values.ctypes.data, gone.ctypes.data, len(addresses))
        return values, gone

    return native, words


class _Hash(ctypes.Structure):
    """`Hash` of _copyruns.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("create", "destroy", "reset", "update", "digest"))


def _load_payloads() -> CopyPayloads | None:
    functions = (
        find_function("XXH3_createState"),
        find_function("XXH3_freeState"),
        find_function("XXH3_128bits_reset"),
        find_function("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
        find_function("XXH3_128bits_digest"),
    )
    library = _load_library()
    if None in functions or not hasattr(library, "kvo_copy_payloads"):
        return None
    copy = library.kvo_copy_payloads  # type: ignore[union-attr]  # it has it
    pointer, count = ctypes.c_void_p, ctypes.c_uint64
    copy.restype, copy.argtypes = count, (*(pointer,) * 4, count, pointer, pointer)
    hashing = _Hash(*functions)

    def payloads(src: U64Array, dst: U64Array, size: U64Array, counts: U64Array, digests: U64Array) -> None:
        src, dst, size = _checked(src, dst, size)
        counts = np.ascontiguousarray(counts)
        if counts.dtype != _U64 or counts.ndim != 1 or int(counts.sum()) != len(size):
            raise UsageError("the payloads' numbers of runs are u64, and add up to the runs")
        if not (digests.dtype == _U64 and digests.shape == (len(counts), 2) and digests.flags.c_contiguous):
            raise UsageError("digests are two contiguous u64 a payload")
        runs = (src.ctypes.data, dst.ctypes.data, size.ctypes.data)
        copied = copy(*runs, counts.ctypes.data, len(counts), digests.ctypes.data, ctypes.addressof(hashing))
        if copied > len(counts):
            raise MemoryError("no memory for the state of a hash")
        if copied < len(counts):
            raise DeviceError(_GONE)

    return payloads if _is_right(payloads) else None


def _is_right(function: CopyPayloads) -> bool:
    """Whether it copies, and gives the digests that the package's Python functions give, of payloads that are short,
    long, and of whole blocks of the hash function.
    """
    data = np.arange(1 << 15, dtype=np.uint16).view(np.uint8)
    target, digests = np.zeros(len(data) + _ALIGNED, np.uint8), np.zeros((4, 2), np.uint64)
    target = target[-target.ctypes.data % _ALIGNED :][: len(data)]
    size = np.array([4096, 8192, 40, 200, 1, 299, 65_536 - 12_828], np.uint64)
    begin = np.cumsum(size) - size
    runs = (begin + np.uint64(data.ctypes.data), begin + np.uint64(target.ctypes.data), size)
    function(*runs, np.array([2, 1, 3, 1], np.uint64), digests)
    expected = b"".join(
        xxhash.xxh3_128_digest(data[low:high].data)
        for low, high in itertools.pairwise((0, 12_288, 12_328, 12_828, 65_536))
    )
    return bool((data == target).all()) and digests.astype(">u8").tobytes() == expected


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


def _bounce(src: U64Array, dst: U64Array, size: U64Array) -> None:
    src, dst, size = _checked(src, dst, size)
    fd = os.memfd_create("kvoffloadd-bounce", os.MFD_CLOEXEC)
    try:
        for s, d, n in zip(src.tolist(), dst.tolist(), size.tolist(), strict=True):
            for at in range(0, n, _BOUNCE_BYTES):
                piece = min(n - at, _BOUNCE_BYTES)
                for move, address in ((_libc.pwrite, s + at), (_libc.pread, d + at)):
                    if (moved := move(fd, address, piece, 0)) < piece:  # whole, but where a page is gone
                        _fail(ctypes.get_errno() if moved < 0 else errno.EFAULT)
    finally:
        os.close(fd)


def _fail(number: int) -> NoReturn:
    raise DeviceError(_GONE if number == errno.EFAULT else f"the kernel can't copy: {os.strerror(number)}")


def _read_words(copy: CopyRuns, addresses: U64Array) -> tuple[U64Array, BoolArray]:
    """The kernel may copy a word byte by byte while it grows: of two values the lower one was there."""
    values, gone = np.empty((2, len(addresses)), np.uint64), np.zeros(len(addresses), bool)
    for at in range(len(addresses)):
        word = addresses[at : at + 1]
        try:
            for row in values:
                copy(word, np.array([row[at:].ctypes.data], np.uint64), np.array([_WORD]))
        except DeviceError:
            gone[at] = True
    return values.min(axis=0), gone


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


def implementations() -> dict[str, tuple[CopyRuns, ReadWords]]:
    """Those that work on this machine, the fastest first."""
    found: dict[str, tuple[CopyRuns, ReadWords]] = {}
    if (native := _load_native()) is not None:
        found["native"] = native
    for name, copy in (("process_vm", _load_process_vm()), ("bounce", _bounce)):
        if copy is not None:
            found[name] = copy, partial(_read_words, copy)
    return found


IMPLEMENTATION, (_copy_runs, _words) = next(iter(implementations().items()))
"""Which one `copy_runs` and `read_words` use."""


def copy_runs(src: U64Array, dst: U64Array, size: U64Array) -> None:
    """Copies `size[i]` bytes from address `src[i]` to address `dst[i]`, in any order. Blocks, without the GIL.

    u64 arrays of shape `(runs,)`. NOTHING IS CHECKED: that each run lies in memory which is mapped, stays mapped during
    the call and is the caller's to read or write, and that no destination overlaps a source or another destination,
    is the caller's duty. Pages of it may be gone. When the call returns, every thread that learns of it sees the bytes.

    Raises:
        UsageError: not three u64 arrays of one length.
        DeviceError: a page is gone; destinations have old, new or mixed bytes. Or the kernel refused.
    """
    _copy_runs(src, dst, size)


copy_payloads: CopyPayloads | None = _load_payloads()
"""Copies like `copy_runs`, and hashes what it reads: `(src, dst, size, counts, digests)`. Payload i consists of the
next `counts[i]` runs, u64 `(payloads,)`. Its xxh3_128, of all runs in this order, is written to `digests[i]`, u64
`(payloads, 2)`, high half first, as `storage.hashing` has it. The bytes that are hashed are those that are copied, or
those of the source right after. None: `native` is not in use, or the package `xxhash` does not export its functions.

Raises like `copy_runs`, and MemoryError.
"""


def read_words(addresses: U64Array) -> tuple[U64Array, BoolArray]:
    """The aligned u64 at each of these addresses, u64 `(words,)`, and a bool for each: its page is gone, and its
    value means nothing. Mapped, as for `copy_runs`.

    Other threads and processes may write them meanwhile. With `native`, a reader that sees a value also sees all that
    its writer wrote before it, on every architecture; without, on those that keep the order of writes (x86).

    Raises:
        UsageError: no u64 array of one dimension.
    """
    if addresses.ndim != 1 or addresses.dtype != _U64:
        raise UsageError("addresses are a u64 array of one dimension")
    return _words(np.ascontiguousarray(addresses))
