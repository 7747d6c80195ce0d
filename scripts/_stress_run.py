"""The main process of a stress run: starts and kills daemon and workers, watches, and audits at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _counters import Counters
from _daemon import DaemonError, DaemonProcess, end, mapped_memfds, private_folder, rss_anon_bytes, spawn, tail
from _geometry import PROMPT_TOKENS, random_geometry
from _leaks import Held, held, leaks, unreturned_slots
from _output import Live, ratio
from _stress_report import GROWTH_SAMPLES, DaemonFigures, Report
from _stress_worker import Options as WorkerOptions

from kvoffloadd.client import Client
from kvoffloadd.units import format_bytes

MIB = 1 << 20
TICK_S = 0.05
STATUS_S = 0.5
AUDIT_S = 10.0
UNMAP_LIMIT_S = 2.0
"""A killed worker's memory must be unmapped within 1 s of its last copy's end, which may take some time too."""
WORKER_END_S = 90.0
VERIFY_S = 120.0
WORKER_FAILURES_MAX = 5
CORRUPT_EVERY = 50


@dataclass(frozen=True, slots=True)
class Options:
    """The command line. `socket`: of a running daemon, or None."""

    seconds: float
    workers: int
    memory_bytes: int
    working_set_bytes: int
    kill_workers: bool
    kill_daemon: bool
    plant_corruption: bool
    seed: int
    socket: Path | None


@dataclass(slots=True)
class Slot:
    """A worker's place: `generation` counts the processes that had it."""

    row: int
    generation: int
    child: subprocess.Popen[bytes]
    memory_name: str
    log: Path


class Run:
    """One run. `run` leaves nothing behind, however it ends."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rng = np.random.default_rng([options.seed, 1 << 20])
        self._memory_prefix = f"kvo-s{os.getpid()}-"
        self._slots: list[Slot] = []
        self._daemon: DaemonProcess | None = None
        self._boots: dict[str, DaemonFigures] = {}
        self._rss: list[int] = []
        self._rss_first: int | None = None
        self._next_kill = self._next_daemon_kill = float("inf")

    def run(self) -> Report:
        """Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
        with private_folder() as name:
            folder = Path(name)
            try:
                return self._run(folder)
            finally:
                for slot in self._slots:
                    end(slot.child, signal.SIGKILL, 5.0)
                if self._daemon is not None:
                    self._daemon.kill()

    def _run(self, folder: Path) -> Report:
        options = self._options
        self._folder = folder
        self._counters = Counters(folder / "counters", options.workers)
        self._report = Report(
            options.seed, options.workers, options.memory_bytes, options.working_set_bytes, self._counters
        )
        if options.socket is None:
            self._daemon = self._own_daemon(folder)
            self._daemon.start()
        self._socket = self._daemon.socket if self._daemon else options.socket
        assert self._socket is not None
        with Client(self._socket, namespace=None, role="observer", deadline_s=30.0) as observer:
            self._observer = observer
            self._pid = observer.status()["pid"]
            before = held(observer, self._pid, self._memory_prefix)
            self._work()
            self._finish(before)
        if self._daemon is not None:
            self._stop_daemon()
        return self._report
