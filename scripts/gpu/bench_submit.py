"""The processor's cost of a row by each way of copying, in this process, with the daemon's own code.

`plan` is from block ids to chunks, on one row of 4 KiB in each layer for each block; `build` is what a thread makes of
a chunk before it calls the driver: runs of rows; `calls` is within the driver's calls. Waiting is not counted. Times
are the thread's own, so that other programs add little. Each layer's rows lie together, the layers evenly apart. The
bound is for batches alone: what we add to the driver's calls.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvoffloadd.bench.gpu import Pinned
from kvoffloadd.config import CudaConfig
from kvoffloadd.device.chunked import PIECE_DESCRIPTORS
from kvoffloadd.device.cuda.driver import PITCH_MAX_BYTES, Driver
from kvoffloadd.device.cuda.pinning import Arena, cut, piece_ends
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.device.pitched import Pitched, pitch
from kvoffloadd.device.plan import Copies, GroupPlan, make_copies, split
from kvoffloadd.model import Direction, Ref, U64Array
from kvoffloadd.testing.figures import p50
from scripts.gpu.bench import LAYERS, MIB, BenchRun, parser, table
from scripts.harness.figures import at_most
from scripts.harness.gpu import Gpu, GpuBuffer

ROW_BYTES = 4096
CHUNK_BYTES = 64 * MIB
COST_MAX = 1.5
SINGLE, BATCH, PITCHED = "one by one", "batch", "runs"
PARTS = ("plan", "build", "calls")
COLUMNS = ("way", "direction", *PARTS, "in all")
TITLE = f"microseconds of processor time for each row of {ROW_BYTES:,} bytes"


class Timer:
    """Processor time of this thread within, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.thread_time() - self._began_s

    def take(self) -> float:
        """What it has counted; it counts from 0 again."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class TimedDriver(Driver):
    """Counts its calls that copy in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Timer()

    def copy_batch(
        self, src: U64Array, dst: U64Array, size: U64Array, stream: int, *, sources_final: bool = False
    ) -> int:
        with self.calls:
            return super().copy_batch(src, dst, size, stream, sources_final=sources_final)

    def copy_each(self, src: U64Array, dst: U64Array, size: U64Array, stream: int) -> int:
        with self.calls:
            return super().copy_each(src, dst, size, stream)

    def copy_pitched(self, runs: Pitched, stream: int) -> int:
        with self.calls:
            return super().copy_pitched(runs, stream)

    def copy_pitched_batch(self, runs: Pitched, most: int, stream: int, *, sources_final: bool = False) -> int:
        with self.calls:
            return super().copy_pitched_batch(runs, most, stream, sources_final=sources_final)


class TimedStream(CopyStream):
    """Counts all of `run` in `ran`, and in `submitted` what of it is no waiting."""

    ran: Timer
    submitted: Timer

    def run(self, total_bytes: int, submit: Callable[[int], int]) -> None:
        with self.ran:
            super().run(total_bytes, partial(self._timed, submit))

    def _timed(self, submit: Callable[[int], int], stream: int) -> int:
        with self.submitted:
            return submit(stream)


@dataclass(frozen=True, slots=True)
class Way:
    """How rows are copied: they are cut into chunks, which are moved one by one."""

    name: str
    cut: Callable[[Copies], list[Copies]]
    move: Callable[[Direction, Copies], None]


class Costs:
    """Jobs of `rows` rows between the GPU and an arena, made anew each time, as the daemon does. `ways`: those that
    there are here; `skipped`: why others are not.
    """

    def __init__(self, gpu: Gpu, job_bytes: int) -> None:
        keys = max(1, job_bytes // (LAYERS * ROW_BYTES))
        self.rows = keys * LAYERS
        self.skipped: list[str] = []
        self._total_bytes = self.rows * ROW_BYTES
        self._config = CudaConfig()
        self._memory, self._buffer = Pinned(self._total_bytes), GpuBuffer(gpu, self._total_bytes)
        self._arena = Arena(self._memory.address, self._total_bytes, self._total_bytes)
        self._ends = piece_ends(self._arena, 1 << 30)
        self._device_ends = np.array([self._buffer.address + self._total_bytes], np.uint64)
        per_layer = keys * ROW_BYTES
        tensors = [(self._buffer.address + at * per_layer, keys, ROW_BYTES, ROW_BYTES) for at in range(LAYERS)]
        self._plan = GroupPlan.build(tensors, [Ref(layer, 0, ROW_BYTES) for layer in range(LAYERS)], 1)
        self._ids = np.random.default_rng(1).permutation(keys).astype(np.uint32)[:, None]
        self._slots = np.arange(keys, dtype=np.uint64) * np.uint64(LAYERS * ROW_BYTES)
        self._slots += np.uint64(self._arena.address)
        self._driver = TimedDriver()
        self._context = int(self._driver.call("cuCtxGetCurrent"))
        self._ran, self._submitted = Timer(), Timer()
        self.ways = list(self._all_ways())

    def _all_ways(self) -> Iterator[Way]:
        yield Way(SINGLE, self._cut, self._mover(self._stream(batch=False)))
        batched = self._stream(batch=True)
        if batched.batch:
            yield Way(BATCH, self._cut, self._mover(batched))
        else:
            self.skipped.append(f"{BATCH}: this driver has no cuMemcpyBatchAsync")
        if self._driver.pitches:
            yield Way(PITCHED, self._cut_runs, self._run_mover(batched))
        else:
            self.skipped.append(f"{PITCHED}: this driver has no cuMemcpy2DAsync")

    def _stream(self, *, batch: bool) -> TimedStream:
        stream = TimedStream(self._driver, self._context, 0, batch=batch, on_broken=sys.exit)
        stream.ran, stream.submitted = self._ran, self._submitted
        return stream

    @staticmethod
    def _mover(stream: CopyStream) -> Callable[[Direction, Copies], None]:
        return lambda _, chunk: stream.move(chunk.src, chunk.dst, chunk.size)

    def _run_mover(self, stream: CopyStream) -> Callable[[Direction, Copies], None]:
        return lambda way, chunk: stream.move(chunk.src, chunk.dst, chunk.size, self._runs(way, chunk))

    def _runs(self, direction: Direction, copies: Copies) -> Pitched:
        host, device = self._ends, self._device_ends
        src_ends, dst_ends = (device, host) if direction is Direction.STORE else (host, device)
        return pitch(copies, src_ends, dst_ends, pitch_max_bytes=PITCH_MAX_BYTES)

    def _cut(self, copies: Copies) -> list[Copies]:
        most = self._config.batch_descriptors
        return split(copies, 1, 1, chunk_bytes=CHUNK_BYTES, chunk_descriptors=most)

    def _cut_runs(self, copies: Copies) -> list[Copies]:
        """The direction matters for nothing but where memories end, and here both are one."""
        runs = pitch(copies, self._ends[-1:], self._ends[-1:], pitch_max_bytes=PITCH_MAX_BYTES)
        most = self._config.batch_descriptors * len(copies) // max(len(runs) + len(runs.rest), 1)
        return split(copies, 1, 1, chunk_bytes=CHUNK_BYTES, chunk_descriptors=min(most, PIECE_DESCRIPTORS))

    def measure(self, way: Way, direction: Direction) -> dict[str, float]:
        """Measures one job, in microseconds for each row, by PARTS and "in all"."""
        planned, moved = Timer(), Timer()
        with planned:
            memory, payload, size = self._plan.expand(self._ids, self._slots)
            chunks = way.cut(cut(make_copies(direction, memory, payload, size, len(size)), direction, self._ends))
        for chunk in chunks:
            with moved:
                way.move(direction, chunk)
        calls_s = self._driver.calls.take()
        submitted_s = moved.seconds - self._ran.take() + self._submitted.take()
        seconds = dict(zip(PARTS, (planned.seconds, submitted_s - calls_s, calls_s), strict=True))
        seconds["in all"] = planned.seconds + submitted_s
        return {part: spent / len(size) * 1e6 for part, spent in seconds.items()}


def measured(costs: Costs, rounds: int) -> list[dict[str, Any]]:
    """All ways, each direction, interleaved; medians over the rounds; the first one warms up."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(rounds + 1):
        for way in costs.ways:
            for direction in Direction:
                figures = costs.measure(way, direction)
                if number:
                    found.setdefault((way.name, direction.value), []).append(figures)
    return [
        {"way": way, "direction": direction, "us": {part: round(p50(one[part] for one in all_), 3) for part in all_[0]}}
        for (way, direction), all_ in found.items()
    ]


def rows_of(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Returns rows under COLUMNS."""
    return [[one["way"], one["direction"], *(f"{us:.3f}" for us in one["us"].values())] for one in cases]


def _ratio(us: dict[str, float]) -> float:
    return us["in all"] / max(us["calls"], 0.001)


def main() -> int:
    run = BenchRun(parser(__doc__ or "", "64MiB"), 8 * MIB)
    costs = Costs(Gpu(), run.given.bytes)
    run.skipped += costs.skipped
    for case in measured(costs, run.given.rounds):
        run.done(case)
    bounds = [
        at_most(f"{one['direction']}: a row of a batch, in all to calls", _ratio(one["us"]), COST_MAX)
        for one in run.cases
        if one["way"] == BATCH
    ]
    return run.tell([table(TITLE, COLUMNS, rows_of(run.cases))], bounds, costs=run.cases)


if __name__ == "__main__":
    sys.exit(main())
