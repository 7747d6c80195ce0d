"""Keys to a disk and back, beside plain writes and reads of a file on the same disk by as many threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvoffloadd.client import Client, NamespaceSpec, SharedTensor
from kvoffloadd.config import DiskConfig
from kvoffloadd.storage.disk.files import Files, aligned_pages, probe_direct
from kvoffloadd.trial.bench.figure import Figure, bandwidth
from kvoffloadd.trial.bench.rounds import Samples, Show, in_rounds
from kvoffloadd.trial.daemon import OwnDaemon
from kvoffloadd.trial.disk import STUCK_S, disk_folder, file_system
from kvoffloadd.trial.figures import KEY_BYTES
from kvoffloadd.trial.process import DaemonError, status_bytes
from kvoffloadd.trial.wait import HANG_S, until, within
from kvoffloadd.trial.workload import WAIT_S, Workload

MIB = 1 << 20
PAYLOAD_BYTES = MIB
PIECE_BYTES = 4 * MIB
DEADLINE_S = 600.0
LOOK_S = 0.01
"""A disk that has not taken some hundred MiB by then is no disk."""


def measure_disk(folder: Path, where: Path | None, job_bytes: int, rounds: int, show: Show) -> list[Figure]:
    """`where`: a folder on the disk. Raises DaemonError, KvOffloadError or OSError."""
    keys = max(4, job_bytes // PAYLOAD_BYTES)
    moved = keys * PAYLOAD_BYTES
    with disk_folder(where) as made:
        root, raw = Path(made) / "root", RawFile(Path(made) / "raw", moved)
        settings = {
            "disk.roots": f'[{{ path = "{root}", capacity = {(rounds + 2) * moved + 256 * MIB} }}]',
            "disk.segment_bytes": str(64 * MIB),
            "disk.min_free_bytes": "0",
            "disk.stuck_s": str(STUCK_S),
            "disk.backlog_bytes": str(2 * moved),
            "log.level": "warning",
        }
        samples = _measure(OwnDaemon(folder, 2 * moved + 64 * MIB, settings), keys, raw, rounds, show)
        kind = file_system(Path(made))
    file = f"a file on {kind}{', O_DIRECT' if raw.is_direct else ''}"
    return [
        bandwidth("disk", what, samples[ours], f"{limit} {file}", samples[limit], moved)
        for what, ours, limit in (
            ("store, until on disk", "store", "write to"),
            ("load, from disk", "load", "read from"),
        )
    ]


def _measure(daemon: OwnDaemon, keys: int, raw: RawFile, rounds: int, show: Show) -> Samples[float]:
    """Seconds of each round, the daemon's and the file's."""
    space = NamespaceSpec(model="bench", key_bytes=KEY_BYTES)
    tensor = SharedTensor.allocate(keys, PAYLOAD_BYTES)
    tensor.array[:] = 7
    with daemon, Client(daemon.socket, namespace=space, deadline_s=WAIT_S) as client:
        work = Workload(client, [tensor], keys, scattered=False)
        _await_memory(daemon)

        def measure() -> dict[str, float]:
            seconds = {"write to": raw.write()}
            before = _demoted(daemon)
            begun = time.perf_counter()
            work.store()
            _await_demoted(daemon, before + work.bytes)
            seconds["store"] = time.perf_counter() - begun
            seconds["read from"] = raw.read()
            daemon.stop()  # and its memory is gone
            daemon.start()
            client.ping()
            _await_memory(daemon)
            begun = time.perf_counter()
            work.load()
            return {**seconds, "load": time.perf_counter() - begun}

        return in_rounds(rounds, measure, show, warm_up=0)


def _await_demoted(daemon: OwnDaemon, total_bytes: int) -> None:
    until(lambda: _demoted(daemon) >= total_bytes, "keys on disk", DEADLINE_S, every_s=LOOK_S)


def _await_memory(daemon: OwnDaemon) -> None:
    """A daemon has its memory provided by the kernel after its start: that is not the disk's time."""
    capacity_bytes = daemon.status()["memory"]["capacity_bytes"]
    within(lambda: status_bytes(daemon.pid, "RssShmem") >= capacity_bytes, HANG_S, every_s=LOOK_S)


def _demoted(daemon: OwnDaemon) -> int:
    """Bytes that this run of the daemon has written. Raises DaemonError: its disk is off."""
    disk = daemon.status()["disk"]
    if wrong := [root for root in disk["roots"] if root["state"] != "ok"]:
        raise DaemonError(f"the disk tier is {wrong[0]['state']}: {wrong[0]['reason']}")
    demoted: int = disk["demoted"]["bytes"]
    return demoted


class RawFile:
    """A file of `size_bytes` on the disk that is measured. It is made anew in each round, as the daemon's segments are:
    a disk takes longer for blocks that were never written.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        files = Files()
        directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.is_direct = probe_direct(files, directory_fd)
        finally:
            os.close(directory_fd)
        self._path, self._size_bytes = path, size_bytes
        self._pages = aligned_pages(PIECE_BYTES // 4096)
        self._pages[:] = 7

    def write(self) -> float:
        """Seconds until all of it is on the disk."""
        return self._timed(os.O_RDWR | os.O_CREAT, DiskConfig().write_threads, self._write_piece)

    def read(self) -> float:
        """Seconds."""
        return self._timed(os.O_RDONLY, DiskConfig().read_threads, self._read_piece)

    def _timed(self, flags: int, threads: int, piece: Callable[[int, int], None]) -> float:
        if flags & os.O_CREAT:
            self._path.unlink(missing_ok=True)
        fd = os.open(self._path, flags | os.O_CLOEXEC | (os.O_DIRECT if self.is_direct else 0), 0o600)
        try:
            with ThreadPoolExecutor(threads) as pool:
                begun = time.perf_counter()
                if flags & os.O_CREAT:
                    os.posix_fallocate(fd, 0, self._size_bytes)
                list(pool.map(lambda at: piece(fd, at), range(0, self._size_bytes - PIECE_BYTES + 1, PIECE_BYTES)))
                if flags & os.O_CREAT:
                    os.fdatasync(fd)
                return time.perf_counter() - begun
        finally:
            os.close(fd)

    def _write_piece(self, fd: int, at: int) -> None:
        Files().write(fd, at, [self._pages])

    def _read_piece(self, fd: int, at: int) -> None:
        Files().read(fd, at, [aligned_pages(PIECE_BYTES // 4096)])
