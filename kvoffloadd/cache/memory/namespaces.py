"""The namespaces that are open or have keys, by fingerprint. Event loop only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from kvoffloadd.cache.memory.keytable import KeyTable
from kvoffloadd.cache.memory.namespace import Namespace

LOOKED_AT = 16
"""The number of namespaces that a session inspects when it comes or goes: more than one session can add."""


class Namespaces(dict[bytes, Namespace]):
    """Maps fingerprints to namespaces. A namespace without sessions is forgotten some time after its last key has gone.
    Namespaces that may be in this state are known (see `Emptied`), and some of them are inspected whenever a session
    comes or goes.
    """

    def __init__(self, entries: KeyTable) -> None:
        super().__init__()
        self.is_claimed: Callable[[Namespace], bool] = lambda namespace: False
        self._entries = entries
        self._emptied = entries.keyspaces.emptied

    def find(self, fingerprint: bytes) -> Namespace | None:
        """Returns the namespace of this name. A namespace without sessions and without keys is forgotten instead: its
        groups may be declared anew.
        """
        namespace = self.get(fingerprint)
        if namespace is not None and self.is_unused(namespace):
            self._forget(namespace)
            return None
        return namespace

    def enter(self, namespace: Namespace) -> None:
        """Counts a session that has come. Pair with `leave`."""
        namespace.sessions += 1
        self._forget_unused(itertools.islice(self._emptied.take_any(), LOOKED_AT))

    def leave(self, namespace: Namespace) -> None:
        """Counts a session that has left."""
        namespace.sessions -= 1
        if not namespace.sessions:
            self._emptied.add(namespace)
        self._forget_unused(itertools.islice(self._emptied.take_any(), LOOKED_AT))

    def check_groups(self, namespace: Namespace, groups: AbstractSet[int]) -> None:
        """Raises LimitError if the new ones among the groups are more than the namespace's user may have."""
        more = len(groups - namespace.keyspaces.keys())
        keyspaces = self._entries.keyspaces
        if more and not keyspaces.has_room(namespace.uid, more):
            self._forget_unused(self._emptied.take(namespace.uid))
        if more:
            keyspaces.check_room(namespace.uid, more)

    def is_unused(self, namespace: Namespace) -> bool:
        """Returns whether a namespace has no sessions, no keys and no claims, and was not forgotten yet."""
        has_keys = any(keyspace.rows for keyspace in namespace.keyspaces.values())
        has_keys = has_keys or self.is_claimed(namespace)
        return not namespace.sessions and not has_keys and self.get(namespace.fingerprint) is namespace

    def check(self) -> list[str]:
        """Returns a list of errors: namespaces that would never be forgotten."""
        lost = [namespace for namespace in self.values() if self.is_unused(namespace)]
        return [
            f"namespace {namespace.name}: unused, and would stay"
            for namespace in lost
            if namespace not in self._emptied
        ]

    def _forget_unused(self, namespaces: Iterable[Namespace]) -> None:
        for namespace in namespaces:
            if self.is_unused(namespace):
                self._forget(namespace)

    def _forget(self, namespace: Namespace) -> None:
        del self[namespace.fingerprint]
        for keyspace in namespace.keyspaces.values():
            self._entries.keyspaces.retire(keyspace)
            for lower in self._entries.lower:
                lower.close_keyspace(keyspace)
        self._emptied.discard(namespace)  # the retirement of its keyspaces has added it again
        namespace.keyspaces.clear()  # they refer to it, too: their numbers would wait for the garbage collector
