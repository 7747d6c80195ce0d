"""The units: valid, closed, in agreement with the config; and what `make install` makes of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from kvoffloadd.config import Config
from kvoffloadd.errors import all_subclasses

ROOT = Path(__file__).parent.parent
SERVICE, SOCKET = "kvoffloadd@.service", "kvoffloadd@.socket"
EXPOSURE_MAX = 5.0
"""Where systemd-analyze security says MEDIUM."""


def text(unit: str) -> str:
    return (ROOT / "config" / unit).read_text(encoding="utf-8")


def setting(unit: str, name: str) -> str:
    """The last value of a setting."""
    found: list[str] = re.findall(rf"^{name}=(.*)$", text(unit), re.MULTILINE)
    assert found, f"{unit} has no {name}="
    return found[-1]


@pytest.fixture
def analyze(tmp_path: Path) -> Path:
    """A directory with the units, in which another program stands in for ours, which need not be installed."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    if not Path("/run/systemd").is_dir() and os.geteuid() != 0:
        pytest.skip("systemd was never started here, and only root can make /run/systemd, without which it fails")
    for unit in (SERVICE, SOCKET):
        changed = text(unit).replace("/usr/local/bin/kvoffloadd", "/bin/true")
        (tmp_path / unit).write_text(changed, encoding="utf-8")
    return tmp_path


def run(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, timeout=50, cwd=cwd)


@pytest.mark.parametrize("unit", [SERVICE, SOCKET])
def test_units_are_valid(unit: str, analyze: Path) -> None:
    done = run("systemd-analyze", "verify", analyze / unit)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_service_is_closed_as_far_as_it_can_be(analyze: Path) -> None:
    done = run("systemd-analyze", "security", "--offline=true", "--no-pager", analyze / SERVICE)
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert score is not None, done.stdout + done.stderr
    assert float(score[1]) < EXPOSURE_MAX


def test_every_setting_that_stays_open_has_its_reason() -> None:
    _, reasons = text(SERVICE).split("# What must stay open:")
    for name in ("PrivateDevices", "DevicePolicy", "ProtectClock", "MemoryDenyWriteExecute", "PrivateUsers",
                 "PrivateIPC", "PrivateNetwork", "ProtectProc", "ProcSubset", "RemoveIPC"):  # fmt: skip
        assert f"{name}=" in reasons
        assert not re.search(rf"^{name}=", text(SERVICE), re.MULTILINE)


def test_the_service_may_place_memory_and_threads(analyze: Path) -> None:
    """memory.numa and a GPU's copy threads need these calls; each filter line takes away, or adds."""
    allowed: set[str] = set()
    for line in re.findall(r"^SystemCallFilter=(.*)$", text(SERVICE), re.MULTILINE):
        calls = {call for group in line.removeprefix("~").split() for call in calls_of(group)}
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    assert {"set_mempolicy", "get_mempolicy", "sched_setaffinity", "madvise", "memfd_create"} <= allowed


def calls_of(group: str) -> set[str]:
    """The system calls of a group, and of the groups in it."""
    if not group.startswith("@"):
        return {group}
    listed = run("systemd-analyze", "syscall-filter", "--no-pager", group).stdout.splitlines()[1:]
    names = {line.strip() for line in listed} - {""}
    return {call for name in names if not name.startswith("#") for call in calls_of(name)}


def test_the_unit_runs_only_what_every_system_has() -> None:
    """It also runs our own program. Debian has /bin/kill in a package that a small one lacks."""
    programs = {line.split()[0] for line in re.findall(r"^Exec\w+=(.+)$", text(SERVICE), re.MULTILINE)}
    assert programs == {"/usr/local/bin/kvoffloadd", "/bin/sh"}


def test_systemd_waits_longer_than_a_drain() -> None:
    config = Config()
    waits = config.server.drain_s + config.copy.worker_drain_s + config.disk.flush_s
    assert int(setting(SERVICE, "TimeoutStopSec")) > waits


def test_units_and_config_agree() -> None:
    assert setting(SOCKET, "ListenStream") == str(Config().server.socket)
    assert int(setting(SOCKET, "SocketMode"), 8) == Config().server.socket_mode
    assert Path("/run") / setting(SERVICE, "RuntimeDirectory") == Config().server.socket.parent
    assert setting(SERVICE, "LimitMEMLOCK") == "infinity"
    assert setting(SERVICE, "LimitCORE") == "0"  # a core would hold prompts
    assert setting(SERVICE, "RuntimeDirectoryPreserve") == "yes"  # or the socket unit's socket would go with the daemon
    assert f"d {Config().server.socket.parent} " in (ROOT / "config/tmpfiles.d/kvoffloadd.conf").read_text()


def test_install_and_uninstall(tmp_path: Path) -> None:
    def make(target: str) -> str:
        done = run("make", target, f"DESTDIR={tmp_path}", "PREFIX=/usr", "BINARY=/opt/kvo/bin/kvoffloadd")
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def files() -> set[str]:
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}

    units = {f"usr/lib/systemd/system/{unit}" for unit in (SERVICE, SOCKET)}
    config = tmp_path / "etc/kvoffloadd/kvoffloadd.toml"
    make("install")
    rest = {"usr/lib/tmpfiles.d/kvoffloadd.conf", "usr/share/man/man1/kvoffloadd.1", "etc/kvoffloadd/kvoffloadd.toml"}
    assert files() == units | rest
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o644 for name in files())
    service = (tmp_path / f"usr/lib/systemd/system/{SERVICE}").read_text()
    assert "ExecStart=/opt/kvo/bin/kvoffloadd serve --config /etc/kvoffloadd/kvoffloadd.toml\n" in service
    assert "/usr/local" not in service
    make("install")
    assert files() == units | rest
    config.write_text("# mine\n")
    assert "kept" in make("install")
    assert config.read_text() == "# mine\n"
    assert config.with_name("kvoffloadd.toml.new").exists()
    make("uninstall")
    assert files() == {"etc/kvoffloadd/kvoffloadd.toml"}


def test_operations_has_a_remedy_for_every_error() -> None:
    operations = (ROOT / "docs/OPERATIONS.md").read_text(encoding="utf-8")
    codes = {error.code for error in all_subclasses()}
    assert sorted(code for code in codes if f"`{code}" not in operations) == []


def test_the_config_says_what_a_reload_changes() -> None:
    head = (ROOT / "config/kvoffloadd.toml").read_text(encoding="utf-8").split("[server]")[0]
    operations = (ROOT / "docs/OPERATIONS.md").read_text(encoding="utf-8")
    for section in fields(Config):
        keys = fields(getattr(Config(), section.name))
        live = [key.name for key in keys if key.metadata["live"]]
        whole = len(live) == len(keys)
        for name in [f"[{section.name}]"] if whole else live:
            assert name in head
            assert f"`{name}`" in operations or f"`{section.name}.{name}`" in operations
