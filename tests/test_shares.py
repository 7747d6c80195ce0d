"""Tests shares: what is bounded together stays bounded, and something is left for the next one that comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.scheduling.shares import share_left

TOTAL = 1 << 16


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(-TOTAL, TOTAL)), max_size=60))
def test_all_together_never_have_more_and_nobody_more_than_is_left(steps: list[tuple[int, int]]) -> None:
    used = [0] * 8
    for user, amount in steps:
        if amount < 0:
            used[user] = max(0, used[user] + amount)
        elif 0 < amount <= share_left(TOTAL, sum(used), used[user]):
            used[user] += amount
            assert used[user] <= TOTAL - sum(used)
        assert sum(used) <= TOTAL


def test_each_newcomer_finds_half_of_what_is_left() -> None:
    used = [0] * 8
    for user in range(8):
        used[user] += share_left(TOTAL, sum(used), 0)
        assert share_left(TOTAL, sum(used), used[user]) == 0
    assert used == [TOTAL >> (1 + user) for user in range(8)]
    used[0] = 0
    assert share_left(TOTAL, sum(used), used[7]) >= TOTAL // 4, "what one gives back is there for all"
