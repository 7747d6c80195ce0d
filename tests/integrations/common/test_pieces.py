"""Pieces of a request: each fits, and together they are all of it."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.client import Group, GroupKind, KvCache
from kvoffloadd.integrations.common.keys import most_keys, pieces
from kvoffloadd.protocol.messages import Limits


def in_parts(parts: int) -> KvCache:
    return KvCache((), [Group(0, GroupKind.FULL, 16, parts=parts)])


WHOLE = in_parts(1)


def limits(frame_bytes: int = 4 << 20, keys: int = 16_384) -> Limits:
    return Limits(frame_bytes=frame_bytes, fds_per_frame=64, keys_per_request=keys, jobs=8, deadline_s=1.0)


@given(counts=st.dictionaries(st.integers(0, 5), st.integers(0, 40)), most=st.integers(1, 50))
def test_all_of_it_in_order_and_no_more_than_allowed(counts: dict[int, int], most: int) -> None:
    dealt = pieces(counts, most)
    for group, count in counts.items():
        named = [at for piece in dealt if group in piece for at in range(count)[piece[group]]]
        assert named == list(range(count))
    sizes = [sum(rows.stop - rows.start for rows in piece.values()) for piece in dealt]
    assert all(0 < size <= most for size in sizes)
    assert all(size == most for size in sizes[:-1])


def test_a_request_that_fits_is_whole() -> None:
    assert pieces({0: 3, 2: 4}, 7) == [{0: slice(0, 3), 2: slice(0, 4)}]
    assert pieces({0: 0}, 7) == []


def test_what_binds_first() -> None:
    assert most_keys(None, WHOLE, 1, 1) == sys.maxsize
    assert most_keys(limits(), WHOLE, 1) == 16_384
    assert most_keys(limits(keys=10), WHOLE, 4) == 10
    assert 14_000 < most_keys(limits(), WHOLE, 4, 64) < (4 << 20) // (32 + 64 * 4)
    assert most_keys(limits(frame_bytes=64), WHOLE, 1, 1) == 1
    assert most_keys(limits(), in_parts(17), 1) == 8192, "keys of so many parts count twice"
