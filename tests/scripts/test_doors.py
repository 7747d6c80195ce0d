"""The files beside the packages in scripts/: each opens its package, from any directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffloadd.trial.process import ROOT

NO_DOORS = ("__init__.py", "metric_tables.py", "protocol_tables.py")
DOORS = sorted(path for path in (ROOT / "scripts").glob("*.py") if path.name not in NO_DOORS)
DOOR = '''"""`python -m {run}`, by path and from any directory."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from {module} import main

if __name__ == "__main__":
    sys.exit(main())
'''


@pytest.mark.parametrize("door", DOORS, ids=lambda door: str(door.name))
def test_a_door_does_nothing_but_open(door: Path) -> None:
    text = door.read_text(encoding="utf-8")
    (module,) = re.findall(r"^from (scripts\S+) import main$", text, re.MULTILINE)
    assert text == DOOR.format(module=module, run=module.removesuffix(".__main__"))
    assert "def main() -> int:" in (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_door_opens_from_any_directory(tmp_path: Path) -> None:
    """It is what its usage names; the package need not be installed, and other packages are not hidden by ours."""
    for door in ("stress.py", "vllm_smoke.py", "sglang_smoke.py"):
        command = [sys.executable, str(ROOT / "scripts" / door), "--help"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=50)
        assert done.stdout.startswith(f"usage: {door} ")
