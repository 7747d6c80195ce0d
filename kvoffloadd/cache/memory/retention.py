"""Retention: claims of clients that keys be kept for a time. Event loop only.

A claim names keys of a prompt, whether they are stored yet or not, a priority, and when it ends. It is soft: claimed
keys go after all others, so a store finds room even if everything is claimed. It is bounded: in each tier, what a
user's claims keep takes at most a share (`TierClaims`). This is the soft form of retention that engines describe with
`kv.retain`; hard pins starve others.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.tierclaims import Prompt, TierClaims
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, U64Array
from kvoffloadd.scheduling.shares import share_left

CLAIMS_MAX, CLAIMS_PER_USER = 4096, 1024
"""The number of claims of all users, of which each may have half of what the others leave, and of one user. They are
saved in a turn of the event loop.
"""

ENDS_SPARE = 64
"""The number of ends that may be remembered of claims that ended earlier or were extended."""

ENDED_CLAIMS, ENDED_KEYS = 64, 1 << 14
"""The number of claims that one turn of the event loop takes out of the tiers, and about the number of their keys."""


@dataclass(slots=True)
class RetentionCounters:
    """Counts claims since the start."""

    made: int = 0
    restored: int = 0
    expired: int = 0


class Retention:
    """Holds the claims of all users. `memory`: the claims that memory keeps; other tiers are attached."""

    def __init__(self, memory: TierClaims) -> None:
        self.memory = memory
        self.disk: TierClaims | None = None
        self.counters = RetentionCounters()
        self.clock: Callable[[], float] = time.monotonic
        self.on_change: Callable[[], object] = lambda: None  # called when a claim has begun, changed or ended
        # Called when the last claim of a namespace has ended.
        self.on_unclaimed: Callable[[Namespace], object] = lambda namespace: None
        # Called with the time at which `expire` must be called.
        self.wake: Callable[[float], object] = lambda at_s: None
        self._claims: dict[int, Claim] = {}  # by number, the oldest first
        self._by_namespace: dict[Namespace, dict[int, Claim]] = {}
        self._by_name: dict[tuple[Namespace, str], Claim] = {}
        self._ends: list[tuple[float, int]] = []  # a heap, with entries of claims that ended early
        self._ended: deque[Claim] = deque()  # claims that tiers still keep, until the next turns
        self._num_ended: Counter[Namespace] = Counter()  # of them, by namespace
        self._last = 0
        memory.on_end = self._forget_ended

    def __len__(self) -> int:
        return len(self._claims)

    def attach_disk(self, disk: TierClaims) -> None:
        """Adds the disk tier."""
        self.disk = disk
        disk.on_end = self._forget_ended

    @property
    def tiers(self) -> list[TierClaims]:
        """Returns the tiers that keep claims."""
        return [self.memory] if self.disk is None else [self.memory, self.disk]

    @property
    def claims(self) -> list[Claim]:
        """Returns all claims, the oldest first."""
        return list(self._claims.values())

    # --- begin and end ---

    @changing
    def retain(
        self, namespace: Namespace, prompt: Prompt, *, priority: int, seconds: float, name: str = ""
    ) -> Claim | None:
        """Makes a claim of these keys, at least one. The claim of this name in the namespace ends, if there is one.
        Claims of the same user that are in the way lapse, in their order. Returns None if this claim would be the first
        to lapse in each tier, and was therefore not made.

        Raises:
            LimitError: the request names more keys than all claims of the user may name, or too many keys have almost
                equal hashes.
        """
        prompt = [(keyspace, first, keys) for keyspace, first, keys in prompt if len(keys)]
        self._check_number(namespace, prompt)
        old = self.named(namespace, name)
        hits = 0
        if old is not None:
            hits = self.hits(old)
            self._take([old])
        if not self._make_room(namespace.uid, priority):
            return None
        claim = Claim(self._last + 1, namespace, name, priority, self.clock() + seconds, hits=hits)
        if not self._begin(claim, prompt):
            return None
        self.counters.made += 1
        return claim

    @changing
    def restore(self, claim: Claim, prompt: Prompt) -> bool:
        """Makes a claim again that an earlier run has made, after all that are here. Its number changes if it is not
        higher than theirs. Returns whether a tier keeps it. Raises as `retain`.
        """
        self._check_number(claim.namespace, prompt)
        if not self._make_room(claim.namespace.uid, claim.priority):
            return False
        claim.number = max(claim.number, self._last + 1)
        if not self._begin(claim, prompt):
            return False
        self.counters.restored += 1
        return True

    def named(self, namespace: Namespace, name: str) -> Claim | None:
        """Returns the claim of this name in the namespace, if there is one."""
        return self._by_name.get((namespace, name)) if name else None

    def prompt_of(self, claim: Claim) -> Prompt:
        """Returns the keys of a claim that some tier keeps: those of the tier that keeps the most of them."""
        prompts = [tier.prompt_of(claim) for tier in self.tiers]
        return max(prompts, key=lambda prompt: sum(len(keys) for _, _, keys in prompt))

    def _check_number(self, namespace: Namespace, prompt: Prompt) -> None:
        count = sum(len(keys) for _, _, keys in prompt)
        if count > (most := min(tier.may_name(namespace.uid) for tier in self.tiers)):
            raise LimitError(f"{count} keys in one claim are more than the {most} of all claims: claim fewer of them")

    def _begin(self, claim: Claim, prompt: Prompt) -> bool:
        """Adds a claim to the tiers. Returns whether one of them keeps something of it."""
        self._last = claim.number
        claim.tokens = max((first + len(keys)) * keyspace.schema.tokens_per_key for keyspace, first, keys in prompt)
        claim.num_keys = sum(len(keys) for _, _, keys in prompt)
        self._claims[claim.number] = self._by_namespace.setdefault(claim.namespace, {})[claim.number] = claim
        if claim.name:
            self._by_name[claim.namespace, claim.name] = claim
        claim.num_tiers += 1  # or it would be forgotten as soon as one tier does not keep it
        try:
            for tier in self.tiers:
                tier.add(claim, prompt)
        except LimitError:
            claim.num_tiers -= 1
            self._take([claim])
            self._forget(claim)
            raise
        claim.num_tiers -= 1
        if not claim.is_in_force:
            self._forget(claim)
            return False
        self._schedule(claim)
        return True

    @changing
    def sizes_changed(self, keyspace: Keyspace) -> None:
        """Notes that more is known of a keyspace: the sizes of its parts, or what they are made of."""
        self.memory.sizes_changed(keyspace)
        if self.has(keyspace.namespace):
            self.on_change()

    def change_shares(self, memory: float, disk: float) -> None:
        """Sets the shares of memory and of disk that the claims of each user may keep, from now on."""
        self.memory.change_share(memory)
        if self.disk is not None:
            self.disk.change_share(disk)

    def _make_room(self, uid: int, priority: int) -> bool:
        """Ends the user's first claim to lapse if the user has too many. Returns False if that has a higher priority
        than this, or if there is none.
        """
        own = [claim for claims in self._of(uid) for claim in claims.values()]
        if len(own) < min(CLAIMS_PER_USER, share_left(CLAIMS_MAX, len(self) - len(own), 0)):
            return True
        least = min(own, key=lambda claim: claim.order, default=None)
        if least is None or least.priority > priority:
            return False
        self.memory.num_lapsed += 1
        self._take([least])
        return True

    def _of(self, uid: int) -> Iterable[dict[int, Claim]]:
        return [claims for namespace, claims in self._by_namespace.items() if namespace.uid == uid]

    def _schedule(self, claim: Claim) -> None:
        self.on_change()
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
            claim.restored = False
            self._schedule(claim)
            if priority is not None and priority != claim.priority:
                before, claim.priority = claim.rank, priority
                for tier in self.tiers:
                    tier.change_rank(claim, before)

    @changing
    def forget(self, claims: Iterable[Claim]) -> None:
        """Ends these claims, as a client wishes."""
        self._end(claims)

    @changing
    def clear(self, namespace: Namespace, *, restored_only: bool = False) -> None:
        """Ends all claims of a namespace, since its keys are cleared; or those that an earlier run made."""
        claims = self._by_namespace.get(namespace, {}).values()
        self._end([claim for claim in claims if claim.restored or not restored_only])

    @changing
    def forget_keys(self, groups: Sequence[tuple[Keyspace, U64Array]]) -> None:
        """Cuts claims of keys that are deleted, of groups of one namespace, to what comes before these in their
        prompts.
        """
        were_any = [tier.cut_before(groups) for tier in self.tiers]
        if any(were_any):
            self.on_change()

    @changing
    def expire(self) -> float | None:
        """Ends claims that are over, and takes some of those that have ended out of the tiers. Returns when it must be
        called again; None: not before the next claim is made or ends.
        """
        now, over = self.clock(), 0
        while self._ends and self._ends[0][0] <= now and over < ENDED_CLAIMS:
            ends_s, number = heapq.heappop(self._ends)
            claim = self._claims.get(number)
            if claim is not None and claim.ends_s == ends_s:
                self._leave(claim)
                over += 1
        self.counters.expired += over
        taken, keys = list[Claim](), 0
        while self._ended and len(taken) < ENDED_CLAIMS and keys < ENDED_KEYS:
            taken.append(self._ended.popleft())
            keys += taken[-1].num_keys
        self._take(taken)
        for claim in taken:
            self._num_ended[claim.namespace] -= 1
            if not self._num_ended[claim.namespace]:
                del self._num_ended[claim.namespace]
                self._notify_unclaimed(claim.namespace)
        if self._ended:
            return now
        return self._ends[0][0] if self._ends else None

    def _end(self, claims: Iterable[Claim]) -> None:
        """Ends claims at once. The tiers let go what they keep of them within the next turns."""
        ending = list(claims)
        for claim in ending:
            self._leave(claim)
        if ending:
            self.wake(self.clock())

    def _leave(self, claim: Claim) -> None:
        self._ended.append(claim)
        self._num_ended[claim.namespace] += 1
        self._forget(claim)

    def _take(self, claims: Sequence[Claim]) -> None:
        """Takes claims out of the tiers."""
        for tier in self.tiers:
            tier.remove(claims)

    def _forget_ended(self, claim: Claim) -> None:
        """Forgets a claim unless some tier keeps something of it."""
        if not claim.is_in_force:
            self._forget(claim)

    def _forget(self, claim: Claim) -> None:
        if claim.number not in self._claims:
            return
        self.on_change()
        del self._claims[claim.number]
        siblings = self._by_namespace[claim.namespace]
        del siblings[claim.number]
        if not siblings:
            del self._by_namespace[claim.namespace]
            self._notify_unclaimed(claim.namespace)
        if self._by_name.get((claim.namespace, claim.name)) is claim:
            del self._by_name[claim.namespace, claim.name]

    def _notify_unclaimed(self, namespace: Namespace) -> None:
        if not self.has(namespace):
            self.on_unclaimed(namespace)

    def has(self, namespace: Namespace) -> bool:
        """Returns whether tiers keep something of this namespace. Until they have let all of it go, it must not be
        forgotten: its successor's claims would find the same rows on disk.
        """
        return namespace in self._by_namespace or namespace in self._num_ended

    # --- figures ---

    def hits(self, claim: Claim) -> int:
        """Returns how often the last key of a claim was used, those of its name's earlier claims included."""
        return claim.hits + self.memory.hits(claim)

    def figures(self) -> dict[str, int]:
        """Returns counters and gauges, for `status`."""
        keys, pages = self.memory.totals()
        disk_keys, disk_pages = (0, 0) if self.disk is None else self.disk.totals()
        return {
            "claims": len(self._claims),
            "memory_keys": keys,
            "memory_bytes": pages * PAGE_BYTES,
            "disk_keys": disk_keys,
            "disk_bytes": disk_pages * PAGE_BYTES,
            "claims_made": self.counters.made,
            "claims_restored": self.counters.restored,
            "claims_expired": self.counters.expired,
            "claims_lapsed": self.memory.num_lapsed,
            "claims_cut": self.memory.num_cut,
            "disk_claims_lapsed": 0 if self.disk is None else self.disk.num_lapsed,
            "disk_claims_cut": 0 if self.disk is None else self.disk.num_cut,
        }

    def describe(self, claim: Claim) -> dict[str, Any]:
        """Returns the figures of one claim: see `messages.ClaimFigures`."""
        keys, pages = self.memory.holdings(claim)
        disk_keys, disk_pages = (0, 0) if self.disk is None else self.disk.holdings(claim)
        return {
            "number": claim.number,
            "name": claim.name,
            "namespace": claim.namespace.name,
            "uid": claim.namespace.uid,
            "priority": claim.priority,
            "left_s": max(0.0, claim.ends_s - self.clock()),
            "tokens": claim.tokens,
            "keys": claim.num_keys,
            "memory_keys": keys,
            "memory_bytes": pages * PAGE_BYTES,
            "disk_keys": disk_keys,
            "disk_bytes": disk_pages * PAGE_BYTES,
            "hits": self.hits(claim),
        }

    def check(self) -> list[str]:
        """Returns a list of errors: the claims here, and what the tiers keep of them, must agree."""
        findings = [finding for tier in self.tiers for finding in tier.check()]
        claims = [*self._claims.values(), *self._ended]
        kept = [sum(tier.get(claim) is not None for tier in self.tiers) for claim in claims]
        if kept != [claim.num_tiers for claim in claims] or not all(kept[: len(self._claims)]):
            findings.append("claims: the tiers that keep a claim are miscounted")
        if sum(map(len, self.tiers)) != sum(kept):
            findings.append("claims: a tier keeps a claim that has ended")
        return findings
