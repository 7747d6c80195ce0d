"""What this host knows of the remote store: names of keyspaces, keys believed present, keys found missing.

Event loop only. Many hosts share the store, and it evicts at will, so everything here is only a belief.
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
    """The location of a keyspace's keys in the store."""

    space: Space
    number: int  # of the era, see `NamespaceEra`


class RecentMisses:
    """Keys that the store lacked a moment ago, by hash. The table is direct-mapped: a key replaces the previous key in
    its slot, so the table never grows. The store is asked once more for a key that was replaced.
    """

    def __init__(self, slots: int) -> None:
        self._hashes = np.zeros(slots, np.uint64)
        self._until_s = np.zeros(slots, np.float64)

    def add(self, hashes: U64Array, until_s: float) -> None:
        """Remembers these keys until then."""
        slots = hashes % np.uint64(len(self._hashes))
        self._hashes[slots], self._until_s[slots] = hashes, until_s

    def has(self, hashes: U64Array, now_s: float) -> BoolArray:
        """Returns which of these keys are remembered."""
        slots = hashes % np.uint64(len(self._hashes))
        found: BoolArray = (self._hashes[slots] == hashes) & (self._until_s[slots] > now_s)
        return found


class RemoteContents:
    """The store, and this host's knowledge of it."""

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
        # By row of memory: the number of the era in which the store is believed to have the key; 0: it lacks the key.
        self._believed: U32Array = reserve_array((cache.entries.max_rows,), np.uint32)

    # --- names ---

    def open_keyspace(self, keyspace: Keyspace) -> None:
        """Takes the payload sizes of some of the keyspace's parts, which are known now."""
        if all(keyspace.part_bytes) and keyspace not in self._shapes:
            self._shapes[keyspace] = shape_of(keyspace)
        self.eras.want(keyspace.namespace.fingerprint)

    def rename_keyspace(self, keyspace: Keyspace) -> None:
        """Renames a keyspace as more of its composition is known: its keys get names that no object has yet."""
        for rows in self.cache.entries.scan(keyspace):
            self.reset(rows)
        self._shapes.pop(keyspace, None)
        self.open_keyspace(keyspace)

    def place(self, keyspace: Keyspace) -> RemotePlace | None:
        """Returns None if the keyspace's era or part sizes are unknown, or it can have no objects there."""
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
        """Returns whether the keyspace's keys are small enough and have few enough parts."""
        return keyspace.schema.parts <= PARTS_MAX and object_bytes(keyspace) <= self.config.inflight_bytes // 4

    def is_current(self, place: RemotePlace) -> bool:
        """Returns whether the place's era is still current."""
        return self.eras.is_current(place.space.fingerprint, place.number)

    def leaving(self, keyspace: Keyspace, keys: U64Array) -> BoolArray:
        """Returns which of these keys were deleted, and may have an object from before: none of them is fetched."""
        namespace = keyspace.namespace
        space = namespace.fingerprint, namespace.epoch, keyspace.schema.group
        return self.cache.tombstones.leaving_store(space, keys)

    # --- beliefs ---

    def reset(self, rows: U32Array) -> None:
        """Resets these rows, which get new keys."""
        self._believed[rows] = 0

    def believe(self, keyspace: Keyspace, rows: U32Array, place: RemotePlace) -> None:
        """Records that the store has these keys, unless they have been renamed since."""
        if self._shapes.get(keyspace) == place.space.shape:
            self._believed[rows] = place.number

    def believed(self, rows: U32Array, place: RemotePlace) -> BoolArray:
        """Returns which of these keys the store is believed to have."""
        mask: BoolArray = self._believed[rows] == place.number
        return mask

    def add_misses(self, keyspace: Keyspace, keys: U64Array, seconds: float) -> None:
        """Keeps the store from being asked for these keys for a while."""
        self._misses.add(self.cache.entries.index.hash(keyspace.id, keys), time.monotonic() + seconds)

    def missed(self, keyspace: Keyspace, keys: U64Array) -> BoolArray:
        """Returns which of these keys the store should not be asked for."""
        return self._misses.has(self.cache.entries.index.hash(keyspace.id, keys), time.monotonic())


def object_bytes(keyspace: Keyspace) -> int:
    """Returns the bytes of a key with all its parts and its header page."""
    return sum(keyspace.part_bytes) + HEADER_BYTES
