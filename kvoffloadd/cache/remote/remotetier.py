"""The remote tier below memory: a store that the daemons of several hosts share. Event loop only.

    contents   this host's knowledge: names, keys believed present, keys found missing
    eras       the current era of each namespace, and clears that hold on every host
    fetching   questions, and gets into slots
    pushing    puts
    removals   of the objects of deleted keys

A key that neither memory nor disk has may be there. Only the store knows, so it is asked: for at most `lookup_keys` of
a request, and for none while it does not answer. Its answers are hints until a payload has come and was verified.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

import numpy as np

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.remote.contents import RemoteContents
from kvoffloadd.cache.remote.eras import Eras
from kvoffloadd.cache.remote.fetching import RemoteFetching
from kvoffloadd.cache.remote.namespaceera import NamespaceEra
from kvoffloadd.cache.remote.pushing import Pushing
from kvoffloadd.cache.remote.removals import Removals
from kvoffloadd.config import RemoteConfig
from kvoffloadd.errors import NotDurableError
from kvoffloadd.model import BoolArray, I64Array, KeyState, U32Array, U64Array
from kvoffloadd.storage.remote.store import RemoteStore

log = logging.getLogger(__name__)

_MISS, _PENDING = int(KeyState.MISS), int(KeyState.PENDING)


class RemoteTier:
    """The `LowerTier` that hosts share. `clear_here`: see `Eras`."""

    def __init__(
        self,
        cache: Cache,
        store: RemoteStore,
        config: RemoteConfig,
        loop: asyncio.AbstractEventLoop,
        clear_here: Callable[[bytes, int | None], Awaitable[None]],
    ) -> None:
        self.store = store
        self.eras = Eras(store, cache, config.era_poll_s, clear_here)
        self._contents = RemoteContents(cache, store, self.eras, config, loop)
        self.fetching = RemoteFetching(self._contents)
        self.pushing = Pushing(self._contents)
        self.removals = Removals(self._contents, self.pushing)
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []
        cache.attach(self)

    # --- life ---

    def start(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Starts the store's agent and the background tasks. `spawn` runs a task that the daemon owns."""
        self.store.start()
        self._tasks = [spawn(self.eras.run()), spawn(self.eras.watch()), spawn(self.eras.sweeps.run())]
        self._tasks.append(spawn(self.removals.run()))
        if not self.pushing.is_off:
            self._tasks.append(spawn(self.pushing.run()))

    async def close(self, deadline_s: float) -> bool:
        """Ends the agent. Returns False if the agent may still touch memory."""
        for task in self._tasks:
            task.cancel()
        return await self.store.close(deadline_s)

    # --- calls from memory, see `LowerTier` ---

    def open_keyspace(self, keyspace: Keyspace) -> None:
        self._contents.open_keyspace(keyspace)

    def rename_keyspace(self, keyspace: Keyspace) -> None:
        self._contents.rename_keyspace(keyspace)

    def close_keyspace(self, keyspace: Keyspace) -> None:
        pass

    def reset(self, rows: U32Array) -> None:
        self._contents.reset(rows)
        self.fetching.reset(rows)
        self.pushing.reset(rows)

    def sealed(self, parts: I64Array) -> None:
        if not self.pushing.is_off:
            self.pushing.backlog.sealed(parts)

    def used(self, rows: U32Array) -> None:
        if not self.pushing.is_off:
            self.pushing.used(rows)

    def lost(self, rows: U32Array) -> None:
        """Does nothing: other hosts may have the keys lost here."""

    def found_again(self, rows: U32Array) -> None:
        """Does nothing, see `lost`."""

    def evicted(self, rows: U32Array) -> None:
        if not self.pushing.is_off:
            self.pushing.evicted(rows)

    # --- lookups ---

    def to_ask(self, groups: Sequence[tuple[Keyspace, int, U64Array, LookupResult]]) -> list[BoolArray | None]:
        """Returns which keys of a request the store should be asked for or are under way from there, by group; None:
        none. The number is the position of the group's first key. Sets their states to PENDING.
        """
        if not (self.fetching.is_worth_asking or self.fetching.reserved):
            return [None] * len(groups)
        masks = [self._misses(keyspace, keys, lookup) for keyspace, _, keys, lookup in groups]
        counts = [0 if mask is None else int(np.count_nonzero(mask)) for mask in masks]
        if sum(counts) > self._config.lookup_keys:
            _cut(groups, masks, self._config.lookup_keys)
        elif sum(counts) < self._config.min_keys:
            masks = [None] * len(groups)
        for number, (_, _, keys, lookup) in enumerate(groups):
            waiting = np.flatnonzero(lookup.states == _PENDING)
            coming = waiting[self.fetching.under_way(lookup.rows[waiting]) & (lookup.rows[waiting] >= 0)]
            if len(coming):
                mask = masks[number]
                if mask is None:
                    mask = masks[number] = np.zeros(len(keys), bool)
                mask[coming] = True
        for (_, _, _, lookup), mask in zip(groups, masks, strict=True):
            if mask is not None:
                lookup.states[mask] = _PENDING
        return masks

    def _misses(self, keyspace: Keyspace, keys: U64Array, lookup: LookupResult) -> BoolArray | None:
        """Returns keys that the store might have. None: there are none, or asking is not worthwhile."""
        if not self.fetching.is_worth_asking or self._contents.place(keyspace) is None:
            return None
        # The ranks are still storing a key that has some parts in memory.
        missing = np.flatnonzero((lookup.states == _MISS) & (lookup.rows < 0))
        missing = missing[~self._contents.missed(keyspace, keys[missing])]
        missing = missing[~self._contents.leaving(keyspace, keys[missing])]
        if not len(missing):
            return None
        mask = np.zeros(len(keys), bool)
        mask[missing] = True
        return mask

    # --- clears ---

    def begin_clear(self, names: Collection[bytes] | None) -> list[NamespaceEra]:
        """Takes the advance of these namespaces' epochs (None: of all). Returns what the store has to end."""
        return self.eras.begin_clear(names)

    async def record_clear(self, eras: Collection[NamespaceEra]) -> None:
        """Makes the store end these eras, so that no host fetches anything older. The polls of `Eras` end the remaining
        ones.
        """
        try:
            with changing:
                await self.eras.finish_clear(eras)
        except NotDurableError as error:
            log.warning("remote: a clear could not be recorded yet: %s", error)

    def unrecorded(self, eras: Collection[NamespaceEra]) -> list[NamespaceEra]:
        """Returns which of these eras the store has not ended yet."""
        return [known for known in eras if known.unmade]

    # --- figures ---

    @property
    def holds(self) -> int:
        """Rows that are held."""
        return self.fetching.holds + self.pushing.holds

    @property
    def reserved(self) -> int:
        """Parts that are under way, or in quarantine."""
        return self.fetching.reserved

    def check(self) -> list[str]:
        """Audits the tier; an empty list: no errors."""
        return [f"remote: {finding}" for finding in self.store.check()]

    def figures(self) -> dict[str, Any]:
        """Returns the figures for `status`."""
        fetched, pushed = self.fetching.counters, self.pushing.counters
        return {
            **self.store.figures(),
            "asked": fetched.asked,
            "found": fetched.found,
            "fetched": {"keys": fetched.keys, "bytes": fetched.bytes},
            "not_fetched": dict(fetched.not_fetched),
            "quarantined_bytes": self.fetching.quarantined_bytes,
            "pushed": {"keys": pushed.keys, "bytes": pushed.bytes},
            "not_pushed": dict(pushed.not_pushed),
            "backlog_bytes": self.pushing.backlog.bytes,
            "lookup_s": self.fetching.lookup_s.figures(),
            "get_s": self.fetching.get_s.figures(),
            **self.eras.figures(),
        }


def _cut(
    groups: Sequence[tuple[Keyspace, int, U64Array, LookupResult]], masks: Sequence[BoolArray | None], most: int
) -> None:
    """Leaves only the first keys of the prompt in the masks, up to this total over all groups."""
    tokens, where = [], []
    for number, ((keyspace, first, _, _), mask) in enumerate(zip(groups, masks, strict=True)):
        if mask is not None:
            indices = np.flatnonzero(mask)
            tokens.append((indices + first + 1) * keyspace.schema.tokens_per_key)
            where.append(np.stack([np.full(len(indices), number), indices], axis=1))
    dropped = np.concatenate(where)[np.argsort(np.concatenate(tokens), kind="stable")[most:]]
    for number, mask in enumerate(masks):
        if mask is not None:
            mask[dropped[dropped[:, 0] == number, 1]] = False
