"""`scripts soak` for a few seconds: two hosts that share a real store, with kills of everything."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from scripts.harness.stores import why_no_mooncake, why_no_valkey
from scripts.soak.mishaps import Mishap, Mishaps
from tests.scripts.running import run_script

SECONDS, END_S = 25, 240
WHY_NOT: dict[str, Callable[[], str]] = {"mooncake": why_no_mooncake, "valkey": why_no_valkey}


@pytest.mark.remote
@pytest.mark.parametrize("engine", list(WHY_NOT))
def test_a_short_one(engine: str, seed: int) -> None:
    if reason := WHY_NOT[engine]():
        pytest.skip(reason)
    options = ("--engine", engine, "--seconds", str(SECONDS), "--seed", str(seed))
    done = run_script("soak", *options, limit_s=SECONDS + END_S)
    figures = done.figures
    assert (figures["findings"], figures["leaked"], figures["errors"], figures["said"]) == ([], [], [], [])
    assert figures["wrong_bytes"] == figures["broken_promises"] == 0
    assert figures["served_after_a_clear"] == figures["daemons_ended"] == 0
    assert sum(figures["sentinels"]["trials"].values()) > 0
    assert sum(figures["vandal"].values()) > 0
    assert figures["verified_loads"] > 0
    assert figures["remote"]["pushed"] > 0
    assert sum(figures["mishaps"].values()) > 0  # how many depends on chance, and on how busy the machine is


def test_mishaps_come_at_random_and_are_undone() -> None:
    calls: list[str] = []
    lasting = Mishap("cut", 3.0, 2.0, lambda seconds: calls.append("cut"), lambda: calls.append("mended"))
    once = Mishap("kill", 5.0, 0.0, lambda seconds: calls.append("kill"))
    mishaps = Mishaps(np.random.default_rng(1), 60.0, [lasting, once])
    for tenth in range(600):
        mishaps.look(tenth / 10)
    assert mishaps.counts["cut"] == calls.count("cut") > 5
    assert mishaps.counts["kill"] == calls.count("kill") > 5
    cuts = [what for what in calls if what != "kill"]
    assert cuts[::2] == ["cut"] * len(cuts[::2]), "never twice at once"
    mishaps.undo_all()
    assert calls.count("mended") == calls.count("cut")
