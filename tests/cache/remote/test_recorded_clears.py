"""Clears that the store takes of some namespaces, and not of others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvoffloadd.agentwire.frames import Code
from kvoffloadd.agentwire.names import pointer_name
from kvoffloadd.cache.clearing import REMOTE, Clearings
from kvoffloadd.storage.remote.values import NotRead
from kvoffloadd.testing.wait import HANG_S

from .test_fetching import NAME, RemoteScene

LATER = b"z" * 16
"""A namespace behind NAME, whose pointer can't be read."""


@pytest.mark.parametrize("unreadable", [NAME, LATER])
async def test_a_namespace_that_fails_delays_no_other(unreadable: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is cleared. The failing namespace is repeated by the tier, with the same epoch."""
    scene = await RemoteScene().start()
    try:
        scene.cache.open_namespace(LATER, 0, "test", 32)
        eras = scene.remote.eras
        async with asyncio.timeout(HANG_S):
            await eras.changes.wait_for(lambda: eras.of(NAME) is not None and eras.of(LATER) is not None)
        read_values, failing = scene.store.read_values, {pointer_name(unreadable)}

        async def read_some(names: Sequence[str], until_s: float) -> list[bytes | NotRead | None]:
            values = await read_values(names, until_s)
            return [
                NotRead(Code.FAILED) if name in failing else value for name, value in zip(names, values, strict=True)
            ]

        monkeypatch.setattr(scene.store, "read_values", read_some)
        clearings = Clearings(scene.cache, None, scene.remote, scene._spawn)
        clearing = clearings.begin(None)
        epoch = scene.cache.epochs.last
        assert clearings.unrecorded(clearing) == [REMOTE]
        async with asyncio.timeout(HANG_S):
            await clearing.tried
        assert clearings.unrecorded(clearing) == [REMOTE]
        assert [known.fingerprint for known in clearing.eras] == [unreadable]
        assert clearings.figures() == {"unrecorded": 1, "places": [REMOTE]}
        failing.clear()
        await clearings.wait_recorded(clearing, 60.0)
        assert clearings.unrecorded(clearing) == []
        assert clearings.figures() == {"unrecorded": 0, "places": []}
        assert {scene.cache.epochs.of(name) for name in (NAME, LATER)} == {epoch}, "nothing was cleared anew"
    finally:
        await scene.close()


async def test_a_clear_makes_the_one_before_obsolete() -> None:
    """They are counted once for each namespace, and once for everything."""
    scene = await RemoteScene().start()
    try:
        clearings = Clearings(scene.cache, None, scene.remote, scene._spawn)
        counts = []
        for names in ([NAME], [NAME], [LATER], None, None, [NAME]):
            clearings.begin(None if names is None else frozenset(names))
            counts.append(clearings.figures()["unrecorded"])
        assert counts == [1, 1, 2, 1, 1, 2]
        await clearings.close(60.0)
    finally:
        await scene.close()
