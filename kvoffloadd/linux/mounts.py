"""Finds the file system of a descriptor or path."""

from __future__ import annotations

import os
from pathlib import Path


def file_system(fd: int, mounts: str | None = None) -> str:
    """Returns the type of a descriptor's file system, as in mounts(5); empty if it is unknown. `mounts`: the text of
    /proc/self/mountinfo.
    """
    # Not by st_dev: on btrfs it is not the device number of the mount.
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
    """Returns the file system of the file with this path, as `file_system` does."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return file_system(fd)
    finally:
        os.close(fd)
