"""`kvoffloadd advise --trace`, and the figures behind it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd import cli
from kvoffloadd.cache.curve.curve import Curve, Estimate
from kvoffloadd.cache.curve.prompt import AskedKeys
from kvoffloadd.planner import PlanInputs, make_plan, read_model, tracesizing
from kvoffloadd.planner.trace import read_requests
from kvoffloadd.planner.tracesizing import _joined, size_for
from scripts.replay.trace import ceiling_hits, load_trace, num_references, simulate
from tests.planner.models import GPT_OSS, LLAMA, path_of

TOKEN_BYTES = 1000
BLOCK_BYTES = 512 * TOKEN_BYTES


@pytest.fixture(name="path", scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of 3 to 8 blocks, of 60 beginnings, some much more frequent than others."""
    random = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    beginnings = np.minimum(random.zipf(1.3, 600), 60)
    lines = []
    for number, beginning in enumerate(beginnings.tolist()):
        ids = [beginning * 100 + at for at in range(int(random.integers(2, 7)))]
        lines.append(json.dumps({"input_length": 512 * len(ids) + 5, "hash_ids": [*ids, 100_000 + number]}))
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_small_sizes_are_those_of_whole_simulations(path: Path, policy: str) -> None:
    requests = load_trace(path)
    asked = num_references(requests)
    found = size_for(read_requests(path), TOKEN_BYTES, 80 * BLOCK_BYTES, 0, policy, samples=2)
    assert (found.tokens, found.requests, len(found.sizes)) == (asked * 512, 600, 6)
    for size, blocks in zip(found.sizes, (20, 40, 80, 160, 320, 640), strict=True):
        assert (size.memory_bytes, size.rate) == (blocks * BLOCK_BYTES, 1.0)
        assert size.hit_ratio == pytest.approx(simulate(requests, policy, blocks) / asked, abs=0.01)
    assert found.ceiling == ceiling_hits(requests) / asked
    assert found.all_bytes == found.sizes[0].memory_bytes // 20 * read_requests(path).unique_blocks


def test_a_disk_adds_two_sizes(path: Path) -> None:
    progress: list[tuple[int, int]] = []
    found = size_for(
        read_requests(path), TOKEN_BYTES, 20 * BLOCK_BYTES, 200 * BLOCK_BYTES, samples=1,
        progress=lambda done, total: progress.append((done, total)),
    )  # fmt: skip
    assert [size.disk_bytes for size in found.sizes[-2:]] == [200 * BLOCK_BYTES, 400 * BLOCK_BYTES]
    assert found.today is found.sizes[-2]
    assert (found.today.hit_ratio or 0) > (found.sizes[2].hit_ratio or 1)
    assert (len(progress), progress[-1]) == (600, (found.tokens // 512,) * 2)


def estimate(ratio: float | None, error: float = 0.0) -> Estimate:
    return Estimate(1, 0, ratio, error, filled=True, rate=0.5)


def test_samples_are_as_sure_as_they_agree() -> None:
    told = _joined([estimate(0.4, 0.003), estimate(0.4, 0.004)], 5000)
    assert told.margin == pytest.approx(2 * 0.003536, rel=1e-3)
    apart = _joined([estimate(0.4), estimate(0.5)], 5000)
    assert apart.hit_ratio == pytest.approx(0.45)
    assert apart.margin == pytest.approx(2 * 0.0707, rel=1e-3)
    assert _joined([estimate(0.4), estimate(None, 0.03)], 5000).hit_ratio is None
    assert _joined([estimate(0.4)], 1999).hit_ratio is None
    assert _joined([estimate(0.4)], 2000).hit_ratio == 0.4


def test_each_sample_has_other_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Seen(Curve):
        def ask(self, groups: Sequence[AskedKeys]) -> None:
            seen.append(int(groups[0].hashes[0]))
            super().ask(groups)

    monkeypatch.setattr(tracesizing, "Curve", Seen)
    size_for(read_requests(path), TOKEN_BYTES, 20 * BLOCK_BYTES, 0, "lru", samples=3)
    assert len({seen[0], seen[600], seen[1200]}) == 3


def test_the_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["advise", "--trace", str(path), "--token-bytes", "1000", "--memory", "40MiB", "--samples", "1"]
    assert cli.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["policy"], found["requests"], len(found["sizes"])) == ("hit-density", 600, 6)
    assert cli.main([*asked, "--policy", "lru"]) == 0
    shown = capsys.readouterr().out
    assert "with the policy lru" in shown
    assert "(today)" in shown
    assert "of tokens, of 600 requests" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_too_little_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1, 2]}\n' * 3)
    assert cli.main(["advise", "--trace", str(path), "--token-bytes", "1000"]) == 1
    shown = capsys.readouterr().out
    assert "3 requests with 3,072 tokens are too little to tell what 4 GiB of memory hits" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--policy", "fifo"], "'fifo' is not one of hit-density, lru, s3-fifo"),
        (["--trace-block-tokens", "64"], "are not blocks of 64 tokens"),
    ],
)
def test_what_is_refused(path: Path, more: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", "--trace", str(path), "--token-bytes", "1000", *more]) == 2
    assert complaint in capsys.readouterr().err


def test_a_token_is_what_the_plan_stores_of_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = read_model(path_of(LLAMA))
    plan = make_plan(model, PlanInputs(tp=2, prompt_tokens=1600))
    assert plan.token_bytes * 1600 == plan.prompts[0].stored_bytes
    hybrid = make_plan(read_model(path_of(GPT_OSS)), PlanInputs(prompt_tokens=1600))
    assert hybrid.token_bytes * 1600 == hybrid.prompts[0].stored_bytes
    code = cli.main(["advise", "--trace", str(path), "--model-config", str(path_of(LLAMA)), "--samples", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["all_bytes"] == make_plan(model, PlanInputs()).token_bytes * 512 * read_requests(path).unique_blocks
