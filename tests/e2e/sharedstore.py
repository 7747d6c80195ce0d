"""Settings of daemons that share a store, and a store that is a directory of this host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvoffloadd.agentwire.names import PREFIX

_PATIENT = {
    "remote.push": "seal",
    "remote.lookup_s": "10",
    "remote.fetch_s": "60",
    "remote.prefetch_s": "60",
    "remote.stuck_s": "60",
    "remote.min_keys": "1",
    "remote.miss_ttl_s": "0",
    "remote.era_poll_s": "0.05",
}


def patient(engine: str, more: Mapping[str, str]) -> list[str]:
    """Returns the settings of a daemon that uses a store through this engine, as "section.key=value". No deadline is
    near, because the machine may be busy; `more` overrides the settings.
    """
    return [f"{name}={value}" for name, value in ({"remote.engine": engine} | _PATIENT | dict(more)).items()]


class SharedStore:
    """The directory of engine "memory", and the faults of each daemon's agent."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "store"
        self.folder = folder

    def settings(self, *more: str) -> list[str]:
        """Returns the settings of a daemon that uses it. Generous deadlines: the machine may be busy."""
        here = {"remote.directory": str(self.path)} | dict(setting.split("=", 1) for setting in more)
        return patient("memory", here)

    def objects(self) -> list[Path]:
        """Keys, without pointers and markers."""
        return [path for path in self.path.iterdir() if path.name.count("%2F") > 3 and path.name.startswith(PREFIX)]

    def small(self) -> list[Path]:
        """Pointers and markers."""
        return [path for path in self.path.iterdir() if path.name.count("%2F") <= 3 and path.name.startswith(PREFIX)]

    def pointer(self) -> Path:
        (found,) = [path for path in self.small() if path.name.endswith("%2Fera")]
        return found

    def markers(self) -> list[Path]:
        return [path for path in self.small() if "%2Fera%2F" in path.name]
