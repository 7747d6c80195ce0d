"""Small rows by the driver alone, in each way that it has, and by the daemon: what takes the driver, what the daemon.

A block has one row in each of 32 layers, evenly apart in the GPU's memory and side by side in registered memory;
blocks are scattered. `one by one`: cuMemcpyAsync. `batch`: cuMemcpyBatchAsync with flags 0 or 1 (prefer overlap with
compute) and sources read in the stream's order or in any. `2D`: one cuMemcpy2DAsync a block. `3D batch`: the same
copies in calls of cuMemcpy3DBatchAsync. Times are from the first call to the end of the stream; `submit` is the time
within the calls, which wait when the GPU's queue is full. All bytes are compared. `both`: stores and loads at once, by
a thread each, in the ways that the daemon chooses from; both directions' bytes together.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np

from kvoffloadd.bench.gpu import Pinned
from kvoffloadd.device.cuda.driver import PITCH_MAX_BYTES, Driver
from kvoffloadd.device.pitched import pitch
from kvoffloadd.device.plan import Copies
from kvoffloadd.errors import DeviceError
from kvoffloadd.model import Direction, U8Array, U64Array
from kvoffloadd.testing.figures import p50
from scripts.gpu.bench import (
    KIB,
    LAYERS,
    MIB,
    BenchRun,
    KvShape,
    against_ceiling,
    cut_short,
    daemon,
    gb_per_s,
    parser,
    table,
)
from scripts.harness.gpu import Gpu, GpuBuffer, one_copy

Submit = Callable[[], int]

ROW_BYTES = tuple(size * KIB for size in (4, 64, 24, 32, 28, 16, 8, 2))
ROWS_MAX = 1 << 14
BATCH = 1024
STREAM_ORDER, ANY_ORDER = 1, 3
BATCHES = {"batch": (0, STREAM_ORDER), "batch, flag 1": (1, STREAM_ORDER), "batch, any order": (0, ANY_ORDER)}
METHODS = ("plain", "one by one", *BATCHES, "2D", "3D batch")
CHOICE = ("batch", "3D batch")
"""The daemon's, by size of rows."""

BOTH = "both"
DAEMON = "daemon"


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: an access order, a location hint for each side, flags."""

    _fields_: ClassVar = [("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint)]


class RawRows:
    """Blocks in the GPU's memory and in registered memory."""

    def __init__(self, gpu: Gpu, row_bytes: int, total_bytes: int) -> None:
        blocks = max(1, min(total_bytes // row_bytes, ROWS_MAX) // LAYERS)
        self.bytes = blocks * LAYERS * row_bytes
        self.row_bytes, self.gpu = row_bytes, gpu
        self.host, self.device = Pinned(self.bytes), GpuBuffer(gpu, self.bytes)
        rng = np.random.default_rng(row_bytes)
        order = rng.permutation(blocks)
        self._noise: U8Array = rng.integers(0, 256, self.bytes, np.uint8)
        by_block = self._noise.reshape(LAYERS, blocks, row_bytes).transpose(1, 0, 2)
        self._payloads = np.ascontiguousarray(by_block[order]).reshape(-1)
        layers = np.arange(LAYERS, dtype=np.uint64) * np.uint64(blocks * row_bytes)
        ids = order.astype(np.uint64)[:, None] * np.uint64(row_bytes)
        self.of_device: U64Array = (np.uint64(self.device.address) + ids + layers).reshape(-1)
        at = np.arange(blocks * LAYERS, dtype=np.uint64) * np.uint64(row_bytes)
        self.of_host = at + np.uint64(self.host.address)
        self.sizes = np.full(len(at), row_bytes, np.uint64)

    def sides(self, direction: Direction) -> tuple[U64Array, U64Array]:
        """Where rows are copied from, and to."""
        return (self.of_device, self.of_host) if direction is Direction.STORE else (self.of_host, self.of_device)

    def reset(self, direction: Direction) -> None:
        """The source has its bytes, the destination has none of them."""
        if direction is Direction.STORE:
            self.device.upload(0, self._noise)
            self.host.array[:] = 0
        else:
            self.host.array[:] = self._payloads
            self.device.set_later(0, self.bytes, 0)
            self.gpu.synchronize()

    def wrong_bytes(self, direction: Direction) -> int:
        """Counts the wrong bytes of the destination."""
        if direction is Direction.STORE:
            return int((self.host.array != self._payloads).sum())
        return int((self.device.download(0, self.bytes) != self._noise).sum())

    def close(self) -> None:
        self.host.close()
        self.device.free()


class Ways:
    """What each method submits: everything is planned before the clock starts."""

    def __init__(self, gpu: Gpu, driver: Driver) -> None:
        self.gpu, self._stream, self._driver = gpu, gpu.stream, driver
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        batch = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
        self._batch = driver.entry("cuMemcpyBatchAsync", 12080, *batch)
        self.missing: dict[str, str] = {}
        if self._batch is None:
            self.missing |= dict.fromkeys(BATCHES, "this driver has no cuMemcpyBatchAsync")
        if not driver.pitches:
            self.missing["2D"] = "this driver has no cuMemcpy2DAsync"
        if not driver.pitched_batches:
            self.missing["3D batch"] = "this driver has no cuMemcpy3DBatchAsync"

    def submit(self, method: str, rows: RawRows, direction: Direction) -> Submit:
        """A function that submits these rows so, and returns the last CUresult."""
        driver, stream = self._driver, self._stream
        src, dst = rows.sides(direction)
        if method == "plain":  # as many bytes as one copy: only the time matters
            ends = rows.device.address, rows.host.address
            begin, end = ends if direction is Direction.STORE else ends[::-1]
            whole = one_copy(begin, end, rows.bytes)
            return lambda: driver.copy_each(*whole, stream)
        if method == "one by one":
            return lambda: driver.copy_each(src, dst, rows.sizes, stream)
        if method in ("2D", "3D batch"):
            none = np.zeros(0, np.uint64)
            copies = Copies(src, dst, rows.sizes, len(src))
            runs = pitch(copies, none, none, rows_min=2, pitch_max_bytes=PITCH_MAX_BYTES)
            if method == "2D":
                return lambda: driver.copy_pitched(runs, stream)
            return lambda: driver.copy_pitched_batch(runs, BATCH, stream)
        return self._batches(rows, direction, *BATCHES[method])

    def _batches(self, rows: RawRows, direction: Direction, flags: int, order: int) -> Submit:
        src, dst = rows.sides(direction)
        attributes, first, failed = _Attributes(order=order, flags=flags), ctypes.c_size_t(0), ctypes.c_size_t()

        def submit() -> int:
            for at in range(0, len(src), BATCH):
                batch = slice(at, at + BATCH)
                status: int = self._batch(
                    dst[batch].ctypes.data, src[batch].ctypes.data, rows.sizes[batch].ctypes.data, len(src[batch]),
                    ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), self._stream,
                )  # fmt: skip
                if status:
                    return status
            return 0

        return submit


def measure(ways: Ways, rows: RawRows, direction: Direction, method: str, rounds: int) -> dict[str, Any]:
    """A case: GB/s, microseconds of submission for each row, wrong bytes; or the CUresult that refuses it."""
    case = {"rows": f"{rows.row_bytes // KIB} KiB", "direction": direction.value, "method": method}
    submit = ways.submit(method, rows, direction)
    rows.reset(direction)
    submitted, total = [], []
    wrong = 0
    for number in range(rounds + 1):
        begun = time.perf_counter()
        try:
            status = submit()
        except DeviceError as error:
            return {**case, "refused": str(error)}
        middle = time.perf_counter()
        rows.gpu.synchronize()
        if status:
            return {**case, "refused": f"CUresult {status}"}
        if not number:  # the first warms up, and is looked at
            wrong = rows.wrong_bytes(direction) if method != "plain" else 0
            continue
        submitted.append(middle - begun)
        total.append(time.perf_counter() - begun)
    us = round(p50(submitted) / len(rows.sizes) * 1e6, 3)
    return {**case, "gb_per_s": gb_per_s(rows.bytes, total), "submit_us_per_row": us, "wrong_bytes": wrong}


def measure_both(sides: list[tuple[Ways, RawRows, Direction]], method: str, rounds: int) -> dict[str, Any]:
    """Returns a case, as `measure` does: each side has its own thread and stream."""
    submits = [ways.submit(method, rows, direction) for ways, rows, direction in sides]
    for _, rows, direction in sides:
        rows.reset(direction)

    def copy(number: int) -> int:
        rows = sides[number][1]
        rows.gpu.use()
        status = submits[number]()
        rows.gpu.synchronize()
        return status

    seconds: list[float] = []
    with ThreadPoolExecutor(len(sides)) as pool:
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            statuses = list(pool.map(copy, range(len(sides))))
            seconds.append(time.perf_counter() - begun)
            if any(statuses):
                return {"method": method, "refused": f"CUresult {max(statuses)}"}
    wrong = sum(rows.wrong_bytes(direction) for _, rows, direction in sides)
    total = sum(rows.bytes for _, rows, _ in sides)
    return {"method": method, "gb_per_s": gb_per_s(total, seconds[1:]), "wrong_bytes": wrong}


def by_driver(run: BenchRun, gpu: Gpu) -> None:
    """All sizes, both ways, each method that there is."""
    ways, others = Ways(gpu, Driver()), Ways(Gpu(gpu.ordinal), Driver())
    run.skipped += [f"{method}: {why}" for method, why in ways.missing.items()]
    for row_bytes in run.in_time(ROW_BYTES[:2] if run.given.quick else ROW_BYTES, 0.5):
        rows = RawRows(gpu, row_bytes, run.given.bytes)
        for direction in Direction:
            for method in METHODS:
                if method not in ways.missing:
                    run.done(measure(ways, rows, direction, method, run.given.rounds))
        beside = RawRows(others.gpu, row_bytes, run.given.bytes)
        sides = [(ways, rows, Direction.STORE), (others, beside, Direction.LOAD)]
        for method in CHOICE:
            if method not in ways.missing:
                case = {"rows": f"{row_bytes // KIB} KiB", "direction": BOTH}
                run.done({**case, **measure_both(sides, method, run.given.rounds)})
        beside.close()
        rows.close()


def by_daemon(run: BenchRun, gpu: Gpu) -> None:
    """The same sizes through the daemon as it is by default."""
    given = run.given
    with daemon(given.bytes) as socket:
        for row_bytes in run.in_time(ROW_BYTES[:2] if given.quick else ROW_BYTES, 0.5):
            job_bytes = min(given.bytes, ROWS_MAX * row_bytes)
            kinds = tuple(direction.value for direction in Direction)
            found = against_ceiling(gpu, socket, KvShape(row_bytes), job_bytes, given.rounds, kinds)
            for kind in kinds:
                case = {"rows": f"{row_bytes // KIB} KiB", "direction": kind, "method": DAEMON}
                run.done({**case, "gb_per_s": found["gb_per_s"][kind], "wrong_bytes": found["wrong_bytes"]})


def tables_of(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each size, a column for each method, a table for each direction."""
    sizes = sorted({case["rows"] for case in cases}, key=lambda size: int(size.split()[0]))
    found = []
    for direction in Direction:
        by = {(one["rows"], one["method"]): one for one in cases if one["direction"] == direction.value}
        for figure, unit, methods in (
            ("gb_per_s", "GB/s", (*METHODS, DAEMON)),
            ("submit_us_per_row", "microseconds of submission for each row", METHODS[1:]),
        ):
            lines = [[size, *(by.get((size, method), {}).get(figure, "-") for method in methods)] for size in sizes]
            found.append(table(f"{direction.value}, {unit}", ("rows", *methods), lines))
    both = {(one["rows"], one["method"]): one for one in cases if one["direction"] == BOTH}
    lines = [[size, *(both.get((size, method), {}).get("gb_per_s", "-") for method in CHOICE)] for size in sizes]
    return [*found, table("stores and loads at once, GB/s together", ("rows", *CHOICE), lines)]


def main() -> int:
    run = BenchRun(parser(__doc__ or "", "64MiB", 5), 2 * MIB)
    gpu = Gpu()
    with cut_short():
        by_driver(run, gpu)
        by_daemon(run, gpu)
    run.skipped += [
        f"{one['rows']} {one['direction']} {one['method']}: {one['refused']}" for one in run.cases if "refused" in one
    ]
    return run.tell(tables_of(run.cases))


if __name__ == "__main__":
    sys.exit(main())
