"""Checksums of many payloads: the same one by one and in one call, which lets other threads run."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.model import I64Array
from kvoffloadd.storage import hashing
from kvoffloadd.storage.hashing import hash_payloads

DATA = np.random.default_rng(5).integers(0, 256, 1 << 18, np.uint8)


@pytest.fixture(params=["compiled", "one by one"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of this file holds for both."""
    if request.param == "one by one":
        monkeypatch.setattr(hashing, "_native", None)
    elif importlib.util.find_spec("kvoffloadd.storage._hashruns") is None:
        pytest.skip("_hashruns.c was not compiled here")
    else:
        assert hashing._native is not None, "xxhash does not export its C function, or the helper gives other digests"


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


def test_a_function_that_gives_other_digests_is_not_used() -> None:
    assert hashing._is_right(hashing._hash_one_by_one)
    if hashing._native is not None:
        assert hashing._is_right(hashing._native)
    assert not hashing._is_right(lambda addresses, sizes: hashing._hash_one_by_one(addresses, sizes)[:, ::-1])


_BLOCKED = """
import ctypes, threading, time
import numpy as np
from kvoffloadd.storage import _hashruns

libc = ctypes.CDLL(None)
semaphores = [ctypes.create_string_buffer(64) for _ in range(2)]
for semaphore, value in zip(semaphores, (1, 0)):
    assert libc.sem_init(semaphore, 0, value) == 0
wait = ctypes.cast(libc.sem_wait, ctypes.c_void_p).value
addresses = np.array([ctypes.addressof(semaphore) for semaphore in semaphores], np.uint64)
sizes, digests = np.zeros(2, np.uint64), np.empty((2, 2), np.uint64)
thread = threading.Thread(target=_hashruns.hash, args=(wait, addresses, sizes, digests))
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
    if hashing._native is None:
        pytest.skip("this is about the helper")
    subprocess.run([sys.executable, "-c", _BLOCKED], check=True, timeout=60)


def test_what_does_not_fit_together_is_refused() -> None:
    if hashing._native is None:
        pytest.skip("this is about the helper")
    _hashruns = importlib.import_module("kvoffloadd.storage._hashruns")
    one, two, digests = np.zeros(1, np.uint64), np.zeros(2, np.uint64), np.zeros((1, 2), np.uint64)
    for arguments in ((0, one, one, digests), (1, one, two, digests), (1, two, two, digests)):
        with pytest.raises(ValueError, match="a function is needed"):
            _hashruns.hash(*arguments)
    with pytest.raises(TypeError):
        _hashruns.hash(1, one, one)
    digests.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        _hashruns.hash(1, one, one, digests)
