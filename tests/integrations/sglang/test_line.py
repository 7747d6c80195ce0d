"""What a line says of jobs, by how they ended."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvoffloadd.client import Client, Job, JobResult, KeyState, KvCache, Outcome
from kvoffloadd.integrations.sglang.line import Line
from kvoffloadd.model import Direction

KEYS = np.zeros((4, 32), np.uint8).tobytes()
STATES = (KeyState.RESERVED, KeyState.HIT, KeyState.PENDING, KeyState.NO_SPACE)


class Ending:
    """A client whose daemon ends each job in one way."""

    limits = None
    features = ()

    def __init__(self, outcome: Outcome | None, failed: Mapping[int, list[int]] | None = None) -> None:
        self._outcome, self._failed = outcome, failed or {}

    def register(self, caches: KvCache) -> SimpleNamespace:
        """A registration."""
        return SimpleNamespace(caches=caches)

    def ping(self) -> None:
        """It answers."""

    def _begin(self, direction: Direction) -> Job:
        job = Job(1, direction, cast(Any, None), (len(STATES),))
        if self._outcome is not None:
            states = [np.array(STATES, np.uint8)]
            failed = [np.array(self._failed.get(0, []), np.uint32)]
            job.result = JobResult(direction, self._outcome, 0, 0.0, states, failed, "")
        job.done = True
        return job

    def store(self, *_: Any, **__: Any) -> Job:
        """Has ended."""
        return self._begin(Direction.STORE)

    def load(self, *_: Any, **__: Any) -> Job:
        """Has ended."""
        return self._begin(Direction.LOAD)


def carried(client: Ending, direction: Direction) -> tuple[list[bool], bool]:
    """What is said of the keys, and whether the line is still up."""
    line = Line(cast(Client, client), KvCache((), []), job_deadline_s=1.0)
    line.keep()
    assert line.connected
    done = line.carry(direction, {0: (KEYS, np.arange(len(STATES), dtype=np.uint32))})
    return done[0].tolist(), line.connected


def test_what_the_daemon_has_counts_as_stored() -> None:
    assert carried(Ending(Outcome.DONE), Direction.STORE) == ([True, True, True, False], True)
    assert carried(Ending(Outcome.DONE, {0: [0]}), Direction.STORE) == ([False, True, True, False], True)
    assert carried(Ending(Outcome.DONE), Direction.LOAD) == ([False, True, False, False], True)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("outcome", [Outcome.LOST, None])
def test_a_job_whose_end_nobody_told_has_done_nothing(outcome: Outcome | None, direction: Direction) -> None:
    """Whatever was said of its keys when it began: the daemon may have died since. The line asks no more."""
    assert carried(Ending(outcome), direction) == ([False] * 4, False)
