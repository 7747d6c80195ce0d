"""The picture: it fits, it shows what it must, and what peers send can't break it."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.segment import Segment

from kvoffloadd.cli.top.frame import History, figures
from kvoffloadd.cli.top.shapes import Bar, Spark
from kvoffloadd.cli.top.view import render

from .samples import root, session, status


def picture(width: int, waiting: str = "", colours: bool = False, **changes: Any) -> list[str]:
    """Lines, as a terminal of that width would get them."""
    history = History()
    history.add(0.0, status())
    history.add(1.0, status(**changes))
    console = Console(
        file=StringIO(), width=width, highlight=False, force_terminal=colours,
        color_system="truecolor" if colours else None,
    )  # fmt: skip
    console.print(render(figures(history), history.rates, width, waiting))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [40, 80, 120, 150, 200, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = picture(width)
    assert max(map(len, lines)) <= width
    assert "serving" in words(lines)


@pytest.mark.parametrize("width", [80, 200])
def test_all_that_matters_is_there(width: int) -> None:
    text = words(picture(width))
    for what in (
        "kvoffloadd 1.2.3", "serving", "up 2 h 13 min", "pid 4242", "memory", "75 %", "48 GiB of 64 GiB",
        "1.23 M keys", "disk", "7.65 M keys", "worker → memory", "disk → memory", "to be demoted 12 MiB",
        "66.7 % hits", "ceiling", "never stored", "other namespace", "failed check", "instances 2", "2 workers",
        "GPU-01234567", "2 GiB", "full", "no space left on device", "slow jobs 1", "job 7", "waits for signal",
        "12.5 s", "400 us late", "12.0 ms worst",
    ):  # fmt: skip
        assert what in text, what


def test_80_columns_and_40_lines_are_enough() -> None:
    assert len(picture(80)) <= 40
    assert len(picture(200)) <= 30


def test_waiting_is_said_and_the_last_figures_stay() -> None:
    text = words(picture(80, waiting="for the daemon: no such socket"))
    assert "waiting for the daemon: no such socket" in text
    assert "● gone" in text
    assert "1.23 M keys" in text
    console = Console(file=StringIO(), width=80)
    console.print(render(None, {}, 80, "for the daemon: /x"))
    assert isinstance(console.file, StringIO)
    assert "waiting for the daemon: /x" in words([console.file.getvalue()])


def test_more_rows_than_there_is_room_for_are_counted() -> None:
    sessions = [session(number, "worker", number + 1) for number in range(30)]
    text = words(picture(80, sessions=sessions))
    assert "instances 30" in text
    assert "and 22 more" in text


def test_words_of_peers_are_no_commands_to_the_terminal() -> None:
    evil = "\x1b[2J[red]name[/red]\n\x07"
    lines = picture(120, sessions=[session(1, "worker", 1, namespace=evil)], colours=True)
    text = "\n".join(lines)
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "[red]name[/red]" in text


def test_a_root_that_is_off_has_its_reason() -> None:
    disk = {**status()["disk"], "roots": [root("/nvme0/" + 60 * "x", "off", reason="not mounted")]}
    text = words(picture(80, disk=disk))
    assert "● off" in text
    assert "not mounted" in text or "…" in text


def test_memory_that_cannot_be_pinned_is_said_with_the_reason() -> None:
    reason = "memory can't be pinned, and copies are slower: cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"
    device = {"pinning_failure": "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY\x1b[2J"}
    text = words(picture(160, devices={"host": {"copies": 0}, "cuda:0123456789abcdef": device}))
    assert f"GPU-01234567: {reason}" in text
    assert "\x1b[2J" not in text
    assert "pinned" not in words(picture(160, devices={"cuda:01": {"pinning_failure": ""}}))


def test_ways_of_copying_that_are_left_out_are_said() -> None:
    devices = {"host": {"copies": 0}, "cuda:0123456789abcdef": {"left_out": "batch, runs"}}
    shown = words(picture(160, devices=devices))
    assert (
        "GPU-01234567: an earlier daemon did not survive a way of copying, and copies are slower: batch, runs" in shown
    )
    assert "survive" not in words(picture(160, devices={"cuda:01": {"left_out": ""}}))


def cells(shape: Bar | Spark, width: int, colours: bool = True) -> list[Segment]:
    console = Console(width=width, force_terminal=True, color_system="truecolor" if colours else None)
    return [segment for segment in console.render(shape) if segment.text.strip("\n")]


@pytest.mark.parametrize("width", [1, 8, 33])
@pytest.mark.parametrize("shares", [(), (0.0,), (1.0,), (0.5,), (0.3, 0.3, 0.4), (0.01,), (0.99,), (0.7, 0.6)])
def test_a_bar_fills_exactly_its_width(width: int, shares: tuple[float, ...]) -> None:
    for colours in (True, False):
        drawn = cells(Bar([(share, "red") for share in shares]), width, colours)
        assert sum(len(segment.text) for segment in drawn) == width


def test_a_bar_without_colours_is_still_one() -> None:
    text = "".join(segment.text for segment in cells(Bar([(0.5, "red")]), 10, colours=False))
    assert text == "█████     "


def test_a_spark_shows_the_newest_on_the_right() -> None:
    text = "".join(segment.text for segment in cells(Spark([0, 1, 2, 4, 8], "red", 8.0), 4))
    assert text == "▁▂▄█"
    assert re.fullmatch("▁{8}", "".join(segment.text for segment in cells(Spark([], "red", 0.0), 8)))


@pytest.mark.parametrize("width", [80, 200])
def test_quotas_are_shown_if_there_are_any(width: int) -> None:
    row = {"kind": "user", "name": "1000", "memory_bytes": 7 << 30, "memory_min_bytes": 1 << 30, "memory_max_bytes": 0}
    pattern = {**row, "kind": "namespace", "name": "llama*", "memory_min_bytes": 0, "memory_max_bytes": 14 << 30}
    shown = words(picture(width, quotas=[row, pattern]))
    assert "uid 1000" in shown and "7 GiB of at least 1 GiB" in shown
    assert "namespace llama*" in shown and "50 % 7 GiB of at most 14 GiB" in " ".join(shown.split())
    assert "quotas" not in words(picture(width))


@pytest.mark.parametrize("width", [80, 200])
def test_what_is_claimed_is_shown_if_anything_is(width: int) -> None:
    claims = {"memory_bytes": 12 << 30, "disk_bytes": 0}
    lines = [line for line in picture(width, retention=claims) if "claimed" in line]
    assert len(lines) == 1
    assert "memory" in lines[0] and "12 GiB claimed" in words(lines)
    assert "claimed" not in words(picture(width, retention={"memory_bytes": 0, "disk_bytes": 0}))


def test_the_bar_tells_what_is_claimed_from_the_rest() -> None:
    """More than is used never is: both were counted at different moments."""
    colours = {
        claimed: set(re.findall(r"\[48;[\d;]+m", line))
        for claimed in (0, 12 << 30, 200 << 30)
        for line in picture(200, colours=True, retention={"memory_bytes": claimed, "disk_bytes": 0})
        if "claimed" in line or (not claimed and "1.23" in line)
    }
    assert len(colours[12 << 30]) == len(colours[0]) + 1
    assert len(colours[200 << 30]) == len(colours[0])
