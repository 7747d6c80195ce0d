"""Unexpected exceptions: whether one may have left the cache's tables half-written. Pure."""

from __future__ import annotations

import traceback

from kvoffloadd.errors import KvOffloadError

_CACHE = "kvoffloadd.cache."
_OTHERS = ("kvoffloadd.storage.disk.", "kvoffloadd.device.")
_PURE = ("kvoffloadd.cache.memory.keys", "kvoffloadd.cache.memory.lookup")


def leaves_cache_unsure(error: BaseException) -> bool:
    """Whether this error came out of the cache's own code, or what it calls, so that its tables may be half-written.

    Not if it was raised on purpose, which changes nothing; nor out of the cache's pure functions; nor if it came from a
    disk or a device that the cache had called, whose state is their own: the cache calls them between its changes,
    never within one, and ends the job that they fail. So the innermost of these rooms is the one that failed. What
    other code raises below the cache (numpy, the arena, queues) counts as the cache's: that it calls in the midst of
    a change.
    """
    if isinstance(error, KvOffloadError | OSError):
        return False
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    stateful = [name for name in names if name.startswith((_CACHE, *_OTHERS)) and name not in _PURE]
    return bool(stateful) and stateful[-1].startswith(_CACHE)
