"""Epochs: a clear is never undone, whatever several disks remember of it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.epochs import Epochs

NAMES = [bytes([n]) * 16 for n in range(4)]


@dataclass(frozen=True)
class Clear:
    """Of one namespace, or with None of all."""

    name: bytes | None


clears = st.lists(st.builds(Clear, st.sampled_from([None, *NAMES])), max_size=12)


def made(done: list[Clear]) -> Epochs:
    epochs = Epochs()
    for clear in done:
        if clear.name is None:
            epochs.advance_all()
        else:
            epochs.advance(clear.name)
    return epochs


def of_each(epochs: Epochs) -> list[int]:
    return [epochs.of(name) for name in NAMES]


def merge(into: Epochs, other: Epochs) -> None:
    into.merge(other.base, other.last, dict(other.by_namespace))


@settings(max_examples=200, deadline=None)
@given(done=clears)
def test_a_clear_gives_a_number_that_nothing_had_before(done: list[Clear]) -> None:
    epochs, seen = Epochs(), {0}
    for clear in done:
        before = dict(zip(NAMES, of_each(epochs), strict=True))
        if clear.name is None:
            epochs.advance_all()
        else:
            epochs.advance(clear.name)
        for name, old in before.items():
            if clear.name in (None, name):
                assert epochs.of(name) not in seen
            else:
                assert epochs.of(name) == old, "another namespace is not touched"
        seen.update(of_each(epochs))
        assert epochs.last == max(seen)


@settings(max_examples=200, deadline=None)
@given(here=clears, there=clears, after=clears)
def test_of_what_two_disks_remember_the_later_clear_holds(
    here: list[Clear], there: list[Clear], after: list[Clear]
) -> None:
    one, two, back = made(here), made(there), made(there)
    merge(one, two)
    merge(back, made(here))
    expected = [max(pair) for pair in zip(of_each(made(here)), of_each(made(there)), strict=True)]
    assert of_each(one) == expected
    assert of_each(back) == expected, "whatever the order"
    assert one == back
    merge(one, two)
    assert one == back, "twice is once"
    older = max(of_each(made(here)) + of_each(made(there)))
    for clear in after:
        if clear.name is not None:
            one.advance(clear.name)
            assert one.of(clear.name) > older, "no number of either disk comes again"


@settings(max_examples=100, deadline=None)
@given(done=clears, unknown=st.sets(st.sampled_from(NAMES)))
def test_what_is_forgotten_begins_at_the_base_and_its_next_clear_is_new(done: list[Clear], unknown: set[bytes]) -> None:
    epochs = made(done)
    before = dict(zip(NAMES, of_each(epochs), strict=True))
    epochs.forget(unknown)
    for name in NAMES:
        assert epochs.of(name) == (epochs.base if name in unknown else before[name])
    for name in unknown:
        epochs.advance(name)
        assert epochs.of(name) > max(before.values())


def test_only_clears_later_than_the_last_of_all_are_remembered_by_name() -> None:
    epochs = made([Clear(NAMES[0]), Clear(None), Clear(NAMES[1])])
    assert (epochs.base, epochs.last, epochs.by_namespace) == (2, 3, {NAMES[1]: 3})
    epochs.merge(5, 6, {NAMES[2]: 6, NAMES[3]: 4})
    assert (epochs.base, epochs.last, epochs.by_namespace) == (5, 6, {NAMES[2]: 6})
