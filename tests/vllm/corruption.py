"""`kvoffloadd` whose loads bring zeros, given `--faults corrupt_every=1`: one flipped bit changes no model's answer."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from kvoffloadd.cli import main
from kvoffloadd.device import faults
from kvoffloadd.device.base import CopyResult
from kvoffloadd.device.plan import Copies
from kvoffloadd.model import Direction
from tests.e2e.process import Daemon


class ZeroingDaemon(Daemon):
    """A daemon as the others, but nothing that it loads is what was stored."""

    def __init__(self, folder: Path, *settings: str, **options: Any) -> None:
        super().__init__(folder, *settings, faults="corrupt_every=1", **options)

    def start(self) -> None:
        """See `Daemon.start`."""
        self._command[self._command.index("kvoffloadd")] = __name__
        super().start()


def _zero(self: Any, direction: Direction, copies: Copies, result: CopyResult) -> CopyResult:
    if direction is Direction.LOAD:
        self.planted += len(copies)
        for address, size in zip(copies.dst.tolist(), copies.size.tolist(), strict=True):
            ctypes.memset(address, 0, size)
    return result


if __name__ == "__main__":
    faults.FaultyDevice._plant = _zero  # type: ignore[method-assign]
    sys.exit(main())
