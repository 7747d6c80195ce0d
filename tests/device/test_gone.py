"""Memory that is gone when it is touched: the copy fails, the process lives; and a fault elsewhere still kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffloadd.device.copyruns import CopyRuns, ReadWords, copy_payloads, copy_runs, implementations, read_words
from kvoffloadd.errors import DeviceError
from kvoffloadd.linux.sharedmem import Mapping
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.testing.wait import HANG_S
from tests.device.memory import address, noise, u64

SIZE = 64 * PAGE_BYTES
GONE_FROM = 32 * PAGE_BYTES
GONE = "is gone"
IMPLEMENTATIONS = {**implementations(), "chosen": (copy_runs, read_words)}
each = pytest.mark.parametrize("copy", [copy for copy, _ in IMPLEMENTATIONS.values()], ids=IMPLEMENTATIONS)
each_reader = pytest.mark.parametrize("read", [read for _, read in IMPLEMENTATIONS.values()], ids=IMPLEMENTATIONS)


@pytest.fixture
def shared() -> Iterator[Mapping]:
    """Shared memory whose second half is gone: its file was cut off."""
    fd = os.memfd_create("gone", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    mapping = Mapping.map_fd(fd, SIZE)
    mapping.array()[:] = noise(SIZE, 3)
    os.ftruncate(fd, GONE_FROM)
    os.close(fd)
    yield mapping
    mapping.close()


def runs(mapping: Mapping, own: int, size: int, *, store: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One run in what is there, one that begins there and ends in what is gone, one in what is there."""
    peer = u64([mapping.address, mapping.address + GONE_FROM - size // 2, mapping.address + size])
    local = u64([own, own + size, own + 2 * size])
    return (peer, local, u64([size] * 3)) if store else (local, peer, u64([size] * 3))


@each
@pytest.mark.parametrize("size", [2, 8, 100, PAGE_BYTES, 16384, 40_000], ids="{} bytes".format)
@pytest.mark.parametrize("store", [True, False], ids=["store", "load"])
def test_the_copy_fails_and_can_be_made_again(copy: CopyRuns, shared: Mapping, size: int, store: bool) -> None:
    own = noise(3 * size, 4)
    for _ in range(3):
        with pytest.raises(DeviceError, match=GONE):
            copy(*runs(shared, address(own), size, store=store))
        good = [column[[0, 2]] for column in runs(shared, address(own), size, store=store)]
        copy(*good)
    there = shared.array()[: 2 * size]
    assert np.array_equal(there, np.concatenate([own[:size], own[2 * size :]]))


@pytest.mark.skipif(copy_payloads is None, reason="nothing hashes while it copies here")
@pytest.mark.parametrize("size", [2, 100, PAGE_BYTES, 40_000], ids="{} bytes".format)
def test_a_copy_that_hashes_fails_and_can_be_made_again(shared: Mapping, size: int) -> None:
    """The page may be gone when it is copied, and, since it is read twice, when it is hashed."""
    assert copy_payloads is not None
    own, digests = noise(3 * size, 4), np.zeros((3, 2), np.uint64)
    for _ in range(3):
        with pytest.raises(DeviceError, match=GONE):
            copy_payloads(*runs(shared, address(own), size, store=True), u64([1, 1, 1]), digests)
        assert digests[0].any()
        assert not digests[1:].any()
        src, dst, sizes = (column[[0, 2]] for column in runs(shared, address(own), size, store=True))
        copy_payloads(src, dst, sizes, u64([1, 1]), digests[:2])
        digests[:] = 0
    there = shared.array()[: 2 * size]
    assert np.array_equal(there, np.concatenate([own[:size], own[2 * size :]]))


@each
def test_what_lies_behind_a_failure_in_other_threads_is_copied(copy: CopyRuns, shared: Mapping) -> None:
    """Each thread has its own way back."""
    wrong: list[str] = []

    def fail() -> None:
        for _ in range(200):
            try:
                copy(u64([shared.address + GONE_FROM]), u64([address(np.zeros(8, np.uint8))]), u64([8]))
                wrong.append("no error")
            except DeviceError:
                pass

    def work() -> None:
        source, target = noise(1 << 16, 5), np.zeros(1 << 16, np.uint8)
        for _ in range(200):
            target[:] = 0
            copy(u64([address(source)]), u64([address(target)]), u64([1 << 16]))
            if not np.array_equal(source, target):
                wrong.append("other bytes")

    threads = [threading.Thread(target=task) for task in (fail, work, fail, work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@each_reader
def test_words(read: ReadWords, shared: Mapping) -> None:
    """Those that are there are read, whatever lies between them."""
    words = shared.array().view(np.uint64)[: GONE_FROM // 8]
    words[[0, 1, 7]] = 5, (1 << 64) - 1, 0
    at = np.array([0, GONE_FROM, 8, 56, SIZE - 8, GONE_FROM, 0], np.uint64) + np.uint64(shared.address)
    for _ in range(2):
        values, gone = read(at)
        assert gone.tolist() == [False, True, False, False, True, True, False]
        assert values[~gone].tolist() == [5, (1 << 64) - 1, 0, 5]
    values, gone = read(at[:0])
    assert len(values) == len(gone) == 0


PRELUDE = """
import ctypes, faulthandler, mmap, os, signal, sys
from kvoffloadd.device.copyruns import copy_runs, implementations
import numpy as np
assert "native" in implementations()

held = []

def torn():
    fd = os.memfd_create("torn")
    os.ftruncate(fd, 4096)
    whole = mmap.mmap(fd, 4096)
    os.ftruncate(fd, 0)
    held.append(whole)
    return np.frombuffer(whole, np.uint8)

def use():
    one, here = np.ones(1, np.uint64), np.zeros(1, np.uint8)
    try:
        copy_runs(np.array([torn().ctypes.data], np.uint64), np.array([here.ctypes.data], np.uint64), one)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""
native = pytest.mark.skipif("native" not in implementations(), reason="the extension is not compiled here")


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A Python that survives one fault in a copy, with `code` for what it does before and after."""
    command = [sys.executable, "-c", PRELUDE + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)


@native
@pytest.mark.parametrize("code", [
    "use(); torn()[0]",
    "use(); os.kill(os.getpid(), signal.SIGBUS)",
    "signal.signal(signal.SIGBUS, signal.SIG_IGN); use(); torn()[0]",
    "use(); signal.signal(signal.SIGBUS, signal.SIG_DFL); use(); torn()[0]",
])  # fmt: skip
def test_a_fault_elsewhere_kills_as_before(code: str) -> None:
    done = run(code)
    assert done.returncode == -signal.SIGBUS
    assert set(done.stdout.split()) == {"DeviceError"}


@native
@pytest.mark.parametrize("code", [
    "faulthandler.enable(); use(); torn()[0]",
    "use(); faulthandler.enable(); torn()[0]",
    "use(); faulthandler.enable(); use(); torn()[0]",
    "faulthandler.enable(); use(); faulthandler.disable(); faulthandler.enable(); use(); torn()[0]",
])  # fmt: skip
def test_python_s_fault_handler_still_tells_where(code: str) -> None:
    """Whichever came first; in the second case the handler is not ours any more, and none of our code is called."""
    done = run(code)
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr
    assert 'File "<string>"' in done.stderr
    assert done.stderr.count("Fatal") <= 2
    assert set(done.stdout.split()) == {"DeviceError"}


@native
def test_a_signal_that_is_ignored_stays_ignored() -> None:
    done = run("signal.signal(signal.SIGBUS, signal.SIG_IGN); use(); os.kill(os.getpid(), signal.SIGBUS); use()")
    assert done.returncode == 0
    assert done.stdout.split() == ["DeviceError"] * 2


@native
def test_a_handler_that_came_later_is_put_behind_ours() -> None:
    done = run("use(); faulthandler.enable(); use(); use()")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["DeviceError"] * 3


@native
def test_a_signal_that_is_sent_reaches_the_handler_of_python() -> None:
    done = run("""
signal.signal(signal.SIGBUS, lambda *_: print("caught", flush=True))
use()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGBUS)
""")
    assert done.returncode == 0
    assert done.stdout.split() == ["DeviceError"] + ["caught"] * 3


def test_the_chosen_one_is_safe_in_this_process(shared: Mapping) -> None:
    """It is safe though pytest has its own fault handler."""
    with pytest.raises(DeviceError, match=GONE):
        copy_runs(u64([shared.address + GONE_FROM]), u64([shared.address]), u64([1]))
