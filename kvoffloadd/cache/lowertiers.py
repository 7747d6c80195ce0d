"""Finds which of a request's keys the tiers below memory may have, and brings them into memory. Event loop only.

The disk knows at once which keys it has. The remote store has to be asked: its tier returns which keys it will ask for,
and a fetch begins with the question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from kvoffloadd.cache.disk.disktier import DiskTier, find_on_disk
from kvoffloadd.cache.lower.fetches import Fetch, Fetches, keys_below
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.remote.remotetier import RemoteTier
from kvoffloadd.cache.remote.request import RemoteKeys
from kvoffloadd.model import BoolArray, Tier, U8Array, U32Array, U64Array
from kvoffloadd.scheduling.lanes import DAEMON, Flow


class GroupLookup(NamedTuple):
    """Describes one group's keys of a request, looked up in all tiers."""

    keyspace: Keyspace
    first: int  # position of the first key in its prompt
    keys: U64Array
    lookup: LookupResult
    on_disk: BoolArray  # keys on disk, or on their way from there
    requested: BoolArray | None = None  # keys that the remote store is asked for, or that come from there; None: none

    @property
    def below(self) -> BoolArray:
        """Returns the keys that may still come."""
        return self.on_disk if self.requested is None else self.on_disk | self.requested

    @property
    def tiers(self) -> U8Array:
        """Returns u8 (keys,), a `Tier` per key: where it may still come from; MEMORY for all others."""
        tiers = self.on_disk * np.uint8(Tier.DISK)
        if self.requested is not None:
            tiers[self.requested] = Tier.REMOTE
        return tiers


@dataclass(slots=True, eq=False)
class LowerFetch:
    """Waits for all tiers below memory, for one request. Rows that came from one are held until the last one
    has ended.
    """

    done: Callable[[], None]
    left: dict[Fetches, Fetch] = field(default_factory=dict)

    def keep(self, rows: U32Array) -> None:
        """Holds these rows until the end of the fetch: it must not evict keys that the same request names."""
        for tier, fetch in self.left.items():
            tier.keep(fetch, rows)
            return

    @changing
    def cancel(self) -> None:
        """Cancels the fetch. `done` is not called any more."""
        for tier, fetch in self.left.items():
            tier.cancel(fetch)
        self.left.clear()

    @changing
    def ended(self, tier: Fetches) -> None:
        """Records that this tier has brought what it could."""
        fetch = self.left.pop(tier, None)
        if fetch is None:
            return
        for other, goes_on in self.left.items():
            for rows in fetch.rows:
                other.keep(goes_on, rows)
            return
        self.done()


class LowerTiers:
    """Combines the tiers below memory, at least one of them."""

    def __init__(self, disk: DiskTier | None, remote: RemoteTier | None) -> None:
        self.disk = disk
        self.remote = remote

    def find(
        self, groups: Sequence[tuple[Keyspace, int, U64Array]], lookups: Sequence[LookupResult], *, ask: bool
    ) -> list[GroupLookup]:
        """Returns which keys of a request, looked up in memory, may still come, and sets their states to PENDING. With
        `ask`, this includes keys that the remote store must be asked for: `fetch` them then.
        """
        named = [(keyspace, keys) for keyspace, _, keys in groups]
        if self.disk is not None:
            on_disk = find_on_disk(self.disk, named, lookups)
        else:
            on_disk = [np.zeros(len(keys), bool) for _, keys in named]
        requested: Sequence[BoolArray | None] = [None] * len(named)
        if ask and self.remote is not None:
            requested = self.remote.to_ask([(*group, lookup) for group, lookup in zip(groups, lookups, strict=True)])
        return [
            GroupLookup(*group, lookup, there, may)
            for group, lookup, there, may in zip(groups, lookups, on_disk, requested, strict=True)
        ]

    def touch(self, groups: Sequence[GroupLookup]) -> None:
        """Marks keys that a request uses elsewhere: those on disk alone are kept as if they had been read when their
        segment is reclaimed.
        """
        for group in groups:
            if self.disk is not None and group.on_disk.any():
                self.disk.touch(group.keyspace, group.keys[group.on_disk])

    @changing
    def fetch(
        self,
        groups: Sequence[GroupLookup],
        urgent: int,
        done: Callable[[], None],
        flow: Flow = DAEMON,
        *,
        whole: bool = False,
    ) -> LowerFetch:
        """Brings keys that may still come into memory, as far as there is room. The remote store brings only the keys
        of the longest prefix that can be restored, unless `whole`. `done()` is called once, later: during the call the
        new rows are held, and a new lookup finds them.
        """
        fetch = LowerFetch(done)
        on_disk = [
            keys_below(group.keyspace, group.keys, group.first, group.on_disk)
            for group in groups
            if group.on_disk.any()
        ]
        if self.disk is not None and on_disk:
            tier: Fetches = self.disk.promotion
            fetch.left[tier] = tier.fetch(on_disk, urgent, partial(fetch.ended, tier), flow)
        if self.remote is not None and any(group.requested is not None and group.requested.any() for group in groups):
            wanted = [
                RemoteKeys(group.keyspace, group.first, group.keys, group.lookup.hits | group.on_disk, group.requested)
                for group in groups
            ]
            fetching = self.remote.fetching
            ended = partial(fetch.ended, fetching)
            fetch.left[fetching] = fetching.request(wanted, urgent, ended, flow, whole=whole)
        return fetch
