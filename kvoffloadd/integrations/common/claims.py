"""What requests want claimed, whatever their engine: the tokens of a directive, and the requests to the daemon."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvoffloadd.client import Client, Retained
from kvoffloadd.integrations.common.keys import Piece
from kvoffloadd.model import BoolArray, I64Array, U8Array

FEATURE = "retain"
"""Daemons that know claims list it."""

TOO_OLD = "kvoffloadd: the daemon is older and knows no claims: nothing is retained for requests"
"""The warning about one that does not."""

CutIntoPieces = Callable[[Mapping[int, int], Mapping[int, int]], Iterable[tuple[Piece, dict[int, int]]]]
"""A link's `pieces`."""


class RequestPart(enum.Enum):
    """The part of a request that a directive is about."""

    PROMPT = "prompt"
    WHOLE = "whole"
    OUTPUT = "output"  # what was generated


@dataclass(frozen=True, slots=True)
class Directive:
    """Tokens of a request that are to be claimed, and for how long. `end` None: up to the end of the part. `name` may
    be that of several directives.
    """

    seconds: float
    priority: int | None = None
    name: str = ""
    start: int = 0
    end: int | None = None
    part: RequestPart = RequestPart.PROMPT

    def covers(self, ends: I64Array, in_prompt: BoolArray, tokens_per_key: int) -> BoolArray:
        """Returns which keys of a group hold tokens that this is about. `ends`: where they end, in tokens; `in_prompt`:
        whether that is in the prompt.
        """
        if self.part is RequestPart.OUTPUT:
            return ~in_prompt
        begins = (ends - 1) // tokens_per_key * tokens_per_key
        covered: BoolArray = ends > self.start
        if self.end is not None:
            covered &= begins < self.end
        return covered & in_prompt if self.part is RequestPart.PROMPT else covered


def in_order(directives: Iterable[Directive]) -> list[Directive]:
    """Returns directives in the order of their beginnings."""
    return sorted(directives, key=lambda each: (each.part is RequestPart.OUTPUT, each.start))


@dataclass(frozen=True, slots=True, eq=False)
class WantedClaim:
    """Keys to claim. `groups`: u8 (keys, KEY_BYTES), in the order of the request. `first`: the position of each group's
    first key.
    """

    directive: Directive
    groups: dict[int, U8Array]
    first: dict[int, int]

    @property
    def counts(self) -> dict[int, int]:
        """Returns the number of keys of each group."""
        return {group: len(keys) for group, keys in self.groups.items()}


def requests_of(claims: Iterable[WantedClaim], pieces: CutIntoPieces) -> Iterator[Callable[[Client], Retained]]:
    """Yields a call for each claim of a request, or several for one of more keys than fit: the last in the request
    first. Of one priority, the daemon gives up the oldest claims first.
    """
    cut = [(claim, piece, first) for claim in claims for piece, first in pieces(claim.counts, claim.first)]
    names = numbered([claim.directive.name for claim, _, _ in cut])
    for name, (claim, piece, first) in reversed(list(zip(names, cut, strict=True))):
        keys = {group: claim.groups[group][span] for group, span in piece.items()}
        asked = partial(Client.retain, groups=keys, seconds=claim.directive.seconds, name=name, first=first)
        yield partial(asked, priority=claim.directive.priority)


def numbered(names: Sequence[str]) -> list[str]:
    """Returns the names of claims, those that are given several times with a number behind: a claim replaces the one
    that had its name.
    """
    times, seen = Counter(names), Counter[str]()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} #{seen[name]}" if name and times[name] > 1 else name)
    return found
