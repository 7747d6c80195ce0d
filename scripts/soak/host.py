"""A host of a soak: its daemon, with the agent that this has, and its workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError
from kvoffloadd.testing.disk import disk_settings
from kvoffloadd.testing.leaks import Used, held, leaks, unreturned_slots
from kvoffloadd.testing.process import DaemonError, bad_entries, end, mapped_memfds, module, spawn, tail
from kvoffloadd.testing.wait import HANG_S, until, within
from scripts.harness.counters import Counters
from scripts.harness.daemon import Daemon
from scripts.harness.geometry import Geometry
from scripts.harness.watch import Watch
from scripts.soak.options import SoakOptions
from scripts.stress.options import WorkerOptions
from scripts.stress.prompts import ROOTS

MIB = 1 << 20
MARK = "KVOFFLOADD_SOAK"
"""A variable that all processes of a run have, so that what is left of it is found."""
KILLED_IN_START, START_S = 0.2, 0.8
GONE_S = 30.0
"""Within this time a process that was killed is gone, and its memory with it."""
STILL_S = 120.0
"""Nothing that any worker does takes so long, on the busiest machine; nor does its start."""
QUIET_S = 120.0
ENDED_MAX = 5
VERIFY_S = 120.0
PUSH = ("seal", "evict", "second-use")
"""One host pushes all that it can, the other one by the seed."""


@dataclass(slots=True)
class HostReport:
    """The figures of a host. `remote`: counters of the remote tier, over all runs of the daemon; `private_bytes`: of
    its last run, warm and at the end.
    """

    findings: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    remote: Counter[str] = field(default_factory=Counter)
    daemon_runs: int = 0
    daemons_ended: int = 0
    quarantined_most_bytes: int = 0
    private_bytes: tuple[int, int] | None = None


@dataclass(slots=True, eq=False)
class HostWorker:
    """A process. `row`: of the counters; `operations`: what those before it had done."""

    row: int
    generation: int
    operations: int
    memory_name: str
    child: subprocess.Popen[bytes]


class SoakHost:
    """`rows`: of its workers. `start` begins it, `close` ends whatever is left."""

    def __init__(
        self,
        number: int,
        rows: range,
        options: SoakOptions,
        folder: Path,
        settings: dict[str, str],
        geometries: list[Geometry],
        counters: Counters,
        rng: np.random.Generator,
    ) -> None:
        self.report = HostReport()
        self._number = number
        self._rows = rows
        self._options = options
        self._folder = folder
        self._geometries = geometries
        self._counters = counters
        self._rng = rng
        self._prefix = f"kvo-k{os.getpid()}-{number}-"
        self._workers: dict[int, HostWorker] = {}
        self._runs: dict[str, Counter[str]] = {}
        self._agents: set[int] = set()
        self._moved = 0, time.monotonic()
        self._before: Used = {}
        chosen = {
            "memory.slab_bytes": str(MIB),
            "log.level": "warning",
            "remote.push": PUSH[options.seed % len(PUSH) if number else 0],
            "remote.lookup_s": "0.5",
            "remote.fetch_s": "2",
            "remote.prefetch_s": "4",
            "remote.stuck_s": "5",
            "remote.min_keys": "1",
            "remote.miss_ttl_s": "0.2",
            "remote.era_poll_s": "0.5",
            **settings,
        }
        environment = {MARK: str(os.getpid())}
        self.daemon = Daemon(folder, options.memory_bytes, chosen, environment=environment)

    @staticmethod
    def kept(disk: Path, memory: Path, disk_bytes: int) -> dict[str, str]:
        """Settings of a daemon that keeps things on a disk, and finds its memory again."""
        return {"memory.pool_file": str(memory / "pool"), **disk_settings(disk / "root", disk_bytes)}

    def start(self) -> None:
        """Daemon and workers. Raises DaemonError."""
        self.daemon.start()
        self.observer = Client(
            str(self.daemon.socket), namespace=None, role="observer", deadline_s=HANG_S, connect_deadline_s=2.0
        )
        self.watch = Watch(self.observer, self._options.seconds / 4)
        self.await_agent()
        self._before = held(self.observer, self.daemon.pid, self._prefix)
        for row in self._rows:
            self._spawn(row, 0)
        self._moved = 0, time.monotonic()

    def await_agent(self) -> None:
        """Waits until the store answers."""
        until(lambda: self._remote()["state"] == "ok", f"the daemon of host {self._number} has its store", every_s=0.05)

    def _remote(self) -> dict[str, Any]:
        found: dict[str, Any] = self.observer.status()["remote"]
        return found

    def close(self) -> None:
        """SIGKILL all."""
        for worker in self._workers.values():
            end(worker.child, signal.SIGKILL, GONE_S)
        self.daemon.kill()

    # --- workers ---

    def _spawn(self, row: int, generation: int) -> None:
        memory_name = f"{self._prefix}{row}-{generation}-"
        share_bytes = self._options.working_set_bytes / len(self._geometries)
        options = WorkerOptions(
            socket=str(self.daemon.socket),
            counters=str(self._folder.parent / "counters"),
            rows=2 * self._options.workers,
            row=row,
            generation=generation,
            seed=self._options.seed,
            conversations=[
                max(ROOTS, round(share_bytes / one.bytes_of(one.prompt_tokens))) for one in self._geometries
            ],
            rank_bytes=4 * MIB,
            daemon_may_die=True,
            disk=True,
            memory_name=memory_name,
            device="host",
            jobs_may_fail=False,
            layout="mixed",
            model="",
            plant="",
            remote=True,
        )
        command = module("scripts.stress.worker", json.dumps(asdict(options)))
        child = spawn(command, self._log(row), environment={MARK: str(os.getpid())})
        self._workers[row] = HostWorker(row, generation, self._counters.get(row, "operations"), memory_name, child)

    def _log(self, row: int) -> Path:
        return self._folder / f"worker-{row}.log"

    def kill_worker(self, _seconds: float) -> None:
        """One that has done something; see that the daemon lets go of all it had."""
        busy = [one for one in self._workers.values() if self._counters.get(one.row, "operations") > one.operations]
        if not busy:
            return
        worker = busy[int(self._rng.integers(0, len(busy)))]
        worker.child.kill()
        worker.child.wait()
        if within(lambda: not self._has(worker), GONE_S, every_s=0.01) is None:
            self.report.errors.append(f"a killed worker's session or memory was there for more than {GONE_S:.0f} s")
        self._spawn(worker.row, worker.generation + 1)

    def _has(self, worker: HostWorker) -> bool:
        with suppress(ClientError):
            sessions = {session["pid"] for session in self.observer.status()["sessions"]}
            return worker.child.pid in sessions or bool(mapped_memfds(self.daemon.pid, worker.memory_name))
        return True

    # --- daemon and agent ---

    def kill_daemon(self, _seconds: float) -> None:
        """Kills the daemon in the middle of everything, now and then in its start; the agent must go with it."""
        self.note(now_due=True)
        self.daemon.kill()
        if self._rng.random() < KILLED_IN_START:
            self.daemon.launch()
            time.sleep(float(self._rng.uniform(0.0, START_S)))
            self.daemon.kill()
        self.daemon.start()
        self._await_agents_end()
        self.report.findings += self.observer.verify().findings

    def _await_agents_end(self) -> None:
        if within(lambda: not any(map(lives, self._agents)), GONE_S, every_s=0.01) is None:
            self.report.errors.append(f"an agent outlived its daemon by more than {GONE_S:.0f} s")
        self._agents.clear()

    def go_down(self, *, killed: bool) -> None:
        """Takes the host down for a while, and checks that what it had ends with it."""
        self.note(now_due=True)
        status = 0
        if killed:
            self.daemon.kill()
        else:
            status = self.daemon.stop()
        if status != 0:
            self.report.errors.append(f"daemon {self._number} ended with status {status}:\n{self.daemon.tail()}")
        self._await_agents_end()

    def pause_daemon(self, seconds: float) -> None:
        """Deadlines pass meanwhile, and the agent goes on."""
        self.daemon.signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.daemon.signal(signal.SIGCONT)

    def kill_agent(self, _seconds: float) -> None:
        """SIGKILL."""
        self._signal_agent(signal.SIGKILL)

    def stop_agent(self, _seconds: float) -> None:
        """Stops the agent for ever: the daemon has to notice. It does not do so during the agent's start: before the
        agent has asked to end with its daemon, the kernel does not end it, and a stopped agent does not ask.
        """
        if self._remote()["state"] == "ok":
            self._signal_agent(signal.SIGSTOP)

    def _signal_agent(self, number: int) -> None:
        if pid := int(self._remote()["agent"]["pid"]):
            self._agents.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def clear_all(self, _seconds: float) -> None:
        """All namespaces, on all hosts."""
        self.observer.clear(everything=True, wait_s=0.0)

    # --- looks ---

    def look(self) -> None:
        """Take in what there is to see. Raises DaemonError: daemons die again and again, or nothing moves."""
        self.note()
        if not self.daemon.alive:
            self._has_ended()
        for worker in list(self._workers.values()):
            if (status := worker.child.poll()) is not None:
                self.report.errors.append(f"worker {worker.row}.{worker.generation} ended with status {status}")
                if len(self.report.errors) > 20:
                    raise DaemonError(f"{self.report.errors[-1]}:\n{tail(self._log(worker.row))}")
                self._spawn(worker.row, worker.generation + 1)
        done, now = sum(self._counters.get(row, "operations") for row in self._rows), time.monotonic()
        if done != self._moved[0]:
            self._moved = done, now
        elif now - self._moved[1] > STILL_S:
            raise DaemonError(
                f"no worker of host {self._number} has done anything for {STILL_S:.0f} s:\n{self.daemon.tail()}"
            )

    def _has_ended(self) -> None:
        """The daemon has ended, unasked. The run goes on with the next one."""
        message = f"daemon {self._number} died, status {self.daemon.exit_status}:\n{self.daemon.tail()}"
        self.report.daemons_ended += 1
        self.report.errors.append(message)
        if self.report.daemons_ended > ENDED_MAX:
            raise DaemonError(message)
        self.daemon.start()

    def note(self, *, now_due: bool = False) -> None:
        """Counters of the daemon's present run."""
        self.watch.look(now_due=now_due)
        status = self.watch.status
        if "remote" not in status:
            return
        remote = status["remote"]
        if pid := int(remote["agent"]["pid"]):
            self._agents.add(pid)
        self.report.quarantined_most_bytes = max(self.report.quarantined_most_bytes, remote["quarantined_bytes"])
        self._runs[status["boot_id"]] = counted(remote)

    # --- the end ---

    def end_workers(self, until_s: float) -> None:
        """They were asked to stop: wait until they have checked and closed what they had open."""
        for worker in self._workers.values():
            if within(lambda w=worker: w.child.poll() is not None, max(until_s - time.monotonic(), 0.1)) is None:  # type: ignore[misc]
                self.report.errors.append(f"worker {worker.row} did not end when it was asked to")
            elif worker.child.returncode:
                self.report.errors.append(f"worker {worker.row} ended with status {worker.child.returncode}")
            self.report.said += self._log(worker.row).read_text(encoding="utf-8", errors="replace").splitlines()

    def audit(self) -> None:
        """What must hold when all workers have left, and the store is well."""
        report, observer = self.report, self.observer
        self.note(now_due=True)
        report.private_bytes = self.watch.private_bytes()
        self.await_agent()
        if within(lambda: not busy_with(self._remote()), QUIET_S, every_s=0.1) is None:
            report.leaks.append(f"host {self._number}: the remote tier is still busy: {busy_with(self._remote())}")
        drained = observer.drain(GONE_S, everything=True)
        if drained.jobs or drained.unsealed:
            report.errors.append(f"after a drain {drained.jobs} jobs run, {drained.unsealed} slots are unsealed")
        report.leaks += leaks(observer, self.daemon.pid, self._prefix, self._before)
        self.verify()
        self.note(now_due=True)

    def verify(self) -> None:
        """Everything in memory and on disk."""
        has_disk = "disk" in self.observer.status()
        self.report.findings += self.observer.verify(payloads=True, disk=has_disk, deadline_s=VERIFY_S).findings

    def audit_empty(self) -> None:
        """When all is cleared nothing is held."""
        self.report.leaks += unreturned_slots(self.observer)
        self.report.findings += self.observer.verify().findings

    def stop(self) -> None:
        """Stops the host in order."""
        self.observer.close(1.0, force=True)
        status = self.daemon.stop()
        if status != 0:
            self.report.errors.append(f"daemon {self._number} ended with status {status}:\n{self.daemon.tail()}")
        self.report.errors += bad_entries(self.daemon.log_path)
        self.report.findings += self.watch.findings
        self.report.daemon_runs = len(self._runs)
        self.report.remote = sum(self._runs.values(), Counter())


def counted(remote: dict[str, Any]) -> Counter[str]:
    """Counters of the remote tier."""
    found = Counter(
        {name: int(remote[name]) for name in ("asked", "found", "eras_made", "markers_lost", "cleared_elsewhere")}
    )
    for direction in ("fetched", "pushed"):
        found[direction] = int(remote[direction]["keys"])
        found[f"{direction} bytes"] = int(remote[direction]["bytes"])
    for kind in ("not_fetched", "not_pushed", "corrupt"):
        found.update({f"{kind}: {reason}": int(count) for reason, count in remote[kind].items()})
    found["agents"] = int(remote["agent"]["starts"])
    found["breakers opened"] = sum(int(remote[kind]["opened"]) for kind in ("lookups", "gets", "puts"))
    return found


def busy_with(remote: dict[str, Any]) -> dict[str, int]:
    """What is on its way."""
    figures = {
        "gets": remote["gets"]["calls"], "puts": remote["puts"]["calls"],
        "quarantined": remote["quarantined_bytes"], "backlog": remote["backlog_bytes"],
    }  # fmt: skip
    return {name: int(value) for name, value in figures.items() if value}


def lives(pid: int) -> bool:
    """Not so a zombie, which has no memory any more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def left_over() -> list[str]:
    """Processes of this run that are still there."""
    mark = f"{MARK}={os.getpid()}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(
                        f"process {folder.name}: {(folder / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
                    )
    return found
