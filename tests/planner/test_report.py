"""A plan for people and for programs."""

from __future__ import annotations

import json

import pytest

from kvoffloadd.cli.plan import plan_json, print_plan
from kvoffloadd.planner import Trace
from tests.planner.models import DATA, GEMMA_3, GIB, GPT_OSS, LLAMA, QWEN, plan

TRACE = Trace(requests=10, median_tokens=1000, p90_tokens=4000, block_tokens=512, unique_blocks=90_000, references=1)


@pytest.mark.parametrize("name", [path.stem for path in DATA.glob("*.json")])
@pytest.mark.parametrize("trace", [None, TRACE])
def test_fits_100_columns(name: str, trace: Trace | None, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(name, trace, tp=2, memory_bytes=64 * GIB, disk_bytes=100 << 40)
    print_plan(found)
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 100
    for words in ("groups", "layouts", "what the daemon holds", "assumed"):
        assert words in output
    assert json.loads(json.dumps(plan_json(found)))["recommended"]["layout"] == found.recommended.name


def lines(output: str, beginning: str) -> list[list[str]]:
    """Cells of the lines that begin so."""
    return [
        [cell for cell in line.split("  ") if cell]
        for line in output.splitlines()
        if line.strip().startswith(beginning)
    ]


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan(GEMMA_3, block_size=64, prompt_tokens=4032, memory_bytes=64 * GIB))
    output = " ".join(capsys.readouterr().out.split())
    for words in (
        "34: 29 sliding, 5 full",
        "4 KV heads of 256, bfloat16, 4 KiB a token and layer",
        "256 KiB of a slot, 1.25 MiB of all slots",
        "0-4 sliding 1,024 tokens 5 1.25 MiB 1 1.25 MiB 1.25 MiB",
        "5 sliding 1,024 tokens 4 1 MiB 1 1 MiB 1.00 MiB",
        "6 full - 5 1.25 MiB",
        "a tensor a layer, K and V apart 64 10 8 to 10 128 KiB 4,284 1,558 2.9 %",
        "* cross-layer 64 1 1 1.21 MiB 441 159 2.9 %",
        "prompts of 4,032 tokens what a restore needs",
    ):
        assert words in output


def test_hybrids(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan(QWEN, tp=2, memory_bytes=64 * GIB))
    output = " ".join(capsys.readouterr().out.split())
    for words in (
        "2,134,016 bytes a layer, convolution and recurrent state",
        "2,096 tokens (16 asked for: a page must hold a layer's state)",
        "1 2,096 2.05 MiB 1 + 3",
        "4 528 2.06 MiB 1 + 12",
        "8 272 2.12 MiB 1 + 23",
    ):
        assert words in output


def test_a_prompt_without_a_whole_block(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan(QWEN, tp=2, prompt_tokens=2000))
    output = capsys.readouterr().out
    assert "2,000 tokens: no whole block" in output
    assert "warnings" in output


def test_traces(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(plan(LLAMA, TRACE, memory_bytes=64 * GIB))
    output = " ".join(capsys.readouterr().out.split())
    assert "1,000 tokens (of 10 in the trace): 62 blocks, 124 MiB" in output
    assert "of the trace's 46,080,000 distinct tokens all that is stored 1.1 %" in output


def test_for_programs() -> None:
    found = plan_json(plan(GPT_OSS, block_size=16, memory_bytes=64 * GIB, disk_bytes=1 << 40))
    assert (found["page_bytes"], found["row_bytes"], found["block_tokens"]) == (32_768, 393_216, 16)
    assert found["model"]["kinds"] == {"sliding": 12, "full": 12}
    sliding, full = found["groups"]
    assert (sliding["window_tokens"], sliding["window_keys"], len(sliding["layers"])) == (128, 8, 12)
    assert (full["payload_bytes"], full["slot_bytes"], full["record_bytes"]) == (393_216, 393_216, 397_312)
    assert [held["tier"] for held in found["held"]] == ["memory", "disk"]
    assert found["trace"] is None
    assert plan_json(plan(GPT_OSS, TRACE))["trace"]["unique_tokens"] == 46_080_000
    apart = plan_json(plan(GEMMA_3, block_size=64, prompt_tokens=4032))["layouts"][0]
    names = ("prompt_store_descriptors", "prompt_load_descriptors", "prompt_load_descriptors_clipped")
    assert [apart[name] for name in names] == [4284, 1558, 1616]
