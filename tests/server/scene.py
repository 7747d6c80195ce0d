"""A worker that has done everything right so far, in raw messages: what bad requests are measured against."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvoffloadd.linux.sharedmem import create_memfd
from scripts.harness.daemon import Daemon
from scripts.harness.peer import Fields, RawPeer

PAGE, STRIDE, BLOCKS = 4096, 4200, 16
SIZE = STRIDE * BLOCKS
KEY_BYTES = 32

TENSOR: Fields = {"offset": 0, "num_blocks": BLOCKS, "page_bytes": PAGE, "stride_bytes": STRIDE}
REF: Fields = {"tensor": 0, "offset": 0, "length": PAGE}
FULL: Fields = {"group": 0, "kind": "full", "tokens_per_key": 16, "refs": [REF]}
SLIDING: Fields = {
    "group": 1,
    "kind": "sliding",
    "tokens_per_key": 32,
    "window_keys": 2,
    "blocks_per_key": 2,
    "refs": [{"tensor": 0, "offset": 8, "length": 100, "count": 3, "stride": 200}],
}
ELSEWHERE: Fields = {"group": 2, "kind": "mamba", "tokens_per_key": 64, "parts": 2, "part": 1}
"""A group of which this rank has no part."""


def keys(*numbers: int) -> bytes:
    """Packed keys."""
    return b"".join(number.to_bytes(KEY_BYTES, "big") for number in numbers)


def ids(*numbers: int) -> bytes:
    """Packed block ids."""
    return np.array(numbers, "<u4").tobytes()


@dataclass
class Scene:
    """`peer` has attached SIZE bytes, registered FULL, SLIDING and ELSEWHERE, and stored keys 1 to 4 of group 0."""

    daemon: Daemon
    salt: str
    instance: bytes = field(default_factory=lambda: os.urandom(16))
    jobs: int = 100

    def __post_init__(self) -> None:
        self.peer = self.session()
        fd = create_memfd("bad_input", SIZE)
        (self.allocation,) = self.peer.attach([fd])
        os.close(fd)
        self.tensor = {"allocation": self.allocation, **TENSOR}
        groups = [FULL, SLIDING, ELSEWHERE]
        self.registration = self.peer.ok("register", tensors=[self.tensor], groups=groups)["registration"]
        self.store(self.peer, keys(1, 2, 3, 4), ids(0, 1, 2, 3))

    @property
    def namespace(self) -> Fields:
        return {"model": "bad input", "salt": self.salt, "key_bytes": KEY_BYTES}

    def session(self, role: str = "worker", **fields: Any) -> RawPeer:
        """Opens one more session of the same namespace and, unless `fields` name another, of the same instance."""
        peer = self.daemon.peer()
        peer.hello(role, namespace=self.namespace, **{"instance": self.instance, **fields})
        return peer

    def stranger(self, role: str = "worker") -> RawPeer:
        """A session of the same namespace, but of another instance."""
        return self.session(role, instance=os.urandom(16))

    def job(self, **fields: Any) -> Fields:
        """Returns a store of key 9 that is right but for these fields."""
        groups = [{"group": 0, "keys": keys(9), "blocks": ids(9)}]
        return {"job": self.new_job(), "registration": self.registration, "groups": groups, **fields}

    def new_job(self) -> int:
        self.jobs += 1
        return self.jobs

    def store(self, peer: RawPeer, packed: bytes, blocks: bytes) -> None:
        """Stores to its end."""
        job = self.new_job()
        groups = [{"group": 0, "keys": packed, "blocks": blocks}]
        peer.ok("store", job=job, registration=self.registration, groups=groups)
        assert peer.completed(job)["outcome"] == "done"

    def settle(self) -> None:
        """What was stored is sealed, so that nothing changes by itself any more."""
        assert self.peer.ok("drain")["unsealed"] == 0
