"""The remote tier's path of bytes against a plain TCP socket, in one run on one machine.

The daemon's side of it alone, `RemoteStore` with its agent, a hash lane and an arena, against a real store. Each round
fetches and puts the same bytes in batches, one after the other with the plain socket, which moves as many from one
process to another and does nothing else; what is fetched is verified. Then `exists` of 64 and 512 keys, where one in
eight is there. `ratio_to_limit` is the median over the rounds of fetched GB/s by those of the plain socket.

Then what the tier costs pins when the store is gone: see `remotepins`.

CPU seconds are of all threads, of this process, its agent and the store. Where root may, the two sides are hosts with a
wire between them, else the loopback device. TCP alone: what RDMA does is not measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.agentwire.names import Space, era_prefix
from kvoffloadd.config import RemoteConfig
from kvoffloadd.model import PAGE_BYTES, U8Array, U64Array
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.hashing import hash_payloads
from kvoffloadd.storage.remote.store import RemoteState, RemoteStore
from kvoffloadd.storage.remote.transfers import Names, RemoteStatus
from kvoffloadd.testing.figures import keys_of, median_ratio, p50, p99, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import end, module, private_folder, spawn
from kvoffloadd.testing.wait import HANG_S, until
from scripts.bench import remotepins
from scripts.harness.lab import Host, Lab, why_not_isolated
from scripts.harness.program import benchmark_line, show_result
from scripts.harness.stores import Master, MooncakeStore, StoreProcess, Valkey, why_no_mooncake, why_no_valkey

KIB, MIB = 1 << 10, 1 << 20
OBJECT_BYTES = (128 * KIB, MIB, 4 * MIB)
ROUND_BYTES = 64 * MIB
BATCH_BYTES = 16 * MIB
KEY_COUNTS = (64, 512)
ONE_IN = 8
STORE_BYTES = 512 * MIB
PLAIN_PORT = 15999
CLONE_NEWNET = 0x40000000
SPACE = Space(b"bench-fingerprin", b"bench-shape-1234", 1, b"bench---", 0, 32)
ENGINES: dict[str, Callable[[], str]] = {"mooncake": why_no_mooncake, "valkey": why_no_valkey}
SIZE = struct.Struct("<Q")


@dataclass(slots=True)
class RemoteRound:
    """Seconds that passed, and CPU seconds by process, for ROUND_BYTES."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[dict[str, float]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Medians."""
        gigabytes = ROUND_BYTES / 1e9
        names = self.cpu[0] if self.cpu else {}
        return {
            "gb_per_s": round(gigabytes / p50(self.seconds), 2),
            "cpu_s_per_gb": {name: round(p50([each[name] for each in self.cpu]) / gigabytes, 2) for name in names},
        }


def cpu_s(pid: int) -> float:
    """Sums the CPU seconds of all its threads, those that have ended too."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- the plain socket ---


def serve_plain(address: str) -> None:
    """Send as many bytes as each request asks for, until killed."""
    memory = memoryview(bytes(BATCH_BYTES))
    with socket.create_server((address, PLAIN_PORT)) as server:
        while True:
            peer, _ = server.accept()
            with peer:
                while request := peer.recv(SIZE.size, socket.MSG_WAITALL):
                    (left,) = SIZE.unpack(request)
                    while left:
                        left -= peer.send(memory[: min(left, BATCH_BYTES)])


class PlainSocket:
    """Receives bytes from another host into memory of this process."""

    def __init__(self, address: str) -> None:
        until(lambda: self._connect(address), "the plain server listens", HANG_S, every_s=0.05)
        self._memory = memoryview(bytearray(BATCH_BYTES))

    def _connect(self, address: str) -> bool:
        try:
            self._sock = socket.create_connection((address, PLAIN_PORT), 5.0)
        except OSError:
            return False
        return True

    def fetch(self, size: int) -> None:
        """Fetches `size` bytes, a batch at a time."""
        for _ in range(size // BATCH_BYTES):
            self._sock.sendall(SIZE.pack(BATCH_BYTES))
            at = 0
            while at < BATCH_BYTES:
                at += self._sock.recv_into(self._memory[at:])


# --- the remote tier ---


class RemoteBench:
    """A remote store with an arena of two halves: what is put, and where it is fetched to."""

    def __init__(self, config: RemoteConfig, engine_settings: Mapping[str, Any], store: StoreProcess) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ArenaFile.make(2 * ROUND_BYTES, 2 * ROUND_BYTES)
        self._lane = Lane("hash", 1, self._loop)
        self._remote = RemoteStore(self._pool, config, engine_settings, self._loop, self._lane, os.urandom(16))
        self._store = store
        self._bytes: U8Array = self._pool.arena[:ROUND_BYTES]
        self._bytes[:] = np.random.default_rng(1).integers(0, 256, ROUND_BYTES, np.uint8)
        self._fetched: U8Array = self._pool.arena[ROUND_BYTES : 2 * ROUND_BYTES]

    async def start(self) -> None:
        """Starts the store, and waits until the agent is ready."""
        self._remote.start()
        while self._remote.state is not RemoteState.OK:
            if self._remote.reason:
                raise SystemExit(self._remote.reason)
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """End the agent."""
        await self._remote.close(HANG_S)
        await self._lane.close(HANG_S)
        self._pool.close()

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far."""
        agent = int(self._remote.figures()["agent"]["pid"])
        return {"daemon": cpu_s(os.getpid()), "agent": cpu_s(agent), "store": cpu_s(self._store.pid)}

    async def measure(self, object_bytes: int, kept: dict[str, RemoteRound]) -> None:
        """A put and a get of ROUND_BYTES."""
        count = ROUND_BYTES // object_bytes
        payload_bytes = object_bytes - PAGE_BYTES  # what is moved has a header page more: together, a round
        offsets = (np.arange(count, dtype=np.uint64) * np.uint64(object_bytes))[:, None]
        addresses: U64Array = offsets + np.uint64(self._pool.address)
        keys = keys_of(np.arange(count, dtype=np.int64), object_bytes).view(np.uint64).reshape(count, 4)
        digests = hash_payloads(addresses.ravel(), np.full(count, payload_bytes, np.int64)).reshape(count, 1, 2)
        await self._remote.sweep(era_prefix(SPACE.fingerprint, SPACE.generation, SPACE.era), _soon())
        batch = max(1, BATCH_BYTES // object_bytes)

        async def move(verb: str, base: int) -> None:
            ends = []
            for first in range(0, count, batch):
                chosen = slice(first, first + batch)
                names, where = Names(SPACE, keys[chosen]), addresses[chosen] + np.uint64(base)
                ended: asyncio.Future[Any] = self._loop.create_future()
                if verb == "put":
                    self._remote.put(names, where, [payload_bytes], digests[chosen], _soon(), ended.set_result)
                else:
                    self._remote.get(names, where, [payload_bytes], _soon(), ended.set_result)
                ends.append(ended)
            for each in await asyncio.gather(*ends):
                status = each if verb == "put" else each.status
                if (status != RemoteStatus.OK).any():
                    raise SystemExit(f"a {verb} ended with {status}")

        self._fetched[:] = 0
        for verb, base in (("put", 0), ("get", ROUND_BYTES)):
            before, began = self.cpu(), time.perf_counter()
            await move(verb, base)
            seconds, after = time.perf_counter() - began, self.cpu()
            kept.setdefault(verb, RemoteRound()).seconds.append(seconds)
            kept[verb].cpu.append({name: after[name] - before[name] for name in after})
        shape = (count, object_bytes)
        if not np.array_equal(
            self._fetched.reshape(shape)[:, :payload_bytes], self._bytes.reshape(shape)[:, :payload_bytes]
        ):
            raise SystemExit("wrong bytes")

    async def exists(self, count: int, calls: int) -> list[float]:
        """Seconds of each call."""
        keys = keys_of(np.arange(count, dtype=np.int64), count).view(np.uint64).reshape(count, 4)
        there = keys[::ONE_IN]
        addresses = np.full((len(there), 1), self._pool.address, np.uint64)
        digests = hash_payloads(addresses.ravel(), np.full(len(there), 64, np.int64)).reshape(-1, 1, 2)
        put: asyncio.Future[Any] = self._loop.create_future()
        self._remote.put(Names(SPACE, there), addresses, [64], digests, _soon(), put.set_result)
        await put
        seconds = []
        for _ in range(calls):
            ended: asyncio.Future[Any] = self._loop.create_future()
            began = time.perf_counter()
            self._remote.exists(Names(SPACE, keys), _soon(), ended.set_result)
            found = await ended
            seconds.append(time.perf_counter() - began)
            if found is None or int(found.keys.sum()) != len(there):
                raise SystemExit("exists: wrong")
        return seconds


def _soon() -> float:
    return time.monotonic() + HANG_S


async def measure(bench: RemoteBench, plain: PlainSocket, plain_pid: int, given: argparse.Namespace) -> dict[str, Any]:
    """All of one engine."""
    await bench.start()
    sizes: dict[str, dict[str, RemoteRound]] = {}
    try:
        with ProgressBar("bench_remote", given.rounds + 1) as live:
            for number in range(-1, given.rounds):
                for size in OBJECT_BYTES:
                    kept = sizes.setdefault(f"{size >> 10} KiB", {}) if number >= 0 else {}  # the first one warms up
                    before, began = {"receiver": cpu_s(os.getpid()), "sender": cpu_s(plain_pid)}, time.perf_counter()
                    plain.fetch(ROUND_BYTES)
                    round_ = kept.setdefault("plain", RemoteRound())
                    round_.seconds.append(time.perf_counter() - began)
                    after = {"receiver": cpu_s(os.getpid()), "sender": cpu_s(plain_pid)}
                    round_.cpu.append({name: after[name] - before[name] for name in after})
                    await bench.measure(size, kept)
                live.show(number + 2, f"round {number + 1} of {given.rounds}")
        lookups = {f"{count} keys": await bench.exists(count, given.calls) for count in KEY_COUNTS}
    finally:
        await bench.close()
    ratios = {
        size: round(median_ratio(rounds["plain"].seconds, rounds["get"].seconds), 2) for size, rounds in sizes.items()
    }
    return {
        "moves": {size: {verb: each.figures() for verb, each in rounds.items()} for size, rounds in sizes.items()},
        "exists": {
            name: {"p50_us": round(p50(each) * 1e6), "p99_us": round(p99(each) * 1e6)} for name, each in lookups.items()
        },
        "ratio_to_limit": ratios,
    }


@contextlib.contextmanager
def store_of(name: str, lab: Lab, folder: Path) -> Iterator[tuple[dict[str, Any], StoreProcess, StoreProcess]]:
    """The engine's settings on the lab's first host, the store on the second one, and what is asked which keys there
    are: Mooncake's master, on the hub, or the store itself.
    """
    with contextlib.ExitStack() as stack:
        if name == "valkey":
            valkey = stack.enter_context(Valkey(lab.hosts[1], folder, memory=f"{STORE_BYTES // MIB}mb"))
            yield {"url": f"redis://{valkey.place}"}, valkey, valkey
        else:
            master = stack.enter_context(Master(lab.hub, folder))
            store = stack.enter_context(MooncakeStore(lab.hosts[1], folder, master, f"{STORE_BYTES // MIB}MB"))
            yield {"master": master.place, "host": lab.hosts[0].address}, store, master


@contextlib.contextmanager
def plain_server(host: Host, folder: Path) -> Iterator[int]:
    """Its pid."""
    command = ["/usr/bin/env", *host.enter, *module("scripts.bench.remote", "--plain-server", host.address)]
    child = spawn(command, folder / "plain.log")
    try:
        yield child.pid
    finally:
        end(child, signal.SIGKILL, HANG_S)


def run_there(given: argparse.Namespace) -> dict[str, Any]:
    """Runs in this process, which is on the first host already."""
    folder = Path(given.folder)
    isolated = not why_not_isolated()
    result: dict[str, Any] = {"network": "hosts with a wire" if isolated else "loopback", "engines": {}}
    with Lab(folder, 2, isolated=isolated) as lab:
        for name in given.engine or ENGINES:
            if reason := ENGINES[name]():
                print(f"bench_remote: without {name}: {reason}", file=sys.stderr)
                continue
            result["engines"][name] = {
                **(measure_moves(name, lab, folder, given) if given.only != "pins" else {}),
                **(measure_pins(name, lab, folder, given) if given.only != "moves" else {}),
            }
    engines = result["engines"].items()
    ratios = {name: statistics.median(e["ratio_to_limit"].values()) for name, e in engines if "ratio_to_limit" in e}
    within = all(each.get("open", {}).get("within_budget", True) for _, each in engines)
    return {**result, "ratio_to_limit": ratios, "within_budget": bool(engines) and within}


def measure_moves(name: str, lab: Lab, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Bytes and questions."""
    with (
        plain_server(lab.hosts[1], folder) as plain_pid,
        store_of(name, lab, folder) as (engine_settings, store, _),
        entered(lab.hosts[0]),
    ):
        config = RemoteConfig(name, python=str(lab.hosts[0].python(folder)))
        plain = PlainSocket(lab.hosts[1].address)

        async def run() -> dict[str, Any]:
            return await measure(RemoteBench(config, engine_settings, store), plain, plain_pid, given)

        return asyncio.run(run())


def measure_pins(name: str, lab: Lab, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Measures pins, as `remotepins` describes, each part with a separate store."""
    host = lab.hosts[0]
    ends = remotepins.ENDS if host.enter else remotepins.ENDS[:-1]
    with ProgressBar("bench_remote", given.rounds) as live:
        with own_store(name, lab, folder / f"{name}-open") as (settings, first, own_folder):
            opened = remotepins.measure_open(settings, first, own_folder, given.rounds, live.show)
        dead = {}
        for what in ends:
            live.show(given.rounds, what)
            with own_store(name, lab, folder / f"{name}-{what}") as (settings, first, own_folder):
                strike = partial(remotepins.strike, what, first, lab)
                dead[what] = remotepins.measure_death(settings, strike, own_folder / "daemon")
            if host.enter:
                lab.mend(host)
    return {"open": opened, "death": dead}


@contextlib.contextmanager
def own_store(name: str, lab: Lab, folder: Path) -> Iterator[tuple[dict[str, str], StoreProcess, Path]]:
    """Settings of a daemon, what is asked which keys there are, and a folder."""
    folder.mkdir()
    with store_of(name, lab, folder) as (engine_settings, _, first):
        yield remotepins.settings_of(name, engine_settings, lab.hosts[0], folder), first, folder


@contextlib.contextmanager
def entered(host: Host) -> Iterator[None]:
    """This thread's sockets are made on that host."""
    if not host.enter:
        yield
        return
    path = host.enter[1].removeprefix("--net=")
    with open("/proc/self/ns/net", "rb") as ours, open(path, "rb") as theirs:
        libc = ctypes.CDLL(None, use_errno=True)  # `os.setns` came with Python 3.12
        if libc.setns(theirs.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            libc.setns(ours.fileno(), CLONE_NEWNET)


def show(result: dict[str, Any]) -> None:
    for name, engine in result["engines"].items():
        rows = []
        for size, verbs in engine["moves"].items():
            for verb, row in verbs.items():
                cpu = ", ".join(f"{who} {seconds:.2f}" for who, seconds in row["cpu_s_per_gb"].items())
                rows.append((size, verb, f"{row['gb_per_s']:.2f}", cpu))
        print_grid(f"{name}, {result['network']}", ("objects", "", "GB/s", "CPU seconds a GB"), rows, texts=2)
        lookups = [(keys, f"{row['p50_us']:,}", f"{row['p99_us']:,}") for keys, row in engine["exists"].items()]
        print_grid("exists", ("", "p50 us", "p99 us"), lookups)
        print(f"ratio_to_limit, fetched by plain: {engine['ratio_to_limit']}")


def show_all(result: dict[str, Any]) -> None:
    """What was measured of each engine."""
    show({**result, "engines": {name: each for name, each in result["engines"].items() if "moves" in each}})
    for name, engine in result["engines"].items():
        if "open" in engine:
            remotepins.show(name, engine)


def main() -> int:
    parser = benchmark_line(__doc__)
    parser.add_argument("--engine", action="append", choices=tuple(ENGINES), help="(default: all that are there)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=300, help="of `exists`, of each kind (default: %(default)s)")
    parser.add_argument("--only", choices=("moves", "pins"), help="(default: both)")
    parser.add_argument("--plain-server", metavar="ADDRESS", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plain_server is not None:
        serve_plain(given.plain_server)
        return 0
    with private_folder() as folder:
        given.folder = folder
        return show_result(run_there(given), given, show_all)


if __name__ == "__main__":
    sys.exit(main())
