"""`python -m kvoffloadd.agent`, which the daemon starts. Standard input is its socket to the daemon."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import struct
import sys

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_UCRED = struct.Struct("3i")
_OOM_SCORE = 500
"""If memory runs out, the kernel ends the agent before the daemon."""


def main() -> int:
    """Returns the exit status: 0 if the daemon has ended or wants no more, 1 with the reason on standard error."""
    faulthandler.enable()
    logging.basicConfig(format="%(message)s")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a terminal or systemd sends them to all: the daemon decides
    try:
        sock = _socket()
    except OSError:
        log.error("this program is a part of kvoffloadd; only the daemon starts it")
        return 1
    if not _die_with(sock):
        log.error("the daemon is not the parent of this process: remote.python must be the Python interpreter itself")
        return 1
    _go_first()
    from kvoffloadd.agent.serve import Agent  # slow; the daemon's end is already watched

    return Agent(sock).run()


def _socket() -> socket.socket:
    """Returns the socket on standard input, and redirects standard input to nothing: libraries may read it."""
    sock = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return sock


def _die_with(sock: socket.socket) -> bool:
    """Makes the kernel end this process when the daemon ends. False: the daemon is not its parent, or not any more."""
    daemon = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    return os.getppid() == int(daemon)  # asked last: from here on, the kernel reports its end


def _go_first() -> None:
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            score = max(int(file.read()), _OOM_SCORE)
            file.seek(0)
            file.write(str(score))
    except OSError:
        pass  # a sandbox without /proc


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # ends the engine's threads, whatever they do
