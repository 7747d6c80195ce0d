"""Chunks on a stream: every byte arrives, refused calls are made good, and no end is reported that the driver can't
confirm.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import pytest

from kvoffloadd.cudadriver import NOT_READY, SUCCESS, CudaError
from kvoffloadd.device.cuda.driver import PITCH_MAX_BYTES, Driver
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.device.pitched import Pitched, pitch
from kvoffloadd.device.plan import Copies
from kvoffloadd.errors import DeviceError
from kvoffloadd.linux.sharedmem import Mapping, create_memfd
from kvoffloadd.model import U8Array, U64Array
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.gpu import Gpu, GpuBuffer
from tests import softcuda

SIZE = 8 << 20
ROW = 4096
OUT_OF_MEMORY, ILLEGAL_ADDRESS, MPS_RPC_FAILURE = 2, 700, 806
UNKNOWN_TO_BINDINGS = 4711


class ProcessEnds(Exception):
    """Stands for the end of the process."""


def end_process(reason: str) -> NoReturn:
    """Ends the process as the daemon does, whose thread never returns."""
    raise ProcessEnds(reason)


class Memory:
    """Pinned host memory and a GPU's, of `SIZE` bytes each."""

    def __init__(self, gpu: Gpu, driver: Driver) -> None:
        self.mapping = Mapping.map_fd(create_memfd("pinned", SIZE), SIZE)
        self.host: U8Array = self.mapping.array()
        driver.call("cuMemHostRegister", self.mapping.address, SIZE, 1)
        self.buffer = GpuBuffer(gpu, SIZE)
        self._driver = driver

    def copies(self, rng: np.random.Generator, rows: int, *, to_gpu: bool) -> Copies:
        """Rows at random places, each one once."""
        host, device = (rng.permutation(SIZE // ROW)[:rows].astype(np.uint64) * np.uint64(ROW) for _ in range(2))
        host, device = host + np.uint64(self.mapping.address), device + np.uint64(self.buffer.address)
        src, dst = (host, device) if to_gpu else (device, host)
        return Copies(src, dst, np.full(rows, ROW, np.uint64), rows)

    def close(self) -> None:
        self._driver.call("cuMemHostUnregister", self.mapping.address)
        self.mapping.close()
        self.buffer.free()


@pytest.fixture
def memory(gpu: Gpu, driver: Driver) -> Iterator[Memory]:
    made = Memory(gpu, driver)
    yield made
    made.close()


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def stream(gpu: Gpu, driver: Driver, *, batch: bool = True, batch_descriptors: int = 4096) -> CopyStream:
    gpu.use()
    context = int(driver.call("cuCtxGetCurrent"))
    return CopyStream(driver, context, 0, batch=batch, on_broken=end_process, batch_descriptors=batch_descriptors)


def runs(copies: Copies) -> tuple[U64Array, U64Array, U64Array]:
    return copies.src, copies.dst, copies.size


def expected(memory: Memory, copies: Copies, src: U8Array, dst: U8Array, src_base: int, dst_base: int) -> U8Array:
    """What `dst` holds after the copies."""
    begins, ends = copies.src - np.uint64(src_base), copies.dst - np.uint64(dst_base)
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        dst[end : end + ROW] = src[begin : begin + ROW]
    return dst


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("to_gpu", [True, False])
def test_every_byte_arrives_and_no_other_changes(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator, to_gpu: bool, batch: bool
) -> None:
    host, device = (rng.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(2))
    memory.host[:] = host
    memory.buffer.upload(0, device)
    copies = memory.copies(rng, 700, to_gpu=to_gpu)
    made = stream(gpu, driver, batch=batch)
    made.move(*runs(copies))
    at = memory.mapping.address, memory.buffer.address
    if to_gpu:
        device = expected(memory, copies, host, device, *at)
    else:
        host = expected(memory, copies, device, host, *reversed(at))
    assert (memory.host == host).all()
    assert (memory.buffer.download(0, SIZE) == device).all()
    made.destroy()


def test_threads_share_a_stream(gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator) -> None:
    host = rng.integers(0, 256, SIZE, dtype=np.uint8)
    memory.host[:] = host
    rows = np.arange(0, SIZE, ROW, dtype=np.uint64)
    chunks = [rows[part::8] for part in range(8)]
    made = stream(gpu, driver)

    def work(offset_lists: list[U64Array]) -> None:
        for offsets in offset_lists:
            src, dst = offsets + np.uint64(memory.mapping.address), offsets + np.uint64(memory.buffer.address)
            made.move(src, dst, np.full(len(offsets), ROW, np.uint64))

    threads = [threading.Thread(target=work, args=(chunks[part::2],)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert (memory.buffer.download(0, SIZE) == host).all()
    made.destroy()


def test_move_returns_when_the_bytes_are_there(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator, extras: softcuda.SoftCuda
) -> None:
    """Not when they are submitted: the stream is busy before."""
    memory.host[:] = 9
    memory.buffer.upload(0, np.zeros(SIZE, np.uint8))
    made = stream(gpu, driver)
    extras.delay(made._stream, 0.1)
    copies = memory.copies(rng, 3, to_gpu=True)
    made.move(*runs(copies))
    assert int((memory.buffer.download(0, SIZE) == 9).sum()) == 3 * ROW
    made.destroy()


def test_batches_leave_the_processors_to_the_engine(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator, extras: softcuda.SoftCuda
) -> None:
    """The batches are of both kinds, in both orders."""
    before, ends = extras.counters(), np.zeros(0, np.uint64)
    at = np.arange(0, 16 * ROW, ROW, dtype=np.uint64)
    host, device = at + np.uint64(memory.mapping.address), at * np.uint64(2) + np.uint64(memory.buffer.address)
    copies, context = Copies(host, device, np.full(16, ROW, np.uint64), 16), int(driver.call("cuCtxGetCurrent"))
    for final in (True, False):
        made = CopyStream(driver, context, 0, batch=True, on_broken=end_process, sources_final=final)
        made.move(*runs(copies))
        made.move(*runs(copies), pitch(copies, ends, ends, pitch_max_bytes=PITCH_MAX_BYTES))
        made.destroy()
    after = extras.counters()
    assert (after.batches - before.batches, after.pitched_batches - before.pitched_batches) == (2, 2)
    assert after.engine_batches - before.engine_batches == 4


class Refusing(Driver):
    """Refuses batches, as some drivers do some of them."""

    def copy_batch(self, src: U64Array, dst: U64Array, size: U64Array, stream: int, **order: bool) -> int:
        half = len(size) // 2
        super().copy_batch(src[:half], dst[:half], size[:half], stream, **order)  # some may have been begun
        return 1


def test_a_refused_batch_is_copied_one_by_one(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator
) -> None:
    memory.host[:] = 5
    memory.buffer.upload(0, np.zeros(SIZE, np.uint8))
    made = stream(gpu, Refusing())
    made.move(*runs(memory.copies(rng, 100, to_gpu=True)))
    assert int((memory.buffer.download(0, SIZE) == 5).sum()) == 100 * ROW
    assert made.batch_failures == 1
    made.destroy()


class Counting(Driver):
    """Knows how many copies the largest batch has had."""

    largest = 0

    def copy_batch(self, src: U64Array, dst: U64Array, size: U64Array, stream: int, **order: bool) -> int:
        self.largest = max(self.largest, len(size))
        return super().copy_batch(src, dst, size, stream, **order)


def test_a_batch_has_no_more_copies_than_it_may(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator
) -> None:
    """However many the chunk has: chunks of small rows have more."""
    memory.host[:] = 5
    memory.buffer.upload(0, np.zeros(SIZE, np.uint8))
    context, counting = int(driver.call("cuCtxGetCurrent")), Counting()
    made = CopyStream(counting, context, 0, batch=True, on_broken=end_process, batch_descriptors=64)
    made.move(*runs(memory.copies(rng, 1000, to_gpu=True)))
    assert int((memory.buffer.download(0, SIZE) == 5).sum()) == 1000 * ROW
    assert counting.largest == 64
    made.destroy()


class Ordering(Driver):
    """Takes batches in the stream's order alone."""

    def copy_batch(
        self, src: U64Array, dst: U64Array, size: U64Array, stream: int, *, sources_final: bool = False
    ) -> int:
        return 1 if sources_final else super().copy_batch(src, dst, size, stream)


def test_a_refused_order_leaves_batches(gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator) -> None:
    memory.host[:] = 5
    memory.buffer.upload(0, np.zeros(SIZE, np.uint8))
    context = int(driver.call("cuCtxGetCurrent"))
    made = CopyStream(Ordering(), context, 0, batch=True, on_broken=end_process, sources_final=True)
    for _ in range(3):
        made.move(*runs(memory.copies(rng, 100, to_gpu=True)))
    assert int((memory.buffer.download(0, SIZE) == 5).sum()) >= 100 * ROW
    assert made.batch_failures == 0
    made.destroy()


class Taking(Driver):
    """Takes pitched copies in the given ways alone; `asked` has all that were tried, with their runs."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self._ways = ways
        self.asked: list[tuple[str, int]] = []

    def copy_pitched_batch(self, runs: Pitched, most: int, stream: int, *, sources_final: bool = False) -> int:
        way = "batch, any order" if sources_final else "batch"
        self.asked.append((way, len(runs)))
        done = super().copy_pitched_batch(runs, most, stream, sources_final=sources_final)
        return done if way in self._ways else 1  # some may have been begun

    def copy_pitched(self, runs: Pitched, stream: int) -> int:
        self.asked.append(("one by one", len(runs)))
        return super().copy_pitched(runs, stream) if "one by one" in self._ways else 1


@pytest.mark.parametrize(
    ("takes", "first", "then"),
    [
        (("batch, any order",), ["batch, any order"], ["batch, any order"]),
        (("batch",), ["batch, any order", "batch"], ["batch"]),
        (("one by one",), ["batch, any order", "batch", "one by one"], ["one by one"]),
        ((), ["batch, any order", "batch", "one by one"], []),
    ],
    ids=["any order", "stream order", "no batches", "row by row"],
)
def test_runs_go_in_the_first_way_that_the_driver_takes(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator, takes: tuple[str, ...], first: list[str],
    then: list[str],
) -> None:  # fmt: skip
    """What is refused once is not tried again, and all rows arrive, those of no run too."""
    host = rng.integers(0, 256, SIZE, dtype=np.uint8)
    memory.host[:] = host
    columns, half = 32, SIZE // 2
    row = np.arange(half // ROW, dtype=np.uint64)  # columns of the device's half: one row of each side by side
    place = row % np.uint64(columns) * np.uint64(half // columns) + row // np.uint64(columns) * np.uint64(ROW)
    place = np.append(place, np.uint64(half + 5))
    src = np.append(row * np.uint64(ROW), np.uint64(half + 77)) + np.uint64(memory.mapping.address)
    copies = Copies(src, place + np.uint64(memory.buffer.address), np.full(len(src), ROW, np.uint64), len(src))
    ends = np.zeros(0, np.uint64)
    paired = pitch(copies, ends, ends, pitch_max_bytes=PITCH_MAX_BYTES)
    assert (len(paired), len(paired.rest)) == (half // ROW // columns, 1)
    taking, context = Taking(*takes), int(driver.call("cuCtxGetCurrent"))
    made = CopyStream(taking, context, 0, batch=True, on_broken=end_process, sources_final=True, batch_descriptors=9)
    for ways in (first, then):
        memory.buffer.upload(0, np.zeros(SIZE, np.uint8))
        taking.asked.clear()
        made.move(*runs(copies), paired)
        assert taking.asked == [(way, len(paired)) for way in ways]
        found = memory.buffer.download(0, SIZE)
        rows = host[:half].reshape(-1, columns, ROW).transpose(1, 0, 2).reshape(-1)
        assert (found[:half] == rows).all()
        assert (found[half + 5 : half + 5 + ROW] == host[half + 77 : half + 77 + ROW]).all()
    assert made.pitched_copies == len(takes) * 2 * len(paired)
    assert made.batch_failures == 0
    made.destroy()


def test_runs_go_one_by_one_where_batches_are_off(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator
) -> None:
    """The setting holds for both kinds of batches."""
    taking, ends = Taking("batch", "one by one"), np.zeros(0, np.uint64)
    at = np.arange(0, 16 * ROW, ROW, dtype=np.uint64)
    copies = Copies(
        at + np.uint64(memory.mapping.address),
        at * np.uint64(2) + np.uint64(memory.buffer.address),
        np.full(16, ROW, np.uint64),
        16,
    )
    made = CopyStream(taking, int(driver.call("cuCtxGetCurrent")), 0, batch=False, on_broken=end_process)
    made.move(*runs(copies), pitch(copies, ends, ends, pitch_max_bytes=PITCH_MAX_BYTES))
    assert taking.asked == [("one by one", 1)]
    made.destroy()


class RefusingAll(Refusing):
    """Refuses single copies, too."""

    def copy_each(self, src: U64Array, dst: U64Array, size: U64Array, stream: int) -> int:
        return 1


def test_what_is_refused_altogether_fails(gpu: Gpu, memory: Memory, rng: np.random.Generator) -> None:
    made = stream(gpu, RefusingAll())
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        made.move(*runs(memory.copies(rng, 10, to_gpu=True)))
    made.destroy()


# --- what goes wrong while copies run ---


class FailingDriver(Driver):
    """Does `fault` while it is `planted`."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault, self.planted = fault, True
        self.begun: list[int] = []
        record, query = self.record, self.query
        if fault in ("record", "record unknown"):
            code = OUT_OF_MEMORY if fault == "record" else UNKNOWN_TO_BINDINGS
            self.record = lambda *to: code if self.planted else record(*to)
        if fault in ("query", "query lasting", "query unknown"):
            code = {"query": MPS_RPC_FAILURE, "query lasting": ILLEGAL_ADDRESS}.get(fault, UNKNOWN_TO_BINDINGS)
            self.query = lambda event: code if self.planted else query(event)
        if fault == "query raises":
            self.query = lambda event: self._raise() if self.planted else query(event)

    def copy_batch(self, src: U64Array, dst: U64Array, size: U64Array, stream: int, **order: bool) -> int:
        if self._fault == "submit raises" and len(self.begun) and self.planted:
            self._raise()
        self.begun.append(len(size))
        return super().copy_batch(src, dst, size, stream, **order)

    def _raise(self) -> NoReturn:
        raise MemoryError("planted")


FAULTS = ["record", "record unknown", "query", "query lasting", "query unknown", "query raises", "submit raises"]


@pytest.mark.parametrize("to_gpu", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_error_comes_before_the_end_of_what_was_submitted(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator, extras: softcuda.SoftCuda, fault: str,
    to_gpu: bool,
) -> None:  # fmt: skip
    """Whatever fails: the memory belongs to its next owner once `move` has raised. The GPU can be used on."""
    memory.host[:] = 5
    memory.buffer.upload(0, np.full(SIZE, 5, np.uint8))
    failing = FailingDriver(fault)
    made = stream(gpu, failing, batch_descriptors=32)
    extras.delay(made._stream, 0.1)
    with pytest.raises((CudaError, MemoryError)):
        made.move(*runs(memory.copies(rng, 64, to_gpu=to_gpu)))
    memory.host[:] = 7  # the next owner's
    memory.buffer.upload(0, np.full(SIZE, 7, np.uint8))
    time.sleep(0.2)
    driver.call("cuStreamSynchronize", made._stream)
    assert (memory.host == 7).all()
    assert (memory.buffer.download(0, SIZE) == 7).all()
    failing.planted = False
    made.move(*runs(memory.copies(rng, 64, to_gpu=to_gpu)))
    made.destroy()


class Silent(FailingDriver):
    """Nor does it answer the first `times` questions whether its stream has drained."""

    def __init__(self, fault: str, code: int, times: int) -> None:
        super().__init__(fault)
        ask, self.asked = self.query_stream, 0

        def query_stream(stream: int) -> int:
            self.asked += 1
            return code if self.asked <= times else int(ask(stream))

        self.query_stream = query_stream


@pytest.mark.parametrize("code", [ILLEGAL_ADDRESS, MPS_RPC_FAILURE, UNKNOWN_TO_BINDINGS])
def test_an_end_that_cannot_be_told_ends_the_process(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator, code: int
) -> None:
    made = stream(gpu, Silent("query", code, 1000))
    with pytest.raises(ProcessEnds, match=r"^copies may still be running \(CudaError: cuEventQuery: .*cuStreamQuery: "):
        made.move(*runs(memory.copies(rng, 1, to_gpu=True)))
    driver.call("cuStreamSynchronize", made._stream)


@pytest.mark.parametrize("lost", [True, False])
def test_a_gpu_that_is_lost_before_anything_is_submitted_ends_the_process(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Else each job on it would fail, for good. A stream that has drained is not lost."""
    made = stream(gpu, driver)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "set_current", lambda _: ILLEGAL_ADDRESS)
        if lost:
            patch.setattr(driver, "query_stream", lambda _: ILLEGAL_ADDRESS)
        with pytest.raises(ProcessEnds if lost else CudaError, match="cuCtxSetCurrent: CUDA_ERROR_ILLEGAL_ADDRESS"):
            made.move(*runs(memory.copies(rng, 1, to_gpu=True)))
    made.destroy()


@pytest.mark.parametrize("code", [NOT_READY, MPS_RPC_FAILURE])
def test_a_driver_that_answers_in_the_end_is_believed(
    gpu: Gpu, memory: Memory, rng: np.random.Generator, code: int
) -> None:
    """It is asked some times, if it refuses; for ever, if it answers that the copies run."""
    silent = Silent("query", code, 100 if code == NOT_READY else 5)
    made = stream(gpu, silent)
    with pytest.raises(CudaError, match="CUDA_ERROR_MPS_RPC_FAILURE"):
        made.move(*runs(memory.copies(rng, 1, to_gpu=True)))
    assert silent.asked > 5
    made.destroy()


def test_a_stream_that_others_keep_busy_drains(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator, extras: softcuda.SoftCuda
) -> None:
    """A wait for that keeps them from submitting more."""
    made, record = stream(gpu, driver), driver.record
    ended = threading.Event()

    def submit(handle: int) -> int:
        extras.delay(handle, 0.02)
        return SUCCESS

    def keep_busy() -> None:
        while not ended.is_set():
            made.run(1, submit)

    def fail() -> None:
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            made.move(*runs(memory.copies(rng, 1, to_gpu=True)))
        ended.set()

    first = threading.Thread(target=fail)
    driver.record = lambda *to: OUT_OF_MEMORY if threading.current_thread() is first else record(*to)
    others = [threading.Thread(target=keep_busy) for _ in range(3)]
    for thread in (*others, first):
        thread.start()
    first.join(HANG_S)
    drained = ended.is_set()
    ended.set()
    for thread in (first, *others):
        thread.join(HANG_S)
    assert drained
    made.destroy()


def test_memory_that_is_not_pinned_is_copied(
    gpu: Gpu, driver: Driver, memory: Memory, rng: np.random.Generator, extras: softcuda.SoftCuda
) -> None:
    made, plain = stream(gpu, driver), rng.integers(0, 256, SIZE, dtype=np.uint8)
    at = np.arange(0, SIZE, ROW, dtype=np.uint64)
    host, device = at + np.uint64(plain.ctypes.data), at + np.uint64(memory.buffer.address)
    size, staged = np.full(len(at), ROW, np.uint64), extras.counters().staged_copies
    made.move_each(host, device, size)
    assert (memory.buffer.download(0, SIZE) == plain).all()
    memory.buffer.upload(0, plain[::-1].copy())
    made.move_each(device, host, size)
    assert (memory.buffer.download(0, SIZE) == plain).all()
    assert made.unpinned_copies == 2 * len(at)
    assert extras.counters().staged_copies >= staged + 2 * len(at)
    made.destroy()


def test_the_end_of_a_stream_ignores_errors(gpu: Gpu, memory: Memory, rng: np.random.Generator) -> None:
    """A daemon that ends saves what it holds, whatever becomes of the stream."""
    driver = Driver()
    made = stream(gpu, driver)
    made.move(*runs(memory.copies(rng, 10, to_gpu=True)))
    driver.api = Raising(driver, ValueError("4711 is not a valid CUresult"))
    made.destroy()


# --- the driver's words ---


def test_an_unknown_error_has_its_number(driver: Driver) -> None:
    with pytest.raises(CudaError, match="CUresult 4711"):
        driver.check("cuSomething", 4711)


class Raising:
    """cuda-bindings of a version that has no name for what the driver answers."""

    def __init__(self, driver: Driver, error: Exception) -> None:
        self.CUresult = driver.api.CUresult
        self._error = error

    def cuCtxSynchronize(self, *_arguments: object) -> NoReturn:
        raise self._error

    cuEventDestroy = cuStreamDestroy = cuCtxSynchronize


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("4711 is not a valid CUresult"), "cuCtxSynchronize: CUresult 4711$"),
        (KeyError(4711), "cuCtxSynchronize: CUresult 4711$"),
        (KeyError("4711"), "can't be called"),
        (ValueError("bad argument 4711"), "can't be called"),
    ],
)
def test_a_result_that_cuda_bindings_do_not_know_is_a_cuda_error(driver: Driver, error: Exception, reason: str) -> None:
    driver.api = Raising(driver, error)
    with pytest.raises(DeviceError, match=reason) as caught:
        driver.call("cuCtxSynchronize")
    assert isinstance(caught.value, CudaError) == reason.endswith("$")


@pytest.mark.parametrize(("name", "arguments"), [("cuNoSuchCall", ()), ("cuDeviceGet", ("first",))])
def test_a_call_that_cuda_bindings_lack_is_a_device_error(
    driver: Driver, name: str, arguments: tuple[str, ...]
) -> None:
    with pytest.raises(DeviceError, match=rf"{name} can't be called with cuda-bindings \d+\."):
        driver.call(name, *arguments)


def test_a_call_that_the_driver_lacks_is_none(driver: Driver) -> None:
    assert driver.entry("cuNoSuchCall", 12000) is None
