"""Runs a Debian with its own booted systemd in a container: units, users and restarts are as on a real host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffloadd.testing.wait import HANG_S

REPOSITORY = Path(__file__).parents[2]

PYTHON, SITE, SOURCE = Path("/opt/python"), Path("/opt/site"), Path("/opt/source")
"""Where the container sees this interpreter, its packages, and the repository. Not below /root, which units hide."""

BINARY = Path("/opt/kvoffloadd/bin/kvoffloadd")
USER = "engine"
BOOT_S, MAKE_S = HANG_S, 15 * HANG_S


def why_not() -> str:
    """Why there can be no container here; empty: there can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("systemd-nspawn", "debootstrap", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install systemd-container debootstrap)"
    return ""


@dataclass(frozen=True, slots=True)
class Debian:
    """A release of Debian with some packages, and the folder that has it. It is made once, and only read then: a
    container writes to memory.
    """

    release: str
    packages: str
    folder: Path

    def make(self) -> None:
        """Takes half a minute and 250 MB, once."""
        complete = self.folder / ".complete"
        if complete.exists() and complete.read_text() == self.packages:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        command = ["debootstrap", "--variant=minbase", f"--include={self.packages}", self.release, str(self.folder)]
        subprocess.run(command, check=True, timeout=MAKE_S)
        complete.write_text(self.packages)


HOST = Debian(
    "bookworm", "systemd,systemd-sysv,dbus,procps,libibverbs1,libcurl4,libnuma1", Path("/tmp/kvoffloadd-service-rootfs")
)


class Machine:
    """A Debian that runs. `binds`: folders of this machine and where they are seen inside, read-only. `boots`: with
    its systemd; otherwise nothing runs there but what is entered.
    """

    def __init__(self, debian: Debian, binds: Mapping[Path, Path], *, boots: bool = True) -> None:
        debian.make()
        first = ["--boot"] if boots else ["sleep", "infinity"]
        # A separate network namespace, and no registration: nothing of it is seen outside.
        self._nspawn = subprocess.Popen(
            ["systemd-nspawn", "--quiet", f"--directory={debian.folder}", "--volatile=overlay", "--register=no",
             "--keep-unit", "--private-network", "--console=pipe",
             *(f"--bind-ro={here}:{there}" for here, there in binds.items()), *first],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._leader = self._find_leader("systemd" if boots else "sleep")
            if boots:
                self._wait_for_boot()
        except BaseException:
            self.close()
            raise

    def _find_leader(self, name: str) -> int:
        end = time.monotonic() + BOOT_S
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children")
        while time.monotonic() < end:
            if self._nspawn.poll() is not None:
                break
            for pid in map(int, children.read_text().split()):
                if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    return pid
            time.sleep(0.05)
        self._nspawn.kill()
        raise RuntimeError(f"the container does not boot: {self._nspawn.communicate()[1]}")

    def _wait_for_boot(self) -> None:
        end = time.monotonic() + BOOT_S
        while (state := self.try_run("systemctl", "is-system-running").stdout.strip()) not in ("running", "degraded"):
            if time.monotonic() > end:
                raise RuntimeError(f"the container's systemd is {state or 'not there'} after {BOOT_S} s")
            time.sleep(0.1)

    def close(self) -> None:
        """Pull the plug."""
        if self._nspawn.poll() is None:
            self._nspawn.send_signal(signal.SIGTERM)  # to nspawn: the machine is to power off
            try:
                self._nspawn.wait(20)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
        self._nspawn.communicate()

    def add_address(self, address: str) -> None:
        """Adds an address to the loopback device, which is the only one."""
        command = ["nsenter", f"--target={self._leader}", "--net", "--", "ip", "address", "add", address, "dev", "lo"]
        subprocess.run(command, check=True, capture_output=True, timeout=20)

    # --- inside ---

    def command(self, *words: str, user: str = "root") -> list[str]:
        """What runs these words inside."""
        enter = ["nsenter", f"--target={self._leader}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        become = [] if user == "root" else ["runuser", "--user", user, "--"]
        return [*enter, "env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", *become, *words]

    def try_run(self, *words: str, user: str = "root", timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run it, whatever comes of it."""
        return subprocess.run(
            self.command(*words, user=user), capture_output=True, text=True, check=False, timeout=timeout_s
        )

    def run(self, *words: str, user: str = "root", timeout_s: float = 60.0) -> str:
        """Its standard output. Raises AssertionError if it fails."""
        done = self.try_run(*words, user=user, timeout_s=timeout_s)
        assert done.returncode == 0, f"{words}: {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def write(self, path: Path | str, text: str, mode: str = "644") -> None:
        """A file inside."""
        self.run("mkdir", "-p", str(Path(path).parent))
        subprocess.run(
            self.command("sh", "-c", f"cat > {path} && chmod {mode} {path}"), input=text, text=True, check=True
        )

    # --- units ---

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        words = [f"--property={name}" for name in names]
        lines = self.run("systemctl", "show", unit, *words).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def journal(self, unit: str, *words: str) -> str:
        """What a unit has logged."""
        return self.run("journalctl", "--unit", unit, "--no-pager", "--output=cat", *words)

    def until(self, unit: str, deadline_s: float = 60.0, **wanted: Any) -> dict[str, str]:
        """Wait until the unit has these properties. Raises AssertionError at the deadline, with the journal."""
        end = time.monotonic() + deadline_s
        while True:
            shown = self.show(unit, *wanted)
            if all(shown.get(name) == str(value) for name, value in wanted.items()):
                return shown
            assert time.monotonic() < end, f"{unit} is {shown}, not {wanted}:\n{self.journal(unit)}"
            time.sleep(0.05)


class Container(Machine):
    """Has the daemon installed as a service. `files`: a tree that lies over the root, such as `make install DESTDIR=`
    makes.
    """

    def __init__(self, files: Path) -> None:
        binds = {
            Path(sys.base_prefix): PYTHON,
            Path(sysconfig.get_paths()["purelib"]): SITE,
            REPOSITORY: SOURCE,
            files: Path("/mnt/files"),
        }
        super().__init__(HOST, binds)
        try:
            self.run("cp", "-rT", "/mnt/files", "/")
            self.run("useradd", "--system", USER)
            self.run("mkdir", "-p", str(BINARY.parent))
            self.write(BINARY, _PROGRAM, mode="755")
            self.run("systemctl", "daemon-reload")
        except BaseException:
            self.close()
            raise


_PROGRAM = f"""#!/bin/sh
export LD_LIBRARY_PATH={PYTHON}/lib PYTHONPATH={SOURCE}:{SITE} PYTHONDONTWRITEBYTECODE=1
exec {PYTHON}/bin/python{sys.version_info.major}.{sys.version_info.minor} -m kvoffloadd "$@"
"""
"""A `kvoffloadd` that is this interpreter with this source."""
