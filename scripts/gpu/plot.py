"""Bandwidth by size of rows, as an SVG file that is written by hand."""

from __future__ import annotations

import math
from typing import Any

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 190, 30, 50
COLOURS = {"store": "#1f6fb4", "stores": "#6aaed6", "load": "#d1592a", "both": "#3a8f4d"}
LABELS = {"store": "store", "stores": "stores, back to back", "load": "load", "both": "both ways"}
DASHED = 'stroke-dasharray="5 4"'


def bandwidth(cases: list[dict[str, Any]]) -> str:
    """SVG: a line for each kind of job, dashed what plain copies reach. `cases`: those of `bench_copy`."""
    top = 1.1 * max(speed for case in cases for speed in case["gb_per_s"].values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18">GB/s by row size; dashed: plain copies</text>',
        *_axes(cases, top),
    ]
    for number, (kind, colour) in enumerate(COLOURS.items()):
        lines += _line(cases, kind, colour, "", top)
        if f"plain {kind}" in cases[0]["gb_per_s"]:
            lines += _line(cases, f"plain {kind}", colour, DASHED, top)
        y = TOP + 14 + 20 * number
        lines.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 9}" width="14" height="4" fill="{colour}"/>')
        lines.append(f'<text x="{WIDTH - RIGHT + 34}" y="{y}">{LABELS[kind]}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _axes(cases: list[dict[str, Any]], top: float) -> list[str]:
    step = 10 ** math.floor(math.log10(top))
    step = step if top / step >= 3 else step / 4
    found = []
    for number in range(int(top / step) + 1):
        y = _y(number * step, top)
        found.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        found.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    for number, case in enumerate(cases):
        x = _x(number, len(cases))
        found.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{case["name"]}</text>')
    return found


def _line(cases: list[dict[str, Any]], kind: str, colour: str, style: str, top: float) -> list[str]:
    points = [(_x(number, len(cases)), _y(case["gb_per_s"][kind], top)) for number, case in enumerate(cases)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    found = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" {style}/>']
    if not style:
        found += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return found


def _x(number: int, count: int) -> float:
    return LEFT + (WIDTH - RIGHT - LEFT) * (number + 0.5) / count


def _y(speed: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * speed / top
