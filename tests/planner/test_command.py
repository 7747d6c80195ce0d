"""`kvoffloadd plan`, as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd import cli
from kvoffloadd.planner import PlanInputs, planning, trace
from tests.planner.models import GPT_OSS, LLAMA, QWEN, TRACE, changed, path_of

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvoffloadd", "plan", *map(str, arguments)],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, cwd=ROOT, timeout=50,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def figures(*arguments: str | Path) -> Any:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.slow
def test_for_people() -> None:
    code, out, err = run(
        "--model-config", path_of(GPT_OSS), "--block-size", "16", "--tp", "2", "--memory", "64GiB", "--disk", "2TiB"
    )
    assert (code, err) == (0, "")
    assert "gpt_oss, 2 ranks" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.slow
def test_for_programs() -> None:
    found = figures("--model-config", path_of(QWEN), "--tp", "2", "--attn-pack-size", "4", "--memory", "64GiB")
    assert (found["pack_size"], found["block_tokens"], len(found["groups"])) == (4, 528, 13)
    assert {one["pack_size"]: one["block_tokens"] for one in found["layouts"]} == {1: 2096, 2: 1056, 4: 528, 8: 272}
    found = figures("--model-config", path_of(LLAMA), "--kv-dtype", "fp8", "--no-hybrid", "--share-tp")
    assert (found["row_bytes"], found["recommended"]["layout"]) == (1 << 20, "cross-layer, heads first")


def test_a_block_longer_than_prompts() -> None:
    found = figures("--model-config", path_of(QWEN), "--tp", "2", "--prompt-tokens", "2000", "--memory", "64GiB")
    assert ["such a prompt has no full block" in warning for warning in found["warnings"]] == [True]


def test_a_tiny_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 700, "hash_ids": [0, 1]}\n{"input_length": 800, "hash_ids": [0, 2]}\n')
    found = figures("--model-config", path_of(LLAMA), "--trace", path)
    assert found["trace"]["unique_blocks"] == 3
    assert [prompt["tokens"] for prompt in found["prompts"]] == [700, 800]
    code, _, err = run("--model-config", path_of(LLAMA), "--trace", path, "--trace-block-tokens", "16")
    assert (code, "line 1: 2 `hash_ids` for 700 tokens" in err) == (2, True)


@pytest.mark.skipif(not TRACE.exists(), reason="the conversation trace is not at hand")
def test_the_conversation_trace() -> None:
    found = figures("--model-config", path_of(GPT_OSS), "--trace", TRACE, "--memory", "64GiB")
    assert [prompt["tokens"] for prompt in found["prompts"]] == [6909, 27_367]
    # 174,080 slots of 384 KiB; 431 blocks of both groups; 8 of the window alone.
    assert (found["held"][0]["prompts"][0], found["held"][0]["needed"][0]) == (174_080 // 862, 174_080 // 439)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--tp", "3"), "kvoffloadd: 64 heads (num_attention_heads), 8 KV heads (num_key_value_heads) can't be split"),
        (("--attn-pack-size", "2"), "kvoffloadd: --attn-pack-size is only for models with states"),
        (("--kv-dtype", "int3"), 'kvoffloadd: --kv-dtype "int3" is not known; these are: auto, bfloat16'),
        (("--block-size", "0"), '"0" is not a whole number above 0'),
        (("--memory", "64GB"), 'unknown unit "GB"'),
        (("--trace", "a", "--prompt-tokens", "5"), "not allowed with argument --trace"),
        (("--trace", "/dev/null/none"), "Not a directory; name a trace"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], complaint: str) -> None:
    code, out, err = run("--model-config", path_of(GPT_OSS), *arguments)
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert complaint in err


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing"),
    ],
)
def test_bad_configs(tmp_path: Path, keys: dict[str, object], complaint: str) -> None:
    code, out, err = run("--model-config", changed(tmp_path, GPT_OSS, **keys))
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert complaint in err


@pytest.mark.parametrize("engine", ["any", "sglang"])
@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({"model_type": "next_years"}, "model_type = 'next_years' is not known, so that its groups can't be"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True: it is an encoder, and keeps"),
        ({"layer_types": ["rolling"] * 24}, "layer_types has 'rolling', which is not known"),
    ],
)
def test_no_plan(tmp_path: Path, engine: str, keys: dict[str, object], first: str) -> None:
    """The first line reports it, and the exit code is not that of a plan, nor of wrong usage."""
    path = changed(tmp_path, GPT_OSS, **keys)
    code, out, err = run("--model-config", path, "--engine", engine)
    assert (code, out) == (1, "")
    assert err.startswith(f"kvoffloadd: no plan: {path}: {first}")


def test_a_state_that_fits_no_page(tmp_path: Path) -> None:
    """5 channels of 3 bf16 would leave the recurrent state at an odd place."""
    odd = {"linear_key_head_dim": 1, "linear_num_key_heads": 1, "linear_value_head_dim": 3, "linear_num_value_heads": 1}
    code, out, err = run("--model-config", changed(tmp_path, QWEN, **odd))
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert "no layout can hold this model's layers: layer layers.0" in err


def test_help_says_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    output = " ".join(capsys.readouterr().out.split())
    for default in (planning.PROMPT_TOKENS, trace.CHAT_BLOCK_TOKENS, PlanInputs().block_size, PlanInputs().tp, "4GiB"):
        assert f"default: {default}" in output or f"default: the daemon's, {default}" in output
    assert PlanInputs().memory_bytes == 4 << 30


def test_torch_is_not_needed() -> None:
    code = f"import sys; from kvoffloadd import cli; cli.main(['plan', '--model-config', {str(path_of(LLAMA))!r}])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=50,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False")
