"""A clear as who waits for it sees it, without a daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from kvoffloadd.cache.clearing import Clearings
from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.remote.remotetier import RemoteTier
from kvoffloadd.errors import NotDurableError


async def clear(
    cache: Cache, disk: DiskTier | None, names: Iterable[bytes] | None, remote: RemoteTier | None = None
) -> tuple[int, int]:
    """Clear, and wait until each place has tried to record it. What memory dropped. Raises NotDurableError: one could
    not. If this is cancelled, so is all that goes on behind it, as when a daemon dies.
    """
    tasks: list[asyncio.Task[Any]] = []

    def spawn(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        tasks.append(asyncio.get_running_loop().create_task(work))
        return tasks[-1]

    clearings = Clearings(cache, disk, remote, spawn)
    clearing = clearings.begin(None if names is None else frozenset(names))
    try:
        dropped = await clearing.swept
        await clearing.tried
    finally:
        for task in tasks:
            task.cancel()
    if unrecorded := clearings.unrecorded(clearing):
        raise NotDurableError(f"not recorded in {unrecorded}")
    return dropped
