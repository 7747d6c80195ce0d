"""Benchmarks stores and loads, as jobs of one size between a worker's memory and the memory tier, against memcpy."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvoffloadd.bench.figure import Figure, bandwidth
from kvoffloadd.bench.rounds import Show, in_rounds
from kvoffloadd.client import Client, Group, NamespaceSpec, SharedTensor
from kvoffloadd.client.memory.tensor import CanonicalTensor
from kvoffloadd.testing.daemon import OwnDaemon
from kvoffloadd.testing.figures import KEY_BYTES
from kvoffloadd.testing.workload import WAIT_S, Workload
from kvoffloadd.units import format_bytes

SETS = 3
"""How many times the memory tier holds the bytes of a job: each store evicts."""

KvMemory = tuple[Sequence[CanonicalTensor], Sequence[Group]]
"""Tensors and groups; no groups: one group that has a row in each tensor."""
Limit = tuple[str, Callable[[], float]]
"""The name of a job's limit, and a function that returns its seconds for the same number of bytes."""


@dataclass(frozen=True, slots=True)
class CopyCase:
    """The copies of a job. `memory`: the worker's, for that many keys in each of `groups`; `payload_bytes`: bytes of a
    key, summed over the groups; `row_bytes`: the mean of its rows; `scattered`: block ids at random, else in order.
    """

    name: str
    memory: Callable[[int], KvMemory]
    payload_bytes: int
    row_bytes: int
    tensors: int
    groups: int = 1
    scattered: bool = True
    slab_bytes: int = sys.maxsize
    """A slab is as large as a job by default: it takes whole slots, and nothing is left over."""

    @classmethod
    def of_rows(cls, row_bytes: int, tensors: int, *, scattered: bool = True) -> CopyCase:
        """Makes a case in which a key has a row in each of that many tensors in shared memory."""

        def memory(keys: int) -> KvMemory:
            return [SharedTensor.allocate(keys, row_bytes) for _ in range(tensors)], ()

        name = f"{format_bytes(row_bytes)} x {tensors}{'' if scattered else ', contiguous'}"
        return cls(name, memory, row_bytes * tensors, row_bytes, tensors, scattered=scattered)

    def keys_in(self, job_bytes: int) -> int:
        """Returns the keys of each group in a job of about that many bytes."""
        return max(1, job_bytes // self.payload_bytes)


class Memcpy:
    """Copies between two shared mappings in one thread."""

    def __init__(self, size_bytes: int) -> None:
        self._source, self._target = (SharedTensor.allocate(1, size_bytes).array[0] for _ in range(2))
        self._source[:] = self._target[:] = 1  # the kernel provides the pages now

    def seconds(self, size_bytes: int) -> float:
        """Returns how long that many bytes take."""
        begun = time.perf_counter()
        ctypes.memmove(self._target.ctypes.data, self._source.ctypes.data, size_bytes)
        return time.perf_counter() - begun


@contextmanager
def copy_worker(
    folder: Path, case: CopyCase, job_bytes: int, settings: Mapping[str, str]
) -> Iterator[tuple[OwnDaemon, Workload]]:
    """Starts a daemon and its worker, and fills the memory tier, so that each page of it has been written."""
    keys = case.keys_in(job_bytes)
    moved = keys * case.payload_bytes
    settings = {
        "memory.slab_bytes": str(min(case.slab_bytes, moved)),
        "limits.keys_per_request": str(keys * case.groups),
        **settings,
    }
    namespace = NamespaceSpec(model="bench", key_bytes=KEY_BYTES)
    with (
        OwnDaemon(folder, SETS * moved, settings) as daemon,
        Client(daemon.socket, namespace=namespace, deadline_s=WAIT_S) as client,
    ):
        tensors, groups = case.memory(keys)
        work = Workload(client, tensors, keys, scattered=case.scattered, groups=groups)
        for _ in range(SETS + 1):
            work.store()
        work.drain()
        yield daemon, work


def measure_memory(folder: Path, job_bytes: int, rounds: int, show: Show) -> list[Figure]:
    """Measures the cases. Raises DaemonError, KvOffloadError or OSError."""
    case = CopyCase.of_rows(64 << 10, 24)
    with copy_worker(folder, case, job_bytes, {"log.level": "warning"}) as (_, work):
        limit = "memcpy, 1 thread", partial(Memcpy(work.bytes).seconds, work.bytes)
        return jobs_beside("memory", case, work, (limit, limit), rounds, show)


def jobs_beside(
    part: str, case: CopyCase, work: Workload, limits: tuple[Limit, Limit], rounds: int, show: Show
) -> list[Figure]:
    """Measures stores and loads, each with the daemon at rest and after its limit. `limits`: those of a store and of a
    load.
    """
    jobs = {"store": work.store, "load": work.load}

    def measure() -> dict[str, float]:
        seconds = {}
        for (what, job), (_, limit) in zip(jobs.items(), limits, strict=True):
            work.drain()
            seconds[f"limit of {what}"] = limit()
            seconds[what] = job()[0]
        return seconds

    samples = in_rounds(rounds, measure, show)
    rows = f"{format_bytes(case.row_bytes)} rows"
    return [
        bandwidth(part, f"{what}, {rows}", samples[what], name, samples[f"limit of {what}"], work.bytes)
        for what, (name, _) in zip(jobs, limits, strict=True)
    ]
