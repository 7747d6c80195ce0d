"""A daemon that speaks the protocol, copies nothing, and misbehaves on command.

In the test's process (`FakeDaemon`, a thread) or as a process to be killed (`python -m tests.client.fake_daemon`).
Its pidfd names whatever process the test wants, so that the order of EOF and death can be scripted.
"""

from __future__ import annotations

import argparse
import array
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvoffloadd.errors import FramingError, KvOffloadError
from kvoffloadd.model import KeyState
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import Connection, tag_of

KEY_BYTES = 32
Handler = Callable[["FakeSession", Any], bool]
"""Returns True if it dealt with the message; else the fake goes on as usual."""


@dataclass
class FakeSession:
    """One session as the fake sees it."""

    fake: FakeDaemon
    socket: socket.socket
    connection: Connection = field(default_factory=lambda: Connection(daemon=True))
    role: str = ""
    instance: bytes = b""
    fds: list[int] = field(default_factory=list)
    registered: list[m.Register] = field(default_factory=list)
    subscribed: bool = False
    closed: bool = False

    def say(self, message: m.Message, fds: Iterable[int] = ()) -> None:
        self.raw(self.connection.send(message), fds)

    def raw(self, data: bytes, fds: Iterable[int] = ()) -> None:
        """Bytes past the protocol's own checks."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.socket.sendmsg([data], ancillary)
        except OSError:  # the client has gone
            self.close()

    def hang_up(self) -> bool:
        """Close, as a handler's answer."""
        self.close()
        return True

    def error(self, seq: int, code: str, *, retryable: bool = False) -> bool:
        self.say(m.Error(seq=seq, code=code, message=f"scripted {code}", fault="client", retryable=retryable))
        return True

    def close(self) -> None:
        """Close the socket, as an orderly daemon does after its copies have ended."""
        if not self.closed:
            self.closed = True
            self.socket.close()
            for fd in self.fds:
                os.close(fd)
            self.fds.clear()


class FakeDaemon:
    """Listens at `path` in a separate thread. `on[tag]` handlers run there, before the usual behaviour."""

    def __init__(self, path: str, *, boot_id: bytes | None = None, pid: int | None = None) -> None:
        self.path = path
        self.boot_id = os.urandom(16) if boot_id is None else boot_id
        self.pid = os.getpid() if pid is None else pid
        self.on: dict[str, Handler] = {}
        self.seen: list[tuple[str, Any]] = []
        self.peers: list[FakeSession] = []
        self.held: set[bytes] = set()
        self.leases: set[int] = set()
        self.on_disk: set[bytes] = set()
        self.promotions: dict[int, tuple[FakeSession, m.Pin | m.Prefetch, int]] = {}
        self.manual_completion = False
        self.features: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(16)
        self._ids = iter(range(1, 1 << 30))
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._stop = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close everything in order. A second time does nothing."""
        if not self._stop.is_set():
            self._stop.set()
            self.wake()
            self._thread.join()
            self._listener.close()
            os.unlink(self.path)
            for peer in self.peers:
                peer.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def run_forever(self) -> None:
        self._serve()

    def wake(self) -> None:
        os.write(self._wake_write, b"x")

    def soon(self, action: Callable[[], object], delay_s: float = 0.0) -> None:
        """Run `action` in the fake's thread."""
        self._later.append((time.monotonic() + delay_s, action))
        self.wake()

    def tags(self) -> list[str]:
        return [tag for tag, _ in self.seen]

    def last(self, tag: str) -> Any:
        return next(message for seen, message in reversed(self.seen) if seen == tag)

    def complete(self, peer: FakeSession, job: int, outcome: Any = "done", failed: Any = (), reason: str = "") -> None:
        """Push a completion, from the fake's thread."""
        peer.say(m.Completed(job=job, outcome=outcome, bytes=1, seconds=0.001, failed=list(failed), reason=reason))

    def bring(self, seq: int, *, found: bool = True) -> None:
        """Say that the promotion asked for with this seq has ended, from the fake's thread. `found`: it succeeded."""
        peer, message, lease = self.promotions.pop(seq)
        for one in message.groups:
            keys = self._keys(one) & self.on_disk
            self.on_disk -= keys
            self.held |= keys if found else set()
        lease = lease if lease in self.leases else 0
        states = self._states(message.groups, KeyState.MISS, KeyState.HIT)
        peer.say(m.Ready(seq=seq, states=states, boundaries=self._boundaries(states), lease=lease))

    # --- the thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._stop.is_set():
            now = time.monotonic()
            due = [item for item in self._later if item[0] <= now]
            self._later = [item for item in self._later if item[0] > now]
            for _, action in due:
                action()
            timeout = min([at - now for at, _ in self._later], default=5.0)
            open_peers = {peer.socket.fileno(): peer for peer in self.peers if not peer.closed}
            ready = select.poll()  # not `select`, which knows only the first 1,024 descriptors of a process
            for fd in (self._listener.fileno(), self._wake_read, *open_peers):
                ready.register(fd, select.POLLIN)
            for fd, _ in ready.poll(max(timeout, 0) * 1000):
                if fd == self._listener.fileno():
                    self.peers.append(FakeSession(self, self._listener.accept()[0]))
                elif fd == self._wake_read:
                    os.read(self._wake_read, 100)
                else:
                    self._read(open_peers[fd])

    def _read(self, peer: FakeSession) -> None:
        if peer.closed:
            return
        try:
            data, ancillary, _, _ = peer.socket.recvmsg(1 << 20, socket.CMSG_SPACE(64 * 4), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data, ancillary = b"", []
        fds = array.array("i")
        for _, _, packed in ancillary:
            fds.frombytes(packed)
        if not data:
            peer.close()
            return
        peer.connection.receive_data(data, fds)
        while not peer.closed:
            try:
                found = peer.connection.next_message()
            except FramingError:
                peer.close()
                return
            except KvOffloadError as error:
                peer.error(getattr(error, "seq", 0), error.code)
                continue
            if found is not None:
                self._take(peer, *found)
            elif peer.connection.unpacking is None:
                return

    def _take(self, peer: FakeSession, message: m.Message, fds: list[int]) -> None:
        peer.fds += fds
        tag = tag_of(message)
        self.seen.append((tag, message))
        handler = self.on.get(tag)
        if handler is None or not handler(peer, message):
            getattr(self, "_on_" + tag)(peer, message)

    # --- the usual behaviour -----------------------------------------------------------------------

    def _on_hello(self, peer: FakeSession, message: m.Hello) -> None:
        peer.role, peer.instance = message.role, message.instance
        pidfd = os.pidfd_open(self.pid)
        limits = m.Limits(frame_bytes=4 << 20, fds_per_frame=64, keys_per_request=8192, jobs=64, deadline_s=600.0)
        welcome = m.Welcome(
            seq=message.seq,
            version=1,
            boot_id=self.boot_id,
            session=next(self._ids),
            namespace=b"n" * 16,
            epoch=0,
            limits=limits,
            features=self.features,
        )
        peer.say(welcome, [pidfd])
        os.close(pidfd)

    def _done(self, peer: FakeSession, message: Any) -> None:
        peer.say(m.Done(seq=message.seq))

    _on_ping = _on_touch = _on_keep = _on_cancel = _on_detach = _done

    def _on_retain(self, peer: FakeSession, message: m.Retain) -> None:
        keys = sum(len(one.keys) // KEY_BYTES for one in message.groups)
        peer.say(m.Retained(seq=message.seq, claims=1, keys=keys))

    def _on_forget(self, peer: FakeSession, message: m.Forget) -> None:
        peer.say(m.Retained(seq=message.seq, claims=1, keys=1))

    def _on_prefetch_claims(self, peer: FakeSession, message: m.PrefetchClaims) -> None:
        peer.say(m.PrefetchedClaims(seq=message.seq, claims=1, keys=1, memory_keys=1))

    def _on_claims(self, peer: FakeSession, message: m.Claims) -> None:
        peer.say(m.Claimed(seq=message.seq, claims=[], cursor=0))

    def _on_subscribe(self, peer: FakeSession, message: m.Subscribe) -> None:
        peer.subscribed = True
        self._done(peer, message)

    def _on_attach(self, peer: FakeSession, message: m.Attach) -> None:
        sizes = [os.fstat(fd).st_size for fd in peer.fds[-message.fds :]]
        peer.say(m.Attached(seq=message.seq, allocations=[next(self._ids) for _ in sizes], sizes_bytes=sizes))

    def _on_register(self, peer: FakeSession, message: m.Register) -> None:
        peer.registered.append(message)
        peer.say(m.Registered(seq=message.seq, registration=next(self._ids)))

    _on_unregister = _done

    @staticmethod
    def _keys(one: Any) -> set[bytes]:
        return {one.keys[i : i + KEY_BYTES] for i in range(0, len(one.keys), KEY_BYTES)}

    def _state(self, key: bytes, absent: KeyState, present: KeyState) -> KeyState:
        return present if key in self.held else KeyState.PENDING if key in self.on_disk else absent

    def _states(self, groups: Iterable[Any], absent: KeyState, present: KeyState) -> list[bytes]:
        return [
            bytes(self._state(one.keys[i : i + KEY_BYTES], absent, present) for i in range(0, len(one.keys), KEY_BYTES))
            for one in groups
        ]

    @staticmethod
    def _boundaries(states: list[bytes]) -> bytes:
        return np.array([16], "<u4").tobytes() if any(KeyState.HIT in one for one in states) else b""

    def _on_lookup(self, peer: FakeSession, message: Any, lease: int = 0, promoting: int = 0) -> None:
        states = self._states(message.groups, KeyState.MISS, KeyState.HIT)
        boundaries = self._boundaries(states)
        peer.say(m.Found(seq=message.seq, states=states, boundaries=boundaries, lease=lease, promoting=promoting))

    def _on_prefetch(self, peer: FakeSession, message: m.Pin | m.Prefetch, lease: int = 0) -> None:
        promoting = sum(len(self._keys(one) & self.on_disk) for one in message.groups)
        if promoting:
            self.promotions[message.seq] = (peer, message, lease)
        self._on_lookup(peer, message, lease, promoting)

    def _on_pin(self, peer: FakeSession, message: m.Pin) -> None:
        lease = next(self._ids)
        self.leases.add(lease)
        self._on_prefetch(peer, message, lease)

    def _on_release(self, peer: FakeSession, message: m.Release) -> None:
        if message.lease in self.leases:
            self.leases.discard(message.lease)
            self._done(peer, message)
        else:
            peer.error(message.seq, "unknown_name")

    def _on_reserve(self, peer: FakeSession, message: m.Reserve) -> None:
        lease = next(self._ids)
        self.leases.add(lease)
        states = self._states(message.groups, KeyState.RESERVED, KeyState.HIT)
        peer.say(m.Reserved(seq=message.seq, states=states, lease=lease))

    def _on_store(self, peer: FakeSession, message: m.Store) -> None:
        states = self._states(message.groups, KeyState.RESERVED, KeyState.HIT)
        for one in message.groups:
            self.held |= self._keys(one)
        self._accept(peer, message, states)

    def _on_load(self, peer: FakeSession, message: m.Load) -> None:
        """Keys on disk are taken as hits."""
        states = self._states(message.groups, KeyState.MISS, KeyState.HIT)
        self._accept(peer, message, [one.replace(bytes([KeyState.PENDING]), bytes([KeyState.HIT])) for one in states])

    def _accept(self, peer: FakeSession, message: Any, states: list[bytes]) -> None:
        peer.say(m.Accepted(seq=message.seq, job=message.job, states=states))
        if not self.manual_completion:
            self.complete(peer, message.job, failed=[b"" for _ in message.groups])

    def _on_delete(self, peer: FakeSession, message: m.Delete) -> None:
        keys = sum(len(one.keys) // KEY_BYTES for one in message.groups)
        peer.say(m.Deleted(seq=message.seq, keys=keys, bytes=0, disk_keys=0, unrecorded=[]))

    def _on_clear(self, peer: FakeSession, message: m.Clear) -> None:
        peer.say(m.Cleared(seq=message.seq, keys=len(self.held), bytes=0))
        self.held.clear()

    def _on_drain(self, peer: FakeSession, message: m.Drain) -> None:
        peer.say(m.Drained(seq=message.seq, jobs=0, unsealed=0))

    def _on_status(self, peer: FakeSession, message: m.Status) -> None:
        peer.say(m.Report(seq=message.seq, status={"keys": len(self.held)}))

    def _on_verify(self, peer: FakeSession, message: m.Verify) -> None:
        peer.say(m.Verified(seq=message.seq, findings=[], slots=0, payloads=0, records=len(self.on_disk)))

    def _on_snapshot(self, peer: FakeSession, message: m.Snapshot) -> None:
        """One key a page."""
        keys = sorted(self.held)
        cursor = message.cursor + 1 if message.cursor + 1 < len(keys) else 0
        peer.say(m.Listing(seq=message.seq, keys=b"".join(keys[message.cursor : message.cursor + 1]), cursor=cursor))

    def _on_bye(self, peer: FakeSession, message: m.Bye) -> None:
        peer.say(m.Done(seq=message.seq))
        peer.close()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--never-complete", action="store_true")
    arguments = parser.parse_args()
    fake = FakeDaemon(arguments.socket)
    fake.manual_completion = arguments.never_complete
    print("ready", flush=True)
    fake.run_forever()


if __name__ == "__main__":
    main()
