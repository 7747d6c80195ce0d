"""Tests data-parallel replicas of one engine: each is a separate scheduler, and none talks to the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sglang.conftest import StartDaemon, StartEngine
from tests.sglang.engine import ALL, TWO_RANKS, Prompts, cached, settle, stored_at, tokens
from tests.vllm.models import OTHER

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

Model = Callable[[str], Path]


def test_they_share_before_and_after_their_weights_change(
    start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts, model: Model
) -> None:
    """What one has computed with the new weights, the other loads; of the old ones neither finds anything."""
    daemon, seen = start_daemon(memory="256MiB"), []
    engine = start_engine("dense", storage=stored_at(daemon.socket), environment=TWO_RANKS, dp_size=2)
    for name in ("dense", OTHER):
        if name != "dense":
            done = engine.do("update_weights", model=str(model(name)), flush=True)
            assert done["success"], done
        computed = engine.ask(asked, routed_dp_rank=0)
        assert cached(computed) == [0] * len(asked)
        settle(daemon)
        engine.flush()
        loaded = engine.ask(asked, routed_dp_rank=1)
        assert (tokens(loaded), cached(loaded)) == (tokens(computed), ALL)
        salted = engine.ask(asked[:2], routed_dp_rank=1, cache_salt=name)
        assert (tokens(salted), cached(salted)) == (tokens(computed)[:2], [0, 0]), "as it computes by itself"
        seen.append(tokens(computed))
    assert seen[0] != seen[1]
