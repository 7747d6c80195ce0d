"""Builds the image of the Containerfile with buildah, and starts its daemon; skipped where there is no buildah.

KVOFFLOADD_IMAGE_BASE names another base, such as a local copy where no registry can be reached.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvoffloadd
from kvoffloadd.testing.wait import HANG_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[1]
(DEFAULT_BASE,) = re.findall(r"^ARG BASE=(.+)$", (ROOT / "Containerfile").read_text(encoding="utf-8"), re.MULTILINE)
BASE = os.environ.get("KVOFFLOADD_IMAGE_BASE", DEFAULT_BASE)
BUILD_S, COMMAND_S = 20 * HANG_S, 2 * HANG_S


def buildah(*words: str, limit_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["buildah", *words], capture_output=True, text=True, check=False, timeout=limit_s)


def must(*words: str, limit_s: float = COMMAND_S) -> str:
    """Returns standard output. Raises AssertionError if the command fails."""
    done = buildah(*words, limit_s=limit_s)
    assert done.returncode == 0, f"buildah {words[0]}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def container() -> Iterator[str]:
    """A container of the image."""
    if shutil.which("buildah") is None:
        pytest.skip("needs buildah (apt-get install buildah)")
    pulled = buildah("pull", "--policy", "missing", BASE, limit_s=BUILD_S)
    if pulled.returncode:
        pytest.skip(f"{BASE} can't be had: {pulled.stderr.strip()[-300:]}")
    name = f"kvoffloadd-test-{os.getpid()}"
    must("build", "--build-arg", f"BASE={BASE}", "--tag", f"localhost/{name}", str(ROOT), limit_s=BUILD_S)
    try:
        must("from", "--name", name, f"localhost/{name}")
        yield name
    finally:
        buildah("rm", name)
        buildah("rmi", f"localhost/{name}")


def test_the_images_daemon_serves(container: str, tmp_path: Path) -> None:
    """It is started with the image's own command, by its own user."""
    shown = json.loads(must("inspect", "--type", "container", container))["OCIv1"]["config"]
    command = [*shown["Entrypoint"], *shown["Cmd"]]
    assert must("run", container, "--", "kvoffloadd", "--version").strip() == f"kvoffloadd {kvoffloadd.__version__}"
    log = tmp_path / "log"
    with log.open("wb") as stream:
        daemon = subprocess.Popen(["buildah", "run", container, "--", *command], stdout=stream, stderr=stream)
    try:
        until(lambda: b"serving at" in log.read_bytes() or daemon.poll() is not None, "serving", COMMAND_S, every_s=0.1)
        assert daemon.poll() is None, log.read_text()
        status = json.loads(must("run", container, "--", "kvoffloadd", "status", "--json"))
        (uid,) = must("run", container, "--", "stat", "--format=%u", "/run/kvoffloadd/kvoffloadd.sock").split()
        assert uid == shown["User"].split(":")[0] != "0"
        assert status["memory"]["capacity_bytes"] > 0
    finally:
        if daemon.poll() is None:
            daemon.terminate()  # buildah does not pass it on, but kills the daemon
            daemon.wait(COMMAND_S)
