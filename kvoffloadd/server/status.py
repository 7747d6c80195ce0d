"""The reply to `status`: the figures of the whole daemon in one map. Metrics and `kvoffloadd top` are views of it.

docs/STATUS.md explains every key; a test compares them. Names are stable, and new ones may be added.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from kvoffloadd import __version__
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.cache.stats.histogram import Histogram
from kvoffloadd.linux.memorylimits import page_table_bytes
from kvoffloadd.linux.standarderror import lines_lost
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.scheduling.steps import Steps
from kvoffloadd.server.context import Context, OpenSession
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.units import format_bytes

S = TypeVar("S")
T = TypeVar("T")

NAMESPACES_MAX, SESSIONS_MAX = 1000, 3000
"""The largest numbers of namespaces and sessions in a reply, since its frame is bounded."""

LABEL_CHARS = 64
"""A reply truncates each label, which an engine chooses, to this number of characters: 256 bytes at most."""

STEP_ITEMS = 64
"""The sessions, namespaces or lanes that one step describes, in a fraction of a millisecond."""

SLOW_JOBS_MAX = 20
SLOW_S = 0.5
"""A job that has been under way for longer is listed: copies take milliseconds."""


def describe(context: Context, uid: int | None = None) -> Steps[dict[str, Any]]:
    """Returns the whole report. With `uid`, returns only the figures that this user may see: the user's own, and those
    of the daemon that do not depend on other users (the lag of the loop can be measured from outside anyway). The
    figures are taken at different moments.
    """
    sessions = [session for session in context.sessions if uid in (None, session.peer.uid)]
    report = {
        "version": __version__,
        "boot_id": context.boot_id.hex(),
        "pid": os.getpid(),
        "uptime_s": round(time.monotonic() - context.started_s, 3),
        "draining": context.draining,
        **(_all_users(context) if uid is None else _one_user(context, uid, sessions)),
    }
    yield
    if uid is None:
        lanes = _lanes(context)
        figures = yield from _each(list(lanes.values()), lambda lane: lane.figures())
        report["lanes"] = dict(zip(lanes, figures, strict=True))
    report["quotas"] = context.cache.entries.keyspaces.quotas.figures(uid)
    report["leases"] = asdict(context.instances.held(uid))
    report["loop"] = context.lag.figures()
    report["accounts"] = _accounts(context, uid)
    yield
    report["open_sessions"] = dict(Counter(session.role or "greeting" for session in sessions))
    report["sessions"] = yield from _each(sessions[:SESSIONS_MAX], lambda session: session.figures())
    slow = yield from _each(sessions, lambda session: session.slow_jobs(SLOW_S))
    report["slow_jobs"] = slowest([job for jobs in slow for job in jobs])
    yield
    report["lookups"] = context.cache.lookups.figures(uid)
    yield
    namespaces = (n for n in list(context.cache.namespaces.values()) if uid in (None, n.uid))
    report["namespaces"] = yield from _each(list(itertools.islice(namespaces, NAMESPACES_MAX)), _namespace)
    return report


def tier_sizes(context: Context) -> str:
    """Returns for the log what the tiers of this host can hold now."""
    sizes = [f"{format_bytes(context.cache.tier.capacity_bytes)} in memory"]
    if context.disk is not None:
        used = [root.capacity_bytes for root in context.disk.roots if root.state != RootState.OFF]
        missing = len(used) < len(context.disk.roots)
        of_all = f" ({len(used)} of {len(context.disk.roots)} roots)" if missing else ""
        sizes.append(f"{format_bytes(sum(used))} on disk{of_all}")
    return ", ".join(sizes)


def _each(items: Sequence[S], figures: Callable[[S], T]) -> Steps[list[T]]:
    rows = []
    for number, item in enumerate(items):
        if number % STEP_ITEMS == 0:
            yield
        rows.append(figures(item))
    return rows


def short_label(label: str) -> str:
    """Returns a label in the form that replies have."""
    return label if len(label) <= LABEL_CHARS else label[: LABEL_CHARS - 1] + "…"


def _shown(counter: float | Histogram) -> object:
    return counter.figures() if isinstance(counter, Histogram) else counter


def _all_users(context: Context) -> dict[str, Any]:
    cache, jobs = context.cache, context.jobs
    return {
        "page_table_bytes": page_table_bytes(),
        "memory": cache.tier.gauges(),
        "cache": {**cache.figures(), "unsealed": jobs.unsealed},
        **({"disk": context.disk.figures()} if context.disk else {}),
        **({"remote": context.remote.figures()} if context.remote else {}),
        "retention": {
            **cache.retention.figures(),
            "saved": context.claims.is_saved,
            "keys_unkept": cache.eviction.keys_unkept,
            "disk_keys_unkept": context.disk.reclaim.keys_unkept if context.disk else 0,
        },
        "clears": context.clearings.figures(),
        "deletions": context.deletions.figures(),
        "transfers": {
            str(direction): {name: _shown(getattr(counters, name)) for name in counters.__slots__}
            for direction, counters in jobs.counters.items()
        },
        "running": {"jobs": len(jobs.running), "holds": jobs.holds},
        "quarantine": {"jobs": len(context.quarantine), "bytes": context.quarantine.held_bytes},
        "server": {
            **{name: getattr(context.counters, name) for name in context.counters.__slots__},
            "log_lines_lost": lines_lost(),
        },
        "devices": {
            device.kind: {**device.gauges(), "loads_verified": jobs.verification(device).value}
            for device in context.devices
        },
        "hash_lane": {"queued": context.hash_lane.queued, "running": context.hash_lane.running},
        "instances": len(context.instances),
    }


def _one_user(context: Context, uid: int, sessions: Sequence[OpenSession]) -> dict[str, Any]:
    cache = context.cache
    namespaces = [namespace for namespace in cache.namespaces.values() if namespace.uid == uid]
    return {
        "memory": {
            "capacity_bytes": cache.tier.capacity_bytes,
            "used_bytes": sum(namespace.bytes for namespace in namespaces),
        },
        "cache": {**cache.lookups.totals(uid), "keys": sum(namespace.keys for namespace in namespaces)},
        "running": {"jobs": context.accounts.of(uid).used.get("jobs", 0)},
        "server": {"requests": sum(session.requests for session in sessions)},
    }


def slowest(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the slowest jobs, the slowest first."""
    return sorted(jobs, key=lambda job: -float(job["age_s"]))[:SLOW_JOBS_MAX]


def _lanes(context: Context) -> dict[str, Lane]:
    """Returns lanes by their resource: a device, the arena's payloads, a disk root. Each user has some."""
    lanes = {
        f"{device.kind} {lane.name.removeprefix('gpu-')}": lane for device in context.devices for lane in device.lanes()
    }
    lanes["memory hash"] = context.hash_lane
    if context.disk:
        for root in context.disk.roots:
            lanes |= {f"{root.name} read": root.read_lane, f"{root.name} write": root.write_lane}
    return lanes


def _accounts(context: Context, uid: int | None) -> dict[str, dict[str, int]]:
    accounts = context.accounts.figures()
    for user, groups in context.cache.entries.keyspaces.by_uid.items():
        accounts.setdefault(str(user), {})["groups"] = groups
        if held := context.cache.entries.held.pages(user):
            accounts[str(user)]["held_bytes"] = held * PAGE_BYTES
    return {name: used for name, used in accounts.items() if uid is None or name == str(uid)}


def _namespace(namespace: Namespace) -> dict[str, Any]:
    return {
        "namespace": namespace.name,
        "label": short_label(namespace.label),
        "uid": namespace.uid,
        "epoch": namespace.epoch,
        "keys": namespace.keys,
        "bytes": namespace.bytes,
        "sessions": namespace.sessions,
    }
