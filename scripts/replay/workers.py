"""The worker processes of a replay: who replays which requests, and whose turn it is."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.testing.process import DaemonError
from scripts.replay.tenants import Trace
from scripts.replay.worker import ReplayTally, Task, Turn, work


class Workers:
    """Processes of each tenant, `of_each` at most, which take its requests in turn. If it is one, none overlap."""

    def __init__(self, socket: Path, trace: Trace, of_each: int, seed: int) -> None:
        self._trace = trace
        self._tenants: list[int] = []  # the number of each worker's tenant
        assigned = np.zeros(len(trace.requests), np.int64)
        for number in range(len(trace.tenants)):
            requests = np.flatnonzero(trace.whose == number)
            count = min(of_each, len(requests))
            assigned[requests] = len(self._tenants) + np.arange(len(requests)) % count
            self._tenants += [number] * count
        tenants = [trace.tenants[number] for number in self._tenants]
        task = Task(socket, trace.requests, tenants, assigned.tolist(), of_each > 1, seed)
        context = multiprocessing.get_context("spawn")
        self._gates = [context.Semaphore(0) for _ in tenants]
        self._turn = Turn(self._gates, task.workers, 0)
        self._done = context.RawArray("q", len(tenants))
        self._reports: list[Connection] = []
        self._processes = []
        for number in range(len(tenants)):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (task, number, Turn(self._gates, task.workers, number), sender, self._done)
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            sender.close()
            self._reports.append(receiver)
            self._processes.append(process)

    def begin(self) -> None:
        """Have them register one after the other, so that the daemon numbers their keys alike each time. Then the first
        request's has its turn.
        """
        for number in range(len(self._reports)):
            self._gates[number].release()
            self._receive(number)
        self._turn.give(0)

    @property
    def done(self) -> int:
        """Requests replayed."""
        return sum(self._done)

    def is_busy(self) -> bool:
        """Whether none has reported or ended; waits a moment."""
        return not multiprocessing.connection.wait(self._reports, 0.1)

    def end(self) -> list[ReplayTally]:
        """What was counted of each tenant. Who reports first is heard first: one that ended early has the others wait
        for their turns.
        """
        tallies: dict[int, ReplayTally] = {}
        while len(tallies) < len(self._reports):
            waiting = [number for number in range(len(self._reports)) if number not in tallies]
            ready = multiprocessing.connection.wait([self._reports[number] for number in waiting])
            tallies |= {number: self._receive(number) for number in waiting if self._reports[number] in ready}
        of_tenants = [ReplayTally() for _ in self._trace.tenants]
        for number, tally in tallies.items():
            of_tenants[self._tenants[number]].add(tally)
        return of_tenants

    def kill(self) -> None:
        """Whatever still runs."""
        for process in self._processes:
            process.kill()
            process.join()

    def _receive(self, number: int) -> Any:
        try:
            return self._reports[number].recv()
        except EOFError:
            raise DaemonError(f"worker {number} ended early; its output is above") from None
