"""Sweeps: the objects of eras that are over are removed from the store, in the background. Event loop only.

Nothing depends on a sweep: without its marker no key of an era counts, and what is left goes when the store needs room.
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
"""How long the objects of one era may take."""

WAITING_MAX: Final = 256
"""Eras whose objects are still to be removed. Of more, the first are forgotten."""


class Sweeps:
    """One at a time, in the order in which they were asked for."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._waiting: dict[str, None] = {}  # prefixes, in order
        self._added = Changes()

    def add(self, prefix: str) -> None:
        """Remove all objects below this prefix, some time."""
        self._waiting[prefix] = None
        while len(self._waiting) > WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]
        self._added.notify_all()

    async def run(self) -> None:
        """Sweep what there is to sweep, until cancelled."""
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
