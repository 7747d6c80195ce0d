"""The interface between the memory tier and the tiers below it: disk, and a store that several hosts share."""

from __future__ import annotations

from typing import Protocol

from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array


class LowerTier(Protocol):
    """A tier to which keys in memory are written, and from which they are read back. Event loop only; nothing waits."""

    def open_keyspace(self, keyspace: Keyspace) -> None:
        """Payload sizes of some of its parts have become known."""

    def rename_keyspace(self, keyspace: Keyspace) -> None:
        """More of its composition has become known. What the tier has of it was stored when less was known, so it is
        not its own any more: other keyspaces of which no more is known may have it.
        """

    def close_keyspace(self, keyspace: Keyspace) -> None:
        """Its namespace is forgotten. What the tier has of it stays."""

    def reset(self, rows: U32Array) -> None:
        """These rows are used for new keys: forget what the tier has recorded by row."""

    def sealed(self, parts: I64Array) -> None:
        """The checksums of these parts are known now."""

    def used(self, rows: U32Array) -> None:
        """A request uses these keys."""

    def lost(self, rows: U32Array) -> None:
        """Something before these keys in their prompts is gone: nobody can use them, unless it is stored again."""

    def found_again(self, rows: U32Array) -> None:
        """What was gone before these keys, which were lost, is stored again."""

    def evicted(self, rows: U32Array) -> None:
        """These complete keys are about to leave memory, for want of room."""


class LocalTier(LowerTier, Protocol):
    """A lower tier of this host alone: what it has is known here, without asking anybody."""

    def holds_keys(self, keyspace: Keyspace, keys: U64Array) -> BoolArray:
        """Which of the keys the tier can serve."""

    def namespaces(self) -> set[bytes]:
        """Fingerprints of the namespaces of which the tier may have keys."""

    def snapshot(self, keyspace: Keyspace, cursor: int, count: int) -> tuple[bytes, int]:
        """List packed keys among `count` rows from `cursor` on. Returns them and the next cursor, 0 at the end."""
