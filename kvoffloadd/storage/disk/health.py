"""The health of a root: its state, and counters of errors."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path
from typing import Final

from kvoffloadd.errors import KvOffloadError
from kvoffloadd.scheduling.lanes import CancelledWork
from kvoffloadd.storage.disk.files import describe_error, lacks_resources
from kvoffloadd.storage.disk.opening import NO_SPACE
from kvoffloadd.units import format_path

log = logging.getLogger(__name__)

LASTING_S = 60.0
"""A root that has worked for this long has recovered."""

RELAPSES_MAX = 4
"""How often the time between two tries doubles."""

_READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)


class RootState:
    """The state of a root. Plain text."""

    OK: Final = "ok"
    FULL: Final = "full"  # no space for a first segment, or for new data
    READ_ONLY: Final = "read-only"  # writes fail, reads go on
    OFF: Final = "off"  # not reachable, or not accepted


def is_trouble(error: BaseException) -> bool:
    """Returns whether this error concerns the disk or the system; otherwise it is a bug."""
    return isinstance(error, OSError | KvOffloadError | CancelledWork | MemoryError)


def is_full(error: BaseException) -> bool:
    """Returns whether the disk has no room for the data."""
    return getattr(error, "errno", None) in NO_SPACE


class Health:
    """A root's state and its reason, and the number of consecutive failures of reading and writing."""

    def __init__(self, path: Path) -> None:
        self.state: str = RootState.OFF
        self.reason = "not opened yet"
        self.reads_failed = 0
        self.writes_failed = 0
        self.write_errors = 0
        self._path = format_path(path)
        self._ok_since_s = 0.0
        self._relapses = 0

    def become(self, state: str, reason: str = "") -> None:
        """Changes the state, and logs the change."""
        reason = format_path(reason)
        if (state, reason) != (self.state, self.reason):
            level = logging.INFO if state == RootState.OK else logging.WARNING
            log.log(level, "disk %s: %s%s", self._path, state, f": {reason}" if reason else "")
        now = time.monotonic()
        if state == RootState.OK and self.state != RootState.OK:
            self._ok_since_s = now
        elif self.state == RootState.OK and state != RootState.OK:
            self._relapses = self._relapses + 1 if now - self._ok_since_s < LASTING_S else 0
        self.state, self.reason = state, reason

    def retry_factor(self) -> int:
        """Returns the factor by which the wait before the next try of a failing root grows: a root that repeatedly
        fails soon after it has worked is tried less and less often.
        """
        return 1 if self.state == RootState.OK else 1 << min(max(self._relapses - 1, 0), RELAPSES_MAX)

    def write_failed(self, error: BaseException, *, lasting: bool = False) -> None:
        """Counts a failed write, unless it failed by a bug. Changes to FULL or READ_ONLY if continuing is pointless;
        `lasting`: after the first failure.
        """
        if not is_trouble(error):
            # A user who could provoke this must not take the disk from all others. It puts no state here in doubt: an
            # unfinished write counts as never written, as after a crash.
            log.error("disk %s: a write failed because of a bug in the daemon", self._path, exc_info=error)
            return
        self.write_errors += 1
        if self.state == RootState.OFF or lacks_resources(error):
            return
        self.writes_failed += 1
        if lasting or self.writes_failed > 1 or getattr(error, "errno", None) in _READ_ONLY_ERRORS:
            self.stop_writing(error)

    def stop_writing(self, error: BaseException) -> None:
        """Changes to FULL or READ_ONLY, for this reason, until `Probe` finds that writes succeed."""
        self.become(RootState.FULL if is_full(error) else RootState.READ_ONLY, describe_error(error))

    def write_succeeded(self) -> None:
        """Notes a successful write into allocated space."""
        self.writes_failed = 0

    def figures(self) -> dict[str, str | int]:
        """Returns the figures for `status`."""
        return {"state": self.state, "reason": self.reason, "write_errors": self.write_errors}

    def reset(self) -> None:
        self.reads_failed = self.writes_failed = 0
