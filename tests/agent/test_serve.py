"""The agent by itself, with a test in the daemon's place: what it is given and what it does then."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.agentframes import (
    VERSION,
    Answer,
    Code,
    Exists,
    Frames,
    FromDaemon,
    Get,
    Greeting,
    Put,
    Read,
    Refused,
    Remove,
    Renew,
    Reply,
    Start,
    Started,
    Sweep,
    Swept,
    Values,
    Write,
    encode,
)
from kvoffloadd.objectnames import Space
from kvoffloadd.sharedmem import create_memfd
from kvoffloadd.storage.remote.agentprocess import Spawned, agent_command, agent_environment, spawn_agent

FOREVER_S = 60.0
ARENA_OFFSET, ARENA_BYTES, HEADER_BYTES = 8192, 1 << 16, 8192
SPACE = Space(bytes(16), bytes(16), 1, bytes(8), 0, 32)
KEY = bytes(range(32))
CLEAN_END, UNCLEAN_END = 0, 1


def packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


class Daemon:
    """The test's end of an agent."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "objects"
        self.arena = create_memfd("arena", ARENA_OFFSET + ARENA_BYTES + 4096)
        self.headers = create_memfd("headers", HEADER_BYTES)
        self.spawned: Spawned = spawn_agent(agent_command(""), agent_environment("", os.environ))
        self.sock = self.spawned.sock
        self.sock.settimeout(FOREVER_S)
        self._frames = Frames(by_agent=True)

    def start(self, engine: str = "memory", **changes: Any) -> Start:
        fields = {"arena_bytes": ARENA_BYTES, "header_bytes": HEADER_BYTES, "get_threads": 1, "put_threads": 1}
        return Start(engine, {"directory": str(self.directory)}, ARENA_OFFSET, **(fields | changes))

    def send(self, message: FromDaemon, *fds: int) -> None:
        if fds:
            socket.send_fds(self.sock, [encode(message)], fds)
        else:
            self.sock.sendall(encode(message))

    def receive(self) -> Any:
        while (message := self._frames.next()) is None:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._frames.receive(data)
        return message

    def ask(self, call: FromDaemon) -> list[int] | Values | Swept:
        self.send(call)
        answer = self.receive()
        assert isinstance(answer, Reply)
        return (
            list(struct.unpack(f"<{len(answer.codes) // 8}q", answer.codes)) if isinstance(answer, Answer) else answer
        )

    def begin(self) -> None:
        assert self.receive() == Greeting(VERSION, self.spawned.child.pid)
        self.send(self.start(), self.arena, self.headers)
        assert self.receive() == Started(False, f"memory, Python {sys.version.split()[0]}")

    def end(self) -> int:
        """Its exit status."""
        return self.spawned.child.wait(FOREVER_S)

    def output(self) -> str:
        select.select([self.spawned.output_fd], [], [], FOREVER_S)
        return os.read(self.spawned.output_fd, 1 << 16).decode()

    def close(self) -> None:
        self.spawned.child.kill()
        self.spawned.child.wait()
        self.sock.close()
        for fd in (self.arena, self.headers, self.spawned.output_fd, self.spawned.pidfd):
            os.close(fd)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    made.close()


def test_each_call_has_its_answer(daemon: Daemon) -> None:
    daemon.begin()
    os.pwrite(daemon.headers, b"H" * 4096, 4096)
    os.pwrite(daemon.arena, b"before-payload-behind", ARENA_OFFSET + 93)
    place = (SPACE, KEY, packed(4096), packed(100), packed(7))
    size = 4096 + 7
    assert daemon.ask(Exists(1, SPACE, KEY)) == [0, 0]
    assert daemon.ask(Get(2, *place)) == [Code.MISS]
    assert daemon.ask(Put(3, *place)) == [size]
    assert daemon.ask(Exists(4, SPACE, KEY)) == [0, 1]
    (path,) = daemon.directory.iterdir()
    assert path.read_bytes() == b"H" * 4096 + b"payload"
    assert daemon.ask(Get(5, SPACE, KEY, packed(0), packed(500), packed(7))) == [size]
    assert os.pread(daemon.headers, 4096, 0) == b"H" * 4096
    assert os.pread(daemon.arena, 9, ARENA_OFFSET + 499) == b"\0payload\0"
    assert daemon.ask(Get(6, SPACE, KEY, packed(0), packed(500), packed(8))) == [Code.SIZE]
    assert daemon.ask(Read(7, ["n"])) == Values(7, [None])
    assert daemon.ask(Write(8, "n", b"v", True, 60.0)) == [1]
    assert daemon.ask(Read(9, ["m", "n"])) == Values(9, [None, b"v"])
    assert daemon.ask(Renew(10, ["n", "m"], 60.0)) == [1, 0]
    assert daemon.ask(Remove(10, ["n", "m"])) == [1, 0]
    assert daemon.ask(Sweep(11, "kvo1/", "")) == Swept(11, 1, "")
    assert daemon.ask(Exists(12, SPACE, b"")) == [0]


def test_it_ends_when_the_daemon_hangs_up(daemon: Daemon) -> None:
    daemon.begin()
    daemon.sock.shutdown(socket.SHUT_WR)
    assert daemon.end() == CLEAN_END


def test_it_ends_when_the_daemon_is_gone_before_it_starts(daemon: Daemon) -> None:
    daemon.sock.close()
    assert daemon.end() == CLEAN_END


def test_it_ends_though_a_call_hangs(daemon: Daemon, tmp_path: Path) -> None:
    daemon.receive()
    (tmp_path / "faults").write_text("get=hang")
    start = daemon.start()
    start.settings["faults"] = str(tmp_path / "faults")
    daemon.send(start, daemon.arena, daemon.headers)
    daemon.receive()
    daemon.send(Get(1, SPACE, KEY, packed(0), packed(0), packed(7)))
    assert daemon.ask(Exists(2, SPACE, KEY)) == [0, 0]
    daemon.sock.shutdown(socket.SHUT_WR)
    assert daemon.end() == CLEAN_END


@pytest.mark.parametrize(
    "send",
    [
        lambda daemon: daemon.sock.sendall(b"\xff" * 100),
        lambda daemon: daemon.send(Read(1, ["n"])),
        lambda daemon: daemon.send(daemon.start()),
        lambda daemon: daemon.send(daemon.start(), daemon.arena),
        lambda daemon: daemon.sock.sendall(encode(Greeting(VERSION, 1))),
    ],
    ids=["garbage", "a call before the start", "no descriptors", "one descriptor", "its own greeting"],
)
def test_what_it_does_not_expect_at_the_start_ends_it(daemon: Daemon, send: Callable[[Daemon], None]) -> None:
    daemon.receive()
    send(daemon)
    assert daemon.end() == UNCLEAN_END
    assert "the daemon" in daemon.output()


@pytest.mark.parametrize(
    "call",
    [
        Get(1, SPACE, KEY, packed(0), packed(ARENA_BYTES - 6), packed(7)),
        Put(1, SPACE, KEY, packed(4097), packed(0), packed(7)),
        Get(1, SPACE, KEY, packed(0, 0), packed(0), packed(7)),
        Get(1, SPACE, KEY[:-1], packed(0), packed(0), packed(7)),
    ],
)
def test_memory_that_is_not_its_own_is_never_touched(daemon: Daemon, call: Get) -> None:
    """A bug of the daemon's would be an end of the agent, not of others' bytes."""
    daemon.begin()
    daemon.send(call)
    assert daemon.end() == UNCLEAN_END
    assert os.pread(daemon.arena, 1 << 20, 0) == bytes(ARENA_OFFSET + ARENA_BYTES + 4096)


def test_a_second_start_ends_it(daemon: Daemon) -> None:
    daemon.begin()
    daemon.send(daemon.start())
    assert daemon.end() == UNCLEAN_END


def test_memory_that_can_not_be_mapped_is_told(daemon: Daemon) -> None:
    daemon.receive()
    daemon.send(daemon.start(arena_bytes=1 << 40), daemon.arena, daemon.headers)
    refused = daemon.receive()
    assert isinstance(refused, Refused)
    assert refused.fault == "daemon"
    assert "mmap" in refused.reason
    assert daemon.end() == UNCLEAN_END


def test_it_dies_when_its_parent_does_not_start_it(tmp_path: Path) -> None:
    """As behind a script that does not become Python: the daemon would hear of the script's end alone."""
    spawned = spawn_agent(
        ["/bin/sh", "-c", '"$@"; exit 5', "sh", *agent_command("")], agent_environment("", os.environ)
    )
    try:
        assert spawned.child.wait(FOREVER_S) == 5
        assert "must be the Python interpreter itself" in os.read(spawned.output_fd, 4096).decode()
    finally:
        spawned.sock.close()
        os.close(spawned.output_fd)
        os.close(spawned.pidfd)
