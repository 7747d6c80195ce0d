"""Making room for part records, and the share of them that one user may have. Event loop only.

A key takes a record for each of its parts, also for those that were never stored. Keys that are complete can't take
more than there are pages, about a quarter of all. So if records are short, they are those of keys that lack parts: such
keys go first, whatever the policies say, since they can't be loaded. What can't go (leases to write, stores under way)
is bounded by user: the share that is left to the others would do for a memory full of complete keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvoffloadd.cache.memory.index import distinct, first_of_each
from kvoffloadd.cache.memory.keytable import KeyTable, RowState
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.runallocator import BLOCK, pieces, stretches
from kvoffloadd.model import BoolArray, I64Array, U32Array

NO_ROWS = np.zeros(0, np.uint32)
WINDOW = 8 * BLOCK
WINDOWS_MAX = 16
"""Records that one step looks for victims in, and the steps of one search: some milliseconds. The next one goes on, and
passes over what is barren (see `BarrenBlocks`).
"""


class Scarcity:
    """`evict` drops rows that are evictable."""

    def __init__(self, entries: KeyTable, evict: Callable[[U32Array], None]) -> None:
        self._entries = entries
        self._evict = evict
        self._hand = 0  # where the next search begins, so that all take their turns

    @property
    def share(self) -> int:
        """Records that one user may have."""
        return self._entries.parts.runs.max_records * 3 // 4

    def make_room(self, keyspace: Keyspace, wanted: int) -> int:
        """Evict until there are records for so many new keys of the keyspace; fewer if no more can go. Returns how many
        there are. For a key that finds none nothing is evicted.
        """
        entries, width, uid = self._entries, keyspace.schema.parts, keyspace.namespace.uid
        if not wanted:
            return 0
        if wanted * width > self._left(uid):
            wanted = self._shrink(uid, width, wanted)
        ready = entries.parts.runs.ready(width, wanted)
        if ready == wanted:
            self._forget(uid)
            return ready
        # A user with so many records has keys that lack parts: they go before those of others.
        is_cause = entries.records_by_uid[uid] > self.share // 3
        for whose, spares in ((uid, True), (None, True), (None, False)):
            if ready < wanted and (whose is None or is_cause):
                self._clear_runs(width, wanted - ready, whose, spares)
                ready = entries.parts.runs.ready(width, wanted)
        return ready

    def _forget(self, uid: int) -> None:
        """Drop what is known of searches once there are many records again."""
        barren = self._entries.barren
        if barren and self._entries.parts.runs.taken < self.share // 2:
            barren.forget_all()  # also of users who never ask again
        elif barren and self._entries.records_by_uid[uid] < self.share // 2:
            barren.forget(uid)

    def _left(self, uid: int) -> int:
        return self.share - self._entries.records_by_uid[uid]

    def _shrink(self, uid: int, width: int, wanted: int) -> int:
        """Evict what lacks parts of this user until his share has room for so many keys, as far as it can go. Returns
        how many it has room for.
        """
        found, over, mine = [NO_ROWS], wanted * width - self._left(uid), self._mine(uid)
        for _, _, _, rows in self._windows(uid, mine, spares=True):
            found.append(rows)
            over -= int(self._entries.widths(found[-1]).sum())
            if over <= 0:
                break
        rows = np.concatenate(found)
        rows = rows[first_of_each(rows)]
        freed = self._entries.widths(rows).cumsum()
        wanted = min(wanted, max(0, self._left(uid) + int(freed[-1:].sum())) // width)
        if (over := wanted * width - self._left(uid)) > 0:
            self._evict(rows[: int(np.searchsorted(freed, over)) + 1])
        return wanted

    def _clear_runs(self, width: int, wanted: int, uid: int | None, spares: bool) -> None:
        """Evict what lies where there could be so many runs more, as far as it may go (see `_idle`)."""
        mine = None if uid is None else self._mine(uid)
        for start, stop, owners, rows in self._windows(uid, mine, spares=spares):
            could = self._entries.parts.runs.in_map(start, stop) | np.isin(owners, rows)
            could = np.append(could, np.zeros(-len(could) % BLOCK, bool)).reshape(-1, BLOCK)
            begins, lengths, block = stretches(could)
            first, _ = pieces(block * BLOCK + begins, lengths, width, wanted)
            victims = distinct(owners[self._entries.parts.run(first, width)].ravel())
            self._evict(victims[victims >= 0].astype(np.uint32))
            wanted -= len(first)
            if wanted <= 0:
                return

    def _windows(
        self, uid: int | None, mine: BoolArray | None, *, spares: bool
    ) -> Iterator[tuple[int, int, I64Array, U32Array]]:
        """Begin, end and owners of some records after the others, and the owners that may go (see `_idle`), where there
        are any. Once round at most: none of them twice.
        """
        used, barren = self._entries.parts.runs.used, self._entries.barren.of(uid, spares)
        windows = np.logical_and.reduceat(barren, np.arange(0, len(barren), WINDOW // BLOCK))[: -(-used // WINDOW)]
        # What is in use may have grown since a search ended there: so it goes on from the begin of that window.
        order = np.roll(np.arange(len(windows)), -(self._hand // WINDOW) if self._hand < used else 0)
        for window in order[~windows[order]][:WINDOWS_MAX].tolist():
            start, stop = window * WINDOW, min((window + 1) * WINDOW, used)
            owners = self._entries.owners(np.arange(start, stop))
            rows = self._idle(owners, mine, spares=spares)
            if len(rows):
                yield start, stop, owners, rows
            else:
                barren[start // BLOCK : (start + WINDOW) // BLOCK] = True
            self._hand = stop

    def _mine(self, uid: int) -> BoolArray:
        """Marks the keyspaces of this user, by number."""
        keyspaces = self._entries.keyspaces
        mine = np.zeros(1 + max(keyspaces, default=0), bool)
        mine[[keyspace.id for keyspace in keyspaces.values() if keyspace.namespace.uid == uid]] = True
        return mine

    def _idle(self, owners: I64Array, mine: BoolArray | None, *, spares: bool) -> U32Array:
        """Those of the rows that may go, in the order of their records: of these keyspaces (None: of all), and `spares`
        those that can be loaded.
        """
        entries = self._entries
        rows = owners[owners >= 0]
        rows = rows[np.append(True, rows[1:] != rows[:-1])] if len(rows) else rows
        rows = rows[(entries.leases[rows] == 0) & (entries.state[rows] == RowState.LIVE)]
        if spares:
            rows = rows[~entries.complete(rows)]
        if mine is not None:
            rows = rows[mine[entries.index.keyspace[rows]]]
        found: U32Array = rows[~entries.in_flight(rows)].astype(np.uint32)
        return found
