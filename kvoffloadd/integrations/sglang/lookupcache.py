"""Caches the answers for requests that wait: SGLang asks about each of them in each of its turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

_FRESH_S = 1.0
_SHARE = 0.05
"""The share of the scheduler's time that lookups may take: if many requests wait, each is looked up less often."""
_MOST = 4096


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer. `asked`: the first key and how many there were, since a request's rest changes as SGLang caches
    more.
    """

    wanted: tuple[str, int]
    lengths: tuple[int, ...]
    until: float


class LookupCache:
    """Prefix lengths in pages, by request. They hold no pins: the keys found may be gone when they are loaded."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._by_request: OrderedDict[str, _Answer] = OrderedDict()

    def known(self, request: str, wanted: tuple[str, int]) -> tuple[int, ...] | None:
        """Returns the answer to the same question, if it is fresh."""
        answer = self._by_request.get(request)
        if answer is None or answer.wanted != wanted or self._clock() > answer.until:
            return None
        return answer.lengths

    def ask(self, request: str, wanted: tuple[str, int], question: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the answer to the question, and keeps it."""
        begun = self._clock()
        lengths = question()
        now = self._clock()
        fresh_s = max(_FRESH_S, (now - begun) * len(self._by_request) / _SHARE)
        self._by_request[request] = _Answer(wanted, lengths, now + fresh_s)
        self._by_request.move_to_end(request)
        if len(self._by_request) > _MOST:
            self._by_request.popitem(last=False)
        return lengths

    def forget(self, request: str) -> None:
        """Drops the answer of a request that is loaded, or gone."""
        self._by_request.pop(request, None)

    def clear(self) -> None:
        """Drops all answers."""
        self._by_request.clear()
