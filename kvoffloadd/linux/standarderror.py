"""Writes standard error from a separate thread: a reader that hangs (a container's log driver, a paused terminal) costs
lines but no service.

Where descriptor 2 is a pipe or a terminal, it is also replaced by a copy that never blocks, for code that writes to it
without Python: drivers, and the stacks of a crash. The copy is opened anew, since O_NONBLOCK applies to all that share
an open file description.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NoReturn

from kvoffloadd.errors import ConfigError

QUEUED_BYTES_MAX = 1 << 20
"""The bytes that may wait for a reader: some thousand lines."""

LAST_WORDS_S = 1.0
"""How long the end of the process waits for a reader."""


class LineQueue(io.RawIOBase):
    """Takes lines for `fd` at once, and writes them in order from a thread. Beyond `QUEUED_BYTES_MAX` the oldest are
    dropped, so that the last words remain. The next line follows the text that `describe_lost` makes of the number of
    lines missing before it.

    Ownership: `_changed` guards every field below it. Its lock is reentrant: a finalizer or a signal handler may write
    in the midst of a write.
    """

    def __init__(self, fd: int) -> None:
        """Starts the thread. Raises RuntimeError if none can be made."""
        super().__init__()
        self.describe_lost: Callable[[int], str] = "{} lines of the log are lost\n".format
        self._fd: Final = fd
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._queued_bytes = 0
        self._writing = False
        self._unreported = 0
        self.lost = 0
        """The number of lines that no reader will get."""
        threading.Thread(target=self._write_lines, name="kvo-stderr", daemon=True).start()

    def fileno(self) -> int:
        """Returns the descriptor that is written to."""
        return self._fd

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, data: Any, /) -> int:
        """Takes all of it, and returns at once. Any thread may call this."""
        line = bytes(data)
        with self._changed:
            self._lines.append(line)
            self._queued_bytes += len(line)
            while self._queued_bytes > QUEUED_BYTES_MAX and len(self._lines) > 1:
                self._queued_bytes -= len(self._lines.popleft())
                self._lose(1)
            self._changed.notify_all()
        return len(line)

    def drain(self, patience_s: float) -> bool:
        """Waits until all has been written, at most for this time."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._lines or self._writing), patience_s)

    def _lose(self, lines: int) -> None:
        self._unreported += lines
        self.lost += lines

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
                self._queued_bytes -= len(line)
                self._writing = True
                count, self._unreported = self._unreported, 0
            if count:
                line = self.describe_lost(count).encode("ascii", "backslashreplace") + line
            written = self._write(line)
            with self._changed:
                self._writing = False
                if not written:
                    self._lose(1)
                    self._unreported += count
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        """Writes a piece. Returns False if it can't be written now, and maybe never."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                room = select.poll()
                room.register(self._fd, select.POLLOUT)
                room.poll()
            except OSError:
                return False
        return True


def open_standard_streams() -> None:
    """Opens those of the descriptors 0 to 2 that are closed as /dev/null: output would go to a socket with such a
    number. Escapes characters that standard output can't encode, as Python does for standard error: paths and names
    come from outside.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def take_over() -> None:
    """Makes writes to `sys.stderr` wait for no reader from now on. Has no effect if that is not descriptor 2.

    Raises ConfigError if the thread can't be started.
    """
    if queue() is not None or not _is_descriptor_2():
        return
    _unblock(2)
    try:
        lines = LineQueue(2)
    except RuntimeError as error:
        raise ConfigError(f"the daemon can't start its threads ({error}): raise TasksMax or `ulimit -u`") from None
    sys.stderr = io.TextIOWrapper(lines, sys.stderr.encoding, "backslashreplace", write_through=True)
    atexit.register(lines.drain, LAST_WORDS_S)


def queue() -> LineQueue | None:
    """Returns the queue that writes `sys.stderr`, if that was taken over."""
    lines = getattr(sys.stderr, "buffer", None)
    return lines if isinstance(lines, LineQueue) else None


def lines_lost() -> int:
    """Returns the number of lines that no reader will get."""
    lines = queue()
    return lines.lost if lines is not None else 0


def leave(status: int) -> NoReturn:
    """Ends the process at once, except for the last words: a reader has `LAST_WORDS_S` to take them."""
    if (lines := queue()) is not None:
        lines.drain(LAST_WORDS_S)
    os._exit(status)


def _is_descriptor_2() -> bool:
    try:
        return sys.stderr.fileno() == 2
    except (OSError, ValueError):
        return False


def _unblock(fd: int) -> None:
    with contextlib.suppress(OSError):  # another user's pipe, or no /proc: the thread alone waits then
        if not (stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd)):
            return  # a file keeps its place in it, and a socket can't be opened again
        copy = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        os.dup2(copy, fd)
        os.close(copy)
