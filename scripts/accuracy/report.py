"""What the accuracy check found: a row for each way to answer the questions, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from kvoffloadd.testing.output import ratio
from scripts.accuracy.layouts import LAYOUTS

COMPUTED, MEMORY, DISK = "recomputed", "memory", "disk"
ACCURACY_MIN = 0.95
COLUMNS = {
    "layout": False, "KV from": False, "questions": True, "accuracy": True, "recomputed": True, "verdict": False,
}  # fmt: skip
"""Names, and whether they are figures."""


@dataclass(frozen=True, slots=True)
class Row:
    """`source`: where the prompts' KV came from. `control`: what was loaded wrongly on purpose, so that accuracy must
    fall by `fall`; empty: nothing. `said`: all tokens of all answers.
    """

    layout: str
    source: str
    control: str
    fall: float
    questions: int
    right: int
    recomputed_tokens: int
    said: list[int]

    @property
    def accuracy(self) -> float:
        """The share of questions that were answered with every token right."""
        return ratio(self.right, self.questions)


@dataclass(slots=True)
class AccuracyReport:
    """The first row is the reference: the first layout, all prompts computed."""

    seed: int
    training_s: float
    rows: list[Row] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Adds a row; rows stay in the order in which they came."""
        self.rows.append(row)

    def verdict(self, row: Row) -> str:
        """Empty: it is as it must be."""
        reference = self.rows[0]
        if row.control:
            return "" if row.accuracy <= reference.accuracy - row.fall else "not noticed"
        if row.accuracy < ACCURACY_MIN:
            return f"below {ACCURACY_MIN:.0%}"
        if row.said != reference.said:
            return "answers differ"
        if (row.recomputed_tokens > 0) != (row.source == COMPUTED):
            return "prompts were computed" if row.recomputed_tokens else "nothing was computed"
        return ""

    @property
    def is_good(self) -> bool:
        """Whether every row is as it must be, and no error was reported."""
        return bool(self.rows) and not any(map(self.verdict, self.rows)) and not self.errors

    def as_json(self) -> dict[str, object]:
        """Names that stay."""
        return {
            "good": self.is_good,
            "seed": self.seed,
            "training_s": round(self.training_s, 3),
            "errors": self.errors,
            "rows": [
                {
                    "layout": row.layout,
                    "source": row.source,
                    "control": row.control,
                    "questions": row.questions,
                    "accuracy": row.accuracy,
                    "recomputed_tokens": row.recomputed_tokens,
                    "verdict": self.verdict(row) or "good",
                }
                for row in self.rows
            ],
        }

    def print(self) -> None:
        """A table, and what went wrong below it."""
        table = Table(title="accuracy", title_style="bold", border_style="green" if self.is_good else "red")
        for name in ("layout", "KV from", "questions", "accuracy", "tokens recomputed", "verdict"):
            table.add_column(
                name, justify="right" if name in ("questions", "accuracy", "tokens recomputed") else "left"
            )
        shown = ""
        for row in sorted(self.rows, key=lambda row: list(LAYOUTS).index(row.layout)):
            if row.layout != shown:
                table.add_section()
            verdict = self.verdict(row) or ("noticed" if row.control else "good")
            figures = (f"{row.questions:,}", f"{row.accuracy:.1%}", f"{row.recomputed_tokens:,}")
            table.add_row("" if row.layout == shown else row.layout, row.control or row.source, *figures, verdict)
            shown = row.layout
        Console(highlight=False).print(table)
        print(f"seed {self.seed}: trained in {self.training_s:.1f} s")
        for error in self.errors:
            print(error)
