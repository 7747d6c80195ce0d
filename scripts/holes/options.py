"""The options of a run of holes, and those that it gives its workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HolesOptions:
    """The command line. `plant_corruption`: the daemon flips bits in loads. `evidence`: where wrong bytes are written
    to. `pause_s`: how long a worker does nothing after each step.
    """

    seconds: float
    bystanders: int
    attackers: int
    memory_bytes: int
    disk_folder: Path | None
    kill_workers: bool
    kill_daemon: bool
    plant_corruption: bool
    pause_s: float
    evidence: Path
    seed: int


@dataclass(frozen=True, slots=True)
class HolesWorkerOptions:
    """The options of a bystander or an attacker. `row`: its place among all workers; `generation` counts the processes
    that have had it. `prompts`: how many each namespace has.
    """

    socket: str
    counters: str
    rows: int
    row: int
    generation: int
    seed: int
    prompts: int
    daemon_may_die: bool
    memory_name: str
    pause_s: float
    evidence: str
