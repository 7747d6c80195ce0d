"""`python -m scripts.harness.timed serve ...`: the daemon, on a loop that measures the CPU time of each of its turns.

A turn is all that the loop does before it looks at its sockets and timers again. The longest is recorded in a file of
the environment's KVO_TURNS, which the reader maps, too: it costs the daemon nothing that would be measured.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from asyncio.events import Handle
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.cli import main

VARIABLE = "KVO_TURNS"
PROGRAM = ("-m", "scripts.harness.timed")
RECORD = np.dtype([("turn_s", "f8"), ("collector_s", "f8"), ("part_s", "f8"), ("part", "S160")])


class Turns:
    """The longest turn since the last look. `part`: what took longest of it; `collector_s`: Python's garbage collector.

    The first one makes the file.
    """

    def __init__(self, path: Path) -> None:
        self._record: Any = np.memmap(path, RECORD, "r+" if path.exists() else "w+", shape=1)[0]

    def note(self, turn_s: float, collector_s: float, part_s: float, part: str) -> None:
        """A turn is over."""
        if turn_s > self._record["turn_s"]:
            self._record["part_s"], self._record["part"] = part_s, part.encode()[-160:]
            self._record["collector_s"], self._record["turn_s"] = collector_s, turn_s

    def take(self) -> dict[str, Any]:
        """The longest since the last call."""
        found = {name: float(self._record[name]) for name in ("turn_s", "collector_s", "part_s")}
        part = bytes(self._record["part"]).decode(errors="replace")
        self._record["turn_s"] = 0.0
        return {**found, "part": part}


class TimedLoop(asyncio.SelectorEventLoop):
    """Measures each of its turns."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = Turns(Path(os.environ[VARIABLE]))
        self._collector_s = self._part_s = self._collecting_since = 0.0
        self._part: Handle | None = None
        self._plain_run = Handle._run
        Handle._run = self._timed(Handle._run)  # type: ignore[method-assign]
        gc.callbacks.append(self._on_collector)

    def _run_once(self) -> None:
        self._collector_s = self._part_s = 0.0
        begun = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self._turns.note(time.thread_time() - begun, self._collector_s, self._part_s, _name(self._part))

    def _timed(self, run: Any) -> Any:
        def timed(handle: Handle) -> None:
            begun = time.thread_time()
            run(handle)
            took_s = time.thread_time() - begun
            if took_s > self._part_s:
                self._part_s, self._part = took_s, handle

        return timed

    def _on_collector(self, phase: str, _about: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = time.thread_time()
        else:
            self._collector_s += time.thread_time() - self._collecting_since


def _name(handle: Handle | None) -> str:
    """The function or coroutine that it calls."""
    callback: Any = getattr(handle, "_callback", None)
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return str(getattr(task.get_coro(), "__qualname__", task))
    return str(getattr(getattr(callback, "func", callback), "__qualname__", callback))


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return TimedLoop()


if __name__ == "__main__":
    asyncio.set_event_loop_policy(_Policy())
    sys.exit(main())
