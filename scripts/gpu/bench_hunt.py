"""A hunt for batches that never end: batches and runs of rows of all sizes, both ways at once, until the time is up.

A thread for each direction submits batches of 1,024 copies of 1 KiB to 256 KiB between registered memory and the GPU's,
now and then as runs, waits for each by polling an event, and compares all bytes of each tenth. A batch that has not
ended after ten seconds ends the hunt: its sizes are printed, and the process ends without waiting for it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from kvoffloadd.bench.gpu import Pinned
from kvoffloadd.cudadriver import NOT_READY
from kvoffloadd.device.cuda.driver import PITCH_MAX_BYTES, Driver
from kvoffloadd.device.pitched import pitch
from kvoffloadd.device.plan import Copies
from kvoffloadd.model import Direction
from scripts.gpu.bench import KIB, MIB, BenchRun, cut_short, parser, table
from scripts.harness.gpu import Gpu, GpuBuffer

BATCH = 1024
ROW_MAX_BYTES = 256 * KIB
RUN_ROWS = 32
STUCK_S = 10.0
COMPARE_EVERY = 10
HUNT_S, QUICK_HUNT_S = 45.0, 1.0
STEP = 512
"""Rows begin at multiples of it."""

BATCHES, RUNS = "batches", "runs"
"""Ways of copying, as `decisions.py` names them."""


class Hunter:
    """One direction: its memory, its stream, and what it has seen."""

    def __init__(self, direction: Direction, seed: int, size_bytes: int) -> None:
        self.direction = direction
        self.batches = self.runs = self.wrong_bytes = 0
        self.longest_s = 0.0
        self.stuck = ""
        self.way = BATCHES
        self._rng = np.random.default_rng([seed, list(Direction).index(direction)])
        self._size_bytes = size_bytes
        self._gpu = Gpu()
        self._driver = Driver()
        self._host, self._device = Pinned(size_bytes), GpuBuffer(self._gpu, size_bytes)
        self._event = int(self._driver.call("cuEventCreate", 2))
        self._noise = self._rng.integers(0, 256, size_bytes, np.uint8)

    def hunt(self, seconds: float) -> None:
        """Hunts in a separate thread."""
        self._gpu.use()
        self._fill()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stuck:
            compare = self.batches % COMPARE_EVERY == 0
            if compare:
                self._fill()
            host, device, sizes = self._rows()
            copies = self._copies(host, device, sizes)
            begun = time.monotonic()
            status = self._submit(copies)
            self._driver.check("a batch", status)
            self._driver.check("cuEventRecord", self._driver.record(self._event, self._gpu.stream))
            while self._driver.query(self._event) == NOT_READY:
                if time.monotonic() - begun > STUCK_S:
                    what = f"{len(sizes)} copies of {sizes.min()} to {sizes.max()} bytes"
                    self.stuck = f"{self.way} {self.batches}: {what}"
                    return
                time.sleep(50e-6)
            self.longest_s = max(self.longest_s, time.monotonic() - begun)
            self.batches += 1
            if compare:
                self._compare(host, device, sizes)

    def _rows(self) -> tuple[Any, Any, Any]:
        """Where rows lie on each side, none over another: sizes at random, or all of one size and evenly apart."""
        count = int(self._rng.integers(1, BATCH + 1))
        most = min(ROW_MAX_BYTES, self._size_bytes // count // STEP * STEP)
        if self._rng.random() < 0.5:
            sizes = self._rng.integers(1, most // STEP + 1, count).astype(np.uint64) * np.uint64(STEP)
        else:
            sizes = np.full(count, int(self._rng.integers(1, most // STEP + 1)) * STEP, np.uint64)
        at = np.arange(count, dtype=np.uint64) * np.uint64(most)
        order = self._rng.permutation(count) if self._rng.random() < 0.5 else np.arange(count)
        return at, at[order], sizes

    def _copies(self, host: Any, device: Any, sizes: Any) -> Copies:
        ends = (device + np.uint64(self._device.address), host + np.uint64(self._host.address))
        src, dst = ends if self.direction is Direction.STORE else ends[::-1]
        return Copies(np.ascontiguousarray(src), np.ascontiguousarray(dst), sizes, len(sizes))

    def _submit(self, copies: Copies) -> int:
        final = self.direction is Direction.LOAD
        none = np.zeros(0, np.uint64)
        runs = pitch(copies, none, none, rows_min=2, pitch_max_bytes=PITCH_MAX_BYTES)
        if len(runs) and not len(runs.rest) and self._rng.random() < 0.5 and self._driver.pitched_batches:
            self.runs += 1
            self.way = RUNS
            return self._driver.copy_pitched_batch(runs, BATCH, self._gpu.stream, sources_final=final)
        self.way = BATCHES
        return self._driver.copy_batch(copies.src, copies.dst, copies.size, self._gpu.stream, sources_final=final)

    def _fill(self) -> None:
        if self.direction is Direction.STORE:
            self._device.upload(0, self._noise)
            self._host.array[:] = 0
        else:
            self._host.array[:] = self._noise
            self._device.set_later(0, self._size_bytes, 0)
            self._gpu.synchronize()

    def _compare(self, host: Any, device: Any, sizes: Any) -> None:
        on_gpu = self._device.download(0, self._size_bytes)
        for one_host, one_device, size in zip(host.tolist(), device.tolist(), sizes.tolist(), strict=True):
            there = on_gpu[one_device : one_device + size]
            self.wrong_bytes += int((self._host.array[one_host : one_host + size] != there).sum())


def main() -> int:
    made = parser(__doc__ or "", "64MiB")
    made.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)), help="(default: a random one)")
    run = BenchRun(made, 8 * MIB)
    given = run.given
    seconds = min(QUICK_HUNT_S if given.quick else HUNT_S, given.seconds)
    with cut_short():
        hunters = [Hunter(direction, given.seed, given.bytes) for direction in Direction]
        threads = [threading.Thread(target=one.hunt, args=(seconds,), daemon=True) for one in hunters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 2 * STUCK_S)
        for one in hunters:
            found: dict[str, Any] = {"direction": one.direction.value, "batches": one.batches, "in runs": one.runs}
            found |= {"longest, ms": round(one.longest_s * 1e3, 1), "wrong_bytes": one.wrong_bytes}
            run.done({**found, "stuck": one.stuck or "none", "last way": one.way, "seed": given.seed})
    columns = list(run.cases[0]) if run.cases else []
    status = run.tell([table("batches", columns, [list(one.values()) for one in run.cases])])
    if any(one["stuck"] != "none" for one in run.cases):
        print(json.dumps(run.cases), file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # a process that waits for its stream's end would never end
    return status


if __name__ == "__main__":
    sys.exit(main())
