"""Connections of other users: a child becomes that user, connects, and hands the socket over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from kvoffloadd.testing.wait import HANG_S
from scripts.harness.peer import RawPeer

# The kernel notes who connects, not who uses the socket later. The child lives on: its end would end the session.
_CONNECT = """
import array, os, socket, sys
path, uid, channel = sys.argv[1], int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
os.setgid(uid)
os.setuid(uid)
peer = socket.socket(socket.AF_UNIX)
peer.connect(path)
channel.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [peer.fileno()]))])
channel.recv(1)
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@dataclass
class Stranger:
    """A raw peer that is another user to the daemon. Close it."""

    peer: RawPeer
    child: subprocess.Popen[bytes]
    channel: socket.socket

    @classmethod
    def connect(cls, path: Path, uid: int) -> Self:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", "-c", _CONNECT, str(path), str(uid), str(theirs.fileno())]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd="/")
        theirs.close()
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        assert len(fds) == 1, "the child could not connect"
        return cls(RawPeer(socket.socket(fileno=fds[0])), child, ours)

    def close(self) -> None:
        self.peer.close()
        self.channel.close()
        self.child.wait(HANG_S)
