#!/usr/bin/env python3
"""Fuzz a daemon over its socket: random, mutated and truncated frames in many sessions, beside an honest worker.

Every whole frame must be answered once, or its session be closed; the daemon must live, its memory and descriptors
stay bounded, its self-audit find nothing; the honest worker must be served all the while, and with right bytes. Exit
status 0 only if all that held; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from _bystander import MEMORY_NAME, Bystander, Cost, excerpts
from _daemon import DaemonError, DaemonProcess, obey_signals, private_folder
from _fuzz_frames import MEMORY_BYTES, Frame, Names, Requests, Spoiler, truncations
from _leaks import held, leaks
from _output import Live, format_ms, print_json, print_table
from _raw_peer import RawPeer, SilenceError

from kvoffloadd.client import Client
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.sharedmem import create_memfd
from kvoffloadd.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _raw_peer import Fields

EXIT_BAD, EXIT_INTERRUPTED = 1, 130
DAEMON_MEMORY_BYTES = 64 << 20
RSS_GROWTH_MAX = 64 << 20
FDS_GROWTH_MAX = 64 * 8
REPLY_S = 20.0
IN_STEP = 0xF00DF00D
"""The `seq` of a ping that no fuzzed frame has."""
TRUNCATIONS_ABOUT = 4500
FRAMES_PER_SESSION = 40
PROBLEMS_KEPT = 20
WARM_UP_FRAMES = 300


@dataclass(slots=True)
class Tally:
    """What was sent, and what became of it. `replies`: by type, errors by code."""

    frames: int = 0
    truncations: int = 0
    sessions: int = 0
    answered: int = 0
    closed: int = 0
    unanswered: int = 0
    replies: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def problem(self, what: str) -> None:
        """Something that must not be."""
        self.unanswered += 1
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(what)


class Descriptors:
    """What goes with frames: memory that may be attached, and things that may not."""

    def __init__(self) -> None:
        self.memory = create_memfd("fuzz", MEMORY_BYTES)
        reader, writer = os.pipe()
        here, there = socket.socketpair()
        self._strange = [
            os.open(f"/proc/self/fd/{self.memory}", os.O_RDONLY), os.open("/dev/null", os.O_RDWR), reader, writer,
            here.detach(), there.detach(), os.memfd_create("fuzz_empty"),
        ]  # fmt: skip

    def some(self, count: int, rng: random.Random) -> list[int]:
        """Mostly good ones."""
        return [self.memory if rng.random() < 0.7 else rng.choice(self._strange) for _ in range(count)]

    def close(self) -> None:
        """All."""
        for fd in (self.memory, *self._strange):
            os.close(fd)


class Fuzzer:
    """Sessions that misbehave, in some threads. A session's contents are a function of the seed and its number.

    Ownership: `tally` and `_next` under `_lock`.
    """

    def __init__(self, path: Path, seed: int, tally: Tally) -> None:
        self.tally = tally
        self._path = path
        self._seed = seed
        self._descriptors = Descriptors()
        self._lock = threading.Lock()
        self._next = 0

    def close(self) -> None:
        """Its descriptors."""
        self._descriptors.close()

    def run(self, frames: int, threads: int, live: Live) -> None:
        """Random frames, until so many were sent."""
        end = self.tally.frames + frames
        workers = [threading.Thread(target=self._fuzz, args=(end,), daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            live.show(self.tally.frames, f"{self.tally.sessions:,} sessions")
            time.sleep(0.05)

    def truncate(self, live: Live, every: int) -> None:
        """Every truncation of a right frame of every type (or one of `every`), as they come."""
        requests = Requests(self._rng(), Names("fuzz-truncated"))
        frames = [frame for at, frame in enumerate(truncations(requests)) if at % every == 0]
        while frames and len(self.tally.problems) < PROBLEMS_KEPT:
            rng = self._rng()
            with RawPeer(self._path) as peer:
                self._equip(peer, requests.names, rng, registered=False)
                used = self._attempt(peer, iter(frames), rng)
            del frames[:used]
            self.tally.truncations += used
            live.show(self.tally.frames + self.tally.truncations, f"{self.tally.sessions:,} sessions")

    def _rng(self) -> random.Random:
        with self._lock:
            self._next += 1
            self.tally.sessions += 1
            return random.Random(f"{self._seed}/{self._next}")

    def _fuzz(self, end: int) -> None:
        while self.tally.frames < end and len(self.tally.problems) < PROBLEMS_KEPT:
            rng = self._rng()
            names = Names(f"fuzz-{rng.randrange(6)}")
            requests = Requests(rng, names)
            with RawPeer(self._path) as peer:
                if rng.random() < 0.95:
                    self._equip(peer, names, rng, registered=rng.random() < 0.7)
                spoiler = Spoiler(rng, requests)
                count = rng.randrange(1, FRAMES_PER_SESSION)
                used = self._attempt(peer, (spoiler.frame() for _ in range(count)), rng)
            with self._lock:
                self.tally.frames += used

    def _equip(self, peer: RawPeer, names: Names, rng: random.Random, *, registered: bool = True) -> None:
        """What a worker does first, rightly."""
        requests = Requests(rng, names)
        hello, _ = requests.right("hello")
        self._expect(peer, {**hello, "role": "worker"}, "welcome")
        if registered:
            attached = self._expect(peer, requests.right("attach")[0], "attached", self._descriptors.memory)
            (names.allocation,) = attached.get("allocations", [0])
            names.registration = self._expect(peer, requests.right("register")[0], "registered").get("registration", 0)
            # A lease, so that frames can name it.
            keys = [{"group": 0, "keys": rng.randbytes(32)}]
            names.lease = self._expect(peer, {"type": "reserve", "seq": 5, "groups": keys}, "reserved").get("lease", 0)

    def _expect(self, peer: RawPeer, fields: Fields, wanted: str, *fds: int) -> Fields:
        """The reply that a right request must get; empty where it did not."""
        reply = peer.ask(fields, REPLY_S, fds)
        if reply is not None and reply["type"] == wanted:
            return reply
        with self._lock:
            self.tally.problem(f"a right {fields['type']} got {reply}")
        return {}

    def _attempt(self, peer: RawPeer, frames: Iterator[Frame], rng: random.Random) -> int:
        """Send frames, each after the reply to the one before, until the session ends; returns how many."""
        used = 0
        for frame in frames:
            used += 1
            peer.send(frame.data, self._descriptors.some(frame.fds, rng))
            if not frame.whole:
                self._ends(peer, frame)
                return used
            if not self._answers(peer, frame):
                return used
        self._is_in_step(peer)
        return used

    def _answers(self, peer: RawPeer, frame: Frame) -> bool:
        """Whether the session goes on after this frame."""
        try:
            reply = peer.reply(REPLY_S)
        except SilenceError:
            with self._lock:
                self.tally.problem(f"no answer to {frame.data[:400]!r} with {frame.fds} descriptors")
            return False
        with self._lock:
            if reply is None:
                self.tally.closed += 1
                return False
            self.tally.answered += 1
            self.tally.replies[str(reply.get("code", reply["type"]))] += 1
        return True

    def _ends(self, peer: RawPeer, frame: Frame) -> None:
        """Nothing can follow a stream that broke off: the session must end, with or without last words."""
        try:
            peer.socket.shutdown(socket.SHUT_WR)
            while (reply := peer.reply(REPLY_S)) is not None:
                with self._lock:
                    self.tally.replies[str(reply.get("code", reply["type"]))] += 1
        except SilenceError:
            with self._lock:
                self.tally.problem(f"the session did not end after {frame.data[:400]!r}")
            return
        except OSError:
            pass  # it had ended before we could say so
        with self._lock:
            self.tally.closed += 1

    def _is_in_step(self, peer: RawPeer) -> None:
        """One reply to each frame: then the next one is that to this ping, if the session has not ended."""
        try:
            reply = peer.ask({"type": "ping", "seq": IN_STEP}, REPLY_S)
        except SilenceError:
            reply = {"type": "silence"}
        if reply is not None and reply.get("seq") != IN_STEP:
            with self._lock:
                self.tally.problem(f"one reply too many: {str(reply)[:200]}")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    frames: int
    truncations_every: int
    threads: int
    seed: int
    plant_corruption: bool


@dataclass(frozen=True, slots=True)
class Report:
    """How it went; `as_json` has the names that stay."""

    options: Options
    tally: Tally
    bystander: Bystander
    cost: Cost
    seconds: float
    findings: list[str]
    leaks: list[str]
    bad_log_lines: list[str]
    exit_status: int

    @property
    def good(self) -> bool:
        """Whether all that must hold held."""
        seen = self.bystander.experience
        return (
            not (self.tally.problems or self.findings or self.leaks or self.bad_log_lines or seen.failures)
            and seen.wrong_bytes == 0 < seen.verified_loads
            and self.cost.rss_growth <= RSS_GROWTH_MAX
            and self.cost.fds_max - self.cost.fds_before <= FDS_GROWTH_MAX
            and self.exit_status == 0
        )

    def as_json(self) -> dict[str, object]:
        """One object."""
        tally, cost, seen = self.tally, self.cost, self.bystander.experience
        return {
            "good": self.good,
            "seed": self.options.seed,
            "frames": tally.frames,
            "truncations": tally.truncations,
            "sessions": tally.sessions,
            "answered": tally.answered,
            "closed": tally.closed,
            "unanswered": tally.unanswered,
            "replies": dict(sorted(tally.replies.items())),
            "problems": tally.problems,
            "seconds": round(self.seconds, 3),
            "rss_before_bytes": cost.rss_before,
            "rss_max_bytes": cost.rss_max,
            "rss_after_bytes": cost.rss_after,
            "rss_growth_bytes": cost.rss_growth,
            "fds_before": cost.fds_before,
            "fds_max": cost.fds_max,
            "wrong_bytes": seen.wrong_bytes,
            "stores": seen.stores,
            "loads": seen.loads,
            "verified_loads": seen.verified_loads,
            "missed_keys": seen.missed_keys,
            "bystander_failures": seen.failures,
            "ping_p50_s": seen.ping_p50_s,
            "ping_p99_s": seen.ping_p99_s,
            "findings": self.findings,
            "leaks": len(self.leaks),
            "leaked": self.leaks,
            "bad_log_lines": self.bad_log_lines,
            "exit_status": self.exit_status,
        }

    def print(self) -> None:
        """A table."""
        tally, cost, seen = self.tally, self.cost, self.bystander.experience
        codes = ", ".join(f"{code} {count:,}" for code, count in tally.replies.most_common(6))
        told = [*tally.problems, *self.findings, *self.leaks, *self.bad_log_lines, *seen.failures]
        sections = [
            [
                (
                    "frames",
                    f"{tally.frames:,}",
                    f"and {tally.truncations:,} truncations, in {tally.sessions:,} sessions",
                ),
                ("answered", f"{tally.answered:,}", codes),
                ("closed", f"{tally.closed:,}", "sessions ended by the daemon"),
                ("unanswered", f"{tally.unanswered:,}", "or answered twice"),
            ],
            [
                ("private memory", format_bytes(cost.rss_max), f"at most; {format_bytes(cost.rss_before)} before"),
                ("descriptors", f"{cost.fds_max:,}", f"at most; {cost.fds_before:,} before"),
            ],
            [
                ("bystander's loads", f"{seen.verified_loads:,}", "of which every byte was compared and right"),
                ("wrong bytes", f"{seen.wrong_bytes:,}", ""),
                ("ping p50, p99", format_ms(seen.ping_p50_s), format_ms(seen.ping_p99_s)),
            ],
            [
                ("time", f"{self.seconds:,.1f} s", f"seed {self.options.seed}"),
                ("verdict", "good" if self.good else "BAD", "; ".join(told)[:400]),
            ],
        ]
        print_table("fuzz", sections, good=self.good)


def run(options: Options, folder: Path) -> Report:
    """Everything. Raises DaemonError, KvOffloadError, OSError."""
    faults = "corrupt_every=1" if options.plant_corruption else ""
    daemon = DaemonProcess(folder, DAEMON_MEMORY_BYTES, {"memory.slab_bytes": "1MiB"}, faults)
    daemon.start()
    tally = Tally()
    fuzzer = Fuzzer(daemon.socket, options.seed, tally)
    total = options.frames + TRUNCATIONS_ABOUT / options.truncations_every
    try:
        with Client(daemon.socket, namespace=None, role="observer", deadline_s=REPLY_S) as observer:
            with Live("warming up", 1) as live:  # what every daemon of some age has allocated is no growth
                fuzzer.run(min(WARM_UP_FRAMES, options.frames), 1, live)
            before = held(observer, daemon.pid, "")
            begun = time.monotonic()
            with (
                Bystander(daemon.socket, options.seed, folder / "bystander.log") as bystander,
                Cost(daemon.pid) as cost,
                Live("fuzzing", total) as live,
            ):
                fuzzer.run(options.frames - tally.frames, options.threads, live)
                fuzzer.truncate(live, options.truncations_every)
            seconds = time.monotonic() - begun
            leaked = leaks(observer, daemon.pid, MEMORY_NAME, before) + leaks(observer, daemon.pid, "fuzz", before)
            cost.sample()
            findings = list(observer.verify(payloads=True, deadline_s=REPLY_S).findings)
    finally:
        fuzzer.close()
        status = daemon.stop()
    return Report(options, tally, bystander, cost, seconds, findings, leaked, excerpts(daemon.log), status)


def main() -> int:
    """Runs it; returns the exit status."""
    options, as_json = _arguments()
    obey_signals()
    print(f"fuzz: seed {options.seed}", file=sys.stderr)
    try:
        with private_folder() as folder:
            report = run(options, Path(folder))
    except (DaemonError, KvOffloadError, OSError) as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return EXIT_BAD
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if as_json:
        print_json(report.as_json())
    else:
        report.print()
    return 0 if report.good else EXIT_BAD


def _arguments() -> tuple[Options, bool]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0], epilog=__doc__.split("\n", 1)[1])
    add = parser.add_argument
    add("--frames", type=int, default=20_000, help="random and mutated frames (default: %(default)s)")
    add("--truncations-every", type=int, default=1, metavar="N", help="send one truncation of N (default: all)")
    add("--threads", type=int, default=2, help="sessions that misbehave at once (default: %(default)s)")
    add("--seed", type=int, help="of all that is chosen at random (default: a new one, which is told)")
    add("--plant-corruption", action="store_true", help="let the daemon flip bits in loads: this must be noticed")
    add("--json", action="store_true", help="one JSON object on standard output in place of the table")
    given = parser.parse_args()
    if min(given.frames, given.truncations_every, given.threads) < 1:
        parser.error("--frames, --truncations-every and --threads: at least 1")
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    options = Options(given.frames, given.truncations_every, given.threads, seed, given.plant_corruption)
    return options, given.json


if __name__ == "__main__":
    sys.exit(main())
