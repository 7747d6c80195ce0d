"""Converts a status to metrics. It is pure: nothing is counted here. docs/STATUS.md lists them; a test compares the
two.

Every metric is there from the start, with or without samples. Labels are bounded: namespaces, directions, reasons,
lanes, devices and disk roots; never anything of a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

PREFIX = "kvoffloadd_"
NAMESPACES_MAX, OTHERS = 64, "other"
DISK_STATES = ("ok", "full", "read-only", "off")
REMOTE_STATES = ("starting", "ok", "open", "stuck", "closed")
BAD = {"store": "cleared", "load": "failed_verification"}
"""The label, by direction, for keys of jobs that ended as done, but with payloads that do not count."""

Status = Mapping[str, Any]
Samples = Iterable[tuple[tuple[str, ...], float]]


def families(status: Status) -> Iterator[Metric]:
    """Returns all metrics, from a status with everything in it."""
    yield from _daemon(status)
    yield from _lookups(status)
    yield from _memory(status)
    yield from _transfers(status)
    yield from _waiting(status)
    yield from _loop(status["loop"])
    yield from _server(status)
    yield from _devices(status["devices"])
    yield from _disk(status.get("disk", {}))
    yield from _remote(status.get("remote", {}))


def _counter(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _gauge(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _one(number: float) -> Samples:
    return [((), number)]


def _daemon(status: Status) -> Iterator[Metric]:
    yield _gauge("build_info", "1, with the daemon's version.", [((status["version"],), 1)], "version")
    yield _gauge("uptime_seconds", "Since the start.", _one(status["uptime_s"]))
    yield _gauge("draining", "1 while the daemon shuts down.", _one(status["draining"]))


def _lookups(status: Status) -> Iterator[Metric]:
    rows = status["lookups"]
    yield _counter("asked_keys", "Keys asked for by pin.", _each(rows, "asked"), "namespace")
    hits = [
        ((row["namespace"], tier), row[key])
        for row in rows
        for tier, key in (("memory", "hit"), ("disk", "on_disk"), ("remote", "remote"))
    ]
    yield _counter("hit_keys", "Keys that hit, by tier.", hits, "namespace", "tier")
    yield _counter(
        "asked_tokens",
        "Tokens of the prompts that pin asked for, without those that the engine had itself.",
        _each(rows, "asked_tokens"),
        "namespace",
    )
    text = "Tokens among them in the prefixes that could be restored."
    yield _counter("hit_tokens", text, _each(rows, "hit_tokens"), "namespace")
    missed = [((row["namespace"], reason), count) for row in rows for reason, count in row["missed"].items()]
    yield _counter("missed_keys", "Keys that missed, by reason.", missed, "namespace", "reason")
    yield _gauge(
        "new_keys",
        "Different keys asked for before they were ever stored; an estimate.",
        _each(rows, "new"),
        "namespace",
    )
    yield _gauge(
        "hit_ceiling_ratio",
        "Share of the keys asked for that an unlimited cache would have had; an estimate.",
        _each(rows, "ceiling_rate"),
        "namespace",
    )
    held = _held(status)
    yield _gauge("namespace_keys", "Complete keys in memory.", [((n,), k) for n, (k, _) in held.items()], "namespace")
    yield _gauge(
        "namespace_bytes", "Committed payload in memory.", [((n,), b) for n, (_, b) in held.items()], "namespace"
    )


def _each(rows: Iterable[Status], key: str) -> Samples:
    return [((row["namespace"],), row[key]) for row in rows]


def _held(status: Status) -> dict[str, tuple[int, int]]:
    """Returns keys and bytes by namespace: first those that lookups count separately, then others as far as
    they fit.
    """
    names = {row["namespace"] for row in status["lookups"]} - {OTHERS}
    held: dict[str, tuple[int, int]] = {}
    for row in status["namespaces"]:
        if row["namespace"] not in names and len(names) < NAMESPACES_MAX:
            names.add(row["namespace"])
        name = row["namespace"] if row["namespace"] in names else OTHERS
        keys, size = held.get(name, (0, 0))
        held[name] = keys + row["keys"], size + row["bytes"]
    return held


def _memory(status: Status) -> Iterator[Metric]:
    memory, cache, disk = status["memory"], status["cache"], status.get("disk", {})
    uses = [((use,), memory[f"{use}_bytes"]) for use in ("used", "free", "unassigned", "tail")]
    yield _gauge("memory_capacity_bytes", "Size of the memory tier.", _one(memory["capacity_bytes"]))
    yield _gauge("memory_bytes", "Bytes of the memory tier, by use.", uses, "use")
    huge = _one(memory["huge_bytes"]) if "huge_bytes" in memory else []
    yield _gauge("memory_huge_bytes", "Bytes of the memory tier in huge pages, once it is prefaulted.", huge)
    yield _gauge("memory_keys", "Keys in memory, complete or not.", _one(cache["keys"]))
    yield _gauge("index_bytes", "Private memory that the index of the memory tier takes.", _one(cache["index_bytes"]))
    yield _gauge("unsealed_payloads", "Stored payloads that wait for their checksum.", _one(cache["unsealed"]))
    unrecorded = _one(status["clears"]["unrecorded"])
    yield _gauge("unrecorded_clears", "Clears that a disk or the remote store has not recorded yet.", unrecorded)
    deletions = status["deletions"]
    places = "Deletions of keys that a disk or the remote store has not recorded yet."
    yield _gauge("unrecorded_deletions", places, _one(deletions["unrecorded"]))
    graves = "What the daemon keeps of deleted keys, so that older copies do not come back."
    yield _gauge("tombstone_bytes", graves, _one(deletions["tombstone_bytes"]))
    for event, text in (
        ("reserved", "Slots reserved for payloads."),
        ("committed", "Payloads committed: stored, or read from disk."),
        ("aborted", "Reserved slots that were given back without a payload."),
        ("sealed", "Payloads whose checksum became known."),
    ):
        yield _counter(f"parts_{event}", text, _one(cache[f"parts_{event}"]))
    evicted = [(("memory",), cache["keys_evicted"]), (("disk",), disk.get("evicted_keys", 0))]
    yield _counter("evicted_keys", "Keys evicted to make room, by tier.", evicted, "tier")
    for name, key, text in (
        ("cleared_keys", "keys_cleared", "Keys that a clear dropped from memory."),
        ("deleted_keys", "keys_deleted", "Keys that requests to delete keys dropped from memory."),
        ("corrupt_keys", "keys_corrupt", "Keys dropped from memory because a payload did not match its checksum."),
        ("adopted_keys", "keys_adopted", "Keys taken over from the previous run."),
        ("not_adopted_parts", "parts_not_adopted", "Payloads of the previous run that were not taken over."),
        ("keys_without_space", "keys_without_space", "Keys that were not stored because nothing could be evicted."),
        ("keys_soon", "keys_soon", "Keys that clients said they would use again soon."),
        ("keys_done", "keys_done", "Keys that clients said they would not use again."),
        ("keys_touched", "keys_touched", "Keys in memory that engines used from caches of their own, as clients told."),
        ("slabs_taken_over", "slabs_taken_over", "Slabs that went from one slot size to another."),
        ("events_lost", "events_lost", "Key events that no subscriber received."),
    ):
        yield _counter(name, text, _one(cache[key]))
    yield from _retention(status["retention"])
    yield from _quotas(status["quotas"])


def _quotas(quotas: Sequence[Status]) -> Iterator[Metric]:
    def each(key: str) -> Samples:
        return [((row["kind"], row["name"]), row[key]) for row in quotas]

    for what, text in (
        ("bytes", "Memory that the keys under a quota take."),
        ("min_bytes", "Memory that others do not take from the keys under a quota."),
        ("max_bytes", "The most memory that the keys under a quota may take; 0 if there is no maximum."),
    ):
        yield _gauge(f"quota_{what}", text, each(f"memory_{what}"), "kind", "name")
    text = "Keys that went for others under the same quota."
    yield _counter("quota_evicted_keys", text, each("keys_evicted"), "kind", "name")
    text = "Keys that were not stored, since their quota had no room for them."
    yield _counter("quota_refused_keys", text, each("keys_refused"), "kind", "name")


def _retention(retention: Mapping[str, int]) -> Iterator[Metric]:
    yield _gauge("claims", "Claims that are in force.", _one(retention["claims"]))
    yield _counter("claims_made", "Claims that clients made.", _one(retention["claims_made"]))
    yield _counter("claims_expired", "Claims that held until their end.", _one(retention["claims_expired"]))

    def each(memory: str, disk: str) -> Samples:
        return [(("memory",), retention[memory]), (("disk",), retention[disk])]

    yield _gauge("claimed_keys", "Claimed keys, by tier.", each("memory_keys", "disk_keys"), "tier")
    yield _gauge("claimed_bytes", "Bytes of claimed keys, by tier.", each("memory_bytes", "disk_bytes"), "tier")
    for name, text, memory in (
        ("claims_lapsed", "Claims that a tier gave up, since their user may keep no more there.", "claims_lapsed"),
        ("claims_cut", "Claims cut to the beginning of their prompt, since a user may keep no more.", "claims_cut"),
        ("claimed_keys_evicted", "Claimed keys that were evicted, since nothing else was left.", "keys_unkept"),
    ):
        yield _counter(name, text, each(memory, f"disk_{memory}"), "tier")


def _transfers(status: Status) -> Iterator[Metric]:
    each = status["transfers"]
    disk = status.get("disk", {})
    lanes = status["lanes"]

    def of(key: str) -> Samples:
        return [((direction,), counters[key]) for direction, counters in each.items()]

    yield _counter("jobs", "Jobs that ended.", of("jobs"), "direction")
    yield _counter("jobs_not_done", "Jobs that failed, expired or were cancelled.", of("not_done"), "direction")
    yield _counter("payloads", "Payloads that jobs moved.", of("keys"), "direction")
    dropped = [
        ((direction, BAD[direction] if key == "bad" else key), counters[f"keys_{key}"])
        for direction, counters in each.items()
        for key in ("failed", "cancelled", "expired", "bad")
    ]
    yield _counter("dropped_payloads", "Payloads that jobs did not move, by reason.", dropped, "direction", "reason")
    yield _histograms(
        "job_seconds", "How long jobs took.", {way: figures["took_s"] for way, figures in each.items()}, "direction"
    )
    yield _counter("descriptors", "Runs of bytes that jobs named.", of("descriptors"), "direction")
    yield _counter("copies", "Copies issued for them, neighbours merged.", of("copies"), "direction")

    def busy(what: str) -> float:
        names = [f"{root['path']} {what}" for root in disk.get("roots", ())]
        return float(sum(lanes[name]["busy_s"] for name in names if name in lanes))

    demoted, promoted = (disk.get(what, {}).get("bytes", 0) for what in ("demoted", "promoted"))
    moved = [(("memory", direction), counters["bytes"], counters["seconds"]) for direction, counters in each.items()]
    moved += [(("disk", "demote"), demoted, busy("write")), (("disk", "promote"), promoted, busy("read"))]
    sizes = [(to, size) for to, size, _ in moved]
    if remote := status.get("remote"):
        sizes += [(("remote", way), remote[done]["bytes"]) for way, done in (("fetch", "fetched"), ("push", "pushed"))]
    yield _counter("transfer_bytes", "Payload bytes moved.", sizes, "tier", "direction")
    yield _counter(
        "transfer_seconds",
        "Memory: what jobs took together. Disk: what threads spent on I/O together.",
        [(to, seconds) for to, _, seconds in moved],
        "tier",
        "direction",
    )


def _waiting(status: Status) -> Iterator[Metric]:
    leases, lanes, slow = status["leases"], status["lanes"], status["slow_jobs"]
    yield _gauge("running_jobs", "Jobs under way.", _one(status["running"]["jobs"]))
    yield _gauge(
        "oldest_job_seconds",
        "How long the oldest job has been under way; 0: none for half a second.",
        _one(slow[0]["age_s"] if slow else 0),
    )
    kinds = [((kind,), leases[kind]) for kind in ("read", "write")]
    yield _gauge("leases", "Leases that instances hold.", kinds, "kind")
    yield _gauge("leased_keys", "Keys under read leases, once for each.", _one(leases["keys"]))
    yield _gauge("leased_parts", "Reserved parts under write leases.", _one(leases["parts"]))

    def of(key: str) -> Samples:
        return [((name,), lane[key]) for name, lane in lanes.items()]

    yield _gauge("lane_threads", "Threads of the lane.", of("threads"), "lane")
    yield _gauge("lane_queued", "Pieces of work that wait for a thread.", of("queued"), "lane")
    yield _gauge("lane_running", "Pieces of work that are running.", of("running"), "lane")
    yield _gauge(
        "lane_oldest_queued_seconds", "How long the oldest queued work has waited.", of("oldest_queued_s"), "lane"
    )
    yield _gauge(
        "lane_oldest_running_seconds", "How long the oldest running work has run.", of("oldest_running_s"), "lane"
    )
    yield _counter("lane_busy_seconds", "Working time of the lane's threads together.", of("busy_s"), "lane")


def _loop(loop: Status) -> Iterator[Metric]:
    total, buckets = 0, []
    for bound, count in loop["late_beats"].items():
        total += count
        buckets.append(("+Inf" if bound == "inf" else bound, total))
    yield HistogramMetricFamily(
        PREFIX + "loop_lag_seconds", "How late each beat of the event loop came.", buckets, loop["late_s"]
    )
    yield _gauge("loop_worst_lag_seconds", "The latest beat since the start.", _one(loop["worst_lag_s"]))
    yield _gauge("loop_recent_lag_seconds", "The latest beat of the last seconds.", _one(loop["recent_lag_s"]))


def _server(status: Status) -> Iterator[Metric]:
    counts = status["open_sessions"]
    roles = [((role,), counts.get(role, 0)) for role in ("worker", "scheduler", "observer")]
    yield _gauge("sessions", "Open sessions, by role.", roles, "role")
    yield _gauge("instances", "Engines and observers that have sessions.", _one(status["instances"]))
    held = "Memory that copies hold which do not end."
    yield _gauge("quarantined_bytes", held, _one(status["quarantine"]["bytes"]))
    for key, text in (
        ("sessions", "Sessions opened."),
        ("sessions_refused", "Connections that were refused."),
        ("requests", "Requests."),
        ("errors", "Requests that were answered with an error."),
        ("busy", "Requests that were answered `busy`."),
        ("peers_killed", "Peers whose process ended without `bye`."),
        ("drains_late", "Sessions whose copies did not end in time."),
        ("log_lines_lost", "Lines of the log that standard error did not take."),
    ):
        name = "sessions_opened" if key == "sessions" else key
        yield _counter(name, text, _one(status["server"][key]))


def _devices(devices: Mapping[str, Status]) -> Iterator[Metric]:
    def of(key: str) -> Samples:
        return [((kind,), gauges[key]) for kind, gauges in devices.items() if key in gauges]

    yield _gauge("mapped_bytes", "Workers' memory that is mapped.", of("mapped_bytes"), "device")
    yield _gauge("device_copies", "Copies under way.", of("copies"), "device")
    yield _gauge("pinned_bytes", "Bytes of the memory tier that are pinned for a GPU.", of("pinned_bytes"), "device")
    unpinned = of("unpinned_copies")
    yield _counter("unpinned_copies", "Copies from or to memory that is not pinned.", unpinned, "device")
    yield _counter("pitched_copies", "Pitched copies, each of a run of small rows.", of("pitched_copies"), "device")
    yield _counter("batch_failures", "Batched copies that the driver refused.", of("batch_failures"), "device")


def _disk(disk: Status) -> Iterator[Metric]:
    yield from _roots(disk.get("roots", ()))
    there = bool(disk)
    for name, key, text in (
        ("disk_keys", "keys", "Keys on disk that lookups can find."),
        ("disk_records", "records", "Records on disk."),
        (
            "disk_cleared_records",
            "cleared_records",
            "Records of cleared namespaces, or deleted keys, on disk.",
        ),
        ("disk_index_bytes", "index_bytes", "Private memory that the catalog of the disk tier takes."),
        ("disk_backlog_bytes", "backlog_bytes", "Payload that waits to be written, or is being written."),
        ("disk_quarantined_bytes", "quarantined_bytes", "Memory that can't be used until a disk answers."),
    ):
        yield _gauge(name, text, _one(disk[key]) if there else ())
    yield _counter("demoted_keys", "Keys written to disk.", _one(disk["demoted"]["keys"]) if there else ())
    reasons = [((reason.replace(" ", "_"),), count) for reason, count in disk.get("not_demoted", {}).items()]
    yield _counter("not_demoted_keys", "Keys that were not written to disk as intended, by reason.", reasons, "reason")
    promoted = disk.get("promoted", {})
    yield _counter("promoted_keys", "Keys read from disk.", _one(promoted["keys"]) if there else ())
    whys = ("without_space", "damaged", "unreadable", "cancelled", "no_resources")
    failures = [((why,), promoted[why]) for why in whys if there]
    yield _counter("promotion_failures", "Keys (without_space) and records that did not come.", failures, "reason")
    for name, key, text in (
        ("rewritten_records", "rewritten", "Records rewritten when their segment was given up."),
        ("rewritten_bytes", "rewritten_bytes", "Payload of rewritten records."),
    ):
        yield _counter(name, text, _one(disk[key]) if there else ())


def _roots(roots: Iterable[Status]) -> Iterator[Metric]:
    rows = list(roots)

    def of(key: str) -> Samples:
        return [((root["path"],), root[key]) for root in rows]

    yield _gauge("disk_capacity_bytes", "Capacity of the root.", of("capacity_bytes"), "root")
    yield _gauge("disk_used_bytes", "Size of the root's files.", of("used_bytes"), "root")
    states = [((root["path"], state), root["state"] == state) for root in rows for state in DISK_STATES]
    yield _gauge("disk_state", "1 for the state that the root is in.", states, "root", "state")
    yield _gauge("disk_segments", "Segments.", of("segments"), "root")
    errors = [((root["path"], what), root[f"{what}_errors"]) for root in rows for what in ("read", "write")]
    yield _counter("disk_errors", "Reads and writes that failed.", errors, "root", "operation")
    damaged = [
        ((root["path"], what), root[key])
        for root in rows
        for what, key in (("records", "damaged_at_start"), ("segments", "damaged_segments"))
    ]
    text = "Records and segments that were found damaged when the root was taken in."
    yield _counter("disk_damaged_at_start", text, damaged, "root", "what")
    moved = [
        ((root["path"], what), root[f"{key}_bytes"])
        for root in rows
        for what, key in (("read", "read"), ("write", "written"))
    ]
    yield _counter("disk_bytes", "Payload bytes read and written.", moved, "root", "operation")
    yield _counter("disk_segments_recycled", "Segments given up for new ones.", of("segments_recycled"), "root")


def _remote(remote: Status) -> Iterator[Metric]:
    there = bool(remote)

    def one(*names: str) -> Samples:
        value: Any = remote
        for name in names if there else ():
            value = value[name]
        return _one(value) if there else ()

    def by_reason(name: str) -> Samples:
        return [((reason.replace(" ", "_"),), count) for reason, count in remote.get(name, {}).items()]

    states = [((state,), remote["state"] == state) for state in REMOTE_STATES if there]
    yield _gauge("remote_state", "1 for the state that the store is in.", states, "state")
    yield _counter("remote_agent_ends", "Agents that ended or were killed.", one("agent", "ends"))
    yield _counter("remote_asked_keys", "Keys that the store was asked for.", one("asked"))
    yield _counter("remote_found_keys", "Keys that the store said it has.", one("found"))
    yield _counter("remote_fetched_keys", "Keys fetched from the store.", one("fetched", "keys"))
    text = "Keys that were asked for, or found, and did not come, by reason."
    yield _counter("remote_not_fetched_keys", text, by_reason("not_fetched"), "reason")
    yield _counter("remote_corrupt_keys", "Keys that failed verification, by reason.", by_reason("corrupt"), "reason")
    yield _counter("remote_pushed_keys", "Keys put into the store.", one("pushed", "keys"))
    text = "Keys that were not put into the store as intended, by reason."
    yield _counter("remote_not_pushed_keys", text, by_reason("not_pushed"), "reason")
    yield _gauge("remote_backlog_bytes", "Payload that waits to be put into the store.", one("backlog_bytes"))
    text = "Memory that can't be used until the agent answers or ends."
    yield _gauge("remote_quarantined_bytes", text, one("quarantined_bytes"))
    yield _counter("remote_cleared_elsewhere", "Clears by other hosts that were followed.", one("cleared_elsewhere"))
    overdue = _one(len(remote["eras_overdue"])) if there else []
    yield _gauge("remote_eras_overdue", "Namespaces whose era was not seen for some time, 64 at most.", overdue)
    yield _counter("remote_markers_lost", "Markers of eras that were found absent.", one("markers_lost"))
    yield _histogram("remote_lookup_seconds", "How long an answer of the store took.", remote.get("lookup_s"))
    yield _histogram("remote_get_seconds", "How long it took to fetch a batch of keys.", remote.get("get_s"))


def _histogram(name: str, text: str, figures: Status | None) -> Metric:
    return _histograms(name, text, {} if figures is None else {"": figures})


def _histograms(name: str, text: str, each: Mapping[str, Status], *labels: str) -> Metric:
    """Returns one histogram for each value of the label, or a single one without labels."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for value, figures in each.items():
        total, buckets = 0, []
        for bound, count in figures["counts"].items():
            total += count
            buckets.append(("+Inf" if bound == "inf" else bound, total))
        family.add_metric((value,) if labels else (), buckets, figures["sum"])
    return family
