"""Compares what `kvoffloadd plan --engine sglang` prints for published models' pools with SGLang's own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffloadd.planner import PAGE_TOKENS, Rank, read_model
from kvoffloadd.planner.hostpools import PAGES_OF_ONE, REFUSED, WINDOWS_APART, host_pools
from scripts.harness.published import CONFIGS, text_type
from tests.enginechild import ROOT
from tests.sglang.engine import ENVIRONMENT
from tests.sglang.modelfacts import PAGE, WITH_WINDOWS, complete

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

ASK_S = 300.0


@pytest.mark.parametrize("tp", [1, 2])
def test_pools_are_those_that_sglang_makes(tmp_path: Path, tp: int) -> None:
    asked = {name: config for name, config in CONFIGS.items() if text_type(config) not in REFUSED}
    for name, config in asked.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(complete(config)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.modelfacts", str(tmp_path), str(tp)],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False, timeout=ASK_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    output = json.loads(done.stdout.splitlines()[-1])
    assert PAGE == PAGE_TOKENS
    assert (
        set(output["windows_apart"]) == set(WITH_WINDOWS) == WINDOWS_APART - {"gemma4_text", "gpt_oss", "llama4_text"}
    )
    found, theirs = {}, {}
    for name, facts in output["models"].items():
        model = read_model(tmp_path / name / "config.json")
        theirs[name] = facts["pools"], facts["page_of_one"]
        pools = {pool.name: [pool.layers, pool.payload_bytes] for pool in host_pools(Rank(model, tp, PAGE))}
        found[name] = pools, model.model_type in PAGES_OF_ONE
    assert found == theirs
    assert found.keys() == asked.keys()
