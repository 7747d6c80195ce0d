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
from kvoffloadd.cache.catalog import Catalog, DiskKeyspace
from kvoffloadd.cache.demotion import Demotion
from kvoffloadd.cache.index import distinct
from kvoffloadd.cache.keys import join_keys, pack
from kvoffloadd.cache.missreasons import Reason
from kvoffloadd.cache.promotion import KeysOnDisk, Promotion
from kvoffloadd.cache.reclaim import Reclaim
from kvoffloadd.cache.scrub import Scrub
from kvoffloadd.cache.together import spans
from kvoffloadd.errors import KvOffloadError, NotDurableError
from kvoffloadd.model import KEY_BYTES_MAX, PAGE_BYTES, KeyState
from kvoffloadd.tiers.disk.format import KeyspaceId
from kvoffloadd.tiers.disk.health import RootState, said

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence

    from kvoffloadd.cache.cache import Cache, LookupResult
    from kvoffloadd.cache.namespace import Keyspace
    from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array
    from kvoffloadd.tiers.disk.root import Root
    from kvoffloadd.tiers.disk.segment import Segment, SequenceNumbers

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


class DiskTier:
    """The roots, the catalog of what is on them, and the ways there and back."""

    def __init__(
        self,
        cache: Cache,
        roots: Sequence[Root],
        numbers: SequenceNumbers,
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
        self.inspection = Scrub(self)
        self.arrivals = Arrivals(self)
        self._settings = settings
        self._keyspaces: dict[int, Keyspace] = {}
        self._told: set[int] = set()  # users who have too many disk keyspaces
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

    def open_keyspace(self, keyspace: Keyspace) -> None:
        """Find the disk keyspace of a keyspace, once the sizes of all its parts are known."""
        if keyspace.disk_keyspace is not None or not all(keyspace.part_bytes):
            return
        schema, namespace = keyspace.schema, keyspace.namespace
        facts = [
            schema.group, schema.kind, schema.tokens_per_key, schema.window_keys, schema.blocks_per_key, schema.parts,
            keyspace.part_bytes,
        ]  # fmt: skip
        shape = hashlib.blake2b(msgpack.packb(facts), digest_size=16).digest()
        name = KeyspaceId(
            namespace.fingerprint, shape, namespace.epoch, schema.group, schema.parts, namespace.key_bytes
        )
        keyspace.disk_keyspace = self.catalog.disk_keyspace(name, namespace.uid)
        if keyspace.disk_keyspace is None and namespace.uid not in self._told:
            self._told.add(namespace.uid)
            log.warning("disk: uid %d has so many groups there that new ones of it are not written", namespace.uid)
        if keyspace.disk_keyspace is not None:
            keyspace.disk_keyspace.part_bytes = tuple(keyspace.part_bytes)
            self._keyspaces[keyspace.disk_keyspace.id] = keyspace

    def close_keyspace(self, keyspace: Keyspace) -> None:
        """The namespace of a keyspace is forgotten; what its disk keyspace has stays."""
        if keyspace.disk_keyspace is not None and self._keyspaces.get(keyspace.disk_keyspace.id) is keyspace:
            del self._keyspaces[keyspace.disk_keyspace.id]
            self._discard_unused(keyspace.disk_keyspace)

    # --- what memory tells ---

    def reset(self, rows: U32Array) -> None:
        """See `LowerTier`."""
        self.promotion.reset(rows)
        self.demotion.reset(rows)

    def sealed(self, parts: I64Array) -> None:
        """See `LowerTier`."""
        self.demotion.sealed(parts)

    def used(self, rows: U32Array) -> None:
        """See `LowerTier`."""
        self.demotion.used(rows)

    def _discard_unused(self, disk_keyspace: DiskKeyspace) -> None:
        """A disk keyspace that nobody has open gives its number back once it has no keys."""
        if disk_keyspace.open and not disk_keyspace.rows and disk_keyspace.id not in self._keyspaces:
            self.catalog.discard(disk_keyspace)

    def keyspace_of(self, disk_keyspace: DiskKeyspace) -> Keyspace | None:
        """The keyspace in memory whose keys this disk keyspace holds, if it is open."""
        keyspace = self._keyspaces.get(disk_keyspace.id)
        return (
            keyspace
            if keyspace is not None and keyspace.disk_keyspace is disk_keyspace and not keyspace.retired
            else None
        )

    def payload_bytes(self, disk_keyspace: DiskKeyspace, records: I64Array) -> I64Array | None:
        """Size of each record's payload; None if nobody has told the sizes since the start."""
        if not disk_keyspace.part_bytes:
            return None
        parts = records - self.catalog.first[self.catalog.row[records]]
        sizes: I64Array = np.asarray(disk_keyspace.part_bytes, np.int64)[parts]
        return sizes

    def namespaces(self) -> set[bytes]:
        """Fingerprints of those that a root which is there may have something of."""
        return {
            disk_keyspace.name.fingerprint
            for disk_keyspace in self.catalog.disk_keyspaces.values()
            if disk_keyspace.open
        }

    def segment(self, ordinal: int) -> tuple[Root, Segment] | None:
        """Where a segment lies; None if its root is off."""
        for root in self.roots:
            segment = root.segments.get(ordinal)
            if segment is not None and root.holds(segment):
                return root, segment
        return None

    # --- questions ---

    def on_disk(self, keyspace: Keyspace, keys: U64Array, found: LookupResult) -> BoolArray:
        """Which keys of a lookup can be brought into memory, or are on their way: their state becomes PENDING."""
        on_disk = np.zeros(len(keys), bool)
        misses = np.flatnonzero(found.states == KeyState.MISS)
        if keyspace.disk_keyspace is not None and len(misses):
            on_disk[misses] = self.catalog.find(keyspace.disk_keyspace, keys[misses]) >= 0
        waiting = np.flatnonzero(found.states == _PENDING)
        if len(waiting):
            on_disk[waiting] = self.promotion.under_way(found.rows[waiting])
        found.states[on_disk] = _PENDING
        return on_disk

    def holds_keys(self, keyspace: Keyspace, keys: U64Array) -> BoolArray:
        """Which keys are complete on disk; also on a disk keyspace that is being emptied, which tells of their end
        itself.
        """
        if keyspace.disk_keyspace is None or self._keyspaces.get(keyspace.disk_keyspace.id) is not keyspace:
            return np.zeros(len(keys), bool)
        return self.catalog.complete(keyspace.disk_keyspace, keys)

    def snapshot(self, keyspace: Keyspace, cursor: int, count: int) -> tuple[bytes, int]:
        """Packed keys that are on disk, from a catalog row on; and the next row, 0 at the end. Also those in memory:
        one that was brought there since memory was listed would be missing otherwise.
        """
        if keyspace.disk_keyspace is None or not keyspace.disk_keyspace.open:
            return b"", 0
        keys = self.catalog.index.keys[self.catalog.listing(keyspace.disk_keyspace, cursor, count)]
        after = cursor + count
        return pack(keys, keyspace.namespace.key_bytes), after if after < self.catalog.index.rows_end else 0

    # --- what goes ---

    def lose(self, records: I64Array, why: int = Reason.EVICTED) -> U32Array:
        """These records are gone or bad. Returns the catalog rows of the keys that are not on disk any more."""
        catalog = self.catalog
        listened = [s for s in self._keyspaces.values() if s.namespace.listeners]
        keys = {}
        if listened:
            rows = distinct(catalog.row[records[catalog.page[records] != 0]])
            rows = rows[catalog.missing[rows] == 0]
            disk_keyspaces = catalog.index.keyspace[rows]
            keys = {
                s.disk_keyspace.id: catalog.index.keys[rows[disk_keyspaces == s.disk_keyspace.id]]
                for s in listened
                if s.disk_keyspace
            }
        lost = catalog.forget(records)
        shelf_of = catalog.index.keyspace[lost]
        for number in distinct(shelf_of).tolist():
            self._note_ghosts(catalog.disk_keyspaces[number], catalog.index.keys[lost[shelf_of == number]], why)
        for number, gone in keys.items():
            self._note_gone(self._keyspaces[number], gone)
        for number in distinct(shelf_of).tolist():
            self._discard_unused(catalog.disk_keyspaces[number])
        return lost

    def begin_clear(self, names: Collection[bytes] | None) -> list[DiskKeyspace]:
        """The epochs of these namespaces (fingerprints; None: of all) have advanced: what is on disk of older ones is
        not found from now on. Pair with `finish_clear`.
        """
        old = []
        for disk_keyspace in self.catalog.disk_keyspaces.values():
            if disk_keyspace.id in self._emptying:
                continue  # an earlier clear sees to it
            fingerprint = disk_keyspace.name.fingerprint
            if (names is None or fingerprint in names) and disk_keyspace.name.epoch != self.cache.epochs.of(
                fingerprint
            ):
                self.catalog.close(disk_keyspace)
                old.append(disk_keyspace)
        return old

    async def finish_clear(self, disk_keyspaces: list[DiskKeyspace]) -> None:
        """Make it durable, then free what the disk keyspaces take.

        Raises:
            NotDurableError: it holds here, but a root could not note it: after a restart the keys might be back.
        """
        failed = await self.save_epochs(self.roots)
        await self.empty(disk_keyspaces)
        if failed:
            raise NotDurableError(f"cleared, but not for good: {'; '.join(failed)}. Clear again when it works")

    async def empty(self, disk_keyspaces: list[DiskKeyspace]) -> None:
        """Free what these closed disk keyspaces take."""
        for disk_keyspace in disk_keyspaces:
            if (
                disk_keyspace.id in self._emptying
                or self.catalog.disk_keyspaces.get(disk_keyspace.id) is not disk_keyspace
            ):
                continue  # another clear has begun with it, or done it
            self._emptying.add(disk_keyspace.id)
            try:
                keyspace = self._keyspaces.pop(disk_keyspace.id, None)
                for keys in self.catalog.empty(disk_keyspace):
                    self._note_ghosts(disk_keyspace, keys, Reason.CLEARED)
                    if keyspace is not None and keyspace.namespace.listeners:
                        self._note_gone(keyspace, keys)
                    await asyncio.sleep(0)
            finally:  # whoever asked may be gone; the next clear goes on with it
                self._emptying.discard(disk_keyspace.id)

    def _note_ghosts(self, disk_keyspace: DiskKeyspace, keys: U64Array, why: int) -> None:
        """Remember how these keys went. Those that memory still holds are not missed, and their own end comes later."""
        self.cache.entries.ghosts.went(disk_keyspace.name.fingerprint, disk_keyspace.name.group, keys, why)

    def _note_gone(self, keyspace: Keyspace, keys: U64Array) -> None:
        """These keys are not on disk any more: an event for those that are not in memory."""
        held = self.cache.entries.find(keyspace, keys)
        resident = held >= 0
        resident[resident] = self.cache.entries.complete(held[resident])
        self.cache.entries.note(keyspace, keys[~resident], added=False)

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
            if root.state != RootState.OFF and root.used_bytes > root.capacity_bytes
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


def keys_on_disk(keyspace: Keyspace, keys: U64Array, first: int, on_disk: BoolArray) -> KeysOnDisk:
    """The keys that are away, each of them once, with their places in the prompt."""
    at = np.flatnonzero(on_disk)
    once = np.unique(keys[at].view(np.dtype((np.void, KEY_BYTES_MAX))).ravel(), return_index=True)[1]
    at = at[np.sort(once)]
    return KeysOnDisk(keyspace, np.ascontiguousarray(keys[at]), (at + first).astype(np.uint32))


def find_on_disk(
    disk: DiskTier, asked: Sequence[tuple[Keyspace, U64Array]], found: Sequence[LookupResult]
) -> list[BoolArray]:
    """`DiskTier.on_disk` of each keyspace's keys, in one go."""
    if len(asked) < 2:
        return [disk.on_disk(keyspace, keys, one) for (keyspace, keys), one in zip(asked, found, strict=True)]
    # Of keyspaces without a disk keyspace that is open nothing is looked up.
    disk_keyspaces = [
        keyspace.disk_keyspace if keyspace.disk_keyspace is not None and keyspace.disk_keyspace.open else None
        for keyspace, _ in asked
    ]
    counts = [len(keys) for _, keys in asked]
    numbers = np.repeat(
        np.array([disk_keyspace.id if disk_keyspace else 0 for disk_keyspace in disk_keyspaces], np.uint16), counts
    )
    states = np.concatenate([one.states for one in found])
    on_disk = np.zeros(len(states), bool)
    misses = np.flatnonzero(
        (states == _MISS) & np.repeat([disk_keyspace is not None for disk_keyspace in disk_keyspaces], counts)
    )
    if len(misses):
        keys = join_keys(keys for _, keys in asked)
        on_disk[misses] = disk.catalog.find_all(numbers[misses], keys[misses]) >= 0
    waiting = np.flatnonzero(states == _PENDING)
    if len(waiting):
        rows = np.concatenate([one.rows for one in found])
        on_disk[waiting] = disk.promotion.under_way(rows[waiting])
    split = [on_disk[at] for at in spans(counts)]
    if on_disk.any():
        for one, gone in zip(found, split, strict=True):
            one.states[gone] = _PENDING
    return split
