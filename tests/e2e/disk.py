"""A daemon with a disk tier, and what a test does to its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.process import Daemon
from tests.e2e.waiting import until

MIB = 1 << 20
SETTINGS = ("disk.min_free_bytes=0", "disk.retry_s=0.2")


def disk_settings(*roots: tuple[Path, int]) -> tuple[str, ...]:
    """`disk.roots`, in bytes, and what makes small tests quick."""
    tables = ", ".join(f'{{ path = "{path}", capacity = {size} }}' for path, size in roots)
    return (f"disk.roots=[{tables}]", *SETTINGS)


def disk(daemon: Daemon) -> dict[str, Any]:
    """The disk's part of `status`."""
    found: dict[str, Any] = daemon.status()["disk"]
    return found


def demoted(daemon: Daemon, keys: int) -> None:
    """Wait until so many keys are on disk."""
    until(lambda: disk(daemon)["keys"] >= keys, f"{keys} keys are on disk, not {disk(daemon)}")


def segments(root: Path) -> list[Path]:
    """Its files."""
    return sorted((root / "segments").iterdir())


def file_bytes(root: Path) -> int:
    """What `du` would say."""
    return sum(path.stat().st_blocks * 512 for path in [root, *root.rglob("*")])
