"""Hosts of a lab on this machine: network namespaces with a wire each, or else addresses of the loopback device.

Namespaces need root. They have no names: each lives as long as a process of the lab holds it, so none outlives this
one. Between them links can be cut and made slow. On loopback they can't.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from kvoffloadd.testing.process import ROOT, end, spawn
from kvoffloadd.testing.wait import until

_COMMANDS = ("ip", "iptables", "nsenter", "tc", "unshare")
_COMMAND_S = 20.0
_NETWORK = "10.77.0"
_BURST = ("burst", "64kb", "latency", "400ms")
_HUB = 1


class LabError(Exception):
    """A command of the lab's failed; the message ends with what it printed."""


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """`address`: its own; `enter`: what a command begins with to run there."""

    address: str
    enter: tuple[str, ...] = ()

    def python(self, folder: Path, python: str = sys.executable) -> Path:
        """A command that is this interpreter on this host. It is a file in `folder`."""
        path = folder / f"python-{self.address}-{Path(python).parents[1].name}"
        command = " ".join((*self.enter, python))
        path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {command} "$@"\n', encoding="utf-8")
        path.chmod(0o700)
        return path


class Lab:
    """`hosts` hosts, and a hub that all of them reach, for what they share. As a context it exists within."""

    def __init__(self, folder: Path, hosts: int, *, isolated: bool) -> None:
        self._folder = folder
        self._isolated = isolated
        self._holders: list[subprocess.Popen[bytes]] = []
        self.hub = Host("127.0.0.1")
        self.hosts = [Host(f"127.0.0.{2 + number}") for number in range(hosts)]

    def __enter__(self) -> Self:
        try:
            if self._isolated:
                self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Namespaces go with their last process."""
        while self._holders:
            end(self._holders.pop(), signal.SIGKILL, _COMMAND_S)

    # --- links ---

    def cut(self, one: Host, other: Host) -> None:
        """Nothing passes between the two any more, and neither hears of it."""
        for chain, flag in (("INPUT", "-s"), ("OUTPUT", "-d")):
            _run(*one.enter, "iptables", "-w", "-A", chain, flag, other.address, "-j", "DROP")

    def mend(self, one: Host) -> None:
        """Undo all cuts that were made at this host."""
        _run(*one.enter, "iptables", "-w", "-F")

    def slow(self, host: Host, rate: str) -> None:
        """What leaves this host passes at no more than `rate`, such as "4mbit"."""
        _run(*host.enter, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *_BURST, "rate", rate)

    def fast(self, host: Host) -> None:
        """Undo `slow`."""
        _run(*host.enter, "tc", "qdisc", "del", "dev", "eth0", "root")

    # --- namespaces ---

    def _connect(self) -> None:
        self.hub, _ = self._namespace(_HUB)
        _run(*self.hub.enter, "ip", "link", "add", "br0", "type", "bridge")
        _run(*self.hub.enter, "ip", "addr", "add", f"{self.hub.address}/24", "dev", "br0")
        _run(*self.hub.enter, "ip", "link", "set", "br0", "up")
        connected = []
        for number in range(len(self.hosts)):
            host, pid = self._namespace(_HUB + 10 + number)
            wire = f"wire{number}"
            peer = ["peer", "name", "eth0", "netns", str(pid)]
            _run(*self.hub.enter, "ip", "link", "add", wire, "type", "veth", *peer)
            _run(*self.hub.enter, "ip", "link", "set", wire, "master", "br0", "up")
            _run(*host.enter, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run(*host.enter, "ip", "link", "set", "eth0", "up")
            connected.append(host)
        self.hosts = connected

    def _namespace(self, number: int) -> tuple[Host, int]:
        holder = spawn(["/usr/bin/env", "unshare", "--net", "sleep", "infinity"], self._folder / "lab.log")
        self._holders.append(holder)
        path, ours = f"/proc/{holder.pid}/ns/net", os.readlink("/proc/self/ns/net")
        until(lambda: holder.poll() is not None or os.readlink(path) != ours, "a namespace is made", _COMMAND_S)
        host = Host(f"{_NETWORK}.{number}", ("nsenter", f"--net={path}", "--"))
        _run(*host.enter, "ip", "link", "set", "lo", "up")
        return host, holder.pid


@cache
def why_not_isolated() -> str:
    """Why this machine can't make hosts of namespaces; empty: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [command for command in _COMMANDS if shutil.which(command) is None]:
        return f"{', '.join(missing)}: not installed"
    try:
        with Lab(Path("/tmp"), 2, isolated=True) as lab:
            lab.slow(lab.hosts[0], "4mbit")
            lab.cut(*lab.hosts)
    except (LabError, OSError) as error:
        return f"the kernel or a container forbids it: {error}"
    return ""


def _run(*command: str) -> str:
    """What it printed. Raises LabError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_S)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(command)}: not within {_COMMAND_S:.0f} s") from error
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
