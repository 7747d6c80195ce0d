"""An engine of the agent's in a separate process, on a host of a lab, over memory that is shared with this process.

`EngineHost` is this side: it calls the engine, and sees every byte of its memory. The other one is
`python -m scripts.harness.enginehost`. Each call runs there in a thread, so that one that hangs holds up no others.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgpack
import numpy as np

from kvoffloadd.agent.engines.base import EngineError, Memory, ObjectTransfer, Region
from kvoffloadd.agent.engines.registry import make_engine
from kvoffloadd.agentwire.frames import HEADER_BYTES
from kvoffloadd.model import U8Array
from kvoffloadd.testing.process import DaemonError, end, module, spawn, tail
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.lab import Host

_MEMORY_BYTES = 128 << 20
BASE = "base"
"""In place of a method: where the memory lies in the engine's process."""
_PIPE = -1
_STOP_S = 10.0

Wanted = tuple[str, list[tuple[int, int]]]
"""An object's name, and its pieces: offset in the host's memory, bytes."""


class Pending:
    """A call that is under way."""

    def __init__(self, answers: queue.SimpleQueue[dict[str, Any]], log: Path) -> None:
        self._answers = answers
        self._log = log
        self._answer: dict[str, Any] | None = None

    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._answer is not None or not self._answers.empty()

    def result(self, deadline_s: float = HANG_S) -> Any:
        """What the engine answered. Raises DaemonError: it raised, has no answer in time, or its process is dead."""
        if self._answer is None:
            try:
                self._answer = self._answers.get(timeout=deadline_s)
            except queue.Empty:
                raise DaemonError(f"no answer of the engine within {deadline_s:g} s:\n{tail(self._log)}") from None
        if "error" in self._answer:
            raise DaemonError(f"{self._answer['error']}\n{tail(self._log)}")
        return self._answer["result"]

    @property
    def seconds(self) -> float:
        """How long the engine took."""
        self.result()
        return float((self._answer or {})["seconds"])


class EngineHost:
    """An engine that has started. As a context it runs within."""

    def __init__(self, host: Host, name: str, settings: Mapping[str, Any], folder: Path) -> None:
        self._command = [*host.enter, *module("scripts.harness.enginehost", name, json.dumps(dict(settings)))]
        self._log = folder / f"engine-{host.address}-{id(self):x}.log"
        self._fd = os.memfd_create("kvo-enginehost", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _MEMORY_BYTES)
        self.memory: U8Array = np.frombuffer(mmap.mmap(self._fd, _MEMORY_BYTES), np.uint8)
        self._pending: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._fd)

    def start(self) -> None:
        """Raises DaemonError: the engine refuses to start."""
        command = ["/usr/bin/env", *self._command, f"/proc/{os.getpid()}/fd/{self._fd}"]
        self._child = spawn(command, self._log, stdin=_PIPE, stdout=_PIPE)
        threading.Thread(target=self._receive, args=(self._child.stdout,), daemon=True).start()
        self.about = str(self.begin("about").result())

    def kill(self) -> None:
        """SIGKILL; calls that are under way have no answer."""
        end(self._child, signal.SIGKILL, _STOP_S)
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    @property
    def pid(self) -> int:
        """Returns the pid of the engine's process."""
        return self._child.pid

    def log(self) -> str:
        """Returns what its process has logged."""
        return tail(self._log)

    # --- calls ---

    def begin(self, method: str, *arguments: Any, **named: Any) -> Pending:
        """Call the engine; transfers are given as `Wanted`."""
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._count += 1
            number = self._count
            self._pending[number] = answers
            if self._child.stdin is None:
                raise DaemonError("the engine's process has ended")
            self._child.stdin.write(msgpack.packb([number, method, arguments, named]))
            self._child.stdin.flush()
        return Pending(answers, self._log)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """The same, and its answer."""
        return self.begin(method, *arguments, **named).result()

    def get(self, wanted: Sequence[Wanted]) -> list[int]:
        """Codes, or bytes that came."""
        return list(self.call("get", wanted))

    def put(self, wanted: Sequence[Wanted]) -> list[int]:
        """Codes, or bytes that are there."""
        return list(self.call("put", wanted))

    def exists(self, *names: str) -> list[int]:
        """A presence each."""
        return list(self.call("exists", names))

    def read(self, name: str) -> Any:
        """One small object, None or a code."""
        (value,) = self.call("read", [name])
        return value

    def sweep(self, prefix: str) -> int:
        """All steps of it: objects that were removed, or a code."""
        swept, after = 0, ""
        while True:
            step: tuple[int, str] = self.call("sweep", prefix, after)
            removed, after = step
            if removed < 0:
                return removed
            swept += removed
            if not after:
                return swept

    def _receive(self, stream: Any) -> None:
        unpacker = msgpack.Unpacker()
        try:
            while data := stream.read1(1 << 16):
                unpacker.feed(data)
                for number, answer in unpacker:
                    self._pending.pop(number).put(answer)
        except (OSError, ValueError):
            pass
        for answers in list(self._pending.values()):
            answers.put({"error": "the engine's process has ended"})


def main() -> None:
    """The other side: the engine."""
    name, settings, path = sys.argv[1:]
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lock = threading.Lock()

    def answer(number: int, value: dict[str, Any]) -> None:
        with lock:
            output.write(msgpack.packb([number, value]))

    def work(number: int, method: str, arguments: list[Any], named: dict[str, Any]) -> None:
        began = time.monotonic()
        try:
            if method in ("get", "put"):
                arguments = [[_transfer(base, *wanted) for wanted in arguments[0]]]
            result = base if method == BASE else getattr(engine, method)(*arguments, **named)
        except Exception as error:  # noqa: BLE001  the other side gets it
            traceback.print_exc()
            answer(number, {"error": f"{type(error).__name__}: {error}"})
        else:
            answer(number, {"result": result, "seconds": time.monotonic() - began})

    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), _MEMORY_BYTES)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    engine = make_engine(name)
    refused = ""
    try:
        engine.start(json.loads(settings), _memory_of(base))
    except EngineError as error:
        refused = f"EngineError ({error.fault}): {error}"
    unpacker = msgpack.Unpacker()
    while data := os.read(0, 1 << 16):
        unpacker.feed(data)
        for number, *call in unpacker:
            if refused:
                answer(number, {"error": refused})
            else:
                threading.Thread(target=work, args=(number, *call), daemon=True).start()
    os._exit(0)


def _memory_of(base: int) -> Memory:
    header_bytes = _MEMORY_BYTES // 4 // HEADER_BYTES * HEADER_BYTES
    return Memory(Region(base, _MEMORY_BYTES - header_bytes), Region(base + _MEMORY_BYTES - header_bytes, header_bytes))


def _transfer(base: int, name: str, pieces: list[tuple[int, int]]) -> ObjectTransfer:
    return ObjectTransfer(name, [(base + offset, size) for offset, size in pieces])


if __name__ == "__main__":
    main()
