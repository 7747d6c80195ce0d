"""Opens connections to the daemon's socket: to one that is named, or to the first of the usual ones that answers."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from kvoffloadd import socketpath
from kvoffloadd.errors import ConfigError
from kvoffloadd.linux.sockets import peer_credentials

_NONE, _REFUSED = "no such socket", "connection refused"
_ADVICE = {
    errno.ENOENT: f"{_NONE}: start the daemon, or check that the path is the same as its `--socket`",
    errno.ECONNREFUSED: f"{_REFUSED}: the daemon has stopped or died; start it again",
    errno.EACCES: "permission denied: join the socket's group, or run as a user that the daemon allows",
    errno.ENOTSOCK: "not a socket: check that the path is the same as the daemon's `--socket`",
    errno.EPROTOTYPE: "not a stream socket, so it does not belong to the daemon",
    errno.EAGAIN: "the daemon does not accept connections: it is stuck or overloaded; see its log",
}
_BRIEF = {errno.ENOENT: _NONE, errno.ECONNREFUSED: f"{_REFUSED}: a daemon that was there has stopped or died"}
_TRANSIENT = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN})


class DialError(OSError):
    """No connection could be opened. The message has each place, what is wrong there, and the remedy.

    `may_pass`: another attempt may succeed, because the daemon is about to start, or to accept.
    """

    def __init__(self, message: str, *, may_pass: bool) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class Dialer:
    """Opens sockets for one client, none of which blocks.

    `path`: the socket that is named, or else the one where a daemon has answered. A client that has found one stays
    with it, so that a daemon that restarts finds its engines again, and not at another daemon. The variables count as
    they were when it was made.
    """

    def __init__(self, path: str | None) -> None:
        """Reads the variables. Raises ConfigError for an invalid one."""
        self.path = self._dialled = path
        self._environment = dict(os.environ)
        try:
            self._trusted = socketpath.trusted_uids(self._environment, os.geteuid())
            if path is None:
                socketpath.named_socket(self._environment)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def dial(self) -> socket.socket:
        """Returns a connected socket. Raises DialError."""
        if self.path is None:
            return self._search()
        try:
            return self._connect(self.path)
        except OSError as error:
            raise DialError(f"{self.path}: {_advice(error)}", may_pass=error.errno in _TRANSIENT) from error

    def stay(self) -> None:
        """Keeps to the socket that was dialled last, because a daemon has answered there."""
        self.path = self._dialled

    def _connect(self, path: str) -> socket.socket:
        """Returns a connected socket. Raises OSError, also if others can decide where a private directory leads."""
        folder, uid = Path(path).parent, os.geteuid()
        if folder in socketpath.private_folders(self._environment, uid):
            try:
                socketpath.check_private(folder, uid)
            except ValueError as error:
                raise _ForeignError(errno.EPERM, str(error)) from None
        return _connect(path, self._trusted)

    def _search(self) -> socket.socket:
        found: list[str] = []
        may_pass = False
        # Not once for all: the directory of a user's sessions is made at the first login.
        for path in map(str, socketpath.client_sockets(self._environment, os.geteuid())):
            try:
                made = self._connect(path)
            except OSError as error:
                if error.errno == errno.EAGAIN:  # a daemon is there, and those behind it are not meant
                    raise DialError(f"{path}: {_advice(error)}", may_pass=True) from error
                may_pass = may_pass or error.errno in _TRANSIENT
                found.append(f"{path} ({_BRIEF.get(error.errno or 0) or _advice(error)})")
            else:
                self._dialled = path
                return made
        raise DialError(
            f"no daemon found: looked at {', '.join(found)}; start it with `kvoffloadd serve`, or name its socket: "
            f"`--socket` of a command, `socket` in an engine's options, or {socketpath.VARIABLE}",
            may_pass=may_pass,
        )


class _ForeignError(OSError):
    """A process of another user listens there, or may."""


def _connect(path: str, trusted: frozenset[int]) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        try:
            made.connect(path)
        except ConnectionRefusedError:  # also for a path that is no socket
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK)) from None
            raise
        _, uid, _ = peer_credentials(made)
        reason = socketpath.why_no_daemon(uid, Path(os.path.abspath(path)), trusted)
        if reason:
            remedy = f"if that is the daemon's user, set {socketpath.UID_VARIABLE}={uid}"
            if uid == socketpath.unmapped_uid():
                remedy = "that number stands for every user without one in this user namespace: map the daemon's user"
            raise _ForeignError(errno.EPERM, f"{reason}: {remedy}")
    except BaseException:
        made.close()
        raise
    return made


def _advice(error: OSError) -> str:
    if isinstance(error, _ForeignError):
        return str(error.strerror)
    return _ADVICE.get(error.errno or 0) or os.strerror(error.errno or 0)
