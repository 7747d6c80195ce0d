"""Tests what may be attached: memory that the daemon can read and write, and that its peer can't take away."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffloadd.linux.memorylimits import memory_bytes
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.server.scene import Scene

SIZE = 1 << 16


def memfd(size: int = SIZE, seals: int = 0) -> int:
    fd = os.memfd_create("kinds", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def read_only() -> int:
    fd = memfd()
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def pipe() -> int:
    kept, other = os.pipe()
    os.close(other)
    return kept


def unix_socket() -> int:
    return socket.socket(socket.AF_UNIX).detach()


REFUSED: dict[str, tuple[str, Callable[[], int]]] = {
    "a pipe": ("not shared memory", pipe),
    "a device": ("not shared memory", lambda: os.open("/dev/null", os.O_RDWR)),
    "a socket": ("not shared memory", unix_socket),
    "an eventfd": ("not shared memory", lambda: os.eventfd(0)),
    "a directory": ("not shared memory", lambda: os.open("/", os.O_RDONLY)),
    "a file on disk": ("not shared memory", lambda: os.open(__file__, os.O_RDWR)),
    "a file of proc": ("not shared memory", lambda: os.open("/proc/self/status", os.O_RDONLY)),
    "a memfd opened for reading": ("O_RDWR", read_only),
    "a memfd without bytes": ("no bytes", lambda: memfd(0)),
    "a memfd sealed against writing": ("refuses|can't map", lambda: memfd(seals=fcntl.F_SEAL_WRITE)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_shared_memory(unchanged: Scene, case: str) -> None:
    words, make = REFUSED[case]
    fd = make()
    refusal = unchanged.peer.refused("bad_memory", "attach", rights=[fd], kind="shm", fds=1)
    assert any(word in refusal for word in words.split("|"))
    os.close(fd)


def test_all_or_nothing(unchanged: Scene) -> None:
    """One bad descriptor among good ones: none is mapped, and none stays open."""
    before = unchanged.daemon.open_fds()
    good = memfd()
    bad = pipe()
    unchanged.peer.refused("bad_memory", "attach", rights=[good, good, bad], kind="shm", fds=3)
    until(lambda: unchanged.daemon.mapped("kinds") == 0, "the good ones are unmapped")
    until(lambda: unchanged.daemon.open_fds() == before, "no descriptor is left")
    os.close(good)
    os.close(bad)


def test_memory_stays_mapped_when_its_owner_has_closed_it(daemon: Daemon) -> None:
    peer = daemon.peer()
    peer.hello()
    fd = memfd()
    assert peer.ok("attach", rights=[fd], kind="shm", fds=1)["sizes_bytes"] == [SIZE]
    os.close(fd)
    assert daemon.mapped("kinds") == 1
    peer.close()
    until(lambda: daemon.mapped("kinds") == 0, "the end of the session unmaps it")


@pytest.mark.slow
def test_sizes_are_the_kernel_s(start_daemon: Callable[..., Daemon]) -> None:
    """Holes, here four times the machine's memory, cost their owner nothing; they are counted all the same."""
    most = memory_bytes() >> 20 << 22
    daemon = start_daemon(f"limits.mapped_bytes={most}")
    peer = daemon.peer()
    peer.hello()
    fds = [memfd(size) for size in (1, 4096, 4097, most - (1 << 20))]
    reply = peer.ok("attach", rights=fds, kind="shm", fds=4)
    assert reply["sizes_bytes"] == [1, 4096, 4097, most - (1 << 20)]
    used = daemon.status()["accounts"][str(os.getuid())]
    assert used["mapped_bytes"] == sum(reply["sizes_bytes"])
    assert used["fds"] == 4
    peer.refused("limit", "attach", rights=[fds[3]], kind="shm", fds=1)
    assert daemon.status()["accounts"][str(os.getuid())] == used
    for fd in fds:
        os.close(fd)


def test_a_file_in_shared_memory(daemon: Daemon, tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"kvoffloadd-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    os.ftruncate(fd, SIZE)
    peer = daemon.peer()
    peer.hello()
    assert peer.attach([fd])
    os.close(fd)


def test_sixty_four_at_once_and_as_often_as_wanted(daemon: Daemon) -> None:
    peer = daemon.peer()
    peer.hello()
    fd = memfd()
    found = [number for _ in range(3) for number in peer.attach([fd] * 64)]
    assert len(set(found)) == 3 * 64
    os.close(fd)
    peer.close()
    until(lambda: daemon.mapped("kinds") == 0, "the end of the session unmaps all")
