"""Tests our connector with another one inside vLLM's MultiConnector: named alone, and registered by the plug-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.harness.daemon import Daemon
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import (
    ALL,
    CONNECTED,
    COUNT,
    MULTIPROCESS,
    Prompts,
    by_connector,
    cached,
    settle,
    tokens,
)
from tests.vllm.test_kills import RECOMPUTED, check_works_again

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MEMORY = "256MiB"
PREFILL = {"do_remote_decode": True}
DECODE = {"do_remote_prefill": True}


def together(daemon: Daemon, folder: Path, *, ours_first: bool = True) -> dict[str, Any]:
    """`kv_transfer_config`. `folder`: where the other one keeps what it stores."""
    ours = by_connector(daemon.socket)
    folder.mkdir(exist_ok=True)
    other = {
        "kv_connector": "SecondConnector",
        "kv_connector_module_path": "tests.vllm.second",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, other] if ours_first else [other, ours]},
    }


def test_the_front_end_gets_figures(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    tmp_path: Path,
) -> None:
    """All processes know the connector by its name: also the front end, which makes none and reads its figures."""
    daemon = start_daemon(memory=MEMORY)
    engine = start_engine("dense", connector=together(daemon, tmp_path / "other"), environment=MULTIPROCESS)
    expected = reference("dense", asked)
    assert tokens(engine.generate(asked)) == expected
    settle(daemon, engine)
    answer = engine.generate_anew(asked)
    assert cached(answer) == ALL
    assert tokens(answer) == expected
    found = engine.metrics()
    assert found[CONNECTED] == 1
    assert found["vllm:kvoffloadd_hit_keys"] >= COUNT * 15
    assert daemon.status()["transfers"]["load"]["keys"] >= COUNT * 15


@pytest.mark.parametrize("ours_first", [True, False])
def test_aborts_and_a_killed_daemon(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    tmp_path: Path,
    ours_first: bool,
) -> None:
    """Where the other one is asked first, it loads, and what we have pinned for nothing is released."""
    daemon = start_daemon(memory=MEMORY)
    engine = start_engine("dense", connector=together(daemon, tmp_path / "other", ours_first=ours_first))
    expected = reference("dense", asked)
    assert tokens(engine.generate(asked)) == expected
    settle(daemon, engine)
    for after_steps in (1, 2, 4):
        engine.reset(connector=False)
        ended = engine.abort(asked, after_steps)
        assert all(one.tokens == right for one, right in zip(ended, expected, strict=True) if one.reason == "length")
    answer = engine.generate_anew(asked)
    assert cached(answer) == ALL
    assert tokens(answer) == expected
    loaded = daemon.status()["transfers"]["load"]["jobs"]
    assert (loaded > 0) is ours_first
    engine.reset(connector=False)
    settle(daemon, engine)
    assert daemon.status()["leases"]["read"] == 0
    if ours_first:
        engine.kill_before_load(daemon.pid)
        assert tokens(engine.generate(asked)) == expected
        assert daemon.wait() < 0
        assert engine.metrics()[RECOMPUTED] > 0
    daemon.kill()
    assert tokens(engine.generate_anew(asked)) == expected
    if ours_first:
        other = [prompt[::-1] for prompt in asked]  # which the other one does not have either
        check_works_again(daemon, engine, other, reference("dense", other))


def test_the_other_connector_hands_prompts_over(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, tmp_path: Path
) -> None:
    """The words are vLLM's, and it allows one connector alone to answer with them. We have whole chunks."""
    daemon = start_daemon(memory=MEMORY)
    prefill, decode = (
        start_engine("dense", connector=together(daemon, tmp_path / name)) for name in ("prefill", "decode")
    )
    prefill.generate(asked, max_tokens=1, params=PREFILL)
    settle(daemon, prefill)
    answer = decode.generate(asked, params=DECODE)
    assert cached(answer) == ALL
    assert tokens(answer) == reference("dense", asked)
    assert daemon.status()["transfers"]["load"]["not_done"] == 0
