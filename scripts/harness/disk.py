"""A disk root that a script gives to its daemon, and what lies in it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk.files import Files, is_segment_name
from kvoffloadd.storage.disk.recovery import Kind, recover_segment
from kvoffloadd.testing.wait import until
from scripts.harness.damage import flip


def is_idle(status: dict[str, Any]) -> bool:
    """Nothing waits to be written to disk, or is being written."""
    disk = status["disk"]
    waiting = status["cache"]["unsealed"] or disk["backlog_bytes"] or any(root["writing"] for root in disk["roots"])
    return not waiting


@dataclass(frozen=True, slots=True)
class ManifestTrap:
    """While it is set this root takes no new manifest, so that it can record no clear: its temporary name is taken."""

    root: Path

    def set(self) -> None:
        """Idempotent, as `remove` is."""
        until(self._is_set, "the name is free of the manifest that is being written")

    def _is_set(self) -> bool:
        try:
            (self._place / "x").mkdir(parents=True, exist_ok=True)
        except (NotADirectoryError, FileExistsError):  # a manifest is being written this moment
            return False
        return True

    def remove(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def _place(self) -> Path:
        return self.root / "manifest.new"


@dataclass(frozen=True, slots=True)
class Planted:
    """A record that has one flipped bit: in which file, at which page."""

    segment: str
    page: int


class Planter:
    """Flips bits in records on disk, while the daemon uses them. `planted`: each of them."""

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
