"""The linker's stores under way, in the order in which SGLang wants to hear of their ends."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future, wait

from kvoffloadd.integrations.sglang.background import Background, Work

logger = logging.getLogger("sglang.kvoffloadd")

_WAIT_WARNING_S = 30.0


class Offloads:
    """Belongs to the scheduler's thread. SGLang keeps the pages of each offload until it is popped.

    SGLang pops as many on all ranks. So nothing here depends on what one rank alone knows, such as whether its daemon
    answers: they would not have the same ones under way any more.
    """

    def __init__(self, most_pages: int) -> None:
        """`most_pages`: of all that are under way; alike on all ranks. More would keep SGLang from running requests,
        were the daemon to hang.
        """
        self._most_pages = most_pages
        self._background = Background("kvoffloadd-offloads")
        self._under_way: deque[tuple[int, Future[bool]]] = deque()
        self._pages = 0

    def begin(self, pages: int, work: Work) -> bool:
        """Have `work` store so many pages; False: no, too many are under way."""
        if self._under_way and self._pages + pages > self._most_pages:
            return False
        self._under_way.append((pages, self._background.begin(work)))
        self._pages += pages
        return True

    def ended(self) -> int:
        """How many have ended before the first that has not."""
        for count, (_, stored) in enumerate(self._under_way):
            if not stored.done():
                return count
        return len(self._under_way)

    def pop(self) -> bool:
        """Whether the first one was stored; it has ended."""
        pages, stored = self._under_way.popleft()
        self._pages -= pages
        return stored.result()

    def quiesce(self, deadline_s: float | None = None) -> None:
        """Forget them, once they have ended: nobody may write to their pages before. None: however long that is."""
        waiting = {stored for _, stored in self._under_way}
        while waiting := wait(waiting, _WAIT_WARNING_S if deadline_s is None else deadline_s).not_done:
            if deadline_s is not None:
                return
            logger.warning("kvoffloadd: still waiting for the daemon to end %d stores", len(waiting))
        self._under_way.clear()
        self._pages = 0

    def close(self, deadline_s: float) -> None:
        """The thread ends when the last one does."""
        self.quiesce(deadline_s)
        self._background.close(deadline_s)
