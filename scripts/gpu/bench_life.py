"""Times other than those of copies: the end of a killed worker's GPU memory, round trips of the smallest jobs.

`unmapped`: from the worker's end until the daemon has closed its mappings, by the daemon's status. `free`: until the
driver reports that the memory is free. The worker is killed while its stores run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from kvoffloadd.client import Client
from kvoffloadd.testing.figures import p50, p99
from kvoffloadd.testing.process import private_folder
from kvoffloadd.testing.workload import WAIT_S
from scripts.gpu.bench import KIB, MIB, BenchRun, GpuWorkload, KvShape, await_pinned, cut_short, daemon, parser, table
from scripts.gpu.workerprocess import GpuWorker
from scripts.harness.figures import at_most
from scripts.harness.gpu import Gpu, software_driver
from scripts.harness.gpumemory import Rows

FREED_MAX_S = 1.0
NEAR_BYTES = 64 * MIB


class Deaths:
    """Workers that are killed while the daemon copies from their memory."""

    def __init__(self, gpu: Gpu, socket: Path, folder: Path, size_bytes: int) -> None:
        self._gpu = gpu
        self._socket = socket
        self._log = folder / "worker.log"
        part_bytes = size_bytes // 4
        self._size_bytes = 4 * part_bytes
        self._rows = [Rows(at * part_bytes, part_bytes // (32 * KIB), 32 * KIB, 32 * KIB) for at in range(4)]
        self._observer = Client(socket, namespace=None, role="observer")
        self._observer.connect()

    def one(self, kind: str) -> dict[str, float]:
        """Seconds until its memory was unmapped, and until it was free."""
        before = self._gpu.free_bytes()
        worker = GpuWorker(self._socket, self._log)
        worker.begin(kind, self._size_bytes, self._rows, later=False)
        worker.call("share")
        blocks = list(range(self._rows[0].num_blocks))
        worker.call("close_gate")
        for number in range(4):
            worker.call(
                "begin_store", keys=[number * len(blocks) + block for block in blocks], blocks=blocks, signal=True
            )
        worker.call("open_gate")
        worker.kill()
        begun = time.perf_counter()
        found: dict[str, float] = {}
        while len(found) < 2:
            now = time.perf_counter() - begun
            if now > WAIT_S:
                raise SystemExit("a killed worker's memory was not given back")
            if "unmapped" not in found and self._mapped_bytes() == 0:
                found["unmapped"] = now
            is_free = before - self._gpu.free_bytes() < NEAR_BYTES
            # The software driver knows its own process's memory alone.
            if "free" not in found and (is_free if software_driver() is None else "unmapped" in found):
                found["free"] = now
            time.sleep(0.0005)
        self._observer.clear(everything=True)
        return found

    def _mapped_bytes(self) -> int:
        devices = self._observer.status()["devices"]
        return sum(int(found["mapped_bytes"]) for name, found in devices.items() if name.startswith("cuda:"))


def round_trips(gpu: Gpu, socket: Path, count: int) -> dict[str, list[float]]:
    """Seconds of stores and loads of one key of 64 KiB, without and with a signal of an idle stream."""
    worker = GpuWorkload(gpu, socket, KvShape(64 * KIB, layers=1), 64 * KIB)
    await_pinned(socket)
    found: dict[str, list[float]] = {"ping": [], "store": [], "load": [], "store, signalled": []}
    for _ in range(count):
        begun = time.perf_counter()
        worker.client.ping()
        found["ping"].append(time.perf_counter() - begun)
        found["store"].append(worker.store_s())
        found["load"].append(worker.load_s())
        found["store, signalled"].append(signalled(worker))
    worker.close()
    return found


def signalled(worker: GpuWorkload) -> float:
    """Seconds of a store that waits for the stream's signal, which comes at once."""
    begun = time.perf_counter()
    worker.finish(worker.begin_store(worker.timeline.signal()))
    return time.perf_counter() - begun


def main() -> int:
    run = BenchRun(parser(__doc__ or "", "1GiB", 5), 16 * MIB)
    given = run.given
    gpu = Gpu()
    trips: dict[str, list[float]] = {}
    ends: dict[str, list[dict[str, float]]] = {"ipc": [], "vmm": []}
    with cut_short(), daemon(given.bytes) as socket, private_folder() as folder:
        trips |= round_trips(gpu, socket, 20 if given.quick else 500)
        run.done({"round trips, p50 in s": {name: p50(all_) for name, all_ in trips.items()}})
        deaths = Deaths(gpu, socket, Path(folder), given.bytes)
        for kind, all_ends in ends.items():
            for _ in range(given.rounds):
                all_ends.append(deaths.one(kind))
                run.done({"killed": kind, **all_ends[-1]})
    ends = {kind: all_ for kind, all_ in ends.items() if all_}
    end_lines = [
        [kind, *(f"{p50([one[what] for one in all_]):.3f} / {max(one[what] for one in all_):.3f}" for what in
         ("unmapped", "free"))]
        for kind, all_ in ends.items()
    ]  # fmt: skip
    trip_lines = [[name, f"{p50(all_) * 1e6:.0f}", f"{p99(all_) * 1e6:.0f}"] for name, all_ in trips.items()]
    tables = [
        table("after a worker was killed, seconds: median / longest", ("memory", "unmapped", "free"), end_lines),
        table("round trips of one key of 64 KiB, us", ("job", "p50", "p99"), trip_lines),
    ]
    bounds = [
        at_most(
            f"{kind}: a killed worker's mappings closed after, s", max(one["unmapped"] for one in all_), FREED_MAX_S
        )
        for kind, all_ in ends.items()
    ]
    return run.tell(tables, bounds, deaths=ends, round_trips_s={name: p50(all_) for name, all_ in trips.items()})


if __name__ == "__main__":
    sys.exit(main())
