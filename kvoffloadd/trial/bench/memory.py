"""Stores and loads between shared memory and the memory tier, beside memcpy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

from kvoffloadd.client import Client, NamespaceSpec, SharedTensor
from kvoffloadd.trial.bench.figure import Figure, bandwidth
from kvoffloadd.trial.daemon import OwnDaemon
from kvoffloadd.trial.figures import KEY_BYTES
from kvoffloadd.trial.workload import WAIT_S, Workload

ROW_BYTES, LAYERS = 64 << 10, 24
SETS = 3
"""How often the bytes of a job fit into the memory tier: each store evicts."""

Show = Callable[[str], None]


def measure_memory(folder: Path, job_bytes: int, rounds: int, show: Show) -> list[Figure]:
    """Raises DaemonError, KvOffloadError or OSError."""
    keys = max(1, job_bytes // (ROW_BYTES * LAYERS))
    tensors = [SharedTensor.allocate(keys, ROW_BYTES) for _ in range(LAYERS)]
    moved = keys * ROW_BYTES * LAYERS
    source, target = (SharedTensor.allocate(1, moved).array[0] for _ in range(2))
    stores, loads, copies = [], [], []
    settings = {"log.level": "warning", "memory.slab_bytes": str(moved)}
    with (
        OwnDaemon(folder, SETS * moved, settings) as daemon,
        Client(daemon.socket, namespace=NamespaceSpec(model="bench", key_bytes=KEY_BYTES), deadline_s=WAIT_S) as client,
    ):
        work = Workload(client, tensors, keys, scattered=True)
        for _ in range(SETS + 1):  # every page of the memory tier is written once
            work.store()
        for number in range(rounds):
            show(f"memory, round {number + 1} of {rounds}")
            work.drain()
            begun = time.perf_counter()
            ctypes.memmove(target.ctypes.data, source.ctypes.data, moved)
            copies.append(time.perf_counter() - begun)
            stores.append(work.store()[0])
            work.drain()
            loads.append(work.load()[0])
    what = f"{ROW_BYTES >> 10} KiB rows"
    return [
        bandwidth("memory", f"store, {what}", stores, "memcpy, 1 thread", copies, moved),
        bandwidth("memory", f"load, {what}", loads, "memcpy, 1 thread", copies, moved),
    ]
