"""A worker or the daemon is killed while a GPU copies: memory is given back, and everybody else goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvoffloadd.testing.wait import until
from scripts.gpu.workerprocess import GpuWorker
from scripts.harness.daemon import Daemon
from scripts.harness.gpumemory import Rows
from tests.gpu.conftest import Record, StartWorker, gauges, mapped_bytes
from tests.gpu.layouts import INSIDE, MIB, Layout
from tests.gpu.test_memory import DONE, KEYS, loads_right, sharing

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

FREED_MAX_S = 1.0
SLOW = "link_bytes_per_s=400000000"
"""Of the software driver; a real one is slow enough where rows are this small and this many."""

JOBS = 6


@pytest.fixture
def large(real: bool) -> Layout:
    """So large that copies last while a process is killed."""
    size_bytes = (256 if real else 24) * MIB
    part_bytes = size_bytes // 4
    return Layout(size_bytes, tuple(Rows(at * part_bytes, part_bytes // 4096, 4096, 4096) for at in range(4)))


@pytest.fixture
def slow_daemon(real: bool, start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    """A daemon of the test's own."""
    with monkeypatch.context() as patch:
        if not real:
            patch.setenv("SOFTCUDA_FAULTS", SLOW)
        daemon = start_daemon("memory.slab_bytes=4MiB", memory="2GiB" if real else "256MiB")
        yield daemon
        daemon.leave_guests()
        until(lambda: mapped_bytes(daemon) == 0, "all GPU memory is unmapped")


def busy_worker(start_worker: StartWorker, daemon: Daemon, layout: Layout, kind: str, what: str) -> GpuWorker:
    """A worker with `JOBS` jobs, and the daemon has begun to copy some of them."""
    worker = start_worker(daemon)
    worker.begin(kind, layout.size_bytes, layout.tensors)
    worker.call("share")
    blocks = list(range(0, layout.num_blocks, 2))  # no two are neighbours: none are merged
    if what == "load":
        assert worker.call("store", keys=blocks, blocks=blocks) == DONE
    worker.call("close_gate")  # until all have been asked for
    for number in range(JOBS):
        keys = blocks if what == "load" else [number * layout.num_blocks + block for block in blocks]
        worker.call(f"begin_{what}", keys=keys, blocks=blocks, signal=True)
    worker.call("open_gate")
    until(lambda: gauges(daemon)[f"{what}_running"], "the daemon copies")
    return worker


@pytest.mark.parametrize(("kind", "what"), [("ipc", "store"), ("vmm", "load")])
def test_a_worker_is_killed_in_mid_copy(
    start_worker: StartWorker,
    slow_daemon: Daemon,
    large: Layout,
    record_property: Record,
    real: bool,
    kind: str,
    what: str,
) -> None:
    other = start_worker(slow_daemon)
    other.begin("ipc", INSIDE.size_bytes, INSIDE.tensors)
    other.call("share")
    shared_bytes = mapped_bytes(slow_daemon)
    free_bytes = other.call("free_bytes")
    worker = busy_worker(start_worker, slow_daemon, large, kind, what)
    worker.kill()
    begun = time.monotonic()
    until(lambda: mapped_bytes(slow_daemon) == shared_bytes, "its memory is unmapped")
    unmapped_s = time.monotonic() - begun
    record_property("unmapped after, s", round(unmapped_s, 3))
    if real:
        until(lambda: free_bytes - other.call("free_bytes") < 16 * MIB, "its memory is free")
        record_property("free after, s", round(time.monotonic() - begun, 3))
    assert unmapped_s < FREED_MAX_S
    other.call("fill", keys=KEYS, blocks=list(range(40)))
    assert other.call("store", keys=KEYS, blocks=list(range(40))) == DONE
    assert loads_right(other, KEYS, list(range(24, 64)))


@pytest.mark.parametrize(("kind", "what"), [("ipc", "store"), ("vmm", "load")])
def test_the_daemon_is_killed_in_mid_copy(
    start_worker: StartWorker, slow_daemon: Daemon, large: Layout, kind: str, what: str
) -> None:
    worker = busy_worker(start_worker, slow_daemon, large, kind, what)
    slow_daemon.kill()
    slow_daemon.start()
    outcomes = [worker.call("wait", job=job)[0] for job in range(what == "load", JOBS + (what == "load"))]
    assert outcomes[-1] == "lost"
    blocks = list(range(0, large.num_blocks, 2))
    worker.call("fill", keys=blocks, blocks=blocks)  # its memory is its own again
    assert worker.call("wrong_bytes") == 0
    assert worker.call("store", keys=blocks, blocks=blocks) == DONE
    assert loads_right(worker, blocks, blocks)


def test_an_unregistration_ends_the_mapping_before_it_is_answered(
    start_worker: StartWorker, gpu_daemon: Daemon
) -> None:
    worker = sharing(start_worker, gpu_daemon, "ipc", INSIDE)
    assert mapped_bytes(gpu_daemon) >= INSIDE.size_bytes
    worker.call("unshare")
    assert mapped_bytes(gpu_daemon) == 0
