"""Where a search for keys that may go for their part records has found none, so that the next one need not look there.

A block of part records is barren until something of it is let go: a lease ends, or a part is committed or freed. Whose
keys were searched for, and which, makes a difference: what is let go of one user is nothing to a search for another's.
Event loop only.
"""

from __future__ import annotations

import numpy as np

from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.keyspaces import Keyspaces
from kvoffloadd.cache.memory.runallocator import BLOCK
from kvoffloadd.model import BoolArray, U16Array, U32Array


class BarrenBlocks:
    """Flags of blocks, for each kind of search: for keys of this user (None: of anybody), and of them for those that
    lack parts, or for all. False: there are none of which anything is known.
    """

    def __init__(self, keyspaces: Keyspaces, max_records: int) -> None:
        self._keyspaces = keyspaces
        self._num_blocks = -(-max_records // BLOCK)
        self._flags: dict[tuple[int | None, bool], BoolArray] = {}

    def __bool__(self) -> bool:
        return bool(self._flags)

    def of(self, uid: int | None, spares: bool) -> BoolArray:
        """Which blocks are barren, to be set by the search. `spares`: it looks for keys that lack parts alone."""
        flags = self._flags.get((uid, spares))
        if flags is None:
            flags = self._flags[uid, spares] = np.zeros(self._num_blocks, bool)
        return flags

    def forget_all(self) -> None:
        """No search is likely soon."""
        self._flags.clear()

    def forget(self, uid: int) -> None:
        """No search for keys of this user is likely soon."""
        for spares in (False, True):
            self._flags.pop((uid, spares), None)

    def let_go(self, first: U32Array, keyspaces: U16Array) -> None:
        """Keys with these first records, in these keyspaces, may be able to go now. A key's records are in a block."""
        uids = {self._keyspaces[number].namespace.uid for number in distinct(keyspaces).tolist()}
        for (uid, _), flags in self._flags.items():
            if uid is None or uid in uids:
                flags[first // BLOCK] = False
