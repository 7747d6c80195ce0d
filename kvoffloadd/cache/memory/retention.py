"""Retention: claims of clients that keys be kept for a time. Event loop only.

A claim names keys of a prompt, in memory or not, a priority, and when it ends. It is soft: claimed keys are evicted
after all others, so a store finds room even if all memory is claimed. It is bounded: what a user's claims keep in
memory takes at most a share of it. Beyond that, the user's claim of the lowest priority lapses, of several the oldest;
the last claim that keeps anything is cut to the beginning of its prompt. This is the soft form of retention that
engines describe with `kv.retain`; hard pins starve others.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.claimedkeys import NO_NUMBERS
from kvoffloadd.cache.memory.eviction import Eviction
from kvoffloadd.cache.memory.index import distinct, first_of_each
from kvoffloadd.cache.memory.keytable import KeyTable
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, BoolArray, U32Array, U64Array

CLAIMS_PER_USER = 1024
ENDS_SPARE = 64
"""The number of ends that may be remembered of claims that ended earlier or were extended."""

EXPIRED_KEYS = 1 << 16
"""The number of keys that one turn of the event loop takes out of claims that have expired."""


@dataclass(slots=True)
class RetentionCounters:
    """Counts events since the start."""

    claims_made: int = 0
    claims_expired: int = 0
    claims_lapsed: int = 0  # their user's share was too small
    claims_cut: int = 0


@dataclass(slots=True, eq=False)
class Retention:
    """Holds the claims of all users."""

    entries: KeyTable
    eviction: Eviction
    clock: Callable[[], float] = time.monotonic
    memory_share: float = 0.25
    counters: RetentionCounters = field(default_factory=RetentionCounters)
    # Called with the time at which `expire` must be called.
    wake: Callable[[float], object] = lambda at_s: None
    _claims: dict[int, Claim] = field(default_factory=dict)  # by number, the oldest first
    _by_namespace: dict[Namespace, dict[int, Claim]] = field(default_factory=dict)
    _by_name: dict[tuple[Namespace, str], Claim] = field(default_factory=dict)
    _ends: list[tuple[float, int]] = field(default_factory=list)  # a heap, with entries of claims that ended early
    _last: int = 0

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def claims(self) -> list[Claim]:
        """Returns all claims, the oldest first."""
        return list(self._claims.values())

    # --- begin and end ---

    @changing
    def retain(
        self,
        namespace: Namespace,
        groups: Sequence[tuple[Keyspace, int, U64Array]],
        *,
        priority: int,
        seconds: float,
        name: str = "",
    ) -> Claim | None:
        """Makes a claim of these keys. It replaces the claim of this name in the namespace, if there is one.

        Each group comes with the position of its first key in the prompt; its keys are distinct. Claims of the same
        user that are in the way lapse, in their order. Returns None if this claim would be the first to lapse, and was
        therefore not made.

        Raises:
            LimitError: the request names more keys than all claims of the user may name, or too many keys have almost
                equal hashes.
        """
        groups = [(keyspace, first, keys) for keyspace, first, keys in groups if len(keys)]
        most, wanted = self.entries.claimed.most(namespace.uid), sum(len(keys) for _, _, keys in groups)
        if wanted > most:
            raise LimitError(
                f"{wanted} keys in one claim; all claims of uid {namespace.uid} together may name {most}: claim the "
                "beginning of the prompt"
            )
        old = self._by_name.get((namespace, name)) if name else None
        hits = 0
        if old is not None:
            hits = self._hits(old)
            self._end([old])
        if not groups or not self._make_room(namespace.uid, groups, priority):
            return None
        claim = self._add(namespace, groups, priority, seconds, name)
        claim.uses_before -= hits
        self.keep_within(namespace.uid)
        return claim if claim.is_in_force else None

    def _make_room(self, uid: int, groups: Sequence[tuple[Keyspace, int, U64Array]], priority: int) -> bool:
        """Lets claims lapse until the user may have one more, of these keys. Returns False if these would have to be
        claims of a higher priority.
        """
        claimed = self.entries.claimed
        while True:
            fresh = sum(claimed.num_fresh(keyspace, keys) for keyspace, _, keys in groups)
            own = sorted(self._of(uid), key=lambda claim: claim.order)
            if fresh <= claimed.left(uid) and len(own) < CLAIMS_PER_USER:
                return True
            if not own or own[0].priority > priority:
                return False
            some = own[: len(own) // 16 + 1]  # several at once: there may be a thousand small ones in the way
            self._lapse([claim for claim in some if claim.priority <= priority])

    def _add(
        self,
        namespace: Namespace,
        groups: Sequence[tuple[Keyspace, int, U64Array]],
        priority: int,
        seconds: float,
        name: str,
    ) -> Claim:
        self._last += 1
        claim, newly = Claim(self._last, namespace, name, priority, self.clock() + seconds), [NO_NUMBERS]
        try:
            for keyspace, first, keys in groups:
                group, numbers, rows = self.entries.claimed.add(
                    keyspace, keys, claim.rank, self.entries.find(keyspace, keys)
                )
                ends = np.arange(first + 1, first + len(keys) + 1) * keyspace.schema.tokens_per_key
                claim.groups.append((group, numbers, ends))
                newly.append(rows)
        except LimitError:
            for group, numbers, _ in claim.groups:
                self._restore(namespace, [self.entries.claimed.remove(group, numbers, claim.rank).lowered])
            raise
        claim.uses_before = int(self.entries.claimed.uses[claim.last])
        self.eviction.set_aside(np.concatenate(newly))
        self._claims[claim.number] = self._by_namespace.setdefault(namespace, {})[claim.number] = claim
        if name:
            self._by_name[namespace, name] = claim
        self._schedule(claim)
        self.counters.claims_made += 1
        return claim

    def _schedule(self, claim: Claim) -> None:
        heapq.heappush(self._ends, (claim.ends_s, claim.number))
        if len(self._ends) > 2 * len(self._claims) + ENDS_SPARE:
            self._ends = [(claim.ends_s, claim.number) for claim in self._claims.values()]
            heapq.heapify(self._ends)
        if self._ends[0] == (claim.ends_s, claim.number):
            self.wake(claim.ends_s)

    @changing
    def extend(self, claims: Iterable[Claim], seconds: float, priority: int | None = None) -> None:
        """Makes claims end in so many seconds, and changes their priority unless it is None."""
        for claim in claims:
            claim.ends_s = self.clock() + seconds
            self._schedule(claim)
            if priority is not None and priority != claim.priority:
                before, claim.priority = claim.rank, priority
                lowered = self.entries.claimed.change_rank(claim.numbers, before, claim.rank)
                self._restore(claim.namespace, [lowered])

    @changing
    def forget(self, claims: Iterable[Claim]) -> None:
        """Ends these claims, by the wish of a client."""
        self._end(list(claims))

    @changing
    def clear(self, namespace: Namespace) -> None:
        """Ends all claims of a namespace: its keys are cleared."""
        if namespace in self._by_namespace:
            self._end(list(self._by_namespace[namespace].values()))

    @changing
    def expire(self) -> float | None:
        """Ends claims that are over, some at a time. Returns when it must be called again; None: not before the next
        claim is made.
        """
        now, due, keys = self.clock(), dict[int, Claim](), 0
        while self._ends and self._ends[0][0] <= now and keys < EXPIRED_KEYS:
            ends_s, number = heapq.heappop(self._ends)
            claim = self._claims.get(number)
            if claim is not None and claim.ends_s == ends_s:
                due[number] = claim  # it may have been extended to the same time twice
                keys += claim.num_keys
        self.counters.claims_expired += len(due)
        self._end(list(due.values()))
        return self._ends[0][0] if self._ends else None

    def _of(self, uid: int) -> Iterator[Claim]:
        for namespace, claims in self._by_namespace.items():
            if namespace.uid == uid:
                yield from claims.values()

    def _end(self, claims: Sequence[Claim]) -> None:
        freed, lowered = list[U32Array](), dict[Namespace, list[U32Array]]()
        for claim in claims:
            claim.is_in_force = False
            del self._claims[claim.number]
            siblings = self._by_namespace[claim.namespace]
            del siblings[claim.number]
            if not siblings:
                del self._by_namespace[claim.namespace]
            if self._by_name.get((claim.namespace, claim.name)) is claim:
                del self._by_name[claim.namespace, claim.name]
            for group, numbers, _ in claim.groups:
                released = self.entries.claimed.remove(group, numbers, claim.rank)
                freed.append(released.rows)
                lowered.setdefault(claim.namespace, []).append(released.lowered)
        for namespace, numbers_of in lowered.items():
            self._restore(namespace, numbers_of)
        self._readmit(freed)

    def _readmit(self, freed: Sequence[U32Array]) -> None:
        rows = np.concatenate([NO_NUMBERS, *freed])
        if len(rows):
            self.eviction.readmit(rows)

    def _restore(self, namespace: Namespace, lowered: Sequence[U32Array]) -> None:
        """Finds the rank of keys again that the claims of the highest rank have left."""
        claimed = self.entries.claimed
        marked = np.concatenate([NO_NUMBERS, *lowered])
        marked = distinct(marked[claimed.claims[marked] > 0])  # the others are free, since later claims ended, too
        marked = marked[claimed.rank[marked] == 0]
        if not len(marked):
            return
        wanted = np.zeros(int(marked[-1]) + 1, bool)
        wanted[marked] = True
        for claim in self._by_namespace.get(namespace, {}).values():
            numbers = claim.numbers
            numbers = numbers[numbers < len(wanted)]
            claimed.restore(numbers[wanted[numbers]], claim.rank)

    # --- the share of a user ---

    def budget_pages(self) -> int:
        """Returns the pages of memory that the claims of one user may keep."""
        return int(self.memory_share * self.entries.tier.num_pages)

    def rows_came(self, rows: U32Array) -> None:
        """Notes that claimed keys have come to memory, in these rows."""
        self.eviction.set_aside(rows)
        for uid in distinct(self.entries.keyspaces.uids[self.entries.index.keyspace[rows]]).tolist():
            self.keep_within(uid)

    @changing
    def change_share(self, share: float) -> None:
        """Sets the share of memory that the claims of one user may keep, from now on."""
        self.memory_share = share
        for uid in {namespace.uid for namespace in self._by_namespace}:
            self.keep_within(uid)

    @changing
    def keep_within(self, uid: int) -> None:
        """Lets claims of a user lapse until they keep no more than its share."""
        claimed = self.entries.claimed
        while (over := claimed.pages(uid) - self.budget_pages()) > 0:
            ordered = iter(sorted(self._of(uid), key=lambda claim: claim.order))
            least = self._until(ordered, over)
            if len(least) == 1 and not any(self._pages_of(claim) for claim in ordered):
                self._cut(least[0])
            else:
                self._lapse(least[: max(1, len(least) - 1)])  # pages of several claims were counted several times

    def _until(self, ordered: Iterator[Claim], over: int) -> list[Claim]:
        """Takes claims that keep so many pages, or all; those that keep nothing are passed over."""
        found, kept = [], 0
        for claim in ordered:
            pages = self._pages_of(claim)
            if pages:
                found.append(claim)
                kept += pages
            if kept >= over:
                break
        return found

    def _pages_of(self, claim: Claim) -> int:
        return int(self.entries.claimed.pages_of(claim.numbers).sum())

    def _lapse(self, claims: Sequence[Claim]) -> None:
        self.counters.claims_lapsed += len(claims)
        self._end(claims)

    def _cut(self, claim: Claim) -> None:
        """Cuts a claim, the only one of its user that keeps anything, to what its user's share has room for."""
        claimed = self.entries.claimed
        ends = np.concatenate([ends for _, _, ends in claim.groups])
        order = np.argsort(ends, kind="stable")
        kept = claimed.pages_of(claim.numbers)[order].cumsum() <= self.budget_pages()
        until = int(ends[order][~kept].min())  # in tokens: keys that end here or later are left out
        self.counters.claims_cut += 1
        before = [(group, numbers, ends, int(np.searchsorted(ends, until))) for group, numbers, ends in claim.groups]
        claim.groups = [(group, numbers[:left], ends[:left]) for group, numbers, ends, left in before if left]
        released = [claimed.remove(group, numbers[left:], claim.rank) for group, numbers, _, left in before]
        self._restore(claim.namespace, [each.lowered for each in released])
        if not claim.groups:
            self._end([claim])
        self._readmit([each.rows for each in released])

    # --- the last resort ---

    def victims(self, wanted: Callable[[U32Array], BoolArray], count: int) -> U32Array:
        """Returns up to `count` claimed rows to evict where nothing else is left, first to go first: of the user whose
        claims keep the most, in the order in which claims lapse, from the ends of the prompts. `wanted`: of some rows,
        those that may be evicted, and would help.
        """
        claimed, found, missing = self.entries.claimed, [NO_NUMBERS], count
        kept = {uid: claimed.pages(uid) for uid in {namespace.uid for namespace in self._by_namespace}}
        for claim in sorted(self._claims.values(), key=lambda claim: (-kept[claim.namespace.uid], claim.order)):
            for _, numbers, _ in claim.groups:
                own = numbers[(claimed.rank[numbers] == claim.rank)][::-1]
                rows = claimed.rows_of(own)
                rows = rows[wanted(rows)][:missing]
                found.append(rows)
                missing -= len(rows)
            if missing <= 0:
                break
        rows = np.concatenate(found)
        victims: U32Array = rows[first_of_each(rows)][:count]
        return victims

    # --- figures ---

    def figures(self) -> dict[str, int]:
        """Returns counters and gauges, for `status`."""
        claimed = self.entries.claimed
        uids = {namespace.uid for namespace in self._by_namespace}
        return {
            "claims": len(self._claims),
            "keys": len(claimed.index),
            "memory_bytes": sum(map(claimed.pages, uids)) * PAGE_BYTES,
            "claims_made": self.counters.claims_made,
            "claims_expired": self.counters.claims_expired,
            "claims_lapsed": self.counters.claims_lapsed,
            "claims_cut": self.counters.claims_cut,
            "keys_unkept": self.eviction.keys_unkept,
        }

    def describe(self, claim: Claim) -> dict[str, Any]:
        """Returns the figures of one claim: see `messages.ClaimFigures`."""
        claimed, numbers = self.entries.claimed, claim.numbers
        pages = claimed.pages_of(numbers)
        return {
            "number": claim.number,
            "name": claim.name,
            "namespace": claim.namespace.name,
            "uid": claim.namespace.uid,
            "priority": claim.priority,
            "left_s": max(0.0, claim.ends_s - self.clock()),
            "tokens": claim.tokens,
            "keys": len(numbers),
            "memory_keys": int(np.count_nonzero(pages)),
            "memory_bytes": int(pages.sum()) * PAGE_BYTES,
            "hits": self._hits(claim),
        }

    def _hits(self, claim: Claim) -> int:
        return int(self.entries.claimed.uses[claim.last]) - claim.uses_before

    def check(self) -> list[str]:
        """Returns a list of errors: what the claims name, and the table of claimed keys, must agree."""
        claimed = self.entries.claimed
        end = claimed.index.rows_end
        named, ranks, tops = np.zeros(end, np.uint16), np.zeros(end, np.uint8), np.zeros(end, np.uint16)
        for claim in self._claims.values():
            numbers = claim.numbers
            named[numbers] += np.uint16(1)
            ranks[numbers] = np.maximum(ranks[numbers], np.uint8(claim.rank))
        for claim in self._claims.values():
            tops[claim.numbers] += ranks[claim.numbers] == claim.rank
        used = np.flatnonzero(named)
        findings = [
            f"claims: the {what} of a key is wrong"
            for what, wrong in (
                ("number", claimed.claims[used] != named[used]),
                ("rank", claimed.rank[used] != ranks[used]),
                ("number of the highest rank", claimed.tops[used] != tops[used]),
            )
            if wrong.any()
        ]
        return findings + claimed.check(used.astype(np.uint32), self.entries.index.rows_end)
