"""The quotas of users and of namespaces: which of them count a keyspace, and which keys may go for whose. Event loop
only.

A key counts for the quota of its user and for that of its namespace, where there are such, and both hold. Without
quotas, the object is false, and costs nothing.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence

from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.quota import UNBOUNDED, Quota
from kvoffloadd.config import QuotasConfig
from kvoffloadd.model import PAGE_BYTES, I64Array
from kvoffloadd.quotalimits import QuotaLimits


class Quotas:
    """Holds the quotas. `asking`: the quotas of the keys that need room now. `spares_own`: whether these keys are owed
    more than they have, so that others go first.
    """

    def __init__(self) -> None:
        self.asking: tuple[Quota, ...] = ()
        self.spares_own = False
        self._of_user: dict[str, Quota] = {}
        self._of_pattern: dict[str, Quota] = {}
        self._patterns: list[tuple[re.Pattern[str], Quota]] = []
        self._has_minimums = False

    def __bool__(self) -> bool:
        return bool(self._of_user or self._of_pattern)

    @property
    def has_minimums(self) -> bool:
        """Returns whether some quota has a minimum."""
        return self._has_minimums

    @property
    def all(self) -> list[Quota]:
        """Returns the quotas of users, then those of namespaces, in the order of the config."""
        return [*self._of_user.values(), *self._of_pattern.values()]

    def change(self, config: QuotasConfig, keyspaces: Iterable[Keyspace]) -> None:
        """Sets the quotas, from now on: these are all keyspaces that have keys. Quotas that stay keep their counts of
        events.
        """
        self._of_user = _changed("user", self._of_user, config.users)
        self._of_pattern = _changed("namespace", self._of_pattern, config.namespaces)
        self._patterns = [(re.compile(fnmatch.translate(name)), quota) for name, quota in self._of_pattern.items()]
        self._has_minimums = any(quota.min_pages for quota in self.all)
        self.asking, self.spares_own = (), False
        for quota in self.all:
            quota.pages = 0
            quota.numbers.clear()
        for keyspace in keyspaces:
            self.join(keyspace)

    # --- who counts what ---

    def of_namespace(self, namespace: Namespace) -> Quota | None:
        """Returns the first quota of namespaces with a pattern that the namespace's name matches."""
        return next((quota for pattern, quota in self._patterns if pattern.match(namespace.name)), None)

    def of(self, namespace: Namespace) -> tuple[Quota, ...]:
        """Returns the quotas that count the keys of a namespace."""
        both = self._of_user.get(str(namespace.uid)), self.of_namespace(namespace)
        return tuple(quota for quota in both if quota is not None)

    def of_place(self, uid: int, pattern: str) -> tuple[Quota, ...]:
        """Returns the quotas that count the keys of a user in the namespaces of this pattern; "": in others."""
        both = self._of_user.get(str(uid)), self._of_pattern.get(pattern)
        return tuple(quota for quota in both if quota is not None)

    def of_user(self, uid: int) -> Quota | None:
        """Returns the quota of a user."""
        return self._of_user.get(str(uid))

    def most_of(self, uid: int) -> int:
        """Returns the maximum of a user's quota."""
        quota = self.of_user(uid)
        return UNBOUNDED if quota is None else quota.max_pages

    def of_others(self, uid: int, numbers: I64Array) -> list[Quota]:
        """Returns the quotas with a minimum that count nothing of a user, whose keyspaces have these numbers."""
        own = set(numbers.tolist())
        return [
            quota
            for quota in self.all
            if quota.min_pages and quota is not self.of_user(uid) and quota.numbers.isdisjoint(own)
        ]

    def join(self, keyspace: Keyspace) -> None:
        """Counts a keyspace from now on, with what it has."""
        keyspace.quotas = self.of(keyspace.namespace) if self else ()
        for quota in keyspace.quotas:
            quota.pages += keyspace.taken_pages
            quota.numbers.add(keyspace.id)

    def leave(self, keyspace: Keyspace) -> None:
        """Counts a keyspace no longer: it has no slots any more."""
        for quota in keyspace.quotas:
            quota.numbers.discard(keyspace.id)

    # --- what may go for whom ---

    def begin(self, asking: tuple[Quota, ...]) -> int:
        """Notes the quotas of the keys that need room from now on. Returns how many pages they are owed: their own
        keys go after those of others until then.
        """
        self.asking, self.spares_own = asking, False
        return max((quota.lacking_pages for quota in asking), default=0)

    def spare_pages(self, quotas: Iterable[Quota]) -> int:
        """Returns how many pages keys that all of these quotas count may lose now."""
        return min(map(self._spare, quotas), default=UNBOUNDED)

    def _spare(self, quota: Quota) -> int:
        if quota in self.asking:
            return 0 if self.spares_own and quota.lacking_pages else UNBOUNDED
        return max(0, quota.pages - quota.min_pages) if quota.min_pages else UNBOUNDED

    # --- figures ---

    def figures(self, uid: int | None = None) -> list[dict[str, object]]:
        """Returns what each quota grants and what is used of it, for `status`; with `uid`, only of this user's."""
        quotas = self.all if uid is None else [quota for quota in [self.of_user(uid)] if quota is not None]
        return [
            {
                "kind": quota.kind,
                "name": quota.name,
                "memory_bytes": quota.pages * PAGE_BYTES,
                "memory_min_bytes": quota.min_pages * PAGE_BYTES,
                "memory_max_bytes": 0 if quota.max_pages == UNBOUNDED else quota.max_pages * PAGE_BYTES,
                "keys_evicted": quota.keys_evicted,
                "keys_refused": quota.keys_refused,
            }
            for quota in quotas
        ]

    def check(self, keyspaces: Mapping[int, Keyspace]) -> list[str]:
        """Returns a list of errors: what the quotas have counted, and their keyspaces, must agree."""
        findings = [
            f"quotas: space {keyspace.id} is not counted by those that hold for it"
            for keyspace in keyspaces.values()
            if keyspace.quotas != (self.of(keyspace.namespace) if self else ())
        ]
        for quota in self.all:
            own = [keyspace for keyspace in keyspaces.values() if quota in keyspace.quotas]
            found = sum(keyspace.taken_pages for keyspace in own), {keyspace.id for keyspace in own}
            if found != (quota.pages, quota.numbers):
                findings.append(f"quotas: those of {quota.kind} {quota.name} have {found}, counted {quota.pages}")
        return findings


def _changed(kind: str, before: Mapping[str, Quota], limits: Sequence[QuotaLimits]) -> dict[str, Quota]:
    quotas = {}
    for limit in limits:
        quota = quotas[limit.name] = before.get(limit.name) or Quota(kind, limit.name)
        quota.min_pages = -(-limit.memory_min_bytes // PAGE_BYTES)
        quota.max_pages = limit.memory_max_bytes // PAGE_BYTES if limit.memory_max_bytes else UNBOUNDED
    return quotas
