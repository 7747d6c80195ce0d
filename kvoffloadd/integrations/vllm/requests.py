"""One request's answers for its keys, and the pins that keep them true."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvoffloadd.client import KeyState
from kvoffloadd.integrations.vllm.keys import PLAIN, KeyNames, by_group, group_of, key_of
from kvoffloadd.integrations.vllm.lookup_thread import PinRequest
from kvoffloadd.model import Tier

_ASK_AGAIN_S = 0.005
_ASK_EXPECTED_S = 0.02  # all keys of a prompt may be
_LOADS_AGAIN = 2
"""How often a request that had a load fail in part loads anew. Damaged keys are dropped by then and miss."""


class LookupState(enum.Enum):
    """Mirrors vLLM's LookupResult."""

    MISS = enum.auto()
    HIT = enum.auto()
    PENDING = enum.auto()
    ASKED = enum.auto()


class RequestPhase(enum.Enum):
    """What a request is doing with the daemon."""

    IDLE = enum.auto()
    """It waits for no answer: it has all, or has requested none."""
    ASKING = enum.auto()
    """It waits for the answer to keys that were looked up, or will be at the end of the step."""
    POSTPONED = enum.auto()
    """Its keys were not looked up at the end of the last step: other requests' pins fill the room."""
    LOADING = enum.auto()
    """Its keys are being loaded, and stay pinned."""
    ENDING = enum.auto()
    """It was finished during its load, and goes with the end of that."""


@dataclass(slots=True, eq=False)
class RequestState:
    """Represents one request until it is loaded, preempted or finished. Times are time.monotonic seconds."""

    request: str
    end_of: Callable[[bytes], int | None] | None = None
    """Where in the prompt a key ends, in tokens, as vLLM counts. None: vLLM looks keys up in the order of the prompt
    anyway. With windows it does not: those it looks up from their end.
    """
    expected_until: float = 0.0
    """Until then keys that are `expected` and not there are taken to be on their way, see `expectation`."""
    phase: RequestPhase = RequestPhase.IDLE
    answers: dict[bytes, LookupState] = field(default_factory=dict)
    """Answers by offload key."""
    tiers: dict[bytes, int] = field(default_factory=dict)
    """The `Tier` of keys that hit and were not in memory, by offload key."""
    expected: set[bytes] = field(default_factory=set)
    """Offload keys that another engine stores."""
    fresh: list[bytes] = field(default_factory=list)
    """Offload keys to ask for at the end of the step."""
    pins: list[PinRequest] = field(default_factory=list)
    """Requested, and not released."""
    asking: PinRequest | None = None
    """The one of `pins` that still has its last answer due."""
    loaded: set[bytes] = field(default_factory=set)
    """Keys that the daemon has given it."""
    given_up: bool = False
    """Keys that do not hit by now miss for the rest of its life, also after a load or a preemption."""
    failed_loads: int = 0
    failed_tokens: range = range(0)
    """The tokens of its first failed load, by position in its prompt, until `account`."""
    prefix_tokens: int = 0
    """How many tokens it had, or loaded, when it last got blocks; it computes those behind them."""
    waiting_since: float = 0.0
    postponed_at: float = 0.0
    """When it was last POSTPONED."""
    again_at: float = 0.0
    """When PENDING keys may be looked up again."""

    def lookup(self, key: bytes, now: float, timeout_s: float, wait_s: float) -> LookupState:
        """Returns the key's known state; if there is none, the key will be looked up. Past its time, an unknown key
        misses.
        """
        answer = self.answers.get(key)
        if answer is LookupState.HIT or answer is LookupState.MISS:
            return answer
        if self.given_up:
            return LookupState.MISS
        if answer is None:
            if self.asking is None and not self.fresh:
                self.waiting_since = now
            self.answers[key] = LookupState.ASKED
            self._want(key)
            return LookupState.ASKED
        if self._has_waited_too_long(answer, now, timeout_s, wait_s):
            self.given_up = True
            return LookupState.MISS
        if answer is LookupState.PENDING and self.asking is None and now >= self.again_at:
            self._want(key)
        return answer

    def _want(self, key: bytes) -> None:
        self.fresh.append(key)
        if self.phase is RequestPhase.IDLE:
            self.phase = RequestPhase.ASKING

    def _has_waited_too_long(self, answer: LookupState, now: float, timeout_s: float, wait_s: float) -> bool:
        if self.phase is RequestPhase.POSTPONED:
            if now - self.postponed_at > wait_s:
                self.waiting_since = now  # not looked at since: its turn has not come before
            return now - self.waiting_since > wait_s
        return now - self.waiting_since > (timeout_s if answer is LookupState.ASKED else wait_s)

    def postpone(self, now: float) -> None:
        """Postpones its lookups: there was no room for it."""
        if not self.loading:  # else it has begun to load its known hits
            self.phase, self.postponed_at = RequestPhase.POSTPONED, now

    def admit(self, now: float) -> None:
        """Lets it look keys up now. Its wait for room does not count."""
        if self.phase is RequestPhase.POSTPONED:
            self.phase, self.waiting_since = RequestPhase.ASKING, now

    def ask(self, names: KeyNames = PLAIN) -> PinRequest:
        """Returns a pin of the `fresh` keys, in the order of the prompt."""
        keys, ends = self.fresh, {}
        if self.end_of is not None:
            keys = sorted(keys, key=self._place)
            # Groups do not all begin at one place of the prompt: not where their keys are of different lengths, nor
            # where only the end of a window is looked up.
            for key in keys:
                if (group := group_of(key)) not in ends and (end := self.end_of(key)) is not None:
                    ends[group] = end
        self.asking = PinRequest(self.request, by_group(keys, names), ends)
        self.pins.append(self.asking)
        self.fresh.clear()
        return self.asking

    def _place(self, key: bytes) -> float:
        end = None if self.end_of is None else self.end_of(key)
        return math.inf if end is None else end

    def learn(self, pin: PinRequest, names: KeyNames, now: float) -> Counter[int]:
        """Takes an answer; returns how many keys hit, by `Tier`. Keys that are expected, or pending and not on their
        way from disk, are looked up once more.
        """
        states = {group: dict(zip(keys, pin.states[group], strict=True)) for group, keys in pin.groups.items()}
        tiers = {
            group: dict(zip(pin.groups[group], group_tiers, strict=True)) for group, group_tiers in pin.tiers.items()
        }
        hits: Counter[int] = Counter()
        again_s = _ASK_AGAIN_S
        for key, known in self.answers.items():
            if known is LookupState.HIT:
                continue
            group, name = group_of(key), key_of(key, names)
            state = states.get(group, {}).get(name)
            if state is None:
                continue
            if state == KeyState.HIT:
                tier = tiers.get(group, {}).get(name, Tier.MEMORY)
                hits[tier] += 1
                if tier != Tier.MEMORY:
                    self.tiers[key] = tier
                self.answers[key] = LookupState.HIT
            elif state == KeyState.PENDING:
                self.answers[key] = LookupState.PENDING
            elif key in self.expected and now < self.expected_until:
                self.answers[key], again_s = LookupState.PENDING, _ASK_EXPECTED_S
            else:
                self.answers[key] = LookupState.MISS
        if self.asking is pin and not pin.promoting:
            self.asking = None
            self.again_at = now + again_s
            if self.phase is RequestPhase.ASKING and not self.fresh:
                self.phase = RequestPhase.IDLE
        return hits

    def forget(self) -> list[PinRequest]:
        """Starts anew; returns the pins to release."""
        pins = self.settle()
        self.answers.clear()
        self.tiers.clear()
        self.waiting_since = self.again_at = 0.0
        if self.phase is not RequestPhase.ENDING:
            self.phase = RequestPhase.IDLE
        return pins

    def settle(self) -> list[PinRequest]:
        """Drops its pins, which it no longer needs: it computes what it has not loaded by now. Known answers stay.
        Returns the pins to release.
        """
        pins, self.pins = self.pins, []
        self.fresh.clear()
        self.asking = None
        if self.phase is RequestPhase.ASKING:
            self.phase = RequestPhase.IDLE
        return pins

    def fail(self, tokens: range, *, partial: bool) -> list[PinRequest]:
        """Records that a load of these tokens has failed; returns the pins to release.

        If it failed in part, and not too often, the request looks its keys up anew: those that hit then are loaded.
        Else nothing hits.
        """
        self.loaded.clear()
        self.failed_loads += 1
        self.failed_tokens = self.failed_tokens or tokens
        if not partial or self.failed_loads > _LOADS_AGAIN:
            self.given_up = True
        return self.forget()

    def account(self) -> tuple[int, int]:
        """Returns how many tokens of its failed load the request has all the same, and how many it computes."""
        tokens, self.failed_tokens = self.failed_tokens, range(0)
        kept = len(range(tokens.start, min(tokens.stop, self.prefix_tokens)))
        return kept, len(tokens) - kept

    def is_there(self, key: bytes) -> bool:
        """Returns whether the daemon had the key at its last lookup, so that it need not be stored."""
        return key in self.loaded or self.answers.get(key) is LookupState.HIT

    @property
    def loading(self) -> bool:
        """Whether a load needs its pins."""
        return self.phase is RequestPhase.LOADING or self.phase is RequestPhase.ENDING

    @property
    def waiting_keys(self) -> int:
        """How many keys are pinned for it before it is loaded."""
        return 0 if self.loading else sum(pin.holds for pin in self.pins)


def admitted(
    fresh: Iterable[RequestState], everyone: Iterable[RequestState], most: int, now: float
) -> list[RequestState]:
    """Returns those of `fresh` that may look up now: while `everyone` that waits pins at most `most` keys, and one
    always.

    A request that has pins already may look up more, else two might wait for each other.
    """
    asking = [state for state in fresh if state.fresh and state.asking is None]
    if not asking:
        return []
    held = sum(state.waiting_keys for state in everyone)
    found = []
    for state in asking:
        wanted = len(state.fresh)
        if held and held + wanted > most and not state.pins:
            state.postpone(now)
            continue
        state.admit(now)
        held += wanted
        found.append(state)
    return found
