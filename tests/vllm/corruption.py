"""A daemon whose loads bring zeros: one flipped bit changes no model's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.process import Daemon
from tests.vllm import zeroing


class ZeroingDaemon(Daemon):
    """A daemon as the others, but nothing that it loads is what was stored."""

    def __init__(self, folder: Path, *settings: str, **options: Any) -> None:
        super().__init__(folder, *settings, faults="corrupt_every=1", **options)

    def start(self) -> None:
        """See `Daemon.start`."""
        if "kvoffloadd" in self._command:
            self._command[self._command.index("kvoffloadd")] = zeroing.__name__
        super().start()
