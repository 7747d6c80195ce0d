"""An honest worker beside dishonest ones, which must not notice them; and a watch over what they cost the daemon.

As a program (`-m scripts.fuzz.bystander SOCKET SEED EXPEDITED`) it says when it works, goes on until its standard
input ends, and then says as JSON what it went through: in a process of its own, since its round trips must not wait
for our threads.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Outcome, Ref, Registration, SharedTensor
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.model import U8Array
from kvoffloadd.trial.process import module, open_fds, rss_anon_bytes, spawn, tail

PAGE_BYTES = 16 << 10
KEYS_PER_STEP = 8
KEPT_STEPS = 16
"""Keys of so many steps are loaded again; more is not expected to be held."""
MEMORY_NAME = "bystander"
WAIT_S = 30.0
SAMPLE_S = 0.02
PING_EVERY_S = 0.005
FAILURES_KEPT = 20
READY = b"ready\n"


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


class Bystander:
    """The program, as long as the context lasts; then `experience` is what it said. `expedited`: its loads go before
    others'.
    """

    def __init__(self, socket_path: Path, seed: int, log: Path, *, expedited: bool = False) -> None:
        command = module("scripts.fuzz.bystander", str(socket_path), str(seed), str(int(expedited)))
        self._child = spawn(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._first_line = b""
        self._log = log
        self.experience = Experience()

    def __enter__(self) -> Self:
        if self._child.stdout is not None:
            self._first_line = self._child.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        said = b"" if self._first_line == READY else self._first_line  # it may have failed at once
        try:
            said += self._child.communicate(timeout=2 * WAIT_S)[0]
            self.experience = Experience(**json.loads(said))
        except (subprocess.TimeoutExpired, ValueError, TypeError):
            self._child.kill()
            self._child.wait()
            self.experience.failures.append(f"the bystander said {said[:200]!r}; its log: {tail(self._log)}")


class Worker:
    """Stores and loads until it is stopped, and pings in a thread of its own; compares every byte.

    Ownership: `pings_s` is the pinger's, all else the caller's, until the pinger has ended.
    """

    def __init__(self, socket_path: Path, seed: int, *, expedited: bool) -> None:
        self.experience = Experience()
        self.pings_s: list[float] = []
        self._expedited = expedited
        self._path = socket_path
        self._rng = np.random.default_rng([seed, 1])
        self._tensor = SharedTensor.allocate(2 * KEYS_PER_STEP, PAGE_BYTES, name=MEMORY_NAME)
        self._ended = threading.Event()

    def stop(self) -> None:
        """Ends it after its present step. From any thread."""
        self._ended.set()

    def run(self) -> Experience:
        pinger = threading.Thread(target=self._ping, daemon=True)
        pinger.start()
        try:
            with Client(self._path, namespace=NamespaceSpec(model="bystander"), deadline_s=WAIT_S) as client:
                group = Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, PAGE_BYTES)])
                registration = client.register(KvCache([self._tensor], [group]))
                kept: list[U8Array] = []
                self._step(client, registration, kept)
                print(READY.decode(), end="", flush=True)
                while not self._ended.is_set():
                    self._step(client, registration, kept)
        except (KvOffloadError, OSError) as error:
            self._fail(f"{type(error).__name__}: {error}")
        self._ended.set()
        pinger.join()
        seen = self.experience
        seen.pings = len(self.pings_s)
        if self.pings_s:
            seen.ping_p50_s, seen.ping_p99_s, seen.ping_max_s = np.percentile(self.pings_s, (50, 99, 100)).tolist()
        return seen

    def _ping(self) -> None:
        try:
            with Client(self._path, namespace=None, role="observer", deadline_s=WAIT_S) as client:
                while not self._ended.wait(PING_EVERY_S):
                    begun = time.perf_counter()
                    client.ping()
                    self.pings_s.append(time.perf_counter() - begun)
        except (KvOffloadError, OSError) as error:
            self._fail(f"a ping: {type(error).__name__}: {error}")

    def _step(self, client: Client, registration: Registration, kept: list[U8Array]) -> None:
        keys = self._rng.integers(0, 256, (KEYS_PER_STEP, 32), dtype=np.uint8)
        blocks = np.arange(KEYS_PER_STEP)
        self._tensor.array[blocks] = [content(key) for key in keys]
        stored = client.wait(client.store(registration, {0: (keys, blocks)}), WAIT_S)
        self.experience.stores += 1
        if stored.outcome not in (Outcome.DONE, Outcome.PARTIAL):
            self._fail(f"a store ended {stored.outcome}: {stored.reason}")
        kept.append(keys)
        del kept[:-KEPT_STEPS]
        self._load(client, registration, kept[int(self._rng.integers(len(kept)))])

    def _load(self, client: Client, registration: Registration, keys: U8Array) -> None:
        lease = client.pin({0: keys}).lease
        blocks = KEYS_PER_STEP + np.arange(KEYS_PER_STEP)
        self._tensor.array[blocks] = 0
        job = client.load(registration, {0: (keys, blocks)}, lease=lease, expedited=self._expedited)
        loaded = client.wait(job, WAIT_S)
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
    path, seed, expedited = sys.argv[1:]
    worker = Worker(Path(path), int(seed), expedited=bool(int(expedited)))

    def stop_at_the_end_of_input() -> None:
        sys.stdin.buffer.read()
        worker.stop()

    threading.Thread(target=stop_at_the_end_of_input, daemon=True).start()
    print(json.dumps(asdict(worker.run())), flush=True)


def content(key: U8Array) -> U8Array:
    """What the bystander's page of a key holds."""
    return np.frombuffer(hashlib.shake_128(key.tobytes()).digest(PAGE_BYTES), np.uint8)


class Cost(threading.Thread):
    """The highest private memory and the most descriptors of a daemon, while the context lasts."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="cost", daemon=True)
        self.rss_before = self.rss_max = self.rss_after = rss_anon_bytes(pid)
        self.fds_before = self.fds_max = len(open_fds(pid))
        self._pid = pid
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    @property
    def rss_growth(self) -> int:
        """Of the highest over the first."""
        return self.rss_max - self.rss_before

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
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
