"""Runs stress workers with engines on one daemon, which a test kills and starts: all that they load is checked."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Self

from kvoffloadd.testing.process import end, module, spawn, tail
from scripts.harness.counters import Counters
from scripts.harness.daemon import Daemon
from scripts.stress.namespaces import MIXED, geometries
from scripts.stress.options import WorkerOptions
from scripts.stress.prompts import ROOTS

END_S = 90.0
RANK_BYTES = 1 << 20


class Crowd:
    """Runs while it is entered as a context. `working_set_bytes`: what all of them ask for."""

    def __init__(self, daemon: Daemon, folder: Path, *, workers: int, seed: int, working_set_bytes: int) -> None:
        self.counters = Counters(folder / "counters", workers)
        self._logs = [folder / f"worker-{row}.log" for row in range(workers)]
        found = geometries(seed, workers, MIXED, "")
        share = working_set_bytes / len(found)
        self._options = [
            WorkerOptions(
                socket=str(daemon.socket),
                counters=str(folder / "counters"),
                rows=workers,
                row=row,
                generation=0,
                seed=seed,
                conversations=[max(ROOTS, round(share / one.bytes_of(one.prompt_tokens))) for one in found],
                rank_bytes=RANK_BYTES,
                daemon_may_die=True,
                disk=True,
                memory_name=f"kvo-crowd-{row}-",
                device="host",
                jobs_may_fail=False,
                layout=MIXED,
                model="",
                plant="",
            )
            for row in range(workers)
        ]

    def __enter__(self) -> Self:
        self._children = [
            spawn(module("scripts.stress.worker", json.dumps(asdict(options))), log)
            for options, log in zip(self._options, self._logs, strict=True)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            end(child, signal.SIGKILL, END_S)

    def leave(self) -> None:
        """All end in order. Raises AssertionError for a worker that had ended before, or does not end."""
        ends = [(child.poll(), tail(log)) for child, log in zip(self._children, self._logs, strict=True)]
        assert all(status is None for status, _ in ends), ends
        self.counters.stop()
        for child, log in zip(self._children, self._logs, strict=True):
            assert child.wait(END_S) == 0, tail(log)
