"""How long others wait while something runs: two processes, one that pings the daemon, one that only sleeps.

The second one tells the machine's own noise: what an idle asyncio process waits beyond the time it asked for.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from _bench import p50, p99
from _daemon import spawn

from kvoffloadd.client import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from types import TracebackType
    from typing import Self

EVERY_S = 0.002


class LagProbe:
    """Both processes. `begin` and `end` enclose what is watched."""

    def __init__(self, socket: Path, folder: Path) -> None:
        self._children = {
            what: spawn(
                [sys.executable, __file__, what, str(socket)], folder / f"lag-{what}.log",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
            for what in ("ping", "idle")
        }  # fmt: skip
        self.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            child.kill()
            child.communicate()

    def begin(self) -> None:
        """Forget what was before."""
        for child in self._children.values():
            _told(child)

    def end(self) -> dict[str, list[float]]:
        """Seconds: round trips of `ping`, and how much too long `idle` slept, since `begin`."""
        return {what: _told(child) for what, child in self._children.items()}


def lag_figures(seconds: list[float]) -> dict[str, float]:
    """For a report."""
    figures = {"p50_ms": p50(seconds), "p99_ms": p99(seconds), "max_ms": max(seconds)}
    return {"samples": len(seconds), **{name: round(value * 1e3, 3) for name, value in figures.items()}}


def _told(child: subprocess.Popen[bytes]) -> list[float]:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b"\n")
    child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise SystemExit("a process that measures how long others wait has ended")
    seconds: list[float] = json.loads(line)
    return seconds


# --- in the child processes ------------------------------------------------------------------------------


async def _measure(what: str, socket: str) -> None:
    """Until standard input ends; each line on it is answered with what was measured since the last."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    if what == "idle":
        await _answer(lines, _overslept)
        return
    async with AsyncClient(socket, namespace=None, role="observer") as client:

        async def round_trip() -> float:
            began = time.perf_counter()
            await client.ping()
            took = time.perf_counter() - began
            await asyncio.sleep(EVERY_S)
            return took

        await _answer(lines, round_trip)


async def _overslept() -> float:
    began = time.perf_counter()
    await asyncio.sleep(EVERY_S)
    return max(time.perf_counter() - began - EVERY_S, 0.0)


async def _answer(lines: asyncio.StreamReader, sample: Callable[[], Awaitable[float]]) -> None:
    seconds: list[float] = []
    asked = asyncio.ensure_future(lines.readline())
    while True:
        seconds.append(await sample())
        if asked.done():
            if not asked.result():
                return
            print(json.dumps(seconds), flush=True)
            seconds = []
            asked = asyncio.ensure_future(lines.readline())


def main() -> Any:
    """`python _lag.py ping|idle SOCKET`"""
    return asyncio.run(_measure(sys.argv[1], sys.argv[2]))


if __name__ == "__main__":
    main()
