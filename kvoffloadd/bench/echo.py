"""Runs echo processes. As a process, this module reads as many bytes as a request has, and answers as many as a reply
has. A round trip can't take less on this machine.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvoffloadd.testing.process import DaemonError, tail
from kvoffloadd.testing.wait import until
from kvoffloadd.testing.worker import WorkerProcess


@contextmanager
def echo_process(module: str, folder: Path, **options: object) -> Iterator[Path]:
    """Starts a module that serves at a socket, with `path` and these as options, and yields the socket. Raises
    DaemonError if it does not serve.
    """
    path, log = folder / "echo", folder / "echo.log"
    server = WorkerProcess(module, {"path": str(path), **options}, log)
    try:
        try:
            until(lambda: _listens(path), "the echo server listens")
        except TimeoutError as error:
            raise DaemonError(f"{error}\n{tail(log)}") from None
        yield path
    finally:
        server.kill()
        server.reap()


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@contextmanager
def bare_echo(folder: Path, request_bytes: int, reply_bytes: int) -> Iterator[Callable[[], object]]:
    """Yields a call that makes one round trip."""
    request = bytes(request_bytes)
    with (
        echo_process("kvoffloadd.bench.echo", folder, request_bytes=request_bytes, reply_bytes=reply_bytes) as path,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        sock.connect(str(path))

        def call() -> None:
            sock.sendall(request)
            sock.recv(reply_bytes, socket.MSG_WAITALL)

        yield call


def main() -> None:
    """Serves one client after the other, until the process is killed."""
    options = json.loads(sys.argv[1])
    reply = bytes(options["reply_bytes"])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(options["path"])
        listener.listen()
        while True:
            client, _ = listener.accept()
            with client:
                while client.recv(options["request_bytes"], socket.MSG_WAITALL):
                    client.sendall(reply)


if __name__ == "__main__":
    main()
