"""Pairs of engines, as far as SGLang's arguments go: those that differ in nothing that counts have one identity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.enginechild import ROOT
from tests.sglang.engine import ENVIRONMENT, OPTIONS, linked_to, stored_at

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

SOCKET = Path("/run/nobody.sock")

ALIKE: list[dict[str, Any]] = [
    {"random_seed": 7, "mem_fraction_static": 0.3},
    {"chunked_prefill_size": 256, "max_running_requests": 3},
    {"max_total_tokens": 4096, "schedule_policy": "lpm", "radix_eviction_policy": "lfu"},
    {"host": "0.0.0.0", "port": 31000, "served_model_name": "another", "enable_metrics": True, "log_level": "error"},
    {"hicache_ratio": 2.0, "hicache_host_memory_mode": "cache", "hicache_storage_prefetch_policy": "best_effort"},
    stored_at(SOCKET, fingerprint="contents", timeout_s=3.0),
    linked_to(SOCKET),
]
"""Each with the options of all engines."""

UNLIKE: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16"},
    {"context_length": 512},
    {"json_model_override_args": json.dumps({"rope_theta": 20000.0})},
    {"page_size": 32},
    {"trust_remote_code": True},
    {"load_format": "dummy"},
    {"tp_size": 2},
    {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]},
    {"model_impl": "transformers"},
    {"quantization_param_path": "/not/there.json"},
    {"attention_backend": "triton"},
]


def identities(model: Path, sets: list[dict[str, Any]]) -> list[str]:
    """Returns identities from one process: resolving is all that differs."""
    given = [{"model_path": str(model), **OPTIONS, **one} for one in sets]
    child = subprocess.run(
        [sys.executable, "-m", "tests.sglang.resolving"],
        input=json.dumps(given),
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    found: list[str] = json.loads(child.stdout.splitlines()[-1])
    return found


def test_pairs(model: Callable[[str], Path]) -> None:
    found = identities(model("dense"), [*UNLIKE, *ALIKE])
    unlike, alike = found[: len(UNLIKE)], found[len(UNLIKE) :]
    assert len(set(unlike)) == len(UNLIKE)
    assert alike == [unlike[0]] * len(ALIKE)
    assert identities(model("dense"), [{}]) == [unlike[0]], "another process"
