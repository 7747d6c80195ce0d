"""Fixtures that every test may use."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
            folder = Path(tempfile.mkdtemp(prefix="kvo-", dir="/tmp"))
            daemon = Daemon(folder, *settings, memory=memory, faults=faults)
            stack.callback(daemon.finish)
            return daemon

        yield start


@pytest.fixture(scope="session")
def standing_daemons() -> Iterator[dict[tuple[str, ...], Daemon]]:
    """Daemons that tests use one after the other, by what they were started with."""
    held: dict[tuple[str, ...], Daemon] = {}
    with ExitStack() as stack:
        yield held
        for daemon in held.values():
            stack.callback(daemon.finish)


@pytest.fixture
def standing(standing_daemons: dict[tuple[str, ...], Daemon]) -> Iterator[Callable[..., Daemon]]:
    """As `start_daemon`, but the daemon is shared with other tests that ask for the same; audited and emptied at the
    end of each.
    """
    lent: dict[tuple[str, ...], Daemon] = {}

    def lend(*settings: str, memory: str = "32MiB", faults: str = "") -> Daemon:
        name = (*settings, memory, faults)
        if name not in standing_daemons:
            folder = Path(tempfile.mkdtemp(prefix="kvo-", dir="/tmp"))
            folder.chmod(0o755)  # tests connect as other users
            standing_daemons[name] = Daemon(folder, *settings, memory=memory, faults=faults)
        lent[name] = standing_daemons[name]
        return lent[name]

    yield lend
    for name, daemon in lent.items():
        try:
            daemon.audit()
            daemon.clear()
        except BaseException:
            # The next test is not to suffer for this one.
            standing_daemons.pop(name).destroy()
            raise


@pytest.fixture
def daemon(standing: Callable[..., Daemon]) -> Daemon:
    """A real daemon that tests share, empty; audited at the end."""
    return standing(*STANDING_SETTINGS)
