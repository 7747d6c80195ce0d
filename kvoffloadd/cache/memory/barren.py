"""Remembers where a search for evictable keys, for the sake of their part records, has found none. The next search
skips these blocks.

A block of part records is barren until one of its keys is released: a lease ends, or a part is committed or freed. The
user and the kind of the search matter: keys that one user releases are of no use to a search for another user's keys.
Event loop only.
"""

from __future__ import annotations

import numpy as np

from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.keyspaces import Keyspaces
from kvoffloadd.cache.memory.runallocator import BLOCK
from kvoffloadd.model import BoolArray, U16Array, U32Array


class BarrenBlocks:
    """Keeps flags of blocks for each kind of search: for keys of one user (None: of all users), and among them for keys
    that lack parts, or for all keys. The object is false while it has no flags.
    """

    def __init__(self, keyspaces: Keyspaces, max_records: int) -> None:
        self._keyspaces = keyspaces
        self._num_blocks = -(-max_records // BLOCK)
        self._flags: dict[tuple[int | None, bool], BoolArray] = {}

    def __bool__(self) -> bool:
        return bool(self._flags)

    def of(self, uid: int | None, spares: bool) -> BoolArray:
        """Returns which blocks are barren; the search sets the flags. With `spares`, it searches only for keys that
        lack parts.
        """
        flags = self._flags.get((uid, spares))
        if flags is None:
            flags = self._flags[uid, spares] = np.zeros(self._num_blocks, bool)
        return flags

    def forget_all(self) -> None:
        """Forgets all flags, since no search is likely soon."""
        self._flags.clear()

    def forget(self, uid: int) -> None:
        """Forgets the flags of searches for this user's keys, since none is likely soon."""
        for spares in (False, True):
            self._flags.pop((uid, spares), None)

    def let_go(self, first: U32Array, keyspaces: U16Array) -> None:
        """Resets the flags of blocks that have keys with these first records, in these keyspaces: they may be evictable
        now. All records of a key are in one block.
        """
        uids = {self._keyspaces[number].namespace.uid for number in distinct(keyspaces).tolist()}
        for (uid, _), flags in self._flags.items():
            if uid is None or uid in uids:
                flags[first // BLOCK] = False
