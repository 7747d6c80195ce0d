"""Finds or makes the file that is the memory tier: an earlier run's, if it fits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvoffloadd.config import MemoryConfig
from kvoffloadd.errors import ConfigError
from kvoffloadd.linux.hugepages import why_not_transparent
from kvoffloadd.linux.memorylimits import check_memory_fits
from kvoffloadd.linux.systemd import Systemd
from kvoffloadd.storage.arenafile import ArenaFile, check_pool_fits, discard, inherit, open_pool

log = logging.getLogger(__name__)

T = TypeVar("T")

POOL_NAME = "kvoffloadd-pool"
"""The memory tier's name in systemd's store."""

FORGET_S = 60.0
"""How long it may take until the memory of an unusable pool is free."""


def take_pool(memory: MemoryConfig, systemd: Systemd) -> ArenaFile:
    """Returns the memory tier's pool, which an earlier run may have left: in `memory.pool_file`, or in systemd's store.

    Raises ConfigError if the memory is not there, and OSError if the kernel refuses it.
    """
    kept = systemd.take(POOL_NAME)
    if memory.pool_file:
        if kept is not None:
            systemd.forget(POOL_NAME)
            discard(kept)
        patience_s = FORGET_S if kept is not None else 0.0
        await_memory = partial(_await_room, check_memory_fits, patience_s=patience_s)
        return open_pool(Path(memory.pool_file), memory.capacity_bytes, memory.slab_bytes, await_memory)
    wants_reserved = memory.huge_pages == "reserved"
    pool = inherit(kept, memory.capacity_bytes, memory.slab_bytes, check_memory_fits)
    if pool is None:
        if kept is not None:
            systemd.forget(POOL_NAME)
        _await_room(check_pool_fits, memory, FORGET_S if kept is not None else 0.0)
        pool = ArenaFile.make(memory.capacity_bytes, memory.slab_bytes, reserved=wants_reserved)
        systemd.store(POOL_NAME, pool.fd)
    elif pool.reserved != wants_reserved:
        log.warning(
            'memory.huge_pages = "%s": the memory tier that was kept %s and is used as it is; the setting takes '
            "effect after systemctl stop and start, which lose the contents of memory",
            memory.huge_pages,
            "lies in reserved huge pages" if pool.reserved else "does not lie in reserved huge pages",
        )
    if memory.huge_pages in ("auto", "transparent") and not pool.reserved:
        reason = why_not_transparent()
        if not reason:
            pool.ask_for_huge_pages()
        elif memory.huge_pages == "transparent":
            log.warning('memory.huge_pages = "transparent": there are no huge pages: %s', reason)
    return pool


def _await_room(check: Callable[[T], None], room: T, patience_s: float) -> None:
    """Raises what `check` of the `room` still raises at the deadline. Memory that systemd releases takes some time to
    be free.
    """
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            check(room)
        except ConfigError:
            time.sleep(0.1)
        else:
            return
    check(room)
