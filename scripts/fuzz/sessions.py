"""Sessions that misbehave: what they send, what the daemon must answer, and what became of it."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvoffloadd.linux.sharedmem import create_memfd
from kvoffloadd.testing.output import ProgressBar
from scripts.fuzz.frames import MEMORY_BYTES, Frame, Names, Requests, Spoiler, truncations
from scripts.harness.peer import Fields, RawPeer

REPLY_S = 60.0
"""Patience with a hang: nothing legal takes as long, on the busiest machine."""
IN_STEP = 0xF00DF00D
"""The `seq` of a ping that no fuzzed frame has."""
FRAMES_PER_SESSION = 40
PROBLEMS_KEPT = 20


@dataclass(slots=True)
class FrameTally:
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

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """Mostly good ones."""
        return [self.memory if rng.random() < 0.7 else rng.choice(self._strange) for _ in range(count)]

    def close(self) -> None:
        for fd in (self.memory, *self._strange):
            os.close(fd)


class Fuzzer:
    """Sessions that misbehave, in some threads. A session's contents are a function of the seed and its number.

    Ownership: `tally` and `_next` under `_lock`.
    """

    def __init__(self, path: Path, seed: int, tally: FrameTally) -> None:
        self.tally = tally
        self._path = path
        self._seed = seed
        self._descriptors = Descriptors()
        self._lock = threading.Lock()
        self._next = 0

    def close(self) -> None:
        self._descriptors.close()

    def run(self, frames: int, threads: int, live: ProgressBar) -> None:
        """Sends random frames, until `frames` more were sent."""
        end = self.tally.frames + frames
        workers = [threading.Thread(target=self._fuzz, args=(end,), daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            live.show(self.tally.frames, f"{self.tally.sessions:,} sessions")
            time.sleep(0.05)
        if self.tally.frames < end and not self.tally.problems:
            self.tally.problems.append(f"a fuzzing thread failed: {end - self.tally.frames} frames were not sent")

    def truncate(self, live: ProgressBar, every: int) -> None:
        """Every truncation of a right frame of every type (or one of `every`), as they come."""
        requests = Requests(self._rng(), Names("fuzz-truncated"))
        frames = [frame for at, frame in enumerate(truncations(requests)) if at % every == 0]
        while frames and len(self.tally.problems) < PROBLEMS_KEPT:
            rng = self._rng()
            with RawPeer(self._path, REPLY_S) as peer:
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
            with RawPeer(self._path, REPLY_S) as peer:
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
        peer.tell(fields, fds)
        reply = peer.reply()
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
            try:
                peer.send(frame.data, self._descriptors.draw(frame.fds, rng))
            except PermissionError:  # not let in yet
                peer.send(frame.data)
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
            reply = peer.reply()
        except TimeoutError:
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
            while (reply := peer.reply()) is not None:
                with self._lock:
                    self.tally.replies[str(reply.get("code", reply["type"]))] += 1
        except TimeoutError:
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
            peer.tell({"type": "ping", "seq": IN_STEP})
            reply = peer.reply()
        except TimeoutError:
            reply = {"type": "silence"}
        if reply is not None and reply.get("seq") != IN_STEP:
            with self._lock:
                self.tally.problem(f"one reply too many: {str(reply)[:200]}")
