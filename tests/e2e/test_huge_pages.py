"""Tests the memory tier in huge pages of each kind: bytes come back, also after a kill, and what can't be had is
reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.model import HUGE_PAGE_BYTES
from kvoffloadd.storage.arenafile import file_bytes
from kvoffloadd.testing.daemon import KVOFFLOADD
from kvoffloadd.testing.process import DaemonError
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, group_of, served, store_all
from tests.e2e.rank import Rank, new_keys
from tests.kernelsettings import reserved_pages, transparent_pages
from tests.notify import Manager, manager_in

pytestmark = pytest.mark.slow

KINDS = ("off", "transparent", "reserved")
KEYS = 300
CAPACITY = 32 * MIB
PAGES = file_bytes(CAPACITY, MIB, HUGE_PAGE_BYTES) // HUGE_PAGE_BYTES
KEPT_BY = "and is used as it is"
INHERIT = """
import os, sys
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="kvoffloadd-pool")
os.dup2(os.open({path!r}, os.O_RDWR), 3)
os.set_inheritable(3, True)
os.execv(sys.executable, [sys.executable, {program}, *sys.argv[1:]])
"""

Start = Callable[..., Daemon]


@pytest.fixture
def machine() -> Iterator[ExitStack]:
    """Settings of the kernel that hold until the daemons have ended."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def manager(socket_dir: Path) -> Iterator[Manager]:
    with manager_in(socket_dir) as manager:
        yield manager


@pytest.fixture
def start(machine: ExitStack, start_daemon: Start, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start("reserved")` -> a daemon with such pages, which this machine then has, under a service manager."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)

    def begin(kind: str) -> Daemon:
        allow(machine, kind)
        daemon = start_daemon(f"memory.huge_pages={kind}")
        manager.until("FDSTORE")
        return daemon

    return begin


def allow(machine: ExitStack, kind: str) -> None:
    """Set this machine up for pages of this kind."""
    if kind == "reserved":
        machine.enter_context(reserved_pages(PAGES))
    else:
        machine.enter_context(transparent_pages(allowed=kind == "transparent"))


def huge_bytes(daemon: Daemon) -> int:
    """What lies in huge pages."""
    memory = daemon.status()["memory"]
    if "huge_bytes" not in memory:
        pytest.skip("this kernel does not tell")
    return int(memory["huge_bytes"])


def lies_in(daemon: Daemon, kind: str) -> None:
    """Once it is prefaulted."""
    expected = 0 if kind == "off" else CAPACITY
    until(lambda: huge_bytes(daemon) == expected, f"{expected} bytes are in huge pages")


def kill_and_keep(daemon: Daemon, manager: Manager, kind: str) -> None:
    """kill -9, and a start with the memory that the manager has kept, and with this setting."""
    (fd,) = next(notice for notice in manager.heard if "FDSTORE" in notice.fields).fds
    daemon.kill()
    daemon.leave_guests()
    program = ", ".join(map(repr, KVOFFLOADD))
    daemon.program = ("-c", INHERIT.format(path=f"/proc/{os.getpid()}/fd/{fd}", program=program))
    daemon.settings["memory.huge_pages"] = kind
    daemon.start()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_come_back_and_outlive_a_kill(start: Start, manager: Manager, seed: int, kind: str) -> None:
    daemon = start(kind)
    keys = new_keys(np.random.default_rng(seed), KEYS)
    rank = daemon.welcome(Rank(daemon.socket, group_of(20_000)))
    store_all(rank, keys)
    assert served(rank, keys).all()
    lies_in(daemon, kind)
    until(lambda: daemon.status()["cache"]["unsealed"] == 0, "all is sealed")
    kill_and_keep(daemon, manager, kind)
    assert daemon.status()["cache"]["keys_adopted"] == KEYS
    assert daemon.verify() == ()
    rank = daemon.welcome(Rank(daemon.socket, group_of(20_000)))
    assert served(rank, keys).all()
    lies_in(daemon, kind)
    assert KEPT_BY not in daemon.log()


@pytest.mark.parametrize(("before", "after"), [("reserved", "off"), ("off", "reserved")])
def test_kept_memory_is_used_as_it_is(start: Start, manager: Manager, seed: int, before: str, after: str) -> None:
    daemon = start(before)
    keys = new_keys(np.random.default_rng(seed), KEYS)
    rank = daemon.welcome(Rank(daemon.socket, group_of(20_000)))
    store_all(rank, keys)
    until(lambda: daemon.status()["cache"]["unsealed"] == 0, "all is sealed")
    kill_and_keep(daemon, manager, after)
    assert daemon.status()["cache"]["keys_adopted"] == KEYS
    lies_in(daemon, before)
    assert daemon.says(f'memory.huge_pages = "{after}": the memory tier that was kept')
    assert daemon.says(KEPT_BY)
    rank = daemon.welcome(Rank(daemon.socket, group_of(20_000)))
    assert served(rank, keys).all()


def test_a_cold_start_frees_the_pages_that_it_needs(start: Start, manager: Manager) -> None:
    """The manager still has the old memory, and no other page is left."""
    daemon = start("reserved")
    lies_in(daemon, "reserved")
    daemon.memory = CAPACITY - 4 * MIB
    kill_and_keep(daemon, manager, "reserved")
    assert daemon.says("a cold start, because the old pool can't be used")
    until(lambda: huge_bytes(daemon) == CAPACITY - 4 * MIB, "all is in huge pages again")


def test_too_few_reserved_pages_are_told_with_the_remedy(machine: ExitStack, start_daemon: Start) -> None:
    machine.enter_context(reserved_pages(3))
    with pytest.raises(DaemonError, match=rf"{PAGES} huge pages of 2 MiB, and 3 of 3 are free: .*hugepages={PAGES}\n"):
        start_daemon("memory.huge_pages=reserved")


@pytest.mark.parametrize(("kind", "warnings"), [("transparent", 1), ("auto", 0)])
def test_a_kernel_that_gives_none_is_told_once_if_asked_for(
    machine: ExitStack, start_daemon: Start, kind: str, warnings: int
) -> None:
    machine.enter_context(transparent_pages(allowed=False))
    daemon = start_daemon(f"memory.huge_pages={kind}")
    until(lambda: daemon.log().count("shmem_enabled is never: write advise to it") >= warnings, "it is told")
    assert daemon.log().count("shmem_enabled is never: write advise to it") == warnings
    lies_in(daemon, "off")
