"""A session that asks for as much as it may, and hardly reads the answers."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

import numpy as np

from kvoffloadd.linux.sharedmem import create_memfd
from kvoffloadd.testing.process import DaemonError
from scripts.harness.peer import Fields, RawPeer, frame

REPLY_S = 60.0
BLOCKS, PAGE_BYTES, KEY_BYTES = 64, 4096, 32
KEYS_OF_WIDE_JOB = 4096
"""A load has this many keys, and few are there: its completion must have room to name all that failed."""
GREEDY_CYCLE = 100
"""Some jobs, and then more requests that wait for them than may wait."""
DRIP_S = 0.25

KINDS = ("mute", "dripping", "greedy")
"""Mute: never reads. Dripping: a byte now and then. Greedy: reads until the answer is `busy`, then never again."""


class Flooder:
    """One session. Registers a KV cache in its constructor; everything after that is asked without waiting.

    `replied[seq]`, `ended[job]`: how often each was answered or completed.
    """

    def __init__(self, path: Path, number: int, rng: np.random.Generator) -> None:
        self.kind = KINDS[number % len(KINDS)]
        self.peer = RawPeer(path, REPLY_S)
        self.asked = 0
        self.admitted: set[int] = set()
        self.replied: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()
        self.replies: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.busy = 0
        self._rng = rng
        self._drip_at = 0.0
        self._present = rng.integers(0, 256, (BLOCKS // 2, KEY_BYTES), dtype=np.uint8).tobytes()
        self._absent = rng.integers(0, 256, (KEYS_OF_WIDE_JOB - BLOCKS // 2, KEY_BYTES), dtype=np.uint8).tobytes()
        self._registration = self._prepare(number)
        self._unsent = memoryview(b"")
        self.peer.socket.setblocking(False)

    def _prepare(self, number: int) -> int:
        namespace = {"model": f"flood-{number % 8}", "key_bytes": KEY_BYTES}
        hello = {"type": "hello", "version": 1, "role": "worker", "instance": self._rng.bytes(16)}
        self._granted("welcome", {**hello, "namespace": namespace})
        fd = create_memfd("flood", BLOCKS * PAGE_BYTES)
        try:
            attached = self._granted("attached", {"type": "attach", "kind": "shm", "fds": 1}, fd)
        finally:
            os.close(fd)
        tensor = {"offset": 0, "num_blocks": BLOCKS, "page_bytes": PAGE_BYTES, "stride_bytes": PAGE_BYTES}
        refs = [{"tensor": 0, "offset": 0, "length": PAGE_BYTES}]
        group = {"group": 0, "kind": "full", "tokens_per_key": 16, "refs": refs}
        tensors = [{"allocation": attached["allocations"][0], **tensor}]
        registered = self._granted("registered", {"type": "register", "tensors": tensors, "groups": [group]})
        return int(registered["registration"])

    def _granted(self, wanted: str, fields: Fields, *fds: int) -> Fields:
        self.asked += 1
        self.peer.tell({"seq": self.asked, **fields}, fds)
        reply = self.peer.reply()
        if reply is None or reply["type"] != wanted:
            raise DaemonError(f"a {fields['type']} got {reply}")
        self.replied[self.asked] += 1
        return reply

    def close(self) -> None:
        self.peer.close()

    # --- asking ------------------------------------------------------------------------------------------

    def wants_to_ask(self) -> bool:
        """Greedy ones stop once the answer was `busy`."""
        return bool(self._unsent) or self.kind != "greedy" or not self.busy

    def ask(self) -> None:
        """Sends as much as the kernel takes now."""
        with contextlib.suppress(BlockingIOError):
            while self.wants_to_ask():
                self._unsent = self._unsent or memoryview(self._next())
                self._unsent = self._unsent[self.peer.socket.send(self._unsent) :]

    def finish_asking(self) -> None:
        """The rest of the frame that has begun. Frames that have not are never asked."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.peer.socket.send(self._unsent) :]

    @property
    def mid_frame(self) -> bool:
        """Whether a frame is partly sent."""
        return bool(self._unsent)

    def _next(self) -> bytes:
        self.asked += 1
        turn = self.asked % (GREEDY_CYCLE if self.kind == "greedy" else 8)
        if turn == 0:
            fields: Fields = {"type": "status"}
        elif turn == 1 or turn >= 8:
            fields = {"type": "drain", "deadline_s": 600.0}  # answered late, and only a limited number may wait
        elif turn == 2:
            fields = {"type": "store", **self._job(self._present, np.arange(BLOCKS // 2))}
        else:
            blocks = np.full(KEYS_OF_WIDE_JOB, 0xFFFFFFFF)
            blocks[: BLOCKS // 2] = BLOCKS // 2 + np.arange(BLOCKS // 2)
            fields = {"type": "load", **self._job(self._present + self._absent, blocks)}
        return frame({"seq": self.asked, **fields})

    def _job(self, keys: bytes, blocks: np.ndarray) -> Fields:
        groups = [{"group": 0, "keys": keys, "blocks": blocks.astype("<u4").tobytes()}]
        return {"job": self.asked, "registration": self._registration, "groups": groups, "deadline_s": 600.0}

    # --- reading ------------------------------------------------------------------------------------------

    def wants_to_read(self, now: float) -> bool:
        """While the flood lasts."""
        if self.kind == "greedy":
            return not self.busy
        if self.kind == "dripping" and now >= self._drip_at:
            self._drip_at = now + DRIP_S
            return True
        return False

    def read(self, most: int = 1 << 16) -> bool:
        """What has come; False: the daemon has closed the session."""
        try:
            alive = self.peer.read(most)
        except BlockingIOError:
            alive = True
        while (message := self.peer.buffered()) is not None:
            self._take(message)
        return alive

    def drip(self) -> None:
        self.read(1)

    def _take(self, message: Fields) -> None:
        if message["type"] == "completed":
            self.ended[message["job"]] += 1
            self.outcomes[message["outcome"]] += 1
            return
        self.replied[message["seq"]] += 1
        self.replies[str(message.get("code", message["type"]))] += 1
        self.busy += message.get("code") == "busy"
        if message["type"] == "accepted":
            self.admitted.add(message["job"])

    def is_settled(self) -> bool:
        """Whether all that it asked was answered, and all that was admitted has ended."""
        return not self.mid_frame and len(self.replied) >= self.asked and self.admitted <= self.ended.keys()

    def problems(self) -> list[str]:
        """Returns what was lost, or came twice."""
        found = []
        for what, count in (
            ("requests without a reply", self.asked - len(self.replied)),
            ("requests with several replies", sum(count > 1 for count in self.replied.values())),
            ("admitted jobs without a completion", len(self.admitted - self.ended.keys())),
            ("jobs with several completions", sum(count > 1 for count in self.ended.values())),
            ("completions of jobs that were not admitted", len(self.ended.keys() - self.admitted)),
        ):
            if count:
                found.append(f"a {self.kind} session has {count} {what}")
        return found
