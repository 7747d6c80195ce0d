"""Sweeps remove the objects of ended eras from the store, in the background. Event loop only.

Nothing depends on a sweep: without its marker no key of an era counts, and the store evicts leftovers for room.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.errors import RemoteStoreError
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.storage.remote.store import RemoteStore

log = logging.getLogger(__name__)

SWEEP_S: Final = 60.0
"""The time limit for the objects of one era."""

WAITING_MAX: Final = 256
"""The number of eras that wait for their sweep. Beyond it the first ones are forgotten."""


class Sweeps:
    """Sweeps run one at a time, in the order of the requests."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._waiting: dict[str, None] = {}  # prefixes, in order
        self._added = Changes()

    def add(self, prefix: str) -> None:
        """Queues the removal of all objects below this prefix."""
        self._waiting[prefix] = None
        while len(self._waiting) > WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]
        self._added.notify_all()

    async def run(self) -> None:
        """Sweeps queued prefixes, until cancelled."""
        with changing:
            while True:
                await self._added.wait_for(lambda: bool(self._waiting))
                prefix = next(iter(self._waiting))
                try:
                    removed, left = await self._store.sweep(prefix, time.monotonic() + SWEEP_S)
                    also = ", others are left" if left else ""
                    log.debug("remote: %d objects of an era that is over were removed%s", removed, also)
                except RemoteStoreError as error:
                    log.debug("remote: the objects of an era that is over are left: %s", error)
                finally:
                    self._waiting.pop(prefix, None)
