"""The main process of the demo: a daemon, two workers, a chat; one worker killed in the middle, then the daemon."""

from __future__ import annotations

import argparse
import os
import select
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from kvoffloadd.demo.chat import ChatTurn, chat
from kvoffloadd.demo.kvcache import bytes_of
from kvoffloadd.demo.report import DemoReport
from kvoffloadd.demo.worker import TurnAnswer
from kvoffloadd.testing.daemon import OwnDaemon
from kvoffloadd.testing.disk import disk_settings, used_bytes
from kvoffloadd.testing.leaks import held, leaks, unreturned_slots
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import bad_entries, unmapped_within
from kvoffloadd.testing.worker import WorkerProcess

WORKERS = 2
START_S = TURN_S = 60.0
UNMAP_LIMIT_S = 30.0
LOOKAHEAD = 32
RESTORED_TURNS = 40
MIB = 1 << 20
DISK_BYTES_MIN = 64 * MIB


class Run:
    """One demo, in a private folder, with another one for the disk tier. It leaves nothing behind, however it ends."""

    def __init__(self, given: argparse.Namespace, folder: Path, disk_folder: Path) -> None:
        self._given = given
        self._folder = folder
        self._rng = np.random.default_rng([given.seed, 3])
        self._memory_prefix = f"kvo-d{os.getpid()}-"
        self._workers: dict[int, WorkerProcess] = {}
        self._busy: dict[int, ChatTurn] = {}
        self._turns = chat(given.seed, given.turns, WORKERS)
        longest = {turn.conversation: turn.total_tokens for turn in self._turns}
        chat_bytes = sum(map(bytes_of, longest.values()))
        disk_bytes = max(2 * chat_bytes, DISK_BYTES_MIN) // MIB * MIB
        self._report = DemoReport(given.seed, given.memory, chat_bytes, disk_bytes)
        self._disk = disk_folder / "root"
        self._daemon = OwnDaemon(
            folder, given.memory, {"log.level": "warning", **disk_settings(self._disk, disk_bytes)}
        )

    def run(self) -> DemoReport:
        """Runs the demo. Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
        daemon, report = self._daemon, self._report
        try:
            daemon.start()
            before = held(daemon.observer, daemon.pid, self._memory_prefix)
            for row in range(WORKERS):
                self._start_worker(row, 0)
            self._chat()
            self._restart()
            self._restore()
            report.note_disk(daemon.status(), used_bytes(self._disk))
            self._end_workers()
            report.findings += daemon.verify(payloads=True)
            report.leaks += leaks(daemon.observer, daemon.pid, self._memory_prefix, before)
            report.leaks += unreturned_slots(daemon.observer)
            if (status := daemon.stop()) != 0:
                report.errors.append(f"the daemon ended with status {status}")
            report.errors += bad_entries(daemon.log_path)
            return report
        finally:
            for worker in self._workers.values():
                worker.kill()
                worker.reap()
            daemon.kill()

    def _start_worker(self, row: int, generation: int) -> None:
        options = {
            "socket": str(self._daemon.socket),
            "seed": self._given.seed,
            "memory_name": f"{self._memory_prefix}{row}-{generation}-",
        }
        self._workers[row] = WorkerProcess("kvoffloadd.demo.worker", options, self._log(row))
        self._workers[row].answer(START_S)

    def _log(self, row: int) -> Path:
        return self._folder / f"worker-{row}.log"

    def _end_workers(self) -> None:
        for row, worker in self._workers.items():
            if (status := worker.end()) != 0:
                self._report.errors.append(f"worker {row} ended with status {status}")
            self._report.said += self._log(row).read_text(encoding="utf-8", errors="replace").splitlines()

    # --- turns ---

    def _chat(self) -> None:
        began = time.monotonic()
        pending = list(self._turns)
        with ProgressBar("demo", len(self._turns)) as live:
            for turn, answer in self._answers(pending, store=True):
                self._report.count(turn, answer)
                self._report.seconds = time.monotonic() - began
                if self._report.seconds > self._given.seconds:
                    pending.clear()
                live.show(self._report.turns, self._report.figures())

    def _restore(self) -> None:
        """Repeats the last turn of each conversation, as far as the workers answer."""
        last = {turn.conversation: turn for turn in self._turns[: self._report.turns]}
        for _, answer in self._answers(list(last.values())[-RESTORED_TURNS:], store=False):
            self._report.count_after(answer)

    def _answers(self, pending: list[ChatTurn], *, store: bool) -> Iterator[tuple[ChatTurn, TurnAnswer]]:
        """Yields turns and their answers, in the order of the answers. In the middle of the chat worker 0 is killed
        while it is at a turn.
        """
        while pending or self._busy:
            for row in self._workers.keys() - self._busy.keys():
                if (turn := self._next_turn(row, pending)) is not None:
                    pending.remove(turn)
                    self._busy[row] = turn
                    self._workers[row].ask({"turn": asdict(turn), "store": store})
            if store and not self._report.kills and self._report.turns >= len(self._turns) // 2 and 0 in self._busy:
                pending.insert(0, self._kill_worker(0))
                continue
            workers = {row: self._workers[row] for row in self._busy}
            ready, _, _ = select.select(list(workers.values()), [], [], TURN_S)
            for row, worker in workers.items():
                if worker in ready or not ready:  # none within the time: the first one raises the error
                    answer = TurnAnswer(**worker.answer(TURN_S if ready else 0.0))
                    yield self._busy.pop(row), answer

    def _next_turn(self, row: int, pending: list[ChatTurn]) -> ChatTurn | None:
        """Returns the first turn for this worker in a conversation without an earlier turn open."""
        waiting = {turn.conversation for turn in self._busy.values()}
        for turn in pending[:LOOKAHEAD]:
            if turn.worker == row and turn.conversation not in waiting:
                return turn
            waiting.add(turn.conversation)
        return None

    # --- kills ---

    def _kill_worker(self, row: int) -> ChatTurn:
        """Kills a worker with SIGKILL while it is at a turn, and returns that turn for the process that takes its
        place.
        """
        time.sleep(float(self._rng.uniform(0.001, 0.02)))
        self._workers[row].kill()
        unmap_s = unmapped_within(self._daemon.pid, f"{self._memory_prefix}{row}-", UNMAP_LIMIT_S)
        self._workers[row].reap()
        self._report.kills += 1
        self._report.unmap_s = unmap_s
        if unmap_s is None:
            self._report.errors.append(f"the killed worker's memory was mapped for more than {UNMAP_LIMIT_S:.0f} s")
        turn = self._busy.pop(row)
        self._start_worker(row, 1)
        # The keys that it had stored of the turn before are known, too.
        return replace(turn, known_tokens=turn.prompt_tokens)

    def _restart(self) -> None:
        """Kills the daemon with SIGKILL, and starts it again; its memory is gone, and the workers are still there."""
        daemon, report = self._daemon, self._report
        status = daemon.status()
        report.note_disk(status, used_bytes(self._disk))
        report.evictions = status["cache"]["keys_evicted"]
        began = time.monotonic()
        daemon.kill()
        daemon.start()
        report.restart_s = time.monotonic() - began
        report.keys_found = daemon.status()["disk"]["keys"]
