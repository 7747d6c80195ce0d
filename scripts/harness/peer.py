"""A session without the client library: it sends what it is given, byte for byte, and reads the answers."""

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
READ_BYTES = 1 << 16
FDS_MAX = 64
PUSHES = frozenset({"completed", "ready", "events", "gap"})
"""What answers no request directly, though a `ready` has the `seq` of one."""

Fields = dict[str, Any]


def frame(fields: object) -> bytes:
    """A frame that holds `fields`, whatever they are."""
    body: bytes = msgpack.packb(fields, use_bin_type=True)
    return PREFIX.pack(len(body)) + body


class RawPeer:
    """One connection. `pushes`: what the daemon pushed and no call has taken. Not for threads.

    What waits for the daemon raises TimeoutError after `answer_s`.
    """

    def __init__(self, path: Path | str | socket.socket, answer_s: float = ANSWER_S) -> None:
        if isinstance(path, socket.socket):
            self.socket = path
        else:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.connect(str(path))
        self.socket.settimeout(answer_s)
        self.pushes: list[Fields] = []
        self._buffer = bytearray()
        self._seqs = itertools.count(1)
        self._early: dict[int, Fields] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        """Closes the connection without a message."""
        self.socket.close()

    # --- out ---

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Sends bytes and descriptors as they are, unless the daemon has hung up: its last messages can still be read.

        `fds` stay the caller's. Raises PermissionError: the daemon has not let this peer in yet, and the kernel takes
        no descriptors until then (Linux 6.16).
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sent = self.socket.sendmsg([data], rights)
            if sent < len(data):
                self.socket.sendall(data[sent:])

    def tell(self, fields: Fields, fds: Sequence[int] = ()) -> None:
        """A frame, whatever its `seq`."""
        self.send(frame(fields), fds)

    def begin(self, tag: str, /, *, rights: Sequence[int] = (), **fields: Any) -> int:
        """Send a request with a new `seq`, which is returned. `rights`: descriptors to go with it."""
        seq = next(self._seqs)
        self.tell({"type": tag, "seq": seq, **fields}, rights)
        return seq

    # --- in ---

    def receive(self) -> Fields | None:
        """The next message of any kind; None: the daemon has closed the connection."""
        while (message := self.buffered()) is None:
            if not self.read():
                return None
        return message

    def buffered(self) -> Fields | None:
        """The next message, if it has been read already."""
        if len(self._buffer) < PREFIX.size:
            return None
        end = PREFIX.size + PREFIX.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        fields: Fields = msgpack.unpackb(self._buffer[PREFIX.size : end])
        del self._buffer[:end]
        return fields

    def read(self, most: int = READ_BYTES) -> bool:
        """Take some bytes from the socket; False: there will be none."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, most, FDS_MAX)
        except ConnectionResetError:
            return False
        for fd in fds:
            os.close(fd)
        self._buffer += data
        return bool(data)

    def reply(self) -> Fields | None:
        """The next message that is no push; None: the daemon has closed the connection."""
        while (message := self.receive()) is not None and message["type"] in PUSHES:
            self.pushes.append(message)
        return message

    def answer(self, seq: int) -> Fields:
        """The reply to `seq`; pushes and other replies that come before it are kept."""
        while seq not in self._early:
            message = self.receive()
            if message is None:
                raise AssertionError(f"the daemon closed the connection before it answered request {seq}")
            if message["type"] in PUSHES:
                self.pushes.append(message)
            else:
                self._early[message["seq"]] = message
        return self._early.pop(seq)

    def ask(self, tag: str, /, *, rights: Sequence[int] = (), **fields: Any) -> Fields:
        """One request, one reply, of whatever type."""
        return self.answer(self.begin(tag, rights=rights, **fields))

    def ok(self, tag: str, /, *, rights: Sequence[int] = (), **fields: Any) -> Fields:
        """The reply to a request that must succeed."""
        reply = self.ask(tag, rights=rights, **fields)
        if reply["type"] == "error":
            raise AssertionError(f"{tag} was refused: {reply}")
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
            if message is None or message["type"] not in PUSHES:
                raise AssertionError(f"not the end of job {job}, but {message}")
            self.pushes.append(message)

    def end(self) -> list[Fields]:
        """All that comes until the daemon closes the connection."""
        found = [*self._early.values(), *self.pushes]
        while (message := self.receive()) is not None:
            found.append(message)
        return found

    @property
    def refusal(self) -> Fields | None:
        """The error without a request (`seq` 0) that came instead of a reply, if one has."""
        return self._early.get(0)

    def turned_away(self, code: str) -> str:
        """The daemon's last word is an error without a request (`seq` 0); then it closes."""
        last = self.end()[-1]
        if last["seq"] != 0:
            raise AssertionError(f"not the last word: {last}")
        return said(last, code)

    # --- requests that most tests begin with ---

    def hello(self, role: str = "worker", *, namespace: Fields | None = None, **fields: Any) -> Fields:
        namespace = NAMESPACE if namespace is None else namespace
        defaults = {"version": 1, "role": role, "instance": os.urandom(16), "namespace": namespace}
        return self.ok("hello", **{**defaults, **fields})

    def attach(self, fds: Sequence[int]) -> list[int]:
        return list(self.ok("attach", rights=fds, kind="shm", fds=len(fds))["allocations"])


def said(message: Fields, code: str) -> str:
    """The words of an error of this code."""
    found = (message["type"], message.get("code"), message.get("fault"))
    if found != ("error", code, "client") or not message["message"]:
        raise AssertionError(f"no error {code} of the client's, but {message}")
    return str(message["message"])
