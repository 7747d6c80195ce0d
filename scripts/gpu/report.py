"""What `gpu_check` writes: report.md, results.jsonl, bandwidth.svg. Needs nothing but Python's own library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu.decisions import Decision, bounds_of, decisions_of
from scripts.gpu.parts import Ended
from scripts.gpu.plot import bandwidth

Sections = Sequence[tuple[str, Sequence[str]]]


def write(
    folder: Path,
    heading: str,
    facts: Sequence[tuple[str, str]],
    parts: Sequence[Ended],
    verdict: str,
    end: Sections,
    *,
    decides: bool = True,
) -> None:
    """`end`: lines by title, below everything else. `decides`: the figures are a GPU's, and mean something."""
    rows = [row for ended in parts for row in ended.rows()]
    results = folder / "results.jsonl"
    unfinished = results.with_suffix(".new")
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    unfinished.replace(results)  # in one step: whoever kills the check finds all of it
    cases: list[dict[str, Any]] = next(
        (ended.figures["cases"] for ended in parts if ended.part.name == "copy" and ended.figures), []
    )
    if cases:
        (folder / "bandwidth.svg").write_text(bandwidth(cases), encoding="utf-8")
    decided = decisions_of(parts) if decides else []
    text = "\n".join(_report(heading, facts, parts, verdict, end, decided, plotted=bool(cases)))
    (folder / "report.md").write_text(text, encoding="utf-8")


def _report(
    heading: str,
    facts: Sequence[tuple[str, str]],
    parts: Sequence[Ended],
    verdict: str,
    end: Sections,
    decided: Sequence[Decision],
    *,
    plotted: bool,
) -> Iterable[str]:
    yield f"# {heading}\n\n{verdict}\n"
    yield grid(
        ("part", "state", "seconds", ""),
        [(ended.part.name, ended.state, f"{ended.seconds:.1f}", ended.remark) for ended in parts],
    )
    bounds = all_bounds(parts)
    if bounds:
        yield "## Bounds\n"
        yield grid(
            ("part", "what", "measured", "bound", ""),
            [
                (
                    name,
                    one["what"],
                    one["value"],
                    f"{one['kind']} {one['bound']:g}",
                    "kept" if one["kept"] else "MISSED",
                )
                for name, one in bounds
            ],
        )
    for ended in parts:
        yield from _part(ended)
        if ended.part.name == "copy" and plotted:
            yield "![bandwidth](bandwidth.svg)\n"
    if decided:
        yield "## What this decides\n"
        yield grid(("what", "so", "because"), decided)
    yield "## Machine\n"
    yield grid(("what", ""), facts)
    for title, lines in end:
        yield f"## {title}\n"
        yield _block(lines)


def all_bounds(parts: Sequence[Ended]) -> list[tuple[str, dict[str, Any]]]:
    """Returns each part's own bounds, and those that hold one part against another, with the part's name."""
    own = [(ended.part.name, bound) for ended in parts for bound in ended.figures.get("bounds", ())]
    return [*own, *(("copy", bound) for bound in bounds_of(parts))]


def _part(ended: Ended) -> Iterable[str]:
    if ended.is_good and not (ended.tests or ended.figures):
        return
    yield f"## {ended.part.title}\n"
    if not ended.figures and ended.cases:
        yield "What came before it ended:\n"
        yield _block(json.dumps(case) for case in ended.cases)
    if not ended.is_good:
        yield "The last lines of its log:\n"
        yield _block(ended.last_lines)
        if ended.daemon_lines:
            yield "The last lines of its daemons':\n"
            yield _block(ended.daemon_lines)
    yield from what_it_found(ended)
    shown = [test for test in ended.tests if test["outcome"] != "passed" or test["properties"]]
    if shown:
        yield grid(
            ("test", "outcome", "seconds", ""),
            [(short(test["test"]), test["outcome"], test["seconds"], remark_of(test)) for test in shown],
        )


def what_it_found(ended: Ended) -> Iterable[str]:
    """A benchmark's tables, and what it left out."""
    for one in ended.figures.get("tables", ()):
        yield f"{one['title']}:\n"
        yield grid(one["columns"], one["rows"])
    for what in ended.figures.get("skipped", ()):
        yield f"Skipped: {what}\n"
    if ended.figures.get("left_out"):
        yield f"Not run, for time: {', '.join(ended.figures['left_out'])}.\n"
    if ended.figures and "tables" not in ended.figures:
        plain = [(name, value) for name, value in ended.figures.items() if isinstance(value, int | float | str)]
        yield grid(("what", ""), plain)


def short(name: str) -> str:
    """A test's name without its folders."""
    return name.rpartition("/")[2]


def remark_of(test: dict[str, Any]) -> str:
    """Returns what a test reports in addition to its outcome."""
    properties = [f"{name}: {value}" for name, value in test["properties"].items()]
    lines = [line.strip() for line in test["reason"].splitlines() if line.strip()]
    # The first line of a worker's failure names where it was seen, the last one what it was.
    reason = " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    return "; ".join([*properties, *([reason] if reason else [])])


def _block(lines: Iterable[str]) -> str:
    return "\n".join(["", *(f"    {line}" for line in lines), ""])


def grid(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown that can be read as it is: its columns are aligned, but for the last, which may be long."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (columns, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    widths[-1] = 3
    cells.insert(1, ["-" * width for width in widths])
    padded = ([f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)] for row in cells)
    return "\n".join([*(f"| {' | '.join(row)} |" for row in padded), ""])
