"""What the benchmarks share: keys, samples, bounds, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvoffloadd.testing.figures import print_grid


@dataclass(frozen=True, slots=True)
class Bound:
    """A budget of the design: `value` must be at most `bound`, or at least, by its `kind`."""

    what: str
    value: float
    kind: str
    bound: float

    @property
    def kept(self) -> bool:
        return self.value <= self.bound if self.kind == "<=" else self.value >= self.bound


def at_most(what: str, value: float, bound: float) -> Bound:
    """`value` may not be more."""
    return Bound(what, round(value, 3), "<=", bound)


def at_least(what: str, value: float, bound: float) -> Bound:
    """`value` may not be less."""
    return Bound(what, round(value, 3), ">=", bound)


def judged(result: dict[str, Any], bounds: Sequence[Bound]) -> dict[str, Any]:
    """The result with its bounds, and whether all are kept."""
    listed = [{**asdict(bound), "kept": bound.kept} for bound in bounds]
    return {**result, "bounds": listed, "within_budget": all(bound.kept for bound in bounds)}


def print_bounds(result: dict[str, Any]) -> None:
    """Each bound, and whether it is kept."""
    print_grid(
        "\nbounds",
        ("what", "measured", "bound", ""),
        (
            (bound["what"], f"{bound['value']:,.2f}", f"{bound['kind']} {bound['bound']:g}", _verdict(bound["kept"]))
            for bound in result["bounds"]
        ),
    )


def _verdict(kept: bool) -> str:
    return "kept" if kept else "[red]MISSED[/red]"
