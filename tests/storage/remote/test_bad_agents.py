"""Agents that are not what they should be, or send what was not asked for: they are ended, and never believed."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from pathlib import Path

import pytest

from kvoffloadd.storage import arenafile
from kvoffloadd.storage.remote.agentprocess import LINES_BURST
from tests.storage.remote.host import FOREVER_S, FaultyEngine, names_of, start, until

ROOT = Path(__file__).parent.parent.parent.parent


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def bad_agent(folder: Path, kind: str) -> str:
    return script(folder, f"PYTHONPATH={ROOT} exec {sys.executable} -P {Path(__file__).parent / 'badagent.py'} {kind}")


BEFORE = {
    "garbage at once": "a frame of",
    "huge frame": "a frame of 4294967295 bytes",
    "answer at once": "an answer that was not expected",
    "started at once": "before its greeting",
    "other version": "the daemon's release",
    "other process": "not the process that was started",
    "closes": "closed its socket",
    "silent": "not ready within",
    "after start: never ready": "not ready within",
    "after start: refuses and stays": "not? today" + 1990 * "x" + " (fault: st?ore)",
}


@pytest.mark.parametrize("kind", BEFORE)
async def test_one_that_is_not_what_it_should_be_is_ended(engine: FaultyEngine, tmp_path: Path, kind: str) -> None:
    start_s = 1.0 if "ready" in BEFORE[kind] else FOREVER_S
    host = await start(engine, python=bad_agent(tmp_path, kind), start_s=start_s)
    await until(lambda: host.store.reason != "")
    assert BEFORE[kind] in host.store.reason
    assert not host.store.can_read()
    if not kind.startswith("after start"):
        assert bytes(host.pool._whole[arenafile._AGENT_AT : arenafile._AGENT_AT + 32]) == bytes(32)
    await host.close()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("flood", "which is not pending"),
        ("value", "which is not pending"),
        ("second greeting", "after its start"),
        ("half a frame", "closed its socket"),
    ],
)
async def test_one_that_says_what_nobody_asked_is_ended(
    engine: FaultyEngine, tmp_path: Path, kind: str, reason: str
) -> None:
    host = await start(engine, python=bad_agent(tmp_path, f"after start: {kind}"))
    await until(lambda: host.store.figures()["agent"]["ends"] >= 1)
    assert reason in host.store.reason
    await host.close()


async def test_one_that_takes_nothing_costs_no_memory_and_is_ended(engine: FaultyEngine, tmp_path: Path) -> None:
    """A lookup is as large as it can be; no more of them wait for it to read than may be with it."""
    host = await start(engine, python=bad_agent(tmp_path, "after start: stops"))
    await until(host.store.can_read)
    host.set_stuck_s(1.0)
    late_s = time.monotonic() + 0.3
    lookups = [host.loop.create_task(host.exists(names_of(4096), late_s)) for _ in range(50)]
    await asyncio.sleep(0.1)
    process = host.store._agent._process
    assert process is not None
    assert len(process._unsent) < 1 << 20
    assert [await each for each in lookups] == [None] * 50
    await until(lambda: host.store.figures()["agent"]["ends"] >= 1)
    assert "a call has taken" in host.store.reason
    await host.close()


async def test_what_it_prints_is_logged_within_bounds_and_without_names(
    engine: FaultyEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("kvoffloadd")
    propagates, logger.propagate = logger.propagate, True
    try:
        host = await start(engine, python=bad_agent(tmp_path, "prints"))
        await until(lambda: "status 3" in host.store.reason)
        await host.close()
    finally:
        logger.propagate = propagates
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("agentprocess")]
    assert 2 <= len(lines) <= 2 * LINES_BURST
    assert all(len(line) < 500 and line.isprintable() for line in lines)
    assert "kvo1/..." in lines[0]
    assert "secret" not in "".join(lines)
    dropped = sum(int(found[1]) for line in lines if (found := re.search(r"(\d+) more lines", line)))
    assert dropped > 10_000_000


async def test_a_script_that_does_not_become_python_is_refused(engine: FaultyEngine, tmp_path: Path) -> None:
    """The end of such a script would say nothing about the end of the agent."""
    host = await start(engine, python=script(tmp_path, f'PYTHONPATH={ROOT} {sys.executable} "$@"; exit 7'))
    await until(lambda: host.store.reason != "")
    assert "status 7" in host.store.reason
    assert host.store.starts == 0
    await host.close()


async def test_a_script_that_becomes_python_will_do(engine: FaultyEngine, tmp_path: Path) -> None:
    host = await start(engine, python=script(tmp_path, f'PYTHONPATH={ROOT} exec {sys.executable} "$@"'))
    await until(host.store.can_read)
    await host.close()
