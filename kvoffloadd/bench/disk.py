"""Benchmarks keys to a disk and back against plain writes and reads of a file on the same disk by the same number of
threads.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvoffloadd.bench.figure import Figure, bandwidth
from kvoffloadd.bench.rounds import Show, in_rounds
from kvoffloadd.client import Client, NamespaceSpec, SharedTensor
from kvoffloadd.config import DiskConfig
from kvoffloadd.linux.mounts import file_system_of
from kvoffloadd.storage.disk.files import Files, aligned_pages
from kvoffloadd.storage.disk.opening import probe
from kvoffloadd.testing.daemon import OwnDaemon
from kvoffloadd.testing.disk import STUCK_S, disk_folder
from kvoffloadd.testing.figures import KEY_BYTES
from kvoffloadd.testing.process import DaemonError, status_bytes
from kvoffloadd.testing.wait import HANG_S, within
from kvoffloadd.testing.workload import WAIT_S, Workload
from kvoffloadd.units import format_bytes

MIB = 1 << 20
PAYLOAD_BYTES = MIB
PIECE_BYTES = 4 * MIB
DEADLINE_S = 600.0
"""A disk that has not taken the data of a round by then counts as unusable."""
LOOK_EVERY_S = 0.002


@dataclass(frozen=True, slots=True)
class DiskBench:
    """A root that stays for all rounds, a daemon that is restarted between them, and its worker; a round consists of
    the worker's next `jobs` stores.
    """

    daemon: OwnDaemon
    client: Client
    work: Workload
    jobs: int

    @property
    def bytes(self) -> int:
        """Returns the bytes that a round stores."""
        return self.jobs * self.work.bytes

    def restart(self) -> None:
        """Restarts the daemon, so that memory holds nothing. Raises DaemonError if the daemon does not end in order."""
        if self.daemon.stop() != 0:
            raise DaemonError(f"the daemon did not end in order:\n{self.daemon.tail()}")
        self.daemon.start()
        self.client.ping()
        self.await_memory()

    def await_memory(self) -> None:
        """Waits until the kernel has provided the daemon's memory, which happens after its start: that time is not the
        disk's.
        """
        capacity_bytes = self.daemon.status()["memory"]["capacity_bytes"]
        within(lambda: status_bytes(self.daemon.pid, "RssShmem") >= capacity_bytes, HANG_S, every_s=0.01)

    def demoted_bytes(self) -> int:
        """Returns the bytes that this run of the daemon has written. Raises DaemonError if its disk is off."""
        disk = self.daemon.status()["disk"]
        if wrong := [root for root in disk["roots"] if root["state"] != "ok"]:
            raise DaemonError(f"the disk tier is {wrong[0]['state']}: {wrong[0]['reason']}")
        demoted: int = disk["demoted"]["bytes"]
        return demoted

    def look(self, least_bytes: float) -> tuple[float, int]:
        """Returns (seconds, bytes) as soon as this run has written at least this much. Raises DaemonError at the
        deadline.
        """
        until = time.perf_counter() + DEADLINE_S
        while True:
            written = self.demoted_bytes()
            now = time.perf_counter()
            if written >= least_bytes:
                return now, written
            if now > until:
                raise DaemonError(f"{written} of {least_bytes} bytes were demoted: {self.daemon.status()['disk']}")
            time.sleep(LOOK_EVERY_S)


@contextmanager
def disk_bench(
    folder: Path, root: Path, payload_bytes: int, keys: int, jobs: int, capacity_bytes: int, settings: Mapping[str, str]
) -> Iterator[DiskBench]:
    """Makes the bench. A round stores `jobs` times `keys`, and the root has room for `capacity_bytes`."""
    round_bytes = jobs * keys * payload_bytes
    settings = {
        "disk.roots": f'[{{ path = "{root}", capacity = {capacity_bytes} }}]',
        "disk.min_free_bytes": "0",
        "disk.stuck_s": str(STUCK_S),
        "disk.backlog_bytes": str(2 * round_bytes),
        **settings,
    }
    tensor = SharedTensor.allocate(keys, payload_bytes)
    tensor.array[:] = np.random.default_rng(1).integers(0, 256, tensor.array.shape, np.uint8)
    space = NamespaceSpec(model="bench", key_bytes=KEY_BYTES)
    with (
        OwnDaemon(folder, 2 * round_bytes + 128 * MIB, settings) as daemon,
        Client(daemon.socket, namespace=space, deadline_s=WAIT_S) as client,
    ):
        bench = DiskBench(daemon, client, Workload(client, [tensor], keys, scattered=False), jobs)
        bench.await_memory()
        yield bench


def measure_disk(folder: Path, where: Path | None, job_bytes: int, rounds: int, show: Show) -> list[Figure]:
    """Measures a disk. `where`: a folder on it. Raises DaemonError, KvOffloadError or OSError."""
    keys = max(4, job_bytes // PAYLOAD_BYTES)
    capacity_bytes = (rounds + 2) * keys * PAYLOAD_BYTES + 256 * MIB
    settings = {"disk.segment_bytes": str(64 * MIB), "log.level": "warning"}
    with disk_folder(where) as name:
        _check_room(Path(name), capacity_bytes + keys * PAYLOAD_BYTES)
    with (
        disk_folder(where) as name,
        disk_bench(folder, Path(name) / "root", PAYLOAD_BYTES, keys, 1, capacity_bytes, settings) as bench,
    ):
        work, raw = bench.work, RawFile(Path(name) / "raw", bench.bytes)

        def measure() -> dict[str, float]:
            seconds = {"write to": raw.write()}
            before = bench.demoted_bytes()
            begun = time.perf_counter()
            work.store()
            seconds["store"] = bench.look(before + bench.bytes)[0] - begun
            seconds["read from"] = raw.read()
            bench.restart()
            begun = time.perf_counter()
            work.load()
            return {**seconds, "load": time.perf_counter() - begun}

        samples = in_rounds(rounds, measure, show, warm_up=0)
        file = f"a file on {file_system_of(Path(name))}{', O_DIRECT' if raw.is_direct else ''}"
    return [
        bandwidth("disk", what, samples[ours], f"{limit} {file}", samples[limit], bench.bytes)
        for what, ours, limit in (
            ("store, until on disk", "store", "write to"),
            ("load, from disk", "load", "read from"),
        )
    ]


def _check_room(folder: Path, size_bytes: int) -> None:
    """Raises DaemonError if the disk has less room: nothing else on it should meet a full disk."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes:
        raise DaemonError(f"{folder.parent}: {format_bytes(size_bytes)} are needed, and {format_bytes(free)} are free")


class RawFile:
    """A file of `size_bytes`, in whole pages, on the measured disk. It is created anew in each round, like the daemon's
    segments: a disk takes longer for blocks that were never written.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        files = Files()
        directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.is_direct = probe(files, directory_fd, None).direct
        finally:
            os.close(directory_fd)
        self._path, self._size_bytes = path, size_bytes
        self._pages = aligned_pages(PIECE_BYTES // 4096)
        self._pages[:] = 7

    def write(self) -> float:
        """Returns the seconds until all of it is on the disk."""
        return self._timed(os.O_RDWR | os.O_CREAT, DiskConfig().write_threads, self._write_piece)

    def read(self) -> float:
        """Returns the seconds until all of it is read."""
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
                list(pool.map(lambda offset: piece(fd, offset), range(0, self._size_bytes, PIECE_BYTES)))
                if flags & os.O_CREAT:
                    os.fdatasync(fd)
                return time.perf_counter() - begun
        finally:
            os.close(fd)

    def _write_piece(self, fd: int, offset: int) -> None:
        Files().write(fd, offset, [self._pages[: self._num_pages(offset)]])

    def _read_piece(self, fd: int, offset: int) -> None:
        Files().read(fd, offset, [aligned_pages(self._num_pages(offset))])

    def _num_pages(self, offset: int) -> int:
        """Returns the pages of the piece at this place: the last one may be shorter."""
        return min(PIECE_BYTES, self._size_bytes - offset) // 4096
