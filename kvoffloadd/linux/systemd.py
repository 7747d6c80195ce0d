"""The interface to systemd: sd_notify(3), sd_listen_fds(3) and sd_watchdog_enabled(3).

Every method is a no-op without a service manager. None of them waits: a message that does not fit into systemd's queue
is dropped, and the result is `False`. Only the event loop calls them.

Descriptors that are handed to a start come from a socket unit, or from the store in which an earlier run put them.
Descriptors in the store stay there, and are handed to the next start too, until they are forgotten or the unit is
stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import stat
import time
from collections.abc import MutableMapping

from kvoffloadd.errors import UsageError
from kvoffloadd.linux.sockets import pack_fds

log = logging.getLogger(__name__)

SAY_S = 1.0
"""How long to wait for a full queue if a dropped message would be lost for good."""

FIRST_FD = 3
"""SD_LISTEN_FDS_START."""

NAME_CHARS_MAX = 255


class Systemd:
    """The service manager of this process, if it has one. Owns the inherited descriptors that were not taken yet.

    `watchdog_s`: how long it waits for a `beat` before it kills the daemon; None: it doesn't. `gave_listener`:
    `listening` has returned a socket, which the manager still owns.
    """

    def __init__(
        self,
        notify: socket.socket | None,
        watchdog_s: float | None = None,
        inherited: list[tuple[str, int]] | None = None,
    ) -> None:
        self.watchdog_s = watchdog_s
        self.gave_listener = False
        self._notify = notify
        self._inherited = inherited or []
        self._taken: set[str] = set()

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> Systemd:
        """Reads the environment's variables, and then unsets them: they are meant for this process and not for its
        children.

        Must be called once, before the process opens descriptors or starts others.
        """
        variables = os.environ if environment is None else environment
        own_pid = str(os.getpid())
        inherited = []
        if variables.pop("LISTEN_PID", "") == own_pid:
            names = variables.get("LISTEN_FDNAMES", "").split(":")
            for index in range(_number(variables.get("LISTEN_FDS", ""))):
                with contextlib.suppress(OSError):  # an inherited number may not be open
                    os.set_inheritable(FIRST_FD + index, False)
                    inherited.append((names[index] if index < len(names) else "", FIRST_FD + index))
        watchdog_us = _number(variables.get("WATCHDOG_USEC", ""))
        watched = watchdog_us > 0 and variables.get("WATCHDOG_PID", own_pid) == own_pid
        address = variables.get("NOTIFY_SOCKET", "")
        for name in ("LISTEN_FDS", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID", "NOTIFY_SOCKET", "FDSTORE"):
            variables.pop(name, None)
        return cls(_connect(address), watchdog_us / 1e6 if watched else None, inherited)

    @property
    def listens(self) -> bool:
        """Returns whether there is a service manager to notify."""
        return self._notify is not None

    def close(self) -> None:
        """Closes the socket to the service manager."""
        if self._notify is not None:
            self._notify.close()
            self._notify = None

    # --- descriptors ------------------------------------------------------------------------------

    def take(self, name: str) -> int | None:
        """Takes the first remaining inherited descriptor of this name; the caller owns it. It is close-on-exec.

        The store keeps its copy of a descriptor that came from there: `forget` removes it.
        """
        return self._take(next((index for index, (known, _) in enumerate(self._inherited) if known == name), None))

    def listening(self) -> socket.socket | None:
        """Returns the listening Unix stream socket of a socket unit, whatever its name; the caller owns it.
        Non-blocking.
        """
        fd = self._take(next((index for index, (_, fd) in enumerate(self._inherited) if _is_listening(fd)), None))
        if fd is None:
            return None
        self.gave_listener = True
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        return sock

    def _take(self, index: int | None) -> int | None:
        if index is None:
            return None
        name, fd = self._inherited.pop(index)
        self._taken.add(name)
        return fd

    def close_rest(self) -> None:
        """Closes the descriptors that were not taken, and has them removed from the store, which would keep their
        memory indefinitely.
        """
        for name, fd in self._inherited:
            log.warning(
                "closed descriptor %d (%s), which systemd passed and the daemon does not use", fd, name or "no name"
            )
            os.close(fd)
        for name in {name for name, _ in self._inherited} - self._taken:
            if name:
                self.forget(name)
        self._inherited.clear()

    def store(self, name: str, fd: int) -> bool:
        """Hands a copy of `fd` to the store, under `name`: printable ASCII without colons.

        A name may be used for several. Returns True if it is on its way. Whether systemd keeps it shows at the next
        start: it keeps FileDescriptorStoreMax of them, and one of each file.
        """
        if not (0 < len(name) <= NAME_CHARS_MAX and name.isascii() and name.isprintable() and ":" not in name):
            raise UsageError(f"no name for a stored descriptor: {name!r}")
        # FDPOLL=0: systemd keeps it whatever state it is in.
        return self._send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd, wait_s=SAY_S)

    def forget(self, name: str) -> bool:
        """Has every descriptor of this name removed from the store."""
        return self._send(f"FDSTOREREMOVE=1\nFDNAME={name}", wait_s=SAY_S)

    # --- states -----------------------------------------------------------------------------------

    def ready(self, status: str = "") -> bool:
        """Notifies that a start or reload is done: the daemon serves."""
        return self._send(_lines("READY=1", status), wait_s=SAY_S)

    def reloading(self) -> bool:
        """Notifies that a reload has begun; `ready` ends it."""
        return self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str = "") -> bool:
        """Notifies that the daemon has begun to stop."""
        return self._send(_lines("STOPPING=1", status))

    def status(self, text: str) -> bool:
        """Sets the line for people that `systemctl status` shows."""
        return self._send(_lines("", text))

    def extend(self, seconds: float) -> bool:
        """Requests `seconds` more from now for a start or stop."""
        return self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def beat(self) -> bool:
        """Notifies that the daemon is alive: the watchdog begins anew."""
        return self._send("WATCHDOG=1")

    def _send(self, text: str, fd: int | None = None, wait_s: float = 0.0) -> bool:
        if self._notify is None:
            return False
        if wait_s:
            select.select([], [self._notify], [], wait_s)
        rights = [] if fd is None else pack_fds([fd])
        try:
            self._notify.sendmsg([text.encode(errors="replace")], rights, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False  # its queue is full
        except OSError as error:
            log.warning("systemd can't be notified: %s", error.strerror)
            return False
        return True


def _lines(state: str, status: str) -> str:
    # A status is one line: a second line would be read as another assignment.
    shown = f"STATUS={' '.join(status.split())}" if status else ""
    return "\n".join(line for line in (state, shown) if line)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def _connect(address: str) -> socket.socket | None:
    """Returns a socket connected to NOTIFY_SOCKET, a path or "@" and an abstract name; None if no socket can be
    reached.
    """
    if not address:
        return None
    if address[0] not in "/@":
        log.warning("NOTIFY_SOCKET=%s is not supported; systemd is not notified", address)
        return None
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        notify.connect("\0" + address[1:] if address[0] == "@" else address)
    except OSError as error:
        notify.close()
        log.warning("NOTIFY_SOCKET=%s can't be used; systemd is not notified: %s", address, error.strerror)
        return None
    return notify


def _is_listening(fd: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return False
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        is_stream = (sock.family, sock.type) == (socket.AF_UNIX, socket.SOCK_STREAM)
        return is_stream and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False
