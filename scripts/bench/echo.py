"""A bare msgpack echo server in asyncio, which is the least that a daemon with msgpack must do, and its clients.

As a process it serves at the path of its options, until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from typing import Any

import msgpack

PREFIX = struct.Struct("<I")


class EchoServer(asyncio.Protocol):
    """Unpacks each frame and packs its answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= PREFIX.size:
            (size,) = PREFIX.unpack_from(self._buffer)
            if len(self._buffer) < PREFIX.size + size:
                return
            request = msgpack.unpackb(self._buffer[PREFIX.size : PREFIX.size + size])
            self._buffer = self._buffer[PREFIX.size + size :]
            body = msgpack.packb({"type": "done", "seq": request["seq"]})
            self._transport.write(PREFIX.pack(len(body)) + body)


def request(seq: int) -> bytes:
    body: bytes = msgpack.packb({"type": "ping", "seq": seq})
    return PREFIX.pack(len(body)) + body


def answered(frame: bytes, seq: int) -> None:
    if msgpack.unpackb(frame[PREFIX.size :])["seq"] != seq:
        raise RuntimeError("the echo server answered something else")


class EchoClient:
    """A blocking socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._seq = 0

    def ping(self) -> None:
        self._seq += 1
        self._socket.sendall(request(self._seq))
        answered(self._socket.recv(65536), self._seq)

    def close(self) -> None:
        self._socket.close()


class AsyncEchoClient(asyncio.Protocol):
    """An asyncio protocol and a future."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._answer: asyncio.Future[bytes] | None = None
        self._seq = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.set_result(data)

    async def ping(self) -> None:
        self._seq += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request(self._seq))
        answered(await self._answer, self._seq)

    def close(self) -> None:
        self._transport.close()


async def main() -> None:
    server = await asyncio.get_running_loop().create_unix_server(EchoServer, json.loads(sys.argv[1])["path"])
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
