"""What `status` tells: the figures of all rooms in one map. Metrics and `kvoffloadd top` are views of it.

docs/STATUS.md explains every key; a test compares them. Names are stable, new ones may come.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvoffloadd import __version__
from kvoffloadd.cache.asked import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffloadd.server.context import Context
    from kvoffloadd.server.session import Session

NAMESPACES_TOLD = 1000
"""At most so many, since the frame is bounded."""

SLOW_JOBS_TOLD = 20
SLOW_S = 0.5
"""A job that has been under way for longer is told of: copies take milliseconds."""


def tell(context: Context, uid: int | None = None) -> dict[str, Any]:
    """Everything; or what one user may know: that user's own figures, and of the daemon only what nobody else's doings
    change (how late the loop is, everybody can measure).
    """
    sessions = [session for session in context.sessions if uid in (None, session.peer.uid)]
    return {
        "version": __version__,
        "boot_id": context.boot_id.hex(),
        "pid": os.getpid(),
        "uptime_s": round(time.monotonic() - context.started_s, 3),
        "draining": context.draining,
        **(_all_users(context) if uid is None else _one_user(context, uid, sessions)),
        "leases": asdict(context.instances.held(uid)),
        "loop": context.lag.figures(),
        "accounts": _accounts(context, uid),
        "sessions": [session.figures() for session in sessions],
        "slow_jobs": slowest([job for session in sessions for job in session.slow_jobs(SLOW_S)]),
        "lookups": context.cache.lookups.figures(uid),
        "namespaces": _namespaces(context, uid),
    }


def _all_users(context: Context) -> dict[str, Any]:
    cache, transfers = context.cache, context.transfers
    return {
        "memory": cache.tier.gauges(),
        "cache": {**cache.figures(), "unsealed": transfers.unsealed},
        **({"disk": cache.disk.figures()} if cache.disk else {}),
        "transfers": {
            str(direction): {name: getattr(counters, name) for name in counters.__slots__}
            for direction, counters in transfers.counters.items()
        },
        "running": {"jobs": len(transfers.running), "holds": transfers.holds},
        "server": {name: getattr(context.counters, name) for name in context.counters.__slots__},
        "devices": {device.kind: device.gauges() for device in context.devices},
        "lanes": _lanes(context),
        "hash_lane": {"queued": context.hash_lane.queued, "running": context.hash_lane.running},
        "instances": len(context.instances),
    }


def _one_user(context: Context, uid: int, sessions: Sequence[Session]) -> dict[str, Any]:
    cache = context.cache
    mine = [namespace for namespace in cache.namespaces.values() if namespace.uid == uid]
    return {
        "memory": {
            "capacity_bytes": cache.tier.capacity_bytes,
            "used_bytes": sum(namespace.bytes for namespace in mine),
        },
        "cache": {**cache.lookups.totals(uid), "keys": sum(namespace.keys for namespace in mine)},
        "running": {"jobs": context.accounts.of(uid).used.get("jobs", 0)},
        "server": {"requests": sum(session.requests for session in sessions)},
    }


def slowest(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest of them, the longest first."""
    return sorted(jobs, key=lambda job: -float(job["age_s"]))[:SLOW_JOBS_TOLD]


def _lanes(context: Context) -> dict[str, dict[str, int | float]]:
    """By what they work on: a device, the arena's payloads, a disk root."""
    lanes = {
        f"{device.kind} {lane.name.removeprefix('gpu-')}": lane for device in context.devices for lane in device.lanes()
    }
    lanes["memory hash"] = context.hash_lane
    if context.cache.disk:
        for root in context.cache.disk.roots:
            lanes |= {f"{root.path} read": root.read_lane, f"{root.path} write": root.write_lane}
    return {name: lane.figures() for name, lane in lanes.items()}


def _accounts(context: Context, uid: int | None) -> dict[str, dict[str, int]]:
    accounts = context.accounts.figures()
    for user, groups in context.cache.entries.spaces.by_uid.items():
        accounts.setdefault(str(user), {})["groups"] = groups
    return {name: used for name, used in accounts.items() if uid is None or name == str(uid)}


def _namespaces(context: Context, uid: int | None) -> list[dict[str, Any]]:
    mine = (n for n in context.cache.namespaces.values() if uid in (None, n.uid))
    return [
        {
            "namespace": name_of(n),
            "label": n.label,
            "uid": n.uid,
            "epoch": n.epoch,
            "keys": n.keys,
            "bytes": n.bytes,
            "sessions": n.sessions,
        }
        for n in itertools.islice(mine, NAMESPACES_TOLD)
    ]
