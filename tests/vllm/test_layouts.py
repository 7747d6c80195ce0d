"""vLLM's own CPU kernels over memory that `kvoffloadd.layout` has allocated: all layers in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import COUNT, by_chunks, cached, prompts, settle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WORKER = "tests.vllm.layered.LayeredWorker"


@dataclass(frozen=True)
class Case:
    """Tokens of a prompt, and those of them that whole blocks hold."""

    length: int
    cached: int


CASES = {"dense": Case(501, 480), "hybrid": Case(501, 480), "linear": Case(580, 576)}


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
    for _ in range(2):
        answer = engine.generate_anew(asked)
        assert cached(answer) == [case.cached] * COUNT
        assert tokens(answer) == reference(kind, asked)
    for transfers in daemon.status()["transfers"].values():
        assert transfers["descriptors"] == transfers["keys"] > 0
