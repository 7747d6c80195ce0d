"""Round trips to the daemon, beside those to a process that does nothing but send every byte back."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Ref, SharedTensor
from kvoffloadd.trial.bench.figure import Figure, latency
from kvoffloadd.trial.daemon import OwnDaemon
from kvoffloadd.trial.figures import KEY_BYTES, keys_of, p50
from kvoffloadd.trial.wait import until
from kvoffloadd.trial.worker import WorkerProcess

CALLS = 200
LOOKUP_KEYS = (1, 512)
FRAME_BYTES = 24
"""About what a ping and its answer take."""

Show = Callable[[str], None]


def measure_requests(folder: Path, rounds: int, show: Show) -> list[Figure]:
    """Raises DaemonError, KvOffloadError or OSError."""
    with _client_apart() as place_client:
        return _measure(folder, rounds, show, place_client)


@contextmanager
def _client_apart() -> Iterator[Callable[[], None]]:
    """Processes that are started meanwhile run on other CPUs than this one does from the call on: the kernel may put
    a client and its server on one CPU, where a round trip takes much less, and does so with one server of the two.
    """
    cpus = os.sched_getaffinity(0)
    client = {min(cpus)}
    os.sched_setaffinity(0, cpus - client or client)
    try:
        yield lambda: os.sched_setaffinity(0, client)
    finally:
        os.sched_setaffinity(0, cpus)


def _measure(folder: Path, rounds: int, show: Show, place_client: Callable[[], None]) -> list[Figure]:
    space = NamespaceSpec(model="bench", key_bytes=KEY_BYTES)
    path = folder / "echo"
    echo_server = WorkerProcess("kvoffloadd.trial.bench.echo", {"path": str(path)}, folder / "echo.log")
    samples: dict[str, list[float]] = {}
    try:
        until(path.exists, "an echo server")
        with (
            OwnDaemon(folder, "64MiB", {"log.level": "warning"}) as daemon,
            Client(daemon.socket, namespace=space) as client,
            socket.socket(socket.AF_UNIX) as sock,
        ):
            place_client()
            sock.connect(str(path))
            group = Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, 4096)])
            client.register(KvCache([SharedTensor.allocate(1, 4096)], [group]))
            keys = keys_of(np.arange(max(LOOKUP_KEYS)))
            calls: dict[str, Callable[[], object]] = {"echo": partial(_echo, sock), "ping": client.ping}
            calls |= {f"lookup of {count} keys": partial(client.lookup, {0: keys[:count]}) for count in LOOKUP_KEYS}
            for number in range(rounds + 1):
                show(f"requests, round {number} of {rounds}")
                for name, call in calls.items():
                    took = _median_s(call)
                    if number:  # the first round warms up
                        samples.setdefault(name, []).append(took)
    finally:
        echo_server.kill()
        echo_server.reap()
    limits = samples.pop("echo")
    return [latency("requests", name, took, "echo of a bare socket", limits) for name, took in samples.items()]


def _echo(sock: socket.socket) -> None:
    sock.sendall(bytes(FRAME_BYTES))
    left = FRAME_BYTES
    while left:
        left -= len(sock.recv(left))


def _median_s(call: Callable[[], object]) -> float:
    took = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return p50(took)
