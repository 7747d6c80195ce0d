"""What the cases of `legal_extremes` share: sessions of a daemon that holds keys, and what they ask it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.errors import BusyError
from kvoffloadd.testing.figures import keys_of
from kvoffloadd.testing.wait import until
from scripts.harness.peer import RawPeer

MIB = 1 << 20
PAGE = 4096
KEYS = 16_384
"""Of one request: `limits.keys_per_request`."""
LAYERS = 160
FRAME_IDS = 983_040
"""Block ids that fit into one frame, for as many keys as a request may have."""
WAITING_JOBS = 1000
GROUPS = 256
"""Of one namespace."""
REPLY_S = 120.0
REFUSED_S = 1.0
"""Between two attempts of a user who is refused."""


@dataclass(frozen=True)
class ExtremeCase:
    """The largest of some `requests`, or of what else a peer may do, and how large that is. `steps` yields once: what
    comes before is not measured.
    """

    requests: str
    size: str
    steps: Callable[[Scene], Iterator[None]]

    @property
    def name(self) -> str:
        return self.steps.__name__


def asks(requests: str, size: str) -> Callable[[Callable[[Scene], Iterator[None]]], ExtremeCase]:
    """What a case's steps ask for."""
    return partial(ExtremeCase, requests, size)


class Scene:
    """A daemon with keys, and what sessions need to ask for much of it."""

    def __init__(self, socket: Path, metrics: Path, rng: np.random.Generator) -> None:
        self.metrics = metrics
        self.rng = rng
        self.held = self.taken = 0
        self.models = 0
        self._socket = socket
        self._open: list[RawPeer] = []

    def session(self, model: str = "extremes") -> RawPeer:
        """Opens a session that has sent `hello`; it is closed after the case. Waits while the daemon refuses this user,
        who connects too often.
        """
        end = time.monotonic() + REPLY_S
        while True:
            peer = RawPeer(self._socket, REPLY_S)
            self._open.append(peer)
            try:
                peer.hello(namespace={"model": model})
            except AssertionError:
                refusal = peer.refusal or {}
                too_often = refusal.get("code") == BusyError.code and "connects too often" in refusal["message"]
                if not too_often or time.monotonic() > end:
                    raise
                self.leave(peer)
                time.sleep(REFUSED_S)
            else:
                return peer

    def leave(self, peer: RawPeer) -> None:
        """Its session ends now."""
        peer.close()
        self._open.remove(peer)

    def new_model(self) -> str:
        """Returns a model whose namespace is new."""
        self.models += 1
        return f"extremes-{self.models}"

    def close(self) -> None:
        for peer in self._open:
            peer.close()
        self._open.clear()

    def keys(self, count: int, *, new: bool = False) -> bytes:
        """Packed keys that are held, or that are not."""
        begin = 1 << 40 if new else int(self.rng.integers(0, max(self.held - count, 0) + 1))
        begin += int(self.rng.integers(0, 1 << 30)) if new else 0
        return keys_of(np.arange(begin, begin + count)).tobytes()

    def fill(self, count: int, *, has_disk: bool) -> None:
        """Stores keys of a page each until `count` are held; all are written to the disk, if there is one."""
        peer, registration = self.worker()
        while self.held < count:
            share = min(KEYS, count - self.held)
            keys = keys_of(np.arange(self.held, self.held + share)).tobytes()
            run(peer, "store", 1, registration, keys, np.zeros(share, "<u4"))
            self.held += share
            if has_disk:
                written(peer)
        self.close()

    def worker(self) -> tuple[RawPeer, int]:
        """A session whose blocks are a page each."""
        peer = self.session()
        return peer, register(peer, [(PAGE, 64)], [group(0, [(0, 0, PAGE, 1)])])


def refused(peer: RawPeer, tag: str, **fields: Any) -> None:
    """The reply must be an error: the request is legal, what it asks for is not."""
    if (reply := peer.ask(tag, **fields))["type"] != "error":
        raise SystemExit(f"{tag} was not refused: {reply}")


def ready(peer: RawPeer) -> None:
    """The one that is due."""
    while (message := peer.receive()) is not None and message["type"] != "ready":
        peer.pushes.append(message)


def written(peer: RawPeer) -> None:
    """Waits until all that was stored is on disk."""
    peer.ok("drain", deadline_s=REPLY_S)
    what = "all that was stored is on disk"
    until(lambda: not peer.ok("status")["status"]["disk"]["backlog_bytes"], what, REPLY_S, every_s=0.05)


def shares(packed: Sequence[bytes]) -> list[dict[str, Any]]:
    """Keys of one group after the other, as a request names them."""
    return [{"group": number, "keys": keys} for number, keys in enumerate(packed)]


def completed(peer: RawPeer, jobs: int = 1) -> list[str]:
    """Returns the outcomes of `jobs` jobs, once they have ended."""
    found: list[str] = []
    while len(found) < jobs:
        message = peer.pushes.pop(0) if peer.pushes else peer.receive()
        if message is None:
            raise SystemExit("the daemon has hung up")
        if message["type"] == "completed":
            found.append(message["outcome"])
    return found


def run(peer: RawPeer, tag: str, job: int, registration: int, keys: bytes, ids: Any, **more: Any) -> None:
    """A job, to its end."""
    number = more.pop("group", 0)
    groups = more.pop("groups", None) or [{"group": number, "keys": keys, "blocks": ids.astype("<u4").tobytes()}]
    peer.ok(tag, job=job, registration=registration, groups=groups, **more)
    completed(peer)


def group(number: int, refs: list[tuple[int, int, int, int]], blocks_per_key: int = 1) -> dict[str, Any]:
    """A group of refs (tensor, offset, length, count), whose runs are twice their length apart."""
    runs = [{"tensor": t, "offset": o, "length": n, "count": c, "stride": 2 * n if c > 1 else 0} for t, o, n, c in refs]
    return {
        "group": number, "kind": "full", "tokens_per_key": 16, "blocks_per_key": blocks_per_key, "refs": runs
    }  # fmt: skip


def register(
    peer: RawPeer, shapes: list[tuple[int, int]], groups: list[dict[str, Any]], *, signal: bool = False
) -> int:
    """Tensors of (page bytes, blocks) side by side in one memfd; with `signal` the memfd's last page is one."""
    ends = np.cumsum([page * blocks for page, blocks in shapes]).tolist()
    fd = os.memfd_create("extremes")
    os.ftruncate(fd, ends[-1] + PAGE)
    (allocation,) = peer.attach([fd])
    os.close(fd)
    tensors = [
        {"allocation": allocation, "offset": end - page * blocks, "num_blocks": blocks, "page_bytes": page,
         "stride_bytes": page} for (page, blocks), end in zip(shapes, ends, strict=True)
    ]  # fmt: skip
    signals = [allocation] if signal else []
    return int(peer.ok("register", tensors=tensors, groups=groups, signals=signals)["registration"])


def held_in_groups(scene: Scene) -> tuple[RawPeer, int, list[bytes]]:
    """A worker of a separate namespace, its registration, and as many keys as a request may have, stored in as many
    groups as there may be.
    """
    peer = scene.session(scene.new_model())
    registration = register(peer, [(PAGE, GROUPS)], [group(n, [(0, 16 * n, 16, 1)]) for n in range(GROUPS)])
    share = KEYS // GROUPS
    packed = [scene.keys(share, new=True) for _ in range(GROUPS)]
    run(peer, "store", 1, registration, b"", None, groups=jobs_of(packed, np.arange(share)))
    return peer, registration, packed


def jobs_of(packed: Sequence[bytes], ids: Any) -> list[dict[str, Any]]:
    """The groups of a job: in each, these keys and the same block ids."""
    blocks = ids.astype("<u4").tobytes()
    return [{**share, "blocks": blocks} for share in shares(packed)]
