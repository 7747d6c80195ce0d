"""Attack a daemon with all that a peer may send, next to an honest worker of another user.

Each attack is made alone and then all at once, over and over, until the time is over: peers that hoard what they may
have, or strike in the midst of something. The honest worker stores, loads and compares all the while; an operator asks
for status and scrapes metrics. The table has p50/p99 in milliseconds of a ping, of a cycle of a store and a load, and
from a store to its event, and the share of keys that hit, during each attack. At the end nothing may have ended, be
lost, or still be charged to who has left. As root the attackers are other users; otherwise they are the same as the
worker, and what uses up a user's caps is left out. Exit status 0 only if all that held; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from kvoffloadd.client import Client
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.testing.disk import disk_settings
from kvoffloadd.testing.leaks import STAYS
from kvoffloadd.testing.output import ProgressBar, format_ms
from kvoffloadd.testing.program import carry_out
from kvoffloadd.testing.wait import HANG_S, within
from scripts.fuzz.attackers import ATTACKS, Attackers
from scripts.fuzz.bystander import Samples
from scripts.fuzz.enemy import Deeds, Target
from scripts.fuzz.trial import Trial, TrialReport
from scripts.harness.beside import Beside
from scripts.harness.daemon import Daemon
from scripts.harness.program import add_seed, command_line, seed_of

BYSTANDER_UID = 61000
ATTACKER_UIDS = (61001, 61002)
"""Users that most hosts do not have: the daemon of the trial alone lets them in."""
RSS_GROWTH_MAX = len(ATTACKER_UIDS) * (192 << 20)
"""What a user may leave unread, and unfinished: 128 MiB and 64 MiB, by the daemon's own limits."""
NEEDS_ANOTHER_USER = {
    "long_labels", "page_tables", "mappings", "pins_of_everything", "reservations", "drains", "hung_in_a_frame",
    "unread_replies", "comes_and_goes",
}  # fmt: skip
"""What uses up all that its user may have: the worker would be refused rightly if it were the same one."""
ALONE, TOGETHER, AUDIT = "nothing", "all at once", "the audit"
PHASE_S_MIN, PHASE_S_MAX = 0.3, 5.0
WEIGHT = {ALONE: 2, TOGETHER: 6}
"""Of a phase's time; of an attack 1."""
OPERATOR_EVERY_S = 0.5
DISK_BYTES = 128 << 20
PROBLEMS_KEPT = 20


class Operator(Beside):
    """Asks for status, and scrapes, while the context lasts. `problems`: what was not answered."""

    def __init__(self, daemon: Daemon, port: int) -> None:
        super().__init__("operator")
        self.problems: list[str] = []
        self.reports = self.scrapes = 0
        self._socket = daemon.socket
        self._port = port

    def run(self) -> None:
        try:
            with Client(self._socket, namespace=None, role="observer", deadline_s=HANG_S) as client:
                while not self.ending.wait(OPERATOR_EVERY_S):
                    client.status()
                    self.reports += 1
                    if within(self._scrape, HANG_S, every_s=0.05) is None:
                        self.problems.append(f"no scrape was answered within {HANG_S:.0f} s")
        except (KvOffloadError, OSError) as error:
            self.problems.append(f"the operator: {type(error).__name__}: {error}")

    def _scrape(self) -> bool:
        """Whether it was answered. Who was hung up on comes again, as Prometheus does."""
        try:
            with socket.create_connection(("127.0.0.1", self._port), HANG_S) as peer:
                peer.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                text = b""
                while more := peer.recv(1 << 16):
                    text += more
        except ConnectionError:
            return False
        self.scrapes += b"kvoffloadd_" in text
        return b"kvoffloadd_" in text


@dataclass
class Siege:
    """The phases, one after the other. `spans`: when each was, by the monotonic clock; `worst_cpu_s`: of a turn of the
    daemon's loop, and `worst_beside` the phase that it was in.
    """

    trial: Trial
    attackers: Attackers
    names: Sequence[str]
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    rounds: int = 0
    worst_cpu_s: float = 0.0
    worst_beside: str = ""

    def run(self, seconds: float, rng: random.Random, live: ProgressBar) -> None:
        """Whole rounds, until the time is over; at least one."""
        begun = time.monotonic()
        weights = sum(WEIGHT.get(phase, 1) for phase in (ALONE, *self.names, TOGETHER))
        phase_s = min(max(seconds / weights, PHASE_S_MIN), PHASE_S_MAX)
        while not self.rounds or time.monotonic() < begun + seconds:
            for phase in (ALONE, *rng.sample(self.names, len(self.names)), TOGETHER):
                if self.rounds and time.monotonic() > begun + seconds:
                    return
                live.show(time.monotonic() - begun, f"round {self.rounds + 1}: {phase}")
                self._phase(phase, phase_s * WEIGHT.get(phase, 1))
                if len(self.problems) > PROBLEMS_KEPT or not self.trial.daemon.alive:
                    return
            self.rounds += 1

    def _phase(self, phase: str, seconds: float) -> None:
        begun = time.monotonic()
        if phase == ALONE:
            time.sleep(seconds)
        else:
            with self.attackers.make(self.names if phase == TOGETHER else [phase]):
                time.sleep(seconds)
        self.spans.setdefault(phase, []).append((begun, time.monotonic()))
        self._note_worst_turn(phase)
        self._audit(phase)
        self._note_worst_turn(AUDIT)

    def _note_worst_turn(self, phase: str) -> None:
        worst_s = self.trial.daemon.status()["loop"]["worst_cpu_s"]
        if worst_s > self.worst_cpu_s:
            self.worst_cpu_s, self.worst_beside = worst_s, phase

    def _audit(self, phase: str) -> None:
        """The attackers have left: nothing is charged to them, and the tables are right."""
        daemon = self.trial.daemon
        left: dict[str, dict[str, int]] = {}

        def nothing() -> bool:
            accounts = daemon.status()["accounts"]
            left.clear()
            for uid in map(str, ATTACKER_UIDS):
                used = {name: amount for name, amount in accounts.get(uid, {}).items() if name not in STAYS}
                left.update({uid: used} if used else {})
            return not left

        if within(nothing, HANG_S, every_s=0.02) is None:
            self.problems.append(f"after {phase}: {left} is still charged")
        self.problems += [f"after {phase}: {finding}" for finding in daemon.verify()]


@dataclass(frozen=True)
class SiegeReport(TrialReport):
    """How it went."""

    siege: Siege
    operator: Operator
    seconds: float

    @property
    def is_good(self) -> bool:
        """Each attack was made, and the operator was served, too."""
        made = all(self.deeds(name).asked for name in self.siege.names)
        return super().is_good and made and self.operator.reports > 0 and self.operator.scrapes > 0

    def deeds(self, name: str) -> Deeds:
        return self.siege.attackers.deeds[name]

    def samples(self, phase: str) -> Samples:
        """Returns what the bystander measured during it."""
        return self.trial.samples.during(self.siege.spans.get(phase, []))

    def as_json(self) -> dict[str, object]:
        phases = {}
        for phase in (ALONE, *self.siege.names, TOGETHER):
            deeds, samples = self.siege.attackers.deeds.get(phase, Deeds()), self.samples(phase)
            phases[phase] = {
                "asked": deeds.asked,
                "refusals": dict(sorted(deeds.refusals.items())),
                "pings": len(samples.pings),
                "cycles": len(samples.cycles),
                "hits": float(samples.cycles[:, 2].mean()) if len(samples.cycles) else None,
                **_percentiles("ping", samples.pings),
                **_percentiles("cycle", samples.cycles),
                **_percentiles("event", samples.events),
            }
        return super().as_json() | {
            "phases": phases,
            "rounds": self.siege.rounds,
            "seconds": round(self.seconds, 3),
            "as_other_users": bool(os.getuid() == 0),
            "status_reports": self.operator.reports,
            "scrapes": self.operator.scrapes,
            "loop_worst_cpu_s": self.siege.worst_cpu_s,
            "loop_worst_beside": self.siege.worst_beside,
        }

    def print(self) -> None:
        rows = [("attack", "ping, ms", "cycle; event; hits; requests")]
        for phase in (ALONE, *sorted(self.siege.names), TOGETHER):
            deeds, samples = self.siege.attackers.deeds.get(phase, Deeds()), self.samples(phase)
            hits = f"{100 * samples.cycles[:, 2].mean():.0f} %" if len(samples.cycles) else "-"
            figures = f"{_pair(samples.cycles)}; {_pair(samples.events)}; {hits}; {deeds.asked:,}"
            rows.append((phase.replace("_", " "), _pair(samples.pings), figures))
        beside = self.siege.worst_beside.replace("_", " ")
        turn = ("worst turn of the loop", format_ms(self.siege.worst_cpu_s), f"of CPU time, beside {beside}")
        served = ("operator", f"{self.operator.reports:,}", f"reports; {self.operator.scrapes:,} scrapes")
        time_taken = ("time", f"{self.seconds:,.0f} s", f"{self.siege.rounds} rounds, seed {self.trial.seed}")
        self.print_sections("hostile", [*rows, turn, served, time_taken], [])


def _percentiles(name: str, samples: np.ndarray) -> dict[str, float | None]:
    if not len(samples):
        return {f"{name}_p50_s": None, f"{name}_p99_s": None}
    p50, p99 = np.percentile(samples[:, 1], (50, 99)).tolist()
    return {f"{name}_p50_s": p50, f"{name}_p99_s": p99}


def _pair(samples: np.ndarray) -> str:
    """p50/p99 in milliseconds."""
    if not len(samples):
        return "-"
    p50, p99 = 1e3 * np.percentile(samples[:, 1], (50, 99))
    return f"{p50:.1f}/{p99:.0f}"


def run(given: argparse.Namespace, seed: int, folder: Path) -> SiegeReport:
    """Everything. Raises DaemonError, KvOffloadError, OSError."""
    is_root = os.getuid() == 0
    port = _free_port()
    folder.chmod(0o755)  # others connect
    (folder / "store").mkdir()
    with Trial(folder, seed, _settings(folder, port), ["corrupt_every=1"] * given.plant_corruption) as trial:
        daemon = trial.daemon
        target = Target(daemon.socket, port, ATTACKER_UIDS if is_root else ())
        operator = Operator(daemon, port)
        begun = time.monotonic()
        with (
            trial.beside_bystander("hostile", uid=BYSTANDER_UID if is_root else None),
            operator,
            Attackers(target, seed, folder / "attackers.log") as attackers,
            ProgressBar("attacking", given.seconds) as live,
        ):
            siege = Siege(trial, attackers, given.only)
            siege.run(given.seconds, random.Random(seed), live)
        seconds = time.monotonic() - begun
    problems = [*siege.problems, *operator.problems, *(p for deeds in attackers.deeds.values() for p in deeds.problems)]
    return SiegeReport(trial, problems, RSS_GROWTH_MAX, siege, operator, seconds)


def _settings(folder: Path, port: int) -> dict[str, str]:
    """Small caps are reached soon. A disk and a store are there, which pins and prefetches ask."""
    return {
        "memory.slab_bytes": "1MiB",
        "server.allowed_uids": str([BYSTANDER_UID, *ATTACKER_UIDS]),
        "server.socket_mode": "0o666",
        "server.partial_frame_s": "1.0",
        "metrics.listen": f"localhost:{port}",
        "limits.leases": "200000",
        "limits.fds": "2048",
        "remote.engine": "memory",
        "remote.directory": str(folder / "store"),
        "remote.push": "never",
        **disk_settings(folder / "disk", DISK_BYTES),
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main() -> int:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=120.0, help="of whole rounds of all attacks (default: %(default).0f)")
    add("--only", nargs="+", choices=sorted(ATTACKS), metavar="ATTACK", help=", ".join(sorted(ATTACKS)))
    add("--plant-corruption", action="store_true", help="let the daemon flip bits in loads: this must be noticed")
    add_seed(parser)
    given = parser.parse_args()
    if given.seconds <= 0:
        parser.error("--seconds: above 0")
    possible = sorted(ATTACKS if os.getuid() == 0 else ATTACKS.keys() - NEEDS_ANOTHER_USER)
    given.only = [name for name in given.only or possible if name in possible]
    if not given.only:
        parser.error(f"--only: as another user than root, of {', '.join(possible)}")
    return carry_out("hostile", partial(run, given, seed_of(given, "hostile")), as_json=given.json)
