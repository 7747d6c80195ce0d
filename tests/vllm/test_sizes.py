"""Engines of one rank and of two share what they store: vLLM's canonical layout names the head of each byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import ALL, COUNT, TWO_RANKS, Prompts, by_connector, cached, prompts, settle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

MEMORY = "256MiB"


@pytest.mark.parametrize("kind", ["dense", "hybrid", "one-head"])
def test_two_sizes_share(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, kind: str
) -> None:
    """What two ranks store one loads, and the other way round. Of one head both ranks have a replica."""
    daemon = start_daemon(memory=MEMORY)
    connector = by_connector(daemon.socket, canonical_layout=True)
    two = start_engine(kind, connector=connector, environment=TWO_RANKS, tensor_parallel_size=2)
    one = start_engine(kind, connector=connector)
    for engine in (two, one):
        engine.await_connection()  # what is asked for before that is neither looked up nor stored
    for storing, loading, wanted in ((two, one, asked), (one, two, prompts(3, COUNT))):
        answer = storing.generate(wanted)
        assert cached(answer) == [0] * COUNT
        assert tokens(answer) == reference(kind, wanted)
        settle(daemon, storing)
        answer = loading.generate(wanted)
        assert cached(answer) == ALL
        assert tokens(answer) == reference(kind, wanted)


@pytest.mark.parametrize("other", [{"canonical_layout": True, "canonical_parts": 1}, {}], ids=["parts", "no option"])
def test_other_parts_share_nothing(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, other: dict[str, Any]
) -> None:
    """This also holds for engines of one size."""
    daemon = start_daemon(memory=MEMORY)
    for extra in ({"canonical_layout": True}, other):
        engine = start_engine("dense", connector=by_connector(daemon.socket, **extra))
        engine.await_connection()
        assert cached(engine.generate(asked)) == [0] * COUNT
        settle(daemon, engine)
        answer = engine.generate_anew(asked)
        assert cached(answer) == ALL
        assert tokens(answer) == reference("dense", asked)
        engine.close()
