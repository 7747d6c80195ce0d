"""A prompt that a request wants retained outlives all others in a small daemon, and answers stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.testing.wait import until
from tests.e2e import disk
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import MULTIPROCESS, ROUTES, cached, claims, prompts, settle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

LENGTH = 229
WHOLE = LENGTH // 32 * 32
SMALL = "8MiB"
"""64 keys of 128 KiB, or of twice as many of 64 KiB; a prompt of the others has 15, or the same with windows."""

WAYS: dict[str, dict[str, Any]] = {
    "params": {"params": {"kvoffloadd.retain": {"seconds": 3600, "priority": 80, "name": "agent 7"}}},
    "hints": {
        "hints": [
            {
                "action_id": "a",
                "action_type": "kv.retain",
                "action_version": "1.0",
                "payload": {
                    "scope": "agent 7",
                    "directives": [{"start": 0, "end": LENGTH, "priority": 80, "duration": 3600.0}],
                },
            },
            {"action_id": "b", "action_type": "kv.fetch", "action_version": "1.0", "payload": {}},
        ]
    },
}


@pytest.mark.parametrize(
    ("route", "kind", "way"),
    [
        ("connector", "dense", "params"),
        ("connector", "hybrid", "hints"),
        ("spec", "dense", "hints"),
        ("spec", "hybrid", "params"),
    ],
)
def test_what_is_retained_outlives_all_others(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, route: str, kind: str, way: str
) -> None:
    """Front end, scheduler and ranks are separate processes, so the hint comes to the scheduler as users' hints do."""
    asked, other = prompts(1, 2, LENGTH)
    expected = reference(kind, [asked])
    daemon = start_daemon("memory.slab_bytes=1MiB", 'memory.policy="lru"', memory=SMALL)
    engine = start_engine(kind, connector=ROUTES[route](daemon.socket), environment=MULTIPROCESS)
    engine.await_connection()
    for _ in range(2):  # a request may come before the ranks have registered their memory
        assert tokens(engine.generate_anew([asked], **WAYS[way])) == expected
        engine.generate_anew([other])
        settle(daemon, engine)
    assert cached(engine.generate_anew([other])) == [WHOLE]
    until(lambda: any(claim.memory_keys >= WHOLE // 32 for claim in claims(daemon)), "it is claimed")
    for seed in range(2):
        engine.generate_anew(prompts(10 + seed))
        settle(daemon, engine)
    assert cached(engine.generate_anew([other])) == [0], "what nobody claims is displaced"
    found = claims(daemon)[-1]
    assert (found.priority, found.name) == (80, "agent 7" if way == "params" else "")
    assert (found.tokens, found.memory_keys >= WHOLE // 32) == (WHOLE, True)
    again = engine.generate_anew([asked])
    assert cached(again) == [WHOLE]
    assert tokens(again) == expected
    retention = daemon.status()["retention"]
    assert (retention["keys_unkept"], retention["claims_lapsed"]) == (0, 0)
    assert engine.metrics().get("vllm:kvoffloadd_ignored_hints", 0) == (2 if way == "hints" else 0)


@pytest.mark.parametrize(("kind", "way"), [("dense", "hints"), ("hybrid", "params")])
def test_on_disk_too(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, tmp_path: Path, kind: str, way: str
) -> None:
    """The disk turns over; then the daemon is killed, and its memory with it."""
    asked, other = prompts(1, 2, LENGTH)
    expected = reference(kind, [asked])
    settings = disk.disk_settings((tmp_path / "disk", 16 * disk.MIB))
    daemon = start_daemon(
        *settings, "memory.slab_bytes=1MiB", "disk.segment_bytes=2MiB", "disk.flush_s=0.5", memory=SMALL
    )
    engine = start_engine(kind, connector=ROUTES["connector"](daemon.socket))
    engine.await_connection()
    for _ in range(2):  # a request may come before the ranks have registered their memory
        engine.generate_anew([asked], **WAYS[way])
        engine.generate_anew([other])
        settle(daemon, engine)
    until(lambda: any(claim.memory_keys >= WHOLE // 32 for claim in claims(daemon)), "it is claimed")
    for seed in range(3):
        engine.generate_anew(prompts(10 + seed))
        settle(daemon, engine)
        disk.idle(daemon)
    until(lambda: daemon.status()["retention"]["saved"], "the claim is saved")
    daemon.kill()
    daemon.start()
    until(lambda: len(daemon.sessions()) == 2, "scheduler and worker are back", 60.0)
    engine.await_connection()
    assert [claim.tokens for claim in claims(daemon)][-1:] == [WHOLE]
    assert cached(engine.generate_anew([other])) == [0], "what nobody claims is gone"
    again = engine.generate_anew([asked])
    assert cached(again) == [WHOLE]
    assert tokens(again) == expected
    assert daemon.status()["disk"]["promoted"]["keys"] >= WHOLE // 32
