"""Tests that only lines in a queue wait for a reader of standard error; no process does."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvoffloadd.linux.standarderror import QUEUED_BYTES_MAX, LineQueue
from kvoffloadd.testing.wait import HANG_S

PIPE_BYTES = 4096
_F_SETPIPE_SZ = 1031

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe of one page: the end that is read, and the other."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, _F_SETPIPE_SZ, PIPE_BYTES)
    yield reader, writer
    os.close(reader)  # before the writer's end: a thread that waits in a write is let go
    os.close(writer)


def read_all(fd: int, end: bytes) -> bytes:
    """What comes, up to `end`."""
    data = b""
    while not data.endswith(end):
        data += os.read(fd, 1 << 16)
    return data


def test_lines_come_in_order(pipe: Pipe) -> None:
    reader, writer = pipe
    lines = LineQueue(writer)
    expected = b"".join(b"line %d\n" % number for number in range(2000)) + b"end\n"
    for line in expected.splitlines(keepends=True):
        lines.write(line)
    assert read_all(reader, b"\nend\n") == expected
    assert lines.drain(HANG_S)
    assert lines.lost == 0


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_comes_back_is_told_what_is_missing(pipe: Pipe, blocking: bool) -> None:
    """The oldest lines are missing: the last words are there."""
    reader, writer = pipe
    os.set_blocking(writer, blocking)
    lines = LineQueue(writer)
    lines.describe_lost = "<{}>\n".format
    line_bytes = 1000
    count = 2 * QUEUED_BYTES_MAX // line_bytes
    for number in range(count):
        lines.write(b"%0*d\n" % (line_bytes - 1, number))
    lines.write(b"the last words\n")
    lost = lines.lost
    assert lost >= count // 2 - PIPE_BYTES // line_bytes - 2
    assert not lines.drain(0.0)
    text = read_all(reader, b"the last words\n").decode()
    expected, gaps = 0, 0
    for line in text.splitlines()[:-1]:
        if gap := re.fullmatch(r"<(\d+)>", line):  # more than once, if the thread has come to write one meanwhile
            expected, gaps = expected + int(gap[1]), gaps + int(gap[1])
        else:
            assert int(line) == expected
            expected += 1
    assert (expected, gaps) == (count, lost)
    assert lines.drain(HANG_S)
    assert lines.lost == lost


def test_lines_that_can_t_be_written_are_told_once_they_can(pipe: Pipe) -> None:
    """This happens on a disk that is full, and has room again."""
    reader, writer = pipe
    lines = LineQueue(writer)
    lines.describe_lost = "<{}>\n".format
    full, kept = os.open("/dev/full", os.O_WRONLY), os.dup(writer)
    os.dup2(full, writer)
    for _ in range(3):
        lines.write(b"nobody reads this\n")
    assert lines.drain(HANG_S)
    assert lines.lost == 3
    os.dup2(kept, writer)
    lines.write(b"but this\n")
    assert read_all(reader, b"this\n") == b"<3>\nbut this\n"
    lines.write(b"and this\n")
    assert read_all(reader, b"this\n") == b"and this\n"
    os.close(full)
    os.close(kept)


def test_a_write_within_a_write_waits_for_nothing(pipe: Pipe) -> None:
    """A finalizer or a signal handler may log wherever the interpreter is."""
    reader, writer = pipe
    lines = LineQueue(writer)

    def write_twice() -> None:
        with lines._changed:  # as within `write`
            lines.write(b"inner\n")

    thread = threading.Thread(target=write_twice, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert read_all(reader, b"\n") == b"inner\n"


# --- in a process -----------------------------------------------------------------------------------------------------

TAKEN_OVER = "import os, sys; from kvoffloadd.linux import standarderror as s; s.take_over(); "


def run(code: str, *, reads: bool = True, full: bool = False) -> tuple[int, str]:
    """Exit status and standard error of a Python that has taken it over. `full`: the pipe has no room."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, _F_SETPIPE_SZ, PIPE_BYTES)
    if full:
        os.write(writer, bytes(PIPE_BYTES))
    child = subprocess.Popen([sys.executable, "-c", TAKEN_OVER + code], stderr=writer, stdin=subprocess.DEVNULL)
    os.close(writer)
    text = b""
    if reads:
        while data := os.read(reader, 1 << 16):
            text += data
    status = child.wait(HANG_S)
    os.close(reader)
    return status, text.decode().lstrip("\0")


LAST_WORDS = [
    ("raise ValueError('why')", 1, "ValueError: why"),
    ("print('why', file=sys.stderr); s.leave(70)", 70, "why"),
    ("print('why', file=sys.stderr); sys.exit(2)", 2, "why"),
    ("sys.exit('why')", 1, "why"),
    ("import faulthandler; faulthandler.enable(file=2); os.abort()", -signal.SIGABRT, "Fatal Python error: Aborted"),
]


@pytest.mark.parametrize(("code", "status", "words"), LAST_WORDS)
def test_last_words_get_out(code: str, status: int, words: str) -> None:
    found, text = run(code)
    assert (found, words in text) == (status, True)


@pytest.mark.parametrize(("code", "status", "_words"), LAST_WORDS)
def test_an_end_does_not_wait_for_a_reader_that_hangs(code: str, status: int, _words: str) -> None:
    assert run(code, reads=False, full=True)[0] == status


def test_any_text_can_be_written() -> None:
    assert run(r"print('\udcff \u00fc', file=sys.stderr)")[1] in ("\\udcff \u00fc\n", "\\udcff \\xfc\n")


def test_descriptors_of_others_keep_waiting() -> None:
    """All that have the same open file share O_NONBLOCK, so the daemon sets it on an open file that it has alone."""
    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", TAKEN_OVER + "print(os.get_blocking(2), flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"False\n"
    assert os.get_blocking(writer)
    child.stdin.close()
    assert child.wait(HANG_S) == 0
    child.stdout.close()
    os.close(reader)
    os.close(writer)


def test_what_is_no_descriptor_2_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from kvoffloadd.linux import standarderror

    before = sys.stderr
    standarderror.take_over()
    assert sys.stderr is before
    assert standarderror.queue() is None
    assert standarderror.lines_lost() == 0
    assert capsys.readouterr().err == ""
