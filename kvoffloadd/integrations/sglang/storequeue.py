"""The linker's stores under way, in the order in which SGLang expects their ends."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future, wait

from kvoffloadd.integrations.sglang.background import Background, Work

logger = logging.getLogger("sglang.kvoffloadd")

_WAIT_WARNING_S = 30.0


class StoreQueue:
    """Belongs to the scheduler's thread. SGLang keeps the pages of each offload until it is popped.

    SGLang pops the same number on all ranks. So nothing here depends on the state of a single rank, such as whether its
    daemon answers: the ranks would no longer have the same offloads under way.
    """

    def __init__(self, most_pages: int) -> None:
        """Takes `most_pages`: limit of all that are under way; alike on all ranks. More would keep SGLang from running
        requests if the daemon hangs.
        """
        self._most_pages = most_pages
        self._background = Background("kvoffloadd-offloads")
        self._under_way: deque[tuple[int, Future[bool]]] = deque()
        self._pages = 0

    def begin(self, pages: int, work: Work) -> bool:
        """Has `work` store this number of pages; returns False if too many are under way."""
        if self._under_way and self._pages + pages > self._most_pages:
            return False
        self._under_way.append((pages, self._background.begin(work)))
        self._pages += pages
        return True

    def ended(self) -> int:
        """Returns how many have ended before the first that has not."""
        for count, (_, stored) in enumerate(self._under_way):
            if not stored.done():
                return count
        return len(self._under_way)

    def pop(self) -> bool:
        """Removes the first one, which has ended; returns whether it was stored."""
        pages, stored = self._under_way.popleft()
        self._pages -= pages
        return stored.result()

    def quiesce(self, deadline_s: float | None = None) -> None:
        """Drops all, once they have ended: their pages must not be written before. None: no deadline."""
        waiting = {stored for _, stored in self._under_way}
        while waiting := wait(waiting, _WAIT_WARNING_S if deadline_s is None else deadline_s).not_done:
            if deadline_s is not None:
                return
            logger.warning("kvoffloadd: still waiting for the daemon to end %d stores", len(waiting))
        self._under_way.clear()
        self._pages = 0

    def close(self, deadline_s: float) -> None:
        """Ends the thread after its last store, and waits for that until the deadline."""
        self.quiesce(deadline_s)
        self._background.close(deadline_s)
