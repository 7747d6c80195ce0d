"""The agent by itself, with a test in the daemon's place: what it is given and what it does then."""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.agent import serve
from kvoffloadd.agentwire.frames import (
    ANSWER_BYTES_MAX,
    NAMES_MAX,
    READ_NAMES_MAX,
    VALUE_BYTES_MAX,
    VALUES_BYTES_MAX,
    VERSION,
    Answer,
    Code,
    Exists,
    Frames,
    FromDaemon,
    Get,
    Greeting,
    Presence,
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
from kvoffloadd.agentwire.names import Space
from kvoffloadd.linux.sharedmem import create_memfd
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
    """This happens behind a script that does not become Python: the daemon would hear of the script's end alone."""
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


# --- what engines answer ---


class ServedAgent:
    """An agent in a thread of the test's, whose engine is the test's."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serve, "make_engine", lambda name: engine)
        ours, theirs = socket.socketpair()
        self._frames = Frames(by_agent=True)
        self.sock = ours
        ours.settimeout(FOREVER_S)
        self.thread = threading.Thread(target=serve.Agent(theirs).run, daemon=True)
        self.thread.start()
        fds = [create_memfd("arena", 1 << 20), create_memfd("headers", HEADER_BYTES)]
        self.receive()
        socket.send_fds(ours, [encode(Start("its own", {}, 0, 1 << 20, HEADER_BYTES, 1, 1))], fds)
        for fd in fds:
            os.close(fd)
        assert isinstance(self.receive(), Started)

    def receive(self) -> Any:
        while (message := self._frames.next()) is None:
            self._frames.receive(self.sock.recv(1 << 16))
        return message

    def ask(self, call: FromDaemon) -> Any:
        self.sock.sendall(encode(call))
        return self.receive()

    def close(self) -> None:
        self.sock.close()
        self.thread.join(FOREVER_S)


@pytest.fixture
def serve_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServedAgent]]:
    """`serve_engine(read=...)`: an agent whose engine has these methods."""
    made: list[ServedAgent] = []

    def make(**methods: Callable[..., Any]) -> ServedAgent:
        nothing = {"start": lambda *_: None, "about": lambda: "a test", "close": lambda: None}
        made.append(ServedAgent(SimpleNamespace(stops_at_once=True, **nothing, **methods), monkeypatch))
        return made[-1]

    yield make
    for each in made:
        each.close()


THREE = bytes(3 * len(KEY))
PLACES = (packed(0, 0, 0), packed(0, 0, 0), packed(7))
ALL_FAILED = array("q", [Code.FAILED] * 3).tobytes()
NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("more", [-3, -1, 1, 4])
def test_answers_for_another_number_of_items_are_nobodys(
    serve_engine: Callable[..., ServedAgent],
    more: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One too many or too few, and each key would have its neighbour's."""

    def answers(items: Sequence[Any], *_: Any) -> list[int]:
        return [1] * (len(items) + more)

    monkeypatch.setattr(logging.getLogger("kvoffloadd"), "propagate", True)
    methods = ("exists", "get", "put", "read", "renew", "remove")
    agent = serve_engine(**dict.fromkeys(methods, answers))
    marker_too = array("q", [Presence.UNKNOWN] * 4).tobytes()
    assert agent.ask(Exists(1, SPACE, THREE)) == Answer(1, marker_too)
    assert agent.ask(Get(2, SPACE, THREE, *PLACES)) == Answer(2, ALL_FAILED)
    assert agent.ask(Put(3, SPACE, THREE, *PLACES)) == Answer(3, ALL_FAILED)
    assert agent.ask(Read(4, NAMES)) == Values(4, [Code.FAILED] * 3)
    assert agent.ask(Renew(5, NAMES, 60.0)) == Answer(5, ALL_FAILED)
    assert agent.ask(Remove(6, NAMES)) == Answer(6, ALL_FAILED)
    assert caplog.text.count("answers for") == len(methods)


def test_an_engine_that_raises_has_failed(serve_engine: Callable[..., ServedAgent]) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    agent = serve_engine(**dict.fromkeys(("exists", "get", "put", "read", "write", "renew", "remove", "sweep"), fails))
    assert agent.ask(Get(2, SPACE, THREE, *PLACES)) == Answer(2, ALL_FAILED)
    assert agent.ask(Read(3, NAMES)) == Values(3, [Code.FAILED] * 3)
    assert agent.ask(Write(4, "a", b"v", True, None)) == Answer(4, ALL_FAILED[:8])
    assert agent.ask(Sweep(5, "kvo1/", "")) == Swept(5, Code.FAILED, "")


@pytest.mark.parametrize(
    ("call", "code"), [(Remove(1, NAMES), None), (Remove(1, NAMES), 1 << 70), (Sweep(1, "kvo1/", ""), 1 << 70)]
)
def test_an_agent_that_can_not_answer_a_call_ends(
    serve_engine: Callable[..., ServedAgent], monkeypatch: pytest.MonkeyPatch, call: Remove | Sweep, code: Any
) -> None:
    """The daemon might wait for ever: a sweep may take any time."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(os, "_exit", ended.put)
    agent = serve_engine(sweep=lambda *_: (code, ""), remove=lambda _: [code] * 3)
    agent.sock.sendall(encode(call))
    assert ended.get(timeout=FOREVER_S) == 1


def test_values_are_as_many_as_an_answer_holds(serve_engine: Callable[..., ServedAgent]) -> None:
    """And what is none is SIZE, which takes no room."""
    sizes = [VALUE_BYTES_MAX + 1, VALUE_BYTES_MAX, -1, *[VALUE_BYTES_MAX - 1] * 7]
    agent = serve_engine(read=lambda names: [None if size < 0 else bytes(size) for size in sizes[: len(names)]])
    answer = agent.ask(Read(1, ["n"] * len(sizes)))
    whole = VALUES_BYTES_MAX // VALUE_BYTES_MAX
    expected: list[bytes | int | None] = [
        Code.SIZE,
        bytes(VALUE_BYTES_MAX),
        None,
        *[bytes(VALUE_BYTES_MAX - 1)] * (whole - 1),
    ]
    assert answer == Values(1, expected)


@given(
    sizes=st.lists(
        st.sampled_from([-1, 0, 1, 48, VALUE_BYTES_MAX // 2, VALUE_BYTES_MAX, VALUE_BYTES_MAX + 1]),
        min_size=1,
        max_size=READ_NAMES_MAX,
    )
)
def test_reading_gets_on_and_its_answers_fit(sizes: list[int]) -> None:
    """Asked again for what did not fit, it all comes, in its order."""
    values = [None if size < 0 else bytes(size) for size in sizes]
    came: list[bytes | int | None] = []
    while len(came) < len(values):
        batch = serve._that_fit(values[len(came) :])
        assert len(encode(Values(1, batch), ANSWER_BYTES_MAX)) <= ANSWER_BYTES_MAX
        assert batch
        came += batch
    assert came == [Code.SIZE if size > VALUE_BYTES_MAX else value for size, value in zip(sizes, values, strict=True)]


@pytest.mark.parametrize("value", [bytes(VALUES_BYTES_MAX // READ_NAMES_MAX), bytes(1), None, Code.FAILED])
def test_the_largest_answers_fit(serve_engine: Callable[..., ServedAgent], value: Any) -> None:
    agent = serve_engine(
        read=lambda names: [value] * len(names), renew=lambda names, kept_s: [Code.REFUSED] * len(names)
    )
    assert agent.ask(Read(1, ["n" * 100] * READ_NAMES_MAX)) == Values(1, [value] * READ_NAMES_MAX)
    codes = array("q", [Code.REFUSED] * NAMES_MAX).tobytes()
    assert agent.ask(Renew(2, ["n" * 100] * NAMES_MAX, 1.0)) == Answer(2, codes)


def test_nothing_waits_for_a_sweep(serve_engine: Callable[..., ServedAgent]) -> None:
    go_on = threading.Event()

    def sweep(prefix: str, after: str) -> tuple[int, str]:
        go_on.wait(FOREVER_S)
        return 1, ""

    agent = serve_engine(
        sweep=sweep, exists=lambda names: [0] * len(names), read=lambda names: [None] * len(names),
        write=lambda name, value, **_: len(value), renew=lambda names, _: [1] * len(names),
        remove=lambda names: [1] * len(names), get=lambda wanted: [Code.MISS] * len(wanted),
        put=lambda wanted: [4103] * len(wanted),
    )  # fmt: skip
    agent.sock.sendall(encode(Sweep(1, "kvo1/", "")))
    place = (SPACE, KEY, packed(0), packed(0), packed(7))
    calls: list[FromDaemon] = [
        Exists(2, SPACE, KEY), Get(3, *place), Put(4, *place), Read(5, NAMES), Write(6, "a", b"v", True, None),
        Renew(7, NAMES, 1.0), Remove(8, NAMES),
    ]  # fmt: skip
    assert [agent.ask(call).id for call in calls] == [2, 3, 4, 5, 6, 7, 8]
    go_on.set()
    assert agent.receive() == Swept(1, 1, "")


def test_reads_do_not_wait_for_changes_nor_for_each_other(serve_engine: Callable[..., ServedAgent]) -> None:
    go_on = threading.Event()

    def read(names: Sequence[str]) -> list[None]:
        if "slow" in names:
            go_on.wait(FOREVER_S)
        return [None] * len(names)

    agent = serve_engine(read=read, remove=lambda names: go_on.wait(FOREVER_S) and [1] * len(names))
    agent.sock.sendall(encode(Remove(1, NAMES)) + encode(Remove(2, NAMES)) + encode(Read(3, ["slow"])))
    assert agent.ask(Read(4, NAMES)) == Values(4, [None] * 3)
    go_on.set()
    assert {agent.receive().id for _ in range(3)} == {1, 2, 3}
