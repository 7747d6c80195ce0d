"""A job begins when the worker's stream signals it: neither before its blocks are written, nor before they are read."""

from __future__ import annotations

import statistics

import pytest

from scripts.gpu.workerprocess import GpuWorker
from scripts.harness.daemon import Daemon
from scripts.harness.wait import throughout
from tests.gpu.conftest import Record, StartWorker
from tests.gpu.layouts import INSIDE
from tests.gpu.test_memory import DONE, loads_right, sharing

pytestmark = pytest.mark.gpu

OLD, NEW = list(range(40)), list(range(1000, 1040))
BLOCKS = list(range(40))
HELD_S = 0.2
LATENCY_MAX_S = 5e-3


def begin_behind(worker: GpuWorker, what: str, keys: list[int]) -> int:
    """A job that waits for all that is queued until now; it must not run while that can't."""
    job = int(worker.call(f"begin_{what}", keys=keys, blocks=BLOCKS, signal=True))
    throughout(lambda: not worker.call("is_done", job=job), "the job waits", HELD_S)
    return job


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
def test_a_store_waits_for_the_producer(start_worker: StartWorker, gpu_daemon: Daemon, kind: str) -> None:
    worker = sharing(start_worker, gpu_daemon, kind, INSIDE)
    worker.call("fill", keys=OLD, blocks=BLOCKS)
    worker.call("close_gate")
    worker.call("fill_later", keys=NEW, blocks=BLOCKS)
    job = begin_behind(worker, "store", NEW)
    worker.call("open_gate")
    assert worker.call("wait", job=job) == DONE
    assert loads_right(worker, NEW, BLOCKS)


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
def test_a_load_waits_for_the_reader(start_worker: StartWorker, gpu_daemon: Daemon, kind: str) -> None:
    worker = sharing(start_worker, gpu_daemon, kind, INSIDE)
    worker.call("fill", keys=NEW, blocks=BLOCKS)
    assert worker.call("store", keys=NEW, blocks=BLOCKS) == DONE
    worker.call("fill", keys=OLD, blocks=BLOCKS)
    worker.call("close_gate")
    worker.call("read_later")
    job = begin_behind(worker, "load", NEW)
    worker.call("open_gate")
    assert worker.call("wait", job=job) == DONE
    assert worker.call("read_wrong_bytes") == 0  # the reader saw what was there before
    worker.call("expect", keys=NEW, blocks=BLOCKS)
    assert worker.call("wrong_bytes") == 0


def test_without_a_signal_a_store_does_not_wait(start_worker: StartWorker, gpu_daemon: Daemon) -> None:
    """So that the tests above would notice."""
    worker = sharing(start_worker, gpu_daemon, "ipc", INSIDE)
    worker.call("fill", keys=OLD, blocks=BLOCKS)
    worker.call("close_gate")
    worker.call("fill_later", keys=NEW, blocks=BLOCKS)
    assert worker.call("store", keys=NEW, blocks=BLOCKS) == DONE
    worker.call("open_gate")
    worker.call("read_later")
    assert worker.call("read_wrong_bytes") == 0
    assert not loads_right(worker, NEW, BLOCKS)


def test_a_worker_that_dies_before_its_signal_keeps_nobody_waiting(
    start_worker: StartWorker, gpu_daemon: Daemon
) -> None:
    first = sharing(start_worker, gpu_daemon, "ipc", INSIDE)
    first.call("close_gate")
    begin_behind(first, "store", NEW)
    first.kill()
    second = sharing(start_worker, gpu_daemon, "ipc", INSIDE)
    second.call("fill", keys=NEW, blocks=BLOCKS)
    assert second.call("store", keys=NEW, blocks=BLOCKS) == DONE
    assert loads_right(second, NEW, BLOCKS)


def test_how_long_a_signal_takes(start_worker: StartWorker, gpu_daemon: Daemon, record_property: Record) -> None:
    worker = sharing(start_worker, gpu_daemon, "ipc", INSIDE)
    median_s = statistics.median(worker.call("signal_latencies", count=200))
    record_property("signal, median us", round(median_s * 1e6, 1))
    assert median_s < LATENCY_MAX_S


@pytest.mark.usefixtures("torch_cuda")
@pytest.mark.parametrize("what", ["store", "load"])
def test_both_orders_behind_kernels_of_torch(start_worker: StartWorker, gpu_daemon: Daemon, what: str) -> None:
    worker = start_worker(gpu_daemon)
    worker.begin("torch", INSIDE.size_bytes, INSIDE.tensors, first_torch=True)
    worker.call("share")
    worker.call("fill", keys=NEW, blocks=BLOCKS)
    if what == "load":
        assert worker.call("store", keys=NEW, blocks=BLOCKS) == DONE
    worker.call("fill", keys=OLD, blocks=BLOCKS)
    worker.call("read_later")  # so that nothing is allocated or registered behind the kernels
    assert worker.call("read_wrong_bytes") == 0
    worker.call("compute", seconds=0.5)
    if what == "store":
        worker.call("fill_later", keys=NEW, blocks=BLOCKS)
    else:
        worker.call("read_later")
    job = worker.call(f"begin_{what}", keys=NEW, blocks=BLOCKS, signal=True)
    assert worker.call("wait", job=job) == DONE
    if what == "store":
        assert loads_right(worker, NEW, BLOCKS)
        return
    assert worker.call("read_wrong_bytes") == 0
    worker.call("expect", keys=NEW, blocks=BLOCKS)
    assert worker.call("wrong_bytes") == 0
