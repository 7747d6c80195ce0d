"""Clears namespaces: the epoch changes at once, slots are freed, and disks and store record it. Event loop only.

A clear is done when it has taken effect on this host, which is at once. If a disk or the remote store has not recorded
it yet, the daemon repeats that by itself: `RootLifecycle` for each root, `Eras` for the store, both as long as it runs.
They record the epoch that the clear began, so no repetition clears keys anew.
"""

from __future__ import annotations

import asyncio
import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from kvoffloadd.cache.disk.diskkeyspaces import DiskKeyspace
from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.cache.remote.namespaceera import NamespaceEra
from kvoffloadd.cache.remote.remotetier import RemoteTier
from kvoffloadd.errors import LimitError, UnknownNameError
from kvoffloadd.scheduling.steps import Steps, in_turns
from kvoffloadd.storage.disk.root import Root

REMOTE: Final = "remote"
"""The name of the remote store among the places that record a clear; the others are paths of disk roots."""

COUNTED_MAX: Final = 1024
"""The number of counted clears that are not recorded, the latest of each scope; the oldest are left out."""

GROUPS_AT_ONCE: Final = 64
"""The number of groups for which each step of a clear of many namespaces is begun: a few milliseconds."""

Names = frozenset[bytes] | None
"""Fingerprints of the namespaces that a clear reaches; None: all namespaces, whether they are open or not."""


@dataclass(frozen=True, slots=True)
class Matching:
    """Selects namespaces: those with names, as `status` shows them, that match a shell pattern, and those of a user.
    None: any.
    """

    pattern: str | None
    uid: int | None

    def select(self, namespaces: Iterable[Namespace]) -> list[Namespace]:
        """Returns those of these namespaces that match."""
        matches = re.compile(fnmatch.translate("*" if self.pattern is None else self.pattern)).match
        return [namespace for namespace in namespaces if self.uid in (None, namespace.uid) and matches(namespace.name)]

    def __str__(self) -> str:
        named = "" if self.pattern is None else f"has a name like {self.pattern!r}"
        owned = "" if self.uid is None else f"belongs to uid {self.uid}"
        return " and ".join(filter(None, (named, owned)))


@dataclass(slots=True, eq=False)
class Clearing:
    """A clear that has taken effect: no key that was stored before it hits."""

    names: Names
    epochs: list[tuple[Names, int]]
    """The epochs that it began, each with its namespaces."""
    swept: asyncio.Task[tuple[int, int]]
    """Ends when memory has dropped the cleared keys. Its result: (keys, bytes)."""
    tried: asyncio.Task[None]
    """Ends when each place has recorded the clear, or has failed to do so once."""
    roots: list[Root]  # that have not recorded it, as far as known
    eras: list[NamespaceEra]  # that the remote store has not ended, as far as known
    left: int = 0
    """The number of further namespaces that it could not reach: in the meantime other requests had taken all groups
    that there can be.
    """


_Walks = list[Iterator[tuple[int, int]]]


@dataclass(slots=True, eq=False)
class _Effect:
    """Describes the remaining work of a clear that has taken effect: in memory, on disk, and in the store."""

    names: Names
    epoch: int
    walks: _Walks
    disk_keyspaces: list[DiskKeyspace]
    eras: list[NamespaceEra]


class Clearings:
    """Performs all clears of one daemon. `spawn` runs a task that the daemon owns."""

    def __init__(
        self,
        cache: Cache,
        disk: DiskTier | None,
        remote: RemoteTier | None,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._cache = cache
        self._disk = disk
        self._remote = remote
        self._spawn = spawn
        self._open: dict[Names, Clearing] = {}  # the last of each scope, unless it is known as recorded
        self._running: set[asyncio.Task[Any]] = set()

    @changing
    def begin(self, names: Names) -> Clearing:
        """Clears these namespaces, in one moment. The clear goes on to its end, even if its client goes away.

        Raises LimitError: nothing was changed.
        """
        _check(self._cache, self._open_ones(names), everything=names is None)
        return self._carry_out(names, [self._take_effect(names)])

    def begin_matching(self, wanted: Matching) -> asyncio.Task[Clearing]:
        """Clears, for the operator, the namespaces that match: each in one moment, and all of them in steps. The task's
        result has taken effect.

        Raises:
            UnknownNameError: there are none.
            LimitError: nothing was changed.
        """
        found = wanted.select(self._cache.namespaces.values())
        if not found:
            raise UnknownNameError(f"no namespace that is in use, or has keys in memory, {wanted}")
        _check(self._cache, found, everything=True)
        return self._run(in_turns(self._begin_in_steps(found)))

    def _begin_in_steps(self, namespaces: Collection[Namespace]) -> Steps[Clearing]:
        effects: list[_Effect] = []
        reached: frozenset[bytes] = frozenset()
        with suppress(LimitError):
            for names in _batches(namespaces):
                _check(self._cache, self._open_ones(names), everything=True)
                effects.append(self._take_effect(names))
                reached |= names
                yield
        clearing = self._carry_out(reached, effects)
        clearing.left = len(namespaces) - len(reached)
        return clearing

    def _open_ones(self, names: Names) -> list[Namespace]:
        known = self._cache.namespaces
        return list(known.values()) if names is None else [known[name] for name in names if name in known]

    @changing
    def _take_effect(self, names: Names) -> _Effect:
        """Advances the epochs. After the return, no older key hits."""
        epochs = self._cache.epochs
        if names is None:
            epochs.advance_all()
        else:
            epochs.advance(*names)
        epoch = epochs.base if names is None else epochs.last
        eras = self._remote.begin_clear(names) if self._remote else []
        return _Effect(names, epoch, *_take_effect(self._cache, self._disk, names, self._open_ones(names)), eras)

    @changing
    def _carry_out(self, names: Names, effects: Collection[_Effect]) -> Clearing:
        """Starts the remaining work of all effects together: separate tasks would each take their full time in every
        turn of the loop.
        """
        self._cache.save_state()
        eras = [known for effect in effects for known in effect.eras]
        disk_keyspaces = [keyspace for effect in effects for keyspace in effect.disk_keyspaces]
        swept = self._run(in_turns(_sweep([walk for effect in effects for walk in effect.walks])))
        clearing = Clearing(
            names=names,
            epochs=[(effect.names, effect.epoch) for effect in effects],
            swept=swept,
            tried=self._run(self._record(swept, disk_keyspaces, eras)),
            roots=list(self._disk.roots) if self._disk else [],
            eras=eras,
        )
        self._count(clearing)
        return clearing

    async def _record(
        self, swept: asyncio.Task[Any], disk_keyspaces: list[DiskKeyspace], eras: Collection[NamespaceEra]
    ) -> None:
        """Records a clear on the disks and in the store. Neither waits for the other: a store may take long, or not
        answer at all.
        """
        halves: list[Coroutine[Any, Any, None]] = []
        if self._disk:
            halves.append(_finish_on_disk(self._disk, swept, disk_keyspaces))
        if self._remote:
            halves.append(self._remote.record_clear(eras))
        await asyncio.gather(*halves)

    def unrecorded(self, clearing: Clearing) -> list[str]:
        """Returns the places that have not recorded the clear yet: paths of disk roots, REMOTE."""
        self._look(clearing)
        return [root.name for root in clearing.roots] + [REMOTE] * bool(clearing.eras)

    def _look(self, clearing: Clearing) -> Clearing:
        if self._disk:
            clearing.roots = self._disk.clears.unrecorded(clearing.roots, clearing.epochs)
        if self._remote:
            clearing.eras = self._remote.unrecorded(clearing.eras)
        return clearing

    async def wait_recorded(self, clearing: Clearing, wait_s: float) -> None:
        """Waits until each place has recorded the clear, at most `wait_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await asyncio.shield(clearing.tried)
                if self._disk:
                    await self._disk.clears.changes.wait_for(lambda: not self._look(clearing).roots)
                if self._remote:
                    await self._remote.eras.changes.wait_for(lambda: not self._look(clearing).eras)

    async def close(self, deadline_s: float) -> None:
        """Waits for clears that are being begun, or recorded for the first time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._running:  # a clear that has begun is then recorded
                    await asyncio.wait(self._running)

    def figures(self) -> dict[str, Any]:
        """Returns the figures for `status`."""
        places: set[str] = set()
        for clearing in list(self._open.values()):
            places.update(self.unrecorded(clearing))
            self._forget_recorded(clearing)
        return {"unrecorded": len(self._open), "places": sorted(places)}

    def _run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._spawn(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _count(self, clearing: Clearing) -> None:
        """Counts a clear until it is recorded. It replaces the clears that it makes obsolete: their places record them
        with it.
        """
        if clearing.names is None:
            self._open.clear()
        self._open.pop(clearing.names, None)
        self._open[clearing.names] = clearing
        if len(self._open) > COUNTED_MAX:
            del self._open[next(iter(self._open))]
        clearing.tried.add_done_callback(lambda _: self._forget_recorded(clearing))

    @changing
    def _forget_recorded(self, clearing: Clearing) -> None:
        if self._open.get(clearing.names) is clearing and not self.unrecorded(clearing):
            del self._open[clearing.names]


async def clear_here(cache: Cache, disk: DiskTier | None, fingerprint: bytes, epoch: int | None) -> None:
    """Clears a namespace on this host alone, since another host has done so, by the number `epoch`; None: by a new
    number. A disk that can't record the clear now records it later.
    """
    namespaces = [n for n in cache.namespaces.values() if n.fingerprint == fingerprint]
    _check(cache, namespaces, everything=True)  # no user's cap prevents it: on the other host it is done
    with changing:
        if epoch is None:
            cache.epochs.advance(fingerprint)
        else:
            cache.epochs.follow(fingerprint, epoch)
        walks, disk_keyspaces = _take_effect(cache, disk, {fingerprint}, namespaces)
        cache.save_state()
    await in_turns(_sweep(walks))
    if disk:
        await disk.clears.finish(disk_keyspaces)


def _check(cache: Cache, namespaces: Collection[Namespace], *, everything: bool) -> None:
    """Raises LimitError if these can't be cleared now: their groups get new numbers in addition to the old ones.

    `everything`: the operator clears them; no user's cap prevents it.
    """
    needed: Counter[int] = Counter()
    for namespace in namespaces:
        needed[namespace.uid] += len(namespace.keyspaces)
    cache.entries.keyspaces.check_numbers(needed.total())
    for uid, count in ({} if everything else needed).items():
        cache.entries.keyspaces.check_room(uid, count, cleared=True)


def _batches(namespaces: Collection[Namespace]) -> list[frozenset[bytes]]:
    """Returns their fingerprints, in batches of `GROUPS_AT_ONCE` groups, or of a single namespace that has more."""
    batches: list[frozenset[bytes]] = []
    batch: list[bytes] = []
    groups = 0
    for namespace in namespaces:
        count = max(len(namespace.keyspaces), 1)
        if batch and groups + count > GROUPS_AT_ONCE:
            batches.append(frozenset(batch))
            batch, groups = [], 0
        batch.append(namespace.fingerprint)
        groups += count
    return [*batches, frozenset(batch)]


def _take_effect(
    cache: Cache, disk: DiskTier | None, names: Collection[bytes] | None, namespaces: Collection[Namespace]
) -> tuple[_Walks, list[DiskKeyspace]]:
    """Clears memory and disk after the epochs have advanced. After the return, no older key hits; the walks and disk
    keyspaces that it returns are still to free.
    """
    cache.forget_clears()
    disk_keyspaces = disk.clears.begin(names) if disk else []
    walks = [cache.clear(namespace) for namespace in namespaces]
    for walk in walks:
        next(walk)
    return walks, disk_keyspaces


def _sweep(walks: _Walks) -> Steps[tuple[int, int]]:
    keys = held_bytes = 0
    for walk in walks:
        for some_keys, some_bytes in walk:
            keys += some_keys
            held_bytes += some_bytes
            yield
    return keys, held_bytes


async def _finish_on_disk(disk: DiskTier, swept: asyncio.Task[Any], disk_keyspaces: list[DiskKeyspace]) -> None:
    """Clears disks after memory: for keys in both, the tier that drops them last emits the event."""
    await asyncio.wait([swept])
    await disk.clears.finish(disk_keyspaces)
