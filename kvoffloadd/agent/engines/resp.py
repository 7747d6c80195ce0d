"""A connection to a Valkey or Redis server: RESP2 over TCP or TLS, payloads straight from and to the caller's memory.

Blocking, for one thread at a time. Every wait ends at the latest deadline. After any error except `ReplyError` the
connection is closed, and nothing reads or writes the caller's memory any more.

https://valkey.io/topics/protocol/
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_READ_BYTES: Final = 16 << 10
"""The size of a read where no payload is expected. Bytes of a payload in it are copied to their place."""
_LINE_BYTES_MAX: Final = 64 << 10
_STRING_BYTES_MAX: Final = 1 << 20
_ITEMS_MAX: Final = 1 << 20
_DEPTH_MAX: Final = 8
"""The depth of a reply that is read whole. Payloads, which are larger, go to the caller's memory."""
_VECTORS_MAX: Final = 512
"""The pieces of one call: below IOV_MAX."""
_CRLF: Final = b"\r\n"

Piece = bytes | memoryview
Reply = int | bytes | str | list["Reply"] | None


class ReplyError(Exception):
    """The server refuses a command, and the connection goes on. `kind`: the first word of the server's text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.kind = text.partition(" ")[0]


class ProtocolError(OSError):
    """The other end is no such server, or has lost its place in the stream."""


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server, and the user. `port` 0: `host` is a Unix socket's path. `tls`: None: plain."""

    host: str
    port: int
    database: int = 0
    user: str = ""
    password: str = ""
    tls: ssl.SSLContext | None = None


class RespConnection:
    """A connected and authenticated client. Raises OSError or ReplyError. `until_s`: the deadline of all later
    operations, a `time.monotonic()`; TimeoutError then.
    """

    def __init__(self, server: Server, until_s: float) -> None:
        self.until_s = until_s
        self._read = bytearray(_READ_BYTES)
        self._view = memoryview(self._read)
        self._at = self._end = 0
        self._plain = self._open(server)
        self._sock: socket.socket = self._plain
        try:
            if server.tls is not None:
                self._wait()
                self._sock = server.tls.wrap_socket(self._plain, server_hostname=server.host)
            if server.password:
                self.ask(*filter(None, ("AUTH", server.user, server.password)))
            if server.database:
                self.ask("SELECT", str(server.database))
        except BaseException:
            self.close()
            raise

    def _open(self, server: Server) -> socket.socket:
        if not server.port:
            return _connected(socket.AF_UNIX, server.host, self._left())
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
        for others, (family, *_, address) in zip(reversed(range(len(found))), found, strict=True):
            try:
                plain = _connected(family, address, self._left() / (others + 1))
            except OSError:
                if not others:
                    raise
            else:
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return plain
        raise OSError("the server's name has no address")

    def close(self) -> None:
        """Closes at once, even with data under way. Idempotent."""
        self._sock.close()
        self._plain.close()

    @property
    def has_more(self) -> bool:
        """Whether more was read than replies. A server that replies twice to a command would give each later command
        the reply to another one.
        """
        return self._at < self._end or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing follows the last reply: neither data nor the end of the connection."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return not (self.has_more or poller.poll(0))

    # --- commands ---

    def ask(self, *words: str | bytes) -> Reply:
        """Sends one command, and returns its reply."""
        self.send([command(*words)])
        return self.reply()

    def send(self, pieces: Sequence[Piece]) -> None:
        """Sends all of these bytes."""
        if self._sock is not self._plain:
            for piece in pieces:
                self._wait()
                self._sock.sendall(piece)
            return
        left = [memoryview(piece) for piece in pieces if len(piece)]
        while left:
            self._wait()
            sent = self._sock.sendmsg(left[:_VECTORS_MAX])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    # --- replies ---

    def reply(self, depth: int = 0) -> Reply:
        """Returns the next reply, whole. Raises ReplyError if it is an error. `depth`: of the enclosing array."""
        kind, rest = self._line()
        if kind == b"+":
            return rest.decode("utf-8", "replace")
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            size = _number(rest, _STRING_BYTES_MAX)
            return None if size < 0 else self._bulk(size)
        if kind == b"*":
            count = _number(rest, _ITEMS_MAX)
            if depth == _DEPTH_MAX:
                raise ProtocolError("arrays are nested too deeply")
            return None if count < 0 else [self.reply(depth + 1) for _ in range(count)]
        if depth:  # the rest of the array would be taken for the replies to other commands
            raise ProtocolError("an array has an element that is no value")
        raise _refusal(kind, rest)

    def reply_into(self, pieces: Sequence[memoryview]) -> int | None:
        """Reads the next string into `pieces` if it has their size, and drops it if it has another. Returns its size;
        None: nil.
        """
        kind, rest = self._line()
        if kind != b"$":
            raise _refusal(kind, rest)
        size = _number(rest)
        if size < 0:
            return None
        if size == sum(map(len, pieces)):
            for piece in pieces:
                self._fill(piece)
        else:
            self._drop(size)
        self._end_of_bulk()
        return size

    def _bulk(self, size: int) -> bytes:
        value = bytearray(size)
        self._fill(memoryview(value))
        self._end_of_bulk()
        return bytes(value)

    def _end_of_bulk(self) -> None:
        end = bytearray(len(_CRLF))
        self._fill(memoryview(end))
        if end != _CRLF:
            raise ProtocolError("a string is not terminated")

    def _line(self) -> tuple[bytes, bytes]:
        """Returns a line's first letter, and the rest of it."""
        line = b""
        while True:
            found = self._read.find(_CRLF[1:], self._at, self._end)
            if found >= 0:
                line += self._view[self._at : found + 1]
                self._at = found + 1
                break
            line += self._view[self._at : self._end]
            if len(line) > _LINE_BYTES_MAX:
                raise ProtocolError("a line is not terminated")
            self._at, self._end = 0, self._receive(self._view)
        if not line.endswith(_CRLF) or len(line) == len(_CRLF):
            raise ProtocolError("a line is not a reply")
        return line[:1], line[1 : -len(_CRLF)]

    def _fill(self, piece: memoryview) -> None:
        """Fills the pieces first from data read before, the rest straight from the socket."""
        filled = min(len(piece), self._end - self._at)
        piece[:filled] = self._view[self._at : self._at + filled]
        self._at += filled
        while filled < len(piece):
            filled += self._receive(piece[filled:])

    def _drop(self, size: int) -> None:
        while size:
            if self._at == self._end:
                self._at, self._end = 0, self._receive(self._view)
            taken = min(size, self._end - self._at)
            self._at += taken
            size -= taken

    def _receive(self, into: memoryview) -> int:
        self._wait()
        count = self._sock.recv_into(into)
        if not count:
            raise ConnectionResetError("the server has closed the connection")
        return count

    # --- the deadline ---

    def _left(self) -> float:
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the server took too long")
        return left_s

    def _wait(self) -> None:
        """Makes the next operation end at the deadline."""
        self._sock.settimeout(self._left())


def _connected(family: int, address: Any, left_s: float) -> socket.socket:
    plain = socket.socket(family, socket.SOCK_STREAM)
    try:
        plain.settimeout(left_s)
        plain.connect(address)
    except BaseException:
        plain.close()
        raise
    return plain


def command(*words: str | bytes) -> bytes:
    """Returns the command as it is sent."""
    encoded = [word.encode() if isinstance(word, str) else word for word in words]
    return b"".join([b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)])


def command_with(words: Sequence[str], pieces: Sequence[Piece], after: Sequence[str] = ()) -> list[Piece]:
    """Returns a command with a string of these pieces among its words, which are not joined."""
    size = sum(map(len, pieces))
    count = b"*%d\r\n" % (len(words) + 1 + len(after))
    strings = [
        b"".join(b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()) for word in group) for group in (words, after)
    ]
    return [count + strings[0] + b"$%d\r\n" % size, *pieces, _CRLF + strings[1]]


def _number(digits: bytes, most: int = (1 << 63) - 1) -> int:
    try:
        number = int(digits)
    except ValueError:
        number = most + 1
    if not -most <= number <= most:
        raise ProtocolError(f"not a valid number: {digits[:20]!r}")
    return number


def _refusal(kind: bytes, rest: bytes) -> Exception:
    if kind == b"-":
        return ReplyError(rest.decode("utf-8", "replace"))
    return ProtocolError(f"a reply of unknown kind {kind!r}")
