"""A daemon that the kernel has no memory for reports that, and what to do, before any engine counts on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffloadd.daemon import EXIT_FATAL
from kvoffloadd.testing.process import ROOT

pytestmark = pytest.mark.slow

NO_PAGES = """
from kvoffloadd.linux import sharedmem
from kvoffloadd.errors import ResourceError

def none(*_):
    raise ResourceError("none are left")

sharedmem._populate_step = none
"""


def serve(folder: Path, *prefix: str, memory: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Serves to its end."""
    command = [*prefix, sys.executable, "-m", "kvoffloadd", "serve", "--socket", str(folder / "kvo.sock")]
    return subprocess.run(
        [*command, "--memory", memory],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_address_space_that_is_not_granted(socket_dir: Path) -> None:
    """This happens with vm.overcommit_memory = 2."""
    done = serve(socket_dir, "sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", memory="4GiB")
    assert done.returncode == 2, done.stderr
    assert "vm.overcommit_memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_pages_that_do_not_come(socket_dir: Path) -> None:
    """The next copy into one would be the end of the daemon anyway, without a word."""
    (socket_dir / "sitecustomize.py").write_text(NO_PAGES)
    done = serve(socket_dir, memory="32MiB", PYTHONPATH=f"{socket_dir}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == EXIT_FATAL, done.stderr
    assert "memory.capacity_bytes: none are left" in done.stderr
