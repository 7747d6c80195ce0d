"""Finding out how small rows are best copied takes for ever: workers register all the same, and the daemon ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.harness.daemon import Daemon
from tests.e2e import gpu_rank
from tests.e2e.small_rows import roundtrip
from tests.e2e.test_cuda_kernel import KERNEL, ODD

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]

NEVER_IMPORTED = "import time\nwhile True:\n    time.sleep(3600)\n"


def test_a_package_that_is_never_imported(
    start_daemon: Start, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a file server that is gone. A client waits 10 s for an answer, as vLLM's ranks do."""
    gpu_rank.needs_soft("a package in CuPy's place")
    package = tmp_path / "packages" / "cupy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(NEVER_IMPORTED, encoding="ascii")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    daemon = start_daemon(*KERNEL, driver={"faults": ""})
    roundtrip(daemon, ODD, seed)
    assert daemon.says("one by one for now")
    assert daemon.stop() == 0
    assert "copies do not end" not in daemon.log()
