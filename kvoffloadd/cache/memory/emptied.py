"""Namespaces of which no key may be left. Whoever comes or goes looks at these alone, not at all that there are."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffloadd.cache.memory.namespace import Namespace


class Emptied:
    """A queue of them for each user. A namespace that nobody uses, and that has no keys, is always in it."""

    def __init__(self) -> None:
        self._by_uid: dict[int, dict[Namespace, None]] = {}

    def __contains__(self, namespace: Namespace) -> bool:
        return namespace in self._by_uid.get(namespace.uid, ())

    def add(self, namespace: Namespace) -> None:
        """Its last session has left, or its last key may have gone."""
        self._by_uid.setdefault(namespace.uid, {})[namespace] = None

    def discard(self, namespace: Namespace) -> None:
        """It was forgotten."""
        mine = self._by_uid.get(namespace.uid, {})
        mine.pop(namespace, None)
        if not mine:
            self._by_uid.pop(namespace.uid, None)

    def take(self, uid: int) -> Iterator[Namespace]:
        """Those of this user, the first ones first. Each leaves the queue."""
        mine = self._by_uid.get(uid, {})
        while mine:
            namespace = next(iter(mine))
            del mine[namespace]
            if not mine:
                self._by_uid.pop(uid, None)
            yield namespace

    def take_any(self) -> Iterator[Namespace]:
        """Those of all users, one user's after the other's."""
        while self._by_uid:
            yield from self.take(next(iter(self._by_uid)))
