"""Hosts that share a store."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.storage.remote import agent as agent_module
from tests.storage.remote.host import FaultyEngine, StoreHost

Open = Callable[..., Awaitable[StoreHost]]


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "BACKOFF_S_MIN", 0.05)


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """No child, no descriptor."""
    with suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()  # it keeps a pipe for the life of the process
    before = len(os.listdir("/proc/self/fd"))
    others = set(children())  # of tests that ran before in this process
    yield
    assert set(children()) <= others
    assert len(os.listdir("/proc/self/fd")) <= before


def children() -> list[int]:
    """Returns the children of this process, zombies included."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += map(int, (task / "children").read_text().split())
    return found


@pytest.fixture
def engine(tmp_path: Path) -> FaultyEngine:
    return FaultyEngine(tmp_path)


@pytest.fixture
async def open_host(engine: FaultyEngine) -> AsyncIterator[Open]:
    """`await open_host(stuck_s=...)` -> a host whose agent is ready. Audited and closed at the end."""
    hosts: list[StoreHost] = []

    async def make(**settings: Any) -> StoreHost:
        hosts.append(StoreHost(engine, **settings))
        return await hosts[-1].start()

    yield make
    for host in hosts:
        await host.close()
