"""Memory of another process, as the driver gives or refuses it: by IPC handle and by descriptor, of any user.

    python -m scripts.gpu.sharing UID    (the exporter: memory and its handles over the socket that is its input)

What is asked here is answered with the names of the driver's results; nothing is fatal.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from kvoffloadd.client.memory.gpu import driver, gpu_allocation
from kvoffloadd.cudadriver import CudaError
from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.cuda.memory import SharedMemory
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.testing.process import module
from scripts.gpu.worker import become
from scripts.harness.gpu import CHUNK_BYTES, Gpu, GpuBuffer, software_driver

SMALL_BYTES = 64 << 10
CHUNKS = 4
SMALL_FILLS = (0x31, 0x32, 0x33)
"""Small allocations share a block of the driver's; the last one is exported, and its bytes show where it lies."""
CHUNK_FILL = 0x34
_LAZY_PEER_ACCESS = 1
_MESSAGE_BYTES, _START_S = 4096, 20.0


def export(uid: int) -> None:
    """Exports memory until the other end of the socket is closed: then it dies, as if it were killed."""
    if uid:
        become(uid)
    link = socket.socket(fileno=0)
    gpu = Gpu()
    small = [GpuBuffer(gpu, SMALL_BYTES) for _ in SMALL_FILLS]
    chunks = GpuBuffer(gpu, CHUNKS * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES)
    for buffer, value in zip((*small, chunks), (*SMALL_FILLS, CHUNK_FILL), strict=True):
        driver().call("cuMemsetD8", buffer.address, value, buffer.size_bytes)
    driver().call("cuCtxSynchronize")
    described = {"handle": "", "exported": "CUDA_SUCCESS", "chunks exported": "CUDA_SUCCESS"}
    try:
        base, whole_bytes = map(int, driver().call("cuMemGetAddressRange", small[-1].address))
        described["range of the exporter's"] = (
            f"{whole_bytes >> 10} KiB, exported {small[-1].address - base} bytes behind its begin"
        )
        handle = driver().call("cuIpcGetMemHandle", base)
        described["handle"] = ctypes.string_at(int(handle.getPtr()), 64).hex()
    except KvOffloadError as error:
        described["exported"] = _name(error)
    fds: list[int] = []
    try:
        memory = gpu_allocation(chunks.address, chunks.size_bytes)
        exported = memory.export(0, CHUNKS)  # type: ignore[union-attr]
        fds = exported.fds
    except KvOffloadError as error:
        described["chunks exported"] = _name(error)
    socket.send_fds(link, [json.dumps(described).encode()], fds)
    link.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def opened(exporter_uid: int, importer_uid: int) -> dict[str, Any]:
    """Returns what an importer of that user (0: this one) learns of an exporter's memory. May become it for good."""
    if (exporter_uid or importer_uid) and os.getuid():
        return {"skipped": "only root can become another user"}
    link, theirs = socket.socketpair()
    with link, subprocess.Popen(module("scripts.gpu.sharing", str(exporter_uid)), stdin=theirs.fileno()) as exporter:
        theirs.close()
        link.settimeout(_START_S)
        message, fds, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, CHUNKS)
        if not message:
            return {"failed": "the exporter ended before it exported anything, see log.txt"}
        described = json.loads(message)
        if importer_uid:
            become(importer_uid)
        return _Importer(bytes.fromhex(described.pop("handle")), fds, described).ask(lambda: _end(link, exporter))


def _end(link: socket.socket, exporter: subprocess.Popen[bytes]) -> None:
    link.shutdown(socket.SHUT_RDWR)
    exporter.wait(_START_S)


class _Importer:
    """Asks one thing after the other. `found`: the answers by question."""

    def __init__(self, handle: bytes, fds: list[int], found: dict[str, Any]) -> None:
        self._gpu = Gpu()
        self._handle, self._fds, self._found = handle, fds, found

    def ask(self, end_exporter: Callable[[], None]) -> dict[str, Any]:
        """Everything."""
        address = self._try("open", lambda: self._open(self._handle)) if self._handle else None
        if address is not None:
            address = self._ask_of(address)
        memory = SharedMemory(Driver(), self._gpu.ordinal)
        chunks = self._try("chunks mapped", lambda: self._map(memory)) if self._fds else None
        if chunks is not None:
            self._try("chunks' bytes", lambda: _right(chunks, CHUNK_FILL))
        garbage = bytes(64)
        self._try("open garbage", lambda: self._open(garbage))
        if software_driver() is None:  # where it is a misuse
            self._try("open one's own", self._open_own)
        end_exporter()
        if address is not None:
            self._try("bytes after its process's death", lambda: _right(address, SMALL_FILLS[-1]))
            self._try("close after its process's death", lambda: driver().call("cuIpcCloseMemHandle", address))
        if chunks is not None:
            self._try("chunks' bytes after its process's death", lambda: _right(chunks, CHUNK_FILL))
        if self._handle:
            self._try("open after its process's death", lambda: self._open(self._handle))
        self._found["context works after all"] = driver().context_works()
        return self._found

    def _ask_of(self, address: int) -> int | None:
        """Where it is open at the end; None: it is not."""
        base, size_bytes = map(int, driver().call("cuMemGetAddressRange", address))
        self._found["range"] = f"{size_bytes >> 10} KiB, opened {address - base} bytes behind its begin"
        self._try("bytes", lambda: _right(address, SMALL_FILLS[-1]))
        again = self._try("open again", lambda: self._open(self._handle))
        if again is not None:
            self._found["open again, address"] = "the same" if again == address else "another"
            self._try("close one of two", lambda: driver().call("cuIpcCloseMemHandle", again))
        self._try("close", lambda: driver().call("cuIpcCloseMemHandle", address))
        found = self._try("open after it was closed", lambda: self._open(self._handle))
        return None if found is None else int(found)

    def _try(self, name: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            value = work()
        except KvOffloadError as error:
            self._found[name] = _name(error)
            return None
        suffix = f", {value}" if isinstance(value, str) else ""
        self._found[name] = f"CUDA_SUCCESS{suffix}, {(time.perf_counter() - begun) * 1e3:.1f} ms"
        return value

    def _open(self, handle: bytes) -> int:
        packed = driver().api.CUipcMemHandle()
        ctypes.memmove(int(packed.getPtr()), handle, len(handle))
        return int(driver().call("cuIpcOpenMemHandle", packed, _LAZY_PEER_ACCESS))

    def _open_own(self) -> int:
        own = GpuBuffer(self._gpu, 1 << 20)
        handle = driver().call("cuIpcGetMemHandle", own.address)
        return self._open(ctypes.string_at(int(handle.getPtr()), 64))

    def _map(self, memory: SharedMemory) -> int:
        allocation = memory.reserve(CHUNKS * CHUNK_BYTES)
        memory.add_chunks(allocation, self._fds, [CHUNK_BYTES] * len(self._fds))
        return allocation.base_address


def _right(address: int, value: int) -> str:
    """Whether these bytes are what the exporter wrote."""
    found = (ctypes.c_uint8 * 4096)()
    driver().call("cuMemcpyDtoH", ctypes.addressof(found), address, 4096)
    return "right" if bytes(found) == bytes([value]) * 4096 else f"not its own: {bytes(found[:4]).hex()}..."


def _name(error: KvOffloadError) -> str:
    """Names the driver's result, where the error was the driver's."""
    cause = error if isinstance(error, CudaError) else error.__cause__
    return cause.name if isinstance(cause, CudaError) else str(error)


if __name__ == "__main__":
    export(int(sys.argv[1]))
