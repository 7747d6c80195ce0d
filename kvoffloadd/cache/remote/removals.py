"""Removes the objects of deleted keys from the remote store, until none is left. Event loop only.

Other hosts may have these keys in memory and on disk, and may put them again: they are deleted there by requests to
their own daemons. This host neither fetches nor puts what was deleted: see `RemoteContents.leaving` and `Pushing`.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import numpy as np

from kvoffloadd.agentwire.names import key_names
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.keys import keys_array
from kvoffloadd.cache.remote.contents import RemoteContents, RemotePlace
from kvoffloadd.cache.remote.pushing import Pushing
from kvoffloadd.errors import RemoteStoreError
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.storage.tombstone import Tombstone

log = logging.getLogger(__name__)

REMOVE_S: Final = 5.0
"""The time limit for the objects of one tombstone."""

RETRY_S: Final = 1.0
"""After this time what could not be removed is tried again."""


class Removals:
    """Removes objects one tombstone after the other."""

    def __init__(self, remote: RemoteContents, pushing: Pushing) -> None:
        self.changes = Changes()
        """Reports each tombstone whose objects are gone."""
        self._remote = remote
        self._pushing = pushing
        self._cache = remote.cache
        self._tombstones = remote.cache.tombstones
        self._begun = Changes()
        self._last_error = ""

    def begin(self) -> None:
        """Begins soon with new tombstones."""
        self._begun.notify_all()

    async def run(self) -> None:
        """Removes objects, until cancelled."""
        with changing:
            while True:
                self._tombstones.current(self._cache.epochs.of)  # a clear ends the others
                waiting = self._tombstones.in_store
                for tombstone in waiting:
                    await self._try(tombstone)
                if not self._tombstones.in_store:
                    await self._begun.wait()
                elif waiting:  # a store that does not answer is asked again after a while
                    await self._begun.wait(RETRY_S)

    async def _try(self, tombstone: Tombstone) -> None:
        place = self._place(tombstone)
        if place is None or self._pushing.puts_deleted(tombstone.space):
            return  # its era is not known yet, or a put that began before may end after the removal
        keys = np.ascontiguousarray(keys_array(tombstone.keys, tombstone.key_bytes), "<u8").tobytes()
        try:
            await self._remote.store.remove(key_names(place.space, keys), time.monotonic() + REMOVE_S)
        except RemoteStoreError as error:
            if str(error) != self._last_error:
                log.warning("remote: deleted keys could not be removed yet: %s", error)
            self._last_error = str(error)
            return
        self._last_error = ""
        if self._remote.is_current(place):
            self._note(tombstone)

    def _place(self, tombstone: Tombstone) -> RemotePlace | None:
        """Returns where the objects are; None while this is not known: no engine has registered the group yet, or the
        store has not told the era.
        """
        namespace = self._cache.namespaces.get(tombstone.fingerprint)
        if namespace is None or namespace.epoch != tombstone.epoch:
            return None
        keyspace = namespace.keyspaces.get(tombstone.group)
        return None if keyspace is None else self._remote.place(keyspace)

    @changing
    def _note(self, tombstone: Tombstone) -> None:
        """Notes that the objects are gone. The manifests, which have it as a hint, follow at the next check of a root:
        removing nothing once more does no harm.
        """
        self._tombstones.removed_from_store(tombstone)
        if self._cache.local is None:
            self._tombstones.forget([tombstone])  # no other place needs it
        self._cache.save_state()
        self.changes.notify_all()
