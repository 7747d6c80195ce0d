"""A peer that says whatever a test wants, byte for byte, and understands what the daemon answers."""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgpack

PREFIX = struct.Struct("<I")
NAMESPACE = {"model": "raw"}
ANSWER_S = 10.0

Fields = dict[str, Any]


def frame(fields: object) -> bytes:
    """A frame that holds `fields`, whatever they are."""
    body: bytes = msgpack.packb(fields, use_bin_type=True)
    return PREFIX.pack(len(body)) + body


class RawPeer:
    """One connection. `pushes`: what the daemon pushed and no call has taken. Not for threads."""

    def __init__(self, path: Path | str | socket.socket) -> None:
        if isinstance(path, socket.socket):
            self.socket = path
        else:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.connect(str(path))
        self.socket.settimeout(ANSWER_S)
        self.pushes: list[Fields] = []
        self._buffer = b""
        self._seqs = itertools.count(1)
        self._early: dict[int, Fields] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Without a word."""
        self.socket.close()

    # --- out ---

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Bytes and descriptors as they are; `fds` stay the caller's."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with contextlib.suppress(BrokenPipeError):  # the daemon has hung up: what it said last can still be read
            sent = self.socket.sendmsg([data], rights)
            if sent < len(data):
                self.socket.sendall(data[sent:])

    def begin(self, tag: str, /, *, rights: Sequence[int] = (), **fields: Any) -> int:
        """Send a request with a new `seq`, which is returned. `rights`: descriptors to go with it."""
        seq = next(self._seqs)
        self.send(frame({"type": tag, "seq": seq, **fields}), rights)
        return seq

    # --- in ---

    def receive(self) -> Fields | None:
        """The next message of any kind; None: the daemon has closed the connection."""
        while len(self._buffer) < PREFIX.size or len(self._buffer) < PREFIX.size + self._size():
            try:
                data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 4)
            except ConnectionResetError:
                return None
            for fd in fds:
                os.close(fd)
            if not data:
                return None
            self._buffer += data
        end = PREFIX.size + self._size()
        fields: Fields = msgpack.unpackb(self._buffer[PREFIX.size : end])
        self._buffer = self._buffer[end:]
        return fields

    def _size(self) -> int:
        (size,) = PREFIX.unpack_from(self._buffer)
        return int(size)

    def answer(self, seq: int) -> Fields:
        """The reply to `seq`; pushes and other replies that come before it are kept."""
        while seq not in self._early:
            message = self.receive()
            assert message is not None, f"the daemon closed the connection before it answered request {seq}"
            if "seq" in message:
                self._early[message["seq"]] = message
            else:
                self.pushes.append(message)
        return self._early.pop(seq)

    def ask(self, tag: str, /, *, rights: Sequence[int] = (), **fields: Any) -> Fields:
        """One request, one reply, of whatever type."""
        return self.answer(self.begin(tag, rights=rights, **fields))

    def ok(self, tag: str, /, *, rights: Sequence[int] = (), **fields: Any) -> Fields:
        """The reply to a request that must succeed."""
        reply = self.ask(tag, rights=rights, **fields)
        assert reply["type"] != "error", reply
        return reply

    def refused(self, code: str, tag: str, /, *, rights: Sequence[int] = (), **fields: Any) -> str:
        """The message of the error which the request must get."""
        return said(self.ask(tag, rights=rights, **fields), code)

    def completed(self, job: int) -> Fields:
        """The end of a job."""
        while True:
            for push in self.pushes:
                if push["type"] == "completed" and push["job"] == job:
                    self.pushes.remove(push)
                    return push
            message = self.receive()
            assert message is not None, f"the daemon closed the connection before job {job} ended"
            assert "seq" not in message, message
            self.pushes.append(message)

    def end(self) -> list[Fields]:
        """All that comes until the daemon closes the connection."""
        found = [*self._early.values(), *self.pushes]
        while (message := self.receive()) is not None:
            found.append(message)
        return found

    def turned_away(self, code: str) -> str:
        """The daemon's last word is an error without a request (`seq` 0); then it closes."""
        last = self.end()[-1]
        assert last["seq"] == 0
        return said(last, code)

    # --- requests that most tests begin with ---

    def hello(self, role: str = "worker", *, namespace: Fields | None = None, **fields: Any) -> Fields:
        """The welcome."""
        namespace = NAMESPACE if namespace is None else namespace
        defaults = {"version": 1, "role": role, "instance": os.urandom(16), "namespace": namespace}
        return self.ok("hello", **{**defaults, **fields})

    def attach(self, fds: Sequence[int]) -> list[int]:
        """Allocation ids."""
        return list(self.ok("attach", rights=fds, kind="shm", fds=len(fds))["allocations"])


def said(message: Fields, code: str) -> str:
    """The words of an error of this code."""
    assert (message["type"], message.get("code")) == ("error", code), message
    assert message["message"]
    assert message["fault"] == "client"
    return str(message["message"])
