"""The disk tier below memory, which combines catalog, demotion, promotion, reclaim and scrub. Event loop only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvoffloadd.cache.disk.claims import DiskClaims
from kvoffloadd.cache.disk.clears import DiskClears
from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.disk.demotion import Demotion
from kvoffloadd.cache.disk.promotion import Promotion
from kvoffloadd.cache.disk.reclaim import Reclaim
from kvoffloadd.cache.disk.rootlifecycle import RootLifecycle
from kvoffloadd.cache.disk.scrub import Scrub
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.keys import join_keys, spans
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.config import DiskConfig
from kvoffloadd.model import BoolArray, I64Array, KeyState, U32Array, U64Array
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.segment import PLACE_END

log = logging.getLogger(__name__)

_MISS, _PENDING = int(KeyState.MISS), int(KeyState.PENDING)


class DiskTier(DiskContents):
    """Implements `LocalTier` on disk."""

    def __init__(
        self, cache: Cache, config: DiskConfig, files: Files, loop: asyncio.AbstractEventLoop, seed: int
    ) -> None:
        super().__init__(cache, config, files, loop, seed)
        self.claims = DiskClaims(self, seed)
        cache.retention.attach_disk(self.claims)
        self.clears = DiskClears(self, config.stuck_s)
        self.demotion = Demotion(self)
        self.promotion = Promotion(self)
        self.reclaim = Reclaim(self, self.demotion, rewrite_hot=config.rewrite_hot)
        self.scrub = Scrub(self, self.promotion.counters)
        self.arrivals = RootLifecycle(self, self.clears, self.demotion, self.promotion, self.reclaim)
        self._tasks: list[asyncio.Task[None]] = []
        cache.attach_local(self)

    # --- life ---

    async def start(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Takes the roots in, and starts the background tasks. `spawn` runs a task that the daemon owns."""

        def keep(work: Coroutine[Any, Any, None]) -> None:
            self._tasks.append(spawn(work))

        self.numbers.seen(0, self.cache.tombstones.last)
        await self.arrivals.start(keep)
        for root in self.roots:
            keep(self.reclaim.keep(root, self.config.retry_s))
        keep(self.demotion.run())
        keep(self.demotion.run_again())

    async def close(self, flush_s: float, deadline_s: float) -> bool:
        """Writes the keys that only memory has, seals, and closes the roots. Returns False if some I/O does not end."""
        if left := await self.demotion.flush(flush_s):
            log.warning("%d bytes were not written to disk in time and are lost", left)
        for task in self._tasks:
            task.cancel()
        return all(await asyncio.gather(*(root.close(deadline_s) for root in self.roots)))

    # --- calls from memory, see `LocalTier` ---

    def open_keyspace(self, keyspace: Keyspace) -> None:
        super().open_keyspace(keyspace)
        self.claims.rows_changed(keyspace)

    def rename_keyspace(self, keyspace: Keyspace) -> None:
        disk_keyspace = self.of(keyspace)
        if disk_keyspace is None:
            return
        if disk_keyspace.keys:
            self.cache.entries.events.lose(keyspace.namespace)
        self.close_keyspace(keyspace)
        self.reopen_keyspace(keyspace)
        self.demotion.offer_again(keyspace)

    def reset(self, rows: U32Array) -> None:
        self.promotion.reset(rows)
        self.demotion.backlog.reset(rows)

    def sealed(self, parts: I64Array) -> None:
        self.demotion.backlog.sealed(parts)

    def used(self, rows: U32Array) -> None:
        self.demotion.backlog.used(rows)

    def lost(self, rows: U32Array) -> None:
        self.catalog.mark_unused(self._on_disk(rows))

    def found_again(self, rows: U32Array) -> None:
        self.catalog.mark_used(self._on_disk(rows))

    def _on_disk(self, rows: U32Array) -> I64Array:
        """Returns the catalog's rows of keys in memory that are on disk, too."""
        entries, found = self.cache.entries, [np.zeros(0, np.int64)]
        for keyspace, indices in entries.by_keyspace(rows):
            disk_keyspace = self.of(keyspace)
            if disk_keyspace is not None:
                found.append(self.catalog.find(disk_keyspace, entries.index.keys[rows[indices]]))
        there = np.concatenate(found)
        return there[there >= 0]

    def evicted(self, rows: U32Array) -> None:
        self.demotion.backlog.evicted(rows)

    # --- lookups ---

    def on_disk(self, keyspace: Keyspace, keys: U64Array, lookup: LookupResult) -> BoolArray:
        """Returns which keys of a lookup are on disk, or on their way from there. Sets their state in `lookup` to
        PENDING.
        """
        on_disk = np.zeros(len(keys), bool)
        misses = np.flatnonzero(lookup.states == KeyState.MISS)
        disk_keyspace = self.of(keyspace)
        if disk_keyspace is not None and len(misses) and not keyspace.namespace.doubt:
            on_disk[misses] = self.catalog.find(disk_keyspace, keys[misses]) >= 0
        waiting = np.flatnonzero(lookup.states == _PENDING)
        if len(waiting):
            on_disk[waiting] = self.promotion.under_way(lookup.rows[waiting])
        lookup.states[on_disk] = _PENDING
        return on_disk

    @changing
    def touch(self, keyspace: Keyspace, keys: U64Array) -> None:
        """Marks these keys as read."""
        disk_keyspace = self.of(keyspace)
        if disk_keyspace is not None:
            rows = self.catalog.find(disk_keyspace, keys)
            self.catalog.mark_used(rows[rows >= 0])

    @property
    def oldest_sequence(self) -> int:
        """Returns the first place in history of the records that some place may have; 0 while this is not known."""
        if any(root.state == RootState.OFF or not root.is_whole or root in self.arrivals.coming for root in self.roots):
            return 0
        segments = (segment.oldest_sequence for root in self.roots for segment in root.pool.segments.values())
        return min(self.demotion.oldest_sequence, self.reclaim.oldest_sequence, *segments, PLACE_END)

    # --- audit ---

    def check(self) -> list[str]:
        """Audits everything at once: returns a list of errors."""
        return [finding for findings in self.steps() for finding in findings]

    def steps(self) -> Iterator[list[str]]:
        """Audits in steps. Each yields a list of errors, which is true at its moment."""
        yield from self.catalog.steps(lambda: {ordinal for root in self.roots for ordinal in root.pool.segments})
        yield [
            f"disk: {root.name} uses {root.pool.used_bytes} bytes of {root.capacity_bytes}"
            for root in self.roots
            if root.state != RootState.OFF and root.pool.used_bytes > root.capacity_bytes
        ]

    def figures(self) -> dict[str, Any]:
        """Returns the figures for `status`."""
        demotion, promotion = self.demotion.counters, self.promotion.counters
        return {
            "roots": [root.figures() for root in self.roots],
            "keys": self.catalog.keys,
            "records": self.catalog.records,
            "cleared_records": self.catalog.cleared_records,
            "index_bytes": self.catalog.memory_bytes(),
            "backlog_bytes": self.demotion.unwritten_bytes,
            "quarantined_bytes": self.promotion.quarantined_bytes,
            "demoted": {"keys": demotion.keys, "records": demotion.records, "bytes": demotion.bytes},
            "not_demoted": dict(demotion.not_demoted),
            "promoted": asdict(promotion),
            "corrupt": promotion.damaged,
            "evicted_keys": self.reclaim.keys_evicted,
            "rewritten": self.reclaim.records_rewritten,
            "rewritten_bytes": self.reclaim.bytes_rewritten,
        }


def find_on_disk(
    disk: DiskTier, groups: Sequence[tuple[Keyspace, U64Array]], lookups: Sequence[LookupResult]
) -> list[BoolArray]:
    """Finds the keys of several keyspaces at once, as `DiskTier.on_disk`."""
    if len(groups) < 2:
        return [disk.on_disk(keyspace, keys, lookup) for (keyspace, keys), lookup in zip(groups, lookups, strict=True)]
    # Keyspaces without an open disk keyspace, or in doubt, have no keys to look up.
    disk_keyspaces = [
        its if (its := disk.of(keyspace)) is not None and its.open and not keyspace.namespace.doubt else None
        for keyspace, _ in groups
    ]
    counts = [len(keys) for _, keys in groups]
    numbers = np.repeat(
        np.array([disk_keyspace.id if disk_keyspace else 0 for disk_keyspace in disk_keyspaces], np.uint16), counts
    )
    states = np.concatenate([lookup.states for lookup in lookups])
    on_disk = np.zeros(len(states), bool)
    misses = np.flatnonzero(
        (states == _MISS) & np.repeat([disk_keyspace is not None for disk_keyspace in disk_keyspaces], counts)
    )
    if len(misses):
        keys = join_keys(keys for _, keys in groups)
        on_disk[misses] = disk.catalog.find_all(numbers[misses], keys[misses]) >= 0
    waiting = np.flatnonzero(states == _PENDING)
    if len(waiting):
        rows = np.concatenate([lookup.rows for lookup in lookups])
        on_disk[waiting] = disk.promotion.under_way(rows[waiting])
    masks = [on_disk[span] for span in spans(counts)]
    if on_disk.any():
        for lookup, mask in zip(lookups, masks, strict=True):
            lookup.states[mask] = _PENDING
    return masks
