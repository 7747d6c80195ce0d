"""Benchmarks round trips to the daemon against those to a process that only sends the same number of bytes back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from kvoffloadd.bench.echo import bare_echo
from kvoffloadd.bench.figure import Figure, latency
from kvoffloadd.bench.rounds import Show, in_rounds
from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Ref, SharedTensor
from kvoffloadd.testing.daemon import OwnDaemon
from kvoffloadd.testing.figures import KEY_BYTES, keys_of, p50

CALLS = 200
LOOKUP_KEYS = (1, 512)
FRAME_BYTES = 24
"""The approximate bytes of a ping and of its answer."""
PLACEMENTS = ("apart", "together", "free")


@contextmanager
def placed(placement: str) -> Iterator[Callable[[], None]]:
    """Places processes that are started within the context on the servers' CPU, and this one on the client's from the
    call on.

    The kernel may put a client and its server on one CPU, where a round trip takes much less, and may do so with only
    one of two servers. `apart`: on two CPUs, if there are two; `together`: on one; `free`: where the kernel chooses.
    """
    cpus = os.sched_getaffinity(0)
    first, last = {min(cpus)}, {max(cpus)}
    client, servers = {"apart": (first, last), "together": (first, first), "free": (cpus, cpus)}[placement]
    os.sched_setaffinity(0, servers)
    try:
        yield lambda: os.sched_setaffinity(0, client)
    finally:
        os.sched_setaffinity(0, cpus)


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Returns the seconds of each call."""
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds


def measure_requests(folder: Path, rounds: int, show: Show) -> list[Figure]:
    """Measures requests. Raises DaemonError, KvOffloadError or OSError."""
    with (
        placed("apart") as place_client,
        bare_echo(folder, FRAME_BYTES, FRAME_BYTES) as echo,
        OwnDaemon(folder, "64MiB", {"log.level": "warning"}) as daemon,
        Client(daemon.socket, namespace=NamespaceSpec(model="bench", key_bytes=KEY_BYTES)) as client,
    ):
        place_client()
        group = Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, 4096)])
        client.register(KvCache([SharedTensor.allocate(1, 4096)], [group]))
        keys = keys_of(np.arange(max(LOOKUP_KEYS)))
        calls: dict[str, Callable[[], object]] = {"echo": echo, "ping": client.ping}
        calls |= {f"lookup of {count} keys": partial(client.lookup, {0: keys[:count]}) for count in LOOKUP_KEYS}
        samples = in_rounds(rounds, lambda: {name: p50(timed(call, CALLS)) for name, call in calls.items()}, show)
    limits = samples.pop("echo")
    return [latency("requests", name, took, "echo of a bare socket", limits) for name, took in samples.items()]
