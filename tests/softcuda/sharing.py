"""Programs that share memory with another process, and those that map it themselves."""

from __future__ import annotations

import os
import signal
import socket

import numpy as np
from cuda.bindings import driver

from tests.softcuda.gpu import (
    GRANULE,
    POSIX_FD,
    access_of,
    allocate,
    attribute,
    bytes_at,
    code,
    export_noise,
    extras,
    map_chunks,
    noise,
    ok,
    open_raw,
    peer,
    property_of,
    put,
    raw_handle,
    reserve,
    start,
    until,
)

CHUNKS = 3000


def shared_with_a_peer() -> None:
    """Both processes see one memory; it stays while one of them has it open."""
    size_bytes = GRANULE // 2
    with peer(export_noise) as (_, from_peer, to_peer):
        start()
        raw = os.read(from_peer, 64)
        device = int(ok(open_raw(raw)))
        assert int(ok(open_raw(raw))) == device, "open twice is open once, for two closes"
        base, size = ok(driver.cuMemGetAddressRange(device + 5))
        assert (int(base), size) == (device, size_bytes)
        assert np.array_equal(bytes_at(device, size_bytes), noise(size_bytes))
        assert code(driver.cuIpcGetMemHandle(device)) == 1, "not one's own to pass on"
        assert code(open_raw(raw, flags=0)) == 1
        ok(driver.cuIpcCloseMemHandle(device))
        ok(driver.cuMemsetD8(device, 3, size_bytes))
        os.write(to_peer, b"x")
        assert os.read(from_peer, 5) == b"freed"
        assert (bytes_at(device, size_bytes) == 3).all()
        ok(driver.cuIpcCloseMemHandle(device))
        assert code(open_raw(raw)) == 205, "it was freed"
        assert code(open_raw(bytes(64))) == 400
        counters = extras().counters()
        assert (counters.handles_opened, counters.handles_closed, counters.live_opened) == (2, 2, 0)


def _fill_what_comes(peer_in: int, peer_out: int) -> None:
    start()
    device = int(ok(open_raw(os.read(peer_in, 64))))
    put(device + 1000, noise(3000))
    ok(driver.cuIpcCloseMemHandle(device))
    os.write(peer_out, b"done")


def filled_by_a_peer() -> None:
    with peer(_fill_what_comes) as (_, from_peer, to_peer):
        start()
        device = allocate(5000)
        os.write(to_peer, raw_handle(device))
        assert os.read(from_peer, 4) == b"done"
        assert np.array_equal(bytes_at(device + 1000, 3000), noise(3000))


def exporter_is_killed() -> None:
    with peer(export_noise) as (pid, from_peer, _):
        start()
        raw = os.read(from_peer, 64)
        device = int(ok(open_raw(raw)))
        os.kill(pid, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{pid}/fd/0"))
        assert np.array_equal(bytes_at(device, 5000), noise(GRANULE // 2)[:5000])
        ok(driver.cuIpcCloseMemHandle(device))
        assert code(open_raw(raw)) == 205


def _import_chunks(peer_in: int, _peer_out: int) -> None:
    with socket.socket(fileno=peer_in) as connection:
        start()
        base = reserve(CHUNKS)
        free_before = len(os.listdir("/proc/self/fd"))
        for index in range(CHUNKS):
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
            handle = ok(driver.cuMemImportFromShareableHandle(fds[0], POSIX_FD))
            os.close(fds[0])
            ok(driver.cuMemMap(base + index * GRANULE, GRANULE, 0, handle, 0))
            ok(driver.cuMemRelease(handle))
        assert len(os.listdir("/proc/self/fd")) == free_before
        ok(driver.cuMemSetAccess(base, CHUNKS * GRANULE, [access_of(0), access_of(1)], 2))
        middle = base + CHUNKS // 2 * GRANULE
        assert np.array_equal(bytes_at(middle - 3000, 6000), noise(6000))
        assert ok(driver.cuMemGetInfo())[0] == 16 << 30, "only its maker pays for a chunk"
        ok(driver.cuMemsetD8(base, 9, 1))
        ok(driver.cuMemUnmap(base, CHUNKS * GRANULE))
        ok(driver.cuMemAddressFree(base, CHUNKS * GRANULE))
        connection.send(b"x")


def chunks_to_a_peer() -> None:
    """Thousands of chunks, each as a descriptor."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        status = 1
        try:
            _import_chunks(theirs.detach(), -1)
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    start()
    base, handles = map_chunks(CHUNKS)
    put(base + CHUNKS // 2 * GRANULE - 3000, noise(6000))
    for handle in handles:
        fd = ok(driver.cuMemExportToShareableHandle(handle, POSIX_FD, 0))
        socket.send_fds(ours, [b"x"], [fd])
        os.close(fd)
    assert ours.recv(1) == b"x"
    assert bytes_at(base, 1)[0] == 9
    assert os.waitpid(pid, 0)[1] == 0
    ok(driver.cuMemUnmap(base, CHUNKS * GRANULE))
    for handle in handles:
        ok(driver.cuMemRelease(handle))
    ok(driver.cuMemAddressFree(base, CHUNKS * GRANULE))
    counters = extras().counters()
    assert (counters.live_mappings, counters.live_reservations) == (0, 0)
    assert ok(driver.cuMemGetInfo())[0] == 16 << 30


def chunks() -> None:
    start()
    assert ok(driver.cuMemGetAllocationGranularity(property_of(), 0)) == GRANULE
    base, (first, _second) = map_chunks(2)
    beyond = base + GRANULE
    assert attribute("IS_LEGACY_CUDA_IPC_CAPABLE", beyond) is False
    assert attribute("ALLOWED_HANDLE_TYPES", beyond) == 1
    assert attribute("RANGE_SIZE", beyond) == 2 * GRANULE
    assert attribute("MAPPING_SIZE", beyond) == GRANULE
    assert int(attribute("MAPPING_BASE_ADDR", beyond + 5)) == beyond
    assert ok(driver.cuMemGetAddressRange(beyond + 5))[1] == GRANULE
    assert code(driver.cuIpcGetMemHandle(base)) == 1
    handle = ok(driver.cuMemRetainAllocationHandle(base))
    assert int(handle) == first
    assert ok(driver.cuMemGetAllocationPropertiesFromHandle(handle)).location.id == 0
    put(base, noise(2 * GRANULE))
    other = reserve(1)
    ok(driver.cuMemMap(other, GRANULE, 0, handle, 0))
    assert attribute("MAPPED", other) is True
    ok(driver.cuMemSetAccess(other, GRANULE, [access_of()], 1))
    assert np.array_equal(bytes_at(other, GRANULE), noise(2 * GRANULE)[:GRANULE]), "one memory at two addresses"
    ok(driver.cuMemUnmap(base, GRANULE))
    assert attribute("MAPPED", base) is False
    for _ in range(2):
        ok(driver.cuMemRelease(first))
    assert np.array_equal(bytes_at(other, GRANULE), noise(2 * GRANULE)[:GRANULE]), "a mapping keeps the memory"
    private = ok(driver.cuMemCreate(GRANULE, property_of(handle_type=type(POSIX_FD)(0)), 0))
    assert code(driver.cuMemExportToShareableHandle(private, POSIX_FD, 0)) == 1
    assert code(driver.cuMemImportFromShareableHandle(1, POSIX_FD)) == 1
    assert code(driver.cuMemCreate(GRANULE + 1, property_of(), 0)) == 1
    assert code(driver.cuMemMap(base + 1, GRANULE, 0, private, 0)) == 1
