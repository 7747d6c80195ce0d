"""Stand-ins for what the cache is given, and builders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.events import Event
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.policy import create_policy
from kvoffloadd.cache.policy.base import Clock
from kvoffloadd.cache.progress import Progress
from kvoffloadd.model import (
    PAGE_BYTES,
    BoolArray,
    F64Array,
    GroupKind,
    GroupSchema,
    I64Array,
    U16Array,
    U32Array,
    U64Array,
)
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.disk.format import ENTRY, Records
from kvoffloadd.storage.hashing import hash_payloads
from kvoffloadd.storage.memory import MemoryTier


def num_waiters(progress: Progress) -> int:
    """Who waits for what has begun."""
    return len(progress._waiters)


class FirstInFirstOut:
    """The simplest policy that keeps the contract."""

    def __init__(self) -> None:
        self.rows: dict[int, None] = {}

    def insert(self, rows: U32Array, hashes: U64Array, positions: U32Array, begins: I64Array | None = None) -> None:
        for row in rows.tolist():
            assert row not in self.rows
            self.rows[row] = None

    def touch(self, rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        assert all(row in self.rows for row in rows.tolist())

    def keep(self, rows: U32Array, *, soon: bool) -> None:
        assert all(row in self.rows for row in rows.tolist())

    def lose(self, rows: U32Array) -> None:
        assert all(row in self.rows for row in rows.tolist())

    def set_aside(self, rows: U32Array) -> None:
        assert all(row in self.rows for row in rows.tolist())

    def remove(self, rows: U32Array) -> None:
        for row in rows.tolist():
            del self.rows[row]

    def victims(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> U32Array:
        rows = np.array(list(self.rows), np.uint32)
        return rows[evictable(rows)][:wanted]

    def worth(self, rows: U32Array) -> F64Array:
        age = {row: len(self.rows) - at for at, row in enumerate(self.rows)}
        return np.array([1 / age[row] for row in rows.tolist()], np.float64)

    def readmit(self, rows: U32Array) -> None:
        pass

    @property
    def num_aside(self) -> int:
        return 0

    def resize(self, capacity_rows: int) -> None:
        pass

    def __len__(self) -> int:
        return len(self.rows)


def make_cache(pages: int = 64, slab_pages: int = 16, pool: ArenaFile | None = None, policy: str = "") -> Cache:
    """`policy`: by its name, instead of the simplest."""
    tier = MemoryTier(pages * PAGE_BYTES, slab_pages * PAGE_BYTES, pool)
    if policy:
        return Cache(tier, partial(create_policy, policy, clock=Clock()), seed=7)
    return Cache(tier, lambda capacity_rows, max_rows: FirstInFirstOut(), seed=7)


def make_context(cache: Cache) -> Any:
    """What the audit uses of `server.Context`; only requests between two steps hold or reserve anything."""
    nothing = SimpleNamespace(read=0, keys=0, write=0, parts=0, holds=0, reserved=0)
    instances = SimpleNamespace(held=lambda: nothing)
    return SimpleNamespace(cache=cache, instances=instances, jobs=nothing, disk=None, remote=None)


def make_keyspace(
    cache: Cache, name: bytes = b"n" * 16, *, group: int = 0, pages: tuple[int, ...] = (1,), uid: int = 0
) -> tuple[Namespace, Keyspace]:
    """A namespace with one group whose parts have payloads of that many pages."""
    namespace = cache.open_namespace(name, uid, "test", 32)
    keyspace = cache.declare(namespace, GroupSchema(group, GroupKind.FULL, 16, parts=len(pages)))
    for part, size in enumerate(pages):
        cache.set_part_bytes(keyspace, {part: size * PAGE_BYTES})
    return namespace, keyspace


def events_of(cache: Cache) -> list[Event]:
    """Takes the waiting events of all namespaces, which then wait no longer."""
    waiting = cache.entries.events.waiting
    return [e for namespace in cache.namespaces.values() for e in iter(partial(waiting.take, namespace), None)]


def entries_of(keys: U64Array, parts: npt.ArrayLike, pages: npt.ArrayLike, payload_bytes: int = PAGE_BYTES) -> Records:
    """Records of these parts of keys, at these pages."""
    entries = np.zeros(len(keys), ENTRY)
    entries["key"], entries["part"], entries["page"], entries["payload_bytes"] = keys, parts, pages, payload_bytes
    return entries


def keys_of(*numbers: int) -> U64Array:
    """Keys that are numbers."""
    found = np.zeros((len(numbers), 4), np.uint64)
    found[:, 1] = numbers
    return found


def store(
    cache: Cache, keyspace: Keyspace, keys: U64Array, parts: list[int] | None = None, *, seals: bool = True
) -> I64Array:
    """Commit these parts of keys, or all of them; the payloads are zeros."""
    wanted: U16Array = np.array(range(keyspace.schema.parts) if parts is None else parts, np.uint16)
    reserved = reserve(cache, keyspace, keys, wanted, 0).parts
    kept = cache.commit(reserved)
    if seals:
        digests = hash_payloads(cache.entries.payload_addresses(kept), cache.entries.payload_bytes(kept))
        cache.seal(kept, cache.entries.parts.generation[kept], digests)
    return kept
