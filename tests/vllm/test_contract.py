"""Both releases of vLLM are what the adapter takes them for. The engine's kernels are those of the venv's vLLM: the
other release is its Python alone, which `scripts vllm_python` fetches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffloadd.integrations.vllm.versions import SUPPORTED
from tests.vllm.releases import run_with

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.parametrize("number", SUPPORTED)
def test_contract(number: str, model: Callable[[str], Path]) -> None:
    """`contract.py` and the others pass in a separate process."""
    names = ("contract", "contract_claims", "contract_handoff", "contract_hits", "contract_hosts")
    run_with(number, model("dense"), *(f"tests/vllm/{name}.py" for name in names), deadline_s=800)
