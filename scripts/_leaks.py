"""What a daemon holds for others, before they came and after they left: the difference is a leak."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from _daemon import mapped_memfds, open_fds

if TYPE_CHECKING:
    from kvoffloadd.client import Client

LEAVE_S = 5.0
"""How long the daemon may take to forget sessions that have ended."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a daemon holds. `fds` None: the kernel does not let us see."""

    fds: int | None
    mappings: int
    accounts: dict[str, Any]
    instances: int


def held(observer: Client, pid: int, memory_prefix: str) -> Held:
    """What it holds now. `memory_prefix`: of the names of the memfds that count."""
    status = observer.status()
    try:
        fds, mappings = len(open_fds(pid)), mapped_memfds(pid, memory_prefix).total()
    except OSError:
        fds, mappings = None, 0
    return Held(fds, mappings, status["accounts"], status["instances"])


def leaks(observer: Client, pid: int, memory_prefix: str, before: Held) -> list[str]:
    """What it holds more than before, each said; waits a moment for what is still ending."""
    until = time.monotonic() + LEAVE_S
    while (found := _difference(before, held(observer, pid, memory_prefix))) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _difference(before: Held, now: Held) -> list[str]:
    found = []
    if before.fds is not None and now.fds is not None and now.fds > before.fds:
        found.append(f"{now.fds - before.fds} descriptors")
    if now.mappings:
        found.append(f"{now.mappings} mappings of workers' memory")
    if now.instances > before.instances:
        found.append(f"{now.instances - before.instances} instances")
    for uid, used in now.accounts.items():
        for name, amount in used.items():
            more = amount - before.accounts.get(uid, {}).get(name, 0)
            if more > 0:
                found.append(f"{more} {name} charged to uid {uid}")
    return found


def unreturned_slots(observer: Client) -> list[str]:
    """Drops every key of every namespace; what the memory tier still holds then, nobody will ever give back."""
    observer.clear(everything=True)
    status = observer.status()
    used, keys = status["memory"]["used_bytes"], status["cache"]["keys"]
    return [f"{used} bytes in slots and {keys} keys after everything was cleared"] if used or keys else []
