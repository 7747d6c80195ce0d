"""Each key is published once as stored and once as removed, in as much memory as it may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.integrations.vllm import event_thread as book
from kvoffloadd.integrations.vllm.event_thread import PublishedKeys

KEYS = [bytes([at]) * 32 for at in range(8)]
SOME = st.lists(st.sampled_from(KEYS), max_size=8, unique=True)


@given(steps=st.lists(st.tuples(st.sampled_from(["came", "went", "amiss", "forget", "renew"]), SOME), max_size=40))
def test_nothing_is_told_twice_or_out_of_order(steps: list[tuple[str, list[bytes]]]) -> None:
    published, believed = PublishedKeys([3]), set[bytes]()
    for what, keys in steps:
        if what == "came":
            published.expect(3, keys)
            added = published.came(3, keys)
            assert believed.isdisjoint(added)
            believed |= set(added)
            assert believed >= set(keys)
        elif what in ("went", "amiss"):
            removed = published.went(3, keys) if what == "went" else published.amiss(3, set(keys))
            assert believed >= set(removed)
            believed -= set(removed)
            assert believed.isdisjoint(keys) if what == "went" else believed <= set(keys)
        else:
            published_keys = published.forget() if what == "forget" else published.renew(published.generation + 1)
            assert {key for _group, group_keys in published_keys for key in group_keys} == believed
            believed.clear()


def test_groups_that_the_engine_has_not() -> None:
    published = PublishedKeys([0])
    assert (published.came(1, KEYS), published.went(1, KEYS), published.amiss(1, set(KEYS))) == ([], [], [])


def test_in_a_later_generation_what_was_forgotten_may_come_again() -> None:
    published = PublishedKeys([0])
    list(published.renew(9))
    published.expect(0, KEYS[:4])
    assert published.came(0, KEYS) == KEYS[:4]
    assert [(group, sorted(keys)) for group, keys in published.forget()] == [(0, KEYS[:4])]
    assert published.came(0, KEYS) == KEYS[:4]
    list(published.renew(10))
    assert published.came(0, KEYS) == []


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "TOLD_MAX", 3)
    monkeypatch.setattr(book, "EXPECTED_MAX", 2)
    published = PublishedKeys([0])
    assert published.came(0, KEYS) == KEYS[:3]
    assert published.went(0, KEYS[:1]) == KEYS[:1]
    assert published.came(0, KEYS[5:]) == KEYS[5:6]
    list(published.renew(1))
    published.expect(0, KEYS)
    assert published.came(0, KEYS) == KEYS[-2:]
