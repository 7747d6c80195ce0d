"""The state of one namespace's era in this run. Event loop only."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from kvoffloadd.cache.remote.era import Era

REMEMBERED: Final = 16
"""The number of cleared eras of a namespace whose removal is repeated after an absence of the store, and of eras that
this host has made.
"""

RENEW_S: Final = 24 * 3600.0
"""How often small objects in use are renewed."""


@dataclass(slots=True, eq=False)
class NamespaceEra:
    """The state of an era; see `eras`. Times are seconds of `time.monotonic()`; `since_s`, `seen_s` and `absent_s` are
    of the `StoreClock`.
    """

    fingerprint: bytes
    since_s: float = 0.0  # when this host first knew of the namespace
    seen_s: float | None = None  # when the store last reported its era; None: not in this run
    confirmed_s: float | None = None  # the same by the host's clock, in seconds since 1970
    absent_s: float = float("-inf")  # when the store last reported that it has no pointer
    era: Era | None = None  # None: no question, fetch or push is possible
    number: int = 0  # of the era in this run, rising over all namespaces; 0: none was known yet
    tried_s: float = float("-inf")  # when the store was last asked for it
    renewed_s: float = float("-inf")  # when the store was last asked to keep its small objects
    is_back: bool = False  # the store was away since the last removal of ended eras' markers
    is_outdated: bool = False  # its marker was lost during a look, which may have passed it already
    unsure_until_s: float | None = None  # of the `StoreClock`: the time from which the store's reports are believed
    is_ahead: bool = False  # the store has an era that is not believed
    pointed: Era | None = None  # the pointer's era at the last agreement
    made: list[Era] = field(default_factory=list)  # the last eras that this host has made
    unmade: bool = False  # the store does not know of a clear made here
    swept: tuple[int, str] = (0, "")  # the connection, and the progress of removing markers of unknown eras
    passed: list[Era] = field(default_factory=list)  # earlier eras with successors that are kept
    over: list[Era] = field(default_factory=list)  # eras cleared here
    unswept: list[Era] = field(default_factory=list)  # the subset of `over` with keys still in the store
    is_remembered: bool = False  # this host has nothing of it but the number of its last clear
    again_s: float | None = None  # when the markers of eras in `over` are due for another removal
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_idle(self) -> bool:
        """Whether no work remains."""
        return not self.unmade and self.again_s is None

    def is_due(self, now_s: float) -> bool:
        """Returns whether another removal of the markers of eras cleared here is due."""
        return self.again_s is not None and now_s >= self.again_s

    def has_markers_to_remove(self, now_s: float) -> bool:
        """Returns whether a removal is due, or a store that was away may have restored some markers."""
        return bool(self.over) and (self.is_back or self.is_due(now_s))

    def is_to_renew(self, now_s: float) -> bool:
        """Returns whether it is time to make the store keep its small objects."""
        return now_s - self.renewed_s > RENEW_S

    def has_work(self, now_s: float) -> bool:
        """Returns whether a look has more to do than to confirm the state."""
        return self.unmade or self.is_back or self.is_due(now_s) or self.is_to_renew(now_s)

    def forget(self, era: Era, wait_s: float) -> None:
        """Records that this era was cleared here. Its marker is removed again after `wait_s`."""
        if era not in self.over:
            self.over = [*self.over, era][-REMEMBERED:]
            self.unswept = [*self.unswept, era][-REMEMBERED:]
        self.again_s = time.monotonic() + wait_s
