"""Small rows: the ways of the daemon, and another, in which the worker gathers them itself; during a decode loop.

`gather`: the worker gathers the rows of a chunk on its own stream (`torch.index_select`) into a staging buffer
that it has registered, signals, and the daemon moves the chunk as one large row; a load comes the same way back
(`index_copy_`). No process but the engine's runs a kernel. The other ways are settings of the daemon, as in
bench_paths.py. An engine decodes in the same process, or does not; `decode`: its speed during the copies, relative to
its speed without. Every way's bytes are compared.

Without a GPU (`--device host`) all runs on the CPU, which shows only that it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import (
    Client,
    GpuTensor,
    Group,
    GroupKind,
    KvCache,
    NamespaceSpec,
    Outcome,
    Ref,
    SharedTensor,
    Timeline,
)
from kvoffloadd.testing.figures import KEY_BYTES, keys_of, median_ratio, p50
from kvoffloadd.testing.workload import WAIT_S
from scripts.gpu.bench import KIB, MIB, BenchRun, await_pinned, cut_short, daemon, parser, table
from scripts.gpu.bench_paths import PATHS
from scripts.gpu.decode import DecodeLoop
from scripts.harness.gpu import gpu_is_usable, software_driver

LAYERS = 32
ROW_BYTES = tuple(size * KIB for size in (4, 16, 64, 2, 8, 32))
QUICK_ROW_BYTES = (2 * KIB,)
CHUNK_BYTES, QUICK_CHUNK_BYTES = 32 * MIB, MIB
DAEMON_WAYS = ("batches of 1,024", "pitched")
GATHER = "gather"
SLICE_S, QUICK_SLICE_S = 0.15, 0.02
WORD_BYTES = 8


class Cache:
    """An engine's KV cache: 32 layers of rows, evenly apart in one tensor. Jobs are half of its blocks, at random."""

    def __init__(self, device: str, row_bytes: int, job_bytes: int) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.cuda = device == "cuda"
        self.row_bytes = row_bytes
        self.keys = max(1, job_bytes // (LAYERS * row_bytes))
        self.blocks = 2 * self.keys
        self.bytes = self.keys * LAYERS * row_bytes
        words = (LAYERS, self.blocks, row_bytes // WORD_BYTES)
        self._shared = [] if self.cuda else [SharedTensor.allocate(self.blocks, row_bytes) for _ in range(LAYERS)]
        if self.cuda:
            self.rows = self.torch.empty(words, dtype=self.torch.int64, device="cuda")
        else:  # gathers read one tensor, stores another: on the CPU only that it runs counts
            self.rows = self.torch.empty(words, dtype=self.torch.int64)
        self.rows.random_()
        self.expected = self.rows.clone()
        self.stream: Any = self.torch.cuda.Stream() if self.cuda else None
        self.timeline = Timeline(self.stream)
        self._order = np.random.default_rng(row_bytes).permutation(self.keys)

    def tensors(self) -> list[Any]:
        """Canonical tensors of the layers, to be registered as they are."""
        if self.cuda:
            return [GpuTensor.adopt(layer) for layer in self.rows]
        for shared, layer in zip(self._shared, self.rows, strict=True):
            shared.array[:] = layer.numpy().view(np.uint8)
        return self._shared

    def blocks_of(self, first: int, count: int) -> Any:
        """Block ids of the keys `first`... of a job: scattered."""
        return self._order[first : first + count]

    def indices(self, first: int, count: int) -> Any:
        """Returns the indices of all layers' rows of these keys in the flat tensor of rows, a key's
        rows side by side.
        """
        blocks = self.blocks_of(first, count).astype(np.int64)
        flat = (blocks[:, None] + np.arange(LAYERS, dtype=np.int64) * self.blocks).reshape(-1)
        return self.torch.from_numpy(flat).to(self.rows.device)

    def flat(self) -> Any:
        """int64 (rows, words)."""
        return self.rows.view(LAYERS * self.blocks, -1)

    def wipe(self) -> None:
        """Zeros: a load has something to bring."""
        self.rows.zero_()
        for shared in self._shared:
            shared.array[:] = 0
        self.settle()

    def settle(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def wrong_bytes(self, direct: bool) -> int:
        """Counts the wrong bytes of the first half of the blocks, which jobs store and load."""
        self.settle()
        if direct and not self.cuda:
            found = np.stack([shared.array for shared in self._shared])[:, : self.keys]
            wanted = self.expected.numpy().view(np.uint8)[:, : self.keys]
            return int((found != wanted).sum())
        found = self.rows[:, : self.keys]
        return int((found != self.expected[:, : self.keys]).sum()) * WORD_BYTES

    def on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return self.torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext()


class Direct:
    """The cache's rows are registered, and the daemon copies each."""

    def __init__(self, cache: Cache, socket: Path, _chunk_bytes: int) -> None:
        self._cache = cache
        namespace = NamespaceSpec(model=f"direct {cache.row_bytes}", key_bytes=KEY_BYTES)
        self.client = Client(socket, namespace=namespace, deadline_s=WAIT_S)
        refs = [Ref(number, 0, cache.row_bytes) for number in range(LAYERS)]
        group = Group(0, GroupKind.FULL, 16, refs=refs)
        self._registration = self.client.register(KvCache(cache.tensors(), [group], [cache.timeline]))
        self._stored = 0

    def store(self) -> None:
        """All keys of a job, new ones."""
        self._stored += self._cache.keys
        self._finish(self.client.store(self._registration, self._wanted(), deadline_s=WAIT_S, ready=self._ready()))

    def load(self) -> None:
        """Those that were stored last."""
        self._finish(self.client.load(self._registration, self._wanted(), deadline_s=WAIT_S, ready=self._ready()))

    def _wanted(self) -> dict[int, Any]:
        keys = keys_of(np.arange(self._stored - self._cache.keys, self._stored))
        return {0: (keys, self._cache.blocks_of(0, self._cache.keys))}

    def _ready(self) -> Any:
        return self._cache.timeline.signal() if self._cache.cuda else None

    def _finish(self, job: Any) -> None:
        result = self.client.wait(job, WAIT_S)
        if result.outcome is not Outcome.DONE or result.bytes != self._cache.bytes:
            raise SystemExit(f"{job} moved {result.bytes} of {self._cache.bytes}: {result.outcome} {result.reason}")

    def close(self) -> None:
        self.client.clear()
        self.client.close(WAIT_S)


class Gather:
    """A staging buffer is registered, one row of it for each chunk of a job; the worker gathers and scatters."""

    def __init__(self, cache: Cache, socket: Path, chunk_bytes: int) -> None:
        self._cache, torch = cache, cache.torch
        key_bytes = LAYERS * cache.row_bytes
        self._chunk_keys = max(1, min(chunk_bytes // key_bytes, cache.keys))
        self._starts = range(0, cache.keys - self._chunk_keys + 1, self._chunk_keys)
        chunk_bytes = self._chunk_keys * key_bytes
        self.bytes = chunk_bytes * len(self._starts)
        if cache.cuda:
            staging = torch.empty((len(self._starts), chunk_bytes // WORD_BYTES), dtype=torch.int64, device="cuda")
            tensor: Any = GpuTensor.adopt(staging)
        else:
            tensor = SharedTensor.allocate(len(self._starts), chunk_bytes)
            staging = tensor.torch().view(torch.int64)
        self._staging = staging.view(len(self._starts), self._chunk_keys * LAYERS, -1)
        self._indices = [cache.indices(start, self._chunk_keys) for start in self._starts]
        namespace = NamespaceSpec(model=f"gather {cache.row_bytes}", key_bytes=KEY_BYTES)
        self.client = Client(socket, namespace=namespace, deadline_s=WAIT_S)
        group = Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, chunk_bytes)])
        self._registration = self.client.register(KvCache([tensor], [group], [cache.timeline]))
        self._stored = 0

    def store(self) -> None:
        """Gather a chunk, signal, ask; the next one meanwhile."""
        cache = self._cache
        jobs = []
        for number, indices in enumerate(self._indices):
            with cache.on_stream():
                cache.torch.index_select(cache.flat(), 0, indices, out=self._staging[number])
            ready = cache.timeline.signal() if cache.cuda else None
            wanted = {0: (keys_of(np.array([self._stored + number])), np.array([number]))}
            jobs.append(self.client.store(self._registration, wanted, deadline_s=WAIT_S, ready=ready))
        self._stored += len(jobs)
        for job in jobs:
            self._finish(job)

    def load(self) -> None:
        """Ask for all chunks, scatter each when it is there."""
        cache = self._cache
        first = self._stored - len(self._starts)
        jobs = []
        for number in range(len(self._starts)):
            wanted = {0: (keys_of(np.array([first + number])), np.array([number]))}
            jobs.append(self.client.load(self._registration, wanted, deadline_s=WAIT_S))
        for number, (job, indices) in enumerate(zip(jobs, self._indices, strict=True)):
            self._finish(job)
            with cache.on_stream():
                cache.flat().index_copy_(0, indices, self._staging[number])
        if cache.cuda:
            cache.stream.synchronize()

    def _finish(self, job: Any) -> None:
        result = self.client.wait(job, WAIT_S)
        if result.outcome is not Outcome.DONE:
            raise SystemExit(f"{job}: {result.outcome} {result.reason}")

    def close(self) -> None:
        self.client.clear()
        self.client.close(WAIT_S)


def repeated(work: Callable[[], None], seconds: float) -> list[float]:
    """Seconds of each, for about so long; at least two."""
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < 2 or time.perf_counter() - begun < seconds:
        at = time.perf_counter()
        work()
        taken.append(time.perf_counter() - at)
    return taken


def decoded(loop: DecodeLoop, work: Callable[[], None] | None, seconds: float) -> tuple[float, list[float]]:
    """Returns the steps per second of the loop during the work, and the seconds of the work."""
    with loop:
        taken = repeated(work if work is not None else lambda: time.sleep(seconds), seconds)
    return loop.steps_per_s, taken


def measure(cache: Cache, loop: DecodeLoop, worker: Direct | Gather, seconds: float) -> Iterator[dict[str, Any]]:
    """A case for each direction."""
    direct = isinstance(worker, Direct)
    moved = cache.bytes if isinstance(worker, Direct) else worker.bytes
    worker.store()
    cache.wipe()
    worker.load()
    wrong = cache.wrong_bytes(direct)
    for direction, work in (("store", worker.store), ("load", worker.load)):
        work()
        idle = repeated(work, seconds)
        before, _ = decoded(loop, None, seconds)
        beside, busy = decoded(loop, work, 2 * seconds)
        after, _ = decoded(loop, None, seconds)
        yield {
            "direction": direction,
            "gb_per_s": round(moved / p50(idle) / 1e9, 2),
            "gb_per_s_beside": round(moved / p50(busy) / 1e9, 2),
            "decode": round(median_ratio([beside, beside], [before, after]), 3),
            "decode_steps_per_s": round((before + after) / 2, 1),
            "wrong_bytes": wrong,
        }


def main() -> int:
    made = parser(__doc__ or "", "128MiB")
    made.add_argument("--device", choices=("cuda", "host"), default="cuda")
    run = BenchRun(made, 4 * MIB, needs_gpu=False)
    given = run.given
    if importlib.util.find_spec("torch") is None:
        run.skipped.append("all: torch is not installed")
        return run.tell([])
    if given.device == "cuda" and (software_driver_here() or not gpu_is_usable()):
        run.skipped.append("all: torch needs a real GPU")
        return run.tell([])
    seconds = QUICK_SLICE_S if given.quick else SLICE_S
    chunk_bytes = QUICK_CHUNK_BYTES if given.quick else CHUNK_BYTES
    loop = DecodeLoop("cuda" if given.device == "cuda" else "cpu")
    ways = (GATHER, *(DAEMON_WAYS if given.device == "cuda" else DAEMON_WAYS[:1]))
    with cut_short():
        for row_bytes in run.in_time(QUICK_ROW_BYTES if given.quick else ROW_BYTES):
            for way in ways:
                with daemon(given.bytes, PATHS.get(way, {"memory.slab_bytes": "64MiB"})) as socket:
                    cache = Cache(given.device, row_bytes, given.bytes)
                    worker = (Gather if way == GATHER else Direct)(cache, socket, chunk_bytes)
                    if given.device == "cuda":
                        await_pinned(socket)
                    for case in measure(cache, loop, worker, seconds):
                        run.done({"rows": f"{row_bytes // KIB} KiB", "way": way, **case})
                    worker.close()
    columns = ("rows", "way", "direction", "GB/s", "GB/s beside the loop", "decode", "steps/s alone", "wrong bytes")
    order = sorted(run.cases, key=lambda case: (case["direction"], int(case["rows"].split()[0])))
    tables = [table("small rows, five ways, beside a decode loop", columns, [list(one.values()) for one in order])]
    return run.tell(tables)


def software_driver_here() -> bool:
    """Whether the driver of this process, if there is one, is the tests' own."""
    try:
        return software_driver() is not None
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
