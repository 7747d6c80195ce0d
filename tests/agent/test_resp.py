"""The connection to a Valkey server: what is sent, what comes of any bytes whatever, and where they go."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.agent.engines.resp import (
    ProtocolError,
    Reply,
    ReplyError,
    RespConnection,
    Server,
    command,
    command_with,
)

LONG_S = 60.0


class Wire:
    """A connection whose other end is the test."""

    def __init__(self, until_s: float | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            host, port = server.getsockname()
            self.connection = RespConnection(Server(host, port), until_s or time.monotonic() + LONG_S)
            self.peer, _ = server.accept()

    def close(self) -> None:
        self.connection.close()
        self.peer.close()

    def say(self, data: bytes, *, end: bool = False) -> None:
        """Sends in a thread: it may be more than the socket takes."""

        def work() -> None:
            try:
                self.peer.sendall(data)
                if end:
                    self.peer.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        threading.Thread(target=work, daemon=True).start()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (b"+OK\r\n", "OK"),
        (b":42\r\n", 42),
        (b"$5\r\nab\r\nc\r\n", b"ab\r\nc"),
        (b"$0\r\n\r\n", b""),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"*2\r\n$1\r\n0\r\n*1\r\n:7\r\n", [b"0", [7]]),
    ],
)
def test_replies(wire: Wire, sent: bytes, meant: Reply) -> None:
    wire.say(sent + b":1\r\n")
    assert wire.connection.reply() == meant
    assert wire.connection.reply() == 1


def test_a_refusal_leaves_the_stream_where_it_is(wire: Wire) -> None:
    wire.say(b"-OOM command not allowed\r\n+OK\r\n")
    with pytest.raises(ReplyError, match="OOM command not allowed") as caught:
        wire.connection.reply()
    assert caught.value.kind == "OOM"
    assert wire.connection.reply() == "OK"


@given(sizes=st.lists(st.integers(0, 50_000), min_size=1, max_size=4), more=st.integers(-1, 70_000))
def test_strings_go_to_their_pieces(sizes: list[int], more: int) -> None:
    """If they have the size of all pieces together; else to nowhere, and the next reply is found."""
    wire = Wire()
    try:
        size = sum(sizes) if more < 0 else more
        content = bytes(number % 251 for number in range(size))
        memory = bytearray(b"\xa5" * (sum(sizes) + 10))
        at, pieces = 5, []
        for each in sizes:
            pieces.append(memoryview(memory)[at : at + each])
            at += each
        wire.say(b"$%d\r\n%b\r\n+next\r\n" % (size, content), end=True)
        assert wire.connection.reply_into(pieces) == size
        assert wire.connection.reply() == "next"
        fits = size == sum(sizes)
        assert memory == b"\xa5" * 5 + (content if fits else b"\xa5" * sum(sizes)) + b"\xa5" * 5
    finally:
        wire.close()


GARBAGE = st.one_of(
    st.binary(max_size=200),
    st.lists(st.sampled_from([b"$", b"*", b":", b"+", b"-", b"\r\n", b"5", b"99999999999", b"-1", b"abc"])).map(
        b"".join
    ),
)


@given(sent=GARBAGE)
def test_any_bytes_end_in_a_reply_or_an_error(sent: bytes) -> None:
    """They never end in a hang, take much memory, or write outside the pieces."""
    for read in (lambda wire: wire.connection.reply(), _read_into):
        wire = Wire()
        try:
            wire.say(sent, end=True)
            for _ in range(20):
                read(wire)
        except (OSError, ReplyError):
            pass
        finally:
            wire.close()


def _read_into(wire: Wire) -> None:
    memory = bytearray(b"\xa5" * 30)
    wire.connection.reply_into([memoryview(memory)[10:15], memoryview(memory)[15:20]])
    assert memory[:10] == memory[20:] == b"\xa5" * 10


@pytest.mark.parametrize(
    "sent",
    [
        b"$99999999999\r\n",
        b"*99999999999\r\n",
        b"*1\r\n" * 50,
        b"*2\r\n-ERR no value\r\n:1\r\n",
        b":9223372036854775808\r\n",
        b":-9223372036854775808\r\n",
        b"x" * 100_000,
        b"$x\r\n",
        b"\r\n",
        b"!\r\n",
        b"$1\r\nabc",
    ],
)
def test_what_cannot_be_is_refused_at_once(wire: Wire, sent: bytes) -> None:
    wire.say(sent)
    with pytest.raises(ProtocolError):
        wire.connection.reply()


@pytest.mark.parametrize("sent", [b"", b"$5\r\n", b"$5\r\nab", b"+O", b"*2\r\n:1\r\n"])
def test_an_end_in_the_middle(wire: Wire, sent: bytes) -> None:
    wire.say(sent, end=True)
    with pytest.raises(ConnectionError):
        wire.connection.reply()


def test_the_deadline_is_one_for_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them answers. The daemon ends an agent whose calls take much longer than that."""
    with socket.socket() as full, contextlib.ExitStack() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            ahead = waiting.enter_context(socket.socket())
            ahead.setblocking(False)
            ahead.connect_ex(full.getsockname())
        address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", full.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [address] * 8)
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            RespConnection(Server("host", 6379), began_s + 1.0)
        assert time.monotonic() - began_s < 4.0


def test_an_address_that_does_not_answer_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server, socket.socket() as closed:
        server.bind(("127.0.0.1", 0))
        server.listen()
        closed.bind(("127.0.0.1", 0))  # it does not listen
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each.getsockname()) for each in (closed, server)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        RespConnection(Server("host", 6379), time.monotonic() + LONG_S).close()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[:1])
        with pytest.raises(ConnectionRefusedError):
            RespConnection(Server("host", 6379), time.monotonic() + LONG_S)


def test_the_deadline_is_one_for_all_reads(wire: Wire) -> None:
    """However often something comes."""
    stop = threading.Event()

    def trickle() -> None:
        try:
            wire.peer.sendall(b"$1000000\r\n")
            for _ in range(300):
                if stop.wait(0.01):
                    return
                wire.peer.sendall(b"x")
            wire.peer.shutdown(socket.SHUT_WR)  # it was read for too long
        except OSError:
            pass

    thread = threading.Thread(target=trickle)
    thread.start()
    wire.connection.until_s = time.monotonic() + 0.3
    with pytest.raises(TimeoutError):
        wire.connection.reply()
    stop.set()
    thread.join()


@given(sizes=st.lists(st.integers(0, 3000), max_size=1200))
def test_pieces_are_sent_whole_and_in_order(sizes: list[int]) -> None:
    """More pieces than one system call takes, through a socket that takes little at a time."""
    wire = Wire()
    try:
        pieces = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
        expected = b"*4\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%b\r\n$2\r\nNX\r\n" % (sum(sizes), b"".join(pieces))
        got = bytearray()

        def receive() -> None:
            while len(got) < len(expected):
                got.extend(wire.peer.recv(1 << 16))

        thread = threading.Thread(target=receive)
        thread.start()
        wire.connection.send(command_with(("SET", "k"), pieces, ("NX",)))
        thread.join()
        assert got == expected
    finally:
        wire.close()


def test_commands() -> None:
    assert command("GET", "ü") == b"*2\r\n$3\r\nGET\r\n$2\r\n\xc3\xbc\r\n"
    assert command("SET", b"\x00\r\n") == b"*2\r\n$3\r\nSET\r\n$3\r\n\x00\r\n\r\n"


def test_who_asks_says_so_first() -> None:
    """User and password, then the database; a server that refuses is left."""
    for answers, raises in ((b"+OK\r\n+OK\r\n", None), (b"-WRONGPASS no\r\n", ReplyError)):
        with socket.create_server(("127.0.0.1", 0)) as server:
            host, port = server.getsockname()
            heard: list[bytes] = []

            def serve(answers: bytes = answers, heard: list[bytes] = heard) -> None:
                peer, _ = server.accept()
                with peer:
                    peer.sendall(answers)
                    while data := peer.recv(1 << 16):
                        heard.append(data)

            thread = threading.Thread(target=serve)
            thread.start()
            place = Server(host, port, 3, "me", "secret")
            if raises:
                with pytest.raises(raises):
                    RespConnection(place, time.monotonic() + LONG_S)
            else:
                RespConnection(place, time.monotonic() + LONG_S).close()
            thread.join()
            expected = command("AUTH", "me", "secret") + (b"" if raises else command("SELECT", "3"))
            assert b"".join(heard) == expected


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
@pytest.mark.parametrize("more", [b"", b"+EXTRA\r\n"], ids=["one reply", "another in the same record"])
def test_what_tls_has_read_with_a_reply_counts(tmp_path: Path, more: bytes) -> None:
    """It lies within the TLS library, where no poll sees it."""
    cert, key = tmp_path / "cert", tmp_path / "key"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=here -keyout {key} -out {cert}".split()
    subprocess.run(["openssl", *words], check=True, capture_output=True, timeout=LONG_S)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(cert, key)
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.load_verify_locations(cert)
    trusting.check_hostname = False
    payload = bytes(20_000)  # more than one record

    with socket.create_server(("127.0.0.1", 0)) as server:

        def work() -> None:
            plain, _ = server.accept()
            with serving.wrap_socket(plain, server_side=True) as peer:
                peer.recv(1 << 16)
                peer.sendall(b"$20000\r\n" + payload + b"\r\n" + more)
                peer.recv(1)

        threading.Thread(target=work, daemon=True).start()
        host, port = server.getsockname()
        connection = RespConnection(Server(host, port, tls=trusting), time.monotonic() + LONG_S)
        try:
            assert connection.ask("GET", "x") == payload
            assert connection.has_more == bool(more)
            assert connection.is_quiet == (not more)
        finally:
            connection.close()
