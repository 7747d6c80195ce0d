"""What stands in for the agent: sends what the daemon does not expect. Run as `remote.python`, by way of a script."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from kvoffloadd.agentwire.frames import VERSION, Answer, Frames, Greeting, Refused, Started, Values, encode


def main(kind: str) -> None:  # noqa: C901  a list of what can go wrong
    sock = socket.socket(fileno=0)
    if kind == "silent":
        time.sleep(3600)
    if kind == "garbage at once":
        sock.sendall(os.urandom(5000))
    elif kind == "huge frame":
        sock.sendall(b"\xff\xff\xff\xff")
    elif kind == "answer at once":
        sock.sendall(encode(Answer(1, bytes(8))))
    elif kind == "started at once":
        sock.sendall(encode(Started(True, "x")))
    elif kind == "other version":
        sock.sendall(encode(Greeting(VERSION + 1, os.getpid())))
    elif kind == "other process":
        sock.sendall(encode(Greeting(VERSION, os.getppid())))
    elif kind == "closes":
        sock.close()
    elif kind == "prints":
        line = b"kvo1/" + b"ab" * 16 + b"/secret and more " + b"x" * 2000 + b"\n"
        for _ in range(2000):
            os.write(2, line)
        for _ in range(200):
            os.write(2, b"\n" * 50_000)
        os.write(1, b"on standard output\n\x1b[31m\xff\n")
        os.close(1)
        sys.exit(3)
    elif kind.startswith("after start"):
        after_start(sock, kind)
    time.sleep(3600)


def after_start(sock: socket.socket, kind: str) -> None:
    sock.sendall(encode(Greeting(VERSION, os.getpid())))
    frames = Frames(by_agent=False)
    while frames.next() is None:
        frames.receive(sock.recv(1 << 16))
    if kind == "after start: never ready":
        time.sleep(3600)
    if kind == "after start: refuses and stays":
        sock.sendall(encode(Refused("st\nore", "not\x1b today" + 3000 * "x")))
        time.sleep(3600)
    sock.sendall(encode(Started(True, "bad")))
    if kind == "after start: flood":
        while True:
            sock.sendall(encode(Answer(1, bytes(8))) * 1000)
    if kind == "after start: value":
        sock.sendall(encode(Values(1, [b"x"])))
    if kind == "after start: second greeting":
        sock.sendall(encode(Greeting(VERSION, os.getpid())))
    if kind == "after start: stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "after start: half a frame":
        sock.sendall(encode(Answer(1, bytes(8)))[:-1])
        sock.shutdown(socket.SHUT_WR)


main(" ".join(sys.argv[1:]))
