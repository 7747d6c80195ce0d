"""Every implementation moves every byte, and only those, at any alignment and length."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.device import copyruns
from kvoffloadd.device.copyruns import IMPLEMENTATION, CopyRuns, copy_payloads, copy_runs, implementations
from kvoffloadd.errors import DeviceError, UsageError
from kvoffloadd.linux.sharedmem import Mapping, create_memfd
from kvoffloadd.model import U64Array
from kvoffloadd.native.xxh3 import find_xxh3
from tests.device.hiding import HIDDEN, hide
from tests.device.memory import address, noise, same_array, u64

ALL = {**{name: copy for name, (copy, _) in implementations().items()}, "chosen": copy_runs}
each = pytest.mark.parametrize("copy", ALL.values(), ids=ALL)


def test_the_fastest_is_chosen() -> None:
    assert next(iter(implementations())) == IMPLEMENTATION
    assert "bounce" in implementations(), "the last resort needs nothing"


def _copy_and_check(copy: CopyRuns, runs: list[tuple[int, int, int]], size_bytes: int) -> None:
    """`runs`: source offset, destination offset, length. Destinations start as noise, so that stray writes show."""
    src, dst = noise(size_bytes, 1), noise(size_bytes, 2)
    expected = dst.copy()
    for at, to, length in runs:
        expected[to : to + length] = src[at : at + length]
    copy(
        u64([address(src) + at for at, _, _ in runs]),
        u64([address(dst) + to for _, to, _ in runs]),
        u64([length for _, _, length in runs]),
    )
    assert np.array_equal(dst, expected)
    assert np.array_equal(src, noise(size_bytes, 1))


@each
@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 70_000) | st.integers(0, 70)), max_size=8
    )
)
@settings(max_examples=60, deadline=None)
def test_any_alignment_and_length(copy: CopyRuns, shapes: list[tuple[int, int, int]]) -> None:
    runs, src_end, dst_end = [], 0, 0
    for src_gap, dst_gap, length in shapes:
        runs.append((src_end + src_gap, dst_end + dst_gap, length))
        src_end, dst_end = src_end + src_gap + length, dst_end + dst_gap + length
    _copy_and_check(copy, runs, max(src_end, dst_end) + 200)


@each
@pytest.mark.parametrize("around", [16384, 16384 + 31, 32768, 65536])
def test_lengths_around_the_streaming_path(copy: CopyRuns, around: int) -> None:
    for length, misalignment in itertools.product(range(around - 2, around + 35, 9), (0, 1, 16, 31)):
        _copy_and_check(copy, [(3, misalignment, length)], around + 200)


@each
@pytest.mark.parametrize("length", [1, 100, 4095, 16384, 20_001, 65_536])
def test_nothing_is_touched_behind_the_end(copy: CopyRuns, length: int) -> None:
    """Runs end where the file ends; the pages mapped behind it kill the process when they are touched."""
    size_bytes = 128 << 10
    fd = create_memfd("kvo-test", size_bytes)
    src, dst = (Mapping.map_fd(fd, size_bytes + 8192) for _ in range(2))
    src.array()[: size_bytes // 2] = noise(size_bytes // 2)
    for to in (size_bytes - length, size_bytes // 2):
        at = size_bytes // 2 - length
        copy(u64([src.address + at]), u64([dst.address + to]), u64([length]))
        assert np.array_equal(dst.array()[to : to + length], noise(size_bytes // 2)[at:])
    copy(u64([src.address + size_bytes - length]), u64([dst.address]), u64([length]))
    assert np.array_equal(dst.array()[:length], noise(size_bytes // 2)[-length:])
    os.close(fd)
    src.close()
    dst.close()


@each
def test_more_runs_than_one_system_call_takes(copy: CopyRuns) -> None:
    count = 3000
    order = np.random.default_rng(0).permutation(count)
    runs = [(int(at) * 40, number * 40 + 3, 1 + number % 37) for number, at in enumerate(order)]
    runs[5] = (0, runs[5][1], 0)
    _copy_and_check(copy, runs, count * 40 + 100)


@each
def test_nothing_to_copy(copy: CopyRuns) -> None:
    copy(u64([]), u64([]), u64([]))
    copy(u64([0, 0]), u64([0, 0]), u64([0, 0]))


@each
def test_strided_arguments(copy: CopyRuns) -> None:
    src, dst = noise(64, 1), np.zeros(64, np.uint8)
    table = u64([address(src), address(dst), 8, address(src) + 32, address(dst) + 8, 8]).reshape(2, 3)
    copy(table[:, 0], table[:, 1], table[:, 2])
    assert dst[:16].tolist() == [*src[:8], *src[32:40]]


@each
def test_other_arrays_are_refused(copy: CopyRuns) -> None:
    good = u64([0])
    for bad in (np.zeros(1, np.int64), np.zeros(1, np.float64), u64([0, 0]), np.zeros((1, 1), np.uint64)):
        for wrong in range(3):
            arguments = [bad if at == wrong else good for at in range(3)]
            with pytest.raises(UsageError):
                copy(*arguments)  # type: ignore[arg-type]


@each
def test_other_threads_run_meanwhile(copy: CopyRuns) -> None:
    src, dst = noise(64 << 20), np.zeros(64 << 20, np.uint8)
    runs = u64([address(src)]), u64([address(dst)]), u64([64 << 20])

    def work() -> None:
        for _ in range(5):
            copy(*runs)

    worker = threading.Thread(target=work)
    worker.start()
    turns = 0
    while worker.is_alive():
        turns += 1
    worker.join()
    assert turns > 1000
    assert np.array_equal(src, dst)


def test_the_kernel_s_other_errors_are_told() -> None:
    with pytest.raises(DeviceError, match=os.strerror(errno.EPERM)):
        copyruns._fail(errno.EPERM)


@pytest.mark.parametrize("moved", range(1, 31))
def test_kernel_copies_continue_where_they_stopped(moved: int) -> None:
    sizes = [5, 10, 15]
    to = np.stack([u64([100, 200, 300]), u64(sizes)], axis=1)
    of = np.stack([u64([1100, 1200, 1300]), u64(sizes)], axis=1)
    done = copyruns._advance(to, of, moved)
    left = [(100 * (at + 1) + byte) for at, size in enumerate(sizes) for byte in range(size)][moved:]
    assert [int(a) + byte for a, size in to[done:] for byte in range(int(size))] == left
    assert [int(a) + byte for a, size in of[done:] for byte in range(int(size))] == [1000 + place for place in left]


@pytest.mark.parametrize("hidden", HIDDEN, ids=HIDDEN.values())
def test_without_the_faster_ones_the_next_is_chosen(hidden: tuple[str, ...], tmp_path: Path) -> None:
    """A fresh interpreter can't find the compiled module, or the sandbox forbids the system call too."""
    if HIDDEN[hidden] not in implementations():
        pytest.skip("process_vm_readv is not allowed here")
    code = "from kvoffloadd.device import copyruns; print(copyruns.IMPLEMENTATION)"
    environment = {**os.environ, **hide(tmp_path, hidden)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50, env=environment)
    assert done.stdout.strip() == HIDDEN[hidden]


def test_same_array_tells_arrays_apart() -> None:
    assert same_array(u64([1, 2]), [1, 2])
    assert not same_array(u64([1, 2]), [2, 1])


# --- copying and hashing --------------------------------------------------------------------------

hashing = pytest.mark.skipif(copy_payloads is None, reason="nothing hashes while it copies here")


def test_it_hashes_wherever_it_can() -> None:
    """A helper that gives other digests is not used, and all of the following would be skipped."""
    if "native" not in implementations() or find_xxh3() is None:
        pytest.skip("the C code was not compiled here, or xxhash exports nothing")
    assert copy_payloads is not None


def _copy_and_hash(shapes: list[list[tuple[int, int, int]]]) -> None:
    """`shapes`: of each payload its runs: a gap before the source, one before the destination, and a length."""
    assert copy_payloads is not None
    runs = [run for payload in shapes for run in payload]
    lengths = [length for _, _, length in runs]
    froms = np.cumsum([0, *lengths])[:-1] + np.cumsum([gap for gap, _, _ in runs] or [0])[: len(runs)]
    tos = np.cumsum([0, *lengths])[:-1] + np.cumsum([gap for _, gap, _ in runs] or [0])[: len(runs)]
    size_bytes = sum(length + max(gaps) for *gaps, length in runs) + 200
    src, dst = noise(size_bytes, 1), noise(size_bytes, 2)
    expected, digests = dst.copy(), np.full((len(shapes), 2), 7, np.uint64)
    pieces = [src[at : at + length] for at, length in zip(froms, lengths, strict=True)]
    for to, piece in zip(tos, pieces, strict=True):
        expected[to : to + len(piece)] = piece
    counts = u64([len(payload) for payload in shapes])
    copy_payloads(u64(froms) + u64([address(src)]), u64(tos) + u64([address(dst)]), u64(lengths), counts, digests)
    assert np.array_equal(dst, expected)
    ends = np.cumsum([len(payload) for payload in shapes], dtype=int)
    for payload, end, digest in zip(shapes, ends, digests, strict=True):
        whole = b"".join(piece.tobytes() for piece in pieces[end - len(payload) : end])
        assert digest.astype(">u8").tobytes() == xxhash.xxh3_128_digest(whole)


@hashing
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 70_000) | st.integers(0, 300)),
            max_size=4,
        ),
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_payloads_are_copied_and_hashed(shapes: list[list[tuple[int, int, int]]]) -> None:
    _copy_and_hash(shapes)


@hashing
@pytest.mark.parametrize("around", [4096, 16384, 32768])
def test_hashing_around_the_sizes_at_which_copies_change(around: int) -> None:
    for length, misalignment in itertools.product(range(around - 2, around + 3), (0, 1, 31)):
        _copy_and_hash([[(3, misalignment, length), (0, 0, 5)], [(1, 1, length)]])


BLOCK = 1024  # of the hash function


@hashing
@given(
    st.lists(st.lists(st.integers(0, 20) | st.integers(3, 6), max_size=4), max_size=5),
    st.sampled_from([0, 1, 63]),
    st.sampled_from([0, 32, 64]),
)
@settings(max_examples=60, deadline=None)
def test_payloads_of_whole_blocks_are_copied_and_hashed(shapes: list[list[int]], source: int, target: int) -> None:
    """Those are hashed on the way, where the destination is aligned, next to shorter ones, empty ones and others."""
    assert copy_payloads is not None
    blocks = [blocks for payload in shapes for blocks in payload]
    size = u64([BLOCK * many for many in blocks])
    total = BLOCK * sum(blocks)
    begins = np.cumsum(size) - size
    src, dst = noise(total + 64, 1)[source : source + total], np.zeros(total + 128, np.uint8)
    dst = dst[-address(dst) % 64 :][target : target + total]
    digests = np.zeros((len(shapes), 2), np.uint64)
    counts = u64([len(payload) for payload in shapes])
    # Payloads and their runs lie in memory in the opposite order.
    froms = u64([total]) - begins - size
    copy_payloads(froms + u64([address(src)]), begins + u64([address(dst)]), size, counts, digests)
    pieces = [src[at : at + length] for at, length in zip(froms.tolist(), size.tolist(), strict=True)]
    assert dst.tobytes() == b"".join(piece.tobytes() for piece in pieces)
    ends = np.cumsum([len(payload) for payload in shapes], dtype=int)
    for payload, end, digest in zip(shapes, ends, digests, strict=True):
        whole = b"".join(piece.tobytes() for piece in pieces[end - len(payload) : end])
        assert digest.astype(">u8").tobytes() == xxhash.xxh3_128_digest(whole)


@hashing
def test_arguments_that_do_not_fit_are_refused() -> None:
    assert copy_payloads is not None
    src, dst, digests = noise(64), np.zeros(64, np.uint8), np.zeros((2, 2), np.uint64)
    runs = (u64([address(src)] * 2), u64([address(dst)] * 2), u64([8, 8]))
    wrong: list[tuple[U64Array, Any]] = [
        (u64([1, 2]), digests),
        (u64([1]), digests[:1]),
        (u64([1, 1]), digests[:1]),
        (u64([1, 1]), np.zeros((2, 4), np.uint64)[:, ::2]),
        (u64([1, 1]), np.zeros((2, 2), np.int64)),
    ]
    for counts, out in wrong:
        with pytest.raises(UsageError):
            copy_payloads(*runs, counts, out)
    assert not dst.any()
    assert not digests.any()
