"""vLLM's own CPU kernels over memory that `kvoffloadd.layout` has allocated: all layers in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from scripts.harness.wait import until
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import COUNT, by_chunks, cached, prompts, settle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WORKER = "tests.vllm.layered.LayeredWorker"


@dataclass(frozen=True)
class Case:
    """Tokens of a prompt, those of them that whole blocks hold, and its keys, at least."""

    length: int
    cached: int
    keys: int


CASES = {
    "dense": Case(501, 480, 15),
    "hybrid": Case(501, 480, 15 + 2 * 4),  # of two groups a window alone
    "linear": Case(580, 576, 6 + 1),
}


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
    answer = engine.generate(asked)
    assert cached(answer) == [0] * COUNT
    assert tokens(answer) == reference(kind, asked)
    settle(daemon, engine)
    until(lambda: daemon.status()["transfers"]["store"]["keys"] >= COUNT * case.keys, "all keys are stored", 60.0)
    for _ in range(2):
        answer = engine.generate_anew(asked)
        assert cached(answer) == [case.cached] * COUNT
        assert tokens(answer) == reference(kind, asked)
    for transfers in daemon.status()["transfers"].values():
        assert transfers["descriptors"] == transfers["keys"] > 0
