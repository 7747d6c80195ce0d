"""When Python's garbage collector looks at all objects: not while somebody waits for an answer."""

from __future__ import annotations

import gc
import time
from typing import Final

PAUSE_S: Final = 600.0
"""Between two looks at all objects."""

SELDOM: Final = 1000
"""Python looks at all objects by itself only when seven million more have been made than have gone since, more than all
events that may wait: so what a daemon that is never idle keeps by mistake stays below a GiB or so.
"""


class Collector:
    """A look at all objects takes 0.1 s where there are very many, such as events that wait for their subscribers, and
    Python takes it in the midst of whatever makes objects. What most of it would find here is nothing: sessions and
    requests are taken apart at their end, so that their memory goes at once. So Python looks at young objects alone by
    itself, at all of them seldom, and else where this is told that there is nothing else to do.
    """

    def __init__(self) -> None:
        self._looked_s = 0.0

    def start(self) -> None:
        """Begin to serve: what there is now stays, and is not looked at again."""
        young, middle, _ = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(young, middle, SELDOM)
        self._looked_s = time.monotonic()

    def on_idle(self) -> None:
        """There is nothing else to do."""
        now = time.monotonic()
        if now - self._looked_s >= PAUSE_S:
            self._looked_s = now
            gc.collect()
