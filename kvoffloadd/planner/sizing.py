"""Says in words what caches of other sizes would have hit. Pure: figures in, sentences and rows out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffloadd.units import format_bytes

ENOUGH = 0.005
"""A size this close to the ceiling, or to a larger size, is as good."""


@dataclass(frozen=True, slots=True)
class SizeHits:
    """What a cache of this size would have hit. `hit_ratio`: share of the tokens asked for; None: too little was seen.
    `margin`: two standard errors of it. `rate`: the share of all keys that were looked at.
    """

    memory_bytes: int
    disk_bytes: int
    hit_ratio: float | None
    margin: float
    rate: float

    @property
    def name(self) -> str:
        """Returns its size in words."""
        disk = f" and {format_bytes(self.disk_bytes)} of disk" if self.disk_bytes else ""
        return f"{format_bytes(self.memory_bytes)} of memory{disk}"


@dataclass(frozen=True, slots=True)
class Sizing:
    """The hits of caches of several sizes, of the same requests. `sizes`: memory alone, ascending, then memory with
    disk. `memory_bytes`, `disk_bytes`: today's. `ceiling`: the share of tokens that a cache hits that forgets nothing;
    `all_bytes`: what it would hold. Both are None if they are not known.
    """

    policy: str
    memory_bytes: int
    disk_bytes: int
    sizes: tuple[SizeHits, ...]
    requests: int
    tokens: int
    ceiling: float | None = None
    all_bytes: int | None = None

    @property
    def today(self) -> SizeHits:
        """Returns the present size. Raises LookupError if it is not among the sizes."""
        return self._at(self.memory_bytes, self.disk_bytes)

    def _at(self, memory_bytes: int, disk_bytes: int) -> SizeHits:
        for size in self.sizes:
            if (size.memory_bytes, size.disk_bytes) == (memory_bytes, disk_bytes):
                return size
        raise LookupError("no such size")

    def others(self) -> list[SizeHits]:
        """Returns half and twice the memory, and, if there is a disk, memory alone and twice the disk, where the hits
        are known.
        """
        memory, disk = self.memory_bytes, self.disk_bytes
        wanted = [(memory, 0), (memory, 2 * disk)] if disk else [(round(memory / 2), 0), (2 * memory, 0)]
        return [
            size for size in self.sizes if (size.memory_bytes, size.disk_bytes) in wanted and size.hit_ratio is not None
        ]


HEADINGS = ("size", "of tokens", "more or less", "keys looked at")


def sizing_rows(sizing: Sizing) -> list[tuple[str, ...]]:
    """Returns a row for each size, under `HEADINGS`."""
    return [
        (
            f"{size.name}{' (today)' if size is sizing.today else ''}",
            "too little was seen" if size.hit_ratio is None else _percent(size.hit_ratio),
            "" if size.hit_ratio is None else f"{100 * size.margin:.1f}",
            "all" if size.rate == 1 else f"1 in {1 / size.rate:,.0f}",
        )
        for size in sizing.sizes
    ]


def sizing_sentences(sizing: Sizing) -> list[str]:
    """Returns what follows for today's size: what it hits, what others would, and from where on more gives nothing."""
    today = sizing.today
    seen = f"{sizing.requests:,} requests with {sizing.tokens:,} tokens"
    if today.hit_ratio is None:
        return [f"{seen} are too little to tell what {today.name} hits: look at more of them"]
    sentences = [f"{today.name}: {_percent(today.hit_ratio)} of tokens, of {seen}"]
    for size in sizing.others():
        more = (size.hit_ratio or 0) - today.hit_ratio
        margin = max(size.margin, today.margin)
        if abs(more) <= max(margin, ENOUGH):
            sentences.append(f"{size.name} would give about the same, {_percent(size.hit_ratio or 0)}")
        else:
            points = f"{100 * abs(more):.0f} points {'more' if more > 0 else 'less'}"
            sentences.append(f"{size.name} would give {_percent(size.hit_ratio or 0)}, {points}")
    if sizing.ceiling is not None:
        sentences.append(_enough(sizing, sizing.ceiling))
    return sentences


def _enough(sizing: Sizing, ceiling: float) -> str:
    """Returns from which size on more gives nothing."""
    alone = [size for size in sizing.sizes if not size.disk_bytes]
    enough = _first_at(alone, ceiling)
    if enough:
        return f"more than {enough.name} gives nothing: ceiling {_percent(ceiling)}"
    held = f", which takes {format_bytes(sizing.all_bytes)}" if sizing.all_bytes else ""
    return f"no size gives more than {_percent(ceiling)}, if nothing were ever forgotten{held}"


def _first_at(sizes: Sequence[SizeHits], ceiling: float) -> SizeHits | None:
    reached = (size for size in sizes if size.hit_ratio is not None and size.hit_ratio >= ceiling - ENOUGH)
    return next(reached, None)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
