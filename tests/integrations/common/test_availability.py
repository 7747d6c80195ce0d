"""Pauses between attempts, and one warning for failures in a row."""

import itertools
import logging

import pytest

from kvoffloadd.errors import DaemonUnreachableError
from kvoffloadd.integrations.common import availability
from kvoffloadd.integrations.common.availability import Availability

LOGGER = logging.getLogger("engine.kvoffloadd")
ERROR = DaemonUnreachableError("connection refused")


def test_pauses_grow_up_to_two_seconds_until_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "monotonic", lambda: 100.0)
    daemon = Availability(LOGGER)
    assert (daemon.error, daemon.retry_in_s) == (None, 0.0)
    pauses = []
    for _ in range(12):
        daemon.failed(ERROR)
        pauses.append(daemon.retry_in_s)
    assert all(one <= other for one, other in itertools.pairwise(pauses))
    assert pauses[0] == pytest.approx(0.016)
    assert pauses[-1] == 2.0
    assert daemon.error is ERROR
    daemon.succeeded()
    assert daemon.error is None
    assert daemon.retry_in_s == 0.0
    daemon.failed(ERROR)
    assert daemon.retry_in_s == pytest.approx(pauses[0])


def test_failures_in_a_row_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER.name)
    daemon = Availability(LOGGER)
    daemon.failed(ERROR)
    daemon.succeeded()
    assert not caplog.messages  # whoever gives no warning leaves it to others
    for _ in range(2):
        daemon.failed(ERROR, "no cache")
    daemon.succeeded()
    daemon.succeeded()
    daemon.failed(ERROR, "a job failed")
    assert caplog.messages == [
        "kvoffloadd: no cache: connection refused",
        "kvoffloadd: the daemon answers again",
        "kvoffloadd: a job failed: connection refused",
    ]
