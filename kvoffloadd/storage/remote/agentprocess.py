"""One process of the agent, from its start to its end: its socket, its pidfd and its output. Event loop only, except
`spawn_agent`.

None of its messages is trusted, and it can't cost more than a few buffers: its output is cut and counted, and its
frames are capped. The owner of this object kills it for any other invalid message.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import kvoffloadd
from kvoffloadd.agentwire.frames import TEXT_MAX, Frames, FromAgent
from kvoffloadd.errors import FramingError
from kvoffloadd.linux.sockets import pass_descriptors

log = logging.getLogger(__name__)

MODULE: Final = "kvoffloadd.agent"
LINE_BYTES: Final = 400
"""The length at which a line of the agent's output is cut in the log."""
LINES_BURST: Final = 40
LINES_PER_S: Final = 1.0
"""The rate of logged lines after the first few; the rest is counted."""

_READ_BYTES = 64 << 10
_READS_PER_TURN = 8
_NOT_INHERITED = ("NOTIFY_SOCKET", "LISTEN_", "WATCHDOG_", "FDSTORE", "JOURNAL_STREAM")
_NAMES = re.compile(rb"kvo1/[0-9A-Za-z/.]*")


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process that has begun, and the daemon's ends: non-blocking socket, pipe of its output, pidfd, and the pipe
    that ends the process when it is closed.
    """

    child: subprocess.Popen[bytes]
    sock: socket.socket
    output_fd: int
    pidfd: int
    life_fd: int


def printable(text: str) -> str:
    """Returns one line of bounded length of the agent's text."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:TEXT_MAX])


def agent_command(python: str) -> list[str]:
    """Returns the command. `python`: an interpreter with this release of kvoffloadd; empty: the daemon's."""
    return [python or sys.executable, "-P", "-m", MODULE]


def agent_environment(python: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the daemon's environment without systemd's variables for the daemon alone."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_NOT_INHERITED)}
    if not python:
        ours = str(Path(kvoffloadd.__file__).parent.parent)
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (ours, environment.get("PYTHONPATH", ""))))
    return kept


def spawn_agent(command: Sequence[str], environment: Mapping[str, str]) -> Spawned:
    """Starts the agent. Blocks for a moment.

    The calling thread must live as long as the daemon: the agent makes the kernel kill it when its parent thread ends.
    No Python code runs between fork and exec. Raises OSError.
    """
    with contextlib.ExitStack() as kept, contextlib.ExitStack() as passed:  # closed if this fails; in any case
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        kept.callback(ours.close)
        passed.callback(theirs.close)
        output, printed = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        kept.callback(os.close, output)
        passed.callback(os.close, printed)
        watched, life = os.pipe2(os.O_CLOEXEC)
        kept.callback(os.close, life)
        passed.callback(os.close, watched)
        os.set_blocking(printed, True)
        child = subprocess.Popen(
            command, stdin=theirs.fileno(), stdout=printed, stderr=printed, env=environment, pass_fds=[watched],
            start_new_session=True,
        )  # fmt: skip
        try:
            pidfd = os.pidfd_open(child.pid)  # only this process reaps it, so the number is still valid
            kept.callback(os.close, pidfd)
            _kill_when_closed(watched, child.pid)
        except BaseException:
            child.kill()
            raise
        kept.pop_all()
    pass_descriptors(ours, allowed=False)  # closing descriptors that it could send might block
    ours.setblocking(False)
    return Spawned(child, ours, output, pidfd, life)


def _kill_when_closed(watched: int, pid: int) -> None:
    """Makes the kernel kill this process when the other end of the pipe is closed, as at the daemon's end.

    The process requests the same by itself (PR_SET_PDEATHSIG), but only once its interpreter runs: a process stopped
    before that would stay for ever.
    """
    fcntl.fcntl(watched, fcntl.F_SETOWN, pid)
    fcntl.fcntl(watched, fcntl.F_SETSIG, int(signal.SIGKILL))
    fcntl.fcntl(watched, fcntl.F_SETFL, fcntl.fcntl(watched, fcntl.F_GETFL) | fcntl.FASYNC)


class AgentProcess:
    """`on_message` receives each message, in order, and may raise FramingError. `on_silence` is called once, when no
    more messages come. `on_end` is called once, with the reason, when the kernel reports the process as dead: then it
    touches no memory any more.
    """

    def __init__(
        self,
        spawned: Spawned,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[FromAgent], None],
        on_silence: Callable[[], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Takes over the result of `spawn_agent`."""
        self.pid: Final = spawned.child.pid
        self.killed = False
        self.ended = False
        self._spawned = spawned
        self._loop = loop
        self._on_message = on_message
        self._on_silence = on_silence
        self._on_end = on_end
        self._frames = Frames(by_agent=True)
        self._unsent = bytearray()
        self._why = ""
        self._listening = True
        self._output = _Output(spawned.output_fd, self.pid)
        loop.add_reader(spawned.sock, self._read)
        loop.add_reader(spawned.output_fd, self._print)
        loop.add_reader(spawned.pidfd, self._end)

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Sends data now, or as soon as the agent takes it. `fds` go with its first bytes: only while nothing waits."""
        if not self._listening:
            return
        if self._unsent:
            self._unsent += frame
            return
        try:
            sock = self._spawned.sock
            sent = socket.send_fds(sock, [frame], fds) if fds else sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.kill(f"its socket is broken: {error.strerror}")
            return
        if sent < len(frame):
            if fds and not sent:
                self.kill("it takes no descriptors")
                return
            self._unsent += frame[sent:]
            self._loop.add_writer(self._spawned.sock, self._write)

    def hang_up(self) -> None:
        """Ends the calls: the agent should end by itself."""
        self._why = self._why or "it was told to"
        with contextlib.suppress(OSError):
            self._spawned.sock.shutdown(socket.SHUT_WR)

    def kill(self, why: str) -> None:
        """Kills the agent. `on_end` follows when it is dead, which a driver of its network card may delay."""
        if self.killed or self.ended:
            return
        self.killed = True
        self._why = why
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._spawned.pidfd, signal.SIGKILL)
        self._stop_listening()

    # --- the event loop's callbacks ---

    def _read(self) -> None:
        for _ in range(_READS_PER_TURN):
            try:
                data = self._spawned.sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.kill(f"its socket is broken: {error.strerror}")
                return
            if not data:
                self._stop_listening()
                # It ends by itself, or has closed its socket and lives on, which is useless.
                self._loop.call_later(1.0, self.kill, "it has closed its socket")
                return
            try:
                self._frames.receive(data)
                while self._listening and (message := self._frames.next()) is not None:
                    self._on_message(message)  # type: ignore[arg-type]  # the decoder returns no other messages
            except FramingError as error:
                self.kill(f"it sent an invalid message: {error}")
            if not self._listening:
                return

    def _write(self) -> None:
        try:
            sent = self._spawned.sock.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.kill(f"its socket is broken: {error.strerror}")
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._spawned.sock)

    def _print(self) -> None:
        if not self._output.read():
            self._loop.remove_reader(self._spawned.output_fd)

    def _stop_listening(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._spawned.sock)
            self._loop.remove_writer(self._spawned.sock)
            self._unsent.clear()
            self._on_silence()

    def _end(self) -> None:
        """Handles a readable pidfd: the kernel has reclaimed all resources of the process."""
        spawned = self._spawned
        self.ended = True
        self._stop_listening()
        for fd in (spawned.pidfd, spawned.output_fd):
            self._loop.remove_reader(fd)
        self._output.finish()
        status = _status(spawned.child)
        spawned.sock.close()
        os.close(spawned.output_fd)
        os.close(spawned.pidfd)
        os.close(spawned.life_fd)
        self._on_end(f"{self._why} ({status})" if self._why else status)


def _status(child: subprocess.Popen[bytes]) -> str:
    """Returns how a dead child has ended, and removes it from the kernel's table."""
    code = child.poll()
    if code is None:
        child.returncode = -1  # another part of the process has reaped it: nothing is left to wait for
        return "it has ended"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"it was ended by {signal.Signals(-code).name}"
    return f"it has ended with status {code}"


class _Output:
    """Logs a limited amount of the agent's output. Names of keys, which come from prompts, stay out."""

    def __init__(self, fd: int, pid: int) -> None:
        self._fd = fd
        self._pid = pid
        self._line = b""  # the begin of an unfinished line
        self._left = float(LINES_BURST)
        self._last_s = time.monotonic()
        self._dropped = 0

    def read(self) -> bool:
        """Logs some of the available output; False: no more will come. A call takes a bounded time."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        *lines, rest = (self._line + data).split(b"\n", self._lines_left())
        for line in filter(bytes.strip, lines):
            self._log(line)
        self._dropped += rest.count(b"\n")
        self._line = rest.rpartition(b"\n")[2][:LINE_BYTES]
        return bool(data)

    def finish(self) -> None:
        """Logs the rest after the agent's death."""
        self.read()  # a pipe holds no more
        if self._line and self._lines_left():
            self._log(self._line)
        if self._dropped:
            log.warning("agent %d: %d more lines", self._pid, self._dropped)

    def _lines_left(self) -> int:
        now = time.monotonic()
        self._left = min(self._left + (now - self._last_s) * LINES_PER_S, LINES_BURST)
        self._last_s = now
        return int(self._left)

    def _log(self, line: bytes) -> None:
        self._left -= 1
        text = _NAMES.sub(b"kvo1/...", line)[:LINE_BYTES].decode(errors="replace")
        log.warning("agent %d: %s", self._pid, printable(text))
