"""Checksums of many payloads: the same one by one and in one call, which lets other threads run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.model import I64Array
from kvoffloadd.native import loader
from kvoffloadd.storage.hashing import hash_payloads
from kvoffloadd.testing.wait import HANG_S

DATA = np.random.default_rng(5).integers(0, 256, 1 << 18, np.uint8)


@pytest.fixture(params=["compiled", "one by one"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of this file holds for both."""
    if request.param == "one by one":
        monkeypatch.setattr(loader, "XXH3", None)
    elif loader.HELPER is None:
        pytest.skip("the C code was not compiled here")
    else:
        assert loader.XXH3 is not None, "xxhash does not export its C functions, or the helper gives other digests"


def digests_of(begins: I64Array, sizes: I64Array) -> list[bytes]:
    found = hash_payloads(np.uint64(DATA.ctypes.data) + begins.astype(np.uint64), sizes)
    assert found.dtype == np.uint64 and found.shape == (len(sizes), 2)
    return [row.astype(">u8").tobytes() for row in found]


@given(st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))), max_size=40))
def test_each_digest_is_that_of_its_bytes(edges: list[tuple[int, int]]) -> None:
    begins, ends = np.sort(np.array(edges, np.int64).reshape(-1, 2), axis=1).T
    expected = [xxhash.xxh3_128_digest(DATA[begin:end].data) for begin, end in zip(begins, ends, strict=True)]
    assert digests_of(begins, ends - begins) == expected


def test_arrays_need_not_be_contiguous() -> None:
    begins, sizes = np.arange(0, 8000, 10), np.arange(1, 1601)[::2]
    expected = [
        xxhash.xxh3_128_digest(DATA[begin : begin + size].data) for begin, size in zip(begins, sizes, strict=True)
    ]
    spaced = np.repeat(begins, 2)
    assert digests_of(spaced[::2], np.arange(1, 1601)[::2]) == expected


_BLOCKED = """
import ctypes, threading, time
import numpy as np
from kvoffloadd.native import _native

libc = ctypes.CDLL(None)
semaphores = [ctypes.create_string_buffer(64) for _ in range(2)]
for semaphore, value in zip(semaphores, (1, 0)):
    assert libc.sem_init(semaphore, 0, value) == 0
wait = ctypes.cast(libc.sem_wait, ctypes.c_void_p).value
addresses = np.array([ctypes.addressof(semaphore) for semaphore in semaphores], np.uint64)
sizes, digests = np.zeros(2, np.uint64), np.empty((2, 2), np.uint64)
thread = threading.Thread(target=_native.hash_payloads, args=(wait, addresses, sizes, digests))
thread.start()
value = ctypes.c_int(1)
while value.value:  # until the thread is past the first and waits at the second
    time.sleep(0.001)
    libc.sem_getvalue(semaphores[0], ctypes.byref(value))
libc.sem_post(semaphores[1])
thread.join()
"""


def test_other_threads_run_meanwhile() -> None:
    """A function that waits for another thread of Python is called in place of the hash function."""
    if loader.HELPER is None:
        pytest.skip("this is about the helper")
    subprocess.run([sys.executable, "-c", _BLOCKED], check=True, timeout=HANG_S)


def test_what_does_not_fit_together_is_refused() -> None:
    if loader.HELPER is None:
        pytest.skip("this is about the helper")
    hash_all: Any = loader.HELPER.hash_payloads
    one, two, digests = np.zeros(1, np.uint64), np.zeros(2, np.uint64), np.zeros((1, 2), np.uint64)
    for arguments in ((0, one, one, digests), (1, one, two, digests), (1, two, two, digests)):
        with pytest.raises(ValueError, match="a function is needed"):
            hash_all(*arguments)
    with pytest.raises(TypeError):
        hash_all(1, one, one)
    digests.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        hash_all(1, one, one, digests)
