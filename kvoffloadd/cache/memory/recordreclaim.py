"""Makes room for part records, and bounds the share of them that one user may have. Event loop only.

A key takes a record for each of its parts, including parts that were never stored. Complete keys can't take more
records than there are pages, about a quarter of all. So if records are short, keys that lack parts have them: such keys
are evicted first, regardless of the policies, since they can't be loaded. Keys that can't be evicted (leases to write,
stores under way) are bounded by user: the share left to the other users is sufficient for a memory full of complete
keys.
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
"""The records that one step inspects for victims, and the number of steps of one search: a few milliseconds. The next
search goes on, and skips barren blocks (see `BarrenBlocks`).
"""


class RecordReclaim:
    """Makes room for part records. `evict` drops rows that are evictable. `displaceable`: returns those of some rows
    that no quota protects.
    """

    def __init__(
        self, entries: KeyTable, evict: Callable[[U32Array], None], displaceable: Callable[[U32Array], U32Array]
    ) -> None:
        self._entries = entries
        self._evict = evict
        self._displaceable = displaceable
        self._hand = 0  # where the next search begins, so that all records take turns

    @property
    def share(self) -> int:
        """Returns the number of records that one user may have."""
        return self._entries.parts.runs.max_records * 3 // 4

    def make_room(self, keyspace: Keyspace, wanted: int) -> int:
        """Evicts keys until there are records for `wanted` new keys of the keyspace, or no more keys can be evicted.
        Returns for how many there are records. For a key that gets no records, nothing is evicted.
        """
        entries, width, uid = self._entries, keyspace.schema.parts, keyspace.namespace.uid
        if not wanted:
            return 0
        entries.keyspaces.quotas.begin(keyspace.quotas)
        if wanted * width > self._left(uid):
            wanted = self._shrink(uid, width, wanted)
        ready = entries.parts.runs.ready(width, wanted)
        if ready == wanted:
            self._forget(uid)
            return ready
        # A user with this many records has keys that lack parts: they are evicted before those of other users.
        is_cause = entries.records_by_uid[uid] > self.share // 3
        for whose, spares in ((uid, True), (None, True), (None, False)):
            if ready < wanted and (whose is None or is_cause):
                self._clear_runs(width, wanted - ready, whose, spares)
                ready = entries.parts.runs.ready(width, wanted)
        return ready

    def _forget(self, uid: int) -> None:
        """Forgets the results of searches once there are many free records again."""
        barren = self._entries.barren
        if barren and self._entries.parts.runs.taken < self.share // 2:
            barren.forget_all()  # also for users who make no more searches
        elif barren and self._entries.records_by_uid[uid] < self.share // 2:
            barren.forget(uid)

    def _left(self, uid: int) -> int:
        return self.share - self._entries.records_by_uid[uid]

    def _shrink(self, uid: int, width: int, wanted: int) -> int:
        """Evicts this user's keys that lack parts until the user's share has room for `wanted` keys, or no more can be
        evicted. Returns the number of keys that it has room for.
        """
        found, over, own = [NO_ROWS], wanted * width - self._left(uid), self._own_keyspaces(uid)
        for _, _, _, rows in self._windows(uid, own, spares=True):
            found.append(rows)
            over -= int(self._entries.widths(found[-1]).sum())
            if over <= 0:
                break
        rows = np.concatenate(found)
        rows = self._displaceable(rows[first_of_each(rows)])
        freed = self._entries.widths(rows).cumsum()
        wanted = min(wanted, max(0, self._left(uid) + int(freed[-1:].sum())) // width)
        if (over := wanted * width - self._left(uid)) > 0:
            self._evict(rows[: int(np.searchsorted(freed, over)) + 1])
        return wanted

    def _clear_runs(self, width: int, wanted: int, uid: int | None, spares: bool) -> None:
        """Evicts keys where `wanted` more runs could lie, as far as the keys are evictable (see `_idle`)."""
        own = None if uid is None else self._own_keyspaces(uid)
        for start, stop, owners, rows in self._windows(uid, own, spares=spares):
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
        self, uid: int | None, own: BoolArray | None, *, spares: bool
    ) -> Iterator[tuple[int, int, I64Array, U32Array]]:
        """Yields begin, end and owners of one window of records after the other, and the evictable owners (see
        `_idle`), where there are any. Goes round once at most: no record comes twice.
        """
        used, barren = self._entries.parts.runs.used, self._entries.barren.of(uid, spares)
        windows = np.logical_and.reduceat(barren, np.arange(0, len(barren), WINDOW // BLOCK))[: -(-used // WINDOW)]
        # The used range may have grown since a search ended there: so this one begins at the start of that window.
        order = np.roll(np.arange(len(windows)), -(self._hand // WINDOW) if self._hand < used else 0)
        for window in order[~windows[order]][:WINDOWS_MAX].tolist():
            start, stop = window * WINDOW, min((window + 1) * WINDOW, used)
            owners = self._entries.owners(np.arange(start, stop))
            rows = self._idle(owners, own, spares=spares)
            if len(rows):
                yield start, stop, owners, self._displaceable(rows)
            else:
                barren[start // BLOCK : (start + WINDOW) // BLOCK] = True
            self._hand = stop

    def _own_keyspaces(self, uid: int) -> BoolArray:
        """Marks the keyspaces of this user, by number."""
        keyspaces = self._entries.keyspaces
        own = np.zeros(1 + max(keyspaces, default=0), bool)
        own[[keyspace.id for keyspace in keyspaces.values() if keyspace.namespace.uid == uid]] = True
        return own

    def _idle(self, owners: I64Array, own: BoolArray | None, *, spares: bool) -> U32Array:
        """Returns the evictable rows in the order of their records: of these keyspaces (None: of all). `spares`
        excludes keys that can be loaded. Those of them that are claimed are always excluded.
        """
        entries = self._entries
        rows = owners[owners >= 0]
        rows = rows[np.append(True, rows[1:] != rows[:-1])] if len(rows) else rows
        rows = rows[(entries.leases[rows] == 0) & (entries.state[rows] == RowState.LIVE)]
        if spares:
            rows = rows[~entries.complete(rows)]
        elif entries.claimed:
            rows = rows[~(entries.complete(rows) & entries.claimed.is_claimed(rows))]
        if own is not None:
            rows = rows[own[entries.index.keyspace[rows]]]
        found: U32Array = rows[~entries.in_flight(rows)].astype(np.uint32)
        return found
