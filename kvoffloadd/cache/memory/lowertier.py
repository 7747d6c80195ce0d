"""The interface between the memory tier and the tiers below it: disk, and a store that several hosts share."""

from __future__ import annotations

from typing import Protocol

from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array


class LowerTier(Protocol):
    """A tier to which keys in memory are written, and from which they are read back. Event loop only; nothing waits."""

    def open_keyspace(self, keyspace: Keyspace) -> None:
        """Is called when payload sizes of some parts of the keyspace have become known."""

    def rename_keyspace(self, keyspace: Keyspace) -> None:
        """Is called when more of the keyspace's composition has become known. The tier's keys of it were stored when
        less was known, so it loses them: they are left to keyspaces with a composition that is known no better.
        """

    def close_keyspace(self, keyspace: Keyspace) -> None:
        """Is called when the keyspace's namespace is forgotten. The tier keeps its keys of it."""

    def reset(self, rows: U32Array) -> None:
        """Forgets what the tier has recorded for these rows, which get new keys."""

    def sealed(self, parts: I64Array) -> None:
        """Is called when the checksums of these parts are known."""

    def used(self, rows: U32Array) -> None:
        """Is called when a request uses these keys."""

    def lost(self, rows: U32Array) -> None:
        """Is called when a key before these in their prompts is gone: no request can use them, unless it is stored
        again.
        """

    def found_again(self, rows: U32Array) -> None:
        """Is called when the missing keys before these, which were lost, are stored again."""

    def evicted(self, rows: U32Array) -> None:
        """Is called before these complete keys leave memory for lack of room."""


class LocalTier(LowerTier, Protocol):
    """A lower tier of this host alone: a query needs no other host."""

    def holds_keys(self, keyspace: Keyspace, keys: U64Array) -> BoolArray:
        """Returns which of the keys the tier can serve."""

    def namespaces(self) -> set[bytes]:
        """Returns the fingerprints of the namespaces that the tier may have keys of."""

    def snapshot(self, keyspace: Keyspace, cursor: int, count: int) -> tuple[bytes, int]:
        """Lists packed keys among `count` rows from `cursor` on. Returns them and the next cursor, 0 at the end."""
