"""What `kvoffloadd status` prints for people: five lines that answer most questions, or whole sections.

Paths are never folded or cut: a table that is too wide for the terminal becomes a list, and a line that is too long is
left to the terminal, which wraps it without harm to what is copied from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvoffloadd.cli.report import format_value, open_console, quota_name, quota_use
from kvoffloadd.cli.top.frame import History, figures
from kvoffloadd.log import printable
from kvoffloadd.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Values = Mapping[str, Any]

OF_THE_DAEMON = "daemon"
"""The section of all figures that belong to no other one."""

UNBOUNDED_COLUMNS = 100_000
LABEL_COLUMNS = 10


def chosen_sections(status: Values, names: Sequence[str]) -> dict[str, Any]:
    """Returns the part of a status that these sections have; None for a section that this status lacks."""
    chosen: dict[str, Any] = {}
    for name in names:
        if name == OF_THE_DAEMON:
            chosen |= {key: value for key, value in status.items() if _is_plain(value)}
        else:
            chosen[name] = status.get(name)
    return chosen


# --- five lines -------------------------------------------------------------------------------------


def print_summary(status: Values) -> None:
    """Prints what people ask first, and a line for each disk root."""
    sys.stdout.writelines(f"{printable(line)}\n" for line in summary(status))


def summary(status: Values) -> Iterator[str]:
    """Returns the five lines, then those that only some daemons have: disk roots, and what is out of the ordinary."""
    history = History()
    history.add(0.0, status)
    shown = figures(history)
    yield _line("hits", _hits(shown["lookups"]))
    yield _line("ceiling", _ceiling(shown["lookups"]))
    memory, *below = shown["tiers"]
    yield _line("memory", _fullness(memory) + ("" if _sees_all(status) else " by this user"))
    for quota in shown["quotas"]:
        yield f"  {quota_name(quota)}  {quota_use(quota)}"
    yield _line("disk", _disk(status, below))
    yield _line("engines", _engines(shown["instances"], status["namespaces"]))
    if status["draining"]:
        yield _line("draining", "the daemon shuts down, and takes no new work")
    if shown["remote"]:
        state, reason = shown["remote"]["state"], shown["remote"]["reason"]
        yield _line("remote", f"{state}: {reason}" if state != "ok" and reason else state)
    if shown["roots"]:
        yield "disk roots"
        for root in shown["roots"]:
            reason = f": {root['reason']}" if root["reason"] else ""
            yield f"  {root['path']}  {_share_of(root)}, {root['state']}{reason}"


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL_COLUMNS}}{text}"


def _hits(lookups: Values) -> str:
    total = lookups["total"]
    if not total["asked"]:
        return "no prompt was pinned since the daemon's start (SGLang pins none; its own metrics count)"
    blocks = f"{_percent(total['hit_rate'])} of {total['asked']:,} blocks"
    if not lookups["asked_tokens"]:
        return blocks
    return f"{_percent(lookups['token_hit_rate'])} of {lookups['asked_tokens']:,} tokens, {blocks}"


def _ceiling(lookups: Values) -> str:
    if not lookups["total"]["asked"]:
        return "not known: no prompt was pinned"
    return f"{_percent(lookups['ceiling_rate'])} of blocks, if the cache had no bounds (an estimate)"


def _disk(status: Values, tiers: Sequence[Values]) -> str:
    if not tiers:
        return "none" if _sees_all(status) else "shown to root and the daemon's user"
    cleared = status["disk"].get("cleared_records", 0)
    return _fullness(tiers[0]) + (f" ({cleared:,} records are of cleared namespaces)" if cleared else "")


def _engines(instances: Sequence[Values], namespaces: Sequence[Values]) -> str:
    workers = sum(instance["workers"] for instance in instances)
    engines = f"{len(instances):,} with {_counted(workers, 'worker')}" if instances else "none"
    names = sorted(namespaces, key=lambda each: -int(each["bytes"]))
    largest = f": {names[0]['namespace']}{' and others' if names[1:] else ''}" if names else ""
    return f"{engines}; {_counted(len(names), 'namespace')}{largest}"


def _sees_all(status: Values) -> bool:
    """Returns whether the figures are those of all users; a user other than root and the daemon's has only some."""
    return "devices" in status


def _fullness(tier: Values) -> str:
    return f"{_share_of(tier)}, {_counted(tier['keys'], 'key')}"


def _share_of(room: Values) -> str:
    used, capacity = room["used_bytes"], room["capacity_bytes"]
    share = f" ({_percent(used / capacity)})" if capacity else ""
    return f"{format_bytes(used)} of {format_bytes(capacity)}{share}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


# --- sections ---------------------------------------------------------------------------------------


def print_sections(status: Values) -> None:
    """Prints all of this part of a status: first the plain values, then each map or list of maps."""
    console = open_console()
    _print_map(console, OF_THE_DAEMON, {name: value for name, value in status.items() if _is_plain(value)})
    for name, value in status.items():
        if not _is_plain(value):
            _print_section(console, name, value)


def _print_section(console: Console, title: str, section: Any) -> None:
    """Prints a list of maps, or a map of maps with equal keys, as rows. Prints other maps as names and values, after
    the rows that are in them.
    """
    if not section:
        _print_map(console, title, {"none": ""})
    elif _is_rows(section):
        _print_rows(console, title, section)
    elif not isinstance(section, Mapping):
        _print_map(console, title, {"": ", ".join(map(str, section))})
    elif all(isinstance(value, Mapping) for value in section.values()):
        _print_rows(console, title, [{"": name, **value} for name, value in section.items()])
    else:
        rows = {name: value for name, value in section.items() if _is_rows(value)}
        for name, value in rows.items():
            _print_rows(console, f"{title} {name}", value)
        _print_map(console, title, _flat({name: value for name, value in section.items() if name not in rows}))


def _print_map(console: Console, title: str, values: Values) -> None:
    if values:
        console.print(printable(title), style="bold", soft_wrap=True)
        _print_pairs(console, values)


def _print_rows(console: Console, title: str, rows: Sequence[Values]) -> None:
    """Prints a table, or a list for each row if the table is wider than the terminal."""
    from rich.measure import Measurement

    console.print(printable(title), style="bold", soft_wrap=True)
    table = _table(rows)
    unbounded = console.options.update(max_width=UNBOUNDED_COLUMNS)
    if Measurement.get(console, unbounded, table).maximum <= console.width:
        console.print(table)
        return
    for row in rows:
        (name, value), *others = row.items() or [("", "-")]
        line = f"{name} {format_value(name, value)}" if isinstance(value, int) else format_value(name, value)
        console.print(f" {line}", soft_wrap=True)
        _print_pairs(console, _flat(dict(others)), indent="   ")


def _print_pairs(console: Console, values: Values, indent: str = " ") -> None:
    columns = max((len(printable(name)) for name in values), default=0)
    for name, value in values.items():
        console.print(f"{indent}{printable(name):<{columns}}  {format_value(name, value)}".rstrip(), soft_wrap=True)


def _table(rows: Sequence[Values]) -> Table:
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=None)
    for name in names:
        numeric = all(isinstance(row.get(name, 0), int | float) for row in rows)
        table.add_column(printable(name), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(format_value(name, row[name]) if name in row else "-" for name in names))
    return table


def _flat(values: Values) -> dict[str, Any]:
    """Returns the map with inner maps flattened into plain names."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        inner = _flat(value) if isinstance(value, Mapping) else None
        plain |= {name: value} if inner is None else {f"{name}_{key}": item for key, item in inner.items()}
    return plain


def _is_plain(value: object) -> bool:
    """Returns whether a value belongs to no section of its own."""
    return value is not None and not isinstance(value, Mapping | list)


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)
