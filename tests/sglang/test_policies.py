"""SGLang's other ways to use a storage: what it writes back when it evicts, and what a decode engine offloads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.enginechild import EngineError
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, PAGE, Prompts, cached, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

PREFILL_ELSEWHERE = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 1}
"""Fields of requests that SGLang's stand-in for a transfer takes for prefilled. What it has transferred is nothing."""


def test_what_is_written_back_is_found(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    """SGLang stores what it evicts from the GPU, and nothing before. Three prompts are there when it forgets them."""
    daemon = start_daemon(memory="256MiB")
    options = {"hicache_write_policy": "write_back", "hicache_host_memory_mode": "cache"}
    engine = start_engine("dense", storage=stored_at(daemon.socket, **options))
    expected = reference("dense", asked)
    assert tokens(engine.generate(asked[:1])) == expected[:1]
    settle(daemon)
    assert daemon.status()["cache"]["keys"] == 0
    assert tokens(engine.generate(asked[1:])) == expected[1:]
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert tokens(found) == expected
    assert cached(found) == [*ALL[:5], 0, 0, 0]


def test_a_decode_engine_offloads_its_answers(
    start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts
) -> None:
    daemon = start_daemon(memory="256MiB")
    storage = stored_at(daemon.socket, hicache_host_memory_mode="cache")
    del storage["enable_hierarchical_cache"]
    engine = start_engine(
        "dense",
        storage=storage,
        disaggregation_mode="decode",
        disaggregation_transfer_backend="fake",
        disaggregation_decode_enable_offload_kvcache=True,
    )
    prompts = [prompt[: PAGE + 1] for prompt in asked[:3]]
    found = engine.ask(prompts, 3 * PAGE, **PREFILL_ELSEWHERE)
    assert [len(one) for one in tokens(found)] == [3 * PAGE] * 3
    settle(daemon)
    assert daemon.status()["cache"]["keys"] == 3 * 3
    assert "exception" not in engine.log().lower()


def test_layers_of_a_draft_model_are_refused(
    start_daemon: StartDaemon, start_engine: StartEngine, model: Callable[[str], Path], tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(model("dense"), draft, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((draft / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="of a draft model: start SGLang without --speculative-algorithm"):
        start_engine(
            "dense",
            storage=stored_at(start_daemon(memory="64MiB").socket),
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(draft),
            speculative_draft_load_format="dummy",
            speculative_num_steps=1,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=2,
        )
