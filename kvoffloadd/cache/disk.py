"""The disk tier as the cache sees it: what is there, what moves which way, what was cleared. Event loop only."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from kvoffloadd.cache.arrivals import Arrivals
from kvoffloadd.cache.catalog import Catalog, Shelf
from kvoffloadd.cache.demotion import Demotion
from kvoffloadd.cache.ghosts import Reason
from kvoffloadd.cache.index import distinct
from kvoffloadd.cache.inspection import Inspection
from kvoffloadd.cache.keys import join_keys, pack
from kvoffloadd.cache.promotion import Away, Promotion
from kvoffloadd.cache.reclaim import Reclaim
from kvoffloadd.cache.together import spans
from kvoffloadd.errors import KvOffloadError, NotDurableError
from kvoffloadd.model import KEY_BYTES_MAX, PAGE_BYTES, KeyState
from kvoffloadd.tiers.disk.format import SpaceId
from kvoffloadd.tiers.disk.health import State, said

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence

    from kvoffloadd.cache.cache import Cache, Found
    from kvoffloadd.cache.namespace import Space
    from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array
    from kvoffloadd.tiers.disk.root import Root
    from kvoffloadd.tiers.disk.segment import Numbers, Segment

log = logging.getLogger(__name__)

RECORDS_MAX = 1 << 28
_MISS, _PENDING = int(KeyState.MISS), int(KeyState.PENDING)


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """How the disk tier is used. `on_evict`: write only what memory is about to evict; `second_use`: only keys that
    were used again. Budgets of 0 are none.
    """

    on_evict: bool
    second_use: bool
    write_bytes_per_s: int
    write_ops_per_s: int
    backlog_bytes: int
    rewrite_hot: bool
    retry_s: float
    stuck_s: float


class Disk:
    """The roots, the catalog of what is on them, and the ways there and back."""

    def __init__(
        self,
        cache: Cache,
        roots: Sequence[Root],
        numbers: Numbers,
        settings: DiskSettings,
        loop: asyncio.AbstractEventLoop,
        seed: int,
    ) -> None:
        self.cache = cache
        self.roots = roots
        self.numbers = numbers
        self.loop = loop
        # The smallest record is a header and one page.
        records = sum(root.capacity_bytes for root in roots) // (2 * PAGE_BYTES) + 1
        self.catalog = Catalog(min(records, RECORDS_MAX), seed)
        self.demotion = Demotion(self, settings)
        self.promotion = Promotion(self)
        self.reclaim = Reclaim(self, rewrite_hot=settings.rewrite_hot)
        self.inspection = Inspection(self)
        self.arrivals = Arrivals(self)
        self._settings = settings
        self._spaces: dict[int, Space] = {}
        self._told: set[int] = set()  # users who have too many shelves
        self._emptying: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []
        cache.attach(self)

    # --- life ---

    async def start(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Find what the disks hold; then keep them going. `spawn` runs a task that the daemon owns."""

        def keep(work: Coroutine[Any, Any, None]) -> None:
            self._tasks.append(spawn(work))

        await self.arrivals.start(keep)
        for root in self.roots:
            keep(self.reclaim.keep(root, self._settings.retry_s))
        keep(self.demotion.run())
        keep(self.demotion.run_again())

    async def close(self, flush_s: float, deadline_s: float) -> bool:
        """Write what is in memory alone, seal, and let the roots go. False: some I/O does not end."""
        if left := await self.demotion.flush(flush_s):
            log.warning("%d bytes were not written to disk in time; they are lost with this process", left)
        for task in self._tasks:
            task.cancel()
        return all(await asyncio.gather(*(root.close(deadline_s) for root in self.roots)))

    # --- names ---

    def shelve(self, space: Space) -> None:
        """Find the shelf of a space, once the sizes of all its parts are known."""
        if space.shelf is not None or not all(space.part_bytes):
            return
        schema, namespace = space.schema, space.namespace
        facts = [
            schema.group, schema.kind, schema.tokens_per_key, schema.window_keys, schema.blocks_per_key, schema.parts,
            space.part_bytes,
        ]  # fmt: skip
        shape = hashlib.blake2b(msgpack.packb(facts), digest_size=16).digest()
        name = SpaceId(namespace.fingerprint, shape, namespace.epoch, schema.group, schema.parts, namespace.key_bytes)
        space.shelf = self.catalog.shelf(name, namespace.uid)
        if space.shelf is None and namespace.uid not in self._told:
            self._told.add(namespace.uid)
            log.warning("disk: uid %d has so many groups there that new ones of it are not written", namespace.uid)
        if space.shelf is not None:
            space.shelf.part_bytes = tuple(space.part_bytes)
            self._spaces[space.shelf.id] = space

    def unshelve(self, space: Space) -> None:
        """The namespace of a space is forgotten; what its shelf has stays."""
        if space.shelf is not None and self._spaces.get(space.shelf.id) is space:
            del self._spaces[space.shelf.id]
            self._discard_unused(space.shelf)

    def _discard_unused(self, shelf: Shelf) -> None:
        """A shelf that nobody has open gives its number back once it has no keys."""
        if shelf.open and not shelf.rows and shelf.id not in self._spaces:
            self.catalog.discard(shelf)

    def space_of(self, shelf: Shelf) -> Space | None:
        """The space in memory whose keys this shelf holds, if it is open."""
        space = self._spaces.get(shelf.id)
        return space if space is not None and space.shelf is shelf and not space.retired else None

    def payload_bytes(self, shelf: Shelf, records: I64Array) -> I64Array | None:
        """Size of each record's payload; None if nobody has told the sizes since the start."""
        if not shelf.part_bytes:
            return None
        parts = records - self.catalog.first[self.catalog.row[records]]
        sizes: I64Array = np.asarray(shelf.part_bytes, np.int64)[parts]
        return sizes

    def namespaces(self) -> set[bytes]:
        """Fingerprints of those that a root which is there may have something of."""
        return {shelf.name.fingerprint for shelf in self.catalog.shelves.values() if shelf.open}

    def segment(self, ordinal: int) -> tuple[Root, Segment] | None:
        """Where a segment lies; None if its root is off."""
        for root in self.roots:
            segment = root.segments.get(ordinal)
            if segment is not None and root.holds(segment):
                return root, segment
        return None

    # --- questions ---

    def away(self, space: Space, keys: U64Array, found: Found) -> BoolArray:
        """Which keys of a lookup can be brought into memory, or are on their way: their state becomes PENDING."""
        away = np.zeros(len(keys), bool)
        misses = np.flatnonzero(found.states == KeyState.MISS)
        if space.shelf is not None and len(misses):
            away[misses] = self.catalog.find(space.shelf, keys[misses]) >= 0
        waiting = np.flatnonzero(found.states == _PENDING)
        if len(waiting):
            away[waiting] = self.promotion.under_way(found.rows[waiting])
        found.states[away] = _PENDING
        return away

    def holds_keys(self, space: Space, keys: U64Array) -> BoolArray:
        """Which keys are complete on disk; also on a shelf that is being emptied, which tells of their end itself."""
        if space.shelf is None or self._spaces.get(space.shelf.id) is not space:
            return np.zeros(len(keys), bool)
        return self.catalog.complete(space.shelf, keys)

    def snapshot(self, space: Space, cursor: int, count: int) -> tuple[bytes, int]:
        """Packed keys that are on disk, from a catalog row on; and the next row, 0 at the end. Also those in memory:
        one that was brought there since memory was listed would be missing otherwise.
        """
        if space.shelf is None or not space.shelf.open:
            return b"", 0
        keys = self.catalog.index.keys[self.catalog.listing(space.shelf, cursor, count)]
        after = cursor + count
        return pack(keys, space.namespace.key_bytes), after if after < self.catalog.index.rows_end else 0

    # --- what goes ---

    def lose(self, records: I64Array, why: int = Reason.EVICTED) -> U32Array:
        """These records are gone or bad. Returns the catalog rows of the keys that are not on disk any more."""
        catalog = self.catalog
        listened = [s for s in self._spaces.values() if s.namespace.listeners]
        keys = {}
        if listened:
            rows = distinct(catalog.row[records[catalog.page[records] != 0]])
            rows = rows[catalog.missing[rows] == 0]
            shelves = catalog.index.space[rows]
            keys = {s.shelf.id: catalog.index.keys[rows[shelves == s.shelf.id]] for s in listened if s.shelf}
        lost = catalog.forget(records)
        shelf_of = catalog.index.space[lost]
        for number in distinct(shelf_of).tolist():
            self._note_ghosts(catalog.shelves[number], catalog.index.keys[lost[shelf_of == number]], why)
        for number, gone in keys.items():
            self._note_gone(self._spaces[number], gone)
        for number in distinct(shelf_of).tolist():
            self._discard_unused(catalog.shelves[number])
        return lost

    def begin_clear(self, names: Collection[bytes] | None) -> list[Shelf]:
        """The epochs of these namespaces (fingerprints; None: of all) have advanced: what is on disk of older ones is
        not found from now on. Pair with `finish_clear`.
        """
        old = []
        for shelf in self.catalog.shelves.values():
            if shelf.id in self._emptying:
                continue  # an earlier clear sees to it
            fingerprint = shelf.name.fingerprint
            if (names is None or fingerprint in names) and shelf.name.epoch != self.cache.epochs.of(fingerprint):
                self.catalog.close(shelf)
                old.append(shelf)
        return old

    async def finish_clear(self, shelves: list[Shelf]) -> None:
        """Make it durable, then free what the shelves take.

        Raises:
            NotDurableError: it holds here, but a root could not note it: after a restart the keys might be back.
        """
        failed = await self.save_epochs(self.roots)
        await self.empty(shelves)
        if failed:
            raise NotDurableError(f"cleared, but not for good: {'; '.join(failed)}. Clear again when it works")

    async def empty(self, shelves: list[Shelf]) -> None:
        """Free what these closed shelves take."""
        for shelf in shelves:
            if shelf.id in self._emptying or self.catalog.shelves.get(shelf.id) is not shelf:
                continue  # another clear has begun with it, or done it
            self._emptying.add(shelf.id)
            try:
                space = self._spaces.pop(shelf.id, None)
                for keys in self.catalog.empty(shelf):
                    self._note_ghosts(shelf, keys, Reason.CLEARED)
                    if space is not None and space.namespace.listeners:
                        self._note_gone(space, keys)
                    await asyncio.sleep(0)
            finally:  # whoever asked may be gone; the next clear goes on with it
                self._emptying.discard(shelf.id)

    def _note_ghosts(self, shelf: Shelf, keys: U64Array, why: int) -> None:
        """Remember how these keys went. Those that memory still holds are not missed, and their own end comes later."""
        self.cache.entries.ghosts.went(shelf.name.fingerprint, shelf.name.group, keys, why)

    def _note_gone(self, space: Space, keys: U64Array) -> None:
        """These keys are not on disk any more: an event for those that are not in memory."""
        held = self.cache.entries.find(space, keys)
        resident = held >= 0
        resident[resident] = self.cache.entries.complete(held[resident])
        self.cache.entries.note(space, keys[~resident], added=False)

    async def save_epochs(self, roots: Sequence[Root]) -> list[str]:
        """Make durable what was cleared. Returns where that failed, and why: `look_after` tries it again."""
        failed = list(filter(None, await asyncio.gather(*map(self._save_at, roots))))
        self.numbers.changes.notify_all()  # what was stored since may be written now
        return failed

    async def _save_at(self, root: Root) -> str:
        epochs = self.cache.epochs
        if not root.opened:
            return f"{root.path} is off: {root.health.reason}"
        try:
            async with asyncio.timeout(self._settings.stuck_s):
                await root.home.write_epochs(epochs.base, epochs.last, dict(epochs.by_namespace))
        except (OSError, KvOffloadError) as error:
            why = "it does not answer" if isinstance(error, TimeoutError) else said(error)
            log.warning("disk %s: a clear is not noted: %s", root.path, why)
            return f"{root.path}: {why}"
        return ""

    # --- audit ---

    def check(self) -> list[str]:
        """What is wrong; nothing: an empty list."""
        return [finding for found in self.steps() for finding in found]

    def steps(self) -> Iterator[list[str]]:
        """The same, bit by bit, each true of its moment."""
        yield from self.catalog.steps(lambda: {ordinal for root in self.roots for ordinal in root.segments})
        yield [
            f"disk: {root.path} uses {root.used_bytes} bytes of {root.capacity_bytes}"
            for root in self.roots
            if root.state != State.OFF and root.used_bytes > root.capacity_bytes
        ]

    def figures(self) -> dict[str, Any]:
        """For `status`."""
        demotion, promotion = self.demotion.counters, self.promotion.counters
        return {
            "roots": [root.figures() for root in self.roots],
            "keys": self.catalog.keys,
            "records": self.catalog.records,
            "index_bytes": self.catalog.memory_bytes(),
            "backlog_bytes": self.demotion.unwritten_bytes,
            "quarantined_bytes": self.promotion.quarantined_bytes,
            "demoted": {"keys": demotion.keys, "records": demotion.records, "bytes": demotion.bytes},
            "not_demoted": dict(demotion.not_demoted),
            "promoted": asdict(promotion),
            "corrupt": promotion.damaged,
            "evicted_keys": self.reclaim.keys_evicted,
            "rewritten": self.reclaim.records_rewritten,
        }


def away_keys(space: Space, keys: U64Array, first: int, away: BoolArray) -> Away:
    """The keys that are away, each of them once, with their places in the prompt."""
    at = np.flatnonzero(away)
    once = np.unique(keys[at].view(np.dtype((np.void, KEY_BYTES_MAX))).ravel(), return_index=True)[1]
    at = at[np.sort(once)]
    return Away(space, np.ascontiguousarray(keys[at]), (at + first).astype(np.uint32))


def away_all(disk: Disk, asked: Sequence[tuple[Space, U64Array]], found: Sequence[Found]) -> list[BoolArray]:
    """`Disk.away` of each space's keys, in one go."""
    if len(asked) < 2:
        return [disk.away(space, keys, one) for (space, keys), one in zip(asked, found, strict=True)]
    # Of spaces without a shelf that is open nothing is looked up.
    shelves = [space.shelf if space.shelf is not None and space.shelf.open else None for space, _ in asked]
    counts = [len(keys) for _, keys in asked]
    numbers = np.repeat(np.array([shelf.id if shelf else 0 for shelf in shelves], np.uint16), counts)
    states = np.concatenate([one.states for one in found])
    away = np.zeros(len(states), bool)
    misses = np.flatnonzero((states == _MISS) & np.repeat([shelf is not None for shelf in shelves], counts))
    if len(misses):
        keys = join_keys(keys for _, keys in asked)
        away[misses] = disk.catalog.find_all(numbers[misses], keys[misses]) >= 0
    waiting = np.flatnonzero(states == _PENDING)
    if len(waiting):
        rows = np.concatenate([one.rows for one in found])
        away[waiting] = disk.promotion.under_way(rows[waiting])
    split = [away[at] for at in spans(counts)]
    if away.any():
        for one, gone in zip(found, split, strict=True):
            one.states[gone] = _PENDING
    return split
