"""Tests what a request learns about a key, from the first pin to the end."""

from __future__ import annotations

from kvoffloadd.client import KeyState
from kvoffloadd.integrations.vllm.keys import PLAIN
from kvoffloadd.integrations.vllm.lookup_thread import PinRequest
from kvoffloadd.integrations.vllm.requests import LookupState, RequestPhase, RequestState, admitted
from kvoffloadd.model import Tier

KEYS = [bytes([at]) * 32 + bytes(4) for at in range(3)]


def asked(state: RequestState, now: float = 0.0) -> PinRequest:
    """Looks every key up, as a step does, and asks."""
    assert [state.lookup(key, now, 1.0, 10.0) for key in KEYS] == [LookupState.ASKED] * 3
    return state.ask()


def answers(state: RequestState, now: float) -> list[LookupState]:
    return [state.lookup(key, now, 1.0, 10.0) for key in KEYS]


def test_keys_are_asked_for_in_the_order_of_the_prompt() -> None:
    """vLLM looks windows up from their end; a tail, which it knows nothing of, stands behind all others."""
    windows = [bytes([at]) * 32 + b"\0\0\0\1" for at in range(3)]
    tail = b"\xff" * 32 + b"\0\0\0\1"
    ends = {key: 32 * (at % 3 + 1) for at, key in enumerate(KEYS + windows)}
    state = RequestState("r", ends.get)
    for key in (*KEYS, tail, *reversed(windows)):
        state.lookup(key, 0.0, 1.0, 10.0)
    pin = state.ask()
    assert pin.groups == {0: [key[:32] for key in KEYS], 1: [key[:32] for key in (*windows, tail)]}
    assert pin.ends == {0: 32, 1: 32}


def test_it_is_told_where_the_first_key_of_each_group_ends() -> None:
    """A window may ask for its end alone, and a group may have shorter keys."""
    window, tail = (bytes([at]) * 32 + b"\0\0\0\1" for at in (8, 9))
    ends = {KEYS[0]: 128, KEYS[1]: 192, window: 176, tail: 190}
    state = RequestState("r", ends.get)
    for key in (tail, KEYS[0], KEYS[1], window, KEYS[2]):
        state.lookup(key, 0.0, 1.0, 10.0)
    assert state.ask().ends == {0: 128, 1: 176}


def test_answers_are_kept() -> None:
    state = RequestState("r")
    pin = asked(state)
    pin.states = {0: bytes([KeyState.HIT, KeyState.MISS, KeyState.PENDING])}
    assert state.learn(pin, PLAIN, 0.0) == {Tier.MEMORY: 1}
    assert answers(state, 5.0) == [LookupState.HIT, LookupState.MISS, LookupState.PENDING]


def test_it_knows_from_where_a_hit_came() -> None:
    """It knows this until the request is loaded, or starts anew."""
    state = RequestState("r")
    pin = asked(state)
    pin.states, pin.tiers = {0: bytes([KeyState.HIT, KeyState.PENDING, KeyState.PENDING])}, {0: bytes([0, 1, 2])}
    pin.promoting = True
    assert state.learn(pin, PLAIN, 0.0) == {Tier.MEMORY: 1}
    assert state.tiers == {}
    pin.states, pin.promoting = {0: bytes([KeyState.HIT] * 3)}, False
    assert state.learn(pin, PLAIN, 0.5) == {Tier.DISK: 1, Tier.REMOTE: 1}
    assert state.tiers == {KEYS[1]: Tier.DISK, KEYS[2]: Tier.REMOTE}
    state.forget()
    assert state.tiers == {}


def test_a_pending_key_is_asked_for_again_once_its_answer_is_there() -> None:
    state = RequestState("r")
    pin = asked(state)
    pin.states = {0: bytes([KeyState.HIT, KeyState.HIT, KeyState.PENDING])}
    pin.promoting = True
    state.learn(pin, PLAIN, 0.4)
    answers(state, 0.5)
    assert state.fresh == []
    pin.promoting = False
    state.learn(pin, PLAIN, 0.5)
    answers(state, 0.5)
    assert state.fresh == [], "not at once"
    answers(state, 0.6)
    assert state.fresh == [KEYS[2]]


def test_what_is_expected_is_asked_for_until_it_is_there() -> None:
    state = RequestState("r", expected_until=2.0)
    pin = asked(state)
    state.expected.update(KEYS[:2])
    pin.states = {0: bytes([KeyState.HIT, KeyState.MISS, KeyState.PENDING])}
    state.learn(pin, PLAIN, 0.1)
    assert answers(state, 0.1) == [LookupState.HIT, LookupState.PENDING, LookupState.PENDING]
    assert state.fresh == [], "not at once"
    answers(state, 0.2)
    assert state.fresh == KEYS[1:3]
    pin = state.ask()
    pin.states = {0: bytes([KeyState.MISS, KeyState.HIT])}
    state.learn(pin, PLAIN, 1.9)
    assert answers(state, 2.0) == [LookupState.HIT, LookupState.PENDING, LookupState.HIT]
    pin = state.ask()
    pin.states = {0: bytes([KeyState.MISS])}
    state.learn(pin, PLAIN, 2.0)
    assert answers(state, 2.0) == [LookupState.HIT, LookupState.MISS, LookupState.HIT]


def test_what_nobody_stores_is_not_expected() -> None:
    state = RequestState("r", expected_until=2.0)
    pin = asked(state)
    state.expected.update(KEYS[:1])
    pin.states = {0: bytes([KeyState.MISS] * 3)}
    state.learn(pin, PLAIN, 0.1)
    assert answers(state, 0.1) == [LookupState.PENDING, LookupState.MISS, LookupState.MISS]


def test_nobody_waits_for_ever() -> None:
    state = RequestState("r")
    asked(state)
    assert answers(state, 0.9) == [LookupState.ASKED] * 3
    assert answers(state, 1.1) == [LookupState.MISS] * 3
    assert state.given_up


def test_keys_from_disk_may_take_longer() -> None:
    state = RequestState("r")
    pin = asked(state)
    pin.states = {0: bytes([KeyState.PENDING] * 3)}
    state.learn(pin, PLAIN, 0.0)
    assert answers(state, 9.0) == [LookupState.PENDING] * 3
    assert answers(state, 11.0) == [LookupState.MISS] * 3


def test_what_is_forgotten_is_to_be_released() -> None:
    state = RequestState("r")
    pin = asked(state)
    assert state.forget() == [pin]
    assert state.pins == []
    assert state.answers == {}


def test_who_computes_pins_nothing_and_knows_what_it_knew() -> None:
    state = RequestState("r")
    pin = asked(state)
    pin.states = {0: bytes([KeyState.HIT, KeyState.MISS, KeyState.MISS])}
    state.learn(pin, PLAIN, 0.0)
    assert state.settle() == [pin]
    assert (state.waiting_keys, state.answers[KEYS[0]]) == (0, LookupState.HIT)


def wanting(count: int = 3) -> list[RequestState]:
    """Each wants three keys."""
    found = [RequestState(f"r{at}") for at in range(count)]
    for state in found:
        answers(state, 0.0)
    return found


def ask_all(admit: list[RequestState]) -> None:
    for state in admit:
        state.ask()


def test_pins_of_those_who_wait_are_bounded() -> None:
    everyone = wanting()
    first = admitted(everyone, everyone, 6, 0.0)
    assert first == everyone[:2]
    ask_all(first)
    assert admitted(everyone, everyone, 6, 0.1) == []
    assert answers(everyone[2], 5.0) == [LookupState.ASKED] * 3, "it waits for room longer than for an answer"
    everyone[0].phase = RequestPhase.LOADING  # what loads has its room in the engine, too
    assert admitted(everyone, everyone, 6, 5.0) == everyone[2:]
    assert answers(everyone[2], 5.9) == [LookupState.ASKED] * 3
    assert answers(everyone[2], 6.1) == [LookupState.MISS] * 3


def test_what_misses_takes_no_room() -> None:
    everyone = wanting()
    ask_all(admitted(everyone, everyone, 3, 0.0))
    assert everyone[0].asking is not None
    everyone[0].asking.holds = 0
    assert admitted(everyone, everyone, 3, 0.0) == everyone[1:2]


def test_one_is_always_asked_for_and_who_has_pins_may_have_more() -> None:
    everyone = wanting(2)
    first = admitted(everyone, everyone, 1, 0.0)
    assert first == everyone[:1]
    ask_all(first)
    first[0].asking = None
    more = bytes([9]) * 32 + bytes(4)
    first[0].lookup(more, 0.0, 1.0, 10.0)
    assert admitted(everyone, everyone, 1, 0.0) == first


def test_who_finds_no_room_gives_up_at_last() -> None:
    everyone = wanting(2)
    ask_all(admitted(everyone, everyone, 3, 0.0))
    for at in range(10):
        assert answers(everyone[1], float(at)) == [LookupState.ASKED] * 3
        assert admitted(everyone, everyone, 3, float(at)) == []
    assert answers(everyone[1], 10.1) == [LookupState.MISS] * 3


def test_time_in_which_nobody_looks_does_not_count() -> None:
    everyone = wanting(2)
    ask_all(admitted(everyone, everyone, 3, 0.5))
    assert answers(everyone[1], 50.0) == [LookupState.ASKED] * 3


def test_a_request_that_loads_waits_for_new_keys_as_others_do() -> None:
    """It waits from when they were asked for first, not from the beginning of time."""
    state = RequestState("r")
    state.phase = RequestPhase.LOADING
    assert answers(state, 100.0) == [LookupState.ASKED] * 3
    assert answers(state, 100.5) == [LookupState.ASKED] * 3
    assert answers(state, 101.5) == [LookupState.MISS] * 3


def test_a_request_without_room_waits_on_after_it_has_settled() -> None:
    state = RequestState("r")
    assert answers(state, 0.0) == [LookupState.ASKED] * 3
    state.postpone(0.0)
    state.settle()
    assert answers(state, 5.0) == [LookupState.ASKED] * 3, "as long as for keys from disk: not its second of timeout"


def held(state: RequestState) -> PinRequest:
    """All keys hit, and are pinned."""
    pin = asked(state)
    pin.states = {0: bytes([KeyState.HIT] * 3)}
    state.learn(pin, PLAIN, 0.0)
    state.phase = RequestPhase.LOADING
    return pin


def test_a_load_that_failed_in_part_is_asked_for_anew() -> None:
    """It is asked for twice: a daemon that reports each time that all is there must not hold a request up for ever."""
    state = RequestState("r")
    for _ in range(2):
        pin = held(state)
        assert state.fail(range(96), partial=True) == [pin]
        assert (state.phase, state.pins, state.loading) == (RequestPhase.IDLE, [], False)
    held(state)
    state.fail(range(96), partial=True)
    assert answers(state, 0.0) == [LookupState.MISS] * 3


def test_a_load_that_was_lost_is_not_asked_for_anew() -> None:
    """The daemon is dead, or hangs: the request does not wait for it twice."""
    state = RequestState("r")
    held(state)
    state.fail(range(96), partial=False)
    assert answers(state, 0.0) == [LookupState.MISS] * 3


def test_nothing_of_a_failed_load_counts_as_there() -> None:
    """What the request computes must be stored, the damaged key above all."""
    state = RequestState("r")
    held(state)
    state.loaded.update(KEYS)
    state.fail(range(96), partial=True)
    assert not any(state.is_there(key) for key in KEYS)


def test_tokens_of_a_failed_load_are_kept_or_computed() -> None:
    state = RequestState("r")
    for prefix, account in ((0, (0, 64)), (32, (0, 64)), (64, (32, 32)), (96, (64, 0)), (128, (64, 0))):
        state.fail(range(32, 96), partial=True)
        state.prefix_tokens = prefix
        assert state.account() == account
        assert state.account() == (0, 0), "once"


def test_of_several_failed_loads_the_tokens_count_once() -> None:
    """Those of the first: it was to bring the most."""
    state = RequestState("r")
    state.fail(range(96), partial=True)
    state.fail(range(64), partial=True)
    state.prefix_tokens = 32
    assert state.account() == (32, 64)


def test_a_request_that_ends_during_its_load_stays_so() -> None:
    state = RequestState("r")
    held(state)
    state.phase = RequestPhase.ENDING
    state.fail(range(96), partial=True)
    assert state.phase is RequestPhase.ENDING
