"""What is known here of the remote store: names of keyspaces, keys believed to be there, keys seen missing.

Event loop only. The store is shared by many hosts and evicts as it likes, so nothing here is more than a belief.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from kvoffloadd.agentwire.frames import HEADER_BYTES, PARTS_MAX
from kvoffloadd.agentwire.names import Space
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Keyspace, shape_of
from kvoffloadd.cache.remote.eras import Eras
from kvoffloadd.config import RemoteConfig
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import BoolArray, U32Array, U64Array
from kvoffloadd.storage.remote.store import RemoteStore

MISSES_REMEMBERED: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """Where a keyspace's keys are in the store."""

    space: Space
    number: int  # of the era, see `NamespaceEra`


class RecentMisses:
    """Keys that the store did not have a moment ago, by hash. Direct-mapped: a key takes its slot from the key that had
    it, so that nothing grows. A key that is forgotten is asked for once more.
    """

    def __init__(self, slots: int) -> None:
        self._hashes = np.zeros(slots, np.uint64)
        self._until_s = np.zeros(slots, np.float64)

    def add(self, hashes: U64Array, until_s: float) -> None:
        """Remember these until then."""
        at = hashes % np.uint64(len(self._hashes))
        self._hashes[at], self._until_s[at] = hashes, until_s

    def has(self, hashes: U64Array, now_s: float) -> BoolArray:
        """Which of these are remembered."""
        at = hashes % np.uint64(len(self._hashes))
        found: BoolArray = (self._hashes[at] == hashes) & (self._until_s[at] > now_s)
        return found


class RemoteContents:
    """The store, and what is known of it."""

    def __init__(
        self, cache: Cache, store: RemoteStore, eras: Eras, config: RemoteConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.cache = cache
        self.store = store
        self.eras = eras
        self.config = config
        self.loop = loop
        self._misses = RecentMisses(MISSES_REMEMBERED)
        self._shapes: WeakKeyDictionary[Keyspace, bytes] = WeakKeyDictionary()
        # By row of memory: the number of the era in which the store is believed to have the key; 0: it is not.
        self._believed: U32Array = reserve_array((cache.entries.max_rows,), np.uint32)

    # --- names ---

    def open_keyspace(self, keyspace: Keyspace) -> None:
        """Payload sizes of some of its parts have become known."""
        if all(keyspace.part_bytes) and keyspace not in self._shapes:
            self._shapes[keyspace] = shape_of(keyspace)
        self.eras.want(keyspace.namespace.fingerprint)

    def rename_keyspace(self, keyspace: Keyspace) -> None:
        """More of its composition has become known: its keys have other names there, under which none are yet."""
        for rows in self.cache.entries.scan(keyspace):
            self.reset(rows)
        self._shapes.pop(keyspace, None)
        self.open_keyspace(keyspace)

    def place(self, keyspace: Keyspace) -> RemotePlace | None:
        """None: its era is not known now, the sizes of its parts are not, or it can have no objects there."""
        shape, namespace = self._shapes.get(keyspace), keyspace.namespace
        if shape is None or keyspace.retired or not self.fits(keyspace):
            return None
        known = self.eras.of(namespace.fingerprint)
        if known is None or known.era is None:
            self.eras.want(namespace.fingerprint)
            return None
        era, group = known.era, keyspace.schema.group
        space = Space(namespace.fingerprint, shape, era.generation, era.id, group, namespace.key_bytes)
        return RemotePlace(space, known.number)

    def fits(self, keyspace: Keyspace) -> bool:
        """Whether its keys are not too large, and have not too many parts."""
        return keyspace.schema.parts <= PARTS_MAX and object_bytes(keyspace) <= self.config.inflight_bytes // 4

    def is_current(self, place: RemotePlace) -> bool:
        """Whether its era still counts."""
        return self.eras.is_current(place.space.fingerprint, place.number)

    # --- beliefs ---

    def reset(self, rows: U32Array) -> None:
        """These rows are used for new keys."""
        self._believed[rows] = 0

    def believe(self, rows: U32Array, place: RemotePlace) -> None:
        """The store has these keys."""
        self._believed[rows] = place.number

    def believed(self, rows: U32Array, place: RemotePlace) -> BoolArray:
        """Which of these keys the store is believed to have."""
        mask: BoolArray = self._believed[rows] == place.number
        return mask

    def add_misses(self, keyspace: Keyspace, keys: U64Array, seconds: float) -> None:
        """Don't ask for these keys for a while."""
        self._misses.add(self.cache.entries.index.hash(keyspace.id, keys), time.monotonic() + seconds)

    def missed(self, keyspace: Keyspace, keys: U64Array) -> BoolArray:
        """Which of these keys are not to be asked for."""
        return self._misses.has(self.cache.entries.index.hash(keyspace.id, keys), time.monotonic())


def object_bytes(keyspace: Keyspace) -> int:
    """Returns the bytes of a key with all its parts and its header page."""
    return sum(keyspace.part_bytes) + HEADER_BYTES
