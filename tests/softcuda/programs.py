"""Programs that keep to the rules, and check what they get."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np
from cuda.bindings import driver

from tests.softcuda.gpu import (
    ANY_ORDER,
    GRANULE,
    NON_BLOCKING,
    STREAM_ORDER,
    U8Array,
    address,
    allocate,
    attribute,
    batch,
    bytes_at,
    code,
    extras,
    map_chunks,
    new_stream,
    noise,
    ok,
    pitched,
    pitched_batch,
    property_of,
    registered,
    start,
    until,
)

NOT_READY, NOT_FOUND = 600, 500
SIZE = 1 << 20


def devices() -> None:
    assert code(driver.cuDeviceGetCount()) == 3
    start(1)
    assert ok(driver.cuDriverGetVersion()) == 13000
    assert ok(driver.cuDeviceGetCount()) == 2
    assert int(ok(driver.cuDeviceGet(1))) == 1
    assert code(driver.cuDeviceGet(2)) == 101
    assert ok(driver.cuDeviceGetName(64, 1)).startswith(b"softcuda device 1\0")
    assert ok(driver.cuDeviceTotalMem(1)) == 4 << 30
    assert ok(driver.cuDeviceGetUuid(0)).bytes != ok(driver.cuDeviceGetUuid(1)).bytes
    virtual_memory = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    assert ok(driver.cuDeviceGetAttribute(virtual_memory, 0)) == 1
    assert ok(driver.cuGetErrorName(driver.CUresult.CUDA_ERROR_NOT_READY)) == b"CUDA_ERROR_NOT_READY"
    assert ok(driver.cuGetErrorString(driver.CUresult.CUDA_ERROR_NOT_READY)) == b"device not ready"


def visible() -> str:
    ok(driver.cuInit(0))
    return " ".join(str(ok(driver.cuDeviceGetUuid(i)).bytes[15]) for i in range(ok(driver.cuDeviceGetCount())))


def no_device() -> int:
    return code(driver.cuInit(0))


def addresses() -> str:
    """What cuGetProcAddress answers."""
    symbols = [(b"cuMemcpyBatchAsync", version) for version in (12070, 12080, 13000)]
    symbols += [(b"cuInit", 2000), (b"cuCtxCreate", 13000), (b"cuMemAlloc", 2000)]
    return " ".join(str(code(driver.cuGetProcAddress(name, version, 0))) for name, version in symbols)


def contexts() -> None:
    first = start(0)
    second = ok(driver.cuDevicePrimaryCtxRetain(1))
    assert int(ok(driver.cuDevicePrimaryCtxRetain(0))) == int(first)
    ok(driver.cuCtxPushCurrent(second))
    assert int(ok(driver.cuCtxGetDevice())) == 1
    assert int(ok(driver.cuCtxPopCurrent())) == int(second)
    assert int(ok(driver.cuCtxGetCurrent())) == int(first)
    ok(driver.cuCtxSynchronize())
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(code(driver.cuMemAlloc(1))))
    thread.start()
    thread.join()
    assert seen == [201], "a context is current in one thread"
    ok(driver.cuMemAlloc(1))
    new_stream()
    registered(SIZE)
    ok(driver.cuEventCreate(0))
    for _ in range(2):
        ok(driver.cuDevicePrimaryCtxRelease(0))
    assert code(driver.cuMemAlloc(1)) == 709, "the last release destroys it"
    counters = extras().counters()
    assert counters.live_allocations + counters.live_streams + counters.live_registrations + counters.live_events == 0
    ok(driver.cuCtxSetCurrent(0))
    assert code(driver.cuMemAlloc(1)) == 201


def memory() -> None:
    start()
    device = allocate(5000)
    assert ok(driver.cuMemGetInfo()) == ((4 << 30) - GRANULE, 4 << 30)
    base, size_bytes = ok(driver.cuMemGetAddressRange(device + 4999))
    assert (int(base), size_bytes) == (device, 5000)
    assert code(driver.cuMemGetAddressRange(device + 5000)) == NOT_FOUND
    assert attribute("MEMORY_TYPE", device) == 2
    assert attribute("DEVICE_ORDINAL", device) == 0
    assert attribute("IS_LEGACY_CUDA_IPC_CAPABLE", device) is True
    assert attribute("MAPPED", device) is True
    assert attribute("ALLOWED_HANDLE_TYPES", device) == 0
    assert (attribute("RANGE_SIZE", device), attribute("MAPPING_SIZE", device)) == (5000, 5000)
    assert attribute("CONTEXT", device) is not None
    ok(driver.cuMemsetD8(device, 7, 5000))
    assert (bytes_at(device, 5000) == 7).all()
    other = allocate(5000)
    ok(driver.cuMemcpyDtoD(other, device, 5000))
    assert (bytes_at(other, 5000) == 7).all()
    ok(driver.cuMemFree(device))
    assert allocate(5000) != device, "addresses are never reused"


def memory_is_limited() -> None:
    start()
    assert code(driver.cuMemAlloc(GRANULE * 3)) == 2
    device = allocate(GRANULE + 1)
    assert code(driver.cuMemAlloc(1)) == 2
    assert code(driver.cuMemCreate(GRANULE, property_of(), 0)) == 2
    ok(driver.cuMemFree(device))
    handle = ok(driver.cuMemCreate(2 * GRANULE, property_of(), 0))
    ok(driver.cuMemRelease(handle))
    allocate(2 * GRANULE)


def asynchrony() -> None:
    """Calls return at once; streams overtake each other; events show how far one has come."""
    start()
    device, host, back = allocate(SIZE), registered(SIZE), registered(SIZE)
    host[:] = noise(SIZE)
    slow, quick = new_stream(), int(ok(driver.cuStreamCreateWithPriority(NON_BLOCKING, 0)))
    gate = np.zeros(1, np.uint64)
    before, after = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    assert code(driver.cuEventQuery(after)) == 0, "never recorded"
    ok(driver.cuEventRecord(before, slow))
    extras().spin_until(slow, address(gate), 1)
    ok(driver.cuMemcpyHtoDAsync(device, address(host), SIZE, slow))
    ok(driver.cuMemcpyAsync(address(back), device, SIZE, slow))
    ok(driver.cuEventRecord(after, slow))
    ok(driver.cuEventSynchronize(before))
    ok(driver.cuMemsetD8Async(device, 1, SIZE, quick))
    ok(driver.cuStreamSynchronize(quick))
    assert (bytes_at(device, SIZE) == 1).all()
    assert code(driver.cuStreamQuery(slow)) == code(driver.cuEventQuery(after)) == NOT_READY
    gate[0] = 1
    ok(driver.cuEventSynchronize(after))
    assert code(driver.cuEventQuery(after)) == 0
    assert np.array_equal(back, host)
    ok(driver.cuStreamSynchronize(slow))
    ok(driver.cuMemcpyDtoHAsync(address(host), device, SIZE, slow))
    ok(driver.cuCtxSynchronize())
    assert code(driver.cuStreamQuery(slow)) == 0
    extras().delay(slow, 0.05)
    for stream in (slow, quick):
        ok(driver.cuStreamDestroy(stream))
    for event in (before, after):
        ok(driver.cuEventDestroy(event))
    counters = extras().counters()
    assert (counters.live_streams, counters.live_events) == (0, 0)
    assert (counters.copies, counters.bytes_to_device, counters.bytes_to_host) == (4, SIZE, 3 * SIZE)


def written_values() -> None:
    """A stream reports how far it has come: to the host, and to device memory."""
    start()
    host = np.zeros(2, np.uint64)
    ok(driver.cuMemHostRegister(address(host), host.nbytes, 0))
    assert int(ok(driver.cuMemHostGetDevicePointer(address(host) + 8, 0))) == address(host) + 8
    assert attribute("MEMORY_TYPE", address(host)) == 1
    device, stream, gate = allocate(8), new_stream(), np.zeros(1, np.uint64)
    extras().spin_until(stream, address(gate), 1)
    ok(driver.cuStreamWriteValue64(stream, device, 1 << 40, 0))
    ok(driver.cuStreamWriteValue64(stream, address(host) + 8, 5, 0))
    assert host[1] == 0
    gate[0] = 1
    until(lambda: host[1] == 5)
    assert bytes_at(device, 8).view(np.uint64)[0] == 1 << 40
    ok(driver.cuStreamSynchronize(stream))
    ok(driver.cuMemHostUnregister(address(host)))


def registrations() -> None:
    start()
    host = np.zeros(4 * SIZE, np.uint8)
    ok(driver.cuMemHostRegister(address(host) + 100, SIZE, 0))
    for skew in (0, 100, SIZE):
        assert code(driver.cuMemHostRegister(address(host) + skew, SIZE, 0)) == 712
    ok(driver.cuMemHostRegister(address(host) + 100 + SIZE, SIZE, 0))
    assert code(driver.cuMemHostRegister(address(host) + 3 * SIZE, 0, 0)) == 1
    assert extras().counters().live_registrations == 2
    for skew in (100, 100 + SIZE):
        ok(driver.cuMemHostUnregister(address(host) + skew))
    ok(driver.cuMemHostRegister(address(host), 2 * SIZE, 0))


def slow_and_limited_registration() -> None:
    start()
    host = np.zeros(SIZE, np.uint8)
    assert code(driver.cuMemHostRegister(address(host), SIZE, 0)) == 2
    begun_s = time.monotonic()
    ok(driver.cuMemHostRegister(address(host), SIZE - 1, 0))
    assert time.monotonic() - begun_s >= 0.09


def _prepared_batch(count: int) -> tuple[U8Array, U8Array, int, list[int], list[int]]:
    """Two registrations, device memory, and where a shuffled batch copies from and to."""
    host, back = registered(count * 1000), registered(count * 1000)
    host[:] = noise(count * 1000)
    order = np.random.default_rng(1).permutation(count)
    sources = (address(host) + 1000 * order).tolist()
    return host, back, allocate(count * 1000), sources, (1000 * order).tolist()


def batches() -> None:
    """Copies through NVIDIA's bindings to the device and back in one batch each, one with two attributes."""
    start()
    host, back, device, sources, places = _prepared_batch(100)
    stream, sizes = new_stream(), [1000] * 100
    destinations = [device + place for place in places]
    ok(batch(destinations, sources, sizes, stream))
    ok(batch([address(back) + place for place in places], destinations, sizes, stream, STREAM_ORDER))
    ok(driver.cuStreamSynchronize(stream))
    assert np.array_equal(host, back)
    counters = extras().counters()
    assert (counters.batches, counters.copies, counters.bytes_to_host) == (2, 200, 100_000)
    assert code(batch(destinations, sources, sizes, 0)) == 1, "not on the NULL stream"
    assert code(batch(destinations, sources, [0] * 100, stream)) == 1
    assert code(batch([], [], [], stream)) == 1
    attributes = [driver.CUmemcpyAttributes(), driver.CUmemcpyAttributes()]
    for each in attributes:
        each.srcAccessOrder = STREAM_ORDER
    to, sources_ = ([driver.CUdeviceptr(a) for a in side] for side in (destinations, sources))
    ok(driver.cuMemcpyBatchAsync(to, sources_, sizes, 100, attributes, [0, 50], 2, stream))
    ok(driver.cuStreamSynchronize(stream))
    for wrong in ([1, 50], [0, 0], [0, 100]):
        assert code(driver.cuMemcpyBatchAsync(to, sources_, sizes, 100, attributes, wrong, 2, stream)) == 1


def pitched_copies() -> None:
    """100 rows to every third row of the device's memory and back."""
    start()
    host, back, stream = registered(100 * 1000), registered(100 * 1000), new_stream()
    host[:] = noise(100 * 1000)
    device = allocate(300 * 1000)
    ok(pitched((device, 3000), (address(host), 1000), 1000, 100, stream))
    ok(pitched((address(back), 1000), (device, 3000), 999, 100, stream))
    ok(driver.cuStreamSynchronize(stream))
    counters = extras().counters()
    assert (counters.pitched, counters.copies, counters.bytes_to_host) == (2, 200, 99_900)
    rows, returned = host.reshape(100, 1000), back.reshape(100, 1000)
    assert np.array_equal(bytes_at(device, 300 * 1000)[: 297 * 1000].reshape(99, 3000)[:, :1000], rows[:99])
    assert np.array_equal(returned[:, :999], rows[:, :999])
    assert not returned[:, 999].any(), "bytes between the rows"


def pitched_batches() -> None:
    """Does what `pitched_copies` does, all in one call: 4 runs of 25 rows, the last of them without gaps on the host's
    side.
    """
    start()
    host, back, stream = registered(100 * 1000), registered(100 * 1000), new_stream()
    host[:] = noise(100 * 1000)
    device = allocate(300 * 1000)

    def runs(length: int) -> list[tuple[tuple[int, int], tuple[int, int], int, int]]:
        return [((device + at * 3000, 3000), (address(host) + at * 1000, length), 1000, 25) for at in range(0, 100, 25)]

    ok(pitched_batch(runs(1000)[:2] + runs(0)[2:], stream, ANY_ORDER))
    ok(pitched_batch([((address(back), 1000), (device, 3000), 999, 100)], stream))
    ok(driver.cuStreamSynchronize(stream))
    counters = extras().counters()
    assert (counters.pitched, counters.pitched_batches, counters.copies) == (5, 2, 200)
    assert np.array_equal(back.reshape(100, 1000)[:, :999], host.reshape(100, 1000)[:, :999])
    assert not back.reshape(100, 1000)[:, 999].any(), "bytes between the rows"
    assert code(pitched_batch(runs(1000), 0)) == 1, "not on the NULL stream"
    assert code(pitched_batch([], stream)) == 1
    for width, height in ((0, 1), (1, 0)):
        assert code(pitched_batch([((device, 1), (address(host), 1), width, height)], stream)) == 1


class Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def _raw_batch(version: int) -> None:
    """Copies through the pointer that a program gets for itself, without lists of Python objects."""
    start()
    host, back, device, sources, places = _prepared_batch(100)
    stream, pointer = new_stream(), ctypes.c_void_p
    call = ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * (9 if version < 13000 else 8))(
        ok(driver.cuGetProcAddress(b"cuMemcpyBatchAsync", version, 0))[0]
    )
    attributes, first, failed = Attributes(order=3), ctypes.c_size_t(0), ctypes.c_size_t(7)
    sizes = np.full(100, 1000, np.uint64)

    def raw(destinations: list[int], origins: list[int]) -> int:
        to, from_ = np.array(destinations, np.uint64), np.array(origins, np.uint64)
        tail = [ctypes.addressof(failed)] if version < 13000 else []
        return int(
            call(
                address(to), address(from_), address(sizes), 100, ctypes.addressof(attributes),
                ctypes.addressof(first), 1, *tail, stream,
            )
        )  # fmt: skip

    on_device = [device + place for place in places]
    assert raw(on_device, sources) == 0
    assert raw([address(back) + place for place in places], on_device) == 0
    ok(driver.cuStreamSynchronize(stream))
    assert np.array_equal(host, back)
    sizes[42] = 0
    assert raw(on_device, sources) == 1
    assert failed.value == (42 if version < 13000 else 7)


def raw_batch_of_cuda_12() -> None:
    _raw_batch(12080)


def raw_batch_of_cuda_13() -> None:
    _raw_batch(13000)


def unusable_after_fork() -> None:
    start()
    device = allocate(SIZE)
    pid = os.fork()
    if not pid:
        os._exit(
            sum(code(result) != 3 for result in (driver.cuInit(0), driver.cuMemFree(device), driver.cuMemAlloc(1)))
        )
    assert os.waitpid(pid, 0)[1] == 0
    ok(driver.cuMemFree(device))


def many_threads() -> None:
    """Calls from many threads at once, each with a separate stream and memory."""
    start()
    host = registered(8 * SIZE)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            start()
            block = host[number * SIZE : (number + 1) * SIZE]
            for turn in range(5):
                device, stream = allocate(SIZE), new_stream()
                block[:] = noise(SIZE, number * 10 + turn)
                ok(driver.cuMemcpyHtoDAsync(device, address(block), SIZE, stream))
                ok(driver.cuStreamSynchronize(stream))
                block[:] = 0
                ok(batch([address(block)], [device], [SIZE], stream))
                ok(driver.cuStreamSynchronize(stream))
                assert np.array_equal(block, noise(SIZE, number * 10 + turn))
                ok(driver.cuMemFree(device))
                ok(driver.cuStreamDestroy(stream))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def exit_with_all_open() -> None:
    start()
    stream, host = new_stream(), registered(SIZE)
    map_chunks(1)
    extras().delay(stream, 100)
    ok(driver.cuMemcpyHtoDAsync(allocate(SIZE), address(host), SIZE, stream))


def preloaded() -> None:
    """This process was started without softcuda in its path."""
    assert "LD_LIBRARY_PATH" not in os.environ
    assert extras().counters().copies == 0
    start()
    allocate(1)
    assert extras().counters().live_allocations == 1
