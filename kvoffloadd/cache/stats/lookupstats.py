"""Lookup statistics by namespace: hits, misses by reason, and the hit rate that an infinite cache would have had.

Event loop only. Counting what hits costs a microsecond. What takes longer, a look at the reasons of misses, comes after
the answer: before anything else changes what is held, or a key that is missed, stored and evicted counts as evicted.

An infinite cache misses a key once, when it is asked for before it was ever stored. Counting different keys among such
misses tells how many that are, whatever this cache has evicted since; all other keys asked for are its hits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvoffloadd.cache.memory.keys import join_keys
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.stats.hyperloglog import HyperLogLog
from kvoffloadd.cache.stats.missreasons import REASONS, MissReasons, Reason
from kvoffloadd.model import BoolArray, U64Array

NAMESPACES_MAX = 64
"""Namespaces that are told apart since the start; all others count as one."""

OTHERS: Final = "other"


@dataclass(slots=True, eq=False)
class NamespaceStats:
    """One namespace's figures since the start, by keys. `uid` None: of several users."""

    name: str
    uid: int | None
    keys: int = 0
    hits: int = 0
    on_disk: int = 0
    missed: list[int] = field(default_factory=lambda: [0] * len(REASONS))
    new: HyperLogLog = field(default_factory=HyperLogLog)

    def figures(self) -> dict[str, Any]:
        """For `status`."""
        new = min(round(self.new.estimate()), self.keys)
        return {
            "namespace": self.name,
            "uid": self.uid,
            "asked": self.keys,
            "hit": self.hits,
            "on_disk": self.on_disk,
            "missed": dict(zip(REASONS, self.missed, strict=True)),
            "new": new,
            "ceiling_rate": round(1 - new / self.keys, 4) if self.keys else 0.0,
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Keys of one request and group that were missed, and not looked at closely yet. `absent`: those without a row."""

    asked: NamespaceStats
    uid: int
    fingerprint: bytes
    group: int
    keys: U64Array
    absent: BoolArray


class LookupStats:
    """All namespaces' figures. A namespace that is forgotten and comes again goes on where it was."""

    def __init__(self, ghosts: MissReasons) -> None:
        self._ghosts = ghosts
        self._by_fingerprint: dict[bytes, NamespaceStats] = {}
        self._others = NamespaceStats(OTHERS, None)
        self._waiting: list[_Batch] = []

    @property
    def waiting(self) -> bool:
        """Misses were noted that nobody has looked at."""
        return bool(self._waiting)

    def note(self, keyspace: Keyspace, keys: U64Array, found: LookupResult, on_disk: BoolArray) -> None:
        """Keys were asked for, and this was the answer; `on_disk`: those that are on disk, or on their way from there.
        Pair with `look`, soon.
        """
        asked = self._of(keyspace.namespace)
        hits = int(np.count_nonzero(found.hits))
        asked.keys += len(keys)
        asked.hits += hits
        if hits == len(keys):
            return
        num_on_disk = int(np.count_nonzero(on_disk))
        missed = np.flatnonzero(found.states == 0)
        absent = found.rows[missed] < 0
        asked.on_disk += num_on_disk
        asked.missed[Reason.PENDING] += len(keys) - hits - num_on_disk - len(missed)
        asked.missed[Reason.INCOMPLETE] += len(missed) - int(np.count_nonzero(absent))
        if len(missed):
            namespace = keyspace.namespace
            batch = _Batch(asked, namespace.uid, namespace.fingerprint, keyspace.schema.group, keys[missed], absent)
            self._waiting.append(batch)

    def figures(self, uid: int | None = None) -> list[dict[str, Any]]:
        """A row for each namespace (None: of all users), the last one for those that are not told apart."""
        self.look()
        rows = [asked for asked in self._by_fingerprint.values() if uid in (None, asked.uid)]
        if uid is None and self._others.keys:
            rows.append(self._others)
        return [asked.figures() for asked in rows]

    def totals(self, uid: int | None = None) -> dict[str, int]:
        """Of all namespaces (None: of all users): keys that hit, that were under way or on disk, that were missed."""
        rows = [asked for asked in (*self._by_fingerprint.values(), self._others) if uid in (None, asked.uid)]
        hits, pending = sum(a.hits for a in rows), sum(a.on_disk + a.missed[Reason.PENDING] for a in rows)
        missed = sum(a.keys for a in rows) - hits - pending
        return {"keys_hit": hits, "keys_pending": pending, "keys_missed": missed}

    def _of(self, namespace: Namespace) -> NamespaceStats:
        asked = self._by_fingerprint.get(namespace.fingerprint)
        if asked is None:
            if len(self._by_fingerprint) >= NAMESPACES_MAX:
                return self._others
            asked = self._by_fingerprint[namespace.fingerprint] = NamespaceStats(namespace.name, namespace.uid)
        return asked

    def look(self) -> None:
        """At the misses that wait: one namespace after the other."""
        waiting, self._waiting = self._waiting, []
        parts: dict[bytes, list[_Batch]] = {}
        for batch in waiting:
            parts.setdefault(batch.fingerprint, []).append(batch)
        for fingerprint, batches in parts.items():
            asked = batches[0].asked
            counts = [len(batch.keys) for batch in batches]
            groups = np.repeat(np.array([batch.group for batch in batches], np.uint64), counts)
            h = self._ghosts.hash(groups, join_keys(batch.keys for batch in batches))
            absent = np.concatenate([batch.absent for batch in batches])
            why = np.full(len(h), Reason.INCOMPLETE, np.uint8)
            why[absent] = self._ghosts.why(batches[0].uid, fingerprint, h[absent])
            for reason, count in enumerate(np.bincount(why[absent]).tolist()):
                asked.missed[reason] += count
            asked.new.add(h[_NEVER_THERE[why]])


_NEVER_THERE = np.array([reason in ("never_stored", "other_namespace", "incomplete") for reason in REASONS])
"""By reason: an infinite cache would not have had such a key either."""
