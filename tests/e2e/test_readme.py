"""What the README shows works as shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from scripts.harness.daemon import Daemon

README = (Path(__file__).parent.parent.parent / "README.md").read_text()


def test_the_worker_snippet_runs(standing: Callable[..., Daemon]) -> None:
    daemon = standing()
    code = README.split("```python\n")[1].split("```")[0]
    assert "Client(namespace=" in code
    names: dict[str, object] = {}
    code = code.replace("Client(", f"Client({str(daemon.socket)!r}, ").replace(
        "group = Group(", "tensor.array[:] = content\ngroup = Group("
    )
    content = np.random.default_rng(0).integers(0, 255, (1000, 32768), dtype=np.uint8)
    exec(compile(code, "README.md", "exec"), {"content": content}, names)  # the document's own words
    tensor = names["tensor"].array  # type: ignore[attr-defined]
    assert (tensor[20:24] == content[10:14]).all()
    assert names["found"].boundaries.tolist() == [64, 48, 32, 16]  # type: ignore[attr-defined]
