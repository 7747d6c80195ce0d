"""The main process of the demo: a daemon, two workers, a chat; one worker killed in the middle, then the daemon."""

from __future__ import annotations

import os
import select
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.client import Client
from scripts.demo.chat import Turn, chat
from scripts.demo.report import Report
from scripts.demo.worker import Answer, Speed, gpt_oss_20b
from scripts.demo.worker import Options as WorkerOptions
from scripts.harness.counters import Counters
from scripts.harness.daemon import Daemon
from scripts.harness.disk import disk_settings, used_bytes
from scripts.harness.leaks import Used, held, leaks, unreturned_slots
from scripts.harness.output import Live
from scripts.harness.process import bad_entries, unmapped_within
from scripts.harness.watch import DaemonCounters
from scripts.harness.worker import WorkerProcess

if TYPE_CHECKING:
    from pathlib import Path

WORKERS = 2
START_S = 60.0
TURN_S = 60.0
UNMAP_LIMIT_S = 30.0
VERIFY_S = 120.0
LOOKAHEAD = 32
PROBE_ROUNDS = 7
RESTORED_TURNS = 40
MIB = 1 << 20
DISK_BYTES_MIN = 64 * MIB
CACHE_BLOCKS = 576
"""Of each worker: enough for the longest conversation in both groups."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    seconds: float
    turns: int
    memory_bytes: int
    kv_heads: int
    seed: int


class Run:
    """One demo, in a folder of its own, and another one for the disk tier. Nothing stays behind, however it ends."""

    def __init__(self, options: Options, folder: Path, disk_folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._rng = np.random.default_rng([options.seed, 3])
        self._counters = Counters(folder / "counters", WORKERS)
        self._memory_prefix = f"kvo-d{os.getpid()}-"
        self._workers: dict[int, WorkerProcess] = {}
        self._names: dict[int, str] = {}
        self._asked: dict[int, Turn] = {}
        self._turns = chat(options.seed, options.turns, WORKERS)
        self._pending = list(self._turns)
        self._report = Report(options.seed, options.memory_bytes, options.kv_heads, self._counters)
        geometry = gpt_oss_20b(options.kv_heads)
        longest = {turn.conversation: turn.total_tokens for turn in self._turns}
        self._report.chat_bytes = sum(map(geometry.bytes_of, longest.values()))
        self._disk = disk_folder / "root"
        self._report.disk_bytes = capacity = max(2 * self._report.chat_bytes, DISK_BYTES_MIN) // MIB * MIB
        settings = {"log.level": "warning", **disk_settings(self._disk, capacity)}
        self._daemon = Daemon(folder, options.memory_bytes, settings)

    def run(self) -> Report:
        """Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
        try:
            self._daemon.start()
            with Client(self._daemon.socket, namespace=None, role="observer", deadline_s=30.0) as observer:
                before = held(observer, self._daemon.pid, self._memory_prefix)
                for row in range(WORKERS):
                    self._start_worker(row, 0)
                self._chat()
                self._report.note_chat()
                self._restart(observer)
                self._restore()
                after = observer.status()["disk"]
                self._report.disk_read_bytes = after["promoted"]["bytes"]
                self._report.note_disk(after, used_bytes(self._disk))
                self._measure_speed()
                self._end_workers()
                self._audit(observer, before)
            if (status := self._daemon.stop()) != 0:
                self._report.errors.append(f"the daemon ended with status {status}")
            self._report.errors += bad_entries(self._daemon.log_path)
            return self._report
        finally:
            for worker in self._workers.values():
                worker.kill()
                worker.reap()
            self._daemon.kill()

    def _start_worker(self, row: int, generation: int) -> None:
        options = self._options
        self._names[row] = f"{self._memory_prefix}{row}-{generation}-"
        worker_options = WorkerOptions(
            socket=str(self._daemon.socket),
            counters=str(self._folder / "counters"),
            rows=WORKERS,
            row=row,
            seed=options.seed,
            kv_heads=options.kv_heads,
            cache_blocks=CACHE_BLOCKS,
            memory_name=self._names[row],
        )
        self._workers[row] = WorkerProcess("scripts.demo.worker", asdict(worker_options), self._log(row))
        self._workers[row].answer(START_S)

    def _log(self, row: int) -> Path:
        return self._folder / f"worker-{row}.log"

    # --- the chat ------------------------------------------------------------------------------------

    def _chat(self) -> None:
        began = time.monotonic()
        with Live("demo", len(self._turns)) as live:
            while self._asked or self._pending:
                self._ask_idle()
                if not self._report.kills and self._report.turns >= len(self._turns) // 2 and 0 in self._asked:
                    self._kill_worker(0)
                    continue
                self._take_answers()
                if time.monotonic() - began > self._options.seconds:
                    self._pending.clear()
                live.show(self._report.turns, self._report.figures())
        self._report.seconds = time.monotonic() - began

    def _ask_idle(self) -> None:
        for row, worker in self._workers.items():
            if row not in self._asked and (turn := self._next_turn(row)) is not None:
                self._pending.remove(turn)
                self._asked[row] = turn
                worker.ask(asdict(turn))

    def _next_turn(self, row: int) -> Turn | None:
        """The first turn for this worker whose conversation waits for no earlier answer."""
        waiting = {turn.conversation for turn in self._asked.values()}
        for turn in self._pending[:LOOKAHEAD]:
            if turn.worker == row and turn.conversation not in waiting:
                return turn
            waiting.add(turn.conversation)
        return None

    def _take_answers(self) -> None:
        asked = {row: self._workers[row] for row in self._asked}
        ready, _, _ = select.select(list(asked.values()), [], [], TURN_S)
        for row, worker in asked.items():
            if worker in ready or not ready:  # nobody within the time: let the first one say so
                self._report.count(self._asked[row], Answer(**worker.answer(TURN_S if ready else 0.0)))
                del self._asked[row]

    def _kill_worker(self, row: int) -> None:
        """SIGKILL it while it is at a turn; another process takes its place and that turn."""
        worker = self._workers[row]
        time.sleep(float(self._rng.uniform(0.001, 0.02)))
        worker.kill()
        unmap_s = unmapped_within(self._daemon.pid, self._names[row], UNMAP_LIMIT_S)
        worker.reap()
        self._report.kills += 1
        self._report.unmap_s = unmap_s
        if unmap_s is None:
            self._report.errors.append(f"the killed worker's memory was mapped for more than {UNMAP_LIMIT_S:.0f} s")
        # What it had stored of its turn before is known, too.
        turn = self._asked.pop(row)
        self._pending.insert(0, replace(turn, known_tokens=turn.prompt_tokens))
        self._start_worker(row, 1)

    # --- afterwards ----------------------------------------------------------------------------------

    def _measure_speed(self) -> None:
        self._workers[0].ask({"probe": PROBE_ROUNDS})
        self._report.speed = Speed(**self._workers[0].answer(TURN_S))

    def _restart(self, observer: Client) -> None:
        """SIGKILL the daemon, and start it again; its memory is gone, and the workers are still there."""
        self._report.daemon = DaemonCounters.of(status := observer.status())
        self._report.note_disk(status["disk"], used_bytes(self._disk))
        began = time.monotonic()
        self._daemon.kill()
        self._daemon.start()
        self._report.restart_s = time.monotonic() - began
        self._report.keys_found = observer.status()["disk"]["keys"]

    def _restore(self) -> None:
        """The last turn of each conversation again, as far as they come."""
        last = {turn.conversation: turn for turn in self._turns[: self._report.turns]}
        waiting = list(last.values())[-RESTORED_TURNS:]
        began = time.monotonic()
        asked: dict[int, Turn] = {}
        while waiting or asked:
            for row, worker in self._workers.items():
                if row not in asked and waiting:
                    asked[row] = waiting.pop()
                    worker.ask({"restore": asdict(asked[row])})
            ready, _, _ = select.select([self._workers[row] for row in asked], [], [], TURN_S)
            for row in [row for row in asked if self._workers[row] in ready or not ready]:
                answer = Answer(**self._workers[row].answer(TURN_S if ready else 0.0))
                self._report.count_restored(answer)
                del asked[row]
        self._report.restore_s = time.monotonic() - began

    def _end_workers(self) -> None:
        for row, worker in self._workers.items():
            if (status := worker.end()) != 0:
                self._report.errors.append(f"worker {row} ended with status {status}")
            self._report.said += self._log(row).read_text(encoding="utf-8", errors="replace").splitlines()

    def _audit(self, observer: Client, before: Used) -> None:
        observer.drain(30.0, everything=True)
        self._report.leaks += leaks(observer, self._daemon.pid, self._memory_prefix, before)
        self._report.findings += observer.verify(payloads=True, deadline_s=VERIFY_S).findings
        self._report.leaks += unreturned_slots(observer)
