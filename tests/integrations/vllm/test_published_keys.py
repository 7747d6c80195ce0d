"""Each key is published once as stored and once as removed, in as much memory as it may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.client import Tier
from kvoffloadd.integrations.vllm import event_thread as book
from kvoffloadd.integrations.vllm.event_thread import PublishedKeys

KEYS = [bytes([at]) * 32 for at in range(8)]
HERE, BELOW = (0, Tier.MEMORY), (0, Tier.DISK)
SOME = st.lists(st.sampled_from(KEYS), max_size=8, unique=True)


@given(steps=st.lists(st.tuples(st.sampled_from(["came", "went", "amiss", "forget", "renew"]), SOME), max_size=40))
def test_nothing_is_told_twice_or_out_of_order(steps: list[tuple[str, list[bytes]]]) -> None:
    published, believed = PublishedKeys([3]), set[bytes]()
    place = (3, Tier.DISK)
    for what, keys in steps:
        if what == "came":
            published.expect(3, keys)
            added = published.came(place, keys)
            assert believed.isdisjoint(added)
            believed |= set(added)
            assert believed >= set(keys)
        elif what in ("went", "amiss"):
            removed = published.went(place, keys) if what == "went" else published.amiss(place, set(keys))
            assert believed >= set(removed)
            believed -= set(removed)
            assert believed.isdisjoint(keys) if what == "went" else believed <= set(keys)
        else:
            published_keys = published.forget() if what == "forget" else published.renew(published.generation + 1)
            assert {key for _place, keys_there in published_keys for key in keys_there} == believed
            believed.clear()


def test_groups_that_the_engine_has_not() -> None:
    published, elsewhere = PublishedKeys([0]), (1, Tier.MEMORY)
    assert (
        published.came(elsewhere, KEYS),
        published.went(elsewhere, KEYS),
        published.amiss(elsewhere, set(KEYS)),
    ) == ([], [], [])


def test_in_a_later_generation_what_was_forgotten_may_come_again() -> None:
    published = PublishedKeys([0])
    list(published.renew(9))
    published.expect(0, KEYS[:4])
    assert published.came(HERE, KEYS) == KEYS[:4]
    assert [(place, sorted(keys)) for place, keys in published.forget()] == [(HERE, KEYS[:4]), (BELOW, [])]
    assert published.came(HERE, KEYS) == KEYS[:4]
    list(published.renew(10))
    assert published.came(HERE, KEYS) == []


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "TOLD_MAX", 3)
    monkeypatch.setattr(book, "EXPECTED_MAX", 2)
    published = PublishedKeys([0])
    assert published.came(HERE, KEYS) == KEYS[:3]
    assert published.went(HERE, KEYS[:1]) == KEYS[:1]
    assert published.came(HERE, KEYS[5:]) == KEYS[5:6]
    list(published.renew(1))
    published.expect(0, KEYS)
    assert published.came(HERE, KEYS) == KEYS[-2:]


def test_a_key_is_published_for_each_tier() -> None:
    published = PublishedKeys([0])
    assert (published.came(HERE, KEYS), published.came(BELOW, KEYS[:3])) == (KEYS, KEYS[:3])
    assert published.went(HERE, KEYS) == KEYS
    assert published.intersection(BELOW, KEYS) == set(KEYS[:3])
    assert (published.went(HERE, KEYS), published.went(BELOW, KEYS)) == ([], KEYS[:3])


def test_in_a_later_generation_the_engine_s_own_are_its_own_in_each_tier() -> None:
    """They are expected once, and come to disk while memory has them, or back to memory while the disk does."""
    published = PublishedKeys([0])
    list(published.renew(9))
    published.expect(0, KEYS[:1])
    assert published.came(HERE, KEYS[:2]) == KEYS[:1]
    assert published.came(BELOW, KEYS[:2]) == KEYS[:1]
    assert published.went(HERE, KEYS[:2]) == KEYS[:1]
    assert published.came(HERE, KEYS[:2]) == KEYS[:1]
    assert [published.went(place, KEYS) for place in (HERE, BELOW)] == [KEYS[:1]] * 2
    assert published.came(HERE, KEYS[:1]) == []
