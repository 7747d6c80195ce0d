"""What gpu_check.py writes: report.md, results.jsonl, bandwidth.svg. Needs nothing but Python's own library."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from typing import TYPE_CHECKING, Any

from scripts.gpu.plot import bandwidth

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from scripts.gpu.parts import Ended

PACKAGES = ("torch", "cupy-cuda13x", "cuda-bindings", "numpy", "msgspec", "msgpack", "uvloop", "pytest")
_QUERY = "name,driver_version,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.current,memory.total,memory.used"
_SMI_S = 20.0


def machine() -> list[tuple[str, str]]:
    """What it runs on, by name."""
    found = [
        ("kernel", platform.release()),
        ("processors", str(os.cpu_count())),
        ("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB"),
        ("python", platform.python_version()),
        ("uid", str(os.getuid())),
    ]
    found += [(name, _version(name)) for name in PACKAGES]
    return found + [(f"GPU, {_QUERY}", line) for line in _nvidia_smi()]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def _nvidia_smi() -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi: {error}"]
    return done.stdout.strip().splitlines() or [f"nvidia-smi: {done.stderr.strip()}"]


def write(folder: Path, heading: str, facts: Sequence[tuple[str, str]], parts: Sequence[Ended], verdict: str) -> None:
    rows = [row for ended in parts for row in ended.rows()]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    cases: list[dict[str, Any]] = next(
        (ended.figures["cases"] for ended in parts if ended.part.name == "copy" and ended.figures), []
    )
    if cases:
        (folder / "bandwidth.svg").write_text(bandwidth(cases), encoding="utf-8")
    text = "\n".join(_report(heading, facts, parts, verdict, plotted=bool(cases)))
    (folder / "report.md").write_text(text, encoding="utf-8")


def _report(
    heading: str, facts: Sequence[tuple[str, str]], parts: Sequence[Ended], verdict: str, *, plotted: bool
) -> Iterable[str]:
    yield f"# {heading}\n\n{verdict}\n"
    yield _grid(
        ("part", "state", "seconds", ""),
        [(ended.part.name, ended.state, f"{ended.seconds:.1f}", ended.remark) for ended in parts],
    )
    bounds = [(ended.part.name, bound) for ended in parts for bound in ended.figures.get("bounds", ())]
    if bounds:
        yield "## Bounds\n"
        yield _grid(
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
    yield "## Machine\n"
    yield _grid(("what", ""), facts)


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
    for one in ended.figures.get("tables", ()):
        yield f"{one['title']}:\n"
        yield _grid(one["columns"], one["rows"])
    if ended.figures.get("left_out"):
        yield f"Not run, for time: {', '.join(ended.figures['left_out'])}.\n"
    if ended.figures and "tables" not in ended.figures:
        plain = [(name, value) for name, value in ended.figures.items() if isinstance(value, int | float | str)]
        yield _grid(("what", ""), plain)
    told = [test for test in ended.tests if test["outcome"] != "passed" or test["properties"]]
    if told:
        yield _grid(
            ("test", "outcome", "seconds", ""),
            [(_short(test["test"]), test["outcome"], test["seconds"], _remark(test)) for test in told],
        )


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _remark(test: dict[str, Any]) -> str:
    properties = [f"{name}: {value}" for name, value in test["properties"].items()]
    lines = [line.strip() for line in test["reason"].splitlines() if line.strip()]
    # Of a worker's failure the first line says where it was seen, the last one what it was.
    reason = " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    return "; ".join([*properties, *([reason] if reason else [])])


def _block(lines: Iterable[str]) -> str:
    return "\n".join(["", *(f"    {line}" for line in lines), ""])


def _grid(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (list(columns), ["---"] * len(columns), *cells)]
    return "\n".join([*lines, ""])
