"""A session's claims: what it may claim, change and see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.keys import has_duplicates, join_keys
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.retention import Retention
from kvoffloadd.errors import DuplicateError, ForbiddenError, MessageError, UnknownNameError
from kvoffloadd.model import U64Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.scheduling.steps import Steps

TOKENS_END = 1 << 48
"""Of the length of a prompt, as a message can have it."""

STEP_KEYS = 4096
"""The number of keys from which on a claim is checked in one step, and made in the next one."""

LISTED_KEYS, LISTED_CLAIMS = 1 << 14, 256
"""The number of keys of the claims that one step describes, and the number of claims in a reply."""


@dataclass(frozen=True, slots=True, eq=False)
class SessionClaims:
    """Carries out requests about claims. `namespace`: the session's; an observer without one acts on the claims of its
    user, `uid`, or of all users (None).
    """

    retention: Retention
    namespace: Namespace | None
    uid: int | None
    role: str

    def answer(
        self,
        message: m.Retain | m.Forget | m.Claims,
        keys_of: Callable[[list[m.GroupKeys]], list[tuple[Keyspace, int, U64Array]]],
        space: Callable[[int], Keyspace],
    ) -> m.Reply | Steps[m.Reply]:
        """Carries out a request. `keys_of`: returns the keys that a message names; `space`: see `retain`."""
        if isinstance(message, m.Retain):
            return self.retain(message, keys_of(message.groups) if message.groups else [], space)
        return self.forget(message) if isinstance(message, m.Forget) else self.listing(message)

    def retain(
        self, message: m.Retain, groups: Sequence[tuple[Keyspace, int, U64Array]], space: Callable[[int], Keyspace]
    ) -> Steps[m.Reply]:
        """Makes a claim of these keys, or changes the claims of the given name if there are none. `space`: returns the
        keyspace of a group, which may be cleared between two steps.

        Raises:
            DuplicateError: a key is named twice.
            ForbiddenError: the session is an observer's, and names keys.
            LimitError: there are more keys than all claims of the user may name.
            MessageError: neither keys nor claims are named, or the prompt is too long.
            UnknownNameError: no claim has this name or number.
        """
        if self.namespace is None or not message.groups:
            return self._extend(message)
        if self.role == "observer":
            raise ForbiddenError("an observer may name claims, but no keys")
        if message.number or not any(len(keys) for _, _, keys in groups):
            raise MessageError("a retain with groups names keys, and no number of a claim")
        _check_distinct(groups)
        for keyspace, first, keys in groups:
            if (first + len(keys)) * keyspace.schema.tokens_per_key >= TOKENS_END:
                raise MessageError(f"group {keyspace.schema.group}: no prompt is as long as `first` makes this one")
        if sum(len(keys) for _, _, keys in groups) > STEP_KEYS:
            yield
            groups = [(space(keyspace.schema.group), first, keys) for keyspace, first, keys in groups]
        priority = m.PRIORITY_DEFAULT if message.priority is None else message.priority
        claim = self.retention.retain(
            self.namespace, groups, priority=priority, seconds=message.seconds, name=message.name
        )
        return _told(message.seq, [] if claim is None else [claim])

    def _extend(self, message: m.Retain) -> m.Reply:
        claims = self.named(message.name, message.number)
        self.retention.extend(claims, message.seconds, message.priority)
        return _told(message.seq, claims)

    def forget(self, message: m.Forget) -> m.Reply:
        """Ends claims. Raises UnknownNameError if there are none of this name or number, MessageError if the request
        has neither.
        """
        claims = self.named(message.name, message.number)
        reply = _told(message.seq, claims)
        self.retention.forget(claims)
        return reply

    def listing(self, message: m.Claims) -> Steps[m.Reply]:
        """Lists claims, the oldest first."""
        listed, keys = list[m.ClaimFigures](), 0
        for claim in self._visible(message.cursor):
            if len(listed) == LISTED_CLAIMS:
                return m.Claimed(seq=message.seq, claims=listed, cursor=claim.number)
            if claim.is_in_force:
                listed.append(m.ClaimFigures(**self.retention.describe(claim)))
            keys += claim.num_keys
            if keys >= LISTED_KEYS:
                keys = 0
                yield
        return m.Claimed(seq=message.seq, claims=listed, cursor=0)

    def _visible(self, first: int) -> Iterator[Claim]:
        """Returns the claims that this session may see, those with numbers from `first` on."""
        for claim in self.retention.claims:
            if claim.number >= first and self._owns(claim):
                yield claim

    def named(self, name: str, number: int) -> list[Claim]:
        """Returns the claims of this name, or the claim of this number. Raises as `forget`."""
        if bool(name) == bool(number):
            raise MessageError("the request names neither keys nor claims, or claims by a name and a number")
        claims = [
            claim for claim in self._visible(number) if (claim.number == number if number else claim.name == name)
        ]
        if not claims:
            what = f"is named {name!r}" if name else f"has the number {number}"
            raise UnknownNameError(f"no claim {what}: it has ended, or was never made")
        return claims

    def _owns(self, claim: Claim) -> bool:
        if self.namespace is not None:
            return claim.namespace is self.namespace
        return self.uid in (None, claim.namespace.uid)


def _check_distinct(groups: Sequence[tuple[Keyspace, int, U64Array]]) -> None:
    """Raises DuplicateError if a key is named twice in a group."""
    if len(groups) > 1:  # all at once first: there may be hundreds of groups
        marked = join_keys(keys for _, _, keys in groups)
        counts = [len(keys) for _, _, keys in groups]
        marked[:, 0] ^= np.repeat(np.arange(len(groups), dtype=np.uint64), counts) << np.uint64(48)
        if not has_duplicates(marked):
            return
    for keyspace, _, keys in groups:
        if has_duplicates(keys):
            raise DuplicateError(f"group {keyspace.schema.group}: a key is claimed twice in one request")


def _told(seq: int, claims: Sequence[Claim]) -> m.Reply:
    return m.Retained(seq=seq, claims=len(claims), keys=sum(claim.num_keys for claim in claims))
