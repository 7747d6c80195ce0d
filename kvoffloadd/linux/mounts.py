"""What file system something is on."""

from __future__ import annotations

import os
from pathlib import Path


def file_system(fd: int, mounts: str | None = None) -> str:
    """The type of the file system that a descriptor is on, as mounts(5) has it; empty if it can't be told. `mounts`: of
    /proc/self/mountinfo.
    """
    # Not by st_dev: what btrfs tells there is not what it is mounted as.
    try:
        about = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace") if mounts is None else mounts
    except OSError:
        return ""
    number = next((line.split()[1] for line in about.splitlines() if line.startswith("mnt_id:")), "")
    for line in mounts.splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split()[0] == number:
            return rest.split()[0]
    return ""


def file_system_of(path: Path) -> str:
    """Returns the file system of what has this path, as `file_system` does."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return file_system(fd)
    finally:
        os.close(fd)
