"""Programs that break one rule each, and return what the driver answers where it does not abort."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
from collections.abc import Callable, Iterator

import numpy as np
from cuda.bindings import driver

from tests.softcuda.gpu import (
    GRANULE,
    access_of,
    address,
    allocate,
    batch,
    code,
    export_noise,
    extras,
    map_chunks,
    new_stream,
    ok,
    open_raw,
    peer,
    pitched,
    pitched_batch,
    property_of,
    raw_handle,
    registered,
    reserve,
    start,
)

SIZE = 65536
UNKNOWN = 0x1234000


def to_device(device: int, host: int, size_bytes: int = SIZE, stream: int = 0) -> int:
    return code(driver.cuMemcpyHtoDAsync(device, host, size_bytes, stream))


@contextlib.contextmanager
def opened() -> Iterator[int]:
    """Another process's memory, open here."""
    with peer(export_noise) as (_, from_peer, _to_peer):
        start()
        yield int(ok(open_raw(os.read(from_peer, 64))))


def copy_under_way(device: int) -> int:
    """Host memory that a copy will soon be made from: its stream is busy."""
    host, stream = registered(SIZE), new_stream()
    extras().delay(stream, 100)
    assert to_device(device, address(host), SIZE, stream) == 0
    return address(host)


def copy_beyond_allocation() -> int:
    start()
    return to_device(allocate(SIZE), address(registered(2 * SIZE)), SIZE + 1)


def copy_to_freed_memory() -> int:
    start()
    device, host = allocate(SIZE), registered(SIZE)
    ok(driver.cuMemFree(device))
    allocate(SIZE)
    return to_device(device, address(host))


def copy_to_closed_memory() -> int:
    with opened() as device:
        host = registered(SIZE)
        ok(driver.cuIpcCloseMemHandle(device))
        return to_device(device, address(host))


def copy_to_unmapped_chunk() -> int:
    start()
    base, _ = map_chunks(1)
    host = registered(SIZE)
    ok(driver.cuMemUnmap(base, GRANULE))
    return to_device(base, address(host))


def copy_beyond_chunks() -> int:
    start()
    base, _ = map_chunks(2)
    return to_device(base + 2 * GRANULE - 1, address(registered(SIZE)), 2)


def copy_without_access() -> int:
    start()
    base = reserve(1)
    ok(driver.cuMemMap(base, GRANULE, 0, ok(driver.cuMemCreate(GRANULE, property_of(), 0)), 0))
    return to_device(base, address(registered(SIZE)))


def copy_with_access_of_another_device() -> int:
    start()
    base, _ = map_chunks(1)
    host = registered(SIZE)
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(1))))
    return to_device(base, address(host))


def copy_unregistered() -> int:
    start()
    return code(batch([allocate(SIZE)], [address(np.zeros(SIZE, np.uint8))], [SIZE], new_stream()))


def copy_across_registrations() -> int:
    start()
    host = np.zeros(2 * SIZE, np.uint8)
    for half in (0, SIZE):
        ok(driver.cuMemHostRegister(address(host) + half, SIZE, 0))
    return to_device(allocate(SIZE), address(host) + 1)


def copy_now_across_a_registration() -> int:
    start()
    host = np.zeros(2 * SIZE, np.uint8)
    ok(driver.cuMemHostRegister(address(host) + SIZE, SIZE, 0))
    return code(driver.cuMemcpyHtoD(allocate(SIZE), address(host) + 1, SIZE))


def copy_the_wrong_way() -> int:
    start()
    return code(driver.cuMemcpyDtoHAsync(allocate(SIZE), address(registered(SIZE)), SIZE, new_stream()))


def copy_within_the_host() -> int:
    start()
    host = address(registered(2 * SIZE))
    return code(driver.cuMemcpyAsync(host, host + SIZE, SIZE, new_stream()))


def copy_of_another_device() -> int:
    start(1)
    device, host = allocate(SIZE), registered(SIZE)
    start(0)
    return to_device(device, address(host))


def pitched_beyond_allocation() -> int:
    start()
    device, host = allocate(SIZE), registered(SIZE)
    return code(pitched((device + 4096, 4096), (address(host), 4096), 4096, 16, new_stream()))


def pitched_beyond_registration() -> int:
    start()
    device, host = allocate(SIZE), registered(SIZE)
    return code(pitched((device, 2048), (address(host), 8192), 1024, 9, new_stream()))


def pitched_rows_that_overlap() -> int:
    start()
    device, host = allocate(SIZE), registered(SIZE)
    return code(pitched((device, 1000), (address(host), 1024), 1024, 16, new_stream()))


def pitched_too_far_apart() -> int:
    start()
    device, host = allocate(SIZE), registered(SIZE)
    return code(pitched((device, 1 << 31), (address(host), 1024), 1024, 2, new_stream()))


def pitched_batch_beyond_allocation() -> int:
    start()
    device, host = allocate(SIZE), registered(SIZE)
    right = ((device, 4096), (address(host), 4096), 1024, 4)
    return code(pitched_batch([right, ((device + 4096, 4096), (address(host), 4096), 4096, 16)], new_stream()))


def pitched_batch_of_rows_that_overlap() -> int:
    start()
    device, host = allocate(SIZE), registered(SIZE)
    return code(pitched_batch([((device, 1000), (address(host), 1024), 1024, 16)], new_stream()))


def pitched_batch_with_overlap() -> int:
    """One run writes between the rows of the other, and one row of it again."""
    start()
    device, host = allocate(SIZE), registered(SIZE)
    runs = [((device + at, 4096), (address(host), 1024), 1024, 8) for at in (0, 1000)]
    return code(pitched_batch(runs, new_stream()))


def batch_across_allocations() -> int:
    start()
    near, far = allocate(GRANULE), allocate(GRANULE)
    host = registered(3 * GRANULE)
    size_bytes = max(near, far) - min(near, far) + 1
    assert size_bytes <= 3 * GRANULE
    return code(batch([min(near, far)], [address(host)], [size_bytes], new_stream()))


def batch_with_overlap() -> int:
    start()
    device, host = allocate(SIZE), address(registered(SIZE))
    return code(batch([device + 999, device], [host, host], [10, 1000], new_stream()))


def batch_that_reads_within_the_call() -> int:
    start()
    order = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL
    return code(batch([allocate(SIZE)], [address(registered(SIZE))], [SIZE], new_stream(), order))


def free_under_copy() -> int:
    start()
    device = allocate(SIZE)
    copy_under_way(device)
    return code(driver.cuMemFree(device))


def close_under_copy() -> int:
    with opened() as device:
        copy_under_way(device)
        return code(driver.cuIpcCloseMemHandle(device))


def unmap_under_copy() -> int:
    start()
    base, _ = map_chunks(2)
    copy_under_way(base + GRANULE)
    return code(driver.cuMemUnmap(base, 2 * GRANULE))


def unregister_under_copy() -> int:
    start()
    return code(driver.cuMemHostUnregister(copy_under_way(allocate(SIZE))))


def munmap_under_copy() -> int:
    start()
    memory, stream, gate = mmap.mmap(-1, SIZE), new_stream(), np.zeros(1, np.uint64)
    host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ok(driver.cuMemHostRegister(host, SIZE, 0))
    extras().spin_until(stream, address(gate), 1)
    assert to_device(allocate(SIZE), host, SIZE, stream) == 0
    ctypes.CDLL(None).munmap(ctypes.c_void_p(host), ctypes.c_size_t(SIZE))
    gate[0] = 1
    return code(driver.cuStreamSynchronize(stream))


def context_released_under_copy() -> int:
    start()
    copy_under_way(allocate(SIZE))
    return code(driver.cuDevicePrimaryCtxRelease(0))


def context_released_twice() -> int:
    start()
    ok(driver.cuDevicePrimaryCtxRelease(0))
    return code(driver.cuDevicePrimaryCtxRelease(0))


def free_twice() -> int:
    start()
    device = allocate(SIZE)
    ok(driver.cuMemFree(device))
    return code(driver.cuMemFree(device))


def close_twice() -> int:
    with opened() as device:
        ok(driver.cuIpcCloseMemHandle(device))
        return code(driver.cuIpcCloseMemHandle(device))


def close_of_own_memory() -> int:
    start()
    return code(driver.cuIpcCloseMemHandle(allocate(SIZE)))


def open_of_own_handle() -> int:
    start()
    return code(open_raw(raw_handle(allocate(SIZE))))


def export_of_freed_memory() -> int:
    start()
    device = allocate(SIZE)
    ok(driver.cuMemFree(device))
    return code(driver.cuIpcGetMemHandle(device))


def register_nothing() -> int:
    start()
    return code(driver.cuMemHostRegister(UNKNOWN, SIZE, 0))


def unregister_twice() -> int:
    start()
    host = registered(SIZE)
    ok(driver.cuMemHostUnregister(address(host)))
    return code(driver.cuMemHostUnregister(address(host)))


def destroyed_stream() -> int:
    start()
    stream = new_stream()
    ok(driver.cuStreamDestroy(stream))
    return code(driver.cuStreamSynchronize(stream))


def null_stream_destroyed() -> int:
    start()
    return code(driver.cuStreamDestroy(0))


def stream_of_another_context() -> int:
    start(1)
    stream = new_stream()
    start(0)
    return to_device(allocate(SIZE), address(registered(SIZE)), SIZE, stream)


def destroyed_event() -> int:
    start()
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuEventDestroy(event))
    return code(driver.cuEventQuery(event))


def event_of_another_context() -> int:
    start(1)
    event = ok(driver.cuEventCreate(0))
    start(0)
    return code(driver.cuEventRecord(event, new_stream()))


def write_to_unregistered() -> int:
    start()
    return code(driver.cuStreamWriteValue64(new_stream(), address(np.zeros(1, np.uint64)), 1, 0))


def write_unaligned() -> int:
    start()
    return code(driver.cuStreamWriteValue64(new_stream(), address(registered(SIZE)) + 4, 1, 0))


def write_beyond_registration() -> int:
    start()
    host = np.zeros(2, np.uint64)
    ok(driver.cuMemHostRegister(address(host), 12, 0))
    return code(driver.cuStreamWriteValue64(new_stream(), address(host) + 8, 1, 0))


def fill_beyond_allocation() -> int:
    start()
    return code(driver.cuMemsetD8(allocate(SIZE), 1, SIZE + 1))


def map_without_reservation() -> int:
    start()
    handle = ok(driver.cuMemCreate(GRANULE, property_of(), 0))
    return code(driver.cuMemMap(reserve(1) + GRANULE, GRANULE, 0, handle, 0))


def map_twice() -> int:
    start()
    base, handles = map_chunks(1)
    return code(driver.cuMemMap(base, GRANULE, 0, handles[0], 0))


def map_released_handle() -> int:
    start()
    handle = ok(driver.cuMemCreate(GRANULE, property_of(), 0))
    ok(driver.cuMemRelease(handle))
    return code(driver.cuMemMap(reserve(1), GRANULE, 0, handle, 0))


def unmap_twice() -> int:
    start()
    base, _ = map_chunks(1)
    ok(driver.cuMemUnmap(base, GRANULE))
    return code(driver.cuMemUnmap(base, GRANULE))


def access_beyond_mappings() -> int:
    start()
    base = reserve(2)
    ok(driver.cuMemMap(base, GRANULE, 0, ok(driver.cuMemCreate(GRANULE, property_of(), 0)), 0))
    return code(driver.cuMemSetAccess(base, 2 * GRANULE, [access_of()], 1))


def address_freed_while_mapped() -> int:
    start()
    base, _ = map_chunks(2)
    return code(driver.cuMemAddressFree(base, 2 * GRANULE))


def address_freed_in_part() -> int:
    start()
    return code(driver.cuMemAddressFree(reserve(2), GRANULE))


def release_twice() -> int:
    start()
    handle = ok(driver.cuMemCreate(GRANULE, property_of(), 0))
    ok(driver.cuMemRelease(handle))
    return code(driver.cuMemRelease(handle))


def _in_a_child(program: Callable[[], int]) -> tuple[int, str]:
    """How a separate process ends, and all that it and the driver print."""
    read_end, out = os.pipe()
    pid = os.fork()
    if not pid:
        for standard in (1, 2):
            os.dup2(out, standard)
        os.write(1, f"{program()}\n".encode())
        os._exit(0)
    os.close(out)
    with os.fdopen(read_end) as stream:
        text = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def all_of_them() -> str:
    """What becomes of each program, as JSON."""
    programs = [
        value
        for value in globals().values()
        if getattr(value, "__module__", None) == __name__ and value.__annotations__ == {"return": "int"}
    ]
    return json.dumps({program.__name__: _in_a_child(program) for program in programs})
