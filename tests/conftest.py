"""Fixtures that every test may use."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SEED_VARIABLE = "KVOFFLOADD_TEST_SEED"
SEED = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(1 << 32))

Audit = Callable[[], list[str]]


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
