"""Draws figures on a screen: readable in 80 columns, and in two columns where there is room."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kvoffloadd.cli.report import quota_name, quota_use
from kvoffloadd.cli.top.shapes import Bar, Spark
from kvoffloadd.log import printable
from kvoffloadd.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

Figures = Mapping[str, Any]

WIDE = 150
"""The number of columns from which on two tables are shown next to each other."""

ROWS_MAX = 8
QUIET, FAINT = "grey58", "grey35"
GOOD, FAIR, BAD = "green3", "gold3", "red3"
NEARLY_FULL = 0.9
"""The share of its maximum from which a quota is shown as nearly full."""
COLOURS = {
    "store": "dark_orange", "load": "green3", "demote": "medium_purple", "promote": "deep_sky_blue1",
    "fetch": "turquoise2", "push": "plum3",
}  # fmt: skip
WAYS = {
    "store": "worker → memory", "load": "memory → worker", "demote": "memory → disk", "promote": "disk → memory",
    "fetch": "store → memory", "push": "memory → store",
}  # fmt: skip
OUTCOMES = {
    "hit": ("hit", "green3"),
    "on_disk": ("on disk", "deep_sky_blue1"),
    "remote": ("remote", "turquoise2"),
    "pending": ("being stored", "dark_cyan"),
    "evicted": ("evicted", "dark_orange"),
    "cleared": ("cleared", "grey70"),
    "other_namespace": ("other namespace", "medium_purple"),
    "incomplete": ("incomplete", "gold3"),
    "failed_verification": ("failed check", "red3"),
    "never_stored": ("never stored", "grey42"),
}
CLAIMED = "gold3"
STATES = {"ok": GOOD, "full": FAIR, "read-only": FAIR, "off": BAD}
REMOTE_STATES = {"ok": GOOD, "starting": FAIR, "open": FAIR, "stuck": BAD, "closed": BAD}
LAG_FAIR_S, LAG_BAD_S = 0.02, 0.1
FULL_SHARE = 0.9


def render(
    figures: Figures | None, rates: Mapping[str, Sequence[float]], width: int, waiting: str = ""
) -> RenderableType:
    """Returns the whole screen. `figures` None: there never was a daemon; `waiting`: why there is none now."""
    if figures is None:
        return Group(_waiting_line(waiting), Text())
    left = [
        _tiers(figures),
        *([_quotas(figures["quotas"])] if figures["quotas"] else []),
        *([_throughput(figures, rates)] if figures["throughput"] else []),
        _lookups(figures["lookups"]),
    ]
    right = [_instances(figures["instances"]), _slow_jobs(figures["slow_jobs"])]
    if figures["roots"]:
        right.insert(1, _roots(figures))
    if figures["remote"]:
        right.insert(1, _remote(figures["remote"]))
    top = [_head(figures, waiting), _loop(figures)]
    top += [_remark(kind, "memory can't be pinned", why) for kind, why in figures["pinning_failures"].items()]
    top += [
        _remark(kind, "an earlier daemon did not survive a way of copying", ways)
        for kind, ways in figures["left_out"].items()
    ]
    if waiting:
        top.insert(1, _waiting_line(waiting))
    lanes = [_lanes(figures["lanes"], wide=width >= WIDE)] if figures["lanes"] else []  # only root gets them
    if width < WIDE:
        return Group(*top, *left, *right, *lanes)
    both = Table.grid(padding=(0, 2), expand=True)
    both.add_column(ratio=1)
    both.add_column(ratio=1)
    both.add_row(Group(*left, _namespaces(figures["namespaces"])), Group(*right, *lanes))
    return Group(*top, both)


# --- lines on top ----------------------------------------------------------------------------------


def _head(figures: Figures, waiting: str) -> RenderableType:
    line = Table.grid(expand=True)
    line.add_column()
    line.add_column(justify="right")
    state, colour = ("draining", FAIR) if figures["draining"] else ("serving", GOOD)
    if waiting:
        state, colour = "gone", BAD
    name = Text.assemble((" kvoffloadd ", "bold reverse"), f" {figures['version']}  ", ("● ", colour), (state, colour))
    about = Text.assemble(
        ("up ", QUIET), format_seconds(figures["uptime_s"]), ("  pid ", QUIET), str(figures["pid"]), " "
    )
    line.add_row(name, about)
    return line


def _waiting_line(why: str) -> RenderableType:
    return Text.assemble(
        (" waiting ", f"bold black on {FAIR}"), " ", (printable(why), FAIR), no_wrap=True, overflow="ellipsis"
    )


def _remark(kind: str, what: str, text: str) -> RenderableType:
    words = f" {_device(kind)}: {what}, and copies are slower: {printable(text)}"
    return Text(words, FAIR, no_wrap=True, overflow="ellipsis")


def _loop(figures: Figures) -> RenderableType:
    lag = figures["loop"]["recent_lag_s"]
    colour = BAD if lag >= LAG_BAD_S else FAIR if lag >= LAG_FAIR_S else GOOD
    pieces: list[tuple[str, str, str]] = [
        (format_seconds(lag), "late", colour),
        (format_seconds(figures["loop"]["worst_lag_s"]), "worst", ""),
        (_count(figures["requests_per_s"]), "req/s", ""),
        (_count(figures["jobs"]), "jobs", ""),
        (_count(figures["leases"]["keys"]), "leased", ""),
    ]
    # figures of all users, which only root gets
    counts = [(name, figures["server"][name]) for name in ("busy", "errors")]
    pieces += [(_count(count), name, FAIR if count else "") for name, count in counts if count is not None]
    text = Text(" loop ", QUIET, no_wrap=True, overflow="ellipsis")
    for index, (value, name, style) in enumerate(pieces):
        text.append("  " if index else "")
        text.append(value, style or "default")
        text.append(f" {name}", QUIET)
    return text


# --- sections --------------------------------------------------------------------------------------


def _section(title: str, *body: RenderableType) -> RenderableType:
    return Group(Rule(Text(title, "bold"), align="left", style=FAINT, characters="─"), Padding(Group(*body), (0, 1)))


def _grid(*columns: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for column in columns:
        table.add_column(**{"no_wrap": True, "overflow": "ellipsis", **column})
    return table


_RIGHT: dict[str, Any] = {"justify": "right"}
_BAR: dict[str, Any] = {"ratio": 1}


def _tiers(figures: Figures) -> RenderableType:
    table = _grid({"style": "bold"}, _BAR, _RIGHT, _RIGHT, _RIGHT)
    for tier in figures["tiers"]:
        share = _share(tier["used_bytes"], tier["capacity_bytes"])
        claimed = min(_share(tier["claimed_bytes"], tier["capacity_bytes"]), share)
        colour = "steel_blue1" if tier["tier"] == "memory" else "deep_sky_blue4"
        keys = Text.assemble(_count(tier["keys"]), (" keys", QUIET))
        if tier["claimed_bytes"]:
            keys.append(f"  {format_bytes(tier['claimed_bytes'])}", CLAIMED)
            keys.append(" claimed", QUIET)
        table.add_row(
            tier["tier"],
            Bar([(claimed, CLAIMED), (share - claimed, colour)]),
            f"{100 * share:.0f} %",
            Text.assemble(format_bytes(tier["used_bytes"]), (" of ", QUIET), format_bytes(tier["capacity_bytes"])),
            keys,
        )
    return _section("tiers", table)


def _quotas(quotas: Sequence[Figures]) -> RenderableType:
    table = _grid({"style": "bold"}, _BAR, _RIGHT, _RIGHT)
    for quota in quotas:
        used, least, most = (quota[f"memory_{what}"] for what in ("bytes", "min_bytes", "max_bytes"))
        share = _share(used, most or max(used, least))
        table.add_row(
            printable(quota_name(quota)),
            Bar([(share, FAIR if most and share >= NEARLY_FULL else GOOD)]),
            f"{100 * share:.0f} %" if most else "",
            printable(quota_use(quota)),
        )
    return _section("quotas of memory", table)


def _throughput(figures: Figures, rates: Mapping[str, Sequence[float]]) -> RenderableType:
    # Wide enough for most figures, so that the lines do not move as these change.
    table = _grid({"style": "bold"}, {"style": QUIET}, _BAR, {**_RIGHT, "min_width": 12}, {**_RIGHT, "min_width": 11})
    needs = {
        "demote": figures["roots"],
        "promote": figures["roots"],
        "fetch": figures["remote"],
        "push": figures["remote"],
    }
    directions = [direction for direction in figures["throughput"] if needs.get(direction, True)]
    most = max((max(rates[d], default=0.0) for d in directions), default=0.0)
    for direction in directions:
        moved = figures["throughput"][direction]
        speed = moved["bytes_per_s"]
        table.add_row(
            direction,
            WAYS[direction],
            Spark(rates[direction], COLOURS[direction], most),
            Text(f"{format_bytes(int(speed))}/s", COLOURS[direction] if speed else QUIET),
            Text.assemble(_count(moved["per_s"]), (f" {moved['unit']}/s", QUIET)),
        )
    backlog = figures["backlog_bytes"]
    rest = [Text.assemble(("to be demoted ", QUIET), format_bytes(backlog))] if backlog else []
    return _section("throughput", table, *rest)


def _lookups(lookups: Figures) -> RenderableType:
    table = _grid({"style": "bold"}, _BAR, _RIGHT, _RIGHT)
    recent = f"last {format_seconds(lookups['recent_s'])}" if lookups["recent_s"] else "now"
    for title, shares in ((recent, lookups["recent"]), ("since the start", lookups["total"])):
        num_keys, keys = shares["asked"], shares["keys"]
        bar = Bar(
            [(keys.get(name, 0) / num_keys, colour) for name, (_, colour) in OUTCOMES.items()] if num_keys else []
        )
        rate = f"{100 * shares['hit_rate']:.1f} % hits" if num_keys else "-"
        table.add_row(
            title,
            bar,
            Text(rate, GOOD if num_keys else QUIET),
            Text.assemble(("of ", QUIET), _count(num_keys), (" keys", QUIET)),
        )
    total = lookups["total"]
    words = Text()
    if total["asked"]:
        for name, (label, colour) in OUTCOMES.items():
            count = total["keys"].get(name, 0)
            if count:
                words.append("■ ", colour)
                words.append(f"{label}\u00a0", QUIET)
                words.append(f"{100 * count / total['asked']:.1f}\u00a0%   ")
        words.append("ceiling\u00a0", QUIET)
        words.append(f"{100 * lookups['ceiling_rate']:.1f}\u00a0%", "bold")
    return _section("keys asked for", table, *([words] if words else []))


def _namespaces(rows: Sequence[Figures]) -> RenderableType:
    if len(rows) < 2:
        return Text()
    table = _grid(_BAR, _RIGHT, _RIGHT, _RIGHT)
    table.add_row(*(Text(word, QUIET) for word in ("", "asked", "hits", "ceiling")))
    for row in _first_rows(sorted(rows, key=lambda row: -int(row["asked"]))):
        hits = _share(row["hit"] + row["on_disk"] + row.get("remote", 0), row["asked"])
        ceiling = f"{100 * row['ceiling_rate']:.1f} %"
        table.add_row(Text(printable(row["namespace"])), _count(row["asked"]), f"{100 * hits:.1f} %", ceiling)
    return _section("namespaces", table, *_more(rows))


def _remote(remote: Figures) -> RenderableType:
    state, reason = remote["state"], remote["reason"]
    line = Text.assemble(("● ", REMOTE_STATES.get(state, BAD)), state, no_wrap=True, overflow="ellipsis")
    for value, name in ((remote["backlog_bytes"], "to be put"), (remote["quarantined_bytes"], "in quarantine")):
        if value:
            line.append(f"  {format_bytes(value)}")
            line.append(f" {name}", QUIET)
    line.append(f"  {printable(reason if reason and state != 'ok' else remote['about'])}", QUIET)
    return _section("remote store", line)


def _instances(rows: Sequence[Figures]) -> RenderableType:
    if not rows:
        return _section("instances", Text("none", QUIET))
    table = _grid(_RIGHT, _BAR, {}, {}, _RIGHT, _RIGHT)
    for row in _first_rows(rows):
        who = [
            f"{row[f'{role}s']} {role}{'s' * (row[f'{role}s'] != 1)}"
            for role in ("worker", "scheduler")
            if row[f"{role}s"]
        ]
        table.add_row(
            Text(f"#{row['instance']}", QUIET),
            Text(printable(row["namespace"])),
            ", ".join(who),
            ", ".join(_device(kind) for kind in row["devices"]) or Text("no memory", QUIET),
            format_bytes(row["mapped_bytes"]),
            Text.assemble(_count(row["jobs"]), (" jobs", QUIET)),
        )
    return _section(f"instances {len(rows)}", table, *_more(rows))


def _roots(figures: Figures) -> RenderableType:
    table = _grid({}, {"ratio": 1, "overflow": "ellipsis"}, {"ratio": 1}, _RIGHT, _RIGHT, _RIGHT)
    reasons = []
    for root in _first_rows(figures["roots"]):
        share = _share(root["used_bytes"], root["capacity_bytes"])
        colour = STATES.get(root["state"], BAD)
        errors = root["read_errors"] + root["write_errors"]
        table.add_row(
            Text.assemble(("● ", colour), (root["state"], colour)),
            _tail(printable(root["path"])),
            Bar([(share, "deep_sky_blue4")]),
            Text.assemble(("r ", QUIET), f"{format_bytes(int(root['read_bytes_per_s']))}/s"),
            Text.assemble(("w ", QUIET), f"{format_bytes(int(root['write_bytes_per_s']))}/s"),
            Text(f"{_count(errors)} errors", BAD if errors else QUIET),
        )
        if root["reason"]:
            reasons.append(
                Text(f"{root['path']}: {printable(root['reason'])}", FAIR, overflow="ellipsis", no_wrap=True)
            )
    return _section("disk roots", table, *reasons, *_more(figures["roots"]))


def _slow_jobs(rows: Sequence[Figures]) -> RenderableType:
    if not rows:
        return _section("slow jobs", Text("none", QUIET))
    table = _grid({}, {}, _RIGHT, {}, {"ratio": 1}, _RIGHT)
    for job in _first_rows(rows):
        age = job["age_s"]
        table.add_row(
            Text(job["direction"], COLOURS.get(job["direction"], "")),
            Text.assemble(("job ", QUIET), str(job["job"])),
            Text(format_seconds(age), BAD if age > 10 else FAIR),
            Text.assemble(("waits for ", QUIET), job["waits_for"]),
            Text.assemble(("session ", QUIET), str(job["session"]), (" pid ", QUIET), str(job["pid"])),
            Text.assemble(_count(job["payloads"]), (" payloads", QUIET)),
        )
    return _section(f"slow jobs {len(rows)}", table, *_more(rows))


def _lanes(rows: Sequence[Figures], *, wide: bool) -> RenderableType:
    shown = [lane for lane in rows if wide or lane["busy_rate"] >= 0.005 or lane["queued"]][:ROWS_MAX]
    if not shown:
        return _section("lanes", Text("idle", QUIET))
    table = _grid({"max_width": 32}, _BAR, _RIGHT, _RIGHT, _RIGHT)
    for lane in shown:
        busy, oldest = lane["busy_rate"], lane["oldest_queued_s"]
        colour = BAD if busy >= FULL_SHARE else "steel_blue1"
        table.add_row(
            _tail(printable(lane["lane"])),
            Bar([(busy, colour)]),
            f"{100 * busy:.0f} %",
            Text.assemble(_count(lane["queued"]), (" queued", QUIET)),
            Text(format_seconds(oldest) if lane["queued"] else "", FAIR if oldest > 1 else QUIET),
        )
    return _section("lanes", table)


# --- words -----------------------------------------------------------------------------------------


def _first_rows(rows: Iterable[Figures]) -> list[Figures]:
    return list(rows)[:ROWS_MAX]


def _more(rows: Sequence[Figures]) -> list[RenderableType]:
    left = len(rows) - ROWS_MAX
    return [Text(f"and {left} more", QUIET)] if left > 0 else []


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _count(number: float) -> str:
    """Formats at most four digits: 999, 12.3 k, 1.23 M."""
    if number < 1000:
        return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"
    unit = next((unit for unit, most in (("k", 999_500), ("M", 999.5e6)) if number < most), "G")
    number /= {"k": 1e3, "M": 1e6, "G": 1e9}[unit]
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"


def _device(kind: str) -> str:
    """Shortens GPUs to the beginning of their UUID, as in nvidia-smi."""
    return f"GPU-{kind.removeprefix('cuda:')[:8]}" if kind.startswith("cuda:") else kind


def _tail(path: str, most: int = 32) -> Text:
    """Returns the end of a path, which is more informative than its beginning."""
    return Text(path if len(path) <= most else f"…{path[1 - most :]}")
