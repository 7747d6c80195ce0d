"""Where a rank's KV cache lies, and how its bytes change late: after the caller has asked for a job.

A line does one thing after the other, later than its caller: a GPU's stream, or a thread that stands in for one. What a
job depends on is queued there, and the job is asked for at once, with the point of the line's timeline behind it.
"""

from __future__ import annotations

import functools
import mmap
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from kvoffloadd.client import GpuTensor, Ready, SharedTensor, Timeline
from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.client.memory.tensor import CanonicalTensor
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.model import I64Array, U8Array
from scripts.harness.gpu import CHUNK_BYTES, Gpu, GpuBuffer, count_gpus

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
ODD_BYTES = (0, 1, 7, 64, 333, 4097)
"""How far apart tensors lie in one memory; the first of them from its beginning."""


KINDS = {"one": (True, 0), "dense": (True, 0), "each": (False, 0), "chunks": (True, CHUNK_BYTES)}
"""One allocation for all tensors (dense: without gaps, as engines have it), one for each, or chunks of virtual memory.
"""


class Layout(NamedTuple):
    """A tensor: its rows, and how far apart they are."""

    num_blocks: int
    page_bytes: int
    stride_bytes: int

    @property
    def size_bytes(self) -> int:
        """Returns the size with the gap behind the last row."""
        return self.num_blocks * self.stride_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Bytes in all rows of tensor `tensor`: u8 (blocks, ...). `within`: where the runs of `length` bytes begin that a
    block has, counted from the tensor's first byte, for the first block.
    """

    tensor: int
    view: U8Array
    within: I64Array
    length: int


class Line(Protocol):
    """Does what is queued, in order. For one thread."""

    timeline: Timeline

    def hold_up(self, seconds: float) -> None:
        """Delays what is queued from now on by about `seconds`."""

    def point(self) -> Ready:
        """When all that is queued now has been done."""

    def settle(self) -> None:
        """Wait until it has."""

    def place(self, layouts: Sequence[Layout], rng: np.random.Generator, name: str) -> Place:
        """Memory for tensors, whose bytes are anything. Raises UsageError, DeviceError or OSError."""


class Place(Protocol):
    """Tensors. `rows[t]`: u8 (blocks, stride), what is known of tensor t's bytes, as of the last `fetch`."""

    @property
    def tensors(self) -> Sequence[CanonicalTensor]: ...

    @property
    def rows(self) -> Sequence[U8Array]: ...

    def write(self, runs: Runs, ids: I64Array, values: U8Array, *, late: bool) -> None:
        """Set these blocks' bytes: behind what is queued (`late`), or before this returns."""

    def fetch(self, runs: Sequence[tuple[int, int]]) -> None:
        """Look at these rows of all tensors (the first, and how many), when all that was queued has been done."""

    def publish(self, runs: Sequence[tuple[int, int]] | None = None, *, late: bool = False) -> None:
        """Make the bytes of these rows of all tensors what `rows` has; None: of all rows. `late`: see `write`."""


# --- shared memory ---------------------------------------------------------------------------------------------------


class HostLine:
    """A thread."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._settled = threading.Event()
        self._settled.set()
        threading.Thread(target=self._run, name="line", daemon=True).start()

    def do(self, work: Callable[[], object]) -> None:
        self._settled.clear()
        self._work.put(work)

    def hold_up(self, seconds: float) -> None:
        self.do(partial(time.sleep, seconds))

    def point(self) -> Ready:
        ready = self.timeline.signal()
        self.do(ready.reach)
        return ready

    def settle(self) -> None:
        if not self._settled.is_set():
            self._work.put(self._settled.set)
            self._settled.wait()

    def place(self, layouts: Sequence[Layout], rng: np.random.Generator, name: str) -> HostPlace:
        return HostPlace(layouts, name, self, together=bool(rng.integers(0, 2)))

    def _run(self) -> None:
        while True:
            self._work.get()()


class HostPlace:
    """Tensors in one memfd (`together`) or each in its own. `line` None: nothing is ever late."""

    def __init__(
        self, layouts: Sequence[Layout], name: str, line: HostLine | None = None, *, together: bool = False
    ) -> None:
        self._line = line
        sizes = [layout.size_bytes for layout in layouts]
        pools = [sum(sizes)] if together else sizes
        memory = [SharedTensor.allocate(1, size, name=name) for size in pools]
        flats = [tensor.array.reshape(-1) for tensor in memory]
        if together:
            flats = np.split(flats[0], np.cumsum(sizes)[:-1])
        self.rows = [
            flat.reshape(layout.num_blocks, layout.stride_bytes) for flat, layout in zip(flats, layouts, strict=True)
        ]
        self.tensors = [
            SharedTensor.adopt(rows[:, : layout.page_bytes]) for rows, layout in zip(self.rows, layouts, strict=True)
        ]

    def write(self, runs: Runs, ids: I64Array, values: U8Array, *, late: bool) -> None:
        if late and self._line is not None:
            self._line.do(partial(_set, runs.view, ids, values))
        else:
            self._settle()
            _set(runs.view, ids, values)

    def fetch(self, runs: Sequence[tuple[int, int]]) -> None:
        self._settle()

    def publish(self, runs: Sequence[tuple[int, int]] | None = None, *, late: bool = False) -> None:
        """See `Place`."""

    def _settle(self) -> None:
        if self._line is not None:
            self._line.settle()


def _set(view: U8Array, ids: I64Array, values: U8Array) -> None:
    view[ids] = values


# --- a GPU -----------------------------------------------------------------------------------------------------------


class GpuLine:
    """A stream of a GPU, with its own context. `kind`: of its places, one of KINDS; "": any."""

    def __init__(self, ordinal: int = 0, kind: str = "") -> None:
        self.gpu = Gpu(ordinal)
        self._kind = kind
        self.timeline = Timeline(self.gpu.stream)

    def hold_up(self, seconds: float) -> None:
        self.gpu.delay(seconds)

    def point(self) -> Ready:
        self.gpu.use()
        return self.timeline.signal()

    def settle(self) -> None:
        self.gpu.synchronize()

    def place(self, layouts: Sequence[Layout], rng: np.random.Generator, name: str) -> GpuPlace:
        return GpuPlace(self.gpu, layouts, rng, self._kind)


class GpuPlace:
    """Tensors in memory of one of KINDS. `rows` are host memory, through which bytes come and go in the order of the
    GPU's stream. The GPU's memory is given back when tensors and rows are gone.
    """

    def __init__(self, gpu: Gpu, layouts: Sequence[Layout], rng: np.random.Generator, kind: str = "") -> None:
        self.gpu = gpu
        self.rows = _staging(gpu, layouts)
        kind = kind or str(rng.choice(list(KINDS)))
        together, chunk_bytes = KINDS[kind]
        gaps = [int(rng.choice(ODD_BYTES)) for _ in layouts]
        if kind == "dense":
            gaps[1:] = [0] * (len(gaps) - 1)
        sizes = [gap + layout.size_bytes for gap, layout in zip(gaps, layouts, strict=True)]
        if together:
            buffers = [GpuBuffer(gpu, sum(sizes), chunk_bytes=chunk_bytes)] * len(layouts)
            starts = np.cumsum([0, *sizes])[:-1] + gaps
        else:
            buffers, starts = [GpuBuffer(gpu, size) for size in sizes], np.array(gaps)
        self._addresses = [buffer.address + int(start) for buffer, start in zip(buffers, starts, strict=True)]
        self.tensors = [
            GpuTensor.adopt(buffer.rows(int(start), *layout))
            for buffer, start, layout in zip(buffers, starts, layouts, strict=True)
        ]

    def write(self, runs: Runs, ids: I64Array, values: U8Array, *, late: bool) -> None:
        runs.view[ids] = values
        starts = ids[:, None] * runs.view.strides[0] + runs.within
        self._copy([(runs.tensor, starts.reshape(-1), np.full(starts.size, runs.length))], to_gpu=True)
        if not late:
            self.gpu.synchronize()

    def fetch(self, runs: Sequence[tuple[int, int]]) -> None:
        self._copy_rows(runs, to_gpu=False)
        self.gpu.synchronize()

    def publish(self, runs: Sequence[tuple[int, int]] | None = None, *, late: bool = False) -> None:
        self._copy_rows([(0, len(self.rows[0]))] if runs is None else runs, to_gpu=True)
        if not late:
            self.gpu.synchronize()

    def _copy_rows(self, runs: Sequence[tuple[int, int]], *, to_gpu: bool) -> None:
        first, count = np.array(runs, np.int64).reshape(-1, 2).T
        self._copy(
            [(tensor, first * rows.shape[1], count * rows.shape[1]) for tensor, rows in enumerate(self.rows)],
            to_gpu=to_gpu,
        )

    def _copy(self, pieces: Sequence[tuple[int, I64Array, I64Array]], *, to_gpu: bool) -> None:
        """Queue copies of bytes of tensors: where they begin, and how many there are."""
        gpu = np.concatenate([self._addresses[tensor] + starts for tensor, starts, _ in pieces]).astype(np.uint64)
        host = np.concatenate([self.rows[tensor].ctypes.data + starts for tensor, starts, _ in pieces]).astype(
            np.uint64
        )
        sizes = np.concatenate([size for _, _, size in pieces]).astype(np.uint64)
        if not len(sizes):
            return
        self.gpu.use()
        copy = _hot().copy_batch if _hot().batches else _hot().copy_each
        _hot().check("cuMemcpy", copy(*((host, gpu) if to_gpu else (gpu, host)), sizes, self.gpu.stream))


@functools.cache
def _hot() -> Driver:
    """Makes a driver with batched copies where there are any: single copies would be most of what a worker does."""
    return Driver()


def _staging(gpu: Gpu, layouts: Sequence[Layout]) -> list[U8Array]:
    """Host memory that a stream may copy to and from, until the last array over it is gone."""
    sizes = [layout.size_bytes for layout in layouts]
    flat: U8Array = np.frombuffer(mmap.mmap(-1, sum(sizes)), np.uint8)
    address = flat.ctypes.data
    gpu.use()
    driver().call("cuMemHostRegister", address, flat.nbytes, _PORTABLE)
    weakref.finalize(flat, gpu.unregister, address).atexit = False
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(layout.num_blocks, layout.stride_bytes) for part, layout in zip(parts, layouts, strict=True)]


# --- lines of a process ----------------------------------------------------------------------------------------------


class Lines:
    """The lines of one process: each rank has its own, on GPUs one for each GPU. `device`: "host" or "cuda"."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.gpus = count_gpus() if device == "cuda" else 0
        self._lines: dict[tuple[int, int], Line] = {}

    def of(self, rank: int, rng: np.random.Generator) -> Line:
        """Makes a line for a rank, on any of the GPUs. Raises DeviceError."""
        ordinal = int(rng.integers(0, self.gpus)) if self.gpus else 0
        name = rank, ordinal
        if name not in self._lines:
            self._lines[name] = GpuLine(ordinal) if self.device == "cuda" else HostLine()
        return self._lines[name]
