"""Draws bars and lines that adapt to the given width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_LEVELS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
GROUND = "grey23"
"""The colour of the unfilled part."""


class Bar:
    """Shares of a whole, one after the other: fractions with their colours, to an eighth of a character.

    Whole characters are background, which has no gaps in any font; without colours they are blocks.
    """

    def __init__(self, parts: Iterable[tuple[float, str]], least: int = 8) -> None:
        self._parts = [(share, colour) for share, colour in parts if share > 0]
        self._least = least

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(self._least, options.max_width), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        plain = console.color_system is None
        edges, position = [], 0.0
        for share, colour in self._parts:
            position = min(position + share, 1.0)
            edges.append((round(position * width * 8), colour))
        begun = 0
        for index, (end, colour) in enumerate(edges):
            whole = end // 8 - begun
            if whole > 0:
                yield Segment("█" * whole) if plain else Segment(" " * whole, Style(bgcolor=colour))
                begun += whole
            if end % 8 and begun <= end // 8 < width:
                behind = edges[index + 1][1] if index + 1 < len(edges) else GROUND
                yield Segment(_EIGHTHS[end % 8], Style(color=colour, bgcolor=behind))
                begun = end // 8 + 1
        if begun < width:
            yield Segment(" " * (width - begun), Style(bgcolor=GROUND))


class Spark:
    """The last values, as many as fit, the newest on the right."""

    def __init__(self, values: Sequence[float], colour: str, most: float) -> None:
        self._values = values
        self._colour = colour
        self._most = most

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, options.max_width), options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown = list(self._values)[-width:]
        line = "".join(_LEVELS[self._level(value)] for value in shown)
        yield Segment("▁" * (width - len(shown)), Style(color=GROUND))
        for character in line:
            empty = character == " "
            yield Segment("▁" if empty else character, Style(color=GROUND if empty else self._colour))

    def _level(self, value: float) -> int:
        if value <= 0 or self._most <= 0:
            return 0
        return max(1, min(8, round(8 * value / self._most)))
