"""Fixtures of the adapter's tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.integrations.sglang import fakesglang


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Imports as much of SGLang as the adapter needs: see `fakesglang.imported`."""
    with fakesglang.imported(monkeypatch) as found:
        yield found
