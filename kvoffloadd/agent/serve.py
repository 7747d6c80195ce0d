"""The agent's work: frames from the daemon, calls of the engine in separate threads by kind, and an answer to each.

`exists` never waits behind bytes, gets never behind puts, and nothing behind a sweep. The daemon sends at most a few
more calls of a kind than there are threads for it: nothing here grows.
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
from typing import Final, TypeVar

from kvoffloadd.agent.engines.base import Engine, EngineError, Memory
from kvoffloadd.agent.engines.registry import make_engine
from kvoffloadd.agent.memory import map_memory
from kvoffloadd.agent.names import requested_names, transfers
from kvoffloadd.agentwire.frames import (
    ANSWER_BYTES_MAX,
    CHANGE_THREADS,
    FDS,
    READ_THREADS,
    TEXT_MAX,
    VALUE_BYTES_MAX,
    VALUES_BYTES_MAX,
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
from kvoffloadd.errors import FramingError
from kvoffloadd.linux.sockets import close_fds, unpack_fds

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S: Final = 1.0
"""The time that the engine has to close: the process ends either way."""

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
        """Runs until the daemon is gone or ends the connection. Returns the exit status; threads of the engine
        may still run.
        """
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
        self._queues = {
            Exists: self._serve(1),
            Get: self._serve(start.get_threads),
            Put: self._serve(start.put_threads),
            Read: self._serve(READ_THREADS),
            **dict.fromkeys((Write, Renew, Remove), self._serve(CHANGE_THREADS)),
            Sweep: self._serve(1),
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
                self._send(self._answer(call))
            except FramingError as error:
                log.error("invalid request from the daemon: %s", error)
                os._exit(1)
            except Exception:  # without this thread, the agent would go on and never answer the call, nor others
                log.exception("a call has no answer")
                os._exit(1)

    def _answer(self, call: Call) -> Reply:
        engine, memory = self._engine, self._memory
        if engine is None or memory is None:
            raise FramingError("a call came before the engine had started")
        if isinstance(call, Exists):
            names = requested_names(call)
            return _packed(call.id, _many(lambda: engine.exists(names), len(names), Presence.UNKNOWN))
        if isinstance(call, Get | Put):
            wanted = transfers(call, memory)
            make = engine.get if isinstance(call, Get) else engine.put
            return _packed(call.id, _many(lambda: make(wanted), len(wanted), Code.FAILED))
        if isinstance(call, Read):
            return Values(call.id, _that_fit(_many(lambda: engine.read(call.names), len(call.names), Code.FAILED)))
        if isinstance(call, Sweep):
            failed: tuple[int, str] = (Code.FAILED, "")
            ((removed, after),) = _many(lambda: [engine.sweep(call.prefix, call.after)], 1, failed)
            return Swept(call.id, removed, after)
        return _packed(call.id, _change(engine, call))

    # --- the socket ---

    def _receive(self) -> FromDaemon | None:
        """Returns the next message; None: the daemon is gone, or wants no more."""
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
        with self._sending, contextlib.suppress(ConnectionError):  # the daemon is gone: `_receive` detects it, too
            self._sock.sendall(frame)


def _change(engine: Engine, call: Write | Renew | Remove) -> list[int]:
    if isinstance(call, Write):
        return _many(
            lambda: [engine.write(call.name, call.value, if_absent=call.if_absent, kept_s=call.kept_s)], 1, Code.FAILED
        )
    if isinstance(call, Renew):
        return _many(lambda: engine.renew(call.names, call.kept_s), len(call.names), Code.FAILED)
    return _many(lambda: engine.remove(call.names), len(call.names), Code.FAILED)


def _many(call: Callable[[], Sequence[T]], count: int, failed: T) -> list[T]:
    """Returns the engine's answer for each; `failed` for all if it raises, or answers for another number of them, which
    leaves the answers without owners.
    """
    try:
        answers = list(call())
    except Exception:  # a client of a store may raise anything, and other calls continue
        log.exception("the engine failed")
        return [failed] * count
    if len(answers) != count:
        log.error("the engine returned %d answers for %d items", len(answers), count)
        return [failed] * count
    return answers


def _that_fit(values: Sequence[bytes | int | None]) -> list[bytes | int | None]:
    """Returns the first ones, as many as one answer holds; SIZE in place of objects that are too large."""
    fit: list[bytes | int | None] = []
    left_bytes = VALUES_BYTES_MAX
    for value in values:
        if isinstance(value, bytes):
            if len(value) > VALUE_BYTES_MAX:
                fit.append(Code.SIZE)
                continue
            left_bytes -= len(value)
            if left_bytes < 0:
                break
        fit.append(value)
    return fit


def _packed(call_id: int, codes: Sequence[int]) -> Answer:
    return Answer(call_id, array("q", codes).tobytes())
