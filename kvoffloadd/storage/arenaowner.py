"""The record of the processes that use an arena file, so that a successor can wait for their end.

A killed process releases its locks before its GPUs have released its memory: unfinished copies would then land in slots
that the successor has given to other keys. The kernel reports a process as dead only after both. The same holds for the
agent, whose transfers from a remote store continue until its end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
from pathlib import Path

_OWNER = struct.Struct("<QQ16s")  # pid, start in clock ticks since the boot, which boot; zeros: no owner
OWNER_BYTES = _OWNER.size
_NOBODY = bytes(16)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_process() -> bytes:
    """Returns `OWNER_BYTES` that name this process."""
    return process(os.getpid())


def process(pid: int) -> bytes:
    """Returns `OWNER_BYTES` that name a living process."""
    return _OWNER.pack(pid, _start_ticks(pid), _boot())


def is_of_another_boot(owner: bytes) -> bool:
    """Returns whether the process ran before the last boot, which may have lost its last writes to a file on a disk."""
    boot = _OWNER.unpack(owner)[2] if len(owner) == OWNER_BYTES else _NOBODY
    return boot not in (_NOBODY, _boot())


def await_end(owner: bytes, patience_s: float, *, kill: bool = False) -> int:
    """Returns the pid of the process if it still lives after these seconds; 0 if it is dead. `kill`: kills it first.

    A process in another pid namespace is invisible, and counts as dead.
    """
    pid, start_ticks, boot = _OWNER.unpack(owner)
    if boot != _boot() or not 0 < pid < 1 << 31 or pid == os.getpid():
        return 0
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return 0
    try:
        if _start_ticks(pid) != start_ticks:  # the number has been reused
            return 0
        if kill:
            with contextlib.suppress(OSError):  # it is dead, or another user's
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return 0 if poll.poll(1000 * patience_s) else int(pid)
    finally:
        os.close(pidfd)


def _boot() -> bytes:
    """Returns the kernel's boot id, which is new at each boot."""
    return bytes.fromhex(BOOT_ID.read_text().strip().replace("-", ""))


def _start_ticks(pid: int) -> int:
    """Returns field 22 of proc(5)'s stat; the name before it may hold spaces. 0: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return 0
