"""Disk tiers of the tests' own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from .disktier import Shape, Tier

Open = Callable[..., Awaitable[Tier]]


@pytest.fixture
async def open_tier(tmp_path: Path) -> AsyncIterator[Open]:
    """`await open_tier(Shape(...), demote="evict")` -> a running tier in the test's directory, audited and closed at
    the end. One after the other, each finds what the one before has left. `before`: what is done to it before it
    starts.
    """
    tiers: list[Tier] = []

    async def make(
        shape: Shape | None = None, before: Callable[[Tier], object] = lambda tier: None, **settings: Any
    ) -> Tier:
        tiers.append(Tier(tmp_path, shape, **settings))
        before(tiers[-1])
        return await tiers[-1].start()

    yield make
    findings = []
    for tier in tiers:
        tier.files.let_all_go()
        tier.files.plant("")
        findings += tier.audit()
        if not tier.is_closed:
            await tier.drop()
    assert findings == []
