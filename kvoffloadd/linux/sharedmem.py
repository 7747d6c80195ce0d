"""Shared memory: memfds, mappings, prefaulting, lazily committed arrays.

The daemon and the client both use it. Mappings are made and ended through libc, because Python's `mmap` holds the GIL
while the kernel works: unmapping or prefaulting some GiB that way would block the event loop for that time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffloadd.errors import LimitError, MemoryKindError, ResourceError, UsageError
from kvoffloadd.model import HUGE_PAGE_BYTES, PAGE_BYTES, U8Array

Scalar = TypeVar("Scalar", bound=np.generic)

_MADV_HUGEPAGE = 14
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_NORESERVE = 0x4000  # Python's mmap module names it from 3.13 on
_POPULATE_ALIGN_BYTES = HUGE_PAGE_BYTES  # threads meet at huge page boundaries, so that none splits one
_POPULATE_NICE = 10
POPULATE_STEP_BYTES = 512 << 10  # a call holds the lock of the address space: threads that map memory wait for its end
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def create_memfd(name: str, size_bytes: int, *, reserved: bool = False) -> int:
    """Creates a memfd of zeros with a permanently sealed size. The caller owns the descriptor, which is close-on-exec.
    `reserved`: uses huge pages that the system has reserved; its size is a multiple of `HUGE_PAGE_BYTES`.

    Raises:
        UsageError: the size is 0.
        OSError: the kernel gives no memfd.
    """
    if size_bytes <= 0:
        raise UsageError(f"a memfd of {size_bytes} bytes can't hold anything")
    huge = os.MFD_HUGETLB | os.MFD_HUGE_2MB if reserved else 0
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | huge)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed_against_shrinking(fd: int) -> bool:
    """Returns whether this file can never be made shorter. False for files that can't be sealed at all."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return bool(seals & fcntl.F_SEAL_SHRINK)


class Mapping:
    """A MAP_SHARED mapping of a whole file, from byte 0. It lives until `close`, never until garbage collection:
    addresses in it are used by threads that hold no reference to it.
    """

    __slots__ = ("_address", "_open", "size_bytes", "writable")

    def __init__(self, address: int, size_bytes: int, writable: bool) -> None:
        """Takes an existing mapping; use `map_fd` to make one."""
        self._address = address
        self._open = True
        self.size_bytes = size_bytes
        self.writable = writable

    @classmethod
    def map_fd(cls, fd: int, size_bytes: int, *, writable: bool = True) -> Self:
        """Maps the first `size_bytes` of `fd`, which the caller keeps and may close. Commits no memory.

        Raises:
            UsageError: the size is 0.
            LimitError: the kernel has no address space or no huge pages left for it.
            MemoryKindError: the kernel refuses this descriptor; the message has its reason.
        """
        if size_bytes <= 0:
            raise UsageError(f"a mapping of {size_bytes} bytes can't be made")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
        if address is None or address == _MAP_FAILED:
            number = ctypes.get_errno()
            cause = LimitError if number == errno.ENOMEM else MemoryKindError
            raise cause(f"can't map {size_bytes} bytes of the descriptor: {os.strerror(number)}")
        return cls(address, size_bytes, writable)

    @property
    def address(self) -> int:
        """Returns the address of the first byte, in this process.

        Raises:
            UsageError: the mapping is closed.
        """
        if not self._open:
            raise UsageError("the mapping is closed")
        return self._address

    def array(self) -> U8Array:
        """Returns a u8 view of shape `(size_bytes,)`, read-only if the mapping is. It keeps nothing alive: code that
        uses it after `close` reads or writes memory that is gone.

        Raises:
            UsageError: the mapping is closed.
        """
        view: U8Array = np.ctypeslib.as_array((ctypes.c_uint8 * self.size_bytes).from_address(self.address))
        view.flags.writeable = self.writable
        return view

    def leave_out_of_dumps(self) -> None:
        """Excludes the mapping from core files: it may be large, and contain users' prompts."""
        _libc.madvise(self.address, self.size_bytes, _MADV_DONTDUMP)

    def ask_for_huge_pages(self) -> None:
        """Requests transparent huge pages, which the kernel provides if it may and has them; it does not report whether
        it does.
        """
        _libc.madvise(self.address, self.size_bytes, _MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmaps, without the GIL; may run in any thread. The caller ensures that nothing uses the memory any more.

        Raises:
            UsageError: it is closed already.
            ResourceError: the kernel can't unmap it.
        """
        address = self.address
        self._open = False  # before the call: another thread may get the same address immediately
        if _libc.munmap(address, self.size_bytes) != 0:
            raise ResourceError(f"can't unmap {self.size_bytes} bytes: {os.strerror(ctypes.get_errno())}")


def populate(
    address: int,
    size_bytes: int,
    threads: int,
    stop: threading.Event | None = None,
    *,
    nice: int = _POPULATE_NICE,
    fd: int | None = None,
    offset: int = 0,
    step_bytes: int = POPULATE_STEP_BYTES,
) -> None:
    """Makes the kernel commit every page of a shared, writable mapping now, in parallel. Blocks for as long as that
    takes (about a second per GiB and thread), without the GIL: call it off the event loop.

    Contents never change, so others may use the memory meanwhile. Ends early, soon after `stop` is set. `nice`: the
    threads' nice value. Kernels before 5.14 need `fd`, the file that has its byte `offset` at `address`. `step_bytes`:
    the size of one call to the kernel; a huge page where they are expected.

    Raises:
        ResourceError: the kernel has no memory for it.
    """
    shift = address % PAGE_BYTES
    start, end, offset = address - shift, address + size_bytes, offset - shift
    step = max(-(-(end - start) // max(threads, 1)), 1)
    step += -step % _POPULATE_ALIGN_BYTES

    def work(begin: int) -> None:
        for position in range(begin, min(begin + step, end), step_bytes):
            if stop is not None and stop.is_set():
                return
            _populate_step(
                fd, offset + position - start, position, min(step_bytes, begin + step - position, end - position)
            )

    with ThreadPoolExecutor(max(threads, 1), "kvo-populate", _stand_back, (nice,)) as pool:
        try:
            ends = [pool.submit(work, position) for position in range(start, end, step)]
        except RuntimeError:  # no thread can be made: this one does everything
            ends = []
            for position in range(start, end, step):
                work(position)
        for done in ends:
            done.result()


def _stand_back(nice: int) -> None:
    """Lowers the priority of this thread alone, so that threads which serve meanwhile go first."""
    if nice:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def _populate_step(fd: int | None, offset: int, address: int, size_bytes: int) -> None:
    number = errno.EAGAIN
    while number in (errno.EINTR, errno.EAGAIN):
        if _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0:
            return
        number = ctypes.get_errno()
    if number == errno.EINVAL and fd is not None:
        try:
            os.posix_fallocate(fd, offset, size_bytes)
        except OSError as error:
            number = error.errno or errno.ENOMEM
        else:
            return
    # EFAULT: a process that touched the page would be killed.
    why = "a tmpfs is full, or no huge page is free" if number == errno.EFAULT else os.strerror(number)
    raise ResourceError(f"the kernel can't commit {size_bytes} bytes of shared memory: {why}")


def reserve_array(shape: tuple[int, ...], dtype: type[Scalar], *, scattered: bool = False) -> npt.NDArray[Scalar]:
    """Returns a zeroed array with pages that cost memory only once they are written: for columns sized for the worst
    case.

    `scattered`: the array is written at random places. Its pages are then not huge: to zero a huge page takes the
    kernel up to 3 ms, and a few hundred places are on as many pages.

    Private to the process. The memory lives as long as the array or any view of it. Raises OSError if the kernel grants
    no such address space, and MemoryError if it is `scattered`.
    """
    items = int(np.prod(shape, dtype=object)) if shape else 1
    size_bytes = items * np.dtype(dtype).itemsize
    if size_bytes == 0:
        return np.zeros(shape, dtype)
    try:
        base = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        if scattered:  # made while the daemon serves, where only MemoryError is known to leave the cache consistent
            raise MemoryError(f"no address space for {size_bytes} bytes: {error.strerror}") from None
        raise
    if scattered:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            base.madvise(mmap.MADV_NOHUGEPAGE)
    array: npt.NDArray[Any] = np.frombuffer(base, dtype, items).reshape(shape)
    return array
