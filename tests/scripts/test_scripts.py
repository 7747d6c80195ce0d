"""`python -m scripts`: every script by its name, from any directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffloadd.testing.process import ROOT
from kvoffloadd.testing.wait import HANG_S
from scripts.__main__ import MODULES, summary


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=HANG_S)


def test_all_are_listed() -> None:
    done = run()
    listed = dict(re.findall(r"^  (\w+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert done.returncode == 0
    assert listed == {name: summary(name) for name in MODULES}


def test_an_unknown_name(tmp_path: Path) -> None:
    done = run("stres", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "stress_holes" in done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_each_has_a_main(name: str) -> None:
    """Not imported: some need the packages of an engine."""
    assert "def main() -> int:" in (ROOT / "scripts" / f"{MODULES[name].replace('.', '/')}.py").read_text()
    assert summary(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stress", "vllm_smoke", "sglang_smoke"])
def test_one_runs_from_any_directory(tmp_path: Path, name: str) -> None:
    """It is what its usage names; the package need not be installed, and other packages are not hidden by ours."""
    done = run(name, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: scripts {name} ")


def test_a_reader_that_has_seen_enough() -> None:
    child = subprocess.Popen([sys.executable, str(ROOT / "scripts")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.close()  # before it has written anything, or after
    _, errors = child.communicate(timeout=HANG_S)
    assert (child.returncode, errors) == (0, b"")
