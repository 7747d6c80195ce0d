"""A line of JSON for each result as it comes, into the file that KVOFFLOADD_TEST_RESULTS names: of tests, as a pytest
plugin, and of benchmarks' cases.

Unlike a report at the end, it outlives a run that is killed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu import RESULTS_VARIABLE


def keep(row: dict[str, Any]) -> None:
    """Writes a row down; does nothing where the variable is not set."""
    if RESULTS_VARIABLE in os.environ:
        with Path(os.environ[RESULTS_VARIABLE]).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, default=str) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called for setup, call and teardown of each test. One row is written, unless more than one of them fails."""
    if report.when != "call" and report.passed:
        return
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        reason = str(report.longreprtext).strip().splitlines()[-1:][0] if report.longreprtext.strip() else "failed"
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash is not None else reason
    row = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "seconds": round(report.duration, 3),
        "reason": reason,
        "properties": dict(report.user_properties),
    }
    keep(row)
