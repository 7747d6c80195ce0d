"""Daemons of several hosts that share a real store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.harness.daemon import Daemon
from scripts.harness.process import ROOT
from scripts.harness.stores import remote_python
from tests.e2e.sharedstore import patient
from tests.remote.conftest import Cluster

Start = Callable[..., Daemon]


@dataclass
class Site:
    """Daemons that share a cluster's store; the agent of each is on a host of the lab."""

    cluster: Cluster
    start_daemon: Start
    folder: Path

    def daemon(self, number: int, *settings: str) -> Daemon:
        """With deadlines for a busy machine, unless `settings` say otherwise."""
        where = self.cluster.lab.hosts[number]
        python = self.python(number, remote_python())
        here = {f"{self.cluster.kind}.{name}": str(value) for name, value in self.cluster.settings(where).items()}
        here |= {"remote.python": str(python)} | dict(setting.split("=", 1) for setting in settings)
        daemon = self.start_daemon(*patient(self.cluster.kind, here), memory="256MiB")
        daemon.expected_in_log = "agent"
        return daemon

    def python(self, number: int, python: str) -> Path:
        """A command that is `python` on a host."""
        command = self.folder / f"python-{number}-{Path(python).parents[1].name}"
        enter = " ".join(self.cluster.lab.hosts[number].enter)
        command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {enter} {python} "$@"\n')
        command.chmod(0o700)
        return command


def remote(daemon: Daemon) -> dict[str, Any]:
    """What it says of the store."""
    found: dict[str, Any] = daemon.status()["remote"]
    return found
