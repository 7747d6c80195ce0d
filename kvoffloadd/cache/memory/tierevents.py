"""Makes events of keys that come into a tier of this host or leave it. Event loop only.

A namespace has listeners of two kinds. Some follow each tier: a key that goes from memory and stays on disk has gone
from memory. The others follow only whether the daemon has a key at all: for them nothing happens then.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvoffloadd.cache.memory.events import Event, WaitingEvents
from kvoffloadd.cache.memory.keys import pack
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.model import BoolArray, Tier, U64Array

Holds = Callable[[Keyspace, U64Array], BoolArray]
"""Returns which of these keys of a keyspace a tier has, complete."""


class TierEvents:
    """Puts events into the queues of their namespaces. `holders`: the tiers of this host."""

    def __init__(self, in_memory: Holds) -> None:
        self.waiting = WaitingEvents()
        self.holders: dict[Tier, Holds] = {Tier.MEMORY: in_memory}

    def changed(self, keyspace: Keyspace, keys: U64Array, tier: Tier, *, added: bool) -> None:
        """Reports that these keys are complete in this tier from now on, or gone from it. What a clear has taken may
        have been stored again since: then it is not gone.
        """
        namespace = keyspace.namespace
        if not namespace.listeners or not len(keys):
            return
        group = keyspace.schema.group
        current = namespace.keyspaces.get(group) if keyspace.retired else None
        again = {other: self._held(other, current, keys) for other in self.holders}
        if namespace.tier_listeners:
            self._put(namespace, group, keys[~again[tier]], tier, added=added)
        if namespace.listeners > namespace.tier_listeners:
            elsewhere = np.zeros(len(keys), bool)
            for other in self.holders:
                elsewhere |= again[other]
                if other is not tier:
                    elsewhere |= self._held(other, keyspace, keys)
            self._put(namespace, group, keys[~elsewhere], None, added=added)

    def lose(self, namespace: Namespace) -> None:
        """Replaces all waiting events of a namespace by a loss: its listeners list the keys anew. This reports what
        would take too long to tell key by key.
        """
        if namespace.listeners:
            self.waiting.lose(namespace)

    def _held(self, tier: Tier, keyspace: Keyspace | None, keys: U64Array) -> BoolArray:
        return np.zeros(len(keys), bool) if keyspace is None else self.holders[tier](keyspace, keys)

    def _put(self, namespace: Namespace, group: int, keys: U64Array, tier: Tier | None, *, added: bool) -> None:
        if len(keys):
            packed = pack(keys, namespace.key_bytes)
            added_keys, removed_keys = (packed, b"") if added else (b"", packed)
            self.waiting.put(Event(namespace, group, added_keys, removed_keys, tier))
