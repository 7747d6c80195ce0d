"""Every kind of GPU memory, shared with the daemon: the right bytes go there and come back, and no others change."""

from __future__ import annotations

import pytest

from kvoffloadd.testing.wait import until
from scripts.gpu.workerprocess import GpuWorker, WorkerError
from scripts.harness.daemon import Daemon
from tests.gpu.conftest import Record, StartWorker, mapped_bytes
from tests.gpu.layouts import INSIDE, LAYOUTS, MIB, PLAIN, Layout

pytestmark = pytest.mark.gpu

DONE = ["done", ""]
KEYS = list(range(100, 140))


def sharing(start_worker: StartWorker, daemon: Daemon, kind: str, layout: Layout) -> GpuWorker:
    """A worker whose cache is registered."""
    worker = start_worker(daemon)
    worker.begin(kind, layout.size_bytes, layout.tensors)
    worker.call("share")
    return worker


def loads_right(worker: GpuWorker, keys: list[int], blocks: list[int]) -> bool:
    """Wipe everything, load, and look at every byte of the memory."""
    worker.call("wipe")
    worker.call("expect", keys=keys, blocks=blocks)
    return bool(worker.call("load", keys=keys, blocks=blocks) == DONE and worker.call("wrong_bytes") == 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ipc", "vmm"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_bytes_come_back(start_worker: StartWorker, gpu_daemon: Daemon, kind: str, layout: Layout) -> None:
    worker = sharing(start_worker, gpu_daemon, kind, layout)
    last = layout.num_blocks - 1
    scattered = [(7 * number) % layout.num_blocks for number in range(len(KEYS))]
    worker.call("fill", keys=KEYS, blocks=scattered)
    assert worker.call("store", keys=KEYS, blocks=scattered) == DONE
    assert worker.call("wrong_bytes") == 0
    assert loads_right(worker, KEYS, list(range(last, last - len(KEYS), -1)))
    assert loads_right(worker, KEYS, list(range(len(KEYS))))


@pytest.mark.slow
def test_what_one_worker_stored_another_loads(start_worker: StartWorker, gpu_daemon: Daemon) -> None:
    first = sharing(start_worker, gpu_daemon, "ipc", INSIDE)
    first.call("fill", keys=KEYS, blocks=list(range(40)))
    assert first.call("store", keys=KEYS, blocks=list(range(40))) == DONE
    first.kill()
    second = sharing(start_worker, gpu_daemon, "vmm", INSIDE)
    assert loads_right(second, KEYS, list(range(24, 64)))


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
def test_sharing_and_unsharing_leaks_nothing(start_worker: StartWorker, gpu_daemon: Daemon, kind: str) -> None:
    worker = start_worker(gpu_daemon)
    worker.begin(kind, INSIDE.size_bytes, INSIDE.tensors)
    worker.call("share_and_unshare", times=3)
    before = worker.call("free_bytes")
    fds = gpu_daemon.open_fds()
    worker.call("share_and_unshare", times=40)
    until(lambda: mapped_bytes(gpu_daemon) == 0, "all of it is unmapped")
    assert before - worker.call("free_bytes") < 2 * MIB
    assert gpu_daemon.open_fds() <= fds


def test_memory_that_can_not_be_exported_is_refused_with_the_setting(
    start_worker: StartWorker, gpu_daemon: Daemon
) -> None:
    worker = start_worker(gpu_daemon)
    worker.begin("vmm-private", PLAIN.size_bytes, PLAIN.tensors)
    with pytest.raises(WorkerError, match=r"UsageError.*expandable_segments:False.*sleep mode"):
        worker.call("share")


# --- torch ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_cuda")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_bfloat16_tensors_of_torch(start_worker: StartWorker, gpu_daemon: Daemon, layout: Layout) -> None:
    worker = start_worker(gpu_daemon)
    worker.begin("torch", layout.size_bytes, layout.tensors, first_torch=True)
    assert min(worker.call("share")) > 0  # torch's segments are larger than its tensors
    worker.call("fill", keys=KEYS, blocks=list(range(40)))
    assert worker.call("store", keys=KEYS, blocks=list(range(40))) == DONE
    assert loads_right(worker, KEYS, list(range(63, 23, -1)))


@pytest.mark.usefixtures("torch_cuda")
def test_expandable_segments_work_or_name_the_setting(
    start_worker: StartWorker, gpu_daemon: Daemon, record_property: Record
) -> None:
    worker = start_worker(gpu_daemon, variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    worker.begin("torch", 48 * MIB, INSIDE.tensors, first_torch=True)  # of many chunks
    try:
        worker.call("share")
    except WorkerError as error:
        record_property("expandable segments", f"refused: {error}")
        assert "expandable_segments:False" in str(error)
        return
    record_property("expandable segments", "work")
    worker.call("fill", keys=KEYS, blocks=list(range(40)))
    assert worker.call("store", keys=KEYS, blocks=list(range(40))) == DONE
    assert loads_right(worker, KEYS, list(range(63, 23, -1)))
