#!/usr/bin/env python3
"""The processor's cost of one descriptor, in this process, with the daemon's own code: planned, split, submitted.

`submit` is `Driver.copy_batch` timed around the call, with nothing else in flight; `one by one` is `copy_each`. `plan`
is from block ids to chunks of copies. The bound holds plan and submit together. Copies are of 4 KiB.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.pinning import Arena, cut, piece_ends
from kvoffloadd.device.plan import GroupPlan, make_copies, split
from kvoffloadd.model import Direction, Ref
from scripts.gpu.bench import LAYERS, MIB, done, parse, parser, table, tell
from scripts.harness.figures import at_most, p50
from scripts.harness.gpu import Gpu, GpuBuffer
from scripts.harness.gpumemory import Pinned

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffloadd.device.plan import Copies

ROW_BYTES = 4096
BATCHES = (256, 1024, 4096)
COST_MAX_US = 0.7
COST_BATCH = 1024


class Planner:
    """Jobs of `keys` keys between the GPU and an arena; made anew each time, as the daemon does."""

    def __init__(self, arena: Arena, device_address: int, keys: int, batch: int) -> None:
        per_layer = keys * ROW_BYTES
        tensors = [(device_address + layer * per_layer, keys, ROW_BYTES, ROW_BYTES) for layer in range(LAYERS)]
        self._plan = GroupPlan.build(tensors, [Ref(layer, 0, ROW_BYTES) for layer in range(LAYERS)], 1)
        self._ids = np.random.default_rng(1).permutation(keys).astype(np.uint32)[:, None]
        self._slots = np.arange(keys, dtype=np.uint64) * np.uint64(LAYERS * ROW_BYTES) + np.uint64(arena.address)
        self._ends = piece_ends(arena, 1 << 30)
        self._batch = batch

    def chunks(self, direction: Direction) -> list[Copies]:
        """From block ids to what `CopyStream.move` is given."""
        memory, payload, size = self._plan.expand(self._ids, self._slots)
        copies = cut(make_copies(direction, memory, payload, size, len(size)), direction, self._ends)
        return split(copies, 1, 1, chunk_bytes=64 * MIB, chunk_descriptors=self._batch)


def measure(gpu: Gpu, driver: Driver, planner: Planner, direction: Direction, rounds: int) -> dict[str, float]:
    """Microseconds for each descriptor: medians over the rounds."""
    found: dict[str, list[float]] = {"plan": [], "submit": [], "one by one": []}
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        chunks = planner.chunks(direction)
        found["plan"].append(time.perf_counter() - begun)
        found["submit"].append(submission(gpu, driver.copy_batch, chunks) if driver.batches else float("nan"))
        found["one by one"].append(submission(gpu, driver.copy_each, chunks))
    descriptors = sum(len(chunk) for chunk in chunks)
    return {name: round(p50(seconds[1:]) / descriptors * 1e6, 3) for name, seconds in found.items()}


def submission(gpu: Gpu, submit: Callable[..., int], chunks: list[Copies]) -> float:
    """Seconds within the calls. The stream is empty before each, so that none waits for room."""
    seconds = 0.0
    for chunk in chunks:
        begun = time.perf_counter()
        src, dst, size = (np.ascontiguousarray(column) for column in (chunk.src, chunk.dst, chunk.size))
        status = submit(src, dst, size, gpu.stream)
        seconds += time.perf_counter() - begun
        if status:
            raise SystemExit(f"a submission failed with {status}")
        gpu.synchronize()
    return seconds


def main() -> int:
    arguments = parse(parser(__doc__ or "", "64MiB"), 8 * MIB)
    gpu, driver = Gpu(), Driver()
    keys = max(1, arguments.bytes // (LAYERS * ROW_BYTES))
    total = keys * LAYERS * ROW_BYTES
    memory, buffer = Pinned(total), GpuBuffer(gpu, total)
    arena = Arena(memory.address, total, total)
    costs: list[dict[str, Any]] = []
    for batch in BATCHES:
        planner = Planner(arena, buffer.address, keys, batch)
        for direction in Direction:
            figures = measure(gpu, driver, planner, direction, arguments.rounds)
            done({"batch": batch, "direction": direction.value, "us": figures}, costs)
    lines = [[f"{one['batch']:,}", one["direction"], *one["us"].values()] for one in costs]
    columns = ("copies in a call", "direction", "plan", "submit", "one by one")
    title = f"microseconds of processor time for each descriptor of {ROW_BYTES:,} bytes"
    bounds = [
        at_most(f"{one['direction']}: plan and submit, us", one["us"]["plan"] + one["us"]["submit"], COST_MAX_US)
        for one in costs
        if one["batch"] == COST_BATCH
    ]
    return tell(arguments, {"costs": costs, "tables": [table(title, columns, lines)]}, bounds)


if __name__ == "__main__":
    sys.exit(main())
