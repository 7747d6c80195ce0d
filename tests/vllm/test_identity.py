"""Real engines: who shares with whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffloadd.integrations.vllm.versions import SUPPORTED
from tests.vllm.releases import run_with

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.parametrize("number", SUPPORTED)
def test_identity_of_each_release(number: str, model: Callable[[str], Path]) -> None:
    """`contract_identity.py`, in a process of its own."""
    run_with(number, model("dense"), "tests/vllm/contract_identity.py", deadline_s=800)
