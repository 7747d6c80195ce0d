"""Tests which file system a file is on, as the kernel reports it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoffloadd.linux.mounts import file_system, file_system_of

ROWS = "{mount} 1 {device} /of /here rw,noatime shared:1 - {kind} /dev/sda rw"


@pytest.mark.parametrize("kind", ["ext4", "btrfs"])
def test_the_mount_counts_and_not_the_device(tmp_path: Path, kind: str) -> None:
    """The device that btrfs reports for a file is not the device of its mount; another mount may have that number."""
    fd = os.open(tmp_path, os.O_PATH)
    about = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii").split()
    mount, device = about[about.index("mnt_id:") + 1], os.fstat(fd).st_dev
    rows = [
        ROWS.format(mount=f"{mount}1", device=f"{os.major(device)}:{os.minor(device)}", kind="tmpfs"),
        ROWS.format(mount=mount, device="0:77", kind=kind),
    ]
    assert file_system(fd, "\n".join(rows)) == kind
    assert file_system(fd, rows[0]) == ""
    assert file_system(fd) == file_system_of(tmp_path) != ""
    os.close(fd)
    assert file_system(fd) == "", "it is closed"


def test_memory_is_told() -> None:
    fd = os.memfd_create("memory")
    assert file_system(fd) in ("", "tmpfs"), "the kernel's own mount is in no table"
    os.close(fd)
