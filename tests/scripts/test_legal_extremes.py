"""The script that asks for the most that is legal: that it runs, what it tells, and that jobs keep its bound."""

from __future__ import annotations

import pytest

from tests.scripts.running import run_script

pytestmark = pytest.mark.slow

CASES = (
    "lookup_of_held_keys",
    "store_and_load_of_160_layers",
    "jobs_of_four_million_runs",
    "drains_of_a_thousand_jobs",
)
TURN_CPU_MAX_S = 0.1
"""Five times the bound: planning all descriptors of one of these jobs in one turn takes ten times as long as this."""


def test_jobs_keep_the_loop_turning() -> None:
    chosen = [word for case in CASES for word in ("--case", case)]
    done = run_script("legal_extremes", "--keys", "16384", *chosen)
    assert done.status == 0, done.said
    assert set(done.figures["cases"]) == set(CASES)
    assert {bound["what"].partition(",")[0] for bound in done.figures["bounds"]} == set(CASES)
    for name, case in done.figures["cases"].items():
        assert 0 < case["turn_s"] < TURN_CPU_MAX_S, name


def test_wrong_options_are_refused() -> None:
    assert run_script("legal_extremes", "--keys", "5").status == 2
    assert run_script("legal_extremes", "--case", "none").status == 2
