"""What a link makes of a daemon's answers, refusals and absence: pauses, warnings, jobs and clears."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvoffloadd.client import Client, Group, GroupKind, Job, JobDeadlineError, KvCache
from kvoffloadd.errors import ConnectionLostError, DaemonUnreachableError, DeadlineError, RemoteError
from kvoffloadd.integrations.common import link as linking
from kvoffloadd.integrations.common.link import DaemonLink
from kvoffloadd.model import Direction
from kvoffloadd.protocol.messages import Limits

LOGGER = logging.getLogger("engine.kvoffloadd")
GONE = DaemonUnreachableError("connection refused")
REFUSAL = RemoteError("limit", "too many", "client", False)
CACHES = KvCache((), [Group(0, GroupKind.FULL, 16)])
KEYS = np.arange(7 * 32, dtype=np.uint8).tobytes()
BLOCKS = np.arange(14, dtype=np.uint32).reshape(7, 2)


class Scripted:
    """A client whose calls raise what `errors` say, one for each call; afterwards they are answered."""

    limits = Limits(frame_bytes=4 << 20, fds_per_frame=64, keys_per_request=3, jobs=8, deadline_s=1.0)

    def __init__(self) -> None:
        self.is_connected = True
        self.socket_path: str | None = None
        self.errors: list[Exception | None] = []
        self.calls: list[str] = []
        self.tokens: list[bytes] = []
        self.on_clear: Callable[[], None] = lambda: None
        self.named: list[tuple[bytes, list[int], dict[int, int], dict[str, Any]]] = []
        self.jobs = [job()]  # of an earlier submission
        self.begins_before_bugs = False

    def _answer(self, call: str) -> None:
        self.calls.append(call)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error

    def register(self, caches: KvCache) -> SimpleNamespace:
        self._answer("register")
        return SimpleNamespace(caches=caches)

    def unregister(self, _: object) -> None:
        self._answer("unregister")

    def ping(self) -> None:
        self._answer("ping")

    def clear(self, *, wait_s: float, token: bytes) -> None:
        assert wait_s == 0.0
        self.tokens.append(token)
        self.on_clear()
        self._answer("clear")

    def store(self, _: object, groups: dict[int, Any], **options: Any) -> Job:
        return self._begun("store", groups, options)

    def load(self, _: object, groups: dict[int, Any], **options: Any) -> Job:
        return self._begun("load", groups, options)

    def close(self, _deadline_s: float, *, force: bool) -> None:
        assert force
        self._answer("close")

    def _begun(self, call: str, groups: dict[int, Any], options: dict[str, Any]) -> Job:
        (keys, blocks), first = groups[0], options.pop("first")
        self.named.append((keys, blocks.ravel().tolist(), first, options))
        if self.begins_before_bugs:
            self.jobs.append(job(len(self.jobs) + 1))
        self._answer(call)
        if not self.begins_before_bugs:
            self.jobs.append(job(len(self.jobs) + 1))
        return self.jobs[-1]

    def open_jobs(self) -> list[Job]:
        return list(self.jobs)


def job(number: int = 1) -> Job:
    return Job(number, Direction.LOAD, cast(Any, None), (1,))


Make = Callable[..., tuple[DaemonLink, Scripted]]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What the clock shows."""
    clock = [1000.0]
    monkeypatch.setattr(linking, "monotonic", lambda: clock[0])
    yield clock


@pytest.fixture
def make(now: list[float]) -> Make:
    def make(lost: str = "no cache", refused: str = "a request was refused") -> tuple[DaemonLink, Scripted]:
        client = Scripted()
        return DaemonLink(cast(Client, client), CACHES, LOGGER, lost=lost, refused=refused), client

    return make


def ping(client: Client) -> None:
    client.ping()


def ping_and_one(client: Client) -> int:
    client.ping()
    return 1


def test_pauses_grow_up_to_two_seconds_until_an_answer(make: Make) -> None:
    link, client = make()
    assert (link.error, link.retry_in_s, link.connected) == (None, 0.0, False)
    client.errors = [GONE] * 13
    pauses = []
    for _ in range(12):
        link.connect()
        pauses.append(link.retry_in_s)
    assert all(one <= other for one, other in itertools.pairwise(pauses))
    assert pauses[0] == pytest.approx(0.016)
    assert pauses[-1] == 2.0
    assert link.error is GONE
    client.errors.clear()
    assert link.attempt(ping)
    assert link.retry_in_s == 0.0
    client.errors = [GONE]
    assert not link.attempt(ping)
    assert link.retry_in_s == pytest.approx(pauses[0])
    assert not link.connected


def test_the_registration_is_held_and_made_again_after_an_end(make: Make) -> None:
    """What a daemon has not let go of is ended first: it is other memory by now."""
    link, client = make()
    link.connect()
    link.connect()
    assert client.calls == ["register", "ping", "ping"]
    client.errors = [DeadlineError("no answer")]
    with pytest.raises(DeadlineError):
        link.unregister()
    link.unregister()  # none is left
    link.connect()
    assert client.calls[3:] == ["unregister", "unregister", "register", "ping"]


def test_a_loss_is_logged_once_and_its_end(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER.name)
    link, client = make()
    client.errors = [GONE, GONE]
    for _ in range(4):
        link.connect()
    assert caplog.messages == [
        "kvoffloadd: no cache: connection refused",
        "kvoffloadd: the daemon answers again",
    ]
    caplog.clear()
    other, client = make(lost="")
    client.errors = [GONE]
    other.connect()
    other.connect()
    assert not caplog.messages, "another link's warning is enough"


def test_the_socket_that_was_found_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Once, also by a link that has waited for its daemon, or that leaves its warnings to others."""
    caplog.set_level(logging.INFO, LOGGER.name)
    for words in ({}, {"lost": "", "refused": ""}):
        link, client = make(**words)
        client.errors = [GONE]
        link.connect()
        client.socket_path = "/a"
        link.connect()
        assert "kvoffloadd: the daemon is at /a" in caplog.messages
        link.connect()
        assert caplog.messages.count("kvoffloadd: the daemon is at /a") == 1
        caplog.clear()
        client.socket_path = "/b"
        link.connect()
        assert caplog.messages == ["kvoffloadd: the daemon is at /b"]
        caplog.clear()


def test_a_refusal_is_logged_once_a_minute_and_is_no_loss(
    make: Make, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    link, client = make()
    link.connect()
    for _ in range(3):
        client.errors = [REFUSAL]
        assert not link.attempt(ping)
        assert link.connected
        assert link.retry_in_s > 0
        now[0] += 30
    assert caplog.messages == ["kvoffloadd: a request was refused: limit: too many"] * 2
    assert link.attempt(ping)
    silent, client = make(lost="", refused="")
    client.errors = [REFUSAL]
    silent.connect()
    assert not silent.connected
    assert len(caplog.messages) == 2


def test_a_daemon_that_refuses_the_registration_is_not_connected(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Not even one that answered before."""
    caplog.set_level(logging.INFO, LOGGER.name)
    link, client = make()
    link.connect()
    client.errors = [REFUSAL]
    link.connect()
    assert not link.connected
    link.connect()
    assert link.connected
    assert caplog.messages == ["kvoffloadd: no cache: limit: too many", "kvoffloadd: the daemon answers again"]


def test_a_daemon_that_refuses_another_connection_is_lost(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Its refusal answers no request: the client had no connection left to make one on."""
    link, client = make()
    link.connect()
    client.errors = [REFUSAL]
    client.is_connected = False
    assert not link.attempt(ping)
    assert not link.connected
    assert caplog.messages == ["kvoffloadd: no cache: limit: too many"]


@pytest.mark.parametrize("reconnects", [False, True])
def test_a_daemon_that_was_restarted_is_found_at_once_where_that_is_wanted(make: Make, reconnects: bool) -> None:
    link, client = make()
    link.connect()
    client.errors = [ConnectionLostError("it went away")]
    assert not link.attempt(ping, reconnects=reconnects)
    assert link.connected is reconnects


def test_an_answer_or_none(make: Make) -> None:
    link, client = make()
    assert link.ask(lambda _: []) == []
    assert link.ask(ping_and_one) == 1
    client.errors = [GONE]
    assert link.ask(ping_and_one) is None


@pytest.mark.parametrize("direction", Direction)
def test_keys_are_submitted_in_requests_that_fit(make: Make, direction: Direction) -> None:
    link, client = make()
    submitted = link.submit(direction, {0: (KEYS, BLOCKS)}, {0: 5}, deadline_s=2.0, ready=None, expedited=True)
    assert submitted.whole
    assert [piece for piece, _ in submitted.jobs] == [{0: slice(0, 3)}, {0: slice(3, 6)}, {0: slice(6, 7)}]
    options = {"deadline_s": 2.0, "ready": None} | ({"expedited": True} if direction is Direction.LOAD else {})
    assert client.named == [
        (KEYS[: 3 * 32], [0, 1, 2, 3, 4, 5], {0: 5}, options),
        (KEYS[3 * 32 : 6 * 32], [6, 7, 8, 9, 10, 11], {0: 8}, options),
        (KEYS[6 * 32 :], [12, 13], {0: 11}, options),
    ]


def submitted_with(make: Make, *errors: Exception | None) -> tuple[int, bool, bool]:
    """How many jobs there are, whether that is all, and whether the daemon counts as connected."""
    link, client = make()
    client.errors = list(errors)
    submitted = link.submit(Direction.STORE, {0: (KEYS, BLOCKS)}, deadline_s=2.0, ready=None)
    return len(submitted.jobs), submitted.whole, link.connected


def test_jobs_that_may_have_blocks_are_known_whatever_went_wrong(make: Make) -> None:
    """The first call registers."""
    in_doubt = JobDeadlineError("no answer", job())
    assert submitted_with(make) == (3, True, True)
    assert submitted_with(make, GONE) == (0, False, False)
    assert submitted_with(make, None, None, REFUSAL) == (1, False, False)
    assert submitted_with(make, None, None, in_doubt) == (2, False, False)
    assert submitted_with(make, None, None, None, in_doubt) == (3, True, False)


def test_a_bug_amid_a_submit_hides_no_job(make: Make) -> None:
    """The daemon writes to the blocks of those that have begun."""
    assert submitted_with(make, None, None, ZeroDivisionError("a bug")) == (1, False, False)
    with pytest.raises(ZeroDivisionError):
        submitted_with(make, None, ZeroDivisionError("a bug"))


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_a_bug_after_a_request_was_sent_does_not_hide_its_job(make: Make, begun: int) -> None:
    link, client = make()
    client.begins_before_bugs = True
    client.errors = [None] * (1 + begun) + [ZeroDivisionError("a bug")]
    submitted = link.submit(Direction.STORE, {0: (KEYS, BLOCKS)}, deadline_s=2.0, ready=None)
    assert [found.id for _, found in submitted.jobs] == list(range(2, 3 + begun))
    assert submitted.jobs[-1][0] == {0: slice(3 * begun, min(3 * begun + 3, 7))}
    assert not link.connected


def test_nothing_to_submit_is_all(make: Make) -> None:
    link, _client = make()
    assert link.submit(Direction.LOAD, {}, deadline_s=2.0, ready=None) == ([], True)


def test_a_clear_is_asked_for_until_it_is_answered(make: Make) -> None:
    link, client = make()
    link.connect()
    link.clear()
    assert client.calls == ["register", "ping"], "none is wanted"
    link.want_clear()
    client.errors = [DeadlineError("no answer")]
    link.clear()
    assert link.clearing
    link.connect()
    assert not link.clearing
    assert len(set(client.tokens)) == 1
    assert client.calls[2:] == ["clear", "ping", "clear"]


def test_a_clear_that_is_wanted_while_another_is_answered_is_asked_for_next(make: Make) -> None:
    link, client = make()
    link.connect()
    link.want_clear(b"one")
    client.on_clear = lambda: link.want_clear(b"another")
    link.clear()
    assert link.clearing
    client.on_clear = lambda: None
    link.clear()
    assert not link.clearing
    assert client.tokens == [b"one", b"another"]


@pytest.mark.parametrize("error", [REFUSAL, DeadlineError("no answer")], ids=["refused", "no answer"])
def test_a_clear_that_fails_is_asked_for_ever_less_often(
    make: Make, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """The daemon answers everything else, which does not make the pauses short again. The log has one line."""
    link, client = make()
    link.connect()
    link.want_clear()
    pauses = []
    for _ in range(10):
        client.errors = [None, error]
        link.connect()
        pauses.append(link.retry_in_s)
        assert not link.connected
    assert pauses[-1] == 2.0
    assert len(set(client.tokens)) == 1
    assert len(caplog.messages) == 1
    link.connect()
    assert link.connected
    assert not link.clearing


def test_a_clear_that_was_carried_out_is_not_asked_for_again(make: Make) -> None:
    """A daemon that was started since does not know its token."""
    link, client = make()
    link.want_clear(b"one")
    link.connect()
    link.clear()
    link.connect()
    assert client.tokens == [b"one"]


def test_close_is_never_an_error(make: Make) -> None:
    link, client = make()
    link.connect()
    client.errors = [DeadlineError("it hangs")]
    link.close(1.0)
    assert not link.connected
