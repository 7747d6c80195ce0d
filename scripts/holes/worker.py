"""What a bystander and an attacker have in common: memory, a session in each of two namespaces, and a life."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvoffloadd.client import JobDeadlineError
from kvoffloadd.errors import ClientError, RemoteError
from kvoffloadd.model import I64Array
from scripts.harness.counters import Counters
from scripts.harness.promises import Findings
from scripts.holes.evidence import Journal
from scripts.holes.memory import WatchedMemory
from scripts.holes.options import HolesWorkerOptions
from scripts.holes.session import TextSession
from scripts.holes.texts import KEYS, SHARED, Texts

BLOCKS = 4 * KEYS
NOT_YET = ("schema_mismatch", "unknown_name", "bad_lease")
"""What a daemon that was started anew may say to a session that has not come back yet."""


class HolesWorker:
    """`attacks`: it makes holes in its memory. Its operations are a subclass's."""

    attacks = False

    def __init__(self, options: HolesWorkerOptions) -> None:
        self.options = options
        self.rng = np.random.default_rng([options.seed, options.row, options.generation])
        self.counters = Counters(Path(options.counters), options.rows, options.row)
        self.findings = Findings(self.counters)
        self.journal = Journal(Path(options.evidence), f"{options.row}-{options.generation}")
        self.memory: WatchedMemory
        self.own: TextSession
        self.shared: TextSession
        self._parent = os.getppid()
        self._renewals = 0

    @property
    def operations(self) -> Sequence[tuple[float, Callable[[], None]]]:
        """Weights, and what is done at random."""
        raise NotImplementedError

    def run(self) -> None:
        """Runs until asked to stop. Raises what only a bug of this script, or of the client, can cause."""
        if not self.engage():
            return
        weights = np.array([weight for weight, _ in self.operations])
        bounds = np.cumsum(weights / weights.sum())
        while not self.is_ending:
            _, operation = self.operations[int(np.searchsorted(bounds, self.rng.random()))]
            self.attempt(operation)
            if self.rng.random() < 0.5 or len(self.memory.free) < KEYS:
                self.attempt(self.wait)
            self.counters.add("operations")
            if self.options.pause_s:
                time.sleep(self.options.pause_s)
        self.attempt(self.disengage)

    @property
    def is_ending(self) -> bool:
        return self.counters.stopping or os.getppid() != self._parent

    def attempt(self, operation: Callable[[], None]) -> None:
        """One operation; what may go wrong is counted, what may not is a finding."""
        name = getattr(operation, "__name__", "")
        try:
            operation()
        except RemoteError as error:
            if self.options.daemon_may_die and error.code in NOT_YET:
                self.counters.add("calls_lost")
            else:
                self.findings.broken(f"{name}: {error!r}")
        except ClientError as error:
            self.counters.add("calls_lost")
            # A daemon that dies ends its jobs: one that does not end is a daemon that neither works nor dies.
            if not self.options.daemon_may_die or isinstance(error, JobDeadlineError):
                self.findings.broken(f"{name}: {error!r}")

    # --- memory and sessions ---

    @property
    def sessions(self) -> tuple[TextSession, TextSession]:
        return self.own, self.shared

    def engage(self) -> bool:
        """Allocate memory, and register it twice; try until there is a daemon. False: asked to stop before."""
        while not self.is_ending:
            self._renewals += 1
            self.memory = WatchedMemory(
                f"{self.options.memory_name}{self._renewals}",
                BLOCKS,
                self.rng,
                sealed=not self.attacks or bool(self.rng.integers(0, 2)),
                punched=self.attacks,
            )
            try:
                self.own = self._session(1 + self.options.row)
                try:
                    self.shared = self._session(SHARED)
                except ClientError:
                    self.own.abandon()
                    raise
            except ClientError as error:
                self.counters.add("calls_lost")
                if not self.options.daemon_may_die:
                    self.findings.broken(f"can't connect: {error!r}")
                    raise
            else:
                return True
        return False

    def _session(self, number: int) -> TextSession:
        texts = Texts(self.options.seed, number, self.options.prompts)
        return TextSession(
            self.options.socket, texts, self.memory, self.counters, self.findings, self.journal, punched=self.attacks
        )

    def disengage(self) -> None:
        """Bye, whatever runs; then compare everything once more. Raises JobDeadlineError."""
        for session in self.sessions:
            session.close()
        self.own.compare("at the end")

    def reconnect(self) -> None:
        """Come back as another engine, with other memory."""
        self.counters.add("reconnects")
        self.disengage()
        self.engage()

    def wait(self) -> None:
        """Waits for all jobs."""
        for session in self.sessions:
            session.wait()

    def compare(self) -> None:
        """Every byte, whatever runs."""
        self.counters.add("comparisons")
        self.own.compare("comparing all of it")

    # --- what both do ---

    def any_session(self) -> TextSession:
        return self.sessions[int(self.rng.integers(0, 2))]

    def room(self, blocks: int = KEYS) -> bool:
        """Whether `blocks` blocks are free."""
        return len(self.memory.free) >= blocks

    def draw(self, share: float = 1.0) -> I64Array:
        """Indices of keys of a prompt; of all, or of a random share, and never none."""
        found: I64Array = np.flatnonzero(self.rng.random(KEYS) < share)
        return found if len(found) else np.arange(KEYS)


def live(make: Callable[[], HolesWorker]) -> int:
    """The whole life of a worker process; returns its exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    make().run()
    return 0
