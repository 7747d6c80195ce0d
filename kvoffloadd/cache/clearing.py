"""Clearing namespaces: the epoch changes at once, is made durable, and slots are freed. Event loop only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator
from typing import Any

from kvoffloadd.cache.disk.catalog import DiskKeyspace
from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.cache.remote.eras import Eras
from kvoffloadd.cache.remote.namespaceera import NamespaceEra
from kvoffloadd.errors import NotDurableError


def clear(
    cache: Cache, disk: DiskTier | None, names: Collection[bytes] | None, eras: Eras | None = None
) -> Coroutine[Any, Any, tuple[int, int]]:
    """Clear the namespaces with these fingerprints, None: all, whether they are open or not. When this returns nothing
    that was stored before hits. Run the coroutine to its end, even if the session that requested the clear is gone. Its
    result: what memory dropped, (keys, bytes).

    Raises:
        LimitError: nothing was changed.
        NotDurableError: (the coroutine) some root could not save it: it is valid until a restart. Or the remote store
            could not: it is valid on this host.
    """
    namespaces = [n for n in cache.namespaces.values() if names is None or n.fingerprint in names]
    _check(cache, namespaces, everything=names is None)
    if names is None:
        cache.epochs.advance_all()
    else:
        for name in names:
            cache.epochs.advance(name)
    begun = eras.begin_clear(names) if eras else []
    cleared = _clear(cache, disk, names, namespaces)
    return _everywhere(eras, begun, cleared) if eras else cleared


def clear_here(
    cache: Cache, disk: DiskTier | None, fingerprint: bytes, epoch: int | None
) -> Coroutine[Any, Any, tuple[int, int]]:
    """Clear a namespace on this host alone, since another host has done so, by this number; None: by a new one. As
    `clear`.
    """
    namespaces = [n for n in cache.namespaces.values() if n.fingerprint == fingerprint]
    _check(cache, namespaces, everything=True)  # no user's cap stands in the way: elsewhere it is done
    if epoch is None:
        cache.epochs.advance(fingerprint)
    else:
        cache.epochs.follow(fingerprint, epoch)
    return _clear(cache, disk, {fingerprint}, namespaces)


def _check(cache: Cache, namespaces: Collection[Namespace], *, everything: bool) -> None:
    """Raises LimitError if these can't be cleared now: their groups get new numbers beside the old ones.

    `everything`: the operator clears them; no user's cap stands in the way.
    """
    needed: Counter[int] = Counter()
    for namespace in namespaces:
        needed[namespace.uid] += len(namespace.keyspaces)
    cache.entries.keyspaces.check_numbers(needed.total())
    for uid, count in ({} if everything else needed).items():
        cache.entries.keyspaces.check_room(uid, count, cleared=True)


def _clear(
    cache: Cache, disk: DiskTier | None, names: Collection[bytes] | None, namespaces: Collection[Namespace]
) -> Coroutine[Any, Any, tuple[int, int]]:
    """The epochs have advanced."""
    cache.forget_clears()
    disk_keyspaces = disk.clears.begin(names) if disk else []
    walks = [cache.clear(namespace) for namespace in namespaces]
    for walk in walks:
        next(walk)
    cache.save_state()
    return _finish(disk, walks, disk_keyspaces)


async def _finish(
    disk: DiskTier | None, walks: list[Iterator[tuple[int, int]]], disk_keyspaces: list[DiskKeyspace]
) -> tuple[int, int]:
    keys = held_bytes = 0
    for walk in walks:
        for some_keys, some_bytes in walk:
            keys += some_keys
            held_bytes += some_bytes
            await asyncio.sleep(0)
    if disk:
        await disk.clears.finish(disk_keyspaces)
    return keys, held_bytes


async def _everywhere(
    eras: Eras, begun: Collection[NamespaceEra], cleared: Coroutine[Any, Any, tuple[int, int]]
) -> tuple[int, int]:
    """Other hosts first. Each of the two goes to its end, whatever becomes of the other."""
    failed = []
    try:
        await eras.finish_clear(begun)
    except NotDurableError as error:
        failed.append(str(error))
    try:
        result = await cleared
    except NotDurableError as error:
        failed.append(str(error))
        result = (0, 0)
    if failed:
        raise NotDurableError("; ".join(failed))
    return result
