"""The main process of the demo with two hosts: its daemons, workers and stores, the chat, and what is killed in it."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from kvoffloadd.demo.chat import ChatTurn, chat
from kvoffloadd.testing.output import SHOWN, ProgressBar, format_ms, print_table, print_wrong, ratio
from kvoffloadd.testing.process import bad_entries
from kvoffloadd.testing.wait import until
from kvoffloadd.testing.worker import WorkerProcess
from kvoffloadd.units import format_bytes
from scripts.demo.worker import WHOLE, Answer
from scripts.harness.counters import Counters
from scripts.harness.daemon import Daemon
from scripts.harness.lab import Lab
from scripts.harness.stores import Master, MooncakeStore, Valkey

HOSTS = 2
KV_CACHE = (WHOLE, "cross-layer", 2)
START_S = TURN_S = 60.0
STORE_BYTES = 768 << 20
RESTORED_TURNS = 10
NOTICED_S = 2
"""After so long Mooncake's master believes that a store is dead."""


@dataclass(slots=True)
class TurnTotals:
    """What came of some of the turns. `fetched_keys`: from the store, by the daemons that lived to the end of them."""

    turns: int = 0
    prompt_tokens: int = 0
    known_tokens: int = 0
    restored_tokens: int = 0
    fetched_keys: int = 0

    def count(self, turn: ChatTurn, answer: Answer) -> None:
        """A turn was answered."""
        self.turns += 1
        self.prompt_tokens += turn.prompt_tokens
        self.known_tokens += turn.known_tokens
        self.restored_tokens += answer.restored_tokens


@dataclass(slots=True)
class HostsReport:
    """All figures of one demo. `shared`: with both hosts; `alone`: with the second one; `anew`: the last turns again,
    with a daemon that has nothing.
    """

    engine: str
    seed: int
    memory_bytes: int
    counters: Counters
    shared: TurnTotals = field(default_factory=TurnTotals)
    alone: TurnTotals = field(default_factory=TurnTotals)
    anew: TurnTotals = field(default_factory=TurnTotals)
    seconds: float = 0.0
    pushed_keys: int = 0
    corrupt: int = 0
    restart_s: float = 0.0
    findings: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether everything is right, and something was checked."""
        total = self.counters.total
        bad = total("wrong_bytes") + total("broken_promises") + self.corrupt
        came = self.shared.fetched_keys and self.alone.fetched_keys and self.anew.fetched_keys
        return not bad and not self.findings and not self.errors and total("verified_loads") > 0 and bool(came)

    def as_json(self) -> dict[str, object]:
        """Keys are stable."""
        counted = ("stores", "loads", "verified_loads", "wrong_bytes", "stray_bytes", "broken_promises")
        return {
            "engine": self.engine,
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "memory_bytes": self.memory_bytes,
            **{name: asdict(getattr(self, name)) for name in ("shared", "alone", "anew")},
            **{name: self.counters.total(name) for name in counted},
            "pushed_keys": self.pushed_keys,
            "corrupt": self.corrupt,
            "restart_ms": round(self.restart_s * 1e3, 1),
            "findings": self.findings[:SHOWN],
            "errors": self.errors[:SHOWN],
            "said": self.said[:SHOWN],
            "good": self.is_good,
        }

    def print(self) -> None:
        """The table, and below it each thing that is wrong."""
        total = self.counters.total
        chat_rows = [
            ("memory", format_bytes(self.memory_bytes), "of each host"),
            *_rows("two hosts", self.shared, "each turn on the other one"),
            ("pushed", f"{self.pushed_keys:,}", f"keys to {self.engine}"),
        ]
        kills = [
            ("host killed -9", "1", "worker, daemon, agent" + (", store" if self.engine == "mooncake" else "")),
            *_rows("the other one", self.alone, "with what the dead one had stored"),
            ("its daemon killed -9", format_ms(self.restart_s), "until it shared again"),
            *_rows("with no memory", self.anew, "the last turns again"),
        ]
        wrong = f"{self.corrupt} corrupt in the store, {len(self.errors)} errors"
        verdict = [
            ("verified loads", f"{total('verified_loads'):,} of {total('loads'):,}", "every byte compared"),
            ("self-audit", f"{len(self.findings)} findings", wrong),
            ("wrong bytes", f"{total('wrong_bytes'):,}", "the point of it all"),
        ]
        print_table(f"kvoffloadd demo: two hosts and {self.engine}", [chat_rows, kills, verdict], good=self.is_good)
        print_wrong(self)


def _rows(what: str, part: TurnTotals, remark: str) -> list[tuple[str, str, str]]:
    hit_rate, most = (100 * ratio(tokens, part.prompt_tokens) for tokens in (part.restored_tokens, part.known_tokens))
    return [
        (what, f"{part.turns} turns", remark),
        ("  not recomputed", f"{hit_rate:.1f} %", f"of prompt tokens; {most:.1f} % were known"),
        ("  from the store", f"{part.fetched_keys:,}", "keys"),
    ]


class HostsRun:
    """One demo, in its own folder. As a context: nothing stays behind, however it ends."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._folder = folder
        self._turns = chat(given.seed, given.turns, HOSTS)
        self._counters = Counters(folder / "counters", HOSTS)
        self._report = HostsReport(given.engine, given.seed, given.memory, self._counters)
        self._stack = ExitStack()
        self._lab = self._stack.enter_context(Lab(folder, HOSTS, isolated=False))
        self._stores: list[MooncakeStore] = []
        self._daemons: list[Daemon] = []
        self._workers: dict[int, WorkerProcess] = {}
        self._counted: dict[int, tuple[int, int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> HostsReport:
        """Raises DaemonError, KvOffloadError or OSError if it can't be carried out."""
        report = self._report
        shared = self._start_stores()
        for row in range(HOSTS):
            self._start_host(row, shared)
        began = time.monotonic()
        with ProgressBar("demo-remote", len(self._turns)) as live:
            half = len(self._turns) // 2
            for row, turn in enumerate(self._turns):
                if row == half:
                    self._end_part(report.shared, self._daemons)
                    self._kill_host()
                part, worker = (report.shared, turn.worker) if row < half else (report.alone, 1)
                part.count(turn, self._answer(worker, turn, store=True))
                report.seconds = time.monotonic() - began
                live.show(row + 1, f"{self._counters.total('wrong_bytes')} wrong bytes")
                if report.seconds > self._given.seconds and row > half:
                    break
        self._end_part(report.alone, self._daemons[1:])
        self._restart()
        answered = self._turns[: report.shared.turns + report.alone.turns]
        for turn in list({turn.conversation: turn for turn in answered}.values())[-RESTORED_TURNS:]:
            report.anew.count(turn, self._answer(1, turn, store=False))
        self._end_part(report.anew, self._daemons[1:])
        self._end()
        return report

    # --- hosts ---

    def _start_stores(self) -> dict[str, str]:
        """A store on each host, or a server for both; settings of daemons."""
        if self._given.engine == "valkey":
            server = Valkey(self._lab.hub, self._folder, memory=f"{STORE_BYTES >> 20}mb")
            self._stack.enter_context(server)
            return {"valkey.url": f"redis://{server.place}"}
        master = Master(self._lab.hub, self._folder, f"--client_ttl={NOTICED_S}")
        memory = f"{STORE_BYTES >> 20}MB"
        self._stores = [MooncakeStore(host, self._folder, master, memory) for host in self._lab.hosts]
        for process in (master, *self._stores):
            self._stack.enter_context(process)
        return {"mooncake.master": master.place, "mooncake.replicas": str(HOSTS)}

    def _start_host(self, row: int, shared: dict[str, str]) -> None:
        folder = self._folder / f"host-{row}"
        folder.mkdir()
        settings = {
            "log.level": "warning",
            "remote.engine": self._given.engine,
            "remote.push": "seal",
            "remote.lookup_s": "1",
            "remote.fetch_s": "10",
            "mooncake.host": self._lab.hosts[row].address,
            **shared,
        }
        daemon = Daemon(folder, self._given.memory, settings)
        self._stack.callback(daemon.kill)
        self._daemons.append(daemon)
        daemon.start()
        self._await_sharing(daemon)
        options: dict[str, Any] = {
            "socket": str(daemon.socket),
            "counters": str(self._folder / "counters"),
            "rows": HOSTS,
            "row": row,
            "seed": self._given.seed,
            "kv_cache": KV_CACHE,
            "memory_name": f"kvo-r{os.getpid()}-{row}-",
        }
        worker = WorkerProcess("scripts.demo.worker", options, self._log(row))
        self._stack.callback(worker.reap)
        self._stack.callback(worker.kill)
        self._workers[row] = worker
        worker.answer(START_S)

    def _log(self, row: int) -> Path:
        return self._folder / f"worker-{row}.log"

    def _await_sharing(self, daemon: Daemon) -> None:
        until(lambda: daemon.status()["remote"]["state"] == "ok", "the daemon has its agent", START_S, every_s=0.05)

    def _kill_host(self) -> None:
        """The first one, with all that it has."""
        self._workers.pop(0).kill()
        self._daemons[0].kill()
        if self._stores:
            self._stores[0].kill()
            time.sleep(NOTICED_S + 1)

    def _restart(self) -> None:
        """SIGKILL the daemon that is left, and start it again: its memory is gone."""
        daemon = self._daemons[1]
        began = time.monotonic()
        daemon.kill()
        daemon.start()
        self._await_sharing(daemon)
        self._answer(1, self._turns[0], store=False)  # its worker comes back, and with it the namespace
        until(lambda: any(_remote(daemon)["eras"].values()), "the namespace is shared again", START_S, every_s=0.05)
        self._report.restart_s = time.monotonic() - began

    # --- turns ---

    def _answer(self, row: int, turn: ChatTurn, *, store: bool) -> Answer:
        worker = self._workers[row]
        worker.ask({"turn": asdict(turn), "store": store})
        return Answer(**worker.answer(TURN_S))

    def _end_part(self, part: TurnTotals, daemons: list[Daemon]) -> None:
        """Wait until what was stored is shared, and note what the daemons have counted since the last time."""
        for daemon in daemons:
            until(partial(_has_pushed_all, daemon), "all is pushed", START_S, every_s=0.05)
            remote = _remote(daemon)
            counted = (remote["fetched"]["keys"], remote["pushed"]["keys"], sum(remote["corrupt"].values()))
            before = self._counted.get(daemon.pid, (0, 0, 0))
            self._counted[daemon.pid] = counted
            fetched, pushed, corrupt = (now - then for now, then in zip(counted, before, strict=True))
            part.fetched_keys += fetched
            self._report.pushed_keys += pushed
            self._report.corrupt += corrupt

    def _end(self) -> None:
        """Ends the daemons in order, and audits what is left."""
        report, daemon = self._report, self._daemons[1]
        for row, worker in self._workers.items():
            if (status := worker.end()) != 0:
                report.errors.append(f"worker {row} ended with status {status}")
            report.said += self._log(row).read_text(encoding="utf-8", errors="replace").splitlines()
        report.findings += daemon.verify(payloads=True)
        if (status := daemon.stop()) != 0:
            report.errors.append(f"the daemon ended with status {status}")
        for each in self._daemons:
            report.errors += bad_entries(each.log_path)


def _has_pushed_all(daemon: Daemon) -> bool:
    return not _remote(daemon)["backlog_bytes"]


def _remote(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["remote"]
    return found
