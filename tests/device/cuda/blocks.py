"""A program that opens small allocations of another process, which share a block of the driver's."""

from __future__ import annotations

import ctypes
import os

from cuda.bindings import driver

from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.memory import SharedMemory
from tests.softcuda.gpu import allocate, bytes_at, extras, ok, peer, raw_handle, start

SIZES = (1000, 3000, 5000)
HANDLE_BYTES = 64


def _export(peer_in: int, peer_out: int) -> None:
    """Allocations that hold 1, 2 and 3. The second is freed when something is heard."""
    start()
    found = [allocate(size_bytes) for size_bytes in SIZES]
    for value, (device, size_bytes) in enumerate(zip(found, SIZES, strict=True), 1):
        ok(driver.cuMemsetD8(device, value, size_bytes))
        os.write(peer_out, raw_handle(device))
    os.read(peer_in, 1)
    ok(driver.cuMemFree(found[1]))
    os.write(peer_out, b"x")
    os.read(peer_in, 1)


def opened_and_closed() -> str:
    """How many bytes each can be used for, what each begins with, and that again when others are closed, freed."""
    with peer(_export) as (_, from_peer, to_peer):
        start()
        memory = SharedMemory(Driver(), 0)
        handles = [os.read(from_peer, HANDLE_BYTES) for _ in SIZES]
        first, second, third = (memory.open_handle(handle) for handle in handles)
        again = memory.open_handle(handles[1])
        assert again.base_address == second.base_address
        found = [[one.size_bytes, int(bytes_at(one.base_address, 1)[0])] for one in (first, second, third)]
        memory.unmap(second)
        memory.unmap(first)
        os.write(to_peer, b"x")
        assert os.read(from_peer, 1) == b"x"
        found += [[int(bytes_at(one.base_address, 1)[0])] for one in (again, third)]
        memory.unmap(again)
        found.append([ctypes.string_at(third.base_address, 1)[0]])
        memory.unmap(third)
        counters = extras().counters()
        assert counters.live_opened == counters.misuses == 0
        return str(found)
