"""Daemons that share a cluster's store, and what tests ask of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffloadd.client import Group, GroupKind, Outcome, Ref
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from scripts.harness.stores import remote_python
from tests.e2e.rank import Keys, Rank
from tests.e2e.sharedstore import patient
from tests.remote.cluster import Cluster

FULL = (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 96 << 10),)),)
"""Keys of 96 KiB: all of them take some seconds over a slow link."""
Start = Callable[..., Daemon]


@dataclass
class Site:
    """The agent of each daemon is on a separate host."""

    cluster: Cluster
    start_daemon: Start
    folder: Path

    def daemon(self, number: int, *settings: str) -> Daemon:
        """Starts a daemon with deadlines for a busy machine, unless `settings` say otherwise."""
        where = self.cluster.lab.hosts[number]
        here = {f"{self.cluster.kind}.{name}": str(value) for name, value in self.cluster.settings(where).items()}
        here |= {"remote.python": str(where.python(self.folder, remote_python()))}
        here |= dict(setting.split("=", 1) for setting in settings)
        daemon = self.start_daemon(*patient(self.cluster.kind, here), memory="256MiB")
        daemon.expected_in_log = "agent"
        return daemon


def remote(daemon: Daemon) -> dict[str, Any]:
    """Returns its status of the tier."""
    found: dict[str, Any] = daemon.status()["remote"]
    return found


def era(daemon: Daemon) -> str:
    """Returns the era of its only namespace, generation first; empty: it is not known."""
    return next(iter(remote(daemon)["eras"].values()), "")


def await_era(daemon: Daemon) -> str:
    """Waits until one is known."""
    return until(lambda: era(daemon), "an era is known")


def push(daemon: Daemon, rank: Rank, keys: Keys) -> None:
    """Store them, and wait until the store has them."""
    before = remote(daemon)["pushed"]["keys"]
    assert rank.store_keys(keys).outcome is Outcome.DONE
    until(lambda: remote(daemon)["pushed"]["keys"] >= before + len(keys), "all are pushed")


def states(rank: Rank, keys: Keys) -> list[int]:
    """Returns states as a pin finds them in the end; it is released."""
    found = rank.client.pin({0: keys})
    if found.promoting:
        found = rank.client.wait_ready(found, HANG_S)
    if found.lease:
        rank.client.release(found.lease)
    return list(found.states[0].tolist())
