"""What one tier keeps of claims, within the share that each user may have there. Event loop only.

Beyond the share, the user's claim of the lowest priority lapses in this tier, of several the oldest; the last claim
that keeps anything is cut to the beginning of its prompt. A claim that has lapsed in one tier may hold in another one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.claimedkeys import KEYS_MAX, NO_NUMBERS, ClaimedKeys
from kvoffloadd.cache.memory.index import distinct, first_of_each
from kvoffloadd.cache.memory.keys import join_keys
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.quota import UNBOUNDED
from kvoffloadd.model import BoolArray, I64Array, U8Array, U32Array, U64Array
from kvoffloadd.scheduling.shares import share_left

SEARCHED_CLAIMS, SEARCHED_KEYS = 128, 1 << 15
"""The number of claims, and about the number of their keys, that one search for keys to let go looks at."""

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

    def find_all(self, keyspaces: Sequence[tuple[Keyspace, int]], keys: U64Array) -> I64Array:
        """Returns the row of each key, or -1: for each keyspace in turn, of the given number of the keys."""

    def set_aside(self, rows: U32Array) -> None:
        """Takes rows out of the order in which the tier lets keys go: they are claimed."""

    def let_claimed_go(self, rows: U32Array) -> None:
        """Returns rows to that order: they are not claimed any more."""


@dataclass(slots=True, eq=False)
class Kept:
    """What a tier keeps of a claim: the numbers of its claimed keys, of all groups, in the order in which they end in
    the prompt, and where each ends, in tokens.
    """

    numbers: U32Array
    ends: I64Array
    uses_before: int = 0  # of its last key


class TierClaims:
    """Holds the claims that a tier keeps. `claimed`: its table of claimed keys. `share`: the share of its pages that
    each user may have.
    """

    def __init__(self, tier: ClaimingTier, claimed: ClaimedKeys, share: float) -> None:
        self.claimed = claimed
        self.share = share
        self.num_named: Counter[int] = Counter()  # keys that claims name, by user, counted for each claim
        self.num_lapsed = self.num_cut = 0  # claims, since the start
        self.on_end: Callable[[Claim], object] = lambda claim: None  # called when the tier keeps nothing of it any more
        self.most_of: Callable[[int], int] = lambda uid: UNBOUNDED  # the pages that a user may have in the tier
        self._tier = tier
        self._of_user: dict[int, dict[Claim, Kept]] = {}
        self._searched = 0  # claims in the order of `victims` in which the last searches have found nothing

    def get(self, claim: Claim) -> Kept | None:
        """Returns what this tier keeps of a claim; None: nothing."""
        return self._of_user.get(claim.namespace.uid, {}).get(claim)

    def num_keys(self, claim: Claim) -> int:
        """Returns how many keys of a claim this tier keeps: fewer than it names if it was cut, 0 if it has lapsed."""
        kept = self.get(claim)
        return 0 if kept is None else len(kept.numbers)

    def prompt_of(self, claim: Claim) -> Prompt:
        """Returns the keys of a claim that this tier keeps."""
        if (kept := self.get(claim)) is None:
            return []
        return [
            (
                keyspace,
                int(kept.ends[indices[0]]) // keyspace.schema.tokens_per_key - 1,
                self.claimed.index.keys.take(kept.numbers[indices], axis=0),
            )
            for keyspace, indices in self.claimed.by_keyspace(kept.numbers)
        ]

    def __len__(self) -> int:
        return sum(map(len, self._of_user.values()))

    # --- begin and end ---

    def add(self, claim: Claim, prompt: Prompt) -> None:
        """Keeps a new claim, unless claims of a higher priority leave no room for it. Claims of its user that are in
        the way lapse, in their order.

        Raises:
            LimitError: too many keys have almost equal hashes. The claim was not added.
        """
        may_keep = self.budget_pages(claim.namespace.uid) and self._has_place(claim, prompt)
        if not may_keep or not self._make_room(claim):
            return
        keyspaces, keys = (
            [(keyspace, len(keys)) for keyspace, _, keys in prompt],
            join_keys(keys for _, _, keys in prompt),
        )
        ends = np.concatenate([_ends(keyspace, first, len(keys)) for keyspace, first, keys in prompt])
        numbers, newly = self.claimed.add(keyspaces, keys, claim.rank, self._tier.find_all(keyspaces, keys))
        order = np.argsort(ends, kind="stable")
        kept = Kept(numbers[order], ends[order], int(self.claimed.uses[numbers[order[-1]]]))
        self._of_user.setdefault(claim.namespace.uid, {})[claim] = kept
        self.num_named[claim.namespace.uid] += len(kept.numbers)
        claim.num_tiers += 1
        self._tier.set_aside(newly)
        self.keep_within(claim.namespace.uid)

    def _has_place(self, claim: Claim, prompt: Prompt) -> bool:
        """Returns whether claims of higher priorities leave room in the user's share. Without any, a claim that is too
        large is cut.
        """
        own = self._of_user.get(claim.namespace.uid, {})
        higher = [kept.numbers for other, kept in own.items() if other.priority > claim.priority]
        if not higher:
            return True
        theirs = distinct(np.concatenate(higher))
        pages = int(self.claimed.pages_each(theirs).sum())
        keyspaces = [(keyspace, len(keys)) for keyspace, _, keys in prompt]
        rows = self._tier.find_all(keyspaces, join_keys(keys for _, _, keys in prompt))
        new = (rows >= 0) & ~np.isin(rows, self.claimed.rows_of(theirs))
        each = np.repeat([self.claimed.pages_of(keyspace) for keyspace, _ in keyspaces], [n for _, n in keyspaces])
        return pages + int(each[new].sum()) <= self.budget_pages(claim.namespace.uid)

    def may_name(self, uid: int) -> int:
        """Returns how many keys the claims of a user may name in all, beside those of the other users."""
        return share_left(KEYS_MAX, self.num_named.total() - self.num_named[uid], 0)

    def _make_room(self, claim: Claim) -> bool:
        """Lets claims lapse until the user's claims may name the keys of this one, too. Returns False, and lets none
        lapse, if these would have to be claims of a higher priority.
        """
        uid = claim.namespace.uid
        over = self.num_named[uid] + claim.num_keys - self.may_name(uid)
        lapsing = list[Claim]()
        for other in sorted(self._of_user.get(uid, ()), key=lambda other: other.order) if over > 0 else ():
            if over <= 0 or other.priority > claim.priority:
                break
            lapsing.append(other)
            over -= len(self._of_user[uid][other].numbers)
        if over > 0:
            return False
        self._lapse(lapsing)
        return True

    def change_rank(self, claim: Claim, before: int) -> None:
        """Notes that a claim had this rank before."""
        if (kept := self.get(claim)) is not None:
            self._restore(claim.namespace, self.claimed.change_rank(kept.numbers, before, claim.rank))

    def remove(self, claims: Sequence[Claim]) -> None:
        """Keeps these claims no longer, as far as the tier keeps them."""
        left = list[tuple[Claim, U32Array]]()
        for claim in claims:
            own = self._of_user.get(claim.namespace.uid, {})
            if (kept := own.get(claim)) is None:
                continue
            claim.hits += self.hits(claim)
            self.num_named[claim.namespace.uid] -= len(kept.numbers)
            del own[claim]
            if not own:
                del self._of_user[claim.namespace.uid]
                self.num_named += Counter()  # drops zeros
            claim.num_tiers -= 1
            left.append((claim, kept.numbers))
            self.on_end(claim)
        self._release(left)

    def _release(self, left: Sequence[tuple[Claim, U32Array]]) -> None:
        """Lets go of what these claims have kept."""
        if left:
            released = self.claimed.remove(*_named(left))
            for namespace in {claim.namespace for claim, _ in left}:
                self._restore(namespace, released.lowered)
            if len(released.rows):
                self._tier.let_claimed_go(released.rows)

    def _restore(self, namespace: Namespace, lowered: U32Array) -> None:
        """Finds the rank of keys again that the claims of the highest rank have left."""
        own = self._of_user.get(namespace.uid, {})
        named = [(claim, kept.numbers) for claim, kept in own.items() if claim.namespace is namespace]
        if len(lowered) and named:
            self.claimed.restore(lowered, *_named(named))

    # --- the share of a user ---

    def budget_pages(self, uid: int) -> int:
        """Returns the pages that the claims of a user may keep."""
        return min(int(self.share * self._tier.num_pages), self.most_of(uid))

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
            before, now = self.claimed.relink(keyspace, lambda keys: self._tier.find_all([(keyspace, len(keys))], keys))
            self._tier.let_claimed_go(before)
            self._tier.set_aside(now)
            self.sizes_changed(keyspace)

    @changing
    def change_share(self, share: float) -> None:
        """Sets the share of each user, from now on."""
        self.share = share
        self.keep_all_within()

    @changing
    def keep_all_within(self) -> None:
        """Lets claims of all users lapse as `keep_within`, after their shares have changed."""
        for uid in list(self._of_user):
            self.keep_within(uid)

    @changing
    def keep_within(self, uid: int) -> None:
        """Lets claims of a user lapse, those first that come first in their order, until they keep no more than its
        share. Claims that keep nothing which others do not keep are not in the way.
        """
        if self.claimed.pages_of_user(uid) <= self.budget_pages(uid):
            return
        own = self._of_user[uid]
        ordered = sorted(own, key=lambda claim: claim.order, reverse=True)  # the last one to lapse first
        places = np.repeat(np.arange(len(ordered)), [len(own[claim].numbers) for claim in ordered])
        numbers = np.concatenate([own[claim].numbers for claim in ordered])
        # Of each key: the last claim to lapse that names it.
        keeper = np.full(self.claimed.index.rows_end, len(ordered))
        keeper[numbers[::-1]] = places[::-1]  # of equals, the first one is written last
        named = np.flatnonzero(keeper < len(ordered)).astype(np.uint32)
        pages = np.bincount(keeper[named], self.claimed.pages_each(named), len(ordered)).cumsum()
        fits = int(np.searchsorted(pages, self.budget_pages(uid), side="right"))  # claims that stay
        given_up = (keeper[numbers] >= fits) & (self.claimed.row[numbers] != 0)
        lapsing = [ordered[place] for place in np.flatnonzero(np.bincount(places[given_up])).tolist()]
        last = None if fits and pages[fits - 1] else ordered[fits]
        self._lapse([claim for claim in lapsing if claim is not last])
        if last is not None:
            self._cut(last)

    def _lapse(self, claims: Sequence[Claim]) -> None:
        self.num_lapsed += len(claims)
        self.remove(claims)

    def _cut(self, claim: Claim) -> None:
        """Cuts a claim, the only one of its user that keeps anything, to the beginning that fits into the share."""
        kept = self._of_user[claim.namespace.uid][claim]
        fits = self.claimed.pages_each(kept.numbers).cumsum() <= self.budget_pages(claim.namespace.uid)
        until = int(kept.ends[int(np.count_nonzero(fits))])  # in tokens: keys that end here or later are left out
        left = int(np.searchsorted(kept.ends, until))
        if not left:
            return self._lapse([claim])
        self.num_cut += 1
        self._leave_first(claim, kept, left)

    def _leave_first(self, claim: Claim, kept: Kept, left: int) -> None:
        """Lets all but the first keys of a claim go."""
        hits = self.hits(claim)
        cut, kept.numbers, kept.ends = kept.numbers[left:], kept.numbers[:left], kept.ends[:left]
        kept.uses_before = int(self.claimed.uses[kept.numbers[-1]]) - hits
        self.num_named[claim.namespace.uid] -= len(cut)
        self._release([(claim, cut)])

    def cut_before(self, groups: Sequence[tuple[Keyspace, U64Array]]) -> bool:
        """Cuts the claims that name one of these keys, of groups of one namespace, to the beginning of their prompts
        that names none. Returns whether there were any.
        """
        named = np.concatenate([NO_NUMBERS, *(self.claimed.numbers_of(keyspace, keys) for keyspace, keys in groups)])
        if not len(named):
            return False
        flags, ended = np.zeros(self.claimed.index.rows_end, bool), list[Claim]()
        flags[named] = True
        for claim, kept in list(self._of_user[groups[0][0].namespace.uid].items()):
            gone = np.flatnonzero(flags[kept.numbers])
            if len(gone) and (left := int(np.searchsorted(kept.ends, kept.ends[gone[0]]))):
                self._leave_first(claim, kept, left)
            elif len(gone):
                ended.append(claim)
        self.remove(ended)
        return True

    # --- the last resort ---

    def victims(
        self,
        wanted: Callable[[U32Array], BoolArray],
        count: int,
        of: Callable[[Claim], bool] | None = None,
    ) -> U32Array:
        """Returns up to `count` claimed rows to let go where nothing else is left, first to go first: of the user whose
        claims keep the most, in the order in which claims lapse, from the ends of the prompts. `wanted`: of some rows,
        those that may go, and would help. `of`: of which claims; None: of all.

        One search looks at a bounded number of claims and keys. If it finds nothing, the next one goes on behind them.
        """
        claimed, found, missing, keys = self.claimed, [NO_NUMBERS], count, 0
        first = self._searched if of is None else 0
        ordered = (pair for pair in self._in_order() if of is None or of(pair[0]))
        for claim, kept in itertools.islice(ordered, first, first + SEARCHED_CLAIMS):
            rows = claimed.rows_of(kept.numbers[claimed.rank[kept.numbers] == claim.rank][::-1])
            rows = rows[wanted(rows)][:missing]
            found.append(rows)
            missing -= len(rows)
            keys += len(kept.numbers)
            self._searched += of is None
            if missing <= 0 or keys >= SEARCHED_KEYS:
                break
        rows = np.concatenate(found)
        if of is None and (len(rows) or self._searched == first or self._searched >= len(self)):
            self._searched = 0
        victims: U32Array = rows[first_of_each(rows)]
        return victims

    def _in_order(self) -> Iterator[tuple[Claim, Kept]]:
        """Yields the claims in the order in which they give up what they keep, where nothing else is left."""
        for uid in sorted(self._of_user, key=self.claimed.pages_of_user, reverse=True):
            own = self._of_user[uid]
            for claim in sorted(own, key=lambda claim: claim.order):
                yield claim, own[claim]

    # --- figures ---

    def hits(self, claim: Claim) -> int:
        """Returns how often the last key of a claim was used since this tier keeps it."""
        kept = self.get(claim)
        return 0 if kept is None else int(self.claimed.uses[kept.numbers[-1]]) - kept.uses_before

    def holdings(self, claim: Claim) -> tuple[int, int]:
        """Returns the keys of a claim that are in the tier and kept there, and the pages that they take."""
        kept = self.get(claim)
        pages = self.claimed.pages_each(NO_NUMBERS if kept is None else kept.numbers)
        return int(np.count_nonzero(pages)), int(pages.sum())

    def totals(self) -> tuple[int, int]:
        """Returns the claimed keys in the tier, and the pages that they take."""
        return self.claimed.num_rows, sum(map(self.claimed.pages_of_user, self._of_user))

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
        counted = Counter({uid: sum(len(kept.numbers) for kept in own.values()) for uid, own in self._of_user.items()})
        if +counted != +self.num_named:
            findings.append("claims: the keys that a user's claims name are miscounted")
        if any(claimed.pages_of_user(uid) > self.budget_pages(uid) for uid in self._of_user):
            findings.append("claims: a user's claims keep more than its share")
        return findings + claimed.check(used.astype(np.uint32), self._tier.rows_end)


def _named(claims: Sequence[tuple[Claim, U32Array]]) -> tuple[U32Array, U8Array]:
    """Joins the numbers of keys of several claims. Returns them, with the rank of the claim of each."""
    ranks = np.array([claim.rank for claim, _ in claims], np.uint8)
    return np.concatenate([numbers for _, numbers in claims]), np.repeat(ranks, [len(numbers) for _, numbers in claims])


def _ends(keyspace: Keyspace, first: int, count: int) -> I64Array:
    """Returns where each of so many keys ends in the prompt, in tokens."""
    return np.arange(first + 1, first + count + 1) * keyspace.schema.tokens_per_key
