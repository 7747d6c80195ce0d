"""Claims of any engine's request become calls to the daemon, in the right order and under names of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvoffloadd.integrations.common.claims import Directive, RequestPart, WantedClaim, in_order, numbered, requests_of
from kvoffloadd.integrations.common.keys import KEY_BYTES, Piece, pieces


class Recorder:
    """Stands in for a client: remembers what it is asked to retain."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []


def retain(self: Recorder, groups: Any, seconds: float, *, priority: int | None, name: str, first: Any) -> None:
    found = {group: [int(key[0]) for key in keys] for group, keys in groups.items()}
    self.asked.append((name, seconds, priority, found, first))


def in_fives(counts: Mapping[int, int], first: Mapping[int, int]) -> Iterator[tuple[Piece, dict[int, int]]]:
    """Cuts as a link does to a daemon that takes five keys at once."""
    for piece in pieces(counts, 5):
        yield piece, {group: first[group] + span.start for group, span in piece.items()}


def claim(directive: Directive, count: int, first: int = 0) -> WantedClaim:
    keys = np.repeat(np.arange(first, first + count, dtype=np.uint8)[:, None], KEY_BYTES, axis=1)
    return WantedClaim(directive, {3: keys}, {3: first})


def test_the_beginning_of_a_request_is_claimed_last(monkeypatch: Any) -> None:
    """The daemon gives up the oldest claims of one priority first."""
    monkeypatch.setattr("kvoffloadd.integrations.common.claims.Client.retain", retain)
    one, other = Directive(60.0, 80, "agent"), Directive(5.0, name="other", start=7)
    recorder: Any = Recorder()
    for call in requests_of([claim(one, 7), claim(other, 2, 7)], in_fives):
        call(recorder)
    assert recorder.asked == [
        ("other", 5.0, None, {3: [7, 8]}, {3: 7}),
        ("agent #2", 60.0, 80, {3: [5, 6]}, {3: 5}),
        ("agent #1", 60.0, 80, {3: [0, 1, 2, 3, 4]}, {3: 0}),
    ]


def test_names_that_several_claims_have_get_a_number() -> None:
    assert numbered(["a", "", "b", "a", ""]) == ["a #1", "", "b", "a #2", ""]


def test_what_was_generated_comes_last() -> None:
    answer, late, early = Directive(1.0, part=RequestPart.OUTPUT), Directive(1.0, start=5), Directive(1.0)
    assert in_order([answer, late, early]) == [early, late, answer]
