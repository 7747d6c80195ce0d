"""A sleeping engine's KV cache loses its memory and wakes up with other memory at the same address."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffloadd.client import Client, GpuTensor, KvCache, NamespaceSpec
from kvoffloadd.client.memory.gpu import driver
from kvoffloadd.integrations.common.keys import KEY_BYTES
from kvoffloadd.integrations.vllm.blocks import GroupChunks
from kvoffloadd.integrations.vllm.transfer_thread import Ended, Transfer, TransferThread
from kvoffloadd.model import Direction
from scripts.harness.daemon import Daemon
from scripts.harness.gpu import GpuBuffer
from tests.e2e import gpu_rank
from tests.e2e.daemons import gpu_mappings
from tests.e2e.rank import PAGE, SIMPLE

MISSING = gpu_rank.why_no_cuda()
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING))
pytestmark = pytest.mark.parametrize("device", [CUDA], indirect=True)

MIB = 1 << 20
COUNT = 8


class SleepingCache:
    """A KV cache of vLLM's sleep mode, and a rank's transfer_thread."""

    def __init__(self, daemon: Daemon) -> None:
        self.memory = GpuBuffer(gpu_rank.gpu(), 2 * MIB, chunk_bytes=2 * MIB)
        tensor = GpuTensor.adopt(self.memory.rows(0, 2 * COUNT, PAGE, PAGE))
        client = Client(daemon.socket, namespace=NamespaceSpec(model="sleep", key_bytes=KEY_BYTES))
        self.transfer_thread = TransferThread(client, KvCache([tensor], SIMPLE), job_deadline_s=10.0)
        self._number = 0

    def move(self, direction: Direction, first: int) -> Ended:
        """All keys, from or to the blocks from `first` on."""
        self._number += 1
        keys = b"".join(bytes([at]) * KEY_BYTES for at in range(COUNT))
        blocks = np.arange(first, first + COUNT, dtype=np.uint32).reshape(COUNT, 1)
        self.transfer_thread.submit(Transfer(self._number, direction, {0: GroupChunks(keys, blocks)}))
        self.transfer_thread.wait([self._number])
        (ended,) = self.transfer_thread.ended()
        return ended

    def remap(self) -> None:
        """What vLLM's allocator does between `sleep` and `wake`."""
        api, address = driver().api, self.memory.address
        wanted = api.CUmemAllocationProp()
        wanted.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self.memory.gpu.ordinal
        wanted.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        access = api.CUmemAccessDesc()
        access.location = wanted.location
        access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with self.memory.gpu.idle():
            driver().call("cuMemUnmap", address, 2 * MIB)
            handle = driver().call("cuMemCreate", 2 * MIB, wanted, 0)
            driver().call("cuMemMap", address, 2 * MIB, 0, handle, 0)
            driver().call("cuMemRelease", handle)
            driver().call("cuMemSetAccess", address, 2 * MIB, [access], 1)
        self.memory.upload(0, np.zeros(2 * COUNT * PAGE, np.uint8))


@pytest.fixture
def cache(daemon: Daemon, device: str) -> Iterator[SleepingCache]:
    one = SleepingCache(daemon)
    yield one
    one.transfer_thread.close(10.0)


@pytest.mark.parametrize("informed", [True, False])
def test_a_load_after_waking_up(daemon: Daemon, cache: SleepingCache, seed: int, informed: bool) -> None:
    """A daemon that does not know of the sleep loads into memory that the engine no longer reads, and reports DONE."""
    content = np.random.default_rng(seed).integers(0, 256, COUNT * PAGE, np.uint8)
    cache.memory.upload(0, content)
    assert cache.move(Direction.STORE, 0).success
    if informed:
        cache.transfer_thread.sleep(10.0)
        assert gpu_mappings(daemon) == 0
        assert not cache.move(Direction.LOAD, COUNT).success
        assert cache.move(Direction.STORE, 0) == Ended(3, True, 0, 0.0)
        assert gpu_mappings(daemon) == 0
    cache.remap()
    if informed:
        cache.transfer_thread.wake()
    assert cache.move(Direction.LOAD, COUNT).success
    found = cache.memory.download(COUNT * PAGE, COUNT * PAGE)
    assert np.array_equal(found, content if informed else np.zeros_like(content))


@pytest.mark.soak
def test_a_daemon_that_hangs_keeps_no_engine_from_sleeping_for_ever(daemon: Daemon, cache: SleepingCache) -> None:
    """Nothing is under way: what it keeps is unused memory. When it is back, so is the cache."""
    cache.memory.upload(0, np.ones(2 * COUNT * PAGE, np.uint8))
    assert cache.move(Direction.STORE, 0).bytes == COUNT * PAGE
    daemon.signal(signal.SIGSTOP)
    try:
        cache.transfer_thread.sleep(30.0)
    finally:
        daemon.signal(signal.SIGCONT)
    cache.remap()
    cache.transfer_thread.wake()
    assert cache.move(Direction.LOAD, COUNT).success
    assert set(cache.memory.download(COUNT * PAGE, COUNT * PAGE).tolist()) == {1}
