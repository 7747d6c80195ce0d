"""Provides a service manager's notification socket, and the notices that a daemon sends to it."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

FDS_MAX = 16


@dataclass(frozen=True)
class Notice:
    """One datagram: its assignments, and the descriptors with it, which are the test's."""

    fields: dict[str, str]
    fds: tuple[int, ...]


class Manager:
    """Listens at `address`, a path or "@" and an abstract name, as NOTIFY_SOCKET has it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.heard: list[Notice] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address[0] == "@" else address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        for notice in self.heard:
            for fd in notice.fds:
                os.close(fd)

    def listen(self, seconds: float) -> Notice | None:
        """The next datagram; None: none came."""
        self._socket.settimeout(max(seconds, 0.001))
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, FDS_MAX)
        except TimeoutError:
            return None
        lines = data.decode().split("\n")
        notice = Notice(dict(line.split("=", 1) for line in lines), tuple(fds))
        self.heard.append(notice)
        return notice

    def until(self, name: str, value: str | None = None, deadline_s: float = 60.0) -> Notice:
        """The next datagram with this assignment. Raises AssertionError at the deadline."""
        end = time.monotonic() + deadline_s
        while (left := end - time.monotonic()) > 0:
            notice = self.listen(left)
            if notice is not None and name in notice.fields and value in (None, notice.fields[name]):
                return notice
        raise AssertionError(f"no {name} within {deadline_s} s; heard: {[n.fields for n in self.heard]}")

    def silent_for(self, name: str, seconds: float) -> bool:
        """Whether no datagram with this assignment comes in that time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            notice = self.listen(left)
            if notice is not None and name in notice.fields:
                return False
        return True


def manager_in(folder: Path) -> Manager:
    """One with a path."""
    return Manager(str(folder / "notify.sock"))
