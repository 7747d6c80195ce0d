"""The options of a stress run, and those that it gives its workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StressOptions:
    """The command line. `layout`: of KV caches, or "mixed"; `model`: "" for some. `warm`: memory outlives the daemon.
    `disk_bytes` 0: no disk tier. `plant_corruption`: "", "loads", "disk", "refs" or "slots". `socket`: of a running
    daemon; None: start one. `device`: where KV caches lie, "host" or "cuda"; on the latter `software_driver`: without a
    GPU, with these `driver_faults` for the daemon alone. `copies`: one of `harness.copies.WAYS`, which the daemon is
    forced to; "": as it does by default.
    """

    seconds: float
    workers: int
    layout: str
    model: str
    memory_bytes: int
    working_set_bytes: int
    disk_bytes: int
    disk_folder: Path | None
    kill_workers: bool
    kill_daemon: bool
    warm: bool
    plant_corruption: str
    slow_copies_s: float
    seed: int
    socket: Path | None
    device: str
    software_driver: bool
    driver_faults: str
    copies: str

    @property
    def planted_refs(self) -> str:
        """What workers register wrongly."""
        return self.plant_corruption if self.plant_corruption in ("refs", "slots") else ""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker of `stress`. `conversations[n]`: how many namespace n has; `plant`: see `planned`.
    `remote`: hosts share a store, which may be away when a namespace is cleared, and may lose what it has.
    """

    socket: str
    counters: str
    rows: int
    row: int
    generation: int
    seed: int
    conversations: list[int]
    rank_bytes: int
    daemon_may_die: bool
    disk: bool
    memory_name: str
    device: str
    jobs_may_fail: bool
    layout: str
    model: str
    plant: str
    remote: bool = False
