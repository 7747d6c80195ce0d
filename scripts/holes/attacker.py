"""An attacker process: makes holes in its registered memory while its own stores and loads run, and between them.

It checks its jobs as a bystander does, but for bytes that have become 0, and for jobs that met a hole.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import numpy as np

from scripts.harness.beside import Beside
from scripts.harness.counters import Counters
from scripts.holes.memory import WatchedMemory
from scripts.holes.options import HolesWorkerOptions
from scripts.holes.shapes import SHAPES
from scripts.holes.texts import STRIDE_BYTES
from scripts.holes.worker import HolesWorker, live

PAUSES_S = (0.0, 0.0, 0.0002, 0.002, 0.02)
HOLES_BETWEEN = 4


class HolePuncher(Beside):
    """Makes one hole after the other in `memory`, while the context lasts."""

    def __init__(self, memory: WatchedMemory, rng: np.random.Generator, counters: Counters) -> None:
        super().__init__("puncher")
        self.failure: Exception | None = None
        self._memory = memory
        self._rng = rng
        self._counters = counters

    def __exit__(self, *_: object) -> None:
        """Raises what ended it."""
        super().__exit__()
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        try:
            while not self.ending.wait(float(self._rng.choice(PAUSES_S))):
                punch_once(self._memory, self._rng, self._counters)
        except Exception as error:  # noqa: BLE001  reported by __exit__
            self.failure = error


def punch_once(memory: WatchedMemory, rng: np.random.Generator, counters: Counters) -> None:
    """Punches one hole in one of the ways there are, of a few bytes or many blocks."""
    at = int(rng.integers(0, memory.size_bytes))
    size = min(int(np.exp(rng.uniform(0.0, np.log(8 * STRIDE_BYTES)))), memory.size_bytes - at)
    SHAPES[int(rng.integers(0, len(SHAPES)))](memory, at, size)
    counters.add("holes")


class HolesAttacker(HolesWorker):
    """See above."""

    attacks = True

    @property
    def operations(self) -> Sequence[tuple[float, Callable[[], None]]]:
        return (
            (60.0, self.punch_during),
            (25.0, self.punch_between),
            (10.0, self.begin_job),
            (3.0, self.compare),
            (2.0, self.reconnect),
        )

    def punch_during(self) -> None:
        """Jobs from their begin to their end."""
        rng = np.random.default_rng(int(self.rng.integers(0, 1 << 62)))
        with HolePuncher(self.memory, rng, self.counters):
            for _ in range(int(self.rng.integers(1, 5))):
                self.begin_job()
            self.wait()

    def punch_between(self) -> None:
        """Holes that are there before a job begins."""
        self.wait()
        for _ in range(int(self.rng.integers(1, HOLES_BETWEEN + 1))):
            punch_once(self.memory, self.rng, self.counters)
        self.begin_job()

    def begin_job(self) -> None:
        """Store what no other worker stores, or load anything."""
        session, at = self.any_session(), self.draw(0.7)
        if not self.room(len(at)):
            return
        if self.rng.random() < 0.5:
            session.store(session.texts.holed(self.rng), at)
        elif session is self.shared and self.rng.random() < 0.5:
            session.load(session.texts.clean(self.rng), at)
        else:
            session.load(session.texts.holed(self.rng), at)


def main() -> int:
    return live(lambda: HolesAttacker(HolesWorkerOptions(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
