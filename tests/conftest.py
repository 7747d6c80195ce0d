"""Fixtures that every test may use."""

from __future__ import annotations

import os
import random
import tempfile
from contextlib import ExitStack
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.process import Daemon

SEED_VARIABLE = "KVOFFLOADD_TEST_SEED"
SEED = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(1 << 32))

Audit = Callable[[], list[str]]

OTHER_UID = 65534
STANDING_SETTINGS = (f"server.allowed_uids=[{OTHER_UID}]", "server.socket_mode=0o666")
"""Of the daemon that tests share."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how to repeat this run's random choices."""
    terminalreporter.write_line(f"random seed: {SEED} (repeat with {SEED_VARIABLE}={SEED})")


@pytest.fixture
def seed() -> int:
    """The run's seed: for numpy, for other processes."""
    return SEED


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Equal in each test of a run, so that tests repeat alone."""
    return random.Random(seed)


@pytest.fixture(autouse=True)
def audits() -> Iterator[list[Audit]]:
    """Append a `check()` of what the test built: it must find nothing wrong when the test ends."""
    checks: list[Audit] = []
    yield checks
    findings = [finding for check in checks for finding in check()]
    assert findings == []


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private directory with a short path: a socket's path may have 107 bytes, pytest's own directories are long."""
    with tempfile.TemporaryDirectory(prefix="kvo-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def start_daemon() -> Iterator[Callable[..., Daemon]]:
    """`start_daemon("section.key=value", memory="32MiB", faults="")` -> a real daemon of the test's own.

    At the end each is audited and stopped (`Daemon.finish`).
    """
    with ExitStack() as stack:

        def start(*settings: str, memory: str = "32MiB", faults: str = "") -> Daemon:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvo-", dir="/tmp"))
            daemon = Daemon(Path(folder), *settings, memory=memory, faults=faults)
            stack.callback(daemon.finish)
            return daemon

        yield start


@pytest.fixture(scope="session")
def standing_daemon() -> Iterator[list[Daemon]]:
    """At most one daemon, which tests use one after the other; the first that asks `daemon` starts it."""
    held: list[Daemon] = []
    with tempfile.TemporaryDirectory(prefix="kvo-", dir="/tmp") as folder:
        # Others than root may enter: tests connect as other users.
        os.chmod(folder, 0o755)
        held.append(Daemon(Path(folder), *STANDING_SETTINGS))
        yield held
        held[0].finish()


@pytest.fixture
def daemon(standing_daemon: list[Daemon]) -> Iterator[Daemon]:
    """A real daemon with default settings, empty; shared with other tests, audited after each."""
    found = standing_daemon[0]
    yield found
    try:
        found.audit()
        found.clear()
    except BaseException:
        found.destroy()  # the next test is not to suffer for this one
        found.start()
        raise
