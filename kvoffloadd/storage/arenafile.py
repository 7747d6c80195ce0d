"""The file behind the memory tier: the arena, preceded by the data that a successor needs to take it over.

It is a memfd, which systemd can keep for the next start, or a file with a path. In order:

    header      one page: describes the rest
    names       twice `NAMES_BYTES`: saved namespaces; written to the unused half, then wiped in the other
    slabs       u32 each: pages of a slot, 0: unassigned
    records     64 bytes for each page of the arena, see `slotrecords`
    arena       from a multiple of 2 MiB on

The writer may be killed between any two instructions: each part is valid or invalid by itself. Event loop only.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import numpy as np
import xxhash

from kvoffloadd.config import MemoryConfig
from kvoffloadd.errors import ConfigError, LimitError, TryAgainError
from kvoffloadd.linux.hugepages import huge_bytes
from kvoffloadd.linux.memorylimits import check_huge_pages_fit, check_memory_fits
from kvoffloadd.linux.mounts import file_system
from kvoffloadd.linux.sharedmem import POPULATE_STEP_BYTES, Mapping, create_memfd, populate
from kvoffloadd.model import HUGE_PAGE_BYTES, PAGE_BYTES, U8Array, U32Array, U64Array
from kvoffloadd.storage.arenaowner import OWNER_BYTES, await_end, is_of_another_boot, process, this_process
from kvoffloadd.units import format_bytes

log = logging.getLogger(__name__)

VERSION = 1
NAMES_BYTES = 8 << 20
RECORD_WORDS = 8
ATTEMPTS_MAX = 3

_MAGIC = b"KVOFPOOL"
_HEADER = struct.Struct("<8sIIQQQ")  # magic, version, page bytes, capacity bytes, slab bytes, seed
SEQUENCE_MAX: Final = 1 << 62
"""The limit of states: this number and later ones are invalid. The state after the last valid one has the number 0,
which is even, so that it is not written over the last one.
"""

_NAMES = struct.Struct("<QQ16s")  # sequence number, bytes, xxh3_128 of both and of the data behind
_ATTEMPTS_AT = 512  # in the header's page: u32, take-overs that began and neither succeeded nor were withdrawn
_OWNER_AT = 520  # in the header's page, see `arenaowner`
_AGENT_AT = _OWNER_AT + OWNER_BYTES  # as for the owner: its agent, whose transfers also use the arena
_ALIGN_BYTES = HUGE_PAGE_BYTES
_MEMORY = ("tmpfs", "hugetlbfs", "ramfs", "")


END_S = 30.0
"""How long the former owner of the file may take to end after it is killed."""


class ArenaFile:
    """Owns the descriptor and the mapping until `close`. `address`: of the arena's first byte, which lies at
    `arena_offset` in the file.

    `is_old`: another process made and filled it. `seed`: secret of the process that made it. `reserved`: it lies in
    huge pages that the system has set aside. `huge_bytes`: of the arena, in huge pages of any kind; 0 before it is
    populated, None if this kernel does not report it.
    """

    def __init__(self, fd: int, capacity_bytes: int, slab_bytes: int, *, is_old: bool) -> None:
        """Takes over a file of the right size. An `is_old` file has passed `unfit`."""
        num_pages = capacity_bytes // PAGE_BYTES
        num_slabs = -(-num_pages // (slab_bytes // PAGE_BYTES))
        self.fd: Final = fd
        self.is_old: Final = is_old
        self.capacity_bytes: Final = capacity_bytes
        page_bytes = block_bytes(fd)
        self.reserved: Final = page_bytes >= HUGE_PAGE_BYTES
        self.huge_bytes: int | None = 0
        self._populate_step_bytes = max(page_bytes, POPULATE_STEP_BYTES)
        self.size_bytes: Final = file_bytes(capacity_bytes, slab_bytes, page_bytes)
        self.arena_offset: Final = arena_offset(capacity_bytes, slab_bytes)
        self._mapping = Mapping.map_fd(fd, self.size_bytes)
        self._mapping.leave_out_of_dumps()
        whole = self._mapping.array()
        slabs = PAGE_BYTES + 2 * NAMES_BYTES
        records = slabs + _pages(4 * num_slabs)
        if not is_old:
            header = _HEADER.pack(_MAGIC, VERSION, PAGE_BYTES, capacity_bytes, slab_bytes, secrets.randbits(63))
            _write(whole, 0, header + xxhash.xxh3_128_digest(header))
        self.seed: Final = int(_HEADER.unpack(_read(whole, 0, _HEADER.size))[5])
        self.slabs: U32Array = whole[slabs : slabs + 4 * num_slabs].view(np.uint32)
        words = whole[records : records + 8 * RECORD_WORDS * num_pages].view(np.uint64)
        self.records: U64Array = words.reshape(num_pages, RECORD_WORDS)
        self.address: Final = self._mapping.address + self.arena_offset
        self.arena: U8Array = whole[self.arena_offset : self.arena_offset + capacity_bytes]
        self._attempts: U32Array = whole[_ATTEMPTS_AT : _ATTEMPTS_AT + 4].view(np.uint32)
        self._whole = whole
        _write(whole, _OWNER_AT, this_process() + bytes(OWNER_BYTES))
        self._sequence = max(self._names(0)[0], self._names(1)[0])

    @classmethod
    def make(cls, capacity_bytes: int, slab_bytes: int, *, reserved: bool = False) -> Self:
        """Makes a memfd of zeros, sealed against other sizes. `reserved`: of huge pages that the system has set aside.

        Raises:
            ConfigError: there are not enough of these pages.
        """
        size_bytes = file_bytes(capacity_bytes, slab_bytes, HUGE_PAGE_BYTES if reserved else PAGE_BYTES)
        fd = create_memfd("kvoffloadd-arena", size_bytes, reserved=reserved)
        try:
            return cls(fd, capacity_bytes, slab_bytes, is_old=False)  # the mapping reserves all pages, or fails
        except LimitError as error:
            os.close(fd)
            if not reserved:
                raise
            raise ConfigError(
                f'memory.huge_pages = "reserved": {size_bytes // HUGE_PAGE_BYTES} huge pages are not available '
                f"({error}): the free ones are reserved by others, or a cpuset or cgroup denies them to this process"
            ) from None

    def ask_for_huge_pages(self) -> None:
        """Requests transparent huge pages, where the kernel allows and has them, for unpopulated memory."""
        self._mapping.ask_for_huge_pages()
        self._populate_step_bytes = HUGE_PAGE_BYTES

    def populate(self, threads: int, stop: threading.Event) -> None:
        """Makes the kernel provide every page, until `stop` is set. Blocks. Raises ResourceError if it has none."""
        address, step_bytes = self._mapping.address, self._populate_step_bytes
        populate(address, self.size_bytes, threads, stop, fd=self.fd, step_bytes=step_bytes)

    def count_huge_pages(self) -> None:
        """Sets `huge_bytes`, once the arena is populated. Blocks. Safe during `close`."""
        self.huge_bytes = found = huge_bytes(self.address, self.capacity_bytes)
        if found:
            log.info("memory: %s of %s are in huge pages", format_bytes(found), format_bytes(self.capacity_bytes))

    # --- the agent ---

    def record_agent(self, pid: int) -> None:
        """Records the process that is about to get the arena: a successor waits for its end, too."""
        _write(self._whole, _AGENT_AT, process(pid))

    def erase_agent(self) -> None:
        """Erases the record of the agent, which is dead."""
        _write(self._whole, _AGENT_AT, bytes(OWNER_BYTES))

    # --- starts that fail ---

    def record_attempt(self) -> None:
        """Counts a take-over that begins. If take-overs repeatedly end the process, the file becomes `unfit`."""
        self._attempts[0] += 1

    def withdraw_attempt(self) -> None:
        """Withdraws a take-over that fails for a reason outside the file."""
        self._attempts[0] -= 1

    def record_success(self) -> None:
        """Records the success of the take-over."""
        self._attempts[0] = 0

    # --- saved namespaces ---

    @property
    def names_bytes_max(self) -> int:
        """The limit of `save_names` in bytes."""
        return NAMES_BYTES - _NAMES.size

    def save_names(self, names: bytes) -> bool:
        """Saves names in place of the previous ones. Returns False, with nothing saved, if they are too many."""
        self._sequence = (self._sequence + 1) % SEQUENCE_MAX
        offset = PAGE_BYTES + (self._sequence % 2) * NAMES_BYTES
        fits = len(names) <= self.names_bytes_max
        kept = names if fits else b""
        head = struct.pack("<QQ", self._sequence, len(kept))
        _write(self._whole, offset + _NAMES.size, kept)
        _write(self._whole, offset, head + xxhash.xxh3_128_digest(head + kept))
        # The previous names map numbers to other namespaces: damage to these must not bring them back.
        _write(self._whole, PAGE_BYTES + (1 - self._sequence % 2) * NAMES_BYTES, bytes(_NAMES.size))
        return fits

    def names(self) -> bytes:
        """Returns the names saved last; empty if there are none."""
        return max(self._names(0), self._names(1))[1]

    def _names(self, copy: int) -> tuple[int, bytes]:
        offset = PAGE_BYTES + copy * NAMES_BYTES
        sequence, size, digest = _NAMES.unpack(_read(self._whole, offset, _NAMES.size))
        if size > NAMES_BYTES - _NAMES.size:
            return 0, b""
        kept = _read(self._whole, offset + _NAMES.size, size)
        valid = sequence < SEQUENCE_MAX and digest == xxhash.xxh3_128_digest(struct.pack("<QQ", sequence, size) + kept)
        return (sequence, kept) if valid else (0, b"")

    def close(self) -> None:
        """Unmaps the file and closes the descriptor; other processes that have the file keep its contents."""
        self._mapping.close()
        os.close(self.fd)


def check_pool_fits(memory: MemoryConfig) -> None:
    """Raises ConfigError if this machine has no room for a new pool: of huge pages, or of memory."""
    if memory.huge_pages == "reserved":
        check_huge_pages_fit(file_bytes(memory.capacity_bytes, memory.slab_bytes, HUGE_PAGE_BYTES))
    else:
        check_memory_fits(memory.capacity_bytes)


def inherit(
    fd: int | None, capacity_bytes: int, slab_bytes: int, check_fits: Callable[[int], None]
) -> ArenaFile | None:
    """Returns a pool that another process has left in this descriptor; None, with the descriptor closed, if it is
    unfit.

    `check_fits` is called with the bytes that the kernel has yet to provide, and raises if these are lacking.
    """
    if fd is None:
        return None
    pid = _await_owner(fd)
    reason = f"process {pid} still uses it" if pid else unfit(fd, capacity_bytes, slab_bytes)
    if not reason:
        if block_bytes(fd) < HUGE_PAGE_BYTES:  # such pages are not part of the available memory
            check_fits(lacking_bytes(fd))
        return ArenaFile(fd, capacity_bytes, slab_bytes, is_old=True)
    log.warning("memory: a cold start, because the old pool can't be used: %s", reason)
    if pid:
        os.close(fd)
    else:
        discard(fd)
    return None


def discard(fd: int) -> None:
    """Closes an unused arena file, and frees its memory now: another process may keep the descriptor for long."""
    try:
        with mmap.mmap(fd, 0) as whole:
            whole.madvise(mmap.MADV_REMOVE)
    except (OSError, ValueError) as error:
        log.warning("memory: the old pool is not freed yet: %s", error)
    os.close(fd)


def open_pool(path: Path, capacity_bytes: int, slab_bytes: int, check_fits: Callable[[int], None]) -> ArenaFile:
    """Returns the pool at this path, with its contents if it can be used. `check_fits` is called with the bytes that
    have yet to be provided, and raises if these are lacking.

    Raises:
        ConfigError: the file can't be used.
        TryAgainError: it can't be used yet.
    """
    fd = open_file(path)
    if (kind := file_system(fd)) not in _MEMORY:
        log.warning("memory.pool_file: %s is on %s: what is stored in memory is written to a disk, too", path, kind)
    try:
        if pid := _await_owner(fd):
            raise TryAgainError(f"memory.pool_file = {str(path)!r}: process {pid}, which used it before, does not end")
        reason = unfit(fd, capacity_bytes, slab_bytes)
        if not reason:
            if lacking_bytes(fd):
                _allocate(fd, file_bytes(capacity_bytes, slab_bytes, block_bytes(fd)), path)
            return ArenaFile(fd, capacity_bytes, slab_bytes, is_old=True)
        if os.fstat(fd).st_size:
            log.warning("memory: a cold start, because %s can't be used: %s", path, reason)
        os.ftruncate(fd, 0)
        if block_bytes(fd) < HUGE_PAGE_BYTES:  # such pages are not part of the available memory
            check_fits(capacity_bytes)
        empty_file(fd, file_bytes(capacity_bytes, slab_bytes, block_bytes(fd)), path)
        return ArenaFile(fd, capacity_bytes, slab_bytes, is_old=False)
    except BaseException:
        os.close(fd)
        raise


def _await_owner(fd: int) -> int:
    """Returns the pid of the process that had the pool, or of its agent, if it does not end."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return 0  # `unfit` reports it
    owner = os.pread(fd, OWNER_BYTES, _OWNER_AT)
    if len(owner) < OWNER_BYTES:
        return 0
    if pid := await_end(owner, END_S):
        return pid
    agent = os.pread(fd, OWNER_BYTES, _AGENT_AT)  # only now: its owner has written it until the owner's end
    return await_end(agent, END_S, kill=True) if len(agent) == OWNER_BYTES else 0


def file_bytes(capacity_bytes: int, slab_bytes: int, unit_bytes: int = PAGE_BYTES) -> int:
    """Returns the size of the whole file, a multiple of `unit_bytes`."""
    size = arena_offset(capacity_bytes, slab_bytes) + capacity_bytes
    return size + -size % unit_bytes


def arena_offset(capacity_bytes: int, slab_bytes: int) -> int:
    """Returns the bytes before the arena."""
    num_pages = capacity_bytes // PAGE_BYTES
    num_slabs = -(-num_pages // (slab_bytes // PAGE_BYTES))
    before = PAGE_BYTES + 2 * NAMES_BYTES + _pages(4 * num_slabs) + _pages(8 * RECORD_WORDS * num_pages)
    return before + -before % _ALIGN_BYTES


def block_bytes(fd: int) -> int:
    """Returns the block size of the file's file system: on hugetlbfs one of its pages, since files have whole ones."""
    return max(os.fstatvfs(fd).f_bsize, PAGE_BYTES)


def lacking_bytes(fd: int) -> int:
    """Returns the bytes of the file without memory, or without a place on its disk, so far."""
    found = os.fstat(fd)
    return max(0, found.st_size - found.st_blocks * 512)


def unfit(fd: int, capacity_bytes: int, slab_bytes: int) -> str:
    """Returns why this file can't be taken over; empty if it can."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        return "it is no file"
    if found.st_uid != os.geteuid():
        return f"it is of uid {found.st_uid}"
    header = os.pread(fd, _HEADER.size + 16, 0)
    if header[_HEADER.size :] != xxhash.xxh3_128_digest(header[: _HEADER.size]):
        return "it has no header" if not any(header) else "its header is damaged"
    magic, version, page_bytes, capacity, slab, _ = _HEADER.unpack(header[: _HEADER.size])
    if magic != _MAGIC or version != VERSION:
        return f"it has format {version}, this is {VERSION}"
    if (page_bytes, capacity, slab) != (PAGE_BYTES, capacity_bytes, slab_bytes):
        return f"it was made for {capacity} bytes in slabs of {slab}, not for {capacity_bytes} in slabs of {slab_bytes}"
    if is_of_another_boot(os.pread(fd, OWNER_BYTES, _OWNER_AT)):
        return "the machine has been started anew since: what was written last may be lost"
    if int.from_bytes(os.pread(fd, 4, _ATTEMPTS_AT), "little") >= ATTEMPTS_MAX:
        return f"{ATTEMPTS_MAX} starts have ended while they took it over"
    if found.st_size != file_bytes(capacity_bytes, slab_bytes, block_bytes(fd)):
        return f"it has {found.st_size} bytes"
    return ""


def open_file(path: Path) -> int:
    """Opens and locks the file at this path, made if there is none: no other daemon has it while the descriptor lives.

    Raises:
        ConfigError: it can't be opened, belongs to another user, or is another daemon's.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"memory.pool_file = {str(path)!r}: {error.strerror}") from None
    found = os.fstat(fd)
    why = ""
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        why = "must be a file of the daemon's user that nobody else may open"
    else:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            why = "another daemon has it"
    if why:
        os.close(fd)
        raise ConfigError(f"memory.pool_file = {str(path)!r}: {why}")
    return fd


def empty_file(fd: int, size_bytes: int, path: Path) -> None:
    """Makes an empty file one of this number of zeros, all allocated now: a write without room kills the process.

    Raises:
        ConfigError: there is no room.
    """
    try:
        _allocate(fd, size_bytes, path)
    except ConfigError:
        os.ftruncate(fd, 0)
        raise


def _allocate(fd: int, size_bytes: int, path: Path) -> None:
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        raise ConfigError(
            f"memory.pool_file = {str(path)!r}: no room for {size_bytes} bytes: {error.strerror}"
        ) from None


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _write(whole: U8Array, offset: int, data: bytes) -> None:
    whole[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


def _read(whole: U8Array, offset: int, size: int) -> bytes:
    return whole[offset : offset + size].tobytes()
