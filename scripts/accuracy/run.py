"""The main process: a model is trained, its prompts are stored, and its questions are answered from what was loaded."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path
from typing import Any

from kvoffloadd.testing.disk import disk_settings
from kvoffloadd.testing.process import bad_entries
from kvoffloadd.testing.wait import until
from scripts.accuracy.layouts import LAYOUTS
from scripts.accuracy.model import train
from scripts.accuracy.report import COMPUTED, DISK, MEMORY, AccuracyReport, Row
from scripts.accuracy.task import make_prompts
from scripts.accuracy.worker import AccuracyWorker, Control
from scripts.harness.daemon import Daemon
from scripts.harness.disk import is_idle

torch: Any = importlib.import_module("torch")

MIB = 1 << 20
MEMORY_BYTES, DISK_BYTES = 128 * MIB, 256 * MIB
SLAB_BYTES = 2 * MIB
THREADS = 1
"""More would only wait for each other: nothing here is large."""


class AccuracyRun:
    """Nothing stays behind, however it ends."""

    def __init__(self, given: argparse.Namespace, folder: Path, disk_folder: Path) -> None:
        self._given = given
        settings = {
            "log.level": "warning",
            "memory.slab_bytes": str(SLAB_BYTES),
            **disk_settings(disk_folder / "root", DISK_BYTES),
        }
        self._daemon = Daemon(folder, MEMORY_BYTES, settings)

    def run(self) -> AccuracyReport:
        """Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
        torch.set_num_threads(THREADS)
        seed = self._given.seed
        began = time.monotonic()
        model = train(seed)
        report = AccuracyReport(seed, time.monotonic() - began)
        prompts = make_prompts(self._given.prompts, torch.Generator().manual_seed(seed + 1))
        workers = [AccuracyWorker(name, model, prompts, seed) for name in LAYOUTS]
        daemon = self._daemon
        try:
            daemon.start()
            for worker in workers:
                worker.connect(daemon.socket)
                self._note(report, worker, COMPUTED, worker.compute(), prompts.answers)
                worker.store()
                self._note(report, worker, MEMORY, worker.restore(), prompts.answers)
            until(lambda: all(is_idle(daemon.status()) for _ in range(2)), "all is on disk")
            self._end_run(report, workers)
            daemon.start()
            for worker in workers:
                worker.connect(daemon.socket)
                promoted = self._promoted()
                self._note(report, worker, DISK, worker.restore(), prompts.answers)
                if self._promoted() == promoted:
                    report.errors.append(f"{worker.layout}: nothing came from disk")
                for control in worker.controls():
                    self._note(report, worker, MEMORY, worker.restore(control), prompts.answers, control)
            self._end_run(report, workers)
            return report
        finally:
            daemon.kill()

    def _end_run(self, report: AccuracyReport, workers: list[AccuracyWorker]) -> None:
        """Ends the daemon's run in order, with all that it reports about itself."""
        for worker in workers:
            worker.disconnect()
        report.errors += self._daemon.verify(payloads=True)
        if (status := self._daemon.stop()) != 0:
            report.errors.append(f"the daemon ended with status {status}")
        report.errors += bad_entries(self._daemon.log_path)

    def _promoted(self) -> int:
        return int(self._daemon.status()["disk"]["promoted"]["keys"])

    def _note(
        self,
        report: AccuracyReport,
        worker: AccuracyWorker,
        source: str,
        answered: Any,
        answers: Any,
        control: Control | None = None,
    ) -> None:
        right = (answered == answers).all(-1)
        before = sum(row.recomputed_tokens for row in report.rows if row.layout == worker.layout)
        report.add(
            Row(
                layout=worker.layout,
                source=source,
                control=control.name if control else "",
                fall=control.fall if control else 0.0,
                questions=right.numel(),
                right=int(right.sum()),
                recomputed_tokens=worker.computed - before,
                said=answered.flatten().tolist(),
            )
        )
