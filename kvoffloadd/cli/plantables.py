"""Tables and sentences for people that both kinds of plan share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvoffloadd.log import printable
from kvoffloadd.planner.planning import HeldPrompts, Prompt
from kvoffloadd.planner.trace import Trace
from kvoffloadd.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 100
"""The width in a file or a pipe, where there is no terminal to ask."""

Row = tuple[str, ...]
Section = tuple[str, Row, list[Row]]
"""The title, headings and rows of a table."""


def print_section(console: Console, title: str, headings: Row, rows: Iterable[Row], left: int = 1) -> None:
    """Prints a table. `left`: the number of columns with words; the others have numbers."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"\n{title}", "bold"))
    table = Table(box=None, show_header=any(headings), padding=(0, 1, 0, 1))
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="left" if column < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    console.print(table)


def print_sentences(console: Console, title: str, sentences: Sequence[str]) -> None:
    """Prints sentences; nothing if there are none."""
    from rich.text import Text

    if sentences:
        console.print(Text(f"\n{title}", "bold"))
        print_indented(console, sentences)


def print_indented(console: Console, sentences: Sequence[str]) -> None:
    """Prints each on separate lines, as wide as the console."""
    from rich.padding import Padding

    for sentence in sentences:
        console.print(Padding(printable(sentence), (0, 0, 0, 2)))


def held_section(
    tiers: Sequence[HeldPrompts], prompts: Sequence[Prompt], trace: Trace | None, *, needs_less: bool
) -> Section:
    """Returns the table of what each tier holds. `needs_less`: a restore needs less than is stored."""
    rows: list[Row] = [
        ("capacity", "", *(format_bytes(held.capacity_bytes) for held in tiers)),
        ("keys", "", *(f"{held.keys:,}" for held in tiers)),
        ("index, in the daemon's own memory", "", *(f"about {format_bytes(held.index_bytes)}" for held in tiers)),
        ("tokens", "all that is stored", *(f"{held.tokens:,}" for held in tiers)),
    ]
    for index, prompt in enumerate(prompts):
        named = f"prompts of {prompt.tokens:,} tokens"
        rows.append((named, "all that is stored", *(format_prompts(held.prompts[index]) for held in tiers)))
        if needs_less:
            rows.append((named, "what a restore needs", *(format_prompts(held.needed[index]) for held in tiers)))
    if trace:
        unique = trace.unique_tokens
        rows.append((
            f"of the trace's {unique:,} distinct tokens", "all that is stored",
            *(f"{100 * min(1.0, held.tokens / unique):.1f} %" for held in tiers),
        ))  # fmt: skip
    return "what the daemon holds", ("", "if it keeps", *(held.tier for held in tiers)), rows


def format_prompts(number: int | None) -> str:
    """Formats a number of prompts. None: not even one whole block."""
    return "no whole block" if number is None else f"{number:,}"


def prompt_row(prompt: Prompt, trace: Trace | None, what: str, *, needs_less: bool) -> Row:
    """Returns the row of a prompt. `what`: the units that it consists of."""
    source = f" (of {trace.requests:,} in the trace)" if trace else ""
    size = format_bytes(prompt.stored_bytes)
    needed = f", of which a restore needs {format_bytes(prompt.needed_bytes)}" if needs_less else ""
    found = f"{prompt.blocks:,} {what}s, {size}{needed}" if prompt.blocks else f"no whole {what}"
    return f"{prompt.name} prompt", f"{prompt.tokens:,} tokens{source}: {found}"
