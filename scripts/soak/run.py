"""The main process of a soak: hosts and stores, what goes wrong, and the audit at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.wait import within
from scripts.harness.counters import Counters
from scripts.harness.disk import ManifestTrap
from scripts.harness.geometry import Geometry
from scripts.harness.lab import Lab, why_not_isolated
from scripts.soak.host import GONE_S, SoakHost, left_over
from scripts.soak.mishaps import Mishap, Mishaps
from scripts.soak.options import SoakOptions
from scripts.soak.report import SoakReport
from scripts.soak.sentinels import Sentinels, fingerprint_of
from scripts.soak.stores import Stores
from scripts.soak.vandal import Vandal
from scripts.stress.namespaces import MIXED, geometries

HOSTS = 2
TICK_S = 0.05
WORKER_END_S = 120.0
BEGIN_S = 60.0
TAIL = 0.75
"""From here on daemons live, so that what grows in them shows."""
SLOW = "16mbit"


class SoakRun:
    """One run, in its own folder. Nothing stays behind, however it ends."""

    def __init__(self, options: SoakOptions, folder: Path, disk_folder: Path, memory_folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._kept = SoakHost.kept(disk_folder, memory_folder, options.working_set_bytes // 2)
        self._trap = ManifestTrap(disk_folder / "root")
        self._memory_folder = memory_folder
        self._rng = np.random.default_rng([options.seed, 1 << 21])
        self._counters = Counters(folder / "counters", HOSTS * options.workers)
        self._isolated = not why_not_isolated()
        self._report = SoakReport(options, self._counters, self._isolated)

    def run(self) -> SoakReport:
        """Raises DaemonError, KvOffloadError, OSError or TimeoutError if it can't be carried out."""
        with ExitStack() as stack:
            self._lab = stack.enter_context(Lab(self._folder, HOSTS, isolated=self._isolated))
            self._stores = Stores(self._options, self._lab, self._folder)
            stack.callback(self._stores.close)
            self._stores.start()
            self._hosts = [self._host(number) for number in range(HOSTS)]
            self._report.hosts = [host.report for host in self._hosts]
            for host in self._hosts:
                stack.callback(host.close)
                host.start()
            mishaps = Mishaps(self._rng, self._options.seconds, list(self._mishaps()))
            self._report.mishaps = mishaps.counts
            self._sentinels = self._make_sentinels(mishaps)
            stack.callback(self._sentinels.close)
            self._vandal = self._make_vandal()
            stack.callback(self._vandal.close)
            self._vandal.start()
            try:
                self._work(mishaps)
            except KeyboardInterrupt:
                self._report.interrupted = True
            self._end(mishaps)
        return self._report

    def _host(self, number: int) -> SoakHost:
        """The first one keeps what it has over a kill; the other one has only memory."""
        where = self._lab.hosts[number]
        folder = self._folder / f"host-{number}"
        folder.mkdir()
        settings = {
            "remote.python": str(where.python(folder)),
            **self._stores.settings(where),
            **(self._kept if number == 0 else {}),
        }
        rows = range(number * self._options.workers, (number + 1) * self._options.workers)
        found = self._geometries()
        return SoakHost(number, rows, self._options, folder, settings, found, self._counters, self._rng)

    def _make_sentinels(self, mishaps: Mishaps) -> Sentinels:
        def calm() -> None:
            mishaps.undo_all()
            self._stores.await_all()
            for host in self._hosts:
                host.await_agent()

        rng = np.random.default_rng([self._options.seed, 1 << 22])
        pool, seconds = self._memory_folder / "pool", self._options.seconds
        made = Sentinels(self._hosts, self._trap, pool, rng, seconds, calm, TAIL * seconds)
        self._report.sentinels = made.report
        return made

    def _make_vandal(self) -> Vandal:
        rng = np.random.default_rng([self._options.seed, 1 << 23])
        hub = self._lab.hub
        made = Vandal(hub, self._options.engine, self._stores.engine_settings(hub), self._folder, rng)
        workers = {fingerprint_of(one.namespace()) for one in self._geometries()}
        made.names = sorted(workers)[::2] + self._sentinels.vandalised()
        self._report.vandal = made.counts
        return made

    def _geometries(self) -> list[Geometry]:
        return geometries(self._options.seed, HOSTS * self._options.workers, MIXED, "")

    # --- what goes wrong ---

    def _mishaps(self) -> Iterator[Mishap]:
        for host in self._hosts:
            yield Mishap("worker killed", 8, 0, host.kill_worker)
            yield Mishap("daemon killed", 60, 0, partial(self._kill_daemon, host))
            yield Mishap("daemon paused", 120, 1.5, host.pause_daemon)
            yield Mishap("agent killed", 60, 0, host.kill_agent)
            yield Mishap("agent stopped", 200, 0, host.stop_agent)
            yield Mishap("all cleared", 200, 0, host.clear_all)
        yield Mishap("disk records nothing", 100, 10, lambda _: self._trap.set(), self._trap.remove)
        for name, process in self._stores.by_name.items():
            what = name.split()[0]
            mean_s = 150 if what == "master" else 100
            yield Mishap(f"{what} killed", mean_s, 5, partial(self._stores.kill, name))
            yield Mishap(f"{what} paused", 1.5 * mean_s, 6, lambda _, p=process: p.pause(), process.resume)  # type: ignore[misc]
        if self._isolated:
            yield from self._cuts()

    def _cuts(self) -> Iterator[Mishap]:
        lab = self._lab
        here, there = lab.hosts
        for one, other in ((here, there), (here, lab.hub), (there, lab.hub)):
            yield Mishap("link cut", 90, 8, lambda _, a=one, b=other: lab.cut(a, b), partial(lab.mend, one))  # type: ignore[misc]
        for host in (here, there):
            yield Mishap("link slow", 90, 8, lambda _, h=host: lab.slow(h, SLOW), partial(lab.fast, host))  # type: ignore[misc]

    def _kill_daemon(self, host: SoakHost, seconds: float) -> None:
        if self._report.seconds < TAIL * self._options.seconds:
            host.kill_daemon(seconds)

    # --- while it runs ---

    def _work(self, mishaps: Mishaps) -> None:
        within(self._all_busy, BEGIN_S, every_s=TICK_S)
        began = time.monotonic()
        with ProgressBar("soak", self._options.seconds) as live:
            while (now := time.monotonic() - began) < self._options.seconds:
                self._report.seconds = now
                self._look()
                mishaps.look(now)
                self._sentinels.look(now)
                live.show(now, self._report.figures())
                time.sleep(TICK_S)

    def _look(self) -> None:
        self._stores.look()
        self._vandal.look()
        for host in self._hosts:
            host.look()

    def _all_busy(self) -> bool:
        self._look()
        return all(self._counters.get(row, "operations") for row in range(HOSTS * self._options.workers))

    # --- the end ---

    def _end(self, mishaps: Mishaps) -> None:
        """Ends the run in order. The workers stop while things are still wrong."""
        self._counters.stop()
        self._sentinels.close()
        self._vandal.close()
        until_s = time.monotonic() + WORKER_END_S
        for host in self._hosts:
            host.end_workers(until_s)
        mishaps.undo_all()
        self._stores.await_all()
        self._report.store_starts = self._stores.starts
        for host in self._hosts:
            host.audit()
        for host in self._hosts:
            host.audit_empty()
        for host in self._hosts:
            host.stop()
        left: list[str] = []

        def nothing() -> bool:
            left[:] = left_over()
            return not left

        if within(nothing, GONE_S, every_s=0.1) is None:
            self._report.left_over += left
        files = [path.name for path in self._memory_folder.iterdir() if not path.name.startswith("pool")]
        self._report.left_over += [f"a file in memory: {name}" for name in files]
