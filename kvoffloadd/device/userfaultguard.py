"""Holes in peers' memory: pages that do not exist yet. The kernel makes one when it is touched, and charges it to the
memory cgroup of the process that touched it: an engine's sparse memory would grow the daemon, up to its limit.

Where holes are forbidden, through a userfaultfd that is never read, touching one is a bus error, which `copyruns`
survives. Existing pages cost nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

from kvoffloadd.errors import LimitError
from kvoffloadd.linux.sharedmem import Mapping
from kvoffloadd.model import PAGE_BYTES

_SYSCALLS = {"x86_64": 323, "aarch64": 282, "riscv64": 282}
_USER_MODE_ONLY = 1  # needs no privilege
_API = struct.Struct("<QQQ")  # struct uffdio_api: api, features, ioctls
_REGISTER = struct.Struct("<QQQQ")  # struct uffdio_register: start, bytes, mode, ioctls
_UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
_VERSION = 0xAA
_MISSING_HUGETLBFS, _MISSING_SHMEM, _SIGBUS = 1 << 4, 1 << 5, 1 << 7
_MODE_MISSING = 1


class UserfaultGuard:
    """Forbids holes. Owns a descriptor until `close`."""

    def __init__(self) -> None:
        """Raises OSError where the kernel, or a sandbox, has no userfaultfd for this process."""
        number = _SYSCALLS.get(os.uname().machine)
        if number is None:
            raise OSError("userfaultfd is not supported on this architecture")
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = int(libc.syscall(ctypes.c_long(number), os.O_CLOEXEC | _USER_MODE_ONLY))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), f"userfaultfd: {os.strerror(ctypes.get_errno())}")
        try:
            fcntl.ioctl(self._fd, _UFFDIO_API, _API.pack(_VERSION, _SIGBUS | _MISSING_SHMEM | _MISSING_HUGETLBFS, 0))
        except OSError:
            self.close()
            raise

    def forbid(self, mapping: Mapping) -> None:
        """Prevents this process from creating any page of this mapping from now on. Raises LimitError where the kernel
        refuses.
        """
        size_bytes = mapping.size_bytes + -mapping.size_bytes % PAGE_BYTES
        try:
            fcntl.ioctl(self._fd, _UFFDIO_REGISTER, _REGISTER.pack(mapping.address, size_bytes, _MODE_MISSING, 0))
        except OSError as error:
            raise LimitError(f"the kernel can't forbid holes in {size_bytes} bytes: {error.strerror}") from None

    def close(self) -> None:
        """Closes the descriptor. In remaining mappings, holes are filled again."""
        os.close(self._fd)
