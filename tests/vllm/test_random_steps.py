"""Two engines at one daemon, whatever is asked of them in whatever order. Marked `soak` alone: it takes minutes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffloadd.integrations.vllm.versions import SUPPORTED
from tests.vllm.releases import run_with

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7300)]


@pytest.mark.parametrize("number", SUPPORTED)
def test_random_steps(number: str, model: Callable[[str], Path]) -> None:
    """`random_steps.py` passes in a separate process."""
    run_with(number, model("dense"), "tests/vllm/random_steps.py", deadline_s=7200)
