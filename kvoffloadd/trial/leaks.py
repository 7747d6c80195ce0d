"""What a daemon holds for others, before they came and after they left: the difference is a leak."""

from __future__ import annotations

import os
from typing import Any

from kvoffloadd.client import Client
from kvoffloadd.trial.process import mapped_memfds, open_fds
from kvoffloadd.trial.wait import HANG_S, within

STAYS = ("groups",)
"""What is charged for as long as keys are held, whoever has left."""

DISK_FDS_MAX = 5
"""What each disk root keeps open at rest: two directories, the lock, and the segments that are written next."""

_DRIVER_FILES = ("/dev/nvidia", "/dev/dri")
"""What a GPU's driver keeps open for as long as the process lives."""

Used = dict[str, int]
"""What others use of a daemon, by what it is."""


def in_use(status: dict[str, Any]) -> Used:
    """What a daemon's status says is in use."""
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
"""Of a daemon that nobody uses but an observer of this user."""


def more_than(before: Used, now: Used) -> list[str]:
    """What is used more than before, each said."""
    more = {name: amount - before.get(name, 0) for name, amount in now.items()}
    return [f"{amount} {name}" for name, amount in more.items() if amount > 0]


def held(observer: Client, pid: int, memory_prefix: str) -> Used:
    """What it holds now, by its status and by the kernel, unless that does not let us see. `memory_prefix`: of the
    names of the memfds that count. Descriptors of files in disk roots count if they are more than are open at rest.
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
    """What it holds more than before, each said; waits a moment for what is still ending."""
    found: list[str] = []

    def nothing() -> bool:
        found[:] = more_than(before, held(observer, pid, memory_prefix))
        return not found

    return [] if within(nothing, HANG_S, every_s=0.05) is not None else found


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
