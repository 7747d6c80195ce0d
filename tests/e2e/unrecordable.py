"""Daemons that can't record a clear: a disk takes no manifest, or the remote store does not answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts.harness.daemon import Daemon
from scripts.harness.disk import ManifestTrap
from tests.e2e.disk import MIB, disk_settings

WAYS = ("disk", "store")


@dataclass(frozen=True)
class Unrecordable:
    """What stops clears from being recorded in one of the WAYS, from `spoil` to `mend`."""

    way: str
    folder: Path

    def settings(self) -> Iterable[str]:
        if self.way == "disk":
            return disk_settings((self.folder / "disk", 64 * MIB))
        return ("remote.engine=memory", f"remote.directory={self.folder / 'store'}", "remote.stuck_s=600")

    @property
    def faults(self) -> str:
        return f"remote={self._switch}" if self.way == "store" else ""

    @property
    def place(self) -> str:
        """Returns the place as a daemon names it."""
        return str(self.folder / "disk") if self.way == "disk" else "remote"

    def spoil(self) -> None:
        if self.way == "disk":
            self._trap.set()
        else:
            self._switch.write_text("read_delay_s=3600\nwrite_delay_s=3600\nremove_delay_s=3600\n")

    def mend(self) -> None:
        if self.way == "disk":
            self._trap.remove()
        else:
            self._switch.write_text("")

    @property
    def _trap(self) -> ManifestTrap:
        return ManifestTrap(self.folder / "disk")

    @property
    def _switch(self) -> Path:
        return self.folder / "switch"


def epoch(daemon: Daemon) -> int:
    """Returns the epoch of the only namespace."""
    (row,) = daemon.status()["namespaces"]
    return int(row["epoch"])


def requests(daemon: Daemon) -> int:
    """Counts the requests of all sessions but that of the observer who asks."""
    return sum(row["requests"] for row in daemon.status()["sessions"] if row["role"] != "observer")
