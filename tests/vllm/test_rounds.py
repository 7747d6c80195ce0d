"""More prompts than the engine's own cache can keep, three times: what it can't, comes from the daemon."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemons import make_daemon
from tests.vllm import zeroing
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import (
    ALL,
    COUNT,
    MULTIPROCESS,
    ROUTES,
    TWO_RANKS,
    Prompts,
    by_chunks,
    by_connector,
    by_spec,
    cached,
    prompts,
    settle,
    tokens,
)  # fmt: skip
from tests.vllm.processor import needs_amx, needs_avx512

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


MEMORY = "256MiB"


def served(chunk: int) -> int:
    """Tokens of a prompt of 501 that whole chunks hold."""
    return 501 // chunk * chunk


@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["dense", "hybrid", "mla"])
def test_three_rounds(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    kind: str,
    route: str,
    chunk: int,
) -> None:
    """Rounds 2 and 3 compute what is left of a chunk, and answer as ever."""
    daemon = start_daemon(memory=MEMORY)
    engine = start_engine(kind, connector=ROUTES[route](daemon.socket, chunk, without_prefix_caching=kind == "mla"))
    engine.await_connection()
    for hit in (0, served(chunk), served(chunk)):
        answer = engine.generate_anew(asked)
        assert cached(answer) == [hit] * COUNT
        assert tokens(answer) == reference(kind, asked)
        settle(daemon, engine)


@needs_amx
@pytest.mark.parametrize("route", ROUTES)
def test_three_rounds_of_mla_with_amx(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, route: str
) -> None:
    """These kernels are separate ones, with another size of blocks."""
    options = {"dtype": "bfloat16", "attention_backend": "AMX_MLA", "num_gpu_blocks_override": 80}
    daemon = start_daemon(memory=MEMORY)
    engine = start_engine("mla", connector=ROUTES[route](daemon.socket, 32), **options)
    engine.await_connection()
    for hit in (0, served(32), served(32)):
        answer = engine.generate_anew(asked)
        assert cached(answer) == [hit] * COUNT
        assert tokens(answer) == reference("mla", asked, **options)
        settle(daemon, engine)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("kind", "block_tokens"), [("linear", 96), ("conv", 32)])
def test_states(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    kind: str,
    block_tokens: int,
    blocks: int,
) -> None:
    """vLLM keeps the state at the last full block of a prompt; a key is one block of it, whatever is asked for."""
    whole = 576 // block_tokens * block_tokens
    asked = prompts(2, COUNT, whole + 4)
    daemon = start_daemon(memory=MEMORY)
    engine = start_engine(kind, connector=by_chunks(daemon.socket, blocks))
    engine.await_connection()
    assert tokens(engine.generate_anew(asked)) == reference(kind, asked)
    settle(daemon, engine)
    for _ in range(2):
        answer = engine.generate_anew(asked)
        assert cached(answer) == [whole] * COUNT
        assert tokens(answer) == reference(kind, asked)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_state_at_any_block_hits(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    tmp_path: Path,
    blocks: int,
) -> None:
    """The last full block of 501 tokens is the 15th, where no chunk of two ends: chunks of several blocks are ignored
    for models with states, and the log warns of that.
    """
    daemon = start_daemon(memory=MEMORY)
    engine = start_engine("conv", connector=by_chunks(daemon.socket, blocks))
    engine.await_connection()
    for hit in (0, 480):
        answer = engine.generate_anew(asked)
        assert cached(answer) == [hit] * COUNT
        assert tokens(answer) == reference("conv", asked)
        settle(daemon, engine)
    log = (tmp_path / "engine-0.log").read_text(encoding="utf-8", errors="replace")
    assert log.count("a key is one block") == (blocks > 1)


def test_long_chunks_of_states_by_vllms_own_connector_are_warned_of(
    start_daemon: StartDaemon, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Prompts whose last full block ends a chunk: nothing hits all the same, as the log warns at the start."""
    daemon = start_daemon(memory=MEMORY)
    config = by_spec(daemon.socket, blocks_per_chunk=2)
    del config["kv_connector_extra_config"]["block_size"]
    engine = start_engine("conv", connector=config)
    asked = prompts(2, COUNT, 576 + 4)
    for _ in range(2):
        assert cached(engine.generate_anew(asked)) == [0] * COUNT
    log = (tmp_path / "engine-0.log").read_text(encoding="utf-8", errors="replace")
    assert log.count("Leave blocks_per_chunk at 1 (it is 2), or block_size at one block") == 1


@needs_avx512
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    kind: str,
    dtype: str,
) -> None:
    """A quantised KV cache: half the bytes, the same hits."""
    daemon = start_daemon(memory=MEMORY)
    engine = start_engine(kind, connector=by_connector(daemon.socket), kv_cache_dtype=dtype)
    engine.await_connection()
    for hit in (0, 480):
        answer = engine.generate_anew(asked)
        assert cached(answer) == [hit] * COUNT
        assert tokens(answer) == reference(kind, asked, kv_cache_dtype=dtype)
        settle(daemon, engine)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("environment", "options"),
    [
        pytest.param(MULTIPROCESS, {}, id="multiprocess"),
        pytest.param(TWO_RANKS, {"tensor_parallel_size": 2}, id="tp2"),
    ],
)
def test_other_processes(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    route: str,
    environment: dict[str, str],
    options: dict[str, Any],
) -> None:
    """Scheduler and ranks are separate processes. Two ranks add up in another order, so they are compared with
    themselves: with what they computed before anything was loaded.
    """
    daemon = start_daemon(memory=MEMORY)
    engine = start_engine("dense", connector=ROUTES[route](daemon.socket), environment=environment, **options)
    engine.await_connection()
    computed = engine.generate(asked)
    assert cached(computed) == [0] * COUNT
    if not options:
        assert tokens(computed) == reference("dense", asked)
    settle(daemon, engine)
    for _ in range(2):
        answer = engine.generate_anew(asked)
        assert cached(answer) == ALL
        assert tokens(answer) == tokens(computed)


@pytest.mark.parametrize("kind", ["dense", "hybrid", "mla"])
def test_corrupted_loads_are_seen(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, kind: str
) -> None:
    """The negative control: when what is loaded is wrong, the comparison finds it."""
    folder = Path(tempfile.mkdtemp(prefix="kvo-", dir="/tmp"))
    # One flipped bit would change no model's answer.
    daemon = make_daemon(folder, memory=MEMORY, faults="corrupt_every=1", program=("-m", zeroing.__name__))
    try:
        engine = start_engine(kind, connector=by_spec(daemon.socket))
        assert tokens(engine.generate(asked)) == reference(kind, asked)
        settle(daemon, engine)
        answer = engine.generate_anew(asked)
        assert cached(answer) == ALL
        assert tokens(answer) != reference(kind, asked)
        engine.close()
        daemon.audit()
    finally:
        daemon.destroy()
