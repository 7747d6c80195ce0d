"""What attacks on a daemon share: connections as any user, requests whose refusals are counted, and their end."""

from __future__ import annotations

import fcntl
import os
import random
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kvoffloadd.testing.wait import HANG_S
from scripts.harness.peer import Fields, RawPeer

PAGE = 4096
KEY_BYTES = 32

become = threading.Lock()
"""Only the thread that holds it changes the process's effective user, or forks."""


class RefusedError(Exception):
    """The daemon refuses what a peer asked for, which is no fault: the attack begins anew, or is over."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Target:
    """Whom to attack. `uids`: as whom, in turns; empty: as ourselves."""

    socket: Path
    metrics_port: int
    uids: tuple[int, ...] = ()


@dataclass(slots=True)
class Deeds:
    """What an attack did, and what became of it. `refusals`: by code. `problems`: what must not be."""

    asked: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return {"asked": self.asked, "refusals": dict(self.refusals), "problems": self.problems}

    def add(self, other: Deeds) -> None:
        self.asked += other.asked
        self.refusals += other.refusals
        self.problems += other.problems


class Enemy:
    """One run of an attack, with all that it has open until `leave`. For one thread; `over` ends the attack."""

    def __init__(self, target: Target, rng: random.Random, over: threading.Event) -> None:
        self.target = target
        self.rng = rng
        self.deeds = Deeds()
        self._over = over
        self._uid = rng.choice(target.uids) if target.uids else os.getuid()
        self._open: list[RawPeer] = []
        self._jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def goes_on(self) -> bool:
        """Whether the attack is still to be made."""
        return not self._over.is_set()

    def be_trusted(self) -> None:
        """Be the daemon's own user from now on, whose memory may shrink."""
        self._uid = os.getuid()

    def rest(self, seconds: float) -> None:
        self._over.wait(seconds)

    def hold(self) -> None:
        """Keep all that it has until the attack is over."""
        self._over.wait()

    def problem(self, what: str) -> None:
        self.deeds.problems.append(what)

    # --- sessions ---

    def leave(self) -> None:
        """Every connection ends, without a word."""
        while self._open:
            self._open.pop().close()

    def connect(self) -> RawPeer:
        """Connects as its user: the kernel notes who connects."""
        with become:
            self.be()
            try:
                peer = RawPeer(self.target.socket, HANG_S)
            finally:
                os.seteuid(os.getuid())
        self._open.append(peer)
        return peer

    def be(self) -> None:
        """Become its user. The caller holds `become`."""
        os.seteuid(self._uid)

    def end(self, peer: RawPeer) -> None:
        """This connection alone."""
        self._open.remove(peer)
        peer.close()

    def session(self, model: str = "", role: str = "worker", **labels: str) -> RawPeer:
        """One that the daemon has let in, in a namespace of this name (none: a new one). Raises RefusedError."""
        peer = self.connect()
        namespace = {"model": model or self.new_model(), "key_bytes": KEY_BYTES, **labels}
        self.deeds.asked += 1
        peer.tell({
            "type": "hello", "seq": 1 << 20, "version": 1, "role": role, "instance": self.rng.randbytes(16),
            "namespace": namespace,
        })  # fmt: skip
        _judge(self.counted(peer.reply() or {"type": "error", "code": "hung up"}))
        return peer

    def new_model(self) -> str:
        """No other session's."""
        return f"hostile-{self.rng.getrandbits(64):x}"

    def worker(self, model: str = "", *, blocks: int = 64, page_bytes: int = PAGE) -> tuple[RawPeer, int]:
        """A session with one group of pages, and its registration. Raises RefusedError."""
        peer = self.session(model)
        return peer, self.register(peer, blocks, page_bytes)

    def register(self, peer: RawPeer, blocks: int = 64, page_bytes: int = PAGE, **more: Any) -> int:
        """Registers pages in a new memfd, whose first word is also a signal. Raises RefusedError."""
        fd = memory(blocks * page_bytes)
        try:
            (allocation,) = self.attach(peer, [fd])
        finally:
            os.close(fd)
        return self.register_pages(peer, allocation, blocks, page_bytes, signals=[allocation], **more)

    def register_pages(self, peer: RawPeer, allocation: int, blocks: int, page_bytes: int = PAGE, **more: Any) -> int:
        """The pages of an allocation. Raises RefusedError."""
        reply = self.must(peer, "register", **pages_of(allocation, blocks, page_bytes), **more)
        return int(reply["registration"])

    def attach(self, peer: RawPeer, fds: Sequence[int]) -> list[int]:
        """Raises RefusedError."""
        return list(self.must(peer, "attach", rights=fds, kind="shm", fds=len(fds))["allocations"])

    # --- requests ---

    def ask(self, peer: RawPeer, tag: str, **fields: Any) -> Fields:
        """The reply, whatever it is."""
        self.deeds.asked += 1
        return self.counted(peer.ask(tag, **fields))

    def must(self, peer: RawPeer, tag: str, **fields: Any) -> Fields:
        """The reply that grants it. Raises RefusedError."""
        return _judge(self.ask(peer, tag, **fields))

    def counted(self, reply: Fields) -> Fields:
        """A reply that has come: refusals are counted, and must not be the daemon's fault."""
        if reply["type"] == "error":
            self.deeds.refusals[str(reply["code"])] += 1
            if reply.get("fault") == "daemon":
                self.problem(f"the daemon says that it is to blame: {reply.get('message')}")
        return reply

    def job(self, keys: bytes, registration: int, *, blocks: int = 64, **more: Any) -> Fields:
        """Returns the fields of a job that names these keys, and the first `blocks` blocks in turn."""
        self._jobs += 1
        count = len(keys) // KEY_BYTES
        ids = struct.pack(f"<{count}I", *(at % blocks for at in range(count)))
        groups = [{"group": 0, "keys": keys, "blocks": ids}]
        return {"job": self._jobs, "registration": registration, "groups": groups, **more}

    def run(self, peer: RawPeer, tag: str, fields: Fields) -> str:
        """A job to its end; its outcome. Raises RefusedError."""
        self.must(peer, tag, **fields)
        return str(peer.completed(fields["job"])["outcome"])

    def keys(self, count: int) -> bytes:
        """New ones."""
        return self.rng.randbytes(count * KEY_BYTES)

    # --- connections from which nothing is expected ---

    def push(self, peer: RawPeer, data: bytes) -> bool:
        """Sends as much of it as the kernel takes now. False: the connection is at its end."""
        self.deeds.asked += 1
        peer.socket.setblocking(False)
        try:
            peer.socket.send(data)
        except BlockingIOError:
            pass
        except OSError:
            return False
        finally:
            peer.socket.settimeout(HANG_S)
        return True

    def is_ended(self, peer: RawPeer) -> bool:
        """Whether the daemon has closed the connection; what it sent before is read."""
        peer.socket.setblocking(False)
        try:
            return not peer.read()
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            peer.socket.settimeout(HANG_S)


Attack = Callable[[Enemy], None]


def _judge(reply: Fields) -> Fields:
    if reply["type"] == "error":
        raise RefusedError(str(reply["code"]))
    return reply


def named(keys: bytes, group: int = 0) -> list[Fields]:
    """Returns the keys as requests name keys of one group."""
    return [{"group": group, "keys": keys}]


def pages_of(allocation: int, blocks: int, page_bytes: int = PAGE) -> Fields:
    """The fields of a `register`: a tensor of pages, and a group whose payloads they are."""
    tensor = {
        "allocation": allocation, "offset": 0, "num_blocks": blocks, "page_bytes": page_bytes,
        "stride_bytes": page_bytes,
    }  # fmt: skip
    ref = {"tensor": 0, "offset": 0, "length": page_bytes}
    return {"tensors": [tensor], "groups": [{"group": 0, "kind": "full", "tokens_per_key": 16, "refs": [ref]}]}


def memory(size_bytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    """A sparse memfd whose owner may do with it what the seals allow. The caller owns the descriptor."""
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
