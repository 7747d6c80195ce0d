"""Tests what a link reports of jobs, by how they ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvoffloadd.client import Client, Job, JobResult, KeyState, KvCache, Outcome
from kvoffloadd.errors import RemoteError
from kvoffloadd.integrations.sglang.sharedlink import SharedLink
from kvoffloadd.model import Direction
from kvoffloadd.protocol.messages import Limits
from kvoffloadd.testing.wait import HANG_S

KEYS = np.zeros((4, 32), np.uint8).tobytes()
STATES = (KeyState.RESERVED, KeyState.HIT, KeyState.PENDING, KeyState.NO_SPACE)


class Ending:
    """A client whose daemon ends each job in one way."""

    limits: Limits | None = None
    features = ()
    is_connected = True
    socket_path: str | None = None

    def __init__(self, outcome: Outcome | None, failed: Mapping[int, list[int]] | None = None) -> None:
        self._outcome, self._failed = outcome, failed or {}

    def open_jobs(self) -> list[Job]:
        """Returns none: each job has ended."""
        return []

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


class Hanging(Ending):
    """A client whose daemon does not answer a ping, from the second one on, until `answers`."""

    def __init__(self) -> None:
        super().__init__(Outcome.DONE)
        self.pings = 0
        self.pinged, self.answers, self.closed = (threading.Event() for _ in range(3))

    def ping(self) -> None:
        """Hangs."""
        self.pings += 1
        if self.pings > 1:
            self.pinged.set()
            assert self.answers.wait(HANG_S)

    def close(self, _deadline_s: float, *, force: bool = False) -> None:
        """The session has ended."""
        assert force
        self.closed.set()


class EndingLate(Ending):
    """A client whose jobs end when they are waited for. Results can't be read: a bug."""

    limits = Limits(frame_bytes=4 << 20, fds_per_frame=64, keys_per_request=1, jobs=8, deadline_s=1.0)

    def __init__(self) -> None:
        super().__init__(Outcome.DONE)
        self.jobs: list[Job] = []

    def _begin(self, direction: Direction) -> Job:
        self.jobs.append(Job(len(self.jobs) + 1, direction, cast(Any, None), (1,)))
        return self.jobs[-1]

    def wait(self, job: Job, _deadline_s: float) -> None:
        """It ends."""
        job.result, job.done = cast(Any, SimpleNamespace(outcome=Outcome.DONE)), True


@pytest.fixture
def hanging() -> Iterator[tuple[SharedLink, Hanging]]:
    """A link that is connected, and whose keeper waits for its daemon."""
    client = Hanging()
    link = SharedLink(cast(Client, client), KvCache((), []), job_deadline_s=1.0)
    link.keep()
    keeper = threading.Thread(target=link.keep)
    keeper.start()
    assert client.pinged.wait(HANG_S)
    yield link, client
    client.answers.set()
    keeper.join(HANG_S)
    assert not keeper.is_alive()


def carried(client: Ending, direction: Direction) -> tuple[list[bool], bool]:
    """Returns what is reported of the keys, and whether the link is still up."""
    link = SharedLink(cast(Client, client), KvCache((), []), job_deadline_s=1.0)
    link.keep()
    assert link.connected
    done = link.carry(direction, {0: (KEYS, np.arange(len(STATES), dtype=np.uint32))})
    return done[0].tolist(), link.connected


def test_what_the_daemon_has_counts_as_stored() -> None:
    assert carried(Ending(Outcome.DONE), Direction.STORE) == ([True, True, True, False], True)
    assert carried(Ending(Outcome.DONE, {0: [0]}), Direction.STORE) == ([False, True, True, False], True)
    assert carried(Ending(Outcome.DONE), Direction.LOAD) == ([False, True, False, False], True)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("outcome", [Outcome.LOST, None])
def test_a_job_whose_end_nobody_told_has_done_nothing(outcome: Outcome | None, direction: Direction) -> None:
    """The states of its keys when it began do not count: the daemon may have died since. The link asks no more."""
    assert carried(Ending(outcome), direction) == ([False] * 4, False)


BLOCKS = {0: (KEYS, np.arange(len(STATES), dtype=np.uint32))}


class Refusing(Ending):
    """A client whose daemon answers pings and refuses copies."""

    def __init__(self) -> None:
        super().__init__(Outcome.DONE)
        self.pings = 0

    def ping(self) -> None:
        self.pings += 1

    def load(self, *_: Any, **__: Any) -> Job:
        raise RemoteError("limit", "too many", "client", False)


def test_a_bug_gives_no_pages_back_that_a_job_still_has() -> None:
    client = EndingLate()
    with pytest.raises(AttributeError):
        carried(client, Direction.LOAD)
    assert [job.done for job in client.jobs] == [True] * len(STATES)


def test_a_link_whose_copies_are_refused_is_checked_all_the_same() -> None:
    """Refusals put attempts to connect off, and this link counts as connected: only a ping can show that it is not."""
    client = Refusing()
    link = SharedLink(cast(Client, client), KvCache((), []), job_deadline_s=1.0)
    link.keep()
    for _ in range(12):
        assert not link.carry(Direction.LOAD, BLOCKS)[0].any()
    pings = client.pings
    link.keep()
    assert client.pings == pings + 1
    assert link.connected


def test_a_flush_does_not_wait_for_a_ping(hanging: tuple[SharedLink, Hanging]) -> None:
    """Nor does a copy that comes meanwhile: SGLang's scheduler dies if its threads take ten seconds."""
    link, client = hanging
    link.rest()
    assert not link.carry(Direction.STORE, BLOCKS)[0].any()
    assert not client.answers.is_set()
    link.resume()
    client.answers.set()
    assert link.carry(Direction.STORE, BLOCKS)[0].any()


def test_a_copy_that_waits_for_a_ping_gives_way_to_a_flush(hanging: tuple[SharedLink, Hanging]) -> None:
    link, client = hanging
    stored: list[bool] = []
    storing = threading.Thread(target=lambda: stored.append(bool(link.carry(Direction.STORE, BLOCKS)[0].any())))
    storing.start()
    link.rest()
    storing.join(HANG_S)
    assert stored == [False]
    assert not client.answers.is_set()


def test_a_client_that_is_in_use_is_closed_when_that_ends(hanging: tuple[SharedLink, Hanging]) -> None:
    link, client = hanging
    link.close(0.01)
    assert not client.closed.is_set()
    client.answers.set()
    assert client.closed.wait(HANG_S)
    assert not link.connected
    link.keep()
    assert not link.connected, "it is not connected anew"
    assert client.pings == 2
