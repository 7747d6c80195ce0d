"""Schedules full garbage collections: not while a peer waits for an answer."""

from __future__ import annotations

import gc
import time
from typing import Final

PAUSE_S: Final = 600.0
"""The least time between two full collections."""

SELDOM: Final = 1000
"""The third threshold: Python then makes a full collection by itself only when seven million more objects have been
made than have gone since, more than all events that may wait. So objects that a daemon which is never idle keeps by
mistake stay below about a GiB.
"""


class Collector:
    """Makes full collections when the loop is idle.

    A full collection takes 0.1 s where there are very many objects, such as events that wait for their subscribers, and
    Python makes it in the midst of whatever allocates objects. Most of them would find nothing here: sessions and
    requests are taken apart at their end, so that their memory is freed at once. So Python collects young objects by
    itself, but makes full collections seldom; `on_idle` makes the others.
    """

    def __init__(self) -> None:
        self._looked_s = 0.0

    def start(self) -> None:
        """Begins to serve: the present objects stay, and are not examined again."""
        young, middle, _ = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(young, middle, SELDOM)
        self._looked_s = time.monotonic()

    def on_idle(self) -> None:
        """Makes a full collection if one is due: the loop has no other work."""
        now = time.monotonic()
        if now - self._looked_s >= PAUSE_S:
            self._looked_s = now
            gc.collect()
