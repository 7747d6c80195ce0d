"""What is known of one namespace's era in this run. Event loop only."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from kvoffloadd.cache.remote.era import Era

REMEMBERED: Final = 16
"""Eras of a namespace that were cleared here: removed again when the store was away."""

RENEW_S: Final = 24 * 3600.0
"""How often small objects that are in use are renewed."""


@dataclass(slots=True, eq=False)
class NamespaceEra:
    """See `eras`. Times are in seconds of `time.monotonic()`; `since_s` and `seen_s` are of the `StoreClock`."""

    fingerprint: bytes
    since_s: float = 0.0  # when it became known here
    seen_s: float | None = None  # when the store last told its era; None: not in this run
    confirmed_s: float | None = None  # the same by the clock of the host, in seconds since 1970
    era: Era | None = None  # None: nothing may be asked, fetched or pushed
    number: int = 0  # of the era in this run, rising over all namespaces; 0: none was known yet
    tried_s: float = float("-inf")  # when it was last asked for
    renewed_s: float = float("-inf")  # when the store was last told to keep its small objects
    is_back: bool = False  # the store was away since markers of eras that are over were removed last
    unsure_until_s: float | None = None  # of the `StoreClock`: what the store tells is believed from then on
    is_ahead: bool = False  # the store has an era that is not believed
    pointed: Era | None = None  # what the pointer named when the era was agreed on last
    made: Era | None = None  # the last one that this host has made
    unmade: bool = False  # a clear was made here that the store has not heard of
    swept: tuple[int, str] = (0, "")  # the connection, and how far markers of eras that nobody knows were removed
    passed: list[Era] = field(default_factory=list)  # eras before it, whose successors are kept
    over: list[Era] = field(default_factory=list)  # that were cleared here
    unswept: list[Era] = field(default_factory=list)  # of these, those whose keys are to be removed
    is_remembered: bool = False  # nothing of it is here but the number of its last clear
    again_s: float | None = None  # when their markers are to be removed again
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be done about it."""
        return not self.unmade and self.again_s is None

    def is_due(self, now_s: float) -> bool:
        """Whether markers of eras that were cleared here are to be removed again."""
        return self.again_s is not None and now_s >= self.again_s

    def has_markers_to_remove(self, now_s: float) -> bool:
        """Whether they are due, or a store that was away may have brought some back."""
        return bool(self.over) and (self.is_back or self.is_due(now_s))

    def is_to_renew(self, now_s: float) -> bool:
        """Whether the store is to be told to keep its small objects."""
        return now_s - self.renewed_s > RENEW_S

    def has_work(self, now_s: float) -> bool:
        """Whether a look has more to do than to see that nothing has changed."""
        return self.unmade or self.is_back or self.is_due(now_s) or self.is_to_renew(now_s)

    def forget(self, era: Era, wait_s: float) -> None:
        """This era was cleared here. Its marker is removed again after `wait_s`."""
        if era not in self.over:
            self.over = [*self.over, era][-REMEMBERED:]
            self.unswept = [*self.unswept, era][-REMEMBERED:]
        self.again_s = time.monotonic() + wait_s
