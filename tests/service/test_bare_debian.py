"""The first hour on a bare Debian: a user who is not root installs the wheel and types three commands, without an
option, a variable or a path. Each release of Debian has a Python of its own.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvoffloadd.testing.process import ROOT
from kvoffloadd.testing.wait import HANG_S, until
from scripts.dist.packages import copy_tracked
from tests.service.container import Debian, Machine, why_not

pytestmark = [pytest.mark.service, pytest.mark.timeout(3600)]

USER = "plain"
PACKAGES = "python3-venv"
RELEASES = ("bookworm", "trixie", "testing")
"""They had Python 3.11, 3.13 and 3.14 in November 2026."""
WHEELS = Path("/wheels")
PIP_CONF = f"[global]\nno-index = true\nfind-links = {WHEELS}\ndisable-pip-version-check = true\n"
"""The machine's index is a folder: the container has no network."""
COMMAND_S = 10 * HANG_S


@dataclass
class Terminal:
    """A login of the user. `took_s` has the time of each command, in order."""

    machine: Machine
    took_s: dict[str, float] = field(default_factory=dict)

    def command(self, line: str) -> list[str]:
        """Returns what types this line."""
        return self.machine.command("runuser", "--login", USER, "--command", line)

    def type(self, line: str, typed_as: str = "") -> str:
        """Returns what is shown. Raises AssertionError if the command fails."""
        began = time.monotonic()
        done = subprocess.run(
            self.command(line), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=COMMAND_S,
        )  # fmt: skip
        self.took_s[typed_as or line] = time.monotonic() - began
        assert done.returncode == 0, f"{line}: status {done.returncode}\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def project_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    if reason := why_not():
        pytest.skip(reason)
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    copy_tracked(ROOT, tree)
    pip = [sys.executable, "-m", "pip", "--no-input", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out)]
    subprocess.run([*pip, str(tree)], check=True, timeout=COMMAND_S)
    (wheel,) = out.glob("kvoffloadd-*-abi3-*.whl")
    return wheel


def download(wheel: Path, version: str, folder: Path) -> None:
    """Puts the wheel and all that it needs on this version of Python into the folder."""
    abi = f"cp{version.replace('.', '')}"
    platforms = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")
    command = [
        *(sys.executable, "-m", "pip", "--no-input", "download", "--quiet", "--dest", str(folder)),
        *("--only-binary=:all:", "--implementation", "cp", "--python-version", version, "--abi", abi, "--abi", "abi3"),
        *(word for platform in platforms for word in ("--platform", platform)),
        *("--constraint", str(ROOT / "requirements-dev.lock"), str(wheel)),
    ]
    subprocess.run(command, check=True, timeout=COMMAND_S)


@pytest.fixture(params=RELEASES)
def terminal(request: pytest.FixtureRequest, project_wheel: Path, tmp_path: Path) -> Iterator[Terminal]:
    """A user's, on a machine that has nothing but Python."""
    debian = Debian(request.param, PACKAGES, Path(f"/tmp/kvoffloadd-bare-{request.param}"))
    # Its systemd is not needed, and the newest does not boot beside cgroups of version 1.
    machine = Machine(debian, {tmp_path: WHEELS}, boots=False)
    try:
        words = machine.run("python3", "--version").split()
        version = ".".join(words[1].split(".")[:2])
        download(project_wheel, version, tmp_path)
        tmp_path.chmod(0o755)
        machine.write("/etc/pip.conf", PIP_CONF)
        machine.run("useradd", "--create-home", USER)
        yield Terminal(machine)
    finally:
        machine.close()


def test_the_first_hour(terminal: Terminal, project_wheel: Path, tmp_path: Path) -> None:
    python = terminal.machine.run("python3", "--version").strip()
    assert terminal.machine.try_run("which", "gcc", "cc", "git", "make").stdout == ""
    terminal.type("python3 -m venv kv")
    terminal.type(f"kv/bin/pip install {WHEELS / project_wheel.name}", "kv/bin/pip install WHEEL")
    log = tmp_path / "serve.log"
    with log.open("wb") as stream:
        began = time.monotonic()
        serve = subprocess.Popen(
            terminal.command("exec kv/bin/kvoffloadd serve"), stdin=subprocess.DEVNULL, stdout=stream,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        until(lambda: b"serving at" in log.read_bytes() or serve.poll() is not None, "serving", COMMAND_S, every_s=0.05)
        terminal.took_s["kv/bin/kvoffloadd serve"] = time.monotonic() - began
        assert serve.poll() is None, log.read_text()
        shown = terminal.type("kv/bin/kvoffloadd status")
        assert "engines" in shown and "memory" in shown
        demo = terminal.type("kv/bin/kvoffloadd demo")
        assert re.search(r"wrong bytes +│ +0 ", demo)
        pid = json.loads(terminal.type("kv/bin/kvoffloadd status --json", "(its process id)"))["pid"]
        terminal.type(f"kill -INT {pid}", "Ctrl-C")  # as the terminal would
        assert serve.wait(COMMAND_S) == 0, log.read_text()
    finally:
        if serve.poll() is None:
            serve.kill()
            serve.wait()
    owners = terminal.machine.run("find", "/home", "/tmp", "/run", "-xdev", "-user", USER, "-name", "*.sock")
    assert owners == "", "what serve made, it removed"
    print(f"\n{python}, {shlex.join(sorted(path.name for path in tmp_path.glob('kvoffloadd*')))}")
    for line, took_s in terminal.took_s.items():
        print(f"  {took_s:6.1f} s  {line}")
