"""Statuses of a daemon that there is not."""

from __future__ import annotations

import copy
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
MISSED = (
    "never_stored", "evicted", "cleared", "failed_verification", "other_namespace", "incomplete", "pending",
)  # fmt: skip


def lane(busy_s: float = 0.0, **figures: Any) -> dict[str, Any]:
    idle = {"threads": 2, "queued": 0, "running": 0, "oldest_queued_s": 0.0, "oldest_running_s": 0.0}
    return {**idle, "busy_s": busy_s, **figures}


def session(number: int, role: str, instance: int, **figures: Any) -> dict[str, Any]:
    return {
        "session": number, "instance": instance, "pid": 1000 + number, "uid": 0, "role": role,
        "namespace": "meta/Llama-3.1-8B", "requests": 5, "jobs": 1, "registrations": 1, "mapped_bytes": GIB,
        "devices": ["host"], **figures,
    }  # fmt: skip


def root(path: str, state: str = "ok", **figures: Any) -> dict[str, Any]:
    return {
        "path": path, "state": state, "reason": "" if state == "ok" else "no space left on device",
        "used_bytes": 40 * GIB, "capacity_bytes": 100 * GIB, "read_errors": 0, "write_errors": 0, "slowest_s": 0.0,
        "read_bytes": 0, "written_bytes": 0, **figures,
    }  # fmt: skip


def status(**figures: Any) -> dict[str, Any]:
    """Returns a status with a disk, two engines, a slow job and misses of all kinds, unless given otherwise."""
    transfers = {"jobs": 100, "bytes": 10 * GIB, "keys": 1000, "seconds": 1.0}
    asked = {"hit": 600, "on_disk": 100, "missed": dict.fromkeys(MISSED, 50)}
    made = {
        "version": "1.2.3", "boot_id": "ab", "pid": 4242, "uptime_s": 8000.0, "draining": False,
        "memory": {"used_bytes": 48 * GIB, "capacity_bytes": 64 * GIB},
        "cache": {"keys": 1_234_567},
        "disk": {
            "roots": [root("/nvme0/kvoffloadd"), root("/nvme1/kvoffloadd", "full")], "keys": 7_654_321,
            "cleared_records": 0, "backlog_bytes": 12 * MIB, "demoted": {"bytes": 0, "keys": 0},
            "promoted": {"bytes": 0, "keys": 0},
        },
        "transfers": {"store": transfers, "load": transfers},
        "running": {"jobs": 3, "holds": 10}, "leases": {"read": 2, "keys": 512, "write": 1, "parts": 64},
        "loop": {"recent_lag_s": 0.0004, "worst_lag_s": 0.012},
        "server": {"requests": 1000, "errors": 0, "busy": 0, "peers_killed": 0},
        "lanes": {"host store": lane(), "host load": lane(), "memory hash": lane()},
        "sessions": [
            session(1, "scheduler", 1, mapped_bytes=0, devices=[]), session(2, "worker", 1), session(3, "worker", 1),
            session(4, "worker", 2, devices=["cuda:0123456789abcdef0123456789abcdef"]), session(5, "observer", 3),
            session(6, "worker", 0),
        ],
        "slow_jobs": [
            {"session": 2, "pid": 1002, "job": 7, "direction": "store", "age_s": 12.5, "payloads": 64,
             "waits_for": "signal"},
        ],
        "lookups": [
            {"namespace": "meta/Llama-3.1-8B#00112233", "uid": 0, "asked": 1050, **asked, "new": 150,
             "ceiling_rate": 0.857, "asked_tokens": 16_800, "hit_tokens": 8_400},
            {"namespace": "Qwen3-32B#44556677", "uid": 0, "asked": 0, "hit": 0, "on_disk": 0,
             "missed": dict.fromkeys(MISSED, 0), "new": 0, "ceiling_rate": 0.0,
             "asked_tokens": 0, "hit_tokens": 0},
        ],
        "namespaces": [
            {"namespace": "meta/Llama-3.1-8B#00112233", "keys": 1_234_567, "bytes": 48 * GIB, "sessions": 5},
            {"namespace": "Qwen3-32B#44556677", "keys": 0, "bytes": 0, "sessions": 1},
        ],
        "devices": {"host": {"copies": 0}},
    }  # fmt: skip
    return {**copy.deepcopy(made), **figures}
