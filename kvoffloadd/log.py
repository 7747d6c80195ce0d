"""Logging to standard error: for a terminal, for the journal, or as JSON lines; repeats are held back and counted.

No log call waits for a reader: `standarderror` has a thread for that, and counts lost lines.

Log lines contain names from peers, which must not imitate a record of the daemon or move a terminal: every character
that is not printable, including line breaks, is escaped where lines are made. Lines of tracebacks are indented.

Ownership: any thread that logs calls a `RepeatFilter`, under the filter's own lock. Keys and payloads are never logged:
they are derived from users' prompts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from kvoffloadd.config import LogConfig
from kvoffloadd.linux import standarderror

ROOT = "kvoffloadd"
"""The logger above all of the project's; other libraries' loggers are left alone."""

REPEAT_WINDOW_S = 60.0
REPEATS_MAX = 10
"""The records of one origin that pass in a window."""

ORIGINS_MAX = 1024
"""Origins remembered at once; there are about as many as logging calls in the code."""

Origin = tuple[str, int, str, str]

JOURNAL = Path("/run/systemd/journal/socket")
JOURNAL_MESSAGE_BYTES_MAX = 48 << 10
"""The most bytes of a message, which goes to the journal in one datagram."""

_SUMMARY = "kvo_summary"


class RepeatFilter(logging.Filter):
    """Lets `most` records of one origin pass in `window_s`, and counts the rest. Critical ones always pass.

    An origin is a logger, a level and an unformatted message; for records with a traceback, also the place where it was
    raised. The origin's next record after its window, or else `overdue`, reports how many were held back.
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
        self._seen: dict[Origin, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to write the record; may append the number of records held back to its message."""
        if record.levelno >= logging.CRITICAL or hasattr(record, _SUMMARY):
            return True
        origin = (record.name, record.levelno, str(record.msg), _raised_at(record))
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
            record.kvo_fields = {**_fields(record), "held_back": held_back}
            record.msg = f"{record.getMessage()} ... {self._describe(held_back)}"
            record.args = ()
        return seen < self._most

    def overdue(self, *, ending: bool = False) -> list[logging.LogRecord]:
        """Returns a record for each origin that has been quiet since a window in which some were held back, and forgets
        these origins. `ending`: includes windows that are not over.
        """
        now = self._clock()
        with self._lock:
            over = {
                origin: seen
                for origin, (started, seen) in self._seen.items()
                if ending or now - started >= self._window_s
            }
            for origin in over:
                del self._seen[origin]
        records = []
        for (name, level, message, _), seen in over.items():
            if seen > self._most:
                text = f"{self._describe(seen - self._most)}, of: {message}"
                record = logging.LogRecord(name, level, "", 0, text, (), None)
                record.kvo_fields = {"held_back": seen - self._most}
                setattr(record, _SUMMARY, True)
                records.append(record)
        return records

    def _describe(self, held_back: int) -> str:
        return f"{held_back} more in the last {self._window_s:g} s"


def _raised_at(record: logging.LogRecord) -> str:
    """Returns where the exception of a record was raised; empty if it has none."""
    if not record.exc_info or record.exc_info[2] is None:
        return ""
    *_, (frame, line) = traceback.walk_tb(record.exc_info[2])
    return f"{frame.f_code.co_filename}:{line}"


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """Returns the subjects of a record by name: the arguments of a message that names them, as "%(uid)d"."""
    kept = getattr(record, "kvo_fields", None)
    if kept is None:
        kept = record.args if isinstance(record.args, Mapping) else {}
    return {name: value if isinstance(value, int | float) else printable(str(value)) for name, value in kept.items()}


def printable(text: str) -> str:
    """Returns `text` with every character escaped that is not printable: control characters, line breaks, characters
    that turn the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class _Formatter(logging.Formatter):
    """Formats a record's message as one line, and indents each line of its traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join("  " + printable(line) for line in super().formatException(ei).split("\n"))


class ConsoleFormatter(_Formatter):
    """Formats one line for people: local time, level, logger, message; a traceback follows on separate lines."""

    default_time_format = "%H:%M:%S"
    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")


class JournalFormatter(_Formatter):
    """Formats lines for sd-daemon(3): each starts with its syslog priority; the journal adds time and process."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Returns every line of the record, including a traceback's, with the same priority."""
        prefix = f"<{_priority(record.levelno)}>"
        return "\n".join(prefix + line for line in super().format(record).split("\n"))


class JsonFormatter(_Formatter):
    """Formats one JSON object a line: `time` (Unix seconds), `level`, `logger`, `message`, the names in the message,
    and `traceback` if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line, whatever its message contains."""
        fields = {
            **_fields(record),
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class JournalHandler(logging.StreamHandler[TextIO]):
    """Sends the journal records with fields: MESSAGE, PRIORITY, LOGGER, and KVO_UID and the like for the names in a
    message. If the journal's socket does not accept a record, lines with priorities go to `stream`, which is also
    connected to the journal, and has a thread that can wait.
    """

    def __init__(self, stream: TextIO, path: Path = JOURNAL) -> None:
        super().__init__(stream)
        self.setFormatter(JournalFormatter())
        self._path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """See the class."""
        try:
            self._socket.sendto(self._encoded(record), self._path)
        except (OSError, ValueError):
            super().emit(record)

    def close(self) -> None:
        """Ends the connection: the journal gets no more records."""
        self._socket.close()
        super().close()

    def _encoded(self, record: logging.LogRecord) -> bytes:
        fields = {
            "MESSAGE": _plain.format(record),
            "PRIORITY": _priority(record.levelno),
            "SYSLOG_IDENTIFIER": ROOT,
            "LOGGER": record.name,
            **{f"KVO_{name.upper()}": value for name, value in _fields(record).items()},
        }
        return b"".join(_journal_field(name, str(value)) for name, value in fields.items())


_plain = _Formatter("%(name)s: %(message)s")


def _journal_field(name: str, value: str) -> bytes:
    """Encodes a field in systemd's native journal protocol: a line, or, for text with line breaks, its length and the
    text.
    """
    data = value.encode(errors="replace")[:JOURNAL_MESSAGE_BYTES_MAX]
    if b"\n" not in data:
        return b"%s=%s\n" % (name.encode(), data)
    return b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(data)), data)


FORMATTERS: dict[str, type[logging.Formatter]] = {
    "console": ConsoleFormatter,
    "journal": JournalFormatter,
    "json": JsonFormatter,
}


def setup(config: LogConfig, stream: TextIO | None = None) -> None:
    """Directs the project's loggers to `stream` (None: standard error), and to nothing else. May be called again.

    Where standard error leads to the journal, the journal gets records with fields instead.
    """
    is_own = stream is None
    stream = stream if stream is not None else sys.stderr
    chosen = config.format if config.format != "auto" else ("journal" if _is_journal(stream) else "console")
    handler: logging.StreamHandler[TextIO]
    if chosen == "journal" and is_own and _is_journal(stream) and JOURNAL.is_socket():
        handler = JournalHandler(stream)
    else:
        handler = logging.StreamHandler(stream)
        handler.setFormatter(FORMATTERS[chosen]())
    if is_own and (lines := standarderror.queue()) is not None:
        lines.describe_lost = partial(_lost_line, handler)
    handler.addFilter(RepeatFilter())
    logger = logging.getLogger(ROOT)
    log_held_back(ending=True)
    for old in logger.handlers[:]:
        logger.removeHandler(old)
        if isinstance(old, JournalHandler):
            old.close()
    logger.addHandler(handler)
    logger.setLevel(config.level.upper())
    logger.propagate = False


def _lost_line(handler: logging.Handler, lost: int) -> str:
    record = logging.LogRecord(
        f"{ROOT}.log", logging.WARNING, "", 0, "%(lost)d lines of the log are lost: standard error did not take them",
        ({"lost": lost},), None,
    )  # fmt: skip
    return f"{handler.format(record)}\n"


def log_held_back(*, ending: bool = False) -> None:
    """Logs how many records were held back that no later record has reported: for windows that are over, or with
    `ending` for all.
    """
    for handler in logging.getLogger(ROOT).handlers:
        for repeats in handler.filters:
            if isinstance(repeats, RepeatFilter):
                for record in repeats.overdue(ending=ending):
                    handler.handle(record)


async def log_held_back_forever() -> None:
    """Calls `log_held_back` from time to time, until cancelled."""
    while True:
        await asyncio.sleep(REPEAT_WINDOW_S)
        log_held_back()


def _priority(level: int) -> int:
    """Returns the syslog priority of a level."""
    if level >= logging.CRITICAL:
        return 2
    if level >= logging.ERROR:
        return 3
    if level >= logging.WARNING:
        return 4
    return 6 if level >= logging.INFO else 7


def _is_journal(stream: TextIO) -> bool:
    """Returns whether systemd connected `stream` to the journal: JOURNAL_STREAM names its device and inode.

    A setting could not replace this: a child may have redirected the descriptor since.
    """
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
