"""One piece of shared memory with its descriptor: `attach` announces it."""

from __future__ import annotations

import os
import weakref

from kvoffloadd.errors import ResourceError
from kvoffloadd.linux.sharedmem import Mapping, create_memfd, populate
from kvoffloadd.model import U8Array

_POPULATE_THREADS = 4

_live: weakref.WeakSet[Allocation] = weakref.WeakSet()


class Allocation:
    """Shared memory that is mapped here and that a descriptor names.

    It owns the descriptor, which is closed with the object. The memory stays mapped as long as any array over it lives:
    `owner` is the object that keeps it so.
    """

    def __init__(self, fd: int, address: int, size_bytes: int, owner: object) -> None:
        """Takes over `fd`; its byte 0 is at `address`."""
        self.fd = fd
        self.address = address
        self.size_bytes = size_bytes
        self.owner = owner
        weakref.finalize(self, os.close, fd).atexit = False
        self.identity = _identity_of(fd)
        """Names the memory: two allocations with the same identity are attached once."""
        _live.add(self)

    @classmethod
    def create(cls, name: str, size_bytes: int) -> tuple[Allocation, U8Array]:
        """Creates a sealed memfd; returns it and all of it as u8 (size_bytes,). Raises OSError or ResourceError: no
        memory.
        """
        fd = create_memfd(name, size_bytes)
        try:
            mapping = Mapping.map_fd(fd, size_bytes, writable=True)
        except BaseException:
            os.close(fd)
            raise
        array = mapping.array()
        # Every view, torch's too, holds this array, so the mapping ends with the last of them. Not at exit: threads
        # may still run then.
        weakref.finalize(array, mapping.close).atexit = False
        made = cls(fd, mapping.address, size_bytes, array)
        made.populate(mapping.address, size_bytes)
        return made, array

    def populate(self, address: int, size_bytes: int) -> None:
        """Has the kernel provide these mapped bytes now: a page is charged to the process that touches it first, which
        must not be the daemon.

        Blocks for about a second per GiB and thread. Raises ResourceError if there is no memory for it.
        """
        threads = min(_POPULATE_THREADS, os.cpu_count() or 1)
        try:
            populate(address, size_bytes, threads, nice=0, fd=self.fd, offset=address - self.address)
        except ResourceError as error:
            raise ResourceError(
                f"can't allocate {size_bytes} bytes of shared memory: {error}; check `df /dev/shm`, `free`, and the "
                "cgroup's limit (of a container: --shm-size, --memory)"
            ) from None

    @classmethod
    def around(cls, address: int, size_bytes: int) -> Allocation | None:
        """Returns the allocation known here that holds these bytes."""
        for allocation in _live:
            if allocation.address <= address and address + size_bytes <= allocation.address + allocation.size_bytes:
                return allocation
        return None

    @classmethod
    def of_fd(cls, fd: int, memory: U8Array) -> Allocation:
        """Returns the allocation of memory that another library has mapped: the one that is known here, or a new one.
        Duplicates `fd`.
        """
        address, identity = memory.ctypes.data, _identity_of(fd)
        while (known := cls.around(address, memory.size)) is not None:
            if known.identity == identity:
                return known
            _live.discard(known)  # its mapping has ended: the other library has mapped something else there
        return cls(os.dup(fd), address, memory.size, memory)


def _identity_of(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino
