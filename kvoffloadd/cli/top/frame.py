"""Derives what is shown at one instant from the statuses so far. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Status = Mapping[str, Any]
Figures = dict[str, Any]

SAMPLES_MAX = 240
WINDOW_S = 60.0
"""The window of recent hits, or since the first status if that is later."""

DIRECTIONS = ("store", "load", "demote", "promote", "fetch", "push")
REMOTE = {"fetch": "fetched", "push": "pushed"}


@dataclass(slots=True)
class History:
    """Statuses of one run of a daemon, with the time of each; a new run begins anew. Rates are kept over restarts."""

    samples: deque[tuple[float, Status]] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))
    rates: dict[str, deque[float]] = field(
        default_factory=lambda: {direction: deque(maxlen=SAMPLES_MAX) for direction in DIRECTIONS}
    )

    def add(self, now_s: float, status: Status) -> None:
        """Adds a status that came at `now_s`, on any monotonic clock."""
        if self.samples and self.samples[-1][1]["boot_id"] != status["boot_id"]:
            self.samples.clear()
        self.samples.append((now_s, status))
        for direction, figures in self.throughput().items():
            self.rates[direction].append(figures["bytes_per_s"])

    def miss(self) -> None:
        """Records that there is no daemon, and nothing moves."""
        for rates in self.rates.values():
            rates.append(0.0)

    @property
    def latest(self) -> Status:
        """Returns the last status."""
        return self.samples[-1][1]

    def window(self, seconds: float) -> tuple[float, Status, Status]:
        """Returns seconds, and the statuses at the beginning and end of about the last `seconds`; for a single status:
        0 s.
        """
        now, last = self.samples[-1]
        began, first = next((s for s in self.samples if s[0] >= now - seconds - 1e-3), self.samples[-1])
        if first is last and len(self.samples) > 1:
            began, first = self.samples[-2]
        return now - began, first, last

    def throughput(self) -> dict[str, Figures]:
        """Returns the throughput by direction, between the last two statuses."""
        seconds, first, last = self.window(0.0)
        found = {}
        for direction in DIRECTIONS if "transfers" in last else ():
            if direction in REMOTE and "remote" not in last:
                continue
            (bytes0, done0), (bytes1, done1) = _moved(first, direction), _moved(last, direction)
            found[direction] = {
                "bytes": bytes1,
                "bytes_per_s": _rate(bytes1 - bytes0, seconds),
                "unit": "jobs" if direction in ("store", "load") else "keys",
                "per_s": _rate(done1 - done0, seconds),
            }
        return found


def figures(history: History) -> Figures:
    """Returns everything that is shown, as in `--json`; names are stable."""
    status = history.latest
    seconds, first, _ = history.window(0.0)
    recent_s, then, _ = history.window(WINDOW_S)
    disk = status.get("disk")
    return {
        "version": status["version"],
        "boot_id": status["boot_id"],
        "pid": status["pid"],
        "uptime_s": status["uptime_s"],
        "draining": status["draining"],
        "interval_s": round(seconds, 3),
        "tiers": _tiers(status),
        "quotas": list(status.get("quotas", ())),
        "throughput": history.throughput(),
        "lookups": {
            "recent_s": round(recent_s, 3),
            "recent": _shares(_counts_since(status, then)),
            "total": _shares(_counts_since(status, None)),
            "ceiling_rate": _ceiling(status),
            **_tokens(status),
        },
        "namespaces": status["lookups"],
        "instances": _instances(status["sessions"]),
        "pinning_failures": _said_by(status.get("devices", {}), "pinning_failure"),
        "left_out": _said_by(status.get("devices", {}), "left_out"),
        "jobs": status["running"]["jobs"],
        "leases": dict(status["leases"]),
        "slow_jobs": list(status["slow_jobs"]),
        "lanes": _lanes(first, status, seconds),
        "roots": _roots(first, status, seconds),
        "backlog_bytes": disk["backlog_bytes"] if disk else 0,
        "remote": _remote(status.get("remote")),
        "loop": {name: status["loop"][name] for name in ("recent_lag_s", "worst_lag_s")},
        "server": {name: status["server"].get(name) for name in ("requests", "errors", "busy", "peers_killed")},
        "requests_per_s": _rate(status["server"]["requests"] - first["server"]["requests"], seconds),
    }


def _rate(amount: float, seconds: float) -> float:
    return round(max(amount, 0) / seconds, 3) if seconds > 0 else 0.0


def _moved(status: Status, direction: str) -> tuple[int, int]:
    """Returns bytes, and jobs or keys, since the daemon's start."""
    if direction in status["transfers"]:
        counters = status["transfers"][direction]
        return counters["bytes"], counters["jobs"]
    if direction in REMOTE:
        counters = status.get("remote", {}).get(REMOTE[direction], {})
    else:
        counters = status.get("disk", {}).get(f"{direction}d", {})
    return counters.get("bytes", 0), counters.get("keys", 0)


def _tiers(status: Status) -> list[Figures]:
    memory, disk, claims = status["memory"], status.get("disk"), status.get("retention", {})
    claimed = claims.get("memory_bytes", 0)
    tiers = [_tier("memory", memory["used_bytes"], memory["capacity_bytes"], status["cache"]["keys"], claimed)]
    if disk:
        used, capacity = (sum(root[f"{what}_bytes"] for root in disk["roots"]) for what in ("used", "capacity"))
        tiers.append(_tier("disk", used, capacity, disk["keys"], claims.get("disk_bytes", 0)))
    return tiers


def _tier(name: str, used_bytes: int, capacity_bytes: int, keys: int, claimed_bytes: int) -> Figures:
    return {
        "tier": name,
        "used_bytes": used_bytes,
        "capacity_bytes": capacity_bytes,
        "keys": keys,
        "claimed_bytes": claimed_bytes,
    }


def _counts_since(status: Status, since: Status | None) -> Figures:
    """Returns keys by outcome, over all namespaces, since an earlier status or the start."""
    now, before = _outcomes(status), _outcomes(since) if since else {}
    return {name: max(count - before.get(name, 0), 0) for name, count in now.items()}


def _outcomes(status: Status) -> dict[str, int]:
    found = {"hit": 0, "on_disk": 0, "remote": 0}
    for row in status["lookups"]:
        for name, count in [
            *((tier, row.get(tier, 0)) for tier in ("hit", "on_disk", "remote")),
            *row["missed"].items(),
        ]:
            found[name] = found.get(name, 0) + count
    return found


def _shares(keys: Mapping[str, int]) -> Figures:
    total = sum(keys.values())
    return {
        "asked": total,
        "hit_rate": round((keys["hit"] + keys["on_disk"] + keys["remote"]) / total, 4) if total else 0.0,
        "keys": dict(keys),
    }


def _ceiling(status: Status) -> float:
    """Returns the hit rate that no cache of all namespaces together could exceed."""
    total = sum(row["asked"] for row in status["lookups"])
    return round((total - sum(row["new"] for row in status["lookups"])) / total, 4) if total else 0.0


def _tokens(status: Status) -> Figures:
    """Returns the tokens asked for since the start, and the share of them that could be restored."""
    asked, hit = (sum(row.get(name, 0) for row in status["lookups"]) for name in ("asked_tokens", "hit_tokens"))
    return {"asked_tokens": asked, "token_hit_rate": round(hit / asked, 4) if asked else 0.0}


def _instances(sessions: Iterable[Status]) -> list[Figures]:
    """Returns the engines; observers are excluded, and so are clients that are about to leave."""
    found: dict[int, Figures] = {}
    for session in sessions:
        if session["role"] not in ("worker", "scheduler") or not session["instance"]:
            continue
        row = found.setdefault(
            session["instance"],
            {
                "instance": session["instance"], "namespace": session["namespace"], "uid": session["uid"],
                "workers": 0, "schedulers": 0, "pids": [], "devices": [], "mapped_bytes": 0, "jobs": 0,
            },
        )  # fmt: skip
        row[f"{session['role']}s"] += 1
        row["pids"] = sorted({*row["pids"], session["pid"]})
        row["devices"] = sorted({*row["devices"], *session["devices"]})
        row["mapped_bytes"] += session["mapped_bytes"]
        row["jobs"] += session["jobs"]
    return sorted(found.values(), key=lambda row: (-row["mapped_bytes"], row["instance"]))


def _said_by(devices: Mapping[str, Status], gauge: str) -> dict[str, str]:
    """Returns each device's values there; devices without any are left out."""
    return {kind: text for kind, gauges in devices.items() if (text := gauges.get(gauge))}


def _lanes(first: Status, last: Status, seconds: float) -> list[Figures]:
    """Returns the lanes. `busy_rate`: share of the threads' time that was work."""
    found = []
    for name, lane in last.get("lanes", {}).items():
        before = first["lanes"].get(name, lane)
        busy = _rate(lane["busy_s"] - before["busy_s"], seconds) / lane["threads"]
        kept = ("queued", "running", "threads", "oldest_queued_s", "oldest_running_s")
        found.append({"lane": name, "busy_rate": round(min(busy, 1.0), 4), **{key: lane[key] for key in kept}})
    return found


def _remote(remote: Status | None) -> Figures | None:
    """Returns the remote tier; None: there is none."""
    if remote is None:
        return None
    kept = ("state", "reason", "backlog_bytes", "quarantined_bytes")
    return {**{key: remote[key] for key in kept}, "pid": remote["agent"]["pid"], "about": remote["agent"]["about"]}


def _roots(first: Status, last: Status, seconds: float) -> list[Figures]:
    before = {root["path"]: root for root in first.get("disk", {}).get("roots", ())}
    found = []
    for root in last.get("disk", {}).get("roots", ()):
        old = before.get(root["path"], root)
        kept = ("path", "state", "reason", "used_bytes", "capacity_bytes", "read_errors", "write_errors", "slowest_s")
        rates = {
            f"{what}_bytes_per_s": _rate(root[f"{key}_bytes"] - old[f"{key}_bytes"], seconds)
            for what, key in (("read", "read"), ("write", "written"))
        }
        found.append({**{key: root[key] for key in kept}, **rates})
    return found
