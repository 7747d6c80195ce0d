"""Makes disk roots for the private daemons."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvoffloadd.model import PAGE_BYTES

SEGMENT_BYTES_MIN = 4 << 20
SHARE_OF_ROOT = 32
STUCK_S = 120.0
"""Longer than a run waits for any progress: a disk that hangs ends the run, a slow one has no effect."""
_REAL = Path("/var/tmp")


def disk_folder(where: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Makes a folder in `where`, or else on a disk: /tmp is often memory; /var/tmp outlasts a reboot and so is not."""
    parent = where or (_REAL if _REAL.is_dir() else None)
    return tempfile.TemporaryDirectory(prefix="kvo-disk-", dir=parent)


def disk_settings(root: Path, capacity_bytes: int) -> dict[str, str]:
    """Returns config values for one root. Many segments, so that they are filled, sealed and reused all the time. A
    disk that is delayed by a loaded machine is no fault of the daemon's, which would turn it off and find it
    unreadable.
    """
    return {
        "disk.roots": f'[{{ path = "{root}", capacity = {capacity_bytes} }}]',
        "disk.segment_bytes": str(max(capacity_bytes // SHARE_OF_ROOT // PAGE_BYTES * PAGE_BYTES, SEGMENT_BYTES_MIN)),
        "disk.min_free_bytes": "0",
        "disk.stuck_s": str(STUCK_S),
    }


def used_bytes(root: Path) -> int:
    """Returns the bytes that `du` reports: blocks of the directory and all in it."""
    total = 0
    for folder, _, names in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                total += os.stat(path, follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue  # removed since it was listed
    return total
