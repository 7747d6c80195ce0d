"""What a daemon holds for others, before they came and after they left: the difference is a leak."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scripts.harness.daemon import mapped_memfds, open_fds

if TYPE_CHECKING:
    from kvoffloadd.client import Client

LEAVE_S = 60.0
"""A daemon that has not forgotten sessions that have ended by then never will."""

STAYS = ("groups",)
"""What is charged for as long as keys are held, whoever has left."""

DISK_FDS_MAX = 5
"""What each disk root keeps open at rest: two directories, the lock, and the segments that are written next."""


_DRIVER_FILES = ("/dev/nvidia", "/dev/dri")
"""What a GPU's driver keeps open for as long as the process lives."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a daemon holds. `fds` None: the kernel does not let us see. `disk_fds`: those of them more than its disk
    roots keep open. `mapped_bytes`: of workers' memory, shared and on GPUs, as the daemon says.
    """

    fds: int | None
    disk_fds: int
    mappings: int
    mapped_bytes: int
    accounts: dict[str, Any]
    instances: int


def held(observer: Client, pid: int, memory_prefix: str) -> Held:
    """What it holds now. `memory_prefix`: of the names of the memfds that count."""
    status = observer.status()
    mapped_bytes = sum(device["mapped_bytes"] for device in status["devices"].values())
    roots = tuple(root["path"] + "/" for root in status.get("disk", {}).get("roots", ()))
    try:
        files = [file for file in open_fds(pid).values() if not file.startswith(_DRIVER_FILES)]
        mappings = mapped_memfds(pid, memory_prefix).total()
    except OSError:
        return Held(None, 0, 0, mapped_bytes, status["accounts"], status["instances"])
    on_disk = sum(f"{file}/".startswith(roots) for file in files) if roots else 0
    disk_fds = max(on_disk - DISK_FDS_MAX * len(roots), 0)
    return Held(len(files) - on_disk, disk_fds, mappings, mapped_bytes, status["accounts"], status["instances"])


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
    if now.disk_fds:
        found.append(f"{now.disk_fds} descriptors of files on disk")
    if now.mappings:
        found.append(f"{now.mappings} mappings of workers' memory")
    if now.mapped_bytes > before.mapped_bytes:
        found.append(f"{now.mapped_bytes - before.mapped_bytes} mapped bytes of workers' memory")
    if now.instances > before.instances:
        found.append(f"{now.instances - before.instances} instances")
    for uid, used in now.accounts.items():
        for name, amount in used.items():
            more = amount - before.accounts.get(uid, {}).get(name, 0)
            if more > 0 and name not in STAYS:
                found.append(f"{more} {name} charged to uid {uid}")
    return found


def unreturned_slots(observer: Client) -> list[str]:
    """Drops every key of every namespace; what the tiers still hold then, nobody will ever give back."""
    observer.clear(everything=True)
    status = observer.status()
    used, keys = status["memory"]["used_bytes"], status["cache"]["keys"]
    found = [f"{used} bytes in slots and {keys} keys after everything was cleared"] if used or keys else []
    on_disk, records = (status.get("disk", {}).get(name, 0) for name in ("keys", "records"))
    if on_disk or records:
        found.append(f"{on_disk} keys and {records} records on disk after everything was cleared")
    return found
