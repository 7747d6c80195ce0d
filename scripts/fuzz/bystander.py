"""An honest worker that must not notice the dishonest ones next to it; and a watch over what they cost the daemon.

As a program (`-m scripts.fuzz.bystander SOCKET SEED EXPEDITED UID SAMPLES`) it reports when it works, goes on until its
standard input ends, and then prints as JSON what it went through. It is a separate process, since its round trips must
not wait for the threads of the script.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from kvoffloadd.client import (
    Client,
    EventGap,
    Group,
    GroupKind,
    KeyEvents,
    KvCache,
    NamespaceSpec,
    Outcome,
    Ref,
    Registration,
    SharedTensor,
)
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.model import U8Array
from kvoffloadd.testing.process import module, open_fds, rss_anon_bytes, spawn, tail
from scripts.harness.beside import Beside
from scripts.harness.otheruser import connect_as

PAGE_BYTES = 16 << 10
KEYS_PER_STEP = 8
KEPT_STEPS = 16
"""The keys of this many steps are loaded again; more are not expected to be held."""
MEMORY_NAME = "bystander"
WAIT_S = 30.0
SAMPLE_S = 0.02
PING_EVERY_S = 0.005
LISTEN_S = 0.2
DUE_MAX = 100_000
FAILURES_KEPT = 20
READY = b"ready\n"

F64Array = npt.NDArray[np.float64]


@dataclass(slots=True)
class Experience:
    """What the bystander went through. `missed_keys`: others evicted or cleared them, which is no failure."""

    stores: int = 0
    loads: int = 0
    verified_loads: int = 0
    missed_keys: int = 0
    wrong_bytes: int = 0
    failures: list[str] = field(default_factory=list)
    pings: int = 0
    ping_p50_s: float | None = None
    ping_p99_s: float | None = None
    ping_max_s: float | None = None
    cycle_p50_s: float | None = None
    cycle_p99_s: float | None = None
    event_p50_s: float | None = None
    event_p99_s: float | None = None
    event_gaps: int = 0


@dataclass(frozen=True)
class Samples:
    """All round trips. `pings`: (n, 2) of when each began, by the monotonic clock, and how long it took; `cycles`:
    (n, 3) the same of a store and a load, and the share of its keys that hit; `events`: (n, 2) when the store of a key
    began, and how long it took until a subscriber had the event.
    """

    pings: F64Array
    cycles: F64Array
    events: F64Array

    @staticmethod
    def read(path: Path) -> Samples:
        """None, where the bystander has written none."""
        try:
            with np.load(path) as found:
                return Samples(found["pings"], found["cycles"], found["events"])
        except OSError:
            return Samples(np.empty((0, 2)), np.empty((0, 3)), np.empty((0, 2)))

    def during(self, spans: Sequence[tuple[float, float]]) -> Samples:
        """Those that began in one of these spans of time."""
        return Samples(*(_during(samples, spans) for samples in (self.pings, self.cycles, self.events)))


def _during(samples: F64Array, spans: Sequence[tuple[float, float]]) -> F64Array:
    within = np.zeros(len(samples), bool)
    for begin, end in spans:
        within |= (samples[:, 0] >= begin) & (samples[:, 0] < end)
    return samples[within]


class Bystander:
    """The program, as long as the context lasts; then `experience` is what it printed, and `samples` all that it
    measured. `expedited`: its loads go before others'. `uid`: as whom it connects (by default as ourselves).
    """

    def __init__(
        self, socket_path: Path, seed: int, log: Path, *, expedited: bool = False, uid: int | None = None
    ) -> None:
        self._samples_path = log.with_suffix(".npz")
        user = os.getuid() if uid is None else uid
        words = (str(socket_path), str(seed), str(int(expedited)), str(user), str(self._samples_path))
        self._child = spawn(
            module("scripts.fuzz.bystander", *words), log, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._first_line = b""
        self._log = log
        self.experience = Experience()
        self.samples = Samples.read(self._samples_path)

    def __enter__(self) -> Self:
        if self._child.stdout is not None:
            self._first_line = self._child.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        output = b"" if self._first_line == READY else self._first_line  # it may have failed at once
        try:
            output += self._child.communicate(timeout=2 * WAIT_S)[0]
            self.experience = Experience(**json.loads(output))
            self.samples = Samples.read(self._samples_path)
        except (subprocess.TimeoutExpired, ValueError, TypeError):
            self._child.kill()
            self._child.wait()
            self.experience.failures.append(f"the bystander printed {output[:200]!r}; its log: {tail(self._log)}")


class BystanderWorker:
    """Stores and loads until it is stopped, and compares every byte; pings, and hears of its keys, in threads of their
    own.

    Ownership: `pings` is the pinger's, `events` and `_gaps` the listener's, `_due` under `_lock`, all else the
    caller's, until these threads have ended.
    """

    def __init__(self, socket_path: Path, seed: int, *, expedited: bool, uid: int) -> None:
        self.experience = Experience()
        self.pings: list[tuple[float, float]] = []
        self.cycles: list[tuple[float, float, float]] = []
        self.events: list[tuple[float, float]] = []
        self._gaps = 0
        self._lock = threading.Lock()
        self._due: dict[bytes, float] = {}  # keys that are being stored, and since when
        self._expedited = expedited
        self._path = socket_path
        self._uid = uid
        self._rng = np.random.default_rng([seed, 1])
        self._tensor = SharedTensor.allocate(2 * KEYS_PER_STEP, PAGE_BYTES, name=MEMORY_NAME)
        self._ended = threading.Event()

    def stop(self) -> None:
        """Ends it after its present step. From any thread."""
        self._ended.set()

    def run(self) -> Experience:
        try:
            with (
                self._connected() as client,
                self._connected("observer") as pinger,
                self._connected("observer") as hearer,
            ):
                hearer.subscribe()
                threads = [
                    threading.Thread(target=work, args=(one,), daemon=True)
                    for work, one in ((self._ping, pinger), (self._listen, hearer))
                ]
                for thread in threads:
                    thread.start()
                try:
                    self._work(client)
                finally:
                    self._ended.set()
                    for thread in threads:
                        thread.join()
        except (KvOffloadError, OSError) as error:
            self._fail(f"{type(error).__name__}: {error}")
        seen = self.experience
        seen.pings, seen.event_gaps = len(self.pings), self._gaps
        if self.pings:
            took = np.array(self.pings)[:, 1]
            seen.ping_p50_s, seen.ping_p99_s, seen.ping_max_s = np.percentile(took, (50, 99, 100)).tolist()
        if self.cycles:
            seen.cycle_p50_s, seen.cycle_p99_s = np.percentile(np.array(self.cycles)[:, 1], (50, 99)).tolist()
        if self.events:
            seen.event_p50_s, seen.event_p99_s = np.percentile(np.array(self.events)[:, 1], (50, 99)).tolist()
        return seen

    def _connected(self, role: Literal["worker", "observer"] = "worker") -> Client:
        client = Client(self._path, namespace=NamespaceSpec(model="bystander"), role=role, deadline_s=WAIT_S)
        return connect_as(client, self._uid)

    def _work(self, client: Client) -> None:
        group = Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, PAGE_BYTES)])
        registration = client.register(KvCache([self._tensor], [group]))
        kept: list[U8Array] = []
        self._step(client, registration, kept)
        print(READY.decode(), end="", flush=True)
        while not self._ended.is_set():
            begun, hits = time.monotonic(), self._hits
            self._step(client, registration, kept)
            self.cycles.append((begun, time.monotonic() - begun, (self._hits - hits) / KEYS_PER_STEP))

    def _listen(self, client: Client) -> None:
        """Notes how late the event of each key comes."""
        try:
            while not self._ended.is_set():
                heard = client.events(LISTEN_S)
                now = time.monotonic()
                self._gaps += sum(isinstance(event, EventGap) for event in heard)
                added = [key.tobytes() for event in heard if isinstance(event, KeyEvents) for key in event.added]
                with self._lock:
                    since = [self._due.pop(key) for key in added if key in self._due]
                self.events += [(begun, now - begun) for begun in since]
        except (KvOffloadError, OSError) as error:
            self._fail(f"a subscriber: {type(error).__name__}: {error}")

    @property
    def _hits(self) -> int:
        return self.experience.loads * KEYS_PER_STEP - self.experience.missed_keys

    def _ping(self, client: Client) -> None:
        try:
            while not self._ended.wait(PING_EVERY_S):
                begun = time.monotonic()
                client.ping()
                self.pings.append((begun, time.monotonic() - begun))
        except (KvOffloadError, OSError) as error:
            self._fail(f"a ping: {type(error).__name__}: {error}")

    def _step(self, client: Client, registration: Registration, kept: list[U8Array]) -> None:
        keys = self._rng.integers(0, 256, (KEYS_PER_STEP, 32), dtype=np.uint8)
        blocks = np.arange(KEYS_PER_STEP)
        self._tensor.array[blocks] = [content(key) for key in keys]
        with self._lock:
            self._due = {key.tobytes(): time.monotonic() for key in keys} | self._due
            while len(self._due) > DUE_MAX:  # those that were lost, or found no room
                self._due.popitem()
        stored = client.wait(client.store(registration, {0: (keys, blocks)}), WAIT_S)
        self.experience.stores += 1
        if stored.outcome not in (Outcome.DONE, Outcome.PARTIAL):
            self._fail(f"a store ended {stored.outcome}: {stored.reason}")
        kept.append(keys)
        del kept[:-KEPT_STEPS]
        self._load(client, registration, kept[int(self._rng.integers(len(kept)))])

    def _load(self, client: Client, registration: Registration, keys: U8Array) -> None:
        pinned = client.pin({0: keys})
        lease = (client.wait_ready(pinned, WAIT_S) if pinned.promoting else pinned).lease
        blocks = KEYS_PER_STEP + np.arange(KEYS_PER_STEP)
        self._tensor.array[blocks] = 0
        job = client.load(registration, {0: (keys, blocks)}, lease=lease, expedited=self._expedited)
        loaded = client.wait(job, WAIT_S)
        if lease:
            client.release(lease)
        self.experience.loads += 1
        if loaded.outcome not in (Outcome.DONE, Outcome.PARTIAL):
            self._fail(f"a load ended {loaded.outcome}: {loaded.reason}")
        valid = loaded.valid(0)
        found = self._tensor.array[blocks]
        untouched = np.zeros(PAGE_BYTES, np.uint8)
        expected = np.stack([content(key) if good else untouched for key, good in zip(keys, valid, strict=True)])
        wrong = int((found != expected).sum())
        self.experience.wrong_bytes += wrong
        self.experience.missed_keys += int((~valid).sum())
        self.experience.verified_loads += bool(valid.any()) and wrong == 0

    def _fail(self, what: str) -> None:
        if len(self.experience.failures) < FAILURES_KEPT:
            self.experience.failures.append(what)


def main() -> None:
    path, seed, expedited, uid, samples = sys.argv[1:]
    worker = BystanderWorker(Path(path), int(seed), expedited=bool(int(expedited)), uid=int(uid))

    def stop_at_the_end_of_input() -> None:
        sys.stdin.buffer.read()
        worker.stop()

    threading.Thread(target=stop_at_the_end_of_input, daemon=True).start()
    experience = worker.run()
    pings, events = (np.array(rows).reshape(-1, 2) for rows in (worker.pings, worker.events))
    np.savez(samples, pings=pings, events=events, cycles=np.array(worker.cycles).reshape(-1, 3))
    print(json.dumps(asdict(experience)), flush=True)


def content(key: U8Array) -> U8Array:
    """What the bystander's page of a key holds."""
    return np.frombuffer(hashlib.shake_128(key.tobytes()).digest(PAGE_BYTES), np.uint8)


class Cost(Beside):
    """The highest private memory and the most descriptors of a daemon, while the context lasts."""

    def __init__(self, pid: int) -> None:
        super().__init__("cost")
        self.rss_before = self.rss_max = self.rss_after = rss_anon_bytes(pid)
        self.fds_before = self.fds_max = len(open_fds(pid))
        self._pid = pid

    @property
    def rss_growth(self) -> int:
        """Returns the growth of the highest over the first."""
        return self.rss_max - self.rss_before

    def run(self) -> None:
        while not self.ending.wait(SAMPLE_S):
            self.sample()

    def sample(self) -> None:
        """Take in what it is now."""
        try:
            self.rss_after = rss_anon_bytes(self._pid)
            self.fds_max = max(self.fds_max, len(open_fds(self._pid)))
        except OSError:
            return  # the daemon has ended, which is for others to notice
        self.rss_max = max(self.rss_max, self.rss_after)


if __name__ == "__main__":
    main()
