"""What a log line looks like in each format, and how repeats are held back."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import struct
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
    assert first == {"level": "info", "logger": "kvoffloadd.test", "message": 'says "a\\nb"'}
    assert second["traceback"].endswith("ValueError: no")


def test_what_is_logged_can_t_forge_lines_or_move_a_terminal() -> None:
    """Every character that is not printed as itself, in a message, a field, or an exception."""
    evil = "".join(chr(code) for code in [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0x202E, 0x2066, 0xD800])
    text = f"before{evil}\n12:34:56.789 CRITICAL kvoffloadd.daemon: exiting é"
    for form in ("console", "journal", "json"):
        stream = logged(form)
        logger.warning("a peer says %s", text)
        logger.warning("a peer says %(text)s", {"text": text})
        try:
            raise ValueError(text)
        except ValueError:
            logger.exception("failed")
        written = stream.getvalue()
        assert {c for c in written if not c.isprintable()} == {"\n"}
        lines = written.splitlines()
        if form == "json":
            assert len(lines) == 3
            assert json.loads(lines[1])["text"].endswith("exiting é")
        else:
            own = [line for line in lines if re.match(r"(<\d>kvo|\d\d:)", line)]
            assert [line.count("a peer says") for line in own] == [1, 1, 0]
            assert all(line.endswith("exiting é") for line in own[:2])


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


class SetClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def record(message: str, *args: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("kvoffloadd.test", level, "", 0, message, args, None)


def test_repeats_are_held_back_and_counted() -> None:
    clock = SetClock()
    repeats = log.RepeatFilter(window_s=60, most=3, clock=clock)
    passed = [repeats.filter(record("peer %d: bad frame", number)) for number in range(234)]
    assert passed == [True] * 3 + [False] * 231
    assert repeats.filter(record("another origin"))
    clock.now += 60
    later = record("peer %d: bad frame", 7)
    assert repeats.filter(later)
    assert later.getMessage() == "peer 7: bad frame ... 231 more in the last 60 s"
    clock.now += 60
    later = record("peer %d: bad frame", 8)
    assert repeats.filter(later)
    assert later.getMessage() == "peer 8: bad frame"


def test_only_critical_records_are_never_held_back() -> None:
    repeats = log.RepeatFilter(most=1)
    assert all(repeats.filter(record("x", level=logging.CRITICAL)) for _ in range(20))
    assert sum(repeats.filter(record("x", level=logging.ERROR)) for _ in range(20)) == 1


def test_bugs_in_two_places_are_two_origins() -> None:
    repeats = log.RepeatFilter(most=1)

    def failed(number: int) -> bool:
        try:
            if number:
                raise ValueError("one")
            raise ValueError("other")
        except ValueError:
            bug = record("a request failed", level=logging.ERROR)
            bug.exc_info = sys.exc_info()
            return repeats.filter(bug)

    assert [failed(number) for number in (0, 1, 0, 1)] == [True, True, False, False]


def test_the_end_of_a_storm_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = logged("json")
    clock = SetClock()
    (handler,) = logging.getLogger(log.ROOT).handlers
    handler.filters[:] = [log.RepeatFilter(window_s=60, most=3, clock=clock)]
    for number in range(1000):
        logger.warning("peer %(pid)d: 100 %% bad", {"pid": number})
    log.log_held_back()
    assert stream.getvalue().count("\n") == 3
    clock.now += 60
    log.log_held_back()
    log.log_held_back()
    *_, last = map(json.loads, stream.getvalue().splitlines())
    assert stream.getvalue().count("\n") == 4
    assert last["message"] == "997 more in the last 60 s, of: peer %(pid)d: 100 %% bad"
    assert last["held_back"] == 997
    assert last["level"] == "warning"


# --- fields ----------------------------------------------------------------------------------------------------------


def test_what_a_message_names_is_a_field() -> None:
    stream = logged("json")
    logger.info("uid %(uid)d: %(reason)s", {"uid": 7, "reason": ValueError("no"), "level": "mine"})
    fields = json.loads(stream.getvalue())
    assert fields["message"] == "uid 7: no"
    assert (fields["uid"], fields["reason"]) == (7, "no")
    assert fields["level"] == "info"  # what every record has is not another's to name


def test_fields_survive_the_count_of_those_held_back() -> None:
    clock = SetClock()
    repeats = log.RepeatFilter(window_s=60, most=1, clock=clock)
    for _ in range(3):
        repeats.filter(record("pid %(pid)d", {"pid": 7}))
    clock.now += 60
    later = record("pid %(pid)d", {"pid": 8})
    assert repeats.filter(later)
    fields = json.loads(log.JsonFormatter().format(later))
    assert fields["message"] == "pid 8 ... 2 more in the last 60 s"
    assert (fields["pid"], fields["held_back"]) == (8, 2)


@pytest.fixture
def journal(socket_dir: Path) -> Iterator[socket.socket]:
    """A journal's socket, which is read only where the test does it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(socket_dir / "journal"))
        receiver.settimeout(5.0)
        yield receiver


def entry(data: bytes) -> dict[str, str]:
    """An entry of the native protocol."""
    fields = {}
    while data:
        name, _, data = data.partition(b"\n")
        if b"=" in name:
            name, _, value = name.partition(b"=")
        else:
            (size,) = struct.unpack_from("<Q", data)
            value, data = data[8 : 8 + size], data[8 + size + 1 :]
        fields[name.decode()] = value.decode()
    return fields


def test_the_journal_gets_fields(journal: socket.socket) -> None:
    handler = log.JournalHandler(io.StringIO(), Path(journal.getsockname()))
    handler.handle(record("uid %(uid)d: %(reason)s", {"uid": 7, "reason": "two\nlines"}))
    assert entry(journal.recv(1 << 16)) == {
        "MESSAGE": "kvoffloadd.test: uid 7: two\\nlines", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "kvoffloadd",
        "LOGGER": "kvoffloadd.test", "KVO_UID": "7", "KVO_REASON": "two\\nlines",
    }  # fmt: skip
    failed = record("failed %(how)s", {"how": "badly"})
    try:
        raise ValueError("no")
    except ValueError:
        failed.exc_info = sys.exc_info()
    handler.handle(failed)
    first, *_, last = entry(journal.recv(1 << 16))["MESSAGE"].split("\n")
    assert (first, last) == ("kvoffloadd.test: failed badly", "  ValueError: no")
    handler.handle(record("x" * (1 << 20)))
    assert len(entry(journal.recv(1 << 16))["MESSAGE"]) == log.JOURNAL_MESSAGE_BYTES_MAX
    handler.close()


def test_what_a_journal_that_does_not_keep_up_does_not_take_goes_to_the_stream(journal: socket.socket) -> None:
    stream = io.StringIO()
    handler = log.JournalHandler(stream, Path(journal.getsockname()))
    for number in range(2000):
        handler.handle(record(f"message {number}"))
    journal.settimeout(0.0)
    messages = []
    while True:
        try:
            messages.append(entry(journal.recv(1 << 16))["MESSAGE"])
        except BlockingIOError:
            break
    lines = stream.getvalue().replace("<4>", "").splitlines()
    assert len(lines) > 0
    assert messages + lines == [f"kvoffloadd.test: message {number}" for number in range(2000)]
    handler.close()


def test_without_a_journal_s_socket_lines_with_priorities_go_to_the_stream(tmp_path: Path) -> None:
    stream = io.StringIO()
    handler = log.JournalHandler(stream, tmp_path / "none")
    handler.handle(record("x"))
    assert stream.getvalue() == "<4>kvoffloadd.test: x\n"
    handler.close()


def test_origins_are_bounded() -> None:
    repeats = log.RepeatFilter(most=1)
    assert all(repeats.filter(record(f"message {number}")) for number in range(3 * log.ORIGINS_MAX))
