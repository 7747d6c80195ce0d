"""Programs that meet the faults they were started with."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import numpy as np
from cuda.bindings import driver

from tests.softcuda.gpu import (
    ANY_ORDER,
    STREAM_ORDER,
    U8Array,
    address,
    allocate,
    batch,
    bytes_at,
    code,
    export_noise,
    extras,
    new_stream,
    noise,
    ok,
    open_raw,
    peer,
    pitched_batch,
    raw_handle,
    registered,
    start,
)

SIZE = 1 << 20
NOT_READY, ILLEGAL_ADDRESS = 600, 700


def _buffers() -> tuple[int, U8Array, int]:
    start()
    return allocate(SIZE), registered(SIZE), new_stream()


def _to_device(device: int, host: U8Array, stream: int) -> int:
    return code(driver.cuMemcpyHtoDAsync(device, address(host), SIZE, stream))


def _to_host(device: int, host: U8Array, stream: int) -> int:
    return code(driver.cuMemcpyDtoHAsync(address(host), device, SIZE, stream))


def seconds_of(work: Callable[[], object]) -> float:
    begun_s = time.monotonic()
    work()
    return time.monotonic() - begun_s


def sticky() -> None:
    """sticky_after=3: the other device goes on."""
    device, host, stream = _buffers()
    for _ in range(2):
        assert _to_device(device, host, stream) == 0
    ok(driver.cuStreamSynchronize(stream))
    assert _to_device(device, host, stream) == 0, "the failure comes when it runs"
    assert code(driver.cuStreamSynchronize(stream)) == ILLEGAL_ADDRESS
    for result in (
        driver.cuMemFree(device), driver.cuMemAlloc(1), driver.cuStreamQuery(stream), driver.cuCtxSynchronize(),
        driver.cuMemHostUnregister(address(host)), driver.cuDevicePrimaryCtxRetain(0), driver.cuStreamCreate(0),
    ):  # fmt: skip
        assert code(result) == ILLEGAL_ADDRESS
    start(1)
    other, memory, works = allocate(SIZE), registered(SIZE), new_stream()
    assert _to_device(other, memory, works) == 0
    ok(driver.cuStreamSynchronize(works))
    ok(driver.cuDevicePrimaryCtxRelease(0))


def event_codes() -> str:
    """Returns the codes of recording an event and asking for it, and for its stream, by turns: query_error=N,
    record_error=N.
    """
    _, _, stream = _buffers()
    event, codes = ok(driver.cuEventCreate(0)), []
    for _ in range(2):
        codes.append(code(driver.cuEventRecord(event, stream)))
        ok(driver.cuStreamSynchronize(stream))
        codes += [code(driver.cuEventQuery(event)), code(driver.cuStreamQuery(stream))]
    return str(codes)


def registrations() -> str:
    """Registers three pieces of a mebibyte each: register_error_after=X, register_fails_every=N."""
    start()
    memory = [np.zeros(SIZE, np.uint8) for _ in range(3)]
    return str([code(driver.cuMemHostRegister(address(one), SIZE, 0)) for one in memory])


def unregistered() -> str:
    """A copy's source is read, and its destination written, when its call returns: not so where they are registered."""
    device, _, stream = _buffers()
    plain, fast = np.full(SIZE, 7, np.uint8), np.zeros(SIZE, np.uint8)
    ok(driver.cuMemHostRegister(address(fast), SIZE, 0))
    extras().delay(stream, 0.2)
    assert _to_device(device, plain, stream) == 0
    plain[:] = 1
    assert _to_host(device, fast, stream) == 0
    early = int(fast[0])
    assert _to_host(device, plain, stream) == 0
    return str([early, int(fast[0]), int(plain[0]), extras().counters().staged_copies])


def _hang(hung: Callable[[int, U8Array, int], int], others: Callable[[int, U8Array, int], int]) -> None:
    device, host, stream = _buffers()
    other = new_stream()
    for _ in range(2):
        assert hung(device, host, stream) == 0
    time.sleep(0.1)
    assert code(driver.cuStreamQuery(stream)) == NOT_READY
    assert others(device, host, other) == 0
    ok(driver.cuStreamSynchronize(other))
    assert extras().counters().copies == 2


def hang() -> None:
    """hang_after=2"""
    _hang(_to_device, _to_device)


def hang_one_way() -> None:
    """hang_device_to_host=2: the other way goes on."""
    _hang(_to_host, _to_device)


def hang_other_way() -> None:
    """hang_host_to_device=2"""
    _hang(_to_device, _to_host)


def _that_end(submit: Callable[[int, U8Array, int], object]) -> list[bool]:
    """Which of two calls ends, each in a separate stream."""
    device, host, _ = _buffers()
    streams = [new_stream(), new_stream()]
    for stream in streams:
        submit(device, host, stream)
    until_s = time.monotonic() + 2.0
    while (codes := [code(driver.cuStreamQuery(stream)) for stream in streams]) != [0, 0]:
        if time.monotonic() > until_s:
            break
        time.sleep(0.01)
    return [one == 0 for one in codes]


def batches_that_end() -> list[bool]:
    """batch_hangs_after=2"""
    return _that_end(lambda device, host, stream: ok(batch([device], [address(host)], [SIZE], stream)))


def pitched_batches_that_end() -> list[bool]:
    """pitched_batch_hangs_after=2"""
    run = 1024, SIZE // 1024
    return _that_end(
        lambda device, host, stream: ok(pitched_batch([((device, 1024), (address(host), 1024), *run)], stream))
    )


def offset_pointers() -> str:
    """host_offset=1 GiB, misuse=error: a stream writes registered memory by the device's address alone."""
    start()
    memory, stream = registered(SIZE), new_stream()
    device = int(ok(driver.cuMemHostGetDevicePointer(address(memory), 0)))
    codes = [code(driver.cuStreamWriteValue64(stream, where, 7, 0)) for where in (address(memory), device + 8)]
    ok(driver.cuStreamSynchronize(stream))
    return str([device - address(memory), *codes, *memory[:16:8].tolist()])


def full_queue() -> None:
    """queue_depth=3: the fourth call waits for the first to end, and all else in its context waits with it."""
    device, host, stream = _buffers()
    context = ok(driver.cuCtxGetCurrent())
    gate = ctypes.c_uint64()
    extras().spin_until(stream, ctypes.addressof(gate), 1)
    for _ in range(2):
        assert _to_device(device, host, stream) == 0
    codes: list[int] = []
    asked = [0]

    def submit() -> None:
        ok(driver.cuCtxSetCurrent(context))
        codes.append(_to_device(device, host, stream))

    def ask() -> None:
        ok(driver.cuCtxSetCurrent(context))
        while not codes:
            driver.cuStreamQuery(stream)
            asked[0] += 1

    threads = [threading.Thread(target=work) for work in (submit, ask)]
    for thread in threads:
        thread.start()
    before = -1
    while before != asked[0]:  # for ever, if the queue is never full
        before = asked[0]
        time.sleep(0.1)
    assert codes == []
    gate.value = 1
    for thread in threads:
        thread.join()
    ok(driver.cuStreamSynchronize(stream))
    assert codes == [0]
    assert extras().counters().copies == 3


def _export_two(peer_in: int, peer_out: int) -> None:
    """A peer: memory of 1,000 bytes full of 1, and of 3,000 full of 2. Frees the first when it hears something."""
    start()
    for size_bytes, value in ((1000, 1), (3000, 2)):
        device = allocate(size_bytes)
        ok(driver.cuMemsetD8(device, value, size_bytes))
        os.write(peer_out, raw_handle(device))
        if value == 1:
            first = device
    os.read(peer_in, 1)
    ok(driver.cuMemFree(first))
    os.write(peer_out, b"freed")
    os.read(peer_in, 1)


def shared_block() -> str:
    """small_block: how far apart two small allocations are that another process opens, what the second's range is, and
    what each holds when the other is closed, freed."""
    with peer(_export_two) as (_, from_peer, to_peer):
        start()
        one, two = (int(ok(open_raw(os.read(from_peer, 64)))) for _ in range(2))
        base, size = ok(driver.cuMemGetAddressRange(two))
        found = [two - one, two - int(base), size, int(bytes_at(one, 1000).max())]
        ok(driver.cuIpcCloseMemHandle(one))
        os.write(to_peer, b"x")
        assert os.read(from_peer, 5) == b"freed"
        found.append(int(bytes_at(two, 3000).min()))
        ok(driver.cuIpcCloseMemHandle(two))
        assert extras().counters().live_opened == 0
        return str(found)


def small_allocations() -> str:
    """small_block: what is free with one, with 3,000 more, and when all are freed, in MiB less than the device has."""
    start()
    used = []
    first = allocate(1)
    for count in (0, 3000):
        more = [allocate(1024) for _ in range(count)]
        used.append(ok(driver.cuMemGetInfo()))
    for device in (first, *more):
        ok(driver.cuMemFree(device))
    used.append(ok(driver.cuMemGetInfo()))
    return str([(total - free) >> 20 for free, total in used])


def host_pointers() -> int:
    """no_host_pointers"""
    start()
    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    return int(ok(driver.cuDeviceGetAttribute(which, 0)))


def stream_writes() -> str:
    """no_stream_writes: what the GPU reports, and what the call returns."""
    _, host, stream = _buffers()
    which = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    supported = int(ok(driver.cuDeviceGetAttribute(which, 0)))
    return str([supported, code(driver.cuStreamWriteValue64(stream, address(host), 7, 0))])


def link() -> None:
    """link_bytes_per_s=5 MiB: streams share one direction, not both."""
    device, host, stream = _buffers()
    other, third = new_stream(), new_stream()
    other_device, third_device, back = allocate(SIZE), allocate(SIZE), registered(SIZE)

    def copy() -> None:
        assert _to_device(device, host, stream) == 0
        assert _to_device(other_device, host, other) == 0
        assert _to_host(third_device, back, third) == 0
        ok(driver.cuStreamSynchronize(third))
        assert code(driver.cuStreamQuery(other)) + code(driver.cuStreamQuery(stream)) >= NOT_READY
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuStreamSynchronize(other))

    assert seconds_of(copy) >= 0.4


def delay() -> None:
    """delay_copies_ns=500 ms"""
    device, host, stream = _buffers()

    def copy() -> None:
        assert _to_device(device, host, stream) == 0
        assert code(driver.cuStreamQuery(stream)) == NOT_READY
        ok(driver.cuStreamSynchronize(stream))

    assert seconds_of(copy) >= 0.5


def held() -> None:
    """hold=PATH, where there is a file: a copy waits, and goes on when the file is gone."""
    device, host, stream = _buffers()
    assert _to_device(device, host, stream) == 0
    time.sleep(0.1)
    assert code(driver.cuStreamQuery(stream)) == NOT_READY
    assert extras().counters().copies == 0
    os.unlink(os.environ["SOFTCUDA_HOLD"])
    ok(driver.cuStreamSynchronize(stream))
    assert extras().counters().copies == 1


def jitter() -> float:
    """jitter_ns=20 ms: 20 operations take 200 ms or so; as long as before with the same seed."""
    start()
    stream, event = new_stream(), ok(driver.cuEventCreate(0))

    def work() -> None:
        for _ in range(20):
            ok(driver.cuEventRecord(event, stream))
        ok(driver.cuStreamSynchronize(stream))

    return seconds_of(work)


def failed_submits() -> str:
    """fail_submit_every=3"""
    device, host, stream = _buffers()
    codes = [_to_device(device, host, stream) for _ in range(3)]
    codes += [code(batch([device], [address(host)], [SIZE], stream)) for _ in range(3)]
    ok(driver.cuStreamSynchronize(stream))
    assert extras().counters().copies == 4
    return "".join(map(str, codes))


def corruption() -> str:
    """corrupt_every=2"""
    device, host, stream = _buffers()
    flipped = []
    for _ in range(4):
        host[:] = noise(SIZE)
        assert _to_device(device, host, stream) == 0
        ok(driver.cuStreamSynchronize(stream))
        # Device memory as it is: a copy back would be counted too.
        seen = np.frombuffer(ctypes.string_at(device, SIZE), np.uint8)
        flipped.append(int(np.bitwise_count(seen ^ host).sum()))
    return "".join(map(str, flipped))


def open_code() -> int:
    """open_error=N, dead_exporter"""
    with peer(export_noise) as (_, from_peer, _to_peer):
        start()
        return code(open_raw(os.read(from_peer, 64)))


def slow_close() -> None:
    """close_delay_ns=100 ms"""
    with peer(export_noise) as (_, from_peer, _to_peer):
        start()
        device = ok(open_raw(os.read(from_peer, 64)))
        assert seconds_of(lambda: ok(driver.cuIpcCloseMemHandle(device))) >= 0.1


def init_seconds() -> None:
    """INIT_NS=0.2 s: the first time alone."""
    assert seconds_of(lambda: ok(driver.cuInit(0))) >= 0.2
    assert seconds_of(lambda: ok(driver.cuInit(0))) < 0.2


def nothing() -> int:
    """init_error=N"""
    return code(driver.cuInit(0))


def context_code() -> int:
    """context_error=N"""
    assert nothing() == 0
    return code(driver.cuDevicePrimaryCtxRetain(0))


def poisoned() -> list[int]:
    """poison: what new memory holds, what it holds that was written, and what after it was read."""
    device, host, stream = _buffers()
    found = []
    for written in (None, 7, None):
        if written is not None:
            ok(driver.cuMemsetD8Async(device, written, SIZE, stream))
        assert _to_host(device, host, stream) == 0
        ok(driver.cuStreamSynchronize(stream))
        found += np.unique(host).tolist()
    return found


def pitched_batch_code() -> int:
    """no_pitched_batch, pitched_batch_error=N"""
    device, host, stream = _buffers()
    found = driver.cuGetProcAddress(b"cuMemcpy3DBatchAsync", 12080, 0)
    if code(found):
        return code(found)
    return code(pitched_batch([((device, 1024), (address(host), 1024), 1024, SIZE // 1024)], stream))


def early_reads() -> str:
    """read_early: which of two batches, and of two of pitched copies, behind a slow copy has the bytes that its source
    had when it was submitted.
    """
    device, host, stream = _buffers()
    seen = []
    for number, order in enumerate([ANY_ORDER, STREAM_ORDER] * 2):
        host[:] = 1
        extras().delay(stream, 0.05)
        if number < 2:
            ok(batch([device], [address(host)], [SIZE], stream, order))
        else:
            ok(pitched_batch([((device, 1024), (address(host), 1024), 1024, SIZE // 1024)], stream, order))
        host[:] = 2
        ok(driver.cuStreamSynchronize(stream))
        seen.append(ctypes.string_at(device, 1)[0])
    return "".join(map(str, seen))


def slow_submits() -> None:
    """submit_ns=1 ms: for each copy of a batch, within the call."""
    device, host, stream = _buffers()
    rows = range(0, 100 * 4096, 4096)
    to, of, sizes = [device + at for at in rows], [address(host) + at for at in rows], [4096] * 100
    assert seconds_of(lambda: ok(batch(to, of, sizes, stream))) >= 0.1
    assert seconds_of(lambda: _to_device(device, host, stream)) >= 0.001
    ok(driver.cuStreamSynchronize(stream))


def register_seconds() -> float:
    """REGISTER_NS_PER_GIB, register_holds_lock: how long another thread's call waits for a registration of 0.2 s."""
    start()
    memory = np.zeros(SIZE, np.uint8)
    waits: list[float] = []

    def watch() -> None:
        while thread.is_alive():
            waits.append(seconds_of(lambda: driver.cuDriverGetVersion()))
            waits.append(seconds_of(lambda: driver.cuCtxGetCurrent()))

    def register() -> None:
        start()
        ok(driver.cuMemHostRegister(address(memory), SIZE, 0))

    thread = threading.Thread(target=register)
    begun_s = time.monotonic()
    thread.start()
    watch()
    assert time.monotonic() - begun_s >= 0.2
    return max(waits)


def context_seconds() -> None:
    """CONTEXT_NS=0.2 s, CONTEXT_BYTES=1 GiB: each context takes both."""
    ok(driver.cuInit(0))
    assert seconds_of(lambda: start()) >= 0.2
    free, total = ok(driver.cuMemGetInfo())
    assert total - free == 1 << 30
    again = ok(driver.cuDevicePrimaryCtxRetain(0))
    ok(driver.cuDevicePrimaryCtxRelease(0))
    ok(driver.cuDevicePrimaryCtxRelease(0))
    assert seconds_of(lambda: start()) >= 0.2
    assert ok(driver.cuMemGetInfo())[0] == free
    assert int(again) != 0


def batch_is_missing() -> int:
    """no_batch"""
    start()
    return code(driver.cuGetProcAddress(b"cuMemcpyBatchAsync", 13000, 0))
