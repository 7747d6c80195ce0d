"""The main process of a stress run: starts and kills daemon and workers, watches, and audits at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.testing.leaks import Used, held, leaks, unreturned_slots
from kvoffloadd.testing.output import ProgressBar, ratio
from kvoffloadd.testing.process import (
    DaemonError,
    bad_entries,
    end,
    mapped_memfds,
    module,
    spawn,
    tail,
    unmapped_within,
)
from kvoffloadd.testing.wait import within
from scripts.gpu.workerprocess import GpuWorker
from scripts.harness.counters import Counters
from scripts.harness.daemon import Daemon
from scripts.harness.gpumemory import Rows
from scripts.harness.metrics import Scraped, disagreements
from scripts.harness.watch import Watch
from scripts.stress.disk import StressDisk
from scripts.stress.driver import Driver
from scripts.stress.namespaces import geometries
from scripts.stress.options import StressOptions, WorkerOptions
from scripts.stress.prompts import ROOTS
from scripts.stress.report import StressReport

MIB = 1 << 20
TICK_S = 0.05
LOOK_S = 0.005
UNMAP_LIMIT_S = 30.0
"""A killed worker's memory that is still mapped then will stay so. How long it took is in the report: on a machine that
is not overloaded, 1 s from its last copy's end.
"""
BEGIN_S = 30.0
WORKER_END_S = 90.0
VERIFY_S = 120.0
ERRORS_MAX = 20
CORRUPT_EVERY = 10
PLANT_EVERY_S = 0.25
AUDITED, AUDIT_WAIT_S = 0.8, 12.0
"""How often a kill waits until the audit after the last start has ended, and how long."""
KILLED_IN_START, START_S = 0.2, 0.8
"""How often a daemon is killed while it starts, and up to what instant."""
EXIT_FATAL = 70
DIE_S = 10.0
"""How long a daemon may take to die of a fault of its driver, at which its peers noticed it."""
STILL_S = 45.0
"""Nothing that any worker does takes so long."""
_DRIVER_FAILED = re.compile(r"CRITICAL .*exiting: (cuda:|copies )")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A worker process.

    `row`: its place among the workers; `generation` counts the processes that have had it, and `operations` what these
    had done before.
    """

    row: int
    generation: int
    operations: int
    memory_name: str
    child: subprocess.Popen[bytes]


class StressRun:
    """One run, in its own folder, and another one for the disk tier. Nothing stays behind, however it ends."""

    def __init__(
        self, options: StressOptions, folder: Path, disk_folder: Path, memory_folder: Path, driver: Driver
    ) -> None:
        self._options = options
        self._memory_folder = memory_folder
        self._before: tuple[int, int] | None = None
        self._driver = driver
        self._folder = folder
        self._metrics = folder / "metrics.sock"
        self._rng = np.random.default_rng([options.seed, 1 << 20])
        self._counters = Counters(folder / "counters", options.workers)
        self._report = StressReport(
            options.seed,
            options.device,
            options.workers,
            options.memory_bytes,
            options.working_set_bytes,
            self._counters,
            options.layout,
            options.model,
            copies=options.copies,
        )
        self._disk: StressDisk | None = None
        self._patience_s = self._draw_patience()
        if options.disk_bytes:
            planting = options.plant_corruption == "disk"
            self._disk = StressDisk(disk_folder / "root", options.disk_bytes, self._rng, planting=planting)
            self._report.disk = self._disk.report
        self._memory_prefix = f"kvo-s{os.getpid()}-"
        self._geometries = geometries(options.seed, options.workers, options.layout, options.model)
        self._slots: dict[int, Slot] = {}
        self._moved = 0, 0.0
        self._daemon: Daemon | None = None
        if options.socket is None:
            self._daemon = self._own_daemon()
            self._socket = self._daemon.socket
        else:
            self._socket = options.socket

    def _own_daemon(self) -> Daemon:
        # Many slabs, so that slot sizes can take them from each other.
        slab_bytes = min(max(self._options.memory_bytes // 128 // MIB, 1), 64) * MIB
        settings = {"memory.slab_bytes": str(slab_bytes), "log.level": "warning", **self._driver.settings}
        settings["metrics.listen"] = str(self._metrics)
        if self._options.warm:
            settings["memory.pool_file"] = str(self._memory_folder / "pool")
        if self._disk is not None:
            settings |= self._disk.settings
        faults = [f"corrupt_every={CORRUPT_EVERY}"] if self._plants_in_daemon else []
        if self._options.slow_copies_s and self._options.device == "host":
            faults.append(f"delay_s={self._options.slow_copies_s}")
        return Daemon(
            self._folder, self._options.memory_bytes, settings, ",".join(faults), environment=self._driver.daemon
        )

    @property
    def _plants_in_daemon(self) -> bool:
        """Returns whether the daemon plants the faults; on a GPU its driver does."""
        return self._options.plant_corruption == "loads" and self._options.device == "host"

    def run(self) -> StressReport:
        """Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
        try:
            if self._daemon is not None:
                self._daemon.start()
            with Client(
                str(self._socket), namespace=None, role="observer", deadline_s=30.0, connect_deadline_s=2.0
            ) as observer:
                self._stress(observer)
            if self._daemon is not None:
                self._end_daemon(self._daemon)
            return self._report
        finally:
            for slot in self._slots.values():
                end(slot.child, signal.SIGKILL, 5.0)
            if self._daemon is not None:
                self._daemon.kill()

    def _stress(self, observer: Client) -> None:
        if self._options.device == "cuda" and not self._options.software_driver:
            self._take_gpu_into_use(observer)
        before = held(observer, self._pid(observer), self._memory_prefix)
        watch = Watch(observer, self._options.seconds)
        try:
            self._begin(observer, watch)
            self._work(observer, watch)
        except KeyboardInterrupt:
            self._report.interrupted = True
        self._report.private_bytes = watch.private_bytes()
        self._end_workers(observer, watch)
        watch.look(now_due=True)
        self._report.daemon = watch.counters()
        unused = self._driver.unused(asdict(self._report.daemon))
        self._report.errors += [f"--copies {self._options.copies}: {name} is 0" for name in unused]
        self._compare_metrics(observer)
        if self._plants_in_daemon and not self._report.daemon.faults_planted:
            self._report.errors.append("no corruption could be planted: too few loads")
        if self._disk is not None:
            self._look_at_disk(watch)
            self._end_disk(self._disk, observer, watch)
        self._audit(observer, before)
        self._report.findings += watch.findings

    def _take_gpu_into_use(self, observer: Client) -> None:
        """A GPU's driver opens descriptors at the first registration, and keeps them: they are no leak."""
        sessions = len(observer.status()["sessions"])
        worker = GpuWorker(self._socket, self._folder / "first-worker.log")
        worker.begin("ipc", PAGE_BYTES, [Rows(0, 1, PAGE_BYTES, PAGE_BYTES)])
        worker.call("share")
        worker.end()
        within(lambda: len(observer.status()["sessions"]) <= sessions, UNMAP_LIMIT_S, every_s=TICK_S)

    def _compare_metrics(self, observer: Client) -> None:
        """Compares the metrics with what the workers counted, which have left; a killed daemon took
        its counters along.
        """
        report = self._report
        if self._daemon is None or report.daemon_kills or report.fatal_ends:
            return
        observer.drain(30.0, everything=True)
        report.metrics_compared = True
        report.findings += disagreements(Scraped(self._metrics), self._counters, exact=not report.kills)

    def _end_disk(self, disk: StressDisk, observer: Client, watch: Watch) -> None:
        """Audit it once more, and once more after a restart in order."""
        if self._daemon is None:
            return
        disk.wait_for_audit(VERIFY_S)
        disk.audit(observer, repair=True)
        watch.look(now_due=True)
        disk.note(watch)
        if (status := self._daemon.stop()) != 0:
            self._report.errors.append(f"the daemon ended with status {status}:\n{self._daemon.tail()}")
        disk.killed(watch, self._counters.total("clears"))
        self._daemon.start()
        disk.started(observer.status(), self._daemon.socket, self._counters.total("clears"))
        disk.wait_for_audit(VERIFY_S)
        disk.finish()
        self._report.findings += disk.findings
        self._report.errors += disk.errors

    def _audit(self, observer: Client, before: Used) -> None:
        """What must hold when all workers have left."""
        report = self._report
        drained = observer.drain(30.0, everything=True)
        if drained.jobs or drained.unsealed:
            report.errors.append(f"after a drain {drained.jobs} jobs run, {drained.unsealed} slots are unsealed")
        report.leaks += leaks(observer, self._pid(observer), self._memory_prefix, before)
        report.findings += observer.verify(payloads=True, deadline_s=VERIFY_S).findings
        if self._daemon is not None:
            report.leaks += unreturned_slots(observer)
            report.findings += observer.verify().findings

    def _pid(self, observer: Client) -> int:
        return self._daemon.pid if self._daemon else int(observer.status()["pid"])

    # --- while it runs -------------------------------------------------------------------------------

    def _begin(self, observer: Client, watch: Watch) -> None:
        """Start the workers, and wait until each has done something: how long Python takes to start means nothing."""
        for row in range(self._options.workers):
            self._spawn(row, 0)

        def all_busy() -> bool:
            self._check_children(observer, watch)
            return len(self._busy()) >= len(self._slots)

        within(all_busy, BEGIN_S, every_s=TICK_S)

    def _busy(self) -> list[Slot]:
        """Workers that have done something already."""
        return [slot for slot in self._slots.values() if self._counters.get(slot.row, "operations") > slot.operations]

    def _work(self, observer: Client, watch: Watch) -> None:
        options = self._options
        began = time.monotonic()
        kills = self._instants(min(max(options.seconds / 12, 0.5), 4.0)) if options.kill_workers else []
        daemon_kills = self._instants(min(max(options.seconds / 6, 2.0), 14.0)) if options.kill_daemon else []
        plants = self._instants(PLANT_EVERY_S)
        with ProgressBar("stress", options.seconds) as live:
            while (now := time.monotonic() - began) < options.seconds or self._has_shown_nothing(now):
                watch.look()
                self._look_at_disk(watch)
                self._check_children(observer, watch)
                self._check_progress(now)
                if kills and now >= kills[0] and (busy := self._busy()):
                    kills.pop(0)
                    self._kill_worker(observer, busy[int(self._rng.integers(0, len(busy)))])
                if daemon_kills and now >= daemon_kills[0] and self._may_kill_daemon(now - daemon_kills[0]):
                    daemon_kills.pop(0)
                    self._patience_s = self._draw_patience()
                    self._kill_daemon(observer, watch)
                if plants and now >= plants[0] and self._disk is not None:
                    plants.pop(0)
                    self._disk.plant()
                self._report.seconds = now
                live.show(now, self._figures())
                time.sleep(TICK_S)

    def _has_shown_nothing(self, now: float) -> bool:
        """A slow machine gets more time, until at least one load was compared, and one worker killed."""
        if now > self._options.seconds + STILL_S:
            return False
        wants_kill = self._options.kill_workers and not self._report.kills
        return wants_kill or not (self._counters.total("verified_loads") or self._counters.total("wrong_bytes"))

    def _instants(self, mean_s: float) -> list[float]:
        """Random instants of the run, about `mean_s` apart."""
        gaps = self._rng.uniform(0.5 * mean_s, 1.5 * mean_s, int(2 * self._options.seconds / mean_s) + 1)
        return [at for at in np.cumsum(gaps).tolist() if at < self._options.seconds]

    def _spawn(self, row: int, generation: int) -> None:
        memory_name = f"{self._memory_prefix}{row}-{generation}-"
        share_bytes = self._options.working_set_bytes / len(self._geometries)
        options = WorkerOptions(
            socket=str(self._socket),
            counters=str(self._folder / "counters"),
            rows=self._options.workers,
            row=row,
            generation=generation,
            seed=self._options.seed,
            conversations=[
                max(ROOTS, round(share_bytes / one.bytes_of(one.prompt_tokens))) for one in self._geometries
            ],
            rank_bytes=min(max(self._options.memory_bytes // 16, MIB), 8 * MIB),
            daemon_may_die=self._options.kill_daemon or self._driver.ends_daemon,
            disk=self._disk is not None,
            memory_name=memory_name,
            device=self._options.device,
            jobs_may_fail=self._driver.fails_jobs,
            layout=self._options.layout,
            model=self._options.model,
            plant=self._options.planted_refs,
        )
        command = module("scripts.stress.worker", json.dumps(asdict(options)))
        child = spawn(command, self._log(row), environment=self._driver.workers)
        self._slots[row] = Slot(row, generation, self._counters.get(row, "operations"), memory_name, child)

    def _log(self, row: int) -> Path:
        return self._folder / f"worker-{row}.log"

    def _check_children(self, observer: Client, watch: Watch) -> None:
        self._check_daemon(observer, watch)
        for slot in list(self._slots.values()):
            if (status := slot.child.poll()) is not None:
                self._failed(slot, f"ended with status {status}")
                self._spawn(slot.row, slot.generation + 1)

    def _check_daemon(self, observer: Client, watch: Watch) -> None:
        """One that has ended by itself did wrong, or met a fault that it can't survive: then another one starts."""
        daemon = self._daemon
        if daemon is None or daemon.alive:
            return
        if not self._driver.ends_daemon or daemon.exit_status != EXIT_FATAL:
            raise DaemonError(f"the daemon died, status {daemon.exit_status}:\n{daemon.tail()}")
        self._report.fatal_ends += 1
        clears = self._counters.total("clears")
        if self._disk is not None:
            self._disk.killed(watch, clears)
        self._start_again(observer, daemon)

    def _check_progress(self, now: float) -> None:
        """Raises DaemonError if no worker has done anything for too long."""
        done = self._counters.total("operations")
        if done != self._moved[0]:
            self._moved = done, now
        elif now - self._moved[1] > STILL_S:
            raise DaemonError(f"no worker has done anything for {STILL_S:.0f} s")

    def _failed(self, slot: Slot, what: str) -> None:
        self._report.errors.append(f"worker {slot.row}.{slot.generation} {what}")
        if len(self._report.errors) > ERRORS_MAX:
            raise DaemonError(f"{len(self._report.errors)} errors, the last: {what}:\n{tail(self._log(slot.row))}")

    def _kill_worker(self, observer: Client, slot: Slot) -> None:
        """SIGKILL it, see that the daemon lets go of all it had, and start another in its place."""
        self._report.kills += 1
        self._report.kills_with_jobs += self._counters.get(slot.row, "jobs_open") > 0
        try:
            self._see_it_go(observer, slot)
        except (ClientError, OSError):
            if not self._dies_of_its_driver():
                raise
        finally:
            slot.child.kill()
            slot.child.wait()
            self._spawn(slot.row, slot.generation + 1)

    def _see_it_go(self, observer: Client, slot: Slot) -> None:
        daemon_pid = self._pid(observer)
        had_memory = bool(mapped_memfds(daemon_pid, slot.memory_name))
        slot.child.kill()
        unmap_s = unmapped_within(daemon_pid, slot.memory_name, UNMAP_LIMIT_S)
        slot.child.wait()
        forgotten_s = _forgotten_within(observer, slot.child.pid, UNMAP_LIMIT_S)
        if (unmap_s is None or forgotten_s is None) and self._dies_of_its_driver():
            return
        if unmap_s is None:
            self._report.errors.append(f"a killed worker's memory was mapped for more than {UNMAP_LIMIT_S:.0f} s")
        elif had_memory:
            self._report.unmap_s.append(unmap_s)
        if forgotten_s is None:
            self._report.errors.append(f"a killed worker's session was there for more than {UNMAP_LIMIT_S:.0f} s")
        elif not had_memory and self._options.device == "cuda":  # a session goes when its memory is unmapped
            self._report.unmap_s.append(forgotten_s)

    def _dies_of_its_driver(self) -> bool:
        """Whether the daemon ends now, as it has to."""
        daemon = self._daemon
        if daemon is None or not self._driver.ends_daemon:
            return False
        return within(lambda: not daemon.alive, DIE_S, every_s=TICK_S) is not None

    def _draw_patience(self) -> float:
        return AUDIT_WAIT_S if self._rng.random() < AUDITED else 0.0

    def _may_kill_daemon(self, due_s: float) -> bool:
        """Mostly not before the audit after the last start has ended, so that most audits have something to check."""
        return self._disk is None or not self._disk.is_auditing or due_s >= self._patience_s

    def _look_at_disk(self, watch: Watch) -> None:
        if self._disk is not None:
            self._disk.note(watch)
            self._disk.sample()

    def _kill_daemon(self, observer: Client, watch: Watch) -> None:
        """SIGKILL it in the middle of everything, now and then of its start; the workers must find its successor."""
        daemon, disk, clears = self._daemon, self._disk, self._counters.total("clears")
        if daemon is None:
            return
        watch.look(now_due=True)
        self._look_at_disk(watch)
        daemon.kill()
        if daemon.exit_status != -signal.SIGKILL:  # it was quicker
            self._check_daemon(observer, watch)
            return
        self._report.daemon_kills += 1
        self._before = sum(row["keys"] for row in watch.status["namespaces"]), clears
        if disk is not None:
            disk.killed(watch, clears)
            if self._rng.random() < KILLED_IN_START:
                daemon.launch()
                time.sleep(float(self._rng.uniform(0.0, START_S)))
                daemon.kill()
                self._report.daemon_kills += 1
                disk.report.kills_in_start += 1
                disk.sample(after_kill=True)
        self._start_again(observer, daemon)

    def _start_again(self, observer: Client, daemon: Daemon) -> None:
        daemon.start()
        try:
            self._report.findings += observer.verify().findings
            self._note_taken_over(observer.status())
            if self._disk is not None:
                self._disk.started(observer.status(), daemon.socket, self._counters.total("clears"))
        except ClientError:
            if not self._dies_of_its_driver():
                raise

    def _note_taken_over(self, status: dict[str, Any]) -> None:
        """Notes the share of the complete keys in memory before the last kill that was taken over, unless some were
        cleared since.
        """
        before, self._before = self._before, None
        if self._options.warm and before and before[0] and before[1] == self._counters.total("clears"):
            self._report.taken_over.append(int(status["cache"]["keys_adopted"]) / before[0])

    def _figures(self) -> str:
        total = self._counters.total
        hits = 100 * ratio(total("block_hits"), total("block_references"))
        return (
            f"{total('stores'):,} stores {total('verified_loads'):,} loads verified "
            f"({total('verified_loads_from_disk'):,} from disk) {hits:.0f} % hits "
            f"{self._report.kills + self._report.daemon_kills} kills {total('wrong_bytes'):,} wrong"
        )

    # --- the end -------------------------------------------------------------------------------------

    def _end_workers(self, observer: Client, watch: Watch) -> None:
        """Ask them to stop, and wait until they have checked and closed what they had open."""
        self._counters.stop()
        until = time.monotonic() + WORKER_END_S
        while any(slot.child.poll() is None for slot in self._slots.values()) and time.monotonic() < until:
            self._check_daemon(observer, watch)
            time.sleep(TICK_S)
        for slot in self._slots.values():
            try:
                status = slot.child.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self._failed(slot, "did not end when it was asked to")
                continue
            if status != 0:
                self._failed(slot, f"ended with status {status}")
        for row in self._slots:
            self._report.said += self._log(row).read_text(encoding="utf-8", errors="replace").splitlines()

    def _end_daemon(self, daemon: Daemon) -> None:
        status = daemon.stop()
        if status != 0:
            self._report.errors.append(f"the daemon ended with status {status}:\n{daemon.tail()}")
        entries = bad_entries(daemon.log_path)
        expected = [entry for entry in entries if self._driver.ends_daemon and _DRIVER_FAILED.search(entry)]
        self._report.errors += [entry for entry in entries if entry not in expected]
        if len(expected) < self._report.fatal_ends:
            ends = self._report.fatal_ends
            self._report.errors.append(f"of {ends} fatal ends the daemon's log has the reason of {len(expected)}")


def _forgotten_within(observer: Client, pid: int, limit_s: float) -> float | None:
    """Seconds until the daemon has no session of that process any more; None: it still had one at the limit."""
    return within(
        lambda: all(session["pid"] != pid for session in observer.status()["sessions"]), limit_s, every_s=LOOK_S
    )
