"""A daemon whose operations of several turns take few parts a turn, and can be held between two turns."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kvoffloadd.testing.wait import until

STEP = 64
"""Parts that one turn commits, frees, reserves or takes out of a lease."""

_PROGRAM = """
import asyncio, contextlib, os, sys, types
from kvoffloadd.cache.jobs import job
from kvoffloadd.scheduling import steps
from kvoffloadd.cache.memory import steppedlookup as finding, reservation
from kvoffloadd.server import connection, context
from kvoffloadd.server.session import jobs as requests
from kvoffloadd.server.session import session

passed = {ENDS: 0, REQUESTS: 0}

def is_held(path):
    try:
        allowed = os.stat(path).st_size
    except FileNotFoundError:
        return False
    if passed[path] == allowed:
        with open(path + ".held", "w") as stream:
            stream.truncate(allowed + 1)
        return True
    passed[path] += 1
    return False

class Asyncio:
    '''As the module, but `sleep` takes as long as requests are held.'''

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)
        while is_held(REQUESTS):
            await asyncio.sleep(0.001)

def held(make):
    '''The same steps, but between two of them it takes as long as requests are held.'''

    def steps(*about):
        work = make(*about)
        with contextlib.closing(work):
            try:
                while True:
                    next(work)
                    yield
                    while is_held(REQUESTS):
                        yield
            except StopIteration as end:
                return end.value

    return steps

once = job.Job.pause

@types.coroutine
def pause(one):
    yield from once(one)
    while is_held(ENDS):
        asyncio.get_running_loop().call_later(0.001, one._go_on, None)
        yield

job.STEP_PARTS = reservation.STEP_KEYS = finding.STEP_KEYS = context.ENDED_PER_TURN = STEP
steps.TURN_S = connection.TURN_S = 0
job.Job.pause = pause
context.asyncio = Asyncio()
context.Context._end_lease = held(context.Context._end_lease)
session.reserve_in_steps = requests.reserve_in_steps = held(reservation.reserve_in_steps)
requests.find_in_steps = held(finding.find_in_steps)
from kvoffloadd.cli import main
sys.exit(main(sys.argv[1:]))
"""


class HeldSteps:
    """Makes requests wait between two of their turns while it is entered."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        self.path.touch()
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        self._held.unlink(missing_ok=True)

    @property
    def _held(self) -> Path:
        return self.path.with_name(self.path.name + ".held")

    def let_pass(self, turns: int) -> None:
        """Does not hold the next `turns` turns of all such operations together."""
        with self.path.open("ab") as stream:
            stream.write(bytes(turns))

    def pass_until(self, fact: Callable[[], bool]) -> None:
        """Let turns pass, one after the other, until `fact` holds of what the last one did."""
        while True:
            until(self._is_held, "it waits for the next turn")
            if fact():
                return
            self.let_pass(1)

    def _is_held(self) -> bool:
        return self._held.exists() and self._held.stat().st_size == self.path.stat().st_size + 1


def program(ends: HeldSteps, requests: HeldSteps) -> tuple[str, str]:
    """`kvoffloadd` with such turns, for `Daemon`. `ends`: holds stores that are committed or freed; `requests`: holds
    what is reserved, and leases that end. Both may hold once.
    """
    names = f"ENDS, REQUESTS, STEP = {os.fspath(ends.path)!r}, {os.fspath(requests.path)!r}, {STEP}"
    return "-c", f"{names}\n{_PROGRAM}"
