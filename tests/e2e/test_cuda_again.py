"""End-to-end tests of copies once more, by each way of copying that is not the default. What they demand is the same:
bytes, orders, parts, leases, jobs that end early.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvoffloadd.testing.process import ROOT
from tests.e2e import gpu_rank
from tests.e2e.daemons import COPIES_VARIABLE

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(gpu_rank.why_no_cuda()), reason=gpu_rank.why_no_cuda()),
]

MODULES = (
    "test_boundaries",
    "test_cancel_at_once",
    "test_cuda_order",
    "test_eviction",
    "test_parts",
    "test_ready",
    "test_smoke",
)
"""Those that say nothing of how bytes are copied, or of what the daemon maps beside a worker's memory."""
LIMIT_S = 1200


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("way", ["pitched", "kernel", "mixed"])
def test_copies_that_go_another_way(way: str) -> None:
    modules = [f"tests/e2e/{name}.py" for name in MODULES]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-k", "cuda", *modules]
    environment = {**os.environ, COPIES_VARIABLE: way}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-4000:]
