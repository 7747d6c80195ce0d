"""A disk root that a script gives to its daemon, and what lies in it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk.files import Files, is_segment_name
from kvoffloadd.storage.disk.recovery import Kind, recover_segment
from scripts.harness.damage import flip

if TYPE_CHECKING:
    import numpy as np

SEGMENT_BYTES_MIN = 4 << 20
SHARE_OF_ROOT = 32
STUCK_S = 120.0
"""Longer than a run waits for any progress: a disk that hangs ends the run, one that is slow does nothing."""
_REAL = Path("/var/tmp")


def disk_folder(where: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A folder in `where`, or on a disk: /tmp is often memory, /var/tmp outlasts a reboot and so is not."""
    parent = where or (_REAL if _REAL.is_dir() else None)
    return tempfile.TemporaryDirectory(prefix="kvo-disk-", dir=parent)


def file_system(path: Path) -> str:
    """Type of the file system that a path lies on; empty if the kernel does not tell."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return ""


def disk_settings(root: Path, capacity_bytes: int) -> dict[str, str]:
    """Config values for one root. Many segments, so that they fill, are sealed and come again all the time. A disk that
    a loaded machine keeps waiting is no fault of the daemon's, which would take it off and find it unreadable.
    """
    return {
        "disk.roots": f'[{{ path = "{root}", capacity = {capacity_bytes} }}]',
        "disk.segment_bytes": str(max(capacity_bytes // SHARE_OF_ROOT // PAGE_BYTES * PAGE_BYTES, SEGMENT_BYTES_MIN)),
        "disk.min_free_bytes": "0",
        "disk.stuck_s": str(STUCK_S),
    }


def used_bytes(root: Path) -> int:
    """What `du` says: blocks of the directory and all in it."""
    total = 0
    for folder, _, names in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                total += os.stat(path, follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue  # gone since it was listed
    return total


def is_idle(status: dict[str, Any]) -> bool:
    """Nothing waits to be written to disk, or is being written."""
    disk = status["disk"]
    waiting = status["cache"]["unsealed"] or disk["backlog_bytes"] or any(root["writing"] for root in disk["roots"])
    return not waiting


@dataclass(frozen=True, slots=True)
class Planted:
    """A record of which one bit was flipped: in which file, at which page."""

    segment: str
    page: int


class Planter:
    """Flips bits in records on disk, beside the daemon that uses them. `planted`: each of them."""

    def __init__(self, root: Path, rng: np.random.Generator) -> None:
        self._segments = root / "segments"
        self._rng = rng
        self._files = Files()
        self.planted: set[Planted] = set()

    def plant(self) -> bool:
        """Flip a bit of one record, in its header or its payload. False: there was none."""
        names = sorted(filter(is_segment_name, os.listdir(self._segments))) if self._segments.is_dir() else []
        if not names:
            return False
        name = names[int(self._rng.integers(0, len(names)))]
        folder = self._files.open_directory(self._segments)
        try:
            found = recover_segment(self._files, folder, name, direct=False)
        except OSError:
            return False
        finally:
            self._files.close(folder)
        if found.kind not in (Kind.SEALED, Kind.WALKED) or not len(found.entries):
            return False
        entry = found.entries[int(self._rng.integers(0, len(found.entries)))]
        page = int(entry["page"])
        in_payload = PAGE_BYTES + int(self._rng.integers(0, int(entry["payload_bytes"])))
        in_header = int(self._rng.integers(0, PAGE_BYTES))
        flip(self._segments / name, page * PAGE_BYTES + (in_payload if self._rng.random() < 0.7 else in_header))
        self.planted.add(Planted(name, page))
        return True
