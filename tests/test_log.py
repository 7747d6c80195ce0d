"""What a log line looks like in each format, and how repeats are held back."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffloadd import log
from kvoffloadd.config import LogConfig

logger = logging.getLogger("kvoffloadd.test")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leaves logging as it was."""
    root = logging.getLogger(log.ROOT)
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])


def logged(form: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    log.setup(LogConfig(level=level, format=form), stream)
    return stream


def test_console_is_one_line_for_people() -> None:
    stream = logged("console")
    logger.warning("drained in %.1f s", 1.5)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} WARNING kvoffloadd\.test: drained in 1\.5 s\n", stream.getvalue())


def test_journal_lines_begin_with_their_priority() -> None:
    stream = logged("journal", "debug")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        logger.log(level, "x")
    assert re.findall(r"^<(\d)>kvoffloadd\.test: x$", stream.getvalue(), re.MULTILINE) == list("76432")


def test_journal_tracebacks_keep_their_priority_on_every_line() -> None:
    stream = logged("journal")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logger.exception("failed")
    lines = stream.getvalue().splitlines()
    assert len(lines) > 3
    assert all(line.startswith("<3>") for line in lines)


def test_json_is_one_object_a_line() -> None:
    stream = logged("json")
    logger.info('says "%s"', "a\nb")
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time") == pytest.approx(second["time"], abs=5)
    assert first == {"level": "info", "logger": "kvoffloadd.test", "message": 'says "a\nb"'}
    assert second["traceback"].endswith("ValueError: no")


def test_level_and_repeated_setup() -> None:
    first = logged("console")
    second = logged("console", "error")
    logger.warning("quiet")
    logger.error("loud")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_auto_is_journal_only_where_systemd_connected_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "stderr").open("w+") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        log.setup(LogConfig(), stream)
        logger.info("x")
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
        log.setup(LogConfig(), stream)
        logger.info("x")
        stream.seek(0)
        first, second = stream.read().splitlines()
    assert first == "<6>kvoffloadd.test: x"
    assert second.endswith(" INFO    kvoffloadd.test: x")


def test_default_stream_is_standard_error() -> None:
    log.setup(LogConfig(format="console"))
    (handler,) = logging.getLogger(log.ROOT).handlers
    assert isinstance(handler, logging.StreamHandler)
    assert handler.stream is sys.stderr


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(message: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("kvoffloadd.test", level, "", 0, message, args, None)


def test_repeats_are_held_back_and_counted() -> None:
    clock = Clock()
    repeats = log.RepeatFilter(window_s=60, most=3, clock=clock)
    passed = [repeats.filter(record("peer %d: bad frame", number)) for number in range(234)]
    assert passed == [True] * 3 + [False] * 231
    assert repeats.filter(record("another origin"))
    clock.now += 60
    told = record("peer %d: bad frame", 7)
    assert repeats.filter(told)
    assert told.getMessage() == "peer 7: bad frame ... 231 more in the last 60 s"
    clock.now += 60
    told = record("peer %d: bad frame", 8)
    assert repeats.filter(told)
    assert told.getMessage() == "peer 8: bad frame"


def test_errors_are_never_held_back() -> None:
    repeats = log.RepeatFilter(most=1)
    assert all(repeats.filter(record("x", level=logging.ERROR)) for _ in range(20))


def test_origins_are_bounded() -> None:
    repeats = log.RepeatFilter(most=1)
    assert all(repeats.filter(record(f"message {number}")) for number in range(3 * log.ORIGINS_MAX))
