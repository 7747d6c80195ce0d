"""The breaker, against its rules."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoffloadd.storage.remote.breaker import (
    DELAY_S_MAX,
    DELAY_S_MIN,
    TIMEOUTS,
    WINDOW,
    Breaker,
    BreakerState,
)

CLOSED, OPEN, TRIAL = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.TRIAL


def fail(breaker: Breaker, now_s: float = 0.0, *, timed_out: bool = True) -> None:
    breaker.end(breaker.begin(), now_s, ok=False, timed_out=timed_out)


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(TIMEOUTS):
        fail(breaker, now_s)
    return breaker


def test_time_outs_in_a_row_open_it() -> None:
    breaker = Breaker()
    for _ in range(TIMEOUTS - 1):
        fail(breaker)
    breaker.end(breaker.begin(), 0.0, ok=True)
    for _ in range(TIMEOUTS - 1):
        fail(breaker)
        assert breaker.allows()
    fail(breaker)
    assert breaker.state is OPEN
    assert not breaker.allows()


def test_half_of_a_window_opens_it() -> None:
    breaker = Breaker()
    for number in range(WINDOW - 1):
        breaker.end(breaker.begin(), 0.0, ok=number % 2 == 0)
        assert breaker.state is CLOSED
    breaker.end(breaker.begin(), 0.0, ok=False)
    assert breaker.state is OPEN


def test_no_success_opens_it() -> None:
    breaker = Breaker()
    for _ in range(WINDOW - 1):
        fail(breaker, timed_out=False)
    breaker.end(breaker.begin(), 0.0, ok=True)
    assert breaker.state is CLOSED


def test_less_than_half_does_not() -> None:
    breaker = Breaker()
    for number in range(5 * WINDOW):
        breaker.end(breaker.begin(), 0.0, ok=number % 5 != 0)
        assert breaker.state is CLOSED


def test_one_call_tries_it_after_a_probe() -> None:
    breaker = opened(100.0)
    assert breaker.probe_in_s(100.0) == DELAY_S_MIN
    assert breaker.probe_in_s(200.0) == 0.0
    breaker.probed(101.0, ok=True)
    assert breaker.allows()
    trial = breaker.begin()
    assert not breaker.allows()
    breaker.end(trial, 102.0, ok=True)
    assert breaker.state is CLOSED


def test_a_trial_that_was_not_made_leaves_its_place_to_another_one() -> None:
    breaker = opened()
    breaker.probed(1.0, ok=True)
    breaker.withdraw(breaker.begin())
    assert breaker.allows()


def test_what_began_before_says_nothing() -> None:
    breaker = Breaker()
    old = [breaker.begin() for _ in range(10)]
    for _ in range(TIMEOUTS):
        fail(breaker)
    breaker.probed(1.0, ok=True)
    for call in old:
        breaker.end(call, 1.0, ok=True)
        assert breaker.state is TRIAL
    breaker.begin()
    breaker.withdraw(old[0])
    assert not breaker.allows()


def test_the_delay_grows_and_begins_anew_after_a_good_window() -> None:
    breaker = opened()
    delays = []
    for _ in range(8):
        delays.append(breaker.probe_in_s(0.0))
        breaker.probed(0.0, ok=False)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    breaker.probed(0.0, ok=True)
    for _ in range(WINDOW + 1):
        breaker.end(breaker.begin(), 0.0, ok=True)
    for _ in range(TIMEOUTS):
        fail(breaker)
    assert breaker.probe_in_s(0.0) == DELAY_S_MIN


def test_a_flapping_store_is_asked_ever_less() -> None:
    breaker = opened()
    for expected in (2, 4, 8):
        breaker.probed(0.0, ok=True)
        fail(breaker)
        assert breaker.probe_in_s(0.0) == expected


class BreakerMachine(RuleBasedStateMachine):
    """Any calls, ends in any order, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now_s = 0.0
        self.calls: list[int] = []
        self.trials = 0

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.breaker.allows())
    @rule()
    def begin(self) -> None:
        self.calls.append(self.breaker.begin())

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), ok=st.booleans(), timed_out=st.booleans())
    def end(self, data: st.DataObject, ok: bool, timed_out: bool) -> None:
        call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        before = self.breaker.state
        self.breaker.end(call, self.now_s, ok=ok, timed_out=timed_out and not ok)
        if ok:
            assert self.breaker.state in (before, CLOSED)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.breaker.withdraw(self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1))))

    @precondition(lambda self: self.breaker.probe_in_s(self.now_s) == 0.0)
    @rule(ok=st.booleans())
    def probe(self, ok: bool) -> None:
        self.breaker.probed(self.now_s, ok=ok)
        assert self.breaker.state is (TRIAL if ok else OPEN)

    @invariant()
    def nobody_is_let_through_an_open_one(self) -> None:
        if self.breaker.state is OPEN:
            assert not self.breaker.allows()

    @invariant()
    def it_is_not_open_for_longer_than_the_longest_delay(self) -> None:
        wait_s = self.breaker.probe_in_s(self.now_s)
        assert (wait_s is not None) == (self.breaker.state is OPEN)
        assert wait_s is None or 0 <= wait_s <= DELAY_S_MAX

    @invariant()
    def a_trial_that_nobody_makes_is_free(self) -> None:
        if self.breaker.state is TRIAL and not self.calls:
            assert self.breaker.allows()


TestBreaker = BreakerMachine.TestCase
