"""Answers depend on what was loaded, on all ranks alike; and SGLang's own faults leave them as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffloadd.testing.wait import until
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, SESSIONS, TWO_RANKS, Prompts, cached, settle, stored_at, tokens
from tests.vllm.models import OTHER

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


def test_zeros_change_every_answer(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    daemon = start_daemon(memory="256MiB")
    zeroing = {"module_path": "tests.sglang.zeroing", "class_name": "ZeroingStorage"}
    engine = start_engine("dense", storage=stored_at(daemon.socket, **zeroing))
    expected = reference("dense", asked)
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert cached(found) == ALL
    assert all(one != other for one, other in zip(tokens(found), expected, strict=True))


def test_two_ranks(
    start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts, model: Callable[[str], Path]
) -> None:
    daemon = start_daemon(memory="256MiB")
    engine = start_engine("dense", storage=stored_at(daemon.socket), environment=TWO_RANKS, tp_size=2)
    expected = tokens(engine.generate(asked))
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)
    daemon.kill()
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, [0] * len(asked))
    daemon.start()
    until(lambda: len(daemon.sessions()) == 2 * SESSIONS, "all lines are up again", 60.0)
    assert engine.do("update_weights", model=str(model(OTHER)), flush=True)["success"]
    found = engine.generate(asked)
    changed = tokens(found)
    assert cached(found) == [0] * len(asked)
    assert all(one != other for one, other in zip(changed, expected, strict=True))
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (changed, ALL), "ranks have given the new weights' pages one name"


def test_faults_that_sglang_injects(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    daemon = start_daemon(memory="256MiB")
    faults = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.2",
    }
    engine = start_engine("dense", storage=stored_at(daemon.socket), environment=faults)
    expected = reference("dense", asked)
    from_storage = 0
    for _ in range(4):
        found = engine.generate(asked, together=True)
        assert tokens(found) == expected
        from_storage += sum(cached(found))
        settle(daemon)
        engine.flush()
    assert from_storage > 0
