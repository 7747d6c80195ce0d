"""Keeps the namespaces that may have no keys any more. A session that comes or goes inspects only these, not all
namespaces.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvoffloadd.cache.memory.namespace import Namespace


class Emptied:
    """Keeps a queue of these namespaces for each user. A namespace without sessions and keys is always in it."""

    def __init__(self) -> None:
        self._by_uid: dict[int, dict[Namespace, None]] = {}

    def __contains__(self, namespace: Namespace) -> bool:
        return namespace in self._by_uid.get(namespace.uid, ())

    def add(self, namespace: Namespace) -> None:
        """Adds a namespace after its last session has left, or its last key may have gone."""
        self._by_uid.setdefault(namespace.uid, {})[namespace] = None

    def discard(self, namespace: Namespace) -> None:
        """Removes a namespace that was forgotten."""
        namespaces = self._by_uid.get(namespace.uid, {})
        namespaces.pop(namespace, None)
        if not namespaces:
            self._by_uid.pop(namespace.uid, None)

    def take(self, uid: int) -> Iterator[Namespace]:
        """Yields the namespaces of this user, the oldest entry first, and removes each from the queue."""
        namespaces = self._by_uid.get(uid, {})
        while namespaces:
            namespace = next(iter(namespaces))
            del namespaces[namespace]
            if not namespaces:
                self._by_uid.pop(uid, None)
            yield namespace

    def take_any(self) -> Iterator[Namespace]:
        """Yields the namespaces of all users, one user after the other."""
        while self._by_uid:
            yield from self.take(next(iter(self._by_uid)))
