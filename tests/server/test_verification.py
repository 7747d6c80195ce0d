"""What `verify` does about what it finds in the books."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.scheduling.lanes import BACKGROUND, Flow, Lane
from kvoffloadd.server.session.verification import verify
from kvoffloadd.storage import hashing
from tests.cache.fakes import keys_of, make_cache, make_keyspace, store


def daemon(findings: list[list[str]], *, verify_loads: bool | str = False) -> Any:
    """Makes as much of a daemon as `verify` looks at, without keys. Its self-audit finds `findings`, step by step."""
    parts = SimpleNamespace(state=np.zeros(0, np.uint8), runs=SimpleNamespace(used=0))
    return SimpleNamespace(
        audit=lambda: iter(findings),
        cache=SimpleNamespace(entries=SimpleNamespace(parts=parts)),
        disk=None,
        jobs=SimpleNamespace(verify_loads=verify_loads),
    )


async def test_books_that_are_right_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    context = daemon([[], []])
    audit = await verify(context, payloads=True, disk=True, repair=True)
    assert (audit.findings, context.jobs.verify_loads, caplog.records) == ([], False, [])


@pytest.mark.parametrize("before", [False, "auto"])
async def test_once_the_books_are_wrong_every_load_is_verified(
    before: bool | str, caplog: pytest.LogCaptureFixture
) -> None:
    """A slot that two keys believe to be theirs holds what the checksum of one of them does not know."""
    context = daemon([[], ["memory: a slot's owner differs from its part"]], verify_loads=before)
    for _ in range(2):
        audit = await verify(context, payloads=False, disk=False, repair=False)
        assert len(audit.findings) == 1
        assert context.jobs.verify_loads is True
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]


async def test_books_that_can_not_be_read_are_wrong() -> None:
    def audit() -> Any:
        yield []
        raise IndexError("row 7")

    context = daemon([])
    context.audit = audit
    found = await verify(context, payloads=False, disk=False, repair=False)
    assert "IndexError" in found.findings[0]
    assert context.jobs.verify_loads


async def test_payloads_are_hashed_in_turns_of_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn costs what it hashes; a payload whose memory is given up meanwhile is not looked at."""
    monkeypatch.setattr(hashing, "TURN_BYTES", 4 * PAGE_BYTES)
    cache = make_cache()
    keyspace, going = (make_keyspace(cache, bytes([n]) * 16, pages=(n,))[1] for n in (3, 1))
    store(cache, keyspace, keys_of(*range(5)))
    parts = store(cache, going, keys_of(1))
    lane = Lane("hash", 1, asyncio.get_running_loop())
    costs: list[int] = []

    class Watched:
        async def perform(self, work: Callable[[], Any], *, flow: Flow, cost_bytes: int = 0) -> Any:
            assert flow is BACKGROUND
            costs.append(cost_bytes // PAGE_BYTES)
            if len(costs) == 1:
                cache.entries.retire(cache.entries.parts.row[parts])
                cache.close_namespace(going.namespace)
            return await lane.perform(work)

    context: Any = SimpleNamespace(
        audit=lambda: iter([]),
        cache=cache,
        jobs=SimpleNamespace(verify_loads=False, drop=lambda rows: None),
        hash_lane=Watched(),
    )
    audit = await verify(context, payloads=True, disk=False, repair=False)
    assert await lane.close(5.0)
    assert (audit.findings, audit.payloads) == ([], 5)
    assert costs == [6, 3, 3, 3], "whole payloads, begun before the turn was full; not the one that went"
