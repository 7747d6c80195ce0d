"""`kvoffloadd` whose loads, given `--faults corrupt_every=1`, end as zeros instead of with a flipped bit."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from kvoffloadd.cli import main
from kvoffloadd.device import faults
from kvoffloadd.device.base import CopyRequest, CopyResult
from kvoffloadd.model import Direction


def _zero(self: Any, request: CopyRequest, result: CopyResult) -> CopyResult:
    if request.direction is Direction.LOAD:
        copies = request.work.make_all(request.direction)
        self.planted += len(copies)
        for address, size in zip(copies.dst.tolist(), copies.size.tolist(), strict=True):
            ctypes.memset(address, 0, size)
    return result


if __name__ == "__main__":
    faults.FaultyDevice._plant = _zero  # type: ignore[method-assign]
    sys.exit(main())
