"""Lookup statistics by namespace: hits, misses by reason, and the hit rate of an infinite cache.

Event loop only. Counting hits costs a microsecond. The slower search for the reasons of misses comes after the answer,
but before anything else changes the held keys: otherwise a key that is missed, stored and evicted would count as
evicted.

An infinite cache misses a key once, when it is requested before it was ever stored. The number of different keys among
such misses is the count of its misses, whatever this cache has evicted since; all other requested keys are its hits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.keys import join_keys
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.stats.hyperloglog import HyperLogLog
from kvoffloadd.cache.stats.missreasons import REASONS, MissReasons, Reason
from kvoffloadd.model import BoolArray, U64Array

NAMESPACES_MAX = 64
"""The number of namespaces counted separately since the start; all others count as one."""

OTHERS: Final = "other"


@dataclass(slots=True, eq=False)
class NamespaceStats:
    """One namespace's counts of keys since the start."""

    name: str
    uid: int | None  # None: of several users
    keys: int = 0  # requested
    hits: int = 0
    on_disk: int = 0
    remote: int = 0  # came from the remote store, while a request waited
    missed: list[int] = field(default_factory=lambda: [0] * len(REASONS))  # by reason
    new: HyperLogLog = field(default_factory=HyperLogLog)  # different keys that an infinite cache would have missed
    asked_tokens: int = 0
    hit_tokens: int = 0  # within the prefixes that could be restored

    def figures(self) -> dict[str, Any]:
        """Returns the figures for `status`."""
        # An infinite cache has what this one had: no estimate may contradict the hits that were counted.
        never_there = sum(count for count, absent in zip(self.missed, _NEVER_THERE, strict=True) if absent)
        new = min(round(self.new.estimate()), never_there)
        return {
            "namespace": self.name,
            "uid": self.uid,
            "asked": self.keys,
            "hit": self.hits,
            "on_disk": self.on_disk,
            "remote": self.remote,
            "missed": dict(zip(REASONS, self.missed, strict=True)),
            "new": new,
            "ceiling_rate": round((self.keys - new) / self.keys, 4) if self.keys else 0.0,
            "asked_tokens": self.asked_tokens,
            "hit_tokens": self.hit_tokens,
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Missed keys of one request and group that are not classified yet."""

    stats: NamespaceStats
    uid: int
    fingerprint: bytes
    group: int
    keys: U64Array
    absent: BoolArray  # keys without a row


class LookupStats:
    """The figures of all namespaces. A forgotten namespace that returns continues its counts."""

    def __init__(self, ghosts: MissReasons) -> None:
        self._ghosts = ghosts
        self._by_fingerprint: dict[bytes, NamespaceStats] = {}
        self._others = NamespaceStats(OTHERS, None)
        self._waiting: list[_Batch] = []

    @property
    def waiting(self) -> bool:
        """Whether misses were recorded that are not classified yet."""
        return bool(self._waiting)

    @changing
    def record(
        self,
        keyspace: Keyspace,
        keys: U64Array,
        found: LookupResult,
        on_disk: BoolArray,
        requested: BoolArray | None = None,
    ) -> None:
        """Counts the result of a lookup. `on_disk`: keys that are on disk, or under way from there. `requested`: keys
        that the remote store is asked for: they are left to `record_requested`. Call `classify_misses` soon after.
        """
        stats = self._of(keyspace.namespace)
        hits = int(np.count_nonzero(found.hits))
        total = len(keys) - (0 if requested is None else int(np.count_nonzero(requested)))
        stats.keys += total
        stats.hits += hits
        if hits == total:
            return
        num_on_disk = int(np.count_nonzero(on_disk))
        missed = np.flatnonzero(found.states == 0)
        stats.on_disk += num_on_disk
        stats.missed[Reason.PENDING] += total - hits - num_on_disk - len(missed)
        self._add_misses(stats, keyspace, keys[missed], found.rows[missed] < 0)

    @changing
    def record_requested(self, keyspace: Keyspace, keys: U64Array, found: LookupResult, requested: BoolArray) -> None:
        """Counts the keys of an earlier lookup that the remote store was asked for. `found`: their states now."""
        stats = self._of(keyspace.namespace)
        total, hits = int(np.count_nonzero(requested)), int(np.count_nonzero(found.hits & requested))
        stats.keys += total
        stats.remote += hits
        missed = np.flatnonzero(requested & (found.states == 0))
        stats.missed[Reason.PENDING] += total - hits - len(missed)
        self._add_misses(stats, keyspace, keys[missed], found.rows[missed] < 0)

    @changing
    def record_tokens(self, namespace: Namespace, asked: int, restorable: int) -> None:
        """Counts the tokens of a prompt that were asked for, and those of the prefix among them that can be
        restored.
        """
        stats = self._of(namespace)
        stats.asked_tokens += asked
        stats.hit_tokens += restorable

    def _add_misses(self, stats: NamespaceStats, keyspace: Keyspace, keys: U64Array, absent: BoolArray) -> None:
        stats.missed[Reason.INCOMPLETE] += len(keys) - int(np.count_nonzero(absent))
        if len(keys):
            namespace = keyspace.namespace
            batch = _Batch(stats, namespace.uid, namespace.fingerprint, keyspace.schema.group, keys, absent)
            self._waiting.append(batch)

    def figures(self, uid: int | None = None) -> list[dict[str, Any]]:
        """Returns a row for each namespace (None: of all users), the last one for those that are not counted
        separately.
        """
        self.classify_misses()
        rows = [stats for stats in self._by_fingerprint.values() if uid in (None, stats.uid)]
        if uid is None and self._others.keys:
            rows.append(self._others)
        return [stats.figures() for stats in rows]

    def totals(self, uid: int | None = None) -> dict[str, int]:
        """Returns sums over namespaces (`uid` None: all users') of keys: hits; expected keys (under way, on disk, or
        from the remote store); misses.
        """
        rows = [stats for stats in (*self._by_fingerprint.values(), self._others) if uid in (None, stats.uid)]
        hits, pending = sum(a.hits for a in rows), sum(a.on_disk + a.remote + a.missed[Reason.PENDING] for a in rows)
        missed = sum(a.keys for a in rows) - hits - pending
        return {"keys_hit": hits, "keys_pending": pending, "keys_missed": missed}

    def _of(self, namespace: Namespace) -> NamespaceStats:
        stats = self._by_fingerprint.get(namespace.fingerprint)
        if stats is None:
            if len(self._by_fingerprint) >= NAMESPACES_MAX:
                return self._others
            stats = self._by_fingerprint[namespace.fingerprint] = NamespaceStats(namespace.name, namespace.uid)
        return stats

    @changing
    def classify_misses(self) -> None:
        """Counts the misses recorded since the last call by their reason."""
        waiting, self._waiting = self._waiting, []
        parts: dict[bytes, list[_Batch]] = {}
        for batch in waiting:
            parts.setdefault(batch.fingerprint, []).append(batch)
        for fingerprint, batches in parts.items():
            stats = batches[0].stats
            counts = [len(batch.keys) for batch in batches]
            groups = np.repeat(np.array([batch.group for batch in batches], np.uint64), counts)
            h = self._ghosts.hash(groups, join_keys(batch.keys for batch in batches))
            absent = np.concatenate([batch.absent for batch in batches])
            why = np.full(len(h), Reason.INCOMPLETE, np.uint8)
            why[absent] = self._ghosts.why(batches[0].uid, fingerprint, h[absent])
            for reason, count in enumerate(np.bincount(why[absent]).tolist()):
                stats.missed[reason] += count
            stats.new.add(h[_NEVER_THERE[why]])


_NEVER_THERE = np.array([reason in ("never_stored", "other_namespace", "incomplete") for reason in REASONS])
"""Whether, by reason, an infinite cache would have missed such a key, too."""
