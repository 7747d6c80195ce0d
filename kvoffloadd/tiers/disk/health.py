"""How a root is doing."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)


def said(error: BaseException) -> str:
    """An error in words, without a number, for people who read `status`."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


class State:
    """OK; FULL: no space for a first segment; READ_ONLY: writes fail, reads go on; OFF: not reachable. Plain text."""

    OK: Final = "ok"
    FULL: Final = "full"
    READ_ONLY: Final = "read-only"
    OFF: Final = "off"


class Health:
    """A root's state, why, and how often reading and writing failed in a row."""

    def __init__(self, path: Path) -> None:
        self.state: str = State.OFF
        self.reason = "not opened yet"
        self.reads_failed = 0
        self.writes_failed = 0
        self.write_errors = 0
        self._path = path

    def become(self, state: str, reason: str = "") -> None:
        """Change; logged."""
        if (state, reason) != (self.state, self.reason):
            level = logging.INFO if state == State.OK else logging.WARNING
            log.log(level, "disk %s: %s%s", self._path, state, f": {reason}" if reason else "")
        self.state, self.reason = state, reason

    def write_failed(self, error: BaseException) -> bool:
        """Count it, and give up writing where it makes no sense to go on. True: there is no space for more."""
        self.write_errors += 1
        self.writes_failed += 1
        if self.state == State.OFF:
            return False
        number = getattr(error, "errno", None)
        if number in _FULL_ERRORS:
            return True
        if self.writes_failed > 1 or number in _READ_ONLY_ERRORS:
            self.become(State.READ_ONLY, said(error))
        return False

    def wrote(self) -> None:
        """A write has worked."""
        self.writes_failed = 0

    def figures(self) -> dict[str, str | int]:
        """For `status`."""
        return {"state": self.state, "reason": self.reason, "write_errors": self.write_errors}

    def forget(self) -> None:
        """Count anew."""
        self.reads_failed = self.writes_failed = 0
