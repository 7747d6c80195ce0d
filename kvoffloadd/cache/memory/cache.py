"""The memory cache: namespaces, lookups, holds, and the commit or abort of reserved slots.

Event loop only, no locks, nothing here waits. Keys are (n, WORDS) u64, as `keys_array` makes them. A method that
raises has changed nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.composition import UNKNOWN, Composition
from kvoffloadd.cache.memory.confirmed import Confirmed
from kvoffloadd.cache.memory.doubt import Doubt
from kvoffloadd.cache.memory.epochs import REMEMBERED_MAX, Epochs
from kvoffloadd.cache.memory.eviction import Eviction
from kvoffloadd.cache.memory.index import distinct, first_of_each
from kvoffloadd.cache.memory.keys import join_keys, spans
from kvoffloadd.cache.memory.keytable import SCAN_ROWS, KeyTable, RowState
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.lowertier import LocalTier, LowerTier
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.namespaces import Namespaces
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.quotaroom import QuotaRoom
from kvoffloadd.cache.memory.recordreclaim import RecordReclaim
from kvoffloadd.cache.memory.retention import Retention
from kvoffloadd.cache.memory.savedstate import pack_state
from kvoffloadd.cache.memory.tierclaims import TierClaims
from kvoffloadd.cache.memory.tombstones import Tombstones
from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.cache.stats.lookupstats import LookupStats
from kvoffloadd.cache.stats.missreasons import Reason
from kvoffloadd.model import BoolArray, GroupSchema, I64Array, KeyState, Tier, U16Array, U32Array, U64Array
from kvoffloadd.storage.memory import MemoryTier

log = logging.getLogger(__name__)

_IN_LOCAL = 1 << 46  # a snapshot's cursor from here on is a cursor of the local tier


@dataclass(slots=True)
class CacheCounters:
    """Counts events since the start."""

    parts_reserved: int = 0
    parts_committed: int = 0
    parts_aborted: int = 0
    parts_sealed: int = 0
    keys_cleared: int = 0
    keys_deleted: int = 0
    keys_corrupt: int = 0
    keys_adopted: int = 0
    parts_not_adopted: int = 0
    keys_without_space: int = 0
    keys_soon: int = 0
    keys_done: int = 0
    keys_touched: int = 0


_PENDING = int(KeyState.PENDING)  # comparing an array with an enum member costs more than the rest of a lookup
NO_ROWS = np.zeros(0, np.uint32)


class Unfinished(Protocol):
    """A request between two of its steps, as the self-audit sees it."""

    def __hash__(self) -> int: ...

    @property
    def num_held(self) -> int:
        """Returns how often the request holds rows now."""

    @property
    def num_reserved(self) -> int:
        """Returns the number of parts that it has reserved."""


class Cache:
    """Holds the memory tier's keys. `make_policy(capacity_rows, max_rows)` makes an eviction policy."""

    def __init__(self, tier: MemoryTier, make_policy: Callable[[int, int], Policy], seed: int) -> None:
        self.tier = tier
        self.entries = KeyTable(tier, seed)
        self.eviction = Eviction(self.entries, make_policy)
        self.scarcity = RecordReclaim(self.entries, self.eviction.drop, self.eviction.displaceable)
        memory = TierClaims(self.eviction, self.entries.claimed, share=0.0)
        memory.most_of = self.entries.keyspaces.quotas.most_of
        self.quota_room = QuotaRoom(self.entries, self.eviction, memory)
        self.entries.on_claimed = memory.rows_came
        self.eviction.last_resort = memory.victims
        self.retention = Retention(memory)
        self.uses = self.entries.uses
        self.lookups = LookupStats(self.entries.ghosts)
        self.counters = CacheCounters()
        self.epochs = Epochs()
        self.confirmed = Confirmed()
        self.tombstones = Tombstones()
        self.saved_claims = b""  # packed, for `save_state`
        self.doubt_of: Callable[[bytes], Doubt] = lambda fingerprint: Doubt.NONE
        self.local: LocalTier | None = None
        self.namespaces = Namespaces(self.entries)
        self.namespaces.is_claimed = self.retention.has
        self.retention.on_unclaimed = self.entries.keyspaces.emptied.add
        self.unfinished: set[Unfinished] = set()
        self._warned_of_names = False
        self._state_changed = False

    @property
    def lower(self) -> list[LowerTier]:
        """Returns the tiers below memory."""
        return self.entries.lower

    @changing
    def attach(self, lower: LowerTier) -> None:
        """Puts a tier below memory."""
        self.entries.lower.append(lower)

    def attach_local(self, local: LocalTier) -> None:
        """Puts a tier of this host below memory; there can be only one."""
        self.local = local
        self.entries.events.holders[Tier.DISK] = local.holds_keys
        self.attach(local)

    def sealed(self, parts: I64Array) -> None:
        """Notifies the tiers below that the checksums of these parts are known."""
        for lower in self.lower:
            lower.sealed(parts)

    # --- namespaces and groups ---

    @changing
    def open_namespace(self, fingerprint: bytes, uid: int, label: str, key_bytes: int) -> Namespace:
        """Returns the namespace of this fingerprint, and makes it if it is new. Pair with `close_namespace`."""
        namespace = self.namespaces.find(fingerprint)
        if namespace is None:
            namespace = self.namespaces[fingerprint] = Namespace(
                fingerprint, uid, label, key_bytes, self.epochs.of(fingerprint), self.doubt_of(fingerprint)
            )
        self.namespaces.enter(namespace)
        return namespace

    @changing
    def close_namespace(self, namespace: Namespace) -> None:
        """Counts a session's leave. A namespace without sessions is forgotten once it has no keys."""
        self.namespaces.leave(namespace)

    def check_groups(self, namespace: Namespace, groups: AbstractSet[int]) -> None:
        """Raises LimitError if the new ones among the groups are more than the namespace's user may have."""
        self.namespaces.check_groups(namespace, groups)

    @changing
    def declare(self, namespace: Namespace, schema: GroupSchema, number: int | None = None) -> Keyspace:
        """Returns the keyspace of a group, and makes it if the group is new. `number` is the id of an adopted keyspace.
        Raises SchemaError if the group is known with other properties.
        """
        namespace.check_schema(schema)
        keyspace = namespace.keyspaces.get(schema.group)
        if keyspace is None:
            keyspace = self.entries.keyspaces.add(namespace, schema, [0] * schema.parts, number)
            namespace.keyspaces[schema.group] = keyspace
        return keyspace

    @changing
    def set_part_bytes(
        self,
        keyspace: Keyspace,
        payload_bytes: dict[int, int],
        compositions: Mapping[int, Composition] = MappingProxyType({}),
    ) -> None:
        """Records the payload sizes of the parts that a rank has registered, and the compositions that it has named.
        Raises SchemaError if they differ from those of another rank.
        """
        for part, size in payload_bytes.items():
            keyspace.check_part(part, size, compositions.get(part, UNKNOWN))
        filled = keyspace.fill_compositions(compositions)
        new = {part: size for part, size in payload_bytes.items() if keyspace.part_bytes[part] != size}
        self._state_changed |= filled or bool(new)
        if new:
            keyspace.set_part_bytes(new)
            self.entries.keyspaces.count_pages(keyspace)
            self.admit(keyspace, new.values())
        elif filled:
            for lower in self.lower:
                lower.rename_keyspace(keyspace)
        if new or filled:
            self.retention.sizes_changed(keyspace)

    def admit(self, keyspace: Keyspace, known: Iterable[int]) -> None:
        """Makes room in queues and in the tiers below for parts with payload sizes, `known`, that have become known."""
        self.eviction.admit(keyspace, known)
        for lower in self.lower:
            lower.open_keyspace(keyspace)

    @changing
    def save_state(self) -> None:
        """Saves namespaces and epochs for a successor: before the slot record of a key is written if its group has
        changed, and at once after a clear.
        """
        self._state_changed = False
        names, left_out = pack_state(
            self.namespaces.values(), self.epochs, self.tier.pool.names_bytes_max, self.saved_claims,
            self.tombstones.packed(self.epochs.of),
        )  # fmt: skip
        fits = self.tier.pool.save_names(names)
        if (left_out or not fits) and not self._warned_of_names:
            self._warned_of_names = True
            log.warning(
                "memory: %s: a restart will be cold for %s",
                f"uid {left_out[0]} has too many groups to be recorded"
                if fits
                else "there are too many clears to record",
                "this user" if fits else "all",
            )

    def _replace(self, old: Keyspace) -> None:
        """Replaces the group's keyspace with a new, empty one."""
        namespace = old.namespace
        keyspace = self.entries.keyspaces.add(namespace, old.schema, old.part_bytes)
        keyspace.compositions = old.compositions
        namespace.keyspaces[old.schema.group] = keyspace
        if old.queue is not None:  # the same queue, which takes no memory: nothing may fail during a clear
            keyspace.queue = old.queue
            keyspace.queue.join(keyspace)
        self.entries.keyspaces.retire(old)
        self._state_changed = True
        if any(keyspace.part_bytes):
            self.admit(keyspace, filter(None, keyspace.part_bytes))

    # --- reading ---

    def find(self, keyspace: Keyspace, keys: U64Array) -> LookupResult:
        """Returns the state of each key: HIT, PENDING (a part is being stored) or MISS. Changes nothing. All keys are
        misses if the keyspace was retired after the caller had obtained it; so are keys that are in doubt (see
        `Doubt`).
        """
        return self.find_all([(keyspace, keys)])[0]

    def find_all(self, groups: Sequence[tuple[Keyspace, U64Array]]) -> list[LookupResult]:
        """Looks up the keys of several keyspaces at once, as `find`: hundreds of groups cost little more than one."""
        if not groups:
            return []
        counts = [(keyspace, len(keys)) for keyspace, keys in groups]
        keys = groups[0][1] if len(groups) == 1 else join_keys(keys for _, keys in groups)
        rows = self.entries.find_all(counts, keys)
        if len(groups) == 1:
            return self.results([(groups[0][0], rows)])
        return self.results(
            [(k, rows[s]) for (k, _), s in zip(groups, spans(count for _, count in counts), strict=True)]
        )

    def results(self, found: Sequence[tuple[Keyspace, I64Array]]) -> list[LookupResult]:
        """Returns the result of `find_all` for keys with rows that have been found."""
        if len(found) == 1:
            results = [self._result(found[0][1])]
        else:
            rows, states, hits = self._result(np.concatenate([rows for _, rows in found]))
            results = [LookupResult(rows[s], states[s], hits[s]) for s in spans(len(rows) for _, rows in found)]
        for (keyspace, _), result in zip(found, results, strict=True):
            if keyspace.namespace.doubt:
                self._mask(result, keyspace.namespace.doubt)
        return results

    def _mask(self, result: LookupResult, doubt: Doubt) -> None:
        """Turns hits that are in doubt into misses. They keep their rows: a request that stores them finds them in
        memory.
        """
        indices = np.flatnonzero(result.hits)
        if doubt is Doubt.INHERITED:
            indices = indices[self.entries.inherited[result.rows[indices]] != 0]
        result.states[indices], result.hits[indices] = KeyState.MISS, False

    def _result(self, rows: I64Array) -> LookupResult:
        states, some_incomplete = self.entries.states(rows)
        hits = states.astype(np.bool_)
        if some_incomplete:
            unready = np.flatnonzero((rows >= 0) & ~hits)
            states[unready[self.entries.in_flight(rows[unready])]] = _PENDING
        return LookupResult(rows, states, hits)

    @changing
    def keep(self, groups: Sequence[tuple[Keyspace, U64Array]], *, soon: bool) -> None:
        """Passes on a client's announcement of when it will use these keys, of each group in prompt order: see
        `Policy.keep`. Keys that are being stored count, too.
        """
        self.uses.settle()
        for keyspace, keys in groups:
            rows = self.entries.find(keyspace, keys)
            rows = rows[rows >= 0]
            if keyspace.queue is None or not len(rows):
                continue
            rows = rows[first_of_each(rows)]
            keyspace.queue.policy.keep(rows.astype(np.uint32), soon=soon)
            self.set_claimed_aside(rows.astype(np.uint32))
            if soon:
                self.counters.keys_soon += len(rows)
            else:
                self.counters.keys_done += len(rows)

    def set_claimed_aside(self, rows: U32Array) -> None:
        """Sets those of these rows aside that claims keep, after a policy was told about them."""
        if self.entries.claimed and len(kept := rows[self.entries.claimed.is_claimed(rows)]):
            self.eviction.set_aside(kept)

    def check_hold(self, uid: int, rows: U32Array) -> None:
        """Raises LimitError if this user may not hold these keys: see `HeldMemory`."""
        if self.entries.held.bounds(uid):
            self.entries.held.check(uid, self.entries.unheld_pages(rows))

    def may_hold(self, uid: int, rows: U32Array) -> BoolArray:
        """Returns which of these keys, in prompt order and each named once, this user may hold: the first ones, and all
        that are held already.
        """
        if not self.entries.held.bounds(uid):
            return np.ones(len(rows), bool)
        fresh = self.entries.leases[rows] == 0
        pages = (self.entries.keyspaces.pages[self.entries.index.keyspace[rows]] * fresh).cumsum()
        allowed: BoolArray = ~fresh | (pages <= self.entries.held.left(uid))
        return allowed

    @changing
    def hold(self, rows: U32Array) -> None:
        """Protects keys from eviction; pair with `unhold`. A row counts once for each time it is named."""
        self.entries.count_leases(rows, 1)

    @changing
    def unhold(self, rows: U32Array) -> None:
        """Ends a `hold`. Keys that were retired in the meantime are freed now."""
        if not len(rows):
            return
        self.entries.count_leases(rows, -1)
        if self.entries.num_retired:
            self.entries.free_retired(rows)
        if self.eviction.any_aside:
            self.eviction.readmit(rows)

    # --- writing: `reservation` reserves, then commit or abort ---

    def commit(self, parts: I64Array) -> I64Array:
        """Commits parts after their bytes are written. Returns the parts that must be hashed: all but those of retired
        keys.
        """
        self.counters.parts_committed += len(parts)
        self.tier.touch(self.entries.parts.page[parts])
        kept, rows = self.entries.commit(parts)
        if self.eviction.any_aside:
            self.eviction.readmit(rows)
        return kept

    @changing
    def abort(self, parts: I64Array) -> None:
        """Aborts reserved parts that will not be written, or have invalid bytes. No copy accesses them any more."""
        entries = self.entries
        rows = distinct(entries.parts.row[parts])
        entries.vacate(parts)
        self.counters.parts_aborted += len(parts)
        live = entries.live(rows)
        entries.retire(live[entries.vacant(live)])
        entries.free_retired(rows)
        if self.eviction.any_aside:
            self.eviction.readmit(rows)

    def seal(self, parts: I64Array, generations: U16Array, digests: U64Array) -> I64Array:
        """Stores checksums of committed parts; ignores parts that lost their slots in the meantime. Returns the parts
        that are sealed now.
        """
        columns = self.entries.parts
        same = (columns.generation[parts] == generations) & (columns.state[parts] == PartState.COMMITTED)
        if not same.all():
            parts, digests = parts[same], digests[same]
        columns.digest[parts] = digests
        columns.state[parts] = PartState.SEALED
        self.counters.parts_sealed += len(parts)
        self._write_slot_records(parts, digests)
        return parts

    def _write_slot_records(self, parts: I64Array, digests: U64Array) -> None:
        """Writes slot records of sealed parts, for a successor."""
        entries = self.entries
        rows = entries.parts.row[parts]
        live = entries.state[rows] == RowState.LIVE
        if not live.all():
            parts, digests, rows = parts[live], digests[live], rows[live]
        if self._state_changed and len(parts):
            self.save_state()
        self.tier.slot_records.write(
            entries.parts.page[parts],
            entries.index.keys.take(rows, axis=0),
            digests,
            entries.index.keyspace[rows].astype(np.int64),
            parts - entries.first[rows],
        )

    # --- dropping ---

    @changing
    def drop(self, rows: U32Array) -> None:
        """Drops keys with wrong bytes: no lookup finds them from now on. Their slots go with their last lease."""
        live = self.entries.live(distinct(rows))
        self.counters.keys_corrupt += len(live)
        self.entries.retire(live, Reason.CORRUPT)
        if len(live):
            log.warning("memory: %d keys did not match their checksums; these keys are misses now", len(live))

    def clear(self, namespace: Namespace) -> Iterator[tuple[int, int]]:
        """Clears a namespace after its epoch has advanced: from the first step on, no key of the old epoch hits. Each
        step frees some keys, and yields (keys, bytes). `clearing.clear` makes the clear durable.
        """
        with changing:
            namespace.epoch = self.epochs.of(namespace.fingerprint)
            self.retention.clear(namespace)
            old = list(namespace.keyspaces.values())
            for keyspace in old:
                self._replace(keyspace)
            yield 0, 0
            for keyspace in old:
                for rows in self.entries.scan(keyspace):
                    keys, held_bytes = keyspace.keys, keyspace.bytes
                    self.entries.retire(self.entries.live(rows), Reason.CLEARED)
                    self.counters.keys_cleared += keys - keyspace.keys
                    yield keys - keyspace.keys, held_bytes - keyspace.bytes

    def drop_older(self, namespace: Namespace, epoch: int) -> Iterator[None]:
        """Drops keys that may have been stored before a clear with the number `epoch`, which has become known; some in
        each step. If the clear was before this run, these are the keys that were not stored in this run.
        """
        with changing:
            anything = epoch > self.epochs.began
            self.retention.clear(namespace, restored_only=not anything)
            for keyspace in list(namespace.keyspaces.values()):
                keyspace.drops += anything
                for rows in self.entries.scan(keyspace):
                    keys = keyspace.keys
                    older = rows if anything else rows[self.entries.inherited[rows] != 0]
                    self.entries.retire(self.entries.live(older), Reason.CLEARED)
                    self.counters.keys_cleared += keys - keyspace.keys
                    yield
                keyspace.drops += anything

    @changing
    def forget_clears(self) -> None:
        """Forgets clears of namespaces that have nothing left here, if too many clears are remembered."""
        if len(self.epochs.by_namespace) > REMEMBERED_MAX:
            below = self.local.namespaces() if self.local is not None else set()
            self.epochs.forget(self.namespaces.keys() | below)

    def snapshot(self, keyspace: Keyspace, cursor: int, tier: int | None = None) -> tuple[bytes, int]:
        """Lists packed complete keys from row `cursor` on: those in this `Tier`, or if it is None, in memory and then
        on the local tier below. Returns them and the next cursor (0: the end). A retired keyspace has none.
        """
        if keyspace.retired or (tier == Tier.DISK and self.local is None):
            return b"", 0
        if self.local is not None and (cursor >= _IN_LOCAL or tier == Tier.DISK):
            packed, after = self.local.snapshot(keyspace, cursor % _IN_LOCAL, SCAN_ROWS)
            return packed, after + _IN_LOCAL if after else 0
        rows = self.entries.live(self.entries.scan_step(keyspace, cursor, SCAN_ROWS))
        after = cursor + SCAN_ROWS
        packed = self.entries.packed(rows[self.entries.complete(rows)], keyspace)
        if after < self.entries.index.rows_end:
            return packed, after
        return packed, 0 if self.local is None or tier == Tier.MEMORY else _IN_LOCAL

    def figures(self) -> dict[str, int]:
        """Returns counters and gauges, for `status`."""
        return {
            **self.lookups.totals(),
            **asdict(self.counters),
            "keys_evicted": self.eviction.keys_evicted,
            "slabs": self.tier.num_slabs,
            "slot_sizes": self.eviction.num_sizes,
            "slabs_taken_over": self.eviction.slabs_taken_over,
            "keys": len(self.entries.index),
            "events_lost": self.entries.events.waiting.lost,
            "index_bytes": self.entries.memory_bytes(),
        }
