"""A prompt that a request wants retained outlives all others in a small daemon, and answers stay the same."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e import disk
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import PAGE, SEATS, SglangEngine, settle, tokens
from tests.vllm.engine import claims, prompts

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

LENGTH = 5 * PAGE + 30
WHOLE = 5 * PAGE
SMALL = "8MiB"
"""32 pages of 256 KiB, of which claims may keep 8; each prompt has 5."""
ROUNDS = 10
"""Prompts that nobody wants retained: 50 pages."""

HINTS: dict[str, Any] = {
    "protocol_version": "0.1",
    "message_id": "m",
    "actions": [
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
    ],
}
NAMED: dict[str, Any] = {
    **HINTS,
    "actions": [
        {
            "action_id": "a",
            "action_type": "kvoffloadd.retain",
            "action_version": "1.0",
            "payload": {"seconds": 3600, "priority": 80, "name": "agent 7"},
        }
    ],
}


def claimed(daemon: Daemon, name: str) -> None:
    """Waits until the prompt is claimed, and in memory."""
    until(lambda: [(one.name, one.memory_keys) for one in claims(daemon)] == [(name, WHOLE // PAGE)], "it is claimed")
    (found,) = claims(daemon)
    assert (found.priority, found.tokens, found.keys) == (80, WHOLE, WHOLE // PAGE)


def others(engine: SglangEngine, daemon: Daemon) -> None:
    """Has all others displaced, in SGLang, too."""
    for seed in range(ROUNDS):
        engine.generate(prompts(10 + seed, 1, LENGTH))
        settle(daemon)
    engine.flush()


@pytest.mark.parametrize(("seat", "hints", "name"), [("storage", HINTS, ""), ("linker", NAMED, "agent 7")])
def test_what_is_retained_outlives_all_others(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    seat: str,
    hints: dict[str, Any],
    name: str,
) -> None:
    """The request has what a body of `/generate` would have; front end and scheduler are separate processes."""
    asked, other = prompts(1, 2, LENGTH)
    expected = reference("dense", [asked])
    daemon = start_daemon("memory.slab_bytes=1MiB", 'memory.policy="lru"', memory=SMALL)
    engine = start_engine("dense", **SEATS[seat].options(daemon.socket))
    found = SEATS[seat].found
    assert tokens(engine.ask([asked], kv_hints=hints)) == expected
    engine.generate([other])
    settle(daemon)
    claimed(daemon, name)
    others(engine, daemon)
    assert found(engine.generate([other])) == [0], "what nobody claims is displaced"
    engine.flush()
    again = engine.generate([asked])
    assert found(again) == [WHOLE]
    assert tokens(again) == expected
    retention = daemon.status()["retention"]
    assert (retention["keys_unkept"], retention["claims_lapsed"]) == (0, 0)


def test_on_disk_too(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, tmp_path: Path
) -> None:
    """The disk turns over; then the daemon is killed, and its memory with it."""
    asked, other = prompts(1, 2, LENGTH)
    expected = reference("dense", [asked])
    settings = (*disk.disk_settings((tmp_path / "disk", 16 * disk.MIB)), "disk.segment_bytes=2MiB", "disk.flush_s=0.5")
    daemon = start_daemon(*settings, "memory.slab_bytes=1MiB", memory=SMALL)
    engine = start_engine("dense", **SEATS["storage"].options(daemon.socket))
    engine.ask([asked], kv_hints=HINTS)
    engine.generate([other])
    settle(daemon)
    claimed(daemon, "")
    for seed in range(3):
        for number, prompt in enumerate(prompts(100 + seed, ROUNDS, LENGTH)):
            engine.generate([prompt])
            if number % 2:
                settle(daemon)
                disk.idle(daemon)
    engine.flush()
    until(lambda: daemon.status()["retention"]["saved"], "the claim is saved")
    daemon.signal(signal.SIGKILL)
    daemon.start()
    engine.generate(prompts(7, 1, LENGTH))
    until(lambda: len(daemon.sessions()) == 3, "all lines are up again")
    engine.flush()
    assert [claim.tokens for claim in claims(daemon)] == [WHOLE]
    assert SEATS["storage"].found(engine.generate([other])) == [0], "what nobody claims is gone"
    engine.flush()
    again = engine.generate([asked])
    assert SEATS["storage"].found(again) == [WHOLE]
    assert tokens(again) == expected
    assert daemon.status()["disk"]["promoted"]["keys"] >= WHOLE // PAGE
