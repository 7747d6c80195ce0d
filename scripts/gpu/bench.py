"""What the GPU benchmarks share: the ceiling, a worker on the GPU with a real daemon, and how results look.

A benchmark's result is one JSON object: `bounds` and `within_budget` as those of the other benchmarks, and `tables`,
each with a `title`, `columns` and `rows`, for people and for the report of `gpu_check`; `left_out`: cases for which
there was no time; `skipped`: what can't be measured here, and why. A case may have `wrong_bytes`, which must be 0.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvoffloadd.bench.gpu import Pinned
from kvoffloadd.bench.rounds import in_rounds
from kvoffloadd.client import Client, GpuTensor, NamespaceSpec, Timeline
from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.testing.figures import KEY_BYTES, median_ratio
from kvoffloadd.testing.output import print_json
from kvoffloadd.testing.process import obey_signals, private_folder
from kvoffloadd.testing.wait import until
from kvoffloadd.testing.workload import WAIT_S, Workload
from kvoffloadd.units import format_bytes, parse_bytes
from scripts.gpu import DAEMON_SAYS
from scripts.gpu.report import grid
from scripts.gpu.results import keep
from scripts.harness.daemon import Daemon
from scripts.harness.figures import Bound, judged, print_bounds
from scripts.harness.gpu import Gpu, GpuBuffer, gpu_is_usable

T = TypeVar("T")

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LAYERS = 32
ARENA_SETS = 4
"""How often the bytes of a job fit into the arena."""


class Ceiling:
    """What the link can do: plain copies of `size_bytes` between the GPU and registered memory, each way its own."""

    def __init__(self, gpu: Gpu, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._gpu = gpu
        self._host = [Pinned(size_bytes, threads=8) for _ in range(2)]
        self._device = [GpuBuffer(gpu, size_bytes) for _ in range(2)]
        self._streams = [gpu.stream, int(driver().call("cuStreamCreate", 1))]

    def store(self) -> float:
        """Seconds of one copy from the GPU."""
        return self._time((0,))

    def load(self) -> float:
        """Seconds of one copy to the GPU."""
        return self._time((1,))

    def both(self) -> float:
        """Seconds of one copy each way, at once."""
        return self._time((0, 1))

    def _time(self, ways: Sequence[int]) -> float:
        self._gpu.use()
        begun = time.perf_counter()
        for way in ways:
            host, device, stream = self._host[way].address, self._device[way].address, self._streams[way]
            if way == 0:
                driver().call("cuMemcpyDtoHAsync", host, device, self.size_bytes, stream)
            else:
                driver().call("cuMemcpyHtoDAsync", device, host, self.size_bytes, stream)
        for way in ways:
            driver().call("cuStreamSynchronize", self._streams[way])
        return time.perf_counter() - begun

    def close(self) -> None:
        """Gives its memory back."""
        self._gpu.use()
        driver().call("cuStreamDestroy", self._streams[1])
        for host, device in zip(self._host, self._device, strict=True):
            host.close()
            device.free()


@dataclass(frozen=True, slots=True)
class KvShape:
    """A KV cache's shape: a key has `blocks_per_key` rows of `row_bytes` in each of `layers` tensors. `scattered`:
    block ids at random, else one behind the other, so that a key's rows in a tensor are copied as one.
    """

    row_bytes: int
    scattered: bool = True
    layers: int = LAYERS
    blocks_per_key: int = 1

    @property
    def payload_bytes(self) -> int:
        """Returns the payload bytes of a key."""
        return self.row_bytes * self.layers * self.blocks_per_key

    @property
    def name(self) -> str:
        return format_bytes(self.row_bytes) + ("" if self.scattered else ", coalesced")

    def keys_in(self, job_bytes: int) -> int:
        """Keys of a job of about that many bytes."""
        return max(1, job_bytes // self.payload_bytes)


class GpuWorkload(Workload):
    """A worker on a GPU: twice the blocks of a job, the first half to store from, the rest to load to."""

    def __init__(self, gpu: Gpu, socket: Path, shape: KvShape, job_bytes: int) -> None:
        keys = shape.keys_in(job_bytes)
        blocks = 2 * keys * shape.blocks_per_key
        self._buffer = GpuBuffer(gpu, 2 * keys * shape.payload_bytes)
        self._fill()
        rows = [
            self._buffer.rows(layer * blocks * shape.row_bytes, blocks, shape.row_bytes, shape.row_bytes)
            for layer in range(shape.layers)
        ]
        self.timeline = Timeline(gpu.stream)
        self._half_bytes = blocks // 2 * shape.row_bytes
        # Layouts differ from case to case, so each has its own namespace; and each size of jobs its own keys.
        namespace = NamespaceSpec(model=f"gpu {shape} {job_bytes}", key_bytes=KEY_BYTES)
        super().__init__(
            Client(socket, namespace=namespace, deadline_s=WAIT_S),
            [GpuTensor.adopt(row) for row in rows],
            keys,
            scattered=shape.scattered,
            blocks_per_key=shape.blocks_per_key,
            load_to=blocks // 2,
            timelines=[self.timeline],
        )

    def _fill(self) -> None:
        """Noise: links and hashes may treat zeros better."""
        size_bytes = self._buffer.size_bytes
        tile = np.random.default_rng(1).integers(0, 256, min(size_bytes, 64 * MIB), np.uint8)
        for at in range(0, size_bytes, len(tile)):
            self._buffer.upload(at, tile[: size_bytes - at])
        driver().call("cuCtxSynchronize")

    def store_s(self) -> float:
        """Seconds of a store, as the client sees it."""
        return self.store()[0]

    def load_s(self) -> float:
        """Seconds of a load, as the client sees it."""
        return self.load()[0]

    def both_s(self) -> float:
        """Load the keys that were stored last, and store new ones, at once."""
        begun = time.perf_counter()
        jobs = [self.begin_load(), self.begin_store()]
        for job in jobs:
            self.finish(job)
        return time.perf_counter() - begun

    def stores_s(self, count: int) -> float:
        """Seconds of one of `count` stores back to back: what the one before stored is hashed meanwhile."""
        return sum(self.store_s() for _ in range(count)) / count

    def wrong_bytes(self) -> int:
        """Store block i, load it to block i of the second half, and compare: one layer of it."""
        scattered, self.scattered = self.scattered, False
        self.store()
        self.load()
        self.scattered = scattered
        row = self._buffer.download(0, 2 * self._half_bytes)
        return int((row[: self._half_bytes] != row[self._half_bytes :]).sum())

    def close(self) -> None:
        """Ends the session, and gives everything back."""
        self.client.clear()
        self.client.close(WAIT_S)
        self._buffer.free()


@contextlib.contextmanager
def daemon(job_bytes: int, settings: Mapping[str, str] | None = None) -> Iterator[Path]:
    """The socket of a daemon with room for `ARENA_SETS` jobs."""
    with private_folder() as name:
        child = Daemon(Path(name), max(ARENA_SETS * job_bytes, 256 * MIB), settings)
        try:
            with child:
                yield child.socket
        finally:  # the report shows the last lines of one whose part failed
            sys.stderr.write("".join(f"{DAEMON_SAYS}{line}\n" for line in child.log().splitlines()))


def await_pinned(socket: Path) -> None:
    """Waits until the daemon has pinned its whole arena, which the first registration began."""
    with Client(socket, namespace=None, role="observer") as observer:
        until(lambda: _is_pinned(observer.status()), "the arena is pinned", WAIT_S, every_s=0.01)


def _is_pinned(status: dict[str, Any]) -> bool:
    pinned = [found["pinned_bytes"] for name, found in status["devices"].items() if name.startswith("cuda:")]
    return bool(pinned) and pinned[0] >= status["memory"]["capacity_bytes"]


KINDS: dict[str, tuple[str, Callable[[Ceiling], float], Callable[[GpuWorkload], float]]] = {
    "store": ("store", Ceiling.store, GpuWorkload.store_s),
    "stores": ("store", Ceiling.store, lambda worker: worker.stores_s(3)),
    "load": ("load", Ceiling.load, GpuWorkload.load_s),
    "both": ("both", Ceiling.both, GpuWorkload.both_s),
}
"""What jobs do, and the plain copies that they are compared with. `stores`: back to back, so that what the one before
stored is hashed meanwhile.
"""


def against_ceiling(
    gpu: Gpu, socket: Path, shape: KvShape, job_bytes: int, rounds: int, kinds: Sequence[str]
) -> dict[str, Any]:
    """Measures jobs of these KINDS against plain copies of as many bytes."""
    worker = GpuWorkload(gpu, socket, shape, job_bytes)
    await_pinned(socket)
    ceiling = Ceiling(gpu, worker.bytes)
    work: dict[str, Callable[[], float]] = {}
    for kind in kinds:
        plain, copy, do = KINDS[kind]
        work.setdefault(f"plain {plain}", partial(copy, ceiling))
        work[kind] = partial(do, worker)
    worker.store()

    def measure() -> dict[str, float]:
        found = {}
        for kind, do in work.items():
            worker.drain()
            found[kind] = do()
        return found

    seconds = in_rounds(rounds, measure)
    wrong = worker.wrong_bytes()
    ceiling.close()
    worker.close()
    return {
        "row_bytes": shape.row_bytes,
        "job_bytes": worker.bytes,
        "wrong_bytes": wrong,
        "ratio_to_limit": {
            kind: round(median_ratio(seconds[f"plain {KINDS[kind][0]}"], seconds[kind]), 3) for kind in kinds
        },
        "gb_per_s": {
            kind: gb_per_s(worker.bytes * (2 if kind.endswith("both") else 1), taken) for kind, taken in seconds.items()
        },
    }


@contextlib.contextmanager
def cut_short() -> Iterator[None]:
    """SIGTERM ends what is measured within, in order: the result has what there is."""
    obey_signals()
    with contextlib.suppress(KeyboardInterrupt):
        yield


def gb_per_s(size_bytes: int, seconds: Sequence[float]) -> float:
    """The median, in 10**9 bytes per second."""
    return round(size_bytes / statistics.median(seconds) / 1e9, 2)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, Any]:
    """Makes a table as it goes into a result."""
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}


def parser(description: str, job_bytes: str = "1GiB", rounds: int = 7) -> argparse.ArgumentParser:
    """The options that all of them have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--bytes", type=parse_bytes, default=job_bytes, help="of one job (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds (default: %(default)s)")
    made.add_argument("--seconds", type=float, default=float("inf"), help="begin no case later than this")
    made.add_argument("--quick", action="store_true", help="small sizes, which show only that it runs")
    made.add_argument("--json", action="store_true", help="print the result as JSON")
    return made


class BenchRun:
    """One run of a benchmark: its options in `given`, where `--quick` takes everything down, and its `cases` so far;
    `left_out`: those for which there was no time; `skipped`: what can't be measured here, and why.
    """

    def __init__(self, made: argparse.ArgumentParser, quick_bytes: int = 4 * MIB, *, needs_gpu: bool = True) -> None:
        self.given = made.parse_args()
        self.cases: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.skipped: list[str] = []
        if self.given.quick:
            self.given.bytes, self.given.rounds = quick_bytes, 1
        if min(self.given.bytes, self.given.rounds) < 1:
            made.error("--bytes and --rounds are at least 1")
        if needs_gpu and not gpu_is_usable():
            made.error("there is no usable CUDA driver or GPU")

    def in_time(self, cases: Sequence[T], share: float = 1.0) -> Iterator[T]:
        """The cases, as long as there is time: this share of `--seconds`. The others are left out."""
        began = time.monotonic()
        for number, case in enumerate(cases):
            if time.monotonic() - began > share * self.given.seconds:
                self.left_out += map(str, cases[number:])
                return
            yield case

    def done(self, case: dict[str, Any]) -> None:
        """A case has ended: it stays, whatever becomes of the others."""
        self.cases.append(case)
        keep({"case": case})

    def tell(self, tables: Sequence[dict[str, Any]], bounds: Sequence[Bound] = (), **more: object) -> int:
        """Prints the result, as it was asked for; returns the exit status."""
        found = {"cases": self.cases, "left_out": self.left_out, "skipped": self.skipped}
        result = judged({**found, **more, "tables": tables}, bounds)
        if self.given.json:
            print_json(result)
            return 0
        for one in tables:
            print(f"{one['title']}:\n\n{grid(one['columns'], one['rows'])}")
        for what in self.skipped:
            print(f"skipped: {what}")
        if self.left_out:
            print(f"left out, for time: {', '.join(self.left_out)}")
        if bounds:
            print_bounds(result)
        return 0
