"""Logging to standard error: for a terminal, for the journal, or as JSON lines; repeats are held back and counted.

Ownership: a `RepeatFilter` is called by whichever thread logs, under its own lock. Keys and payloads are never logged:
they are derived from users' prompts.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffloadd.config import LogConfig

ROOT = "kvoffloadd"
"""Logger above all of the project's; other libraries' loggers are left alone."""

REPEAT_WINDOW_S = 60.0
REPEATS_MAX = 10
"""Records of one origin that pass in a window."""

ORIGINS_MAX = 1024
"""Origins remembered at once; there are about as many as logging calls in the code."""


class RepeatFilter(logging.Filter):
    """Lets `most` records of one origin (logger, level, unformatted message) pass in `window_s`, and counts the rest.

    An origin's next record after its window tells how many were held back. Records from ERROR upwards always pass.
    """

    def __init__(
        self,
        window_s: float = REPEAT_WINDOW_S,
        most: int = REPEATS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._window_s = window_s
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be written; may append the count of those held back to its message."""
        if record.levelno >= logging.ERROR:
            return True
        origin = (record.name, record.levelno, str(record.msg))
        now = self._clock()
        with self._lock:
            started, seen = self._seen.get(origin, (now, 0))
            expired = now - started >= self._window_s
            if expired:
                held_back, started, seen = max(0, seen - self._most), now, 0
            if origin not in self._seen and len(self._seen) >= ORIGINS_MAX:
                self._seen.clear()
            self._seen[origin] = (started, seen + 1)
        if expired and held_back:
            record.msg = f"{record.getMessage()} ... {held_back} more in the last {self._window_s:g} s"
            record.args = ()
        return seen < self._most


class ConsoleFormatter(logging.Formatter):
    """One line for people: local time, level, logger, message; a traceback follows on its own lines."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")


class JournalFormatter(logging.Formatter):
    """sd-daemon(3): each line starts with its syslog priority; the journal adds time and process."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Every line of the record, a traceback's too, with the same priority."""
        prefix = f"<{_priority(record.levelno)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (Unix seconds), `level`, `logger`, `message`, and `traceback` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, whatever is in its message."""
        fields = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


FORMATTERS: dict[str, type[logging.Formatter]] = {
    "console": ConsoleFormatter,
    "journal": JournalFormatter,
    "json": JsonFormatter,
}


def setup(config: LogConfig, stream: TextIO | None = None) -> None:
    """Directs the project's loggers to `stream` (None: standard error), and to nothing else. May be called again."""
    stream = stream if stream is not None else sys.stderr
    chosen = config.format if config.format != "auto" else ("journal" if _is_journal(stream) else "console")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FORMATTERS[chosen]())
    handler.addFilter(RepeatFilter())
    logger = logging.getLogger(ROOT)
    for old in logger.handlers[:]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(config.level.upper())
    logger.propagate = False


def _priority(level: int) -> int:
    """The syslog priority of a level."""
    if level >= logging.CRITICAL:
        return 2
    if level >= logging.ERROR:
        return 3
    if level >= logging.WARNING:
        return 4
    return 6 if level >= logging.INFO else 7


def _is_journal(stream: TextIO) -> bool:
    """Whether `stream` is the one that systemd connected to the journal: it names device and inode in JOURNAL_STREAM.

    This is no setting but a fact about the descriptor, which a child may have redirected since.
    """
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
