"""When a stream looks for the end of a chunk: on a pretended clock and link, so that time is what they say."""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import numpy as np
import pytest

from kvoffloadd.cudadriver import NOT_READY, SUCCESS
from kvoffloadd.device.cuda import stream
from kvoffloadd.device.cuda.stream import STEP_S, STEP_SHARE, CopyStream, Rate
from kvoffloadd.model import U64Array

MIB = 1 << 20
LINK_BYTES_PER_S = 52e9
COPY_S = 0.5e-6  # what each copy costs the link, however small
QUERY_S, LATE_S = 2e-6, 60e-6  # what a look takes, and how much longer than asked a sleep lasts


class Link:
    """A driver with one stream, its clock, and what was asked of them."""

    batches = True
    pitches = pitched_batches = False

    def __init__(self, bytes_per_s: float = LINK_BYTES_PER_S) -> None:
        self.now_s = 1000.0
        self.looks = 0
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._ends: dict[int, float] = {}
        self._handles = itertools.count(1)

    # --- the clock ---

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds + LATE_S

    # --- the driver ---

    def call(self, name: str, *arguments: Any) -> int:
        return next(self._handles)

    def set_current(self, context: int) -> int:
        return SUCCESS

    def check(self, call: str, status: int) -> None:
        assert status == SUCCESS

    def took_s(self, size: U64Array) -> float:
        """The link's own time for these copies."""
        return max(int(size.sum()) / self._bytes_per_s, len(size) * COPY_S)

    def copy_batch(self, src: U64Array, dst: U64Array, size: U64Array, _stream: int, **_: bool) -> int:
        self._free_s = max(self._free_s, self.now_s) + self.took_s(size)
        return SUCCESS

    def record(self, event: int, _stream: int) -> int:
        self._ends[event] = self._free_s
        return SUCCESS

    def query(self, event: int) -> int:
        self.looks += 1
        self.now_s += QUERY_S
        return SUCCESS if self.now_s >= self._ends[event] else NOT_READY


def rows(total_bytes: int, row_bytes: int) -> U64Array:
    """The sizes of a chunk's copies, and their addresses, too."""
    return np.full(total_bytes // row_bytes, row_bytes, np.uint64)


LARGE, SMALL = rows(64 * MIB, 2 * MIB), rows(4 * MIB, 4096)


def end_process(reason: str) -> NoReturn:
    raise AssertionError(reason)


def start(link: Link, monkeypatch: pytest.MonkeyPatch) -> CopyStream:
    monkeypatch.setattr(stream, "time", link)
    return CopyStream(link, 1, 0, batch=True, on_broken=end_process)  # type: ignore[arg-type]  # a fake


def late_s(link: Link, made: CopyStream, chunk: U64Array) -> float:
    """How long after a chunk's end `move` returns."""
    began_s = link.now_s
    made.move(chunk, chunk, chunk)
    return link.now_s - began_s - link.took_s(chunk)


def bound_s(link: Link, chunk: U64Array) -> float:
    """The latest that an end may be seen, whatever was before."""
    return max(STEP_S, STEP_SHARE * link.took_s(chunk), 1e-3 if link.took_s(chunk) > 1 else 0) + 100e-6


def test_large_chunks_between_small_rows_end_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for small rows predicts nothing of the next one; no sleep is taken for the link's slowness."""
    link = Link()
    made = start(link, monkeypatch)
    for _ in range(50):
        assert late_s(link, made, SMALL) <= bound_s(link, SMALL)
        assert late_s(link, made, LARGE) <= bound_s(link, LARGE)
    assert made._rate.bytes_per_s >= 0.6 * LINK_BYTES_PER_S


def test_after_small_rows_alone_the_link_is_learnt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    made = start(link, monkeypatch)
    for _ in range(500):
        made.move(SMALL, SMALL, SMALL)
    assert made._rate.bytes_per_s < 0.3 * LINK_BYTES_PER_S
    late = [late_s(link, made, LARGE) for _ in range(40)]
    assert max(late) <= bound_s(link, LARGE)
    assert made._rate.bytes_per_s >= 0.8 * LINK_BYTES_PER_S
    assert max(late[20:]) <= 150e-6


@pytest.mark.parametrize("chunk", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("bytes_per_s", [LINK_BYTES_PER_S, 4e9, 1e9])
def test_looks_are_few_where_the_rate_is_known(
    monkeypatch: pytest.MonkeyPatch, chunk: U64Array, bytes_per_s: float
) -> None:
    """Each costs the GIL."""
    link = Link(bytes_per_s)
    made = start(link, monkeypatch)
    for _ in range(20):
        made.move(chunk, chunk, chunk)
    before = link.looks
    late = [late_s(link, made, chunk) for _ in range(10)]
    assert max(late) <= max(bound_s(link, chunk), 0.1 * link.took_s(chunk))
    assert link.looks - before <= 10 * 80


def test_a_link_that_slows_down_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    made = start(link, monkeypatch)
    for _ in range(20):
        made.move(LARGE, LARGE, LARGE)
    link._bytes_per_s = 5e9  # an engine's own copies
    for _ in range(20):
        assert late_s(link, made, LARGE) <= bound_s(link, LARGE)
    assert made._rate.bytes_per_s == pytest.approx(5e9, rel=0.1)


def test_an_end_that_is_seen_late_does_not_make_the_next_chunk_faster() -> None:
    rate = Rate()
    for _ in range(100):
        rate.add_sample(64 * MIB, 2 * 64 * MIB / LINK_BYTES_PER_S)
        rate.add_sample(64 * MIB, 0.0)
    assert rate.bytes_per_s == pytest.approx(LINK_BYTES_PER_S, rel=0.3)
