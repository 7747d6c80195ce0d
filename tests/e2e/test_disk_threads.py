"""The event loop's thread makes no system call on a disk: one that hangs would stop all users. Watched from inside the
daemon, by a library that is preloaded.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Outcome
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import chosen
from tests.e2e.disk import MIB, disk, disk_settings, idle, root_state, served, store_on_disk
from tests.e2e.rank import Keys, Rank, new_keys

SOURCE = Path(__file__).with_name("callwatch.c")


class CallWatch:
    """Holds environment variables for a process, and reads which calls it has made `below` a directory, by thread."""

    def __init__(self, library: Path, below: Path, log: Path) -> None:
        self.environment = {"LD_PRELOAD": str(library), "CALLWATCH_BELOW": str(below), "CALLWATCH_LOG": str(log)}
        self._log = log

    def calls(self) -> dict[str, set[str]]:
        """Returns the calls by "loop" and "lane"."""
        calls: dict[str, set[str]] = defaultdict(set)
        for line in self._log.read_text(encoding="utf-8").splitlines() if self._log.exists() else ():
            thread, call, path = line.split(" ", 2)
            calls[thread].add(call if thread == "lane" else f"{call} {path}")
        return calls


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sys.platform != "linux" or not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    built = tmp_path_factory.mktemp("callwatch") / "callwatch.so"
    done = subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(built), str(SOURCE), "-ldl"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"the compiler can't build it: {done.stderr}")
    return built


@pytest.fixture
def watch(library: Path, tmp_path: Path) -> CallWatch:
    return CallWatch(library, tmp_path / "disks", tmp_path / "calls")


@pytest.fixture
def lots(seed: int) -> list[Keys]:
    rng = np.random.default_rng(seed)
    return [new_keys(rng, 60) for _ in range(24)]


@pytest.fixture
def daemon(watch: CallWatch, tmp_path: Path, socket_dir: Path) -> Iterator[Daemon]:
    (tmp_path / "disks").mkdir(mode=0o700)
    roots = [(tmp_path / "disks" / name, 4 * MIB) for name in ("a", "b")]
    settings = chosen(*disk_settings(*roots), "memory.slab_bytes=256KiB")
    found = Daemon(socket_dir, "1MiB", settings, environment=watch.environment)
    try:
        found.start()
        yield found
    finally:
        found.destroy()


def test_the_watch_sees_calls_of_the_first_thread(watch: CallWatch, tmp_path: Path) -> None:
    """Or the other test would prove nothing."""
    (tmp_path / "disks").mkdir()
    work = (
        "import os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); os.fstat(fd); os.listdir(fd); os.close(fd);"
        "os.open('new', os.O_CREAT | os.O_RDWR, dir_fd=os.open(sys.argv[1], os.O_RDONLY))"
    )
    command = [sys.executable, "-c", work, str(tmp_path / "disks")]
    subprocess.run(command, env={**os.environ, **watch.environment}, check=True)
    calls = watch.calls()["loop"]
    assert {f"{call} {tmp_path}/disks" for call in ("open", "stat", "names", "close")} <= calls
    assert f"open {tmp_path}/disks/new" in calls


def test_no_call_on_a_disk_by_the_event_loop(
    daemon: Daemon, watch: CallWatch, tmp_path: Path, lots: list[Keys]
) -> None:
    """This covers all that a daemon does with a disk, from its start to its end."""
    roots = [tmp_path / "disks" / name for name in ("a", "b")]
    rank = daemon.welcome(Rank(daemon.socket))
    for keys in lots:  # more than the roots hold: segments are full, sealed and used again
        store_on_disk(daemon, rank, keys)
    assert sum(root["segments_recycled"] for root in disk(daemon)["roots"]) > 0
    assert served(rank, lots[-1]).any()
    assert not daemon.verify(payloads=True)
    rank.client.clear()
    assert rank.store_keys(lots[0]).outcome is Outcome.DONE
    idle(daemon)
    daemon.signal(signal.SIGHUP)
    until(lambda: "reloaded: " in daemon.log(), "it has read its config again")
    # One goes and comes back; of the other, what is in it is removed.
    roots[0].rename(tmp_path / "disks" / "elsewhere")
    until(lambda: root_state(daemon, 0) == "off", "it is gone")
    (tmp_path / "disks" / "elsewhere").rename(roots[0])
    until(lambda: root_state(daemon, 0) == "ok", "it is back")
    for path in roots[1].iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)  # a probe removes its own file
    until(lambda: (roots[1] / "manifest").exists() and root_state(daemon, 1) == "ok", "it has begun anew")
    next((roots[0] / "segments").iterdir()).unlink()
    assert daemon.says("was removed, and with it")
    store_on_disk(daemon, rank, lots[1])
    daemon.leave_guests()
    assert daemon.stop() == 0
    calls = watch.calls()
    assert calls["loop"] == set()
    known = {"open", "close", "make", "lock", "allocate", "write", "read", "sync", "stat", "names", "unlink", "rename"}
    assert known <= calls["lane"]
