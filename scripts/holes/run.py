"""The main process of a run of holes: starts and kills daemon and workers, watches, and audits at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvoffloadd.client import Client
from kvoffloadd.device.userfaultguard import UserfaultGuard
from kvoffloadd.testing.disk import disk_settings
from kvoffloadd.testing.leaks import Used, held, leaks, unreturned_slots
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import DaemonError, bad_entries, end, module, spawn, tail
from kvoffloadd.testing.wait import HANG_S, within
from scripts.harness.counters import Counters
from scripts.harness.daemon import Daemon
from scripts.harness.watch import Watch
from scripts.holes.options import HolesOptions, HolesWorkerOptions
from scripts.holes.report import HolesReport
from scripts.holes.texts import KEYS, PAYLOAD_BYTES
from scripts.soak.mishaps import Mishap, Mishaps

TICK_S = 0.05
DISK_TIMES, WORKING_SET_TIMES = 3, 5
"""Of the memory tier: the disk, and what all workers ask for."""
CORRUPT_EVERY = 10
ERRORS_MAX = 20
WORKER_KILL_S, DAEMON_KILL_S = 3.0, 15.0
"""Seconds between two kills of a kind of worker, and between two of a kind of the daemon's."""
VERIFY_S = 2 * HANG_S


@dataclass(slots=True, eq=False)
class RunningWorker:
    """A worker process; `generation` counts those that have had its row."""

    row: int
    generation: int
    operations: int
    child: subprocess.Popen[bytes]


class HolesRun:
    """One run, in its own folder; the disk tier and the memory that may outlive a daemon have others."""

    def __init__(self, options: HolesOptions, folder: Path, disk_folder: Path, memory_folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._memory_folder = memory_folder
        self._rows = options.bystanders + options.attackers
        self._rng = np.random.default_rng([options.seed, 1 << 20])
        self._counters = Counters(folder / "counters", self._rows)
        self._report = HolesReport(options, self._counters)
        self._memory_prefix = f"kvo-h{os.getpid()}-"
        self._can_forbid = can_forbid_holes()
        self._places: dict[int, RunningWorker] = {}
        settings = disk_settings(disk_folder / "root", DISK_TIMES * options.memory_bytes) | {
            "log.level": "warning",
            "memory.slab_bytes": "1MiB",
            "memory.pool_file": str(memory_folder / "pool"),
        }
        faults = f"corrupt_every={CORRUPT_EVERY}" if options.plant_corruption else ""
        self._daemon = Daemon(folder, options.memory_bytes, settings, faults)

    def run(self) -> HolesReport:
        """Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
        try:
            self._start_daemon()
            socket = str(self._daemon.socket)
            with Client(socket, namespace=None, role="observer", deadline_s=HANG_S) as observer:
                self._stress(observer)
            if (status := self._daemon.stop()) != 0:
                self._report.errors.append(f"the daemon ended with status {status}:\n{self._daemon.tail()}")
            self._report.errors += bad_entries(self._daemon.log_path)
            return self._report
        finally:
            for place in self._places.values():
                end(place.child, signal.SIGKILL, 5.0)
            self._daemon.kill()

    def _stress(self, observer: Client) -> None:
        before = held(observer, self._daemon.pid, self._memory_prefix)
        watch = Watch(observer, self._options.seconds)
        try:
            self._begin()
            self._work(watch)
        except KeyboardInterrupt:
            self._report.interrupted = True
        self._end_workers()
        watch.look(now_due=True)
        self._report.daemon = watch.counters()
        if self._options.plant_corruption and not self._report.daemon.faults_planted:
            self._report.errors.append("no corruption could be planted: too few loads")
        self._audit(observer, before)
        self._report.findings += watch.findings

    def _audit(self, observer: Client, before: Used) -> None:
        """What must hold when all workers have left."""
        report = self._report
        drained = observer.drain(HANG_S, everything=True)
        if drained.jobs or drained.unsealed:
            report.errors.append(f"after a drain {drained.jobs} jobs run, {drained.unsealed} slots are unsealed")
        report.leaks += leaks(observer, self._daemon.pid, self._memory_prefix, before)
        report.findings += observer.verify(payloads=True, disk=True, deadline_s=VERIFY_S).findings
        report.leaks += unreturned_slots(observer)
        report.findings += observer.verify().findings

    # --- while it runs ---

    def _start_daemon(self) -> None:
        """Starts the daemon. In every second run, where the kernel can, it does not fill holes: jobs that meet one
        fail.
        """
        forbid = self._can_forbid and self._report.daemon_runs % 2 == 0
        self._daemon.settings["copy.fill_holes"] = "false" if forbid else "true"
        self._daemon.start()
        self._report.daemon_runs += 1
        self._report.forbidden_runs += forbid

    def _begin(self) -> None:
        """Start the workers, and wait until each has done something."""
        for row in range(self._rows):
            self._spawn(row, 0)

        def all_busy() -> bool:
            self._check_children()
            return len(self._busy(range(self._rows))) == self._rows

        within(all_busy, HANG_S, every_s=TICK_S)

    def _work(self, watch: Watch) -> None:
        seconds, began = self._options.seconds, time.monotonic()
        mishaps = Mishaps(self._rng, seconds, list(self._mishaps()))
        self._report.mishaps = mishaps.counts
        with ProgressBar("holes", seconds) as live:
            while (now := time.monotonic() - began) < seconds or self._has_shown_nothing(now):
                watch.look()
                self._check_children()
                mishaps.look(now)
                self._report.seconds = now
                live.show(now, self._report.figures())
                time.sleep(TICK_S)

    def _mishaps(self) -> Iterator[Mishap]:
        if self._options.kill_workers:
            bystanders, attackers = range(self._options.bystanders), range(self._options.bystanders, self._rows)
            yield Mishap("bystanders killed", WORKER_KILL_S, 0.0, lambda _: self._kill_one_of(bystanders))
            if attackers:
                yield Mishap("attackers killed", WORKER_KILL_S, 0.0, lambda _: self._kill_one_of(attackers))
        if self._options.kill_daemon:
            yield Mishap("daemons killed, memory kept", DAEMON_KILL_S, 0.0, lambda _: self._kill_daemon(warm=True))
            yield Mishap("daemons killed, memory lost", DAEMON_KILL_S, 0.0, lambda _: self._kill_daemon(warm=False))

    def _has_shown_nothing(self, now: float) -> bool:
        """A slow machine gets more time, until something was compared next to a hole."""
        shown = self._report.of_bystanders("verified_loads") or self._counters.total("wrong_bytes")
        return now < self._options.seconds + HANG_S and not (shown and self._counters.total("holes"))

    def _spawn(self, row: int, generation: int) -> None:
        attacks = row >= self._options.bystanders
        prompt_bytes = KEYS * PAYLOAD_BYTES
        working_set_bytes = WORKING_SET_TIMES * self._options.memory_bytes
        options = HolesWorkerOptions(
            socket=str(self._daemon.socket),
            counters=str(self._folder / "counters"),
            rows=self._rows,
            row=row,
            generation=generation,
            seed=self._options.seed,
            prompts=max(working_set_bytes // prompt_bytes // (self._rows + 2), 1),
            daemon_may_die=self._options.kill_daemon,
            memory_name=f"{self._memory_prefix}{row}-{generation}-",
            pause_s=self._options.pause_s,
            evidence=str(self._options.evidence),
        )
        name = "scripts.holes.attacker" if attacks else "scripts.holes.bystander"
        child = spawn(module(name, json.dumps(asdict(options))), self._log(row))
        self._places[row] = RunningWorker(row, generation, self._counters.get(row, "operations"), child)

    def _log(self, row: int) -> Path:
        return self._folder / f"worker-{row}.log"

    def _busy(self, rows: Iterable[int]) -> list[RunningWorker]:
        """Workers of these that have done something already."""
        places = [self._places[row] for row in rows]
        return [place for place in places if self._counters.get(place.row, "operations") > place.operations]

    def _check_children(self) -> None:
        if not self._daemon.alive:
            raise DaemonError(f"the daemon died, status {self._daemon.exit_status}:\n{self._daemon.tail()}")
        for place in list(self._places.values()):
            if (status := place.child.poll()) is not None:
                self._failed(place, f"ended with status {status}")
                self._spawn(place.row, place.generation + 1)

    def _failed(self, place: RunningWorker, what: str) -> None:
        self._report.errors.append(f"worker {place.row}.{place.generation} {what}")
        if len(self._report.errors) > ERRORS_MAX:
            raise DaemonError(f"{len(self._report.errors)} errors, the last: {what}:\n{tail(self._log(place.row))}")

    # --- kills ---

    def _kill_one_of(self, rows: Sequence[int]) -> None:
        busy = self._busy(rows)
        if not busy:
            return
        place = busy[int(self._rng.integers(0, len(busy)))]
        place.child.kill()
        place.child.wait()
        self._spawn(place.row, place.generation + 1)

    def _kill_daemon(self, *, warm: bool) -> None:
        """`warm`: the memory tier is left to its successor; the disk always is."""
        self._daemon.kill()
        if not warm:
            for path in self._memory_folder.iterdir():
                path.unlink()
        self._start_daemon()
        self._report.findings += self._daemon.verify()

    # --- the end ---

    def _end_workers(self) -> None:
        """Ask them to stop, and wait until they have checked and closed what they had open."""
        self._counters.stop()
        until_s = time.monotonic() + HANG_S
        for place in self._places.values():
            try:
                status = place.child.wait(max(until_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self._failed(place, "did not end when it was asked to")
                continue
            if status != 0:
                self._failed(place, f"ended with status {status}")
        for row in self._places:
            self._report.said += self._log(row).read_text(encoding="utf-8", errors="replace").splitlines()


def can_forbid_holes() -> bool:
    """Whether the kernel lets a daemon run with `copy.fill_holes = false`."""
    try:
        UserfaultGuard().close()
    except OSError:
        return False
    return True
