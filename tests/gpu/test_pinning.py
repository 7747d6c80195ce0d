"""Host memory that the driver registers: fresh, and left behind by a process that was killed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

import pytest

from kvoffloadd.linux.sharedmem import create_memfd
from kvoffloadd.testing.process import module, search_path
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.gpu.conftest import StartWorker, gauges
from tests.gpu.layouts import INSIDE, MIB
from tests.gpu.test_memory import DONE, KEYS, loads_right

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SIZE_BYTES = 32 * MIB
LIMIT_S = 40.0


@pytest.fixture
def memory() -> Iterator[int]:
    """A memfd that outlives the processes that register it."""
    fd = create_memfd("kvoffloadd-test", SIZE_BYTES)
    yield fd
    os.close(fd)


def child(fd: int, what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        module("tests.gpu._pinning", str(fd), str(SIZE_BYTES), what),
        pass_fds=[fd], env={**os.environ, "PYTHONPATH": search_path()}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def test_memory_of_a_killed_process_is_registered_again(memory: int) -> None:
    with child(memory, "write") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "written\n"
        first.kill()
    with child(memory, "read") as second:
        assert second.communicate(timeout=LIMIT_S)[0] == "0\n"


def test_an_arena_is_pinned_in_pieces_beside_serving(
    start_daemon: Callable[..., Daemon], start_worker: StartWorker
) -> None:
    daemon = start_daemon("memory.slab_bytes=1MiB", "cuda.pin_bytes=3MiB", memory="32MiB")
    worker = start_worker(daemon)
    worker.begin("ipc", INSIDE.size_bytes, INSIDE.tensors)
    worker.call("share")
    worker.call("fill", keys=KEYS, blocks=list(range(40)))
    assert worker.call("store", keys=KEYS, blocks=list(range(40))) == DONE
    assert loads_right(worker, KEYS, list(range(63, 23, -1)))
    until(lambda: gauges(daemon)["pinned_bytes"] == 32 * MIB, "all of the arena is pinned")
