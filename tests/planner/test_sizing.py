"""What is said of other sizes, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from kvoffloadd.planner.sizing import SizeHits, Sizing, sizing_rows, sizing_sentences

GIB, TIB = 1 << 30, 1 << 40


def sizing(*ratios: float | None, disk: int = 0, margin: float = 0.004, ceiling: float | None = 0.62) -> Sizing:
    """Memory of 32, 64 and 128 GiB, then 64 GiB with the disk and twice it; today has 64."""
    places = [(32 * GIB, 0), (64 * GIB, 0), (128 * GIB, 0), (64 * GIB, disk), (64 * GIB, 2 * disk)]
    sizes = [SizeHits(*place, ratio, margin, 0.125) for place, ratio in zip(places, ratios, strict=False)]
    return Sizing("lru", 64 * GIB, disk, tuple(sizes), 1000, 9_000_000, ceiling, 3 * TIB)


def test_memory_alone() -> None:
    assert sizing_sentences(sizing(0.30, 0.41, 0.52)) == [
        "64 GiB of memory: 41 % of tokens, of 1,000 requests with 9,000,000 tokens",
        "32 GiB of memory would give 30 %, 11 points less",
        "128 GiB of memory would give 52 %, 11 points more",
        "no size gives more than 62 %, if nothing were ever forgotten, which takes 3 TiB",
    ]


def test_memory_and_disk() -> None:
    assert sizing_sentences(sizing(0.30, 0.41, 0.52, 0.58, 0.60, disk=TIB)) == [
        "64 GiB of memory and 1 TiB of disk: 58 % of tokens, of 1,000 requests with 9,000,000 tokens",
        "64 GiB of memory would give 41 %, 17 points less",
        "64 GiB of memory and 2 TiB of disk would give 60 %, 2 points more",
        "no size gives more than 62 %, if nothing were ever forgotten, which takes 3 TiB",
    ]


def test_what_is_within_the_margin_is_the_same() -> None:
    assert "128 GiB of memory would give about the same, 44 %" in sizing_sentences(sizing(0.3, 0.41, 0.44, margin=0.05))
    assert "128 GiB of memory would give 44 %, 3 points more" in sizing_sentences(sizing(0.3, 0.41, 0.44, margin=0.02))


def test_more_than_enough() -> None:
    assert sizing_sentences(sizing(0.30, 0.617, 0.62))[-1] == "more than 64 GiB of memory gives nothing: ceiling 62 %"
    assert len(sizing_sentences(sizing(0.30, 0.617, 0.62, ceiling=None))) == 3


def test_too_little_is_no_guess() -> None:
    assert sizing_sentences(sizing(None, None, None)) == [
        "1,000 requests with 9,000,000 tokens are too little to tell what 64 GiB of memory hits: look at more of them"
    ]
    some = sizing(None, 0.4, None)
    assert len(sizing_sentences(some)) == 2
    assert [row[1] for row in sizing_rows(some)] == ["too little was seen", "40 %", "too little was seen"]


def test_rows() -> None:
    rows = sizing_rows(sizing(0.30, 0.41, 0.52))
    assert rows[1] == ("64 GiB of memory (today)", "41 %", "0.4", "1 in 8")
    whole = dataclasses.replace(sizing(0.3, 0.4).sizes[0], rate=1.0)
    assert sizing_rows(dataclasses.replace(sizing(0.3, 0.4), sizes=(whole, sizing(0.3, 0.4).sizes[1])))[0][3] == "all"


def test_today_must_be_among_the_sizes() -> None:
    with pytest.raises(LookupError):
        _ = sizing(0.3).today
