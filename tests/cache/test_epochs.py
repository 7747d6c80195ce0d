"""Epochs: a clear is never undone, whatever several disks remember of it."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.memory import epochs as epochs_module
from kvoffloadd.cache.memory.epochs import AHEAD_MAX_US, LEAP_US, RECALLED_MAX_US, Epochs, unix_time_us
from kvoffloadd.errors import LimitError
from kvoffloadd.model import EPOCH_MAX

NAMES = [bytes([n]) * 16 for n in range(4)]
NOBODY = b"?" * 16


class TickingClock:
    """Is the clock of the whole world: it goes on with each look, and may be set."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        self.now += 1
        return self.now


@dataclass(frozen=True)
class Clear:
    """Represents a clear of one namespace, or with None of all."""

    name: bytes | None


clears = st.lists(st.builds(Clear, st.sampled_from([None, *NAMES])), max_size=12)


def perform(epochs: Epochs, clear: Clear) -> None:
    if clear.name is None:
        epochs.advance_all()
    else:
        epochs.advance(clear.name)


def made(done: list[Clear], clock: Callable[[], int]) -> Epochs:
    epochs = Epochs(clock=clock)
    for clear in done:
        perform(epochs, clear)
    return epochs


def of_each(epochs: Epochs) -> list[int]:
    return [epochs.of(name) for name in [*NAMES, NOBODY]]


def merged(*sources: Epochs) -> Epochs:
    into = Epochs()
    for other in sources:
        into.merge(other.base, other.last, dict(other.by_namespace))
    return into


def test_numbers_are_the_time_and_fit() -> None:
    before = unix_time_us()
    epochs = made([Clear(NAMES[0]), Clear(None)], unix_time_us)
    assert before <= epochs.of(NAMES[0]) <= unix_time_us() + LEAP_US
    assert epochs.last < EPOCH_MAX < 1 << 53, "exact in a double"


@settings(max_examples=200, deadline=None)
@given(done=clears)
def test_a_clear_gives_a_number_that_nothing_had_before(done: list[Clear]) -> None:
    epochs, seen = Epochs(clock=TickingClock()), {0}
    for clear in done:
        before = dict(zip(NAMES, of_each(epochs), strict=False))
        perform(epochs, clear)
        for name, old in before.items():
            if clear.name in (None, name):
                assert epochs.of(name) not in seen
            else:
                assert epochs.of(name) == old, "another namespace is not touched"
        seen.update(of_each(epochs))
        assert epochs.last == max(seen)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(here=clears, there=clears, after=clears)
def test_of_what_two_disks_remember_the_later_clear_holds(
    here: list[Clear], there: list[Clear], after: list[Clear]
) -> None:
    clock = TickingClock()
    one, two = made(here, clock), made(there, clock)
    both = merged(one, two)
    expected = [max(pair) for pair in zip(of_each(one), of_each(two), strict=True)]
    assert of_each(both) == expected
    assert both == merged(two, one), "whatever the order"
    assert both == merged(both, one, two), "twice is once"
    assert both == one.merged(two.base, two.last, two.by_namespace)
    for clear in after:
        older = max(of_each(one) + of_each(two) + of_each(both))
        perform(both, clear)
        if clear.name is not None:
            assert both.of(clear.name) > older


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), set_back=st.integers(1, 500))
def test_two_that_go_on_alone_never_give_the_same_number(seed: int, set_back: int) -> None:
    """Also where the clock is behind what was given out before, and does not go on for a while."""
    clock = TickingClock()
    epochs = made([Clear(NAMES[0])], clock)
    here, there = (merged(epochs) for _ in range(2))
    here.clock = there.clock = lambda: clock.now - set_back
    given = {epochs.last}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "randbelow", random.Random(seed).randrange)
        for one in [here] * 3 + [there] * 3:
            before = one.last
            one.advance(NAMES[1])
            assert one.last > before
            given.add(one.last)
    assert len(given) >= 6, "one in 65,536 may meet"


def test_a_clock_that_was_set_back_is_caught_up_with() -> None:
    clock = TickingClock()
    epochs = made([Clear(NAMES[0])] * 3, clock)
    clock.now -= 100
    epochs.advance(NAMES[0])
    clock.now += 2 * LEAP_US
    epochs.advance(NAMES[0])
    assert epochs.last == clock.now


@dataclass
class World:
    """What roots that never met may hold: each has records of namespaces in epochs from its own past."""

    epochs: Epochs
    records: set[tuple[bytes, int]] = field(default_factory=set)


@settings(max_examples=200, deadline=None)
@given(past=clears, gone=clears, done=clears, kept=st.sets(st.sampled_from(NAMES)))
def test_what_is_forgotten_never_matches_again(
    past: list[Clear], gone: list[Clear], done: list[Clear], kept: set[bytes]
) -> None:
    """`gone`: what a root saw after it was taken out. Whatever it holds is void; what is kept stays."""
    clock = TickingClock()
    epochs = made(past, clock)
    on_disk = World(merged(epochs))
    on_disk.epochs.clock = clock
    for clear in [None, *gone]:
        if clear:
            perform(on_disk.epochs, clear)
        on_disk.records |= {(name, on_disk.epochs.of(name)) for name in NAMES}
    for clear in done:
        perform(epochs, clear)
    before = {name: epochs.of(name) for name in NAMES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epochs_module, "REMEMBERED_MAX", -1)
        epochs.forget(kept)
    for name in kept:
        assert epochs.of(name) == before[name]
    for name in {*NAMES, NOBODY} - kept:
        assert epochs.of(name) == epochs.base > max(of_each(on_disk.epochs))
        assert (name, epochs.of(name)) not in on_disk.records
    together = merged(epochs, on_disk.epochs)
    assert of_each(together) == [max(epochs.of(name), on_disk.epochs.of(name)) for name in [*NAMES, NOBODY]], (
        "an epoch that is kept below the others counts"
    )


def test_few_clears_are_not_forgotten() -> None:
    epochs = Epochs()
    for n in range(epochs_module.REMEMBERED_MAX):
        epochs.advance(n.to_bytes(16, "little"))
    before = dict(epochs.by_namespace)
    epochs.forget(set())
    assert (epochs.base, epochs.by_namespace) == (0, before)
    epochs.advance(NOBODY)
    epochs.forget({NOBODY, NAMES[3]})
    assert epochs.by_namespace == before | {NOBODY: epochs.last}, "what is kept does not count"
    epochs.advance(NAMES[3])
    epochs.forget({NOBODY})
    assert epochs.by_namespace.keys() == {NOBODY}
    assert epochs.base == epochs.last


def test_only_what_differs_from_the_rest_is_listed() -> None:
    epochs = made([Clear(NAMES[0]), Clear(None), Clear(NAMES[1])], TickingClock())
    assert (epochs.base, epochs.by_namespace) == (1002, {NAMES[1]: 1003})
    epochs.merge(2005, 2006, {NAMES[2]: 2006, NAMES[3]: 2004})
    assert (epochs.base, epochs.last, epochs.by_namespace) == (2005, 2006, {NAMES[2]: 2006, NAMES[3]: 2004})


def test_what_is_believed_is_recalled_and_both_leave_room() -> None:
    now = 10**15
    epochs = Epochs(clock=lambda: now)
    far = now + AHEAD_MAX_US
    assert epochs.believes(far)
    assert not epochs.believes(far + 1)
    assert epochs.recalls(0, far, now + RECALLED_MAX_US)
    assert not epochs.recalls(0, now + RECALLED_MAX_US + 1, far)
    assert epochs.recalls()
    epochs.follow(NAMES[0], far)
    assert epochs.of(NAMES[0]) == far == epochs.last
    epochs.advance(NAMES[1])
    assert far < epochs.of(NAMES[1]) <= far + LEAP_US, "the clock is behind what was followed"
    assert epochs.believes(epochs.last), "its own number"
    later = Epochs(clock=lambda: now - AHEAD_MAX_US // 2)
    assert later.recalls(epochs.last), "by a clock that was set back since"


@pytest.mark.parametrize("all_of_them", [False, True])
def test_without_a_number_nothing_is_cleared_and_nothing_is_changed(all_of_them: bool) -> None:
    epochs = Epochs(clock=lambda: 5)
    epochs.follow(NAMES[0], EPOCH_MAX)
    before = of_each(epochs), epochs.last
    with pytest.raises(LimitError, match="clock"):
        perform(epochs, Clear(None if all_of_them else NAMES[0]))
    assert (of_each(epochs), epochs.last) == before
