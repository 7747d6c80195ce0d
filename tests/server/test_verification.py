"""What `verify` does about what it finds in the books."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.server.verification import verify


def daemon(findings: list[list[str]], *, verify_loads: bool = False) -> Any:
    """As much of a daemon as `verify` looks at, without keys. Its self-audit finds `findings`, step by step."""
    parts = SimpleNamespace(state=np.zeros(0, np.uint8), runs=SimpleNamespace(used=0))
    return SimpleNamespace(
        audit=lambda: iter(findings),
        cache=SimpleNamespace(entries=SimpleNamespace(parts=parts), disk=None),
        transfers=SimpleNamespace(verify_loads=verify_loads),
    )


async def test_books_that_are_right_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    context = daemon([[], []])
    audit = await verify(context, payloads=True, disk=True, repair=True)
    assert (audit.findings, context.transfers.verify_loads, caplog.records) == ([], False, [])


async def test_once_the_books_are_wrong_every_load_is_verified(caplog: pytest.LogCaptureFixture) -> None:
    """A slot that two keys believe to be theirs holds what the checksum of one of them does not know."""
    context = daemon([[], ["memory: a slot's owner differs from its part"]])
    for _ in range(2):
        audit = await verify(context, payloads=False, disk=False, repair=False)
        assert len(audit.findings) == 1
        assert context.transfers.verify_loads
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]


async def test_books_that_can_not_be_read_are_wrong() -> None:
    def audit() -> Any:
        yield []
        raise IndexError("row 7")

    context = daemon([])
    context.audit = audit
    found = await verify(context, payloads=False, disk=False, repair=False)
    assert "IndexError" in found.findings[0]
    assert context.transfers.verify_loads
