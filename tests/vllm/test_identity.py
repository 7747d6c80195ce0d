"""Real engines: who shares with whom, and what becomes of files that are written again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.integrations.vllm.versions import SUPPORTED
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import TWO_RANKS, Prompts, VllmEngine, by_connector, cached, prompts, settle, tokens
from tests.vllm.models import OTHER, write_adapter
from tests.vllm.processor import needs_avx512
from tests.vllm.releases import run_with

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

COUNT = 3
ALL, NONE = [480] * COUNT, [0] * COUNT
MEMORY = "256MiB"


@pytest.fixture
def asked() -> Prompts:
    """Few: engines of these tests are many."""
    return prompts(3, COUNT)


@pytest.mark.parametrize("number", SUPPORTED)
def test_identity_of_each_release(number: str, model: Callable[[str], Path]) -> None:
    """`contract_identity.py` passes in a separate process."""
    run_with(number, model("dense"), "tests/vllm/contract_identity.py", deadline_s=800)


@pytest.mark.parametrize(("environment", "ranks"), [({}, 1), (TWO_RANKS, 2)], ids=["one process", "two ranks"])
def test_an_adapter_that_is_trained_again(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    tmp_path: Path,
    asked: Prompts,
    environment: dict[str, str],
    ranks: int,
) -> None:
    """It is trained in place, under its name, while it is served: until it is loaded, requests are those of the old
    one, and what spans the load belongs to neither. vLLM's own prefix cache is never emptied.
    """
    daemon, spanning = start_daemon(memory=MEMORY), prompts(4, COUNT)
    folder = write_adapter(tmp_path / "adapter", 1)
    adapter = {"lora_name": "mine", "lora_int_id": 1, "lora_path": str(folder)}
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_num_batched_tokens": 160}
    options |= {"environment": environment, "tensor_parallel_size": ranks}
    connector = by_connector(daemon.socket)
    engine = start_engine("dense", connector=connector, **options)
    engine.await_connection()

    def ask(given: Prompts = asked, **named: Any) -> tuple[list[list[int]], list[int | None]]:
        answer = engine.generate(given, adapter=adapter, **named)
        settle(daemon, engine)
        return tokens(answer), cached(answer)

    old, hits = ask()
    assert hits == NONE
    base = engine.generate(asked)
    assert cached(base) == NONE
    assert tokens(base) != old
    write_adapter(folder, 2)
    assert ask() == (old, ALL), "nobody has told the engine to load it again"
    mixed, hits = ask(spanning, load_after=4)  # the first is computed, the second in part, the third not at all
    assert hits == NONE
    new, hits = ask()
    assert hits == NONE
    assert new != old
    spanned, hits = ask(spanning)
    assert hits == NONE, "no name of theirs is that of the new one"
    assert ranks > 1 or spanned != mixed, "steps of an engine in another process are its own"
    assert ask() == (new, ALL)
    engine.kill()
    engine = start_engine("dense", connector=connector, **options)
    engine.await_connection()
    assert ask() == (new, ALL)
    assert ask(spanning) == (spanned, ALL)
    engine.kill()
    engine = start_engine("dense", connector=None, **options)
    assert tokens(engine.generate(asked, adapter=adapter)) == new
    assert tokens(engine.generate(spanning, adapter=adapter)) == spanned


def test_weights_that_are_written_again(
    start_daemon: StartDaemon,
    model: Callable[[str], Path],
    reference: Reference,
    tmp_path: Path,
    asked: Prompts,
) -> None:
    """While they are served, before a start, and while they are loaded."""
    daemon = start_daemon(memory=MEMORY)
    folder = tmp_path / "model"
    shutil.copytree(model("dense"), folder)
    connector = by_connector(daemon.socket)

    def started(name: str, **options: Any) -> VllmEngine:
        engine = VllmEngine(folder, tmp_path / f"{name}.log", connector=connector, **options)
        engine.await_connection()
        return engine

    old = reference("dense", asked)
    with started("first") as first:
        assert tokens(first.generate(asked)) == old
        settle(daemon, first)
        shutil.copytree(model(OTHER), folder, dirs_exist_ok=True)
        answer = first.generate_anew(asked)
        assert (tokens(answer), cached(answer)) == (old, ALL), "it computes with what it has loaded"
    new = reference(OTHER, asked)
    assert new != old
    with started("second") as second:
        answer = second.generate(asked)
        assert (tokens(answer), cached(answer)) == (new, NONE)
        settle(daemon, second)
        answer = second.generate_anew(asked)
        assert (tokens(answer), cached(answer)) == (new, ALL)
    with started("third", touched=str(folder / "config.json")) as third:
        answer = third.generate(asked)
        assert (tokens(answer), cached(answer)) == (new, NONE)
        assert "shares with no other" in third.log()
        settle(daemon, third)
        answer = third.generate_anew(asked)
        assert (tokens(answer), cached(answer)) == (new, ALL), "with itself it does"


def test_engines_that_differ_in_what_is_harmless(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    daemon = start_daemon(memory=MEMORY)
    connector = by_connector(daemon.socket)
    first = start_engine("dense", connector=connector)
    first.await_connection()
    assert tokens(first.generate(asked)) == reference("dense", asked)
    settle(daemon, first)
    first.kill()
    others = {"max_model_len": 600, "max_num_seqs": 2, "seed": 7, "num_gpu_blocks_override": 70, "enable_lora": True}
    second = start_engine("dense", connector=connector, **others)
    second.await_connection()
    answer = second.generate(asked)
    assert cached(answer) == ALL
    assert tokens(answer) == reference("dense", asked)


@needs_avx512
def test_layers_of_other_dtypes(start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts) -> None:
    """Blocks have equal bytes: one engine leaves the first layer out of its fp8 cache, and one the second layer."""
    daemon = start_daemon(memory=MEMORY)
    connector = by_connector(daemon.socket)
    for layer in ("0", "1"):
        engine = start_engine("dense", connector=connector, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[layer])
        engine.await_connection()
        assert cached(engine.generate(asked)) == NONE
        settle(daemon, engine)
        assert cached(engine.generate_anew(asked)) == ALL
        engine.kill()


def test_engines_that_differ_in_the_draft(
    start_daemon: StartDaemon, start_engine: StartEngine, model: Callable[[str], Path], asked: Prompts
) -> None:
    """What a draft model has computed is of no use to another one, which would find nothing that is accepted."""
    daemon = start_daemon(memory=MEMORY)
    connector = by_connector(daemon.socket)
    accepted = []
    for draft in (OTHER, "dense"):
        drafting = {"method": "draft_model", "model": str(model(draft)), "num_speculative_tokens": 3}
        engine = start_engine("dense", connector=connector, speculative_config=drafting)
        engine.await_connection()
        for hits in (False, True):
            before = engine.metrics().get("vllm:spec_decode_num_accepted_tokens", 0)
            answer = engine.generate_anew(asked)
            accepted.append(engine.metrics()["vllm:spec_decode_num_accepted_tokens"] - before)
            assert all(bool(tokens) is hits for tokens in cached(answer))
            settle(daemon, engine)
        engine.kill()
    assert accepted[2] == accepted[3] > 2 * accepted[0]


def test_states_that_lie_in_another_order(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    """Sizes, layers and dtypes are equal. vLLM chooses the order by itself if another connector needs it."""
    daemon = start_daemon(memory=MEMORY)
    connector = by_connector(daemon.socket)
    right = reference("conv", asked)
    for order in ("SD", "DS"):
        engine = start_engine("conv", connector=connector, environment={"VLLM_SSM_CONV_STATE_LAYOUT": order})
        engine.await_connection()
        answer = engine.generate(asked)
        assert (tokens(answer), cached(answer)) == (right, NONE)
        settle(daemon, engine)
        answer = engine.generate_anew(asked)
        assert tokens(answer) == right
        assert all(cached(answer)), "with itself it shares"
        engine.kill()
