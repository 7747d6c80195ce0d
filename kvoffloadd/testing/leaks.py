"""Compares what a daemon holds for others before they came and after they left: the difference is a leak."""

from __future__ import annotations

import os
from typing import Any

from kvoffloadd.client import Client
from kvoffloadd.testing.process import mapped_memfds, open_fds
from kvoffloadd.testing.wait import HANG_S, within

STAYS = ("groups",)
"""Charges that last as long as keys are held, even after their users have left."""

DISK_FDS_MAX = 5
"""Descriptors that each disk root keeps open at rest: two directories, the lock, and the next segments to write."""

_DRIVER_FILES = ("/dev/nvidia", "/dev/dri")
"""Files that a GPU's driver keeps open for as long as the process lives."""

Used = dict[str, int]
"""Amounts of a daemon that others use, by name."""


def in_use(status: dict[str, Any]) -> Used:
    """Returns the amounts in use according to a daemon's status."""
    devices = status["devices"].values()
    charged = {
        f"{name} charged to uid {uid}": amount
        for uid, used in status["accounts"].items()
        for name, amount in used.items()
        if name not in STAYS
    }
    return charged | {
        "instances": status["instances"],
        "jobs": status["running"]["jobs"],
        "holds": status["running"]["holds"],
        "unsealed slots": status["cache"]["unsealed"],
        "mapped bytes of workers' memory": sum(device["mapped_bytes"] for device in devices),
        "copies": sum(device["copies"] for device in devices),
        "sessions": len(status["sessions"]),
    }


UID = os.getuid()
OBSERVER_ALONE: Used = {"instances": 1, "sessions": 1, f"sessions charged to uid {UID}": 1}
"""The amounts of a daemon without peers, except one observer of this user."""


def more_than(before: Used, now: Used) -> list[str]:
    """Describes each amount that is larger than before."""
    more = {name: amount - before.get(name, 0) for name, amount in now.items()}
    return [f"{amount} {name}" for name, amount in more.items() if amount > 0]


def held(observer: Client, pid: int, memory_prefix: str) -> Used:
    """Returns what it holds now, according to its status and, if permitted, to the kernel. `memory_prefix`: the prefix
    of the names of the memfds that count. Descriptors of files in disk roots count if more are open than at rest.
    """
    status = observer.status()
    used = in_use(status)
    roots = tuple(root["path"] + "/" for root in status.get("disk", {}).get("roots", ()))
    try:
        files = [file for file in open_fds(pid).values() if not file.startswith(_DRIVER_FILES)]
        mappings = mapped_memfds(pid, memory_prefix).total()
    except OSError:
        return used
    on_disk = sum(f"{file}/".startswith(roots) for file in files) if roots else 0
    return used | {
        "descriptors": len(files) - on_disk,
        "descriptors of files on disk": max(on_disk - DISK_FDS_MAX * len(roots), 0),
        "mappings of workers' memory": mappings,
    }


def leaks(observer: Client, pid: int, memory_prefix: str, before: Used) -> list[str]:
    """Describes each amount that is larger than before; waits a moment for operations that are still ending."""
    found: list[str] = []

    def nothing() -> bool:
        found[:] = more_than(before, held(observer, pid, memory_prefix))
        return not found

    return [] if within(nothing, HANG_S, every_s=0.05) is not None else found


def unreturned_slots(observer: Client) -> list[str]:
    """Drops every key of every namespace, and describes what the tiers still hold then: it can never be freed."""
    observer.clear(everything=True)
    status = observer.status()
    used, keys = status["memory"]["used_bytes"], status["cache"]["keys"]
    found = [f"{used} bytes in slots and {keys} keys after everything was cleared"] if used or keys else []
    on_disk, records = (status.get("disk", {}).get(name, 0) for name in ("keys", "records"))
    if on_disk or records:
        found.append(f"{on_disk} keys and {records} records on disk after everything was cleared")
    return found
