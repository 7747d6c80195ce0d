"""`scripts accuracy`: in every layout loaded KV gives the recomputed answers, and wrong blocks are noticed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.scripts.running import run_script

LAYOUTS = ["by-layer", "cross-layer", "heads first", "kernel blocks", "packed-pages", "packed-rows"]


@pytest.mark.soak
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_loaded_kv_answers_as_recomputed_kv() -> None:
    done = run_script("accuracy", "--prompts", "8", "--seed", "0")
    rows = done.figures["rows"]
    assert (done.status, done.figures["errors"]) == (0, []), done.said
    assert [row["verdict"] for row in rows] == ["good"] * len(rows)
    plain, controls = [row for row in rows if not row["control"]], [row for row in rows if row["control"]]
    for source in ("recomputed", "memory", "disk"):
        found = [row for row in plain if row["source"] == source]
        assert [row["layout"] for row in found] == LAYOUTS
        assert len({row["accuracy"] for row in plain}) == 1
        assert all(row["accuracy"] >= 0.95 for row in found)
        assert {row["recomputed_tokens"] for row in found} == {8 * 80 if source == "recomputed" else 0}
    # Packed pages have attention of one kind.
    assert {row["control"] for row in controls} == {
        "two blocks swapped", "wrong attention", "wrong windows", "wrong states",
    }  # fmt: skip
    assert len(controls) == 4 * len(LAYOUTS) - 1
    assert max(row["accuracy"] for row in controls) < plain[0]["accuracy"]


def test_wrong_usage_is_told() -> None:
    done = run_script("accuracy", "--prompts", "3")
    assert done.status == 2
    assert "--prompts" in done.said
