"""The engine for Valkey, against a server that the test scripts: answers that are late, broken off, or wrong."""

from __future__ import annotations

import ctypes
import select
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from kvoffloadd.agent.engines.base import Memory, ObjectTransfer, Region
from kvoffloadd.agent.engines.resp import Piece, Reply, RespConnection
from kvoffloadd.agent.engines.valkey import ValkeyEngine
from kvoffloadd.agentwire.frames import VALUE_BYTES_MAX, Code, Presence

NO, YES, UNKNOWN = Presence
NOWHERE = Memory(Region(0, 0), Region(0, 0))
AT_START = {b"TOUCH": b":0\r\n", b"ZRANGE": b"*0\r\n", b"INFO": b"$0\r\n\r\n"}
SILENCE, CLOSE = b"", None
HEAD, TAIL = 8, 5
SIZE = HEAD + TAIL
OBJECT = b"$13\r\nHEADHEADTAIL!\r\n"
NIL = b"$-1\r\n"
FOREVER_S = 60.0

Answer = Callable[[int, list[bytes]], "bytes | None"]


class ScriptedServer(socketserver.ThreadingTCPServer):
    """`answer(connection, command)`: bytes, SILENCE, or CLOSE. Connections count from 0."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.answer: Answer = lambda _, command: AT_START[command[0]]
        self.connections: list[socket.socket] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}"


class _Connection(socketserver.StreamRequestHandler):
    server: ScriptedServer

    def handle(self) -> None:
        with self.server.lock:
            number = len(self.server.connections)
            self.server.connections.append(self.connection)
        with suppress(OSError):
            while line := self.rfile.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int(self.rfile.readline()[1:])
                    words.append(self.rfile.read(size + 2)[:size])
                response = self.server.answer(number, words)
                if response is CLOSE:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.connection.sendall(response)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        for connection in made.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def engine(server: ScriptedServer) -> Iterator[ValkeyEngine]:
    made = ValkeyEngine()
    made.start({"url": server.url, "deadline_s": FOREVER_S}, NOWHERE)
    made._small_s = FOREVER_S
    yield made
    made.close()


def test_an_answer_that_is_late_is_not_the_next_calls(server: ScriptedServer, engine: ValkeyEngine) -> None:
    """Its connection is never used again."""
    server.answer = lambda _, command: SILENCE if command[1] == b"late" else b":0\r\n"
    engine._small_s = 0.1
    assert engine.exists(["late"]) == [UNKNOWN]
    for connection in list(server.connections):
        with suppress(OSError):
            connection.sendall(b":1\r\n")
    engine._small_s = FOREVER_S
    assert engine.exists(["other"]) == [NO]


@pytest.mark.parametrize("reply", [b"?\r\n:1\r\n:1\r\n", b":\r\n:1\r\n:1\r\n", b"$1\r\nabc:1\r\n:1\r\n"])
def test_what_comes_behind_an_answer_that_can_not_be_is_not_the_next_calls(
    server: ScriptedServer, engine: ValkeyEngine, reply: bytes
) -> None:
    server.answer = lambda _, command: reply if command[1] == b"bad" else b":0\r\n"
    assert engine.exists(["bad"]) == [UNKNOWN]
    assert engine.exists(["other"]) == [NO]


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_second_reply_to_a_command_is_not_the_next_calls(
    server: ScriptedServer, engine: ValkeyEngine, when: str
) -> None:
    """Otherwise a marker that is gone would be there for as long as the connection lasts."""
    said = b":1\r\n" if when == "later" else b":1\r\n:1\r\n"
    server.answer = lambda _, command: said if command[1] == b"twice" else b":0\r\n"
    assert engine.exists(["twice"]) == [YES if when == "later" else UNKNOWN]
    if when == "later":
        for connection in list(server.connections):
            connection.sendall(b":1\r\n")
        assert select.select([engine._idle[-1]._sock], [], [], FOREVER_S)[0], "it has come"
    assert engine.exists(["other"]) == [NO]


def test_a_reply_too_many_is_not_the_next_names(server: ScriptedServer, engine: ValkeyEngine) -> None:
    """It is unknown which replies are whose."""
    server.answer = lambda _, command: b":1\r\n:1\r\n" if command[1] == b"twice" else b":0\r\n"
    assert engine.exists(["twice", "other", "third"]) == [UNKNOWN] * 3


def test_an_array_with_a_refusal_is_not_the_next_names_reply(server: ScriptedServer, engine: ValkeyEngine) -> None:
    server.answer = lambda _, command: b"*2\r\n-ERR\r\n:1\r\n" if command[1] == b"bad" else b":0\r\n"
    assert engine.exists(["bad", "other"]) == [UNKNOWN] * 2
    assert engine.exists(["other"]) == [NO]


@pytest.mark.parametrize("said", [b":2\r\n", b":-8\r\n", b":9223372036854775807\r\n", b":9223372036854775808\r\n"])
def test_a_number_that_can_not_be_costs_its_own_answer(
    server: ScriptedServer, engine: ValkeyEngine, said: bytes
) -> None:
    """The daemon ends an agent for codes that it does not know."""
    scanned = b"*2\r\n$1\r\n0\r\n*1\r\n$1\r\nk\r\n"
    others = {b"TIME": b"*2\r\n$1\r\n5\r\n$1\r\n0\r\n", b"ZRANGE": b"*0\r\n", b"SCAN": scanned}
    server.answer = lambda _, command: others.get(command[0], said)
    failed = ([Code.REFUSED], [Code.FAILED])
    assert engine.remove(["a"]) in failed
    assert engine.renew(["a"], 60.0) in failed
    assert engine.sweep("kvo1/", "") == (Code.FAILED, "")


@pytest.mark.parametrize("cursor", [b"x", b"7" * 65, b"-1"])
def test_a_sweep_goes_on_nowhere_else(server: ScriptedServer, engine: ValkeyEngine, cursor: bytes) -> None:
    server.answer = lambda _, command: b"*2\r\n$%d\r\n%b\r\n*0\r\n" % (len(cursor), cursor)
    engine._small_s = 0.5
    assert engine.sweep("kvo1/", "") == (Code.FAILED, "")


def test_a_refusal_costs_no_connection(server: ScriptedServer, engine: ValkeyEngine) -> None:
    server.answer = lambda _, command: b"-OOM no\r\n"
    assert engine.write("a", b"v", if_absent=True, kept_s=None) == Code.NO_SPACE
    server.answer = lambda _, command: b":1\r\n"
    assert engine.exists(["a"]) == [YES]
    assert len(server.connections) == 1


# --- a connection that is closed in the middle of a call: the call is made once more ---


def transfers(memory: ctypes.Array[ctypes.c_char]) -> list[ObjectTransfer]:
    """Three, each of two pieces."""
    at = ctypes.addressof(memory)
    return [
        ObjectTransfer(f"k{number}", [(at + number * SIZE, HEAD), (at + number * SIZE + HEAD, TAIL)])
        for number in range(3)
    ]


def closing_after(count: int, first: list[bytes], second: list[bytes]) -> Answer:
    """The first call's connection is closed after `count` answers; then the second call has its own."""
    left = {0: first[:count], 1: list(second)}

    def answer(connection: int, command: list[bytes]) -> bytes | None:
        return left[connection].pop(0) if left[connection] else CLOSE

    return answer


@pytest.mark.parametrize("came", range(3))
def test_gets_of_a_second_try_are_not_mixed_with_those_of_the_first(
    server: ScriptedServer, engine: ValkeyEngine, came: int
) -> None:
    server.answer = closing_after(came, [OBJECT] * 3, [NIL, OBJECT, b"$2\r\nab\r\n"])
    memory = ctypes.create_string_buffer(3 * SIZE)
    assert engine.get(transfers(memory)) == [Code.MISS, SIZE, Code.SIZE]
    assert memory.raw[SIZE : 2 * SIZE] == b"HEADHEADTAIL!"
    assert len(server.connections) == 2


@pytest.mark.parametrize("went", range(3))
def test_puts_of_a_second_try_are_not_mixed_with_those_of_the_first(
    server: ScriptedServer, engine: ValkeyEngine, went: int
) -> None:
    server.answer = closing_after(went, [b"+OK\r\n"] * 3, [NIL, b"-OOM no\r\n", b"+OK\r\n"])
    assert engine.put(transfers(ctypes.create_string_buffer(3 * SIZE))) == [SIZE, Code.NO_SPACE, SIZE]
    assert len(server.connections) == 2


def test_what_takes_too_much_of_the_servers_memory_is_not_sent(server: ScriptedServer) -> None:
    """The server would evict all others, and only then refuse it."""
    sent: list[bytes] = []

    def answer(_: int, command: list[bytes]) -> bytes:
        sent.append(command[0])
        about = b"maxmemory:%d\r\n" % (16 * SIZE - 1)
        return b"$%d\r\n%b\r\n" % (len(about), about) if command[0] == b"INFO" else AT_START[command[0]]

    server.answer = answer
    engine = ValkeyEngine()
    engine.start({"url": server.url, "deadline_s": FOREVER_S}, NOWHERE)
    assert engine.put(transfers(ctypes.create_string_buffer(3 * SIZE))) == [Code.NO_SPACE] * 3
    assert b"SET" not in sent
    engine.close()


@pytest.mark.parametrize("went", range(3))
def test_what_a_slow_link_has_brought_there_counts(
    server: ScriptedServer, engine: ValkeyEngine, monkeypatch: pytest.MonkeyPatch, went: int
) -> None:
    """Time is over in the middle of a put. Answers have some time in addition."""
    answered = threading.Semaphore(0)
    left = due = went
    until = {"send": 0.0, "reply": 0.0}
    send, reply = RespConnection.send, RespConnection.reply

    def answer(_: int, command: list[bytes]) -> bytes:
        answered.release()
        return b"+OK\r\n"

    def slow_send(connection: RespConnection, pieces: Sequence[Piece]) -> None:
        nonlocal left
        until["send"] = connection.until_s
        left -= 1
        if left < 0:
            raise TimeoutError("the server took too long")
        send(connection, pieces)
        assert answered.acquire(timeout=FOREVER_S)

    def slow_reply(connection: RespConnection) -> Reply:
        nonlocal due
        until["reply"] = connection.until_s
        due -= 1
        if due < 0:
            raise TimeoutError("the server took too long")
        return reply(connection)

    server.answer = answer
    monkeypatch.setattr(RespConnection, "send", slow_send)
    monkeypatch.setattr(RespConnection, "reply", slow_reply)
    codes = engine.put(transfers(ctypes.create_string_buffer(3 * SIZE)))
    assert codes == [SIZE] * went + [Code.FAILED] * (3 - went)
    assert until["send"] < until["reply"]
    monkeypatch.undo()
    assert engine.put(transfers(ctypes.create_string_buffer(3 * SIZE))) == [SIZE] * 3
    assert len(server.connections) == 2, "one that was broken off is not used again"


def test_a_second_try_that_is_broken_off_too_is_the_last(server: ScriptedServer, engine: ValkeyEngine) -> None:
    server.answer = closing_after(1, [OBJECT], [OBJECT, OBJECT])
    assert engine.get(transfers(ctypes.create_string_buffer(3 * SIZE))) == [SIZE, SIZE, Code.FAILED]


# --- small objects ---


def test_small_objects_that_can_not_be_read_are_nothing_to_the_others(
    server: ScriptedServer, engine: ValkeyEngine
) -> None:
    """What is too large is never asked for."""
    sizes = {b"a": 1, b"large": VALUE_BYTES_MAX + 1, b"none": 0, b"empty": 0, b"full": VALUE_BYTES_MAX}
    values = {b"a": b"$1\r\nv\r\n", b"none": NIL, b"empty": b"$0\r\n\r\n"}
    values[b"full"] = b"$%d\r\n%b\r\n" % (VALUE_BYTES_MAX, bytes(VALUE_BYTES_MAX))
    asked = []

    def answer(_: int, command: list[bytes]) -> bytes:
        asked.append(command)
        verb, name = command
        if name == b"list":
            return b"-WRONGTYPE no string\r\n"
        return b":%d\r\n" % sizes[name] if verb == b"STRLEN" else values[name]

    server.answer = answer
    assert engine.read(["a", "large", "none", "list", "empty", "full", "a"]) == [
        b"v",
        Code.SIZE,
        None,
        Code.REFUSED,
        b"",
        bytes(VALUE_BYTES_MAX),
        b"v",
    ]
    assert [b"GET", b"large"] not in asked
    assert engine.read([]) == []


def test_a_server_that_is_gone_is_a_failure_of_each(server: ScriptedServer, engine: ValkeyEngine) -> None:
    server.answer = lambda _, command: CLOSE
    assert engine.read(["a", "b"]) == engine.renew(["a", "b"], 60.0) == [Code.FAILED] * 2
    assert engine.sweep("kvo1/", "") == (Code.FAILED, "")


def test_a_step_of_a_sweep_is_bounded_and_the_next_one_goes_on_there(
    server: ScriptedServer, engine: ValkeyEngine
) -> None:
    found = [b"$4\r\nk%03d\r\n" % number for number in range(700)]
    commands: list[list[bytes]] = []

    def answer(_: int, command: list[bytes]) -> bytes:
        commands.append(command)
        if command[0] == b"UNLINK":
            return b":700\r\n"
        cursor = {b"0": b"33", b"33": b"21", b"21": b"47", b"47": b"0"}[command[1]]
        return b"*2\r\n$%d\r\n%b\r\n*700\r\n%b" % (len(cursor), cursor, b"".join(found))

    server.answer = answer
    first = engine.sweep("kvo1/x/", "")
    assert first == (1400, "21")
    assert engine.sweep("kvo1/x/", first[1]) == (1400, "")
    assert [command[1] for command in commands if command[0] == b"SCAN"] == [b"0", b"33", b"21", b"47"]
    assert all(command[3] == b"kvo1/x/*" for command in commands if command[0] == b"SCAN")
