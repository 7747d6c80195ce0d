"""The agent's work: frames from the daemon, calls of the engine in threads of their own kind, and an answer to each.

`exists` never waits behind bytes, and gets never behind puts. The daemon sends no more calls of a kind than there are
threads for it, or a few: nothing here grows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from kvoffloadd.agent.engines.base import Engine, EngineError, Memory
from kvoffloadd.agent.engines.registry import make_engine
from kvoffloadd.agent.memory import map_memory
from kvoffloadd.agent.names import asked_names, transfers
from kvoffloadd.agentframes import (
    ANSWER_BYTES_MAX,
    FDS,
    TEXT_MAX,
    VALUE_BYTES_MAX,
    VERSION,
    Answer,
    Call,
    Code,
    Exists,
    Frames,
    FromAgent,
    FromDaemon,
    Get,
    Greeting,
    Presence,
    Put,
    Read,
    Refused,
    Remove,
    Start,
    Started,
    Sweep,
    Value,
    Write,
    encode,
)
from kvoffloadd.errors import FramingError
from kvoffloadd.sockets import close_fds, unpack_fds

log = logging.getLogger(__name__)

CLOSE_S: Final = 1.0
"""What the engine gets to close: the process ends either way."""

_READ_BYTES = 256 << 10


class Agent:
    """One connection to the daemon, over `sock`, for the life of the process."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = Frames(by_agent=False)
        self._sending = threading.Lock()
        self._fds: list[int] = []
        self._queues: dict[type[Call], queue.SimpleQueue[Call]] = {}
        self._engine: Engine | None = None
        self._memory: Memory | None = None

    def run(self) -> int:
        """Until the daemon is gone, or has had enough. The exit status; threads of the engine may still run."""
        self._send(Greeting(VERSION, os.getpid()))
        try:
            start = self._receive()
            if start is None:
                return 0
            if not isinstance(start, Start) or len(self._fds) != FDS:
                raise FramingError("the first frame must start the engine and carry two descriptors")
            if not self._start(start):
                return 1
            while (call := self._receive()) is not None:
                if isinstance(call, Start):
                    raise FramingError("the engine has started")
                self._queues[type(call)].put(call)
        except FramingError as error:
            log.error("invalid message from the daemon: %s", error)
            return 1
        self._close()
        return 0

    def _start(self, start: Start) -> bool:
        try:
            self._memory = map_memory(start, *self._fds)
        except (OSError, ValueError) as error:
            self._send(Refused("daemon", f"its memory can't be mapped: {error}"[:TEXT_MAX]))
            return False
        close_fds(self._fds)
        try:
            self._engine = engine = make_engine(start.engine)
            engine.start(start.settings, self._memory)
            about = engine.about()
        except EngineError as error:
            self._send(Refused(error.fault, str(error)[:TEXT_MAX]))
            return False
        except Exception as error:
            log.exception("the engine can't start")
            self._send(Refused("store", f"{type(error).__name__}: {error}"[:TEXT_MAX]))
            return False
        asking = self._serve(1)
        values = self._serve(1)
        self._queues = {
            Exists: asking,
            Get: self._serve(start.get_threads),
            Put: self._serve(start.put_threads),
            **dict.fromkeys((Read, Write, Remove, Sweep), values),
        }
        self._send(Started(engine.stops_at_once, about[:TEXT_MAX]))
        return True

    def _serve(self, threads: int) -> queue.SimpleQueue[Call]:
        calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._work, args=(calls,), daemon=True).start()
        return calls

    def _close(self) -> None:
        if self._engine is not None:
            closing = threading.Thread(target=self._engine.close, daemon=True)
            closing.start()
            closing.join(CLOSE_S)

    # --- calls ---

    def _work(self, calls: queue.SimpleQueue[Call]) -> None:
        while True:
            call = calls.get()
            try:
                answer = self._answer(call)
            except FramingError as error:
                log.error("invalid request from the daemon: %s", error)
                os._exit(1)
            self._send(answer)

    def _answer(self, call: Call) -> Answer | Value:
        engine, memory = self._engine, self._memory
        if engine is None or memory is None:
            raise FramingError("a call came before the engine had started")
        if isinstance(call, Exists):
            names = asked_names(call)
            return _packed(call.id, _many(lambda: engine.exists(names), len(names), Presence.UNKNOWN))
        if isinstance(call, Get | Put):
            wanted = transfers(call, memory)
            make = engine.get if isinstance(call, Get) else engine.put
            return _packed(call.id, _many(lambda: make(wanted), len(wanted), Code.FAILED))
        if isinstance(call, Read):
            return self._read(engine, call)
        if isinstance(call, Write):
            write = call
            codes = _many(
                lambda: [engine.write(write.name, write.value, if_absent=write.if_absent, pinned=write.pinned)],
                1, Code.FAILED,
            )  # fmt: skip
        elif isinstance(call, Remove):
            names = call.names
            codes = _many(lambda: engine.remove(names), len(names), Code.FAILED)
        else:
            prefix = call.prefix
            codes = _many(lambda: [engine.sweep(prefix)], 1, Code.FAILED)
        return _packed(call.id, codes)

    def _read(self, engine: Engine, call: Read) -> Answer | Value:
        try:
            value = engine.read(call.name)
        except Exception:
            log.exception("the engine failed")
            return _packed(call.id, [Code.FAILED])
        if value is not None and len(value) > VALUE_BYTES_MAX:
            return _packed(call.id, [Code.SIZE])
        return Value(call.id, value)

    # --- the socket ---

    def _receive(self) -> FromDaemon | None:
        """The next message; None: the daemon is gone, or wants no more."""
        while (message := self._frames.next()) is None:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(_READ_BYTES, socket.CMSG_SPACE(FDS * array("i").itemsize))
            except ConnectionError:
                return None
            self._fds += unpack_fds(ancillary)
            if not data:
                return None
            self._frames.receive(data)
        return message  # type: ignore[return-value]  # the decoder knows no others

    def _send(self, message: FromAgent) -> None:
        frame = encode(message, ANSWER_BYTES_MAX)
        with self._sending, contextlib.suppress(ConnectionError):  # the daemon is gone: `_receive` sees it, too
            self._sock.sendall(frame)


def _many(call: Callable[[], Sequence[int]], count: int, failed: int) -> list[int]:
    """What the engine answers for each; `failed` for all if it raises, or answers for another number of them."""
    try:
        codes = list(call())
    except Exception:  # a client of a store may raise anything, and others' calls go on
        log.exception("the engine failed")
        return [failed] * count
    if len(codes) != count:
        log.error("the engine returned %d answers for %d items", len(codes), count)
        return [failed] * count
    return codes


def _packed(call_id: int, codes: Sequence[int]) -> Answer:
    return Answer(call_id, array("q", codes).tobytes())
