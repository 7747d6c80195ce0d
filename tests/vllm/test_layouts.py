"""vLLM's own CPU kernels over memory that `kvoffloadd.layout` has allocated: layers that share tensors and pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from scripts.harness.daemon import Daemon
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import COUNT, Prompts, VllmEngine, by_chunks, cached, prompts, settle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WORKER = "tests.vllm.layered.LayeredWorker"


@dataclass(frozen=True)
class PromptCase:
    """Tokens of a prompt, and those of them that whole blocks hold."""

    length: int
    cached: int


CASES = {"dense": PromptCase(501, 480), "hybrid": PromptCase(501, 480), "linear": PromptCase(580, 576)}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("dense", "BLHNC"), ("dense", "BHLNC"), ("hybrid", "BLHNC"), ("hybrid", "BHLNC"), ("linear", "BLHNC")],
)
def test_all_layers_in_one_tensor(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, kind: str, layout: str
) -> None:
    """A key is one descriptor, whatever the number of layers; answers are those of an engine with a tensor a layer."""
    case = CASES[kind]
    asked = prompts(2, COUNT, case.length)
    daemon = start_daemon(memory="256MiB")
    engine = start_engine(
        kind,
        connector=by_chunks(daemon.socket, 1),
        environment={"VLLM_KV_CACHE_LAYOUT": layout},
        worker_cls=WORKER,
    )
    transfers = _transfers_of_right_answers(daemon, engine, asked, reference(kind, asked), case.cached)
    for moved in transfers.values():
        assert moved["descriptors"] == moved["keys"] > 0


@pytest.mark.parametrize(("pack", "block"), [(1, 160), (2, 96), (4, 64)])
def test_attention_layers_packed_on_pages_of_states(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, pack: int, block: int
) -> None:
    """Four attention layers and four states, in packs of one, two and four: a block is as short as the pack allows,
    a key of attention is a descriptor for each pack, and one of states for each state. Answers are those of such an
    engine without daemon.
    """
    asked = prompts(2, COUNT, 501)
    daemon = start_daemon(memory="256MiB")
    layout: dict[str, Any] = {
        "environment": {"VLLM_KV_CACHE_LAYOUT": "BLHNC", "KVOFFLOADD_TEST_PACK": str(pack)},
        "worker_cls": "tests.vllm.layered.PackedWorker",
    }
    engine = start_engine("packs", connector=by_chunks(daemon.socket, 1), **layout)
    right = reference("packs", asked, **layout)
    transfers = _transfers_of_right_answers(daemon, engine, asked, right, 500 // block * block)
    for moved in transfers.values():
        assert moved["descriptors"] == moved["keys"] * (4 // pack) > 0


def _transfers_of_right_answers(
    daemon: Daemon, engine: VllmEngine, asked: Prompts, right: list[list[int]], hit: int
) -> dict[str, dict[str, int]]:
    """The daemon's counts, by direction, after prompts that were computed, then loaded twice."""
    answer = engine.generate(asked)
    assert cached(answer) == [0] * COUNT
    assert tokens(answer) == right
    settle(daemon, engine)
    for _ in range(2):
        answer = engine.generate_anew(asked)
        assert cached(answer) == [hit] * COUNT
        assert tokens(answer) == right
    transfers: dict[str, dict[str, int]] = daemon.status()["transfers"]
    return transfers
