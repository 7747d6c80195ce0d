"""What one tier keeps of claims, within the share that each user may have there. Event loop only.

Beyond the share, the user's claim of the lowest priority lapses in this tier, of several the oldest; the last claim
that keeps anything is cut to the beginning of its prompt. A claim that has lapsed in one tier may hold in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.claimedkeys import NO_NUMBERS, ClaimedGroup, ClaimedKeys
from kvoffloadd.cache.memory.index import distinct, first_of_each
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.errors import LimitError
from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array

Prompt = Sequence[tuple[Keyspace, int, U64Array]]
"""The groups of a prompt: the position of the first of these keys, and the keys, which are distinct."""


class ClaimingTier(Protocol):
    """A tier as claims see it."""

    @property
    def num_pages(self) -> int:
        """Returns the pages of the whole tier."""

    @property
    def rows_end(self) -> int:
        """Returns the end of its rows: every row is below it."""

    def find(self, keyspace: Keyspace, keys: U64Array) -> I64Array:
        """Returns the row of each key, or -1."""

    def set_aside(self, rows: U32Array) -> None:
        """Takes rows out of the order in which the tier lets keys go: they are claimed."""

    def readmit(self, rows: U32Array) -> None:
        """Returns rows to that order: they are not claimed any more."""


@dataclass(slots=True, eq=False)
class Kept:
    """What a tier keeps of a claim: for each group, numbers of claimed keys in prompt order, and where each ends, in
    tokens.
    """

    groups: list[tuple[ClaimedGroup, U32Array, I64Array]]
    uses_before: int = 0  # of its last key

    @property
    def numbers(self) -> U32Array:
        """Returns the numbers of all its keys."""
        return np.concatenate([NO_NUMBERS, *(numbers for _, numbers, _ in self.groups)])

    @property
    def num_keys(self) -> int:
        """Returns the number of its keys."""
        return sum(len(numbers) for _, numbers, _ in self.groups)

    @property
    def last(self) -> int:
        """Returns the number of the key with which its prompt ends."""
        _, numbers, _ = max(self.groups, key=lambda group: int(group[2][-1]))
        return int(numbers[-1])


class TierClaims:
    """Holds the claims that a tier keeps. `claimed`: its table of claimed keys. `share`: the share of its pages that
    each user may have.
    """

    def __init__(self, tier: ClaimingTier, claimed: ClaimedKeys, share: float) -> None:
        self.claimed = claimed
        self.share = share
        self.num_lapsed = self.num_cut = 0  # claims, since the start
        self.on_end: Callable[[Claim], object] = lambda claim: None  # called when the tier keeps nothing of it any more
        self._tier = tier
        self._of_user: dict[int, dict[Claim, Kept]] = {}

    def get(self, claim: Claim) -> Kept | None:
        """Returns what this tier keeps of a claim; None: nothing."""
        return self._of_user.get(claim.namespace.uid, {}).get(claim)

    def __len__(self) -> int:
        return sum(map(len, self._of_user.values()))

    # --- begin and end ---

    def add(self, claim: Claim, prompt: Prompt) -> None:
        """Keeps a new claim, if no claim of a higher priority is in its way. Claims of its user that are in the way
        lapse, in their order.

        Raises:
            LimitError: too many keys have almost equal hashes. The claim was not added.
        """
        if not self._make_room(claim, prompt):
            return
        kept, newly = Kept([]), [NO_NUMBERS]
        try:
            for keyspace, first, keys in prompt:
                group, numbers, rows = self.claimed.add(keyspace, keys, claim.rank, self._tier.find(keyspace, keys))
                ends = np.arange(first + 1, first + len(keys) + 1) * keyspace.schema.tokens_per_key
                kept.groups.append((group, numbers, ends))
                newly.append(rows)
        except LimitError:
            self._release(claim, kept.groups)
            raise
        kept.uses_before = int(self.claimed.uses[kept.last])
        self._of_user.setdefault(claim.namespace.uid, {})[claim] = kept
        claim.num_tiers += 1
        self._tier.set_aside(np.concatenate(newly))
        self.keep_within(claim.namespace.uid)

    def _make_room(self, claim: Claim, prompt: Prompt) -> bool:
        """Lets claims lapse until the user's claims may name these keys, too. Returns False if these would have to be
        claims of a higher priority.
        """
        uid = claim.namespace.uid
        while True:
            fresh = sum(self.claimed.num_fresh(keyspace, keys) for keyspace, _, keys in prompt)
            if fresh <= self.claimed.left(uid):
                return True
            own = sorted(self._of_user.get(uid, ()), key=lambda other: other.order)
            if not own or own[0].priority > claim.priority:
                return False
            some = own[: len(own) // 16 + 1]  # several at once: there may be a thousand small ones in the way
            self._lapse([other for other in some if other.priority <= claim.priority])

    def change_rank(self, claim: Claim, before: int) -> None:
        """Notes that a claim had this rank before."""
        if (kept := self.get(claim)) is not None:
            self._restore(claim.namespace, [self.claimed.change_rank(kept.numbers, before, claim.rank)])

    def remove(self, claims: Sequence[Claim]) -> None:
        """Keeps these claims no longer, as far as the tier keeps them."""
        freed, lowered = list[U32Array](), dict[Namespace, list[U32Array]]()
        for claim in claims:
            own = self._of_user.get(claim.namespace.uid, {})
            if (kept := own.get(claim)) is None:
                continue
            claim.hits += self.hits(claim)
            del own[claim]
            if not own:
                del self._of_user[claim.namespace.uid]
            claim.num_tiers -= 1
            for group, numbers, _ in kept.groups:
                released = self.claimed.remove(group, numbers, claim.rank)
                freed.append(released.rows)
                lowered.setdefault(claim.namespace, []).append(released.lowered)
            self.on_end(claim)
        for namespace, numbers_of in lowered.items():
            self._restore(namespace, numbers_of)
        self._readmit(freed)

    def _release(self, claim: Claim, groups: Sequence[tuple[ClaimedGroup, U32Array, I64Array]]) -> None:
        """Takes a claim off these keys."""
        released = [self.claimed.remove(group, numbers, claim.rank) for group, numbers, _ in groups]
        self._restore(claim.namespace, [each.lowered for each in released])
        self._readmit([each.rows for each in released])

    def _readmit(self, freed: Sequence[U32Array]) -> None:
        rows = np.concatenate([NO_NUMBERS, *freed])
        if len(rows):
            self._tier.readmit(rows)

    def _restore(self, namespace: Namespace, lowered: Sequence[U32Array]) -> None:
        """Finds the rank of keys again that the claims of the highest rank have left."""
        claimed = self.claimed
        marked = np.concatenate([NO_NUMBERS, *lowered])
        marked = distinct(marked[claimed.claims[marked] > 0])  # the others are free, since later claims ended, too
        marked = marked[claimed.rank[marked] == 0]
        if not len(marked):
            return
        wanted = np.zeros(int(marked[-1]) + 1, bool)
        wanted[marked] = True
        for claim, kept in self._of_user.get(namespace.uid, {}).items():
            if claim.namespace is namespace:
                numbers = kept.numbers
                numbers = numbers[numbers < len(wanted)]
                claimed.restore(numbers[wanted[numbers]], claim.rank)

    # --- the share of a user ---

    @property
    def budget_pages(self) -> int:
        """Returns the pages that the claims of one user may keep."""
        return int(self.share * self._tier.num_pages)

    def rows_came(self, rows: U32Array) -> None:
        """Notes that claimed keys have come to the tier, in these rows."""
        self._tier.set_aside(rows)
        for uid in self.claimed.users_of(rows):
            self.keep_within(uid)

    @changing
    def sizes_changed(self, keyspace: Keyspace) -> None:
        """Notes that a key of this keyspace takes another number of pages."""
        if self.claimed.has(keyspace):
            self.claimed.count_pages(keyspace)
            self.keep_within(keyspace.namespace.uid)

    @changing
    def rows_changed(self, keyspace: Keyspace) -> None:
        """Notes that the keys of this keyspace may have other rows."""
        if self.claimed.has(keyspace):
            before, now = self.claimed.relink(keyspace, lambda keys: self._tier.find(keyspace, keys))
            self._readmit([before])
            self._tier.set_aside(now)
            self.sizes_changed(keyspace)

    @changing
    def change_share(self, share: float) -> None:
        """Sets the share of each user, from now on."""
        self.share = share
        for uid in list(self._of_user):
            self.keep_within(uid)

    @changing
    def keep_within(self, uid: int) -> None:
        """Lets claims of a user lapse until they keep no more than its share."""
        while (over := self.claimed.pages_of_user(uid) - self.budget_pages) > 0:
            ordered = iter(sorted(self._of_user[uid], key=lambda claim: claim.order))
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
        kept = self.get(claim)
        return 0 if kept is None else int(self.claimed.pages_each(kept.numbers).sum())

    def _lapse(self, claims: Sequence[Claim]) -> None:
        self.num_lapsed += len(claims)
        self.remove(claims)

    def _cut(self, claim: Claim) -> None:
        """Cuts a claim, the only one of its user that keeps anything, to what its user's share has room for."""
        kept = self._of_user[claim.namespace.uid][claim]
        ends = np.concatenate([ends for _, _, ends in kept.groups])
        order = np.argsort(ends, kind="stable")
        fits = self.claimed.pages_each(kept.numbers)[order].cumsum() <= self.budget_pages
        until = int(ends[order][~fits].min())  # in tokens: keys that end here or later are left out
        if until == ends.min():
            return self._lapse([claim])
        self.num_cut += 1
        before = [(group, numbers, ends, int(np.searchsorted(ends, until))) for group, numbers, ends in kept.groups]
        hits = self.hits(claim)
        kept.groups = [(group, numbers[:left], ends[:left]) for group, numbers, ends, left in before if left]
        kept.uses_before = int(self.claimed.uses[kept.last]) - hits
        self._release(claim, [(group, numbers[left:], ends) for group, numbers, ends, left in before])

    # --- the last resort ---

    def victims(self, wanted: Callable[[U32Array], BoolArray], count: int) -> U32Array:
        """Returns up to `count` claimed rows to let go where nothing else is left, first to go first: of the user whose
        claims keep the most, in the order in which claims lapse, from the ends of the prompts. `wanted`: of some rows,
        those that may go, and would help.
        """
        claimed, found, missing = self.claimed, [NO_NUMBERS], count
        for uid in sorted(self._of_user, key=claimed.pages_of_user, reverse=True):
            for claim in sorted(self._of_user[uid], key=lambda claim: claim.order):
                for _, numbers, _ in self._of_user[uid][claim].groups:
                    rows = claimed.rows_of(numbers[claimed.rank[numbers] == claim.rank][::-1])
                    rows = rows[wanted(rows)][:missing]
                    found.append(rows)
                    missing -= len(rows)
                if missing <= 0:
                    break
            if missing <= 0:
                break
        rows = np.concatenate(found)
        victims: U32Array = rows[first_of_each(rows)][:count]
        return victims

    # --- figures ---

    def hits(self, claim: Claim) -> int:
        """Returns how often the last key of a claim was used since this tier keeps it."""
        kept = self.get(claim)
        return 0 if kept is None else int(self.claimed.uses[kept.last]) - kept.uses_before

    def holdings(self, claim: Claim) -> tuple[int, int]:
        """Returns the keys of a claim that are in the tier and kept there, and the pages that they take."""
        kept = self.get(claim)
        pages = self.claimed.pages_each(NO_NUMBERS if kept is None else kept.numbers)
        return int(np.count_nonzero(pages)), int(pages.sum())

    def totals(self) -> tuple[int, int]:
        """Returns the claimed keys in the tier, and the pages that they take."""
        pages = sum(map(self.claimed.pages_of_user, self._of_user))
        return int(self.claimed.rows.sum()), pages

    def check(self) -> list[str]:
        """Returns a list of errors: what the claims name, and the table of claimed keys, must agree."""
        claimed = self.claimed
        end = claimed.index.rows_end
        named, ranks, tops = np.zeros(end, np.uint16), np.zeros(end, np.uint8), np.zeros(end, np.uint16)
        all_kept = [(claim, kept.numbers) for own in self._of_user.values() for claim, kept in own.items()]
        for claim, numbers in all_kept:
            named[numbers] += np.uint16(1)
            ranks[numbers] = np.maximum(ranks[numbers], np.uint8(claim.rank))
        for claim, numbers in all_kept:
            tops[numbers] += ranks[numbers] == claim.rank
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
        if any(claimed.pages_of_user(uid) > self.budget_pages for uid in self._of_user):
            findings.append("claims: a user's claims keep more than its share")
        return findings + claimed.check(used.astype(np.uint32), self._tier.rows_end)
