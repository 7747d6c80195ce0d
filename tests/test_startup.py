"""Tests what a start takes from the system, and the error that it reports where the system refuses."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvoffloadd import socketpath
from kvoffloadd.client import Client
from kvoffloadd.errors import BusyError, ConfigError, LimitError
from kvoffloadd.linux.sharedmem import populate
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.startup import EXECUTOR_THREADS, check_proc, check_user, make_executor, refusals
from kvoffloadd.testing.process import ROOT
from kvoffloadd.testing.wait import HANG_S


def beside() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvo-beside")]


def test_all_of_them_are_there_at_once() -> None:
    executor = make_executor()
    assert len(beside()) == EXECUTOR_THREADS
    executor.shutdown()


def test_too_few_of_them_are_an_error_and_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    start, made = threading.Thread.start, 0

    def few(thread: threading.Thread) -> None:
        nonlocal made
        made += 1
        if made == EXECUTOR_THREADS - 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    with pytest.raises(ConfigError, match=r"can't start new thread.*ulimit -u"), refusals():
        make_executor()
    for thread in beside():
        thread.join(HANG_S)
    assert beside() == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EFBIG, "File too large"), "ulimit -f"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit -v"),
        (MemoryError(), "ulimit -v"),
        (LimitError("can't map"), "vm.max_map_count"),
        (RuntimeError("can't start new thread"), "TasksMax, `ulimit -u` or `ulimit -v`"),
        (BusyError("no threads for uid 7"), "uid 7.*TasksMax, `ulimit -u` or `ulimit -v`"),
    ],
)
def test_what_the_system_refuses_is_told_with_the_limit(error: Exception, words: str) -> None:
    with pytest.raises(ConfigError, match=words), refusals():
        raise error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), RuntimeError("a bug"), ValueError("a bug")])
def test_what_is_nobody_s_limit_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, refusals():
        raise error
    assert caught.value is error


def test_a_machine_without_proc(tmp_path: Path) -> None:
    check_proc()
    with pytest.raises(ConfigError, match="/proc is not mounted"):
        check_proc(tmp_path)


def test_a_user_who_stands_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """All whom the kernel shows by this number would be trusted like the daemon itself."""
    monkeypatch.setattr(socketpath, "unmapped_uid", lambda: 65534)
    check_user(1000)
    with pytest.raises(ConfigError, match="runs as uid 65534, which stands for every user without a number"):
        check_user(65534)


# --- real starts ------------------------------------------------------------------------------------------------------


def start(
    socket_dir: Path, limits: str = "", memory: str = "8MiB", program: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs `kvoffloadd serve` to its end, from a shell that has run the commands `limits`. `program`: what runs it."""
    command = [
        *(*program, sys.executable, "-m", "kvoffloadd", "serve", "--memory", memory),
        *("--socket", str(socket_dir / "kvo.sock")),
    ]
    return subprocess.run(
        ["bash", "-c", f'{limits}\nexec "$@"', "bash", *command],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=HANG_S, cwd=ROOT,
    )  # fmt: skip


def test_a_start_as_a_user_who_stands_for_many(socket_dir: Path) -> None:
    unmapped = ["unshare", "--user"]
    if subprocess.run([*unmapped, "true"], capture_output=True, check=False).returncode:
        pytest.skip("there are no user namespaces here")
    socket_dir.chmod(0o777)
    ended = start(socket_dir, program=unmapped)
    assert ended.returncode == 2
    assert "the daemon runs as uid 65534, which stands for every user" in ended.stderr


def peak_kib(status: str) -> int:
    """Returns the peak of a process's address space."""
    return int(re.findall(r"^VmPeak:\s+(\d+) kB$", status, re.MULTILINE)[0])


@pytest.fixture(scope="module")
def address_space_kib() -> tuple[int, int]:
    """What a start takes on this machine: with its modules alone, and when it serves. The difference depends on the
    number of processors, which sets the number of threads, and on the C library.
    """
    code = "import kvoffloadd.cli.commands, kvoffloadd.daemon; print(open('/proc/self/status').read())"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kvo.sock"
        child = subprocess.Popen(
            [sys.executable, "-m", "kvoffloadd", "serve", "--memory", "8MiB", "--socket", str(path)], cwd=ROOT
        )
        with Client(path, namespace=None, role="observer", connect_deadline_s=HANG_S) as client:
            client.ping()
            serving = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
        child.send_signal(signal.SIGTERM)
        assert child.wait(HANG_S) == 0
    return peak_kib(imported), peak_kib(serving)


def sentence_of(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert (done.returncode, "Traceback" in done.stderr, words in done.stderr) == (2, False, True), done.stderr


@pytest.mark.slow
def test_a_limit_of_the_shell_is_a_sentence(socket_dir: Path) -> None:
    sentence_of(start(socket_dir, "ulimit -f 1024"), "ulimit -f")


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_too_little_address_space_is_a_sentence(
    socket_dir: Path, address_space_kib: tuple[int, int], share: float
) -> None:
    imported, serving = address_space_kib
    sentence_of(start(socket_dir, f"ulimit -v {imported + int(share * (serving - imported))}"), "ulimit -v")


@pytest.mark.slow
def test_a_start_without_standard_streams_serves(socket_dir: Path) -> None:
    """Descriptors 0, 1 and 2 are nothing: no socket has such a number."""
    child = subprocess.Popen(
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-m", "kvoffloadd", "serve", "--memory",
         "8MiB", "--socket", str(socket_dir / "kvo.sock")], cwd=ROOT,
    )  # fmt: skip
    with Client(socket_dir / "kvo.sock", namespace=None, role="observer", connect_deadline_s=HANG_S) as client:
        client.ping()
        assert {os.readlink(f"/proc/{child.pid}/fd/{number}") for number in range(3)} == {os.devnull}
    child.send_signal(signal.SIGTERM)
    assert child.wait(HANG_S) == 0


def test_a_command_without_standard_streams_has_its_exit_status(socket_dir: Path) -> None:
    command = f"{sys.executable} -m kvoffloadd status --socket {socket_dir}/none"
    done = subprocess.run(["bash", "-c", f"{command} <&- >&- 2>&-"], check=False, timeout=HANG_S, cwd=ROOT)
    assert done.returncode == 3


def test_populating_without_threads_is_done_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with mmap.mmap(-1, 16 * PAGE_BYTES) as memory:
        address = ctypes.addressof(view := ctypes.c_char.from_buffer(memory))
        monkeypatch.setattr(threading.Thread, "start", none)
        populate(address, 16 * PAGE_BYTES, 4)
        assert resident_bytes(address) == 16 * PAGE_BYTES
        del view


def resident_bytes(address: int) -> int:
    """Returns the resident bytes of the mapping that begins there."""
    maps = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace")
    entry = re.search(rf"^{address:08x}-.*?^Rss: +(\d+) kB", maps, re.MULTILINE | re.DOTALL)
    return int(entry[1]) << 10 if entry else 0
