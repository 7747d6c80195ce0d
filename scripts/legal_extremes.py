#!/usr/bin/env python3
"""The largest requests of each type that are legal, sent to a daemon that holds many keys, while another peer pings.

One case after the other, each in a session of its own. `turn` is the daemon's own word: the most CPU time that its
event loop took from one beat (every 5 ms) to the next while the case ran (`loop.recent_cpu_s` of its status), so that a
busy machine does not change it much. While such a turn lasts nobody is served. `wait` is the longest ping of the
bystander, by the clock.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _bench import at_most, judged, keys_of, print_bounds, print_grid
from _daemon import DaemonProcess, private_folder
from _output import Live, print_json
from _raw_peer import RawPeer

from kvoffloadd.client import Client
from kvoffloadd.server.lag import WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
PAGE = 4096
KEYS = 16_384
"""Of one request: `limits.keys_per_request`."""
LAYERS = 160
FRAME_IDS = 983_040
"""Block ids that fit into one frame, for as many keys as a request may have."""
WAITING_JOBS = 1000
DRAINS = 256
LEASES = 30_000
TURN_MAX_S = 0.020
BEAT_S = 0.005
REPLY_S = 120.0
PING_EVERY_S = 0.002


class Scene:
    """A daemon with keys, and what sessions need to ask for much of it."""

    def __init__(self, socket: Path, rng: np.random.Generator) -> None:
        self.rng = rng
        self.held = 0
        self._socket = socket
        self._open: list[RawPeer] = []
        self._models = 0

    def session(self, model: str = "extremes") -> RawPeer:
        """Said hello; closed behind the case."""
        peer = RawPeer(self._socket)
        self._open.append(peer)
        ask(peer, "hello", version=1, role="worker", instance=os.urandom(16), namespace={"model": model})
        return peer

    def new_model(self) -> str:
        """A namespace of its own."""
        self._models += 1
        return f"extremes-{self._models}"

    def close(self) -> None:
        """All sessions."""
        for peer in self._open:
            peer.socket.close()
        self._open.clear()

    def keys(self, count: int, *, new: bool = False) -> bytes:
        """Packed keys that are held, or that are not."""
        begin = 1 << 40 if new else int(self.rng.integers(0, max(self.held - count, 0) + 1))
        begin += int(self.rng.integers(0, 1 << 30)) if new else 0
        return keys_of(np.arange(begin, begin + count)).tobytes()

    def fill(self, count: int) -> None:
        """So many keys, of a page each."""
        peer, registration = self.worker()
        while self.held < count:
            share = min(KEYS, count - self.held)
            keys = keys_of(np.arange(self.held, self.held + share)).tobytes()
            run(peer, "store", 1, registration, keys, np.zeros(share, "<u4"))
            self.held += share
        self.close()

    def worker(self) -> tuple[RawPeer, int]:
        """A session whose blocks are a page each."""
        peer = self.session()
        return peer, register(peer, [(PAGE, 64)], [group(0, [(0, 0, PAGE, 1)])])


def ask(peer: RawPeer, tag: str, fds: list[int] | None = None, /, **fields: Any) -> dict[str, Any]:
    """The reply, which may be no error."""
    reply = peer.ask({"type": tag, "seq": 1, **fields}, REPLY_S, fds or ())
    if reply is None or reply["type"] == "error":
        raise SystemExit(f"{tag} was refused: {reply}")
    return reply


def completed(peer: RawPeer, jobs: int = 1) -> list[str]:
    """The outcomes of so many jobs."""
    found: list[str] = []
    until = time.monotonic() + REPLY_S
    while len(found) < jobs:
        message = peer.pushes.pop(0) if peer.pushes else peer.message(until)
        if message is None:
            raise SystemExit("the daemon has hung up")
        if message["type"] == "completed":
            found.append(message["outcome"])
    return found


def run(peer: RawPeer, tag: str, job: int, registration: int, keys: bytes, ids: Any, **more: Any) -> None:
    """A job, to its end."""
    number = more.pop("group", 0)
    groups = more.pop("groups", None) or [{"group": number, "keys": keys, "blocks": ids.astype("<u4").tobytes()}]
    ask(peer, tag, job=job, registration=registration, groups=groups, **more)
    completed(peer)


def group(number: int, refs: list[tuple[int, int, int, int]], blocks_per_key: int = 1) -> dict[str, Any]:
    """A group of refs (tensor, offset, length, count), of which runs are twice their length apart."""
    told = [{"tensor": t, "offset": o, "length": n, "count": c, "stride": 2 * n if c > 1 else 0} for t, o, n, c in refs]
    return {
        "group": number, "kind": "full", "tokens_per_key": 16, "blocks_per_key": blocks_per_key, "refs": told
    }  # fmt: skip


def register(
    peer: RawPeer, shapes: list[tuple[int, int]], groups: list[dict[str, Any]], *, signal: bool = False
) -> int:
    """Tensors of (page bytes, blocks) side by side in one memfd; with `signal` the memfd's last page is one."""
    ends = np.cumsum([page * blocks for page, blocks in shapes]).tolist()
    fd = os.memfd_create("extremes")
    os.ftruncate(fd, ends[-1] + PAGE)
    (allocation,) = ask(peer, "attach", [fd], kind="shm", fds=1)["allocations"]
    os.close(fd)
    tensors = [
        {"allocation": allocation, "offset": end - page * blocks, "num_blocks": blocks, "page_bytes": page,
         "stride_bytes": page} for (page, blocks), end in zip(shapes, ends, strict=True)
    ]  # fmt: skip
    signals = [allocation] if signal else []
    return int(ask(peer, "register", tensors=tensors, groups=groups, signals=signals)["registration"])


# --- cases: each is a generator, of which what comes before its `yield` is not measured -----------------------------

Case = "Callable[[Scene], Iterator[None]]"


def lookup_of_held_keys(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    ask(peer, "lookup", groups=[{"group": 0, "keys": scene.keys(KEYS)}])


def lookup_of_unknown_keys(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    ask(peer, "lookup", groups=[{"group": 0, "keys": scene.keys(KEYS, new=True)}])


def lookup_in_256_groups(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    ask(peer, "register", tensors=[], groups=[group(n, []) for n in range(256)])
    keys = [scene.keys(KEYS // 256) for _ in range(256)]
    yield
    ask(peer, "lookup", groups=[{"group": n, "keys": packed} for n, packed in enumerate(keys)])


def pin_and_release(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    lease = ask(peer, "pin", groups=[{"group": 0, "keys": scene.keys(KEYS)}])["lease"]
    ask(peer, "release", lease=lease)


def touch(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    ask(peer, "touch", groups=[{"group": 0, "keys": scene.keys(KEYS)}])


def reserve_and_release(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    lease = ask(peer, "reserve", groups=[{"group": 0, "keys": scene.keys(KEYS, new=True)}])["lease"]
    ask(peer, "release", lease=lease)


def store_and_load(scene: Scene) -> Iterator[None]:
    peer, registration = scene.worker()
    keys, ids = scene.keys(KEYS, new=True), np.zeros(KEYS)
    yield
    run(peer, "store", 1, registration, keys, ids)


def store_and_load_of_160_layers(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    registration = register(peer, [(16, KEYS)] * LAYERS, [group(0, [(n, 0, 16, 1) for n in range(LAYERS)])])
    keys, ids = scene.keys(KEYS, new=True), scene.rng.permutation(KEYS)
    yield
    run(peer, "store", 1, registration, keys, ids)
    run(peer, "load", 2, registration, keys, ids[::-1])


def jobs_of_a_million_block_ids(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    per_key = FRAME_IDS // KEYS
    registration = register(peer, [(8, FRAME_IDS)], [group(0, [(0, 0, 8, 1)], per_key)])
    keys, ids = scene.keys(KEYS // 4, new=True), scene.rng.permutation(FRAME_IDS)[: FRAME_IDS // 4]
    yield
    run(peer, "store", 1, registration, keys, ids)
    run(peer, "load", 2, registration, keys, ids[::-1])


def jobs_of_four_million_runs(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    registration = register(peer, [(MIB, 8)], [group(0, [(0, 0, 1, 1 << 19)])])
    keys = scene.keys(8, new=True)
    yield
    run(peer, "store", 1, registration, keys, np.arange(8))
    run(peer, "load", 2, registration, keys, np.arange(8))


def jobs_of_64_groups(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    registration = register(peer, [(PAGE, 256)], [group(n, [(0, 16 * n, 16, 1)]) for n in range(64)])
    keys = [scene.keys(KEYS // 256, new=True) for _ in range(64)]
    groups = [
        {"group": n, "keys": packed, "blocks": np.arange(KEYS // 256, dtype="<u4").tobytes()}
        for n, packed in enumerate(keys)
    ]
    yield
    run(peer, "store", 1, registration, b"", None, groups=groups)
    run(peer, "load", 2, registration, b"", None, groups=groups)


def waiting(scene: Scene) -> tuple[RawPeer, Callable[[], None]]:
    """Jobs that wait for a signal, and what raises it."""
    peer = scene.session()
    fds = [os.memfd_create("extremes") for _ in range(2)]
    for fd in fds:
        os.ftruncate(fd, 64 * PAGE)
    memory, word = ask(peer, "attach", fds, kind="shm", fds=2)["allocations"]
    tensor = {"allocation": memory, "offset": 0, "num_blocks": 64, "page_bytes": PAGE, "stride_bytes": PAGE}
    made = ask(peer, "register", tensors=[tensor], groups=[group(0, [(0, 0, PAGE, 1)])], signals=[word])
    for job in range(WAITING_JOBS):
        groups = [{"group": 0, "keys": scene.keys(16), "blocks": struct.pack("<16I", *range(16))}]
        ready = {"signal": 0, "offset": 0, "value": 1}
        ask(peer, "load", job=job, registration=made["registration"], groups=groups, ready=ready, deadline_s=600.0)

    def raise_signal() -> None:
        os.pwrite(fds[1], b"\1", 0)

    return peer, raise_signal


def a_thousand_jobs_begin_at_once(scene: Scene) -> Iterator[None]:
    peer, raise_signal = waiting(scene)
    yield
    raise_signal()
    completed(peer, WAITING_JOBS)


def a_session_with_a_thousand_jobs_ends(scene: Scene) -> Iterator[None]:
    peer, _ = waiting(scene)
    yield
    peer.socket.close()


def drains_of_a_thousand_jobs(scene: Scene) -> Iterator[None]:
    peer, raise_signal = waiting(scene)
    yield
    for seq in range(2, 66):
        peer.tell({"type": "drain", "seq": seq, "deadline_s": 60.0})
    raise_signal()
    completed(peer, WAITING_JOBS)


def drains_of_many_sessions(scene: Scene) -> Iterator[None]:
    """As many as a user may have."""
    peer, raise_signal = waiting(scene)
    peers = [scene.session() for _ in range(DRAINS // 64)]
    yield
    for one in peers:
        for seq in range(2, 66):
            one.tell({"type": "drain", "seq": seq, "deadline_s": 60.0})
    raise_signal()
    completed(peer, WAITING_JOBS)
    for one in peers:
        for _ in range(64):
            one.message(time.monotonic() + REPLY_S)


def an_instance_with_many_leases_ends(scene: Scene) -> Iterator[None]:
    """Of one key each."""
    peer, _ = scene.worker()
    for _ in range(LEASES):
        ask(peer, "pin", groups=[{"group": 0, "keys": scene.keys(1)}])
    yield
    peer.socket.close()
    watch = scene.session()
    while ask(watch, "status")["status"]["leases"]["read"]:
        pass


def status_of_a_thousand_jobs(scene: Scene) -> Iterator[None]:
    peer, _ = waiting(scene)
    yield
    ask(peer, "status")


def attach_64(scene: Scene) -> Iterator[None]:
    peer = scene.session()
    fds = [os.memfd_create("extremes") for _ in range(64)]
    for fd in fds:
        os.ftruncate(fd, MIB)
    yield
    ask(peer, "attach", fds, kind="shm", fds=64)
    for fd in fds:
        os.close(fd)


def register_256_groups(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    yield
    ask(peer, "register", tensors=[], groups=[group(n, []) for n in range(256)])


def register_2048_tensors(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    yield
    register(peer, [(64, 64)] * 2048, [group(0, [(n, 0, 64, 1) for n in range(2048)])])


def register_a_million_runs(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    yield
    register(peer, [(2 * MIB, 2)], [group(0, [(0, 0, 1, (1 << 20) - 1)])])


def snapshot(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    cursor = 0
    while True:
        cursor = ask(peer, "snapshot", group=0, cursor=cursor)["cursor"]
        if not cursor:
            return


def status(scene: Scene) -> Iterator[None]:
    peers = [scene.session() for _ in range(200)]
    yield
    ask(peers[0], "status")


def verify(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    ask(peer, "verify", payloads=True)


def subscribe_and_clear(scene: Scene) -> Iterator[None]:
    """The last: nothing is held behind it."""
    peer, _ = scene.worker()
    ask(peer, "subscribe")
    yield
    ask(peer, "clear")


CASES: tuple[Callable[[Scene], Iterator[None]], ...] = (
    lookup_of_held_keys, lookup_of_unknown_keys, lookup_in_256_groups, pin_and_release, touch, reserve_and_release,
    store_and_load, store_and_load_of_160_layers, jobs_of_a_million_block_ids, jobs_of_four_million_runs,
    jobs_of_64_groups, a_thousand_jobs_begin_at_once, a_session_with_a_thousand_jobs_ends, drains_of_a_thousand_jobs,
    drains_of_many_sessions, an_instance_with_many_leases_ends, status_of_a_thousand_jobs, attach_64,
    register_256_groups, register_2048_tensors, register_a_million_runs, snapshot, status, verify, subscribe_and_clear,
)  # fmt: skip


class Bystander:
    """Pings from a thread of its own, and asks now and then for the daemon's longest turn."""

    def __init__(self, socket: Path) -> None:
        self._client = Client(socket, namespace=None, role="observer", deadline_s=60.0)
        self._client.connect()
        self._worst_s = self._turn_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ping, daemon=True)
        self._thread.start()

    def _ping(self) -> None:
        asked = 0.0
        while not self._stop.wait(PING_EVERY_S):
            begun = time.monotonic()
            self._client.ping()
            now = time.monotonic()
            self._worst_s = max(self._worst_s, now - begun)
            if now - asked > WINDOW_S / 2:
                asked = now
                self._turn_s = max(self._turn_s, self._client.status()["loop"]["recent_cpu_s"])

    def take(self) -> tuple[float, float]:
        """The longest ping and the longest turn since the last call, in seconds."""
        found = self._worst_s, self._turn_s
        self._worst_s = self._turn_s = 0.0
        return found

    def stop(self) -> None:
        """No more pings."""
        self._stop.set()
        self._thread.join()
        self._client.close()


def measure(
    scene: Scene, observer: Client, bystander: Bystander, case: Callable[[Scene], Iterator[None]]
) -> dict[str, Any]:
    """One case: the longest turn in seconds, and the longest ping."""
    steps = case(scene)
    next(steps)
    time.sleep(2 * WINDOW_S + 0.1)  # what came before is forgotten
    bystander.take()
    begun = time.monotonic()
    for _ in steps:
        raise AssertionError(case.__name__)
    took_s = time.monotonic() - begun
    time.sleep(0.2)  # what goes on behind the reply
    last_s = observer.status()["loop"]["recent_cpu_s"]
    wait_s, turn_s = bystander.take()
    scene.close()
    return {"turn_s": max(turn_s, last_s), "wait_s": wait_s, "took_s": took_s}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=200_000, help="held when the cases begin (default: %(default)s)")
    parser.add_argument("--case", action="append", choices=[case.__name__ for case in CASES], help="only these")
    parser.add_argument("--seed", type=int, default=1, help="which keys and block ids (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the tables")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a turn is longer than its bound")
    found = parser.parse_args()
    if found.keys < KEYS:
        parser.error(f"--keys must be at least {KEYS}")
    return found


def main() -> int:
    """Run all cases and show them."""
    options = arguments()
    chosen = [case for case in CASES if not options.case or case.__name__ in options.case]
    cases: dict[str, dict[str, Any]] = {}
    with private_folder() as folder:
        daemon = DaemonProcess(Path(folder), (options.keys + 8 * KEYS) * PAGE // MIB * MIB, {})
        daemon.start()
        try:
            scene = Scene(daemon.socket, np.random.default_rng(options.seed))
            scene.fill(options.keys)
            bystander = Bystander(daemon.socket)
            with (
                Client(daemon.socket, namespace=None, role="observer", deadline_s=60.0) as observer,
                Live("cases", len(chosen)) as live,
            ):
                for number, case in enumerate(chosen):
                    live.show(number, case.__name__)
                    cases[case.__name__] = measure(scene, observer, bystander, case)
            bystander.stop()
        finally:
            daemon.stop()
    bounds = [at_most(f"{name}, ms", case["turn_s"] * 1e3, (TURN_MAX_S + BEAT_S) * 1e3) for name, case in cases.items()]
    result = judged({"seed": options.seed, "keys": options.keys, "cases": cases}, bounds)
    if options.json:
        print_json(result)
    else:
        rows = ((n, *(f"{c[k] * 1e3:,.1f}" for k in ("turn_s", "wait_s", "took_s"))) for n, c in cases.items())
        print_grid("legal extremes, milliseconds", ("case", "turn", "wait", "took"), rows)
        print_bounds(result)
    return 1 if options.check and not result["within_budget"] else 0


if __name__ == "__main__":
    sys.exit(main())
