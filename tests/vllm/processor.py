"""Marks for tests that need instructions that not every processor has."""

from __future__ import annotations

from pathlib import Path

import pytest


def _needs(flag: str, name: str) -> pytest.MarkDecorator:
    flags = Path("/proc/cpuinfo").read_text("utf-8").split()
    return pytest.mark.skipif(flag not in flags, reason=f"vLLM asks for {name}, which this processor does not have")


needs_amx = _needs("amx_tile", "AMX")
needs_avx512 = _needs("avx512f", "AVX-512")
"""vLLM's kernels for fp8 caches do (`_get_attn_isa` in vllm/v1/attention/backends/cpu_attn.py)."""
