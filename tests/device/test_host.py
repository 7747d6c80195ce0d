"""The host device: what it maps, what it refuses, and that `done` comes once, after the last access."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import itertools
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvoffloadd.device import host
from kvoffloadd.device.base import Copy, CopyRequest, CopyResult, Device
from kvoffloadd.device.copyruns import copy_payloads
from kvoffloadd.device.host import HostAllocation, HostDevice, copy_chunk
from kvoffloadd.device.plan import Copies, GroupPlan, Tensor
from kvoffloadd.device.userfaultguard import UserfaultGuard
from kvoffloadd.device.work import BlockList, BlockWork, hashable
from kvoffloadd.errors import BusyError, DrainingError, MemoryKindError, UsageError
from kvoffloadd.linux.sharedmem import Mapping, create_memfd
from kvoffloadd.model import NO_BLOCK, Direction, Outcome, Ref, U8Array
from kvoffloadd.scheduling.fairqueue import FairQueue
from kvoffloadd.scheduling.lanes import DAEMON, TURN_BYTES, Flow
from kvoffloadd.testing.wait import HANG_S
from tests.device.memory import Made, address, noise, u64

MIB = 1 << 20
FOREIGN_UID = os.geteuid() + 12345
OWN_UID = os.geteuid()


@pytest.fixture
async def device() -> AsyncIterator[HostDevice]:
    device = HostDevice(asyncio.get_running_loop(), 2, 64 * MIB)
    yield device
    assert await device.close(10)
    assert device.gauges()["copies"] == 0


class GatedMover:
    """A mover that waits at its door before it copies: `entered` counts, `open` lets all through."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.calls: list[int] = []

    def __call__(self, chunk: Copies) -> None:
        self.calls.append(int(chunk.dst[0]))
        self.entered.release()
        self.open.wait(HANG_S)
        copy_chunk(chunk)

    async def wait_entered(self) -> None:
        await asyncio.to_thread(self.entered.acquire, timeout=HANG_S)


class FailingMover:
    """Fails with its second chunk, and with no other."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, chunk: Copies) -> None:
        self.calls += 1
        if self.calls == 2:
            raise OSError("planted")
        copy_chunk(chunk)


class Results:
    """`done` callbacks whose results can be awaited."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._futures: dict[str, asyncio.Future[CopyResult]] = {}

    def done(self, name: str) -> Callable[[CopyResult], None]:
        future = self._futures[name] = asyncio.get_running_loop().create_future()

        def on_done(result: CopyResult) -> None:
            self.order.append(name)
            future.set_result(result)  # a second call raises, and the test fails

        return on_done

    def pending(self, name: str) -> bool:
        return not self._futures[name].done()

    async def get(self, name: str) -> CopyResult:
        async with asyncio.timeout(HANG_S):
            return await self._futures[name]


@pytest.fixture(autouse=True)
async def no_failing_callbacks() -> AsyncIterator[None]:
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    yield
    assert heard == []


def copies_of(src: U8Array, dst: U8Array, pieces: int = 1) -> Copies:
    """One copy of the whole, or several of equal size."""
    size = len(src) // pieces
    at = np.arange(pieces, dtype=np.uint64) * np.uint64(size)
    return Copies(at + np.uint64(address(src)), at + np.uint64(address(dst)), np.full(pieces, size, np.uint64), pieces)


def submit(
    device: Device,
    copies: Copies,
    done: Callable[[CopyResult], None],
    direction: Direction = Direction.LOAD,
    **how: Any,
) -> Copy:
    deadline_s = asyncio.get_running_loop().time() + how.pop("within_s", 20.0)
    urgent, flow = how.pop("urgent", False), how.pop("flow", DAEMON)
    return device.submit(CopyRequest(direction, Made(copies), deadline_s, urgent, flow), done)


# --- mapping ----------------------------------------------------------------------------------------


async def mapped(device: HostDevice, fd: int, uid: int) -> HostAllocation:
    return await device.map(fd, device.measure(fd, uid), uid)


@contextmanager
def opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


async def test_map_takes_a_sealed_memfd_of_anyone(device: HostDevice) -> None:
    with opened(create_memfd("kvo-test", MIB)) as fd:
        allocation = await mapped(device, fd, FOREIGN_UID)
        os.pwrite(fd, b"hello", 100)
    assert (allocation.kind, allocation.size_bytes) == ("host", MIB)
    assert allocation.base_address == allocation.mapping.address
    assert bytes(allocation.mapping.array()[100:105]) == b"hello", "it does not need the descriptor any more"
    assert device.gauges()["mapped_bytes"] == MIB
    await device.unmap(allocation)
    assert device.gauges()["mapped_bytes"] == 0
    with pytest.raises(UsageError):
        await device.unmap(allocation)


@pytest.mark.parametrize("uid", [OWN_UID, 0])
async def test_map_trusts_its_own_user_and_root_with_unsealed_memory(device: HostDevice, uid: int) -> None:
    with opened(os.memfd_create("kvo-test")) as fd:
        os.ftruncate(fd, 4096)
        await device.unmap(await mapped(device, fd, uid))
        with pytest.raises(MemoryKindError, match="F_SEAL_SHRINK"):
            device.measure(fd, FOREIGN_UID)


async def test_map_takes_a_file_of_dev_shm_from_its_own_user(device: HostDevice) -> None:
    path = f"/dev/shm/kvo-test-{os.getpid()}"
    try:
        with opened(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)) as fd:
            os.ftruncate(fd, 4096)
            await device.unmap(await mapped(device, fd, OWN_UID))
            with pytest.raises(MemoryKindError, match="sealed"):
                device.measure(fd, FOREIGN_UID)
    finally:
        os.unlink(path)


async def test_map_refuses_memory_that_can_only_be_read(device: HostDevice) -> None:
    with opened(create_memfd("kvo-test", 4096)) as fd:
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_PATH):
            with (
                opened(os.open(f"/proc/self/fd/{fd}", flags)) as other,
                pytest.raises(MemoryKindError, match=r"O_RDWR|shared memory"),
            ):
                device.measure(other, OWN_UID)


async def test_map_refuses_memory_that_is_sealed_against_writing(device: HostDevice) -> None:
    with opened(os.memfd_create("kvo-test", os.MFD_ALLOW_SEALING)) as fd:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        with pytest.raises(MemoryKindError, match="not permitted"):
            await mapped(device, fd, OWN_UID)


async def test_map_refuses_empty_memory(device: HostDevice) -> None:
    with opened(os.memfd_create("kvo-test", os.MFD_ALLOW_SEALING)) as fd:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(MemoryKindError, match="ftruncate"):
            device.measure(fd, FOREIGN_UID)


async def test_map_refuses_what_is_no_memory(device: HostDevice, tmp_path: Path) -> None:
    disk = tmp_path / "file"
    disk.write_bytes(b"x" * 4096)
    reader, writer = os.pipe()
    left, right = socket.socketpair()
    fds = [
        os.open("/dev/null", os.O_RDWR),
        os.open("/dev/zero", os.O_RDWR),
        os.open("/dev/shm", os.O_RDONLY | os.O_DIRECTORY),
        os.open("/proc/self/clear_refs", os.O_WRONLY),
        reader,
        writer,
        left.detach(),
        right.detach(),
        os.eventfd(0),
        os.pidfd_open(os.getpid()),
    ]
    if os.statvfs(disk).f_fsid != os.statvfs("/dev/shm").f_fsid and _is_on_disk(disk):
        fds.append(os.open(disk, os.O_RDWR))
    for fd in fds:
        with opened(fd), pytest.raises(MemoryKindError, match="memfd_create"):
            device.measure(fd, OWN_UID)
    with pytest.raises(MemoryKindError, match="descriptor"):
        device.measure(fds[0], OWN_UID)


def _is_on_disk(path: Path) -> bool:
    with open("/proc/self/mountinfo") as mounts:
        device = os.stat(path).st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        return all(" - tmpfs " not in line for line in mounts if line.split()[2] == name)


async def test_map_takes_the_kernels_size_and_leaves_the_descriptor(device: HostDevice) -> None:
    with opened(create_memfd("kvo-test", 5000)) as fd:
        allocation = await mapped(device, fd, FOREIGN_UID)
        assert allocation.size_bytes == 5000
        assert stat.S_ISREG(os.fstat(fd).st_mode), "still open"
    await device.unmap(allocation)


async def test_unmap_does_not_hold_the_loop(device: HostDevice) -> None:
    with opened(create_memfd("kvo-test", MIB)) as fd:
        allocation = await mapped(device, fd, FOREIGN_UID)
    task = asyncio.create_task(device.unmap(allocation))
    await asyncio.sleep(0)
    await task
    with pytest.raises(UsageError, match="closed"):
        allocation.mapping.array()


# --- copying -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("size_bytes", "pieces"), [(1, 1), (4096, 1), (MIB, 256), (3 * MIB + 5, 1), (8 * MIB, 2048)])
async def test_a_copy_moves_its_bytes(device: HostDevice, direction: Direction, size_bytes: int, pieces: int) -> None:
    src, dst, results = noise(size_bytes), np.zeros(size_bytes, np.uint8), Results()
    submit(device, copies_of(src, dst, pieces), results.done("a"), direction)
    assert results.pending("a"), "never within submit"
    result = await results.get("a")
    assert np.array_equal(src, dst)
    assert (result.outcome, result.bytes, result.descriptors, result.reason) == (Outcome.DONE, size_bytes, pieces, "")
    assert pieces <= result.copies <= pieces + 2
    assert result.seconds > 0


def blocks_of(src: U8Array, dst: U8Array, page_bytes: int, per_key: int) -> BlockWork:
    """A store of all blocks of `src`, in some order, to payloads side by side in `dst`."""
    blocks = len(src) // page_bytes
    plan = GroupPlan.build([Tensor(address(src), blocks, page_bytes, page_bytes)], [Ref(0, 0, page_bytes)], per_key)
    ids = np.random.default_rng(4).permutation(blocks).astype(np.uint32).reshape(-1, per_key)
    at = np.uint64(address(dst)) + np.arange(len(ids), dtype=np.uint64) * np.uint64(per_key * page_bytes)
    return BlockWork([BlockList((plan,), ids, np.arange(len(ids)), np.zeros(len(ids), np.int64), at)])


@pytest.mark.parametrize(
    ("size_bytes", "page_bytes", "per_key"),
    [(4096, 64, 1), (MIB, 64, 16), (4 * MIB, 4096, 1), (8 * MIB, 16_384, 8), (8 * MIB, MIB, 1), (6 * MIB, 24, 2)],
)
async def test_a_store_is_hashed_meanwhile(
    device: HostDevice, size_bytes: int, page_bytes: int, per_key: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one whose payloads are too large for it, or where nothing can, is not; and no load is, unless it asks."""
    size_bytes -= size_bytes % (page_bytes * per_key)
    src, dst, results = noise(size_bytes), np.zeros(size_bytes, np.uint8), Results()
    work, payload_bytes = blocks_of(src, dst, page_bytes, per_key), page_bytes * per_key

    async def copied(name: str, direction: Direction, work: BlockWork) -> CopyResult:
        deadline_s = asyncio.get_running_loop().time() + 20
        device.submit(CopyRequest(direction, work, deadline_s), results.done(name))
        result = await results.get(name)
        assert (result.outcome, result.bytes) == (Outcome.DONE, size_bytes)
        return result

    result = await copied("store", Direction.STORE, work)
    assert sorted(dst.tobytes()) == sorted(src.tobytes())
    payloads = dst.reshape(-1, payload_bytes)
    expected = [xxhash.xxh3_128_digest(payload.data) for payload in payloads]
    if copy_payloads is not None:
        assert result.digests is not None
        assert [digest.astype(">u8").tobytes() for digest in result.digests] == expected
    assert (await copied("load", Direction.LOAD, work)).digests is None
    monkeypatch.setattr(host, "copy_payloads", None)
    dst[:] = 0
    assert (await copied("without", Direction.STORE, work)).digests is None
    assert [xxhash.xxh3_128_digest(payload.data) for payload in payloads] == expected
    monkeypatch.undo()
    whole = blocks_of(src, dst, page_bytes, len(src) // page_bytes)
    if size_bytes >= 4 * MIB:
        assert (await copied("one payload for two threads", Direction.STORE, whole)).digests is None


@pytest.mark.skipif(copy_payloads is None, reason="nothing hashes while it copies here")
@pytest.mark.parametrize(
    ("pages", "per_key", "page_bytes"), [(64, 4, 64), (1024, 4, 4096), (2000, 2, 3001), (2, 1, MIB)]
)
async def test_a_load_is_hashed_on_request(device: HostDevice, pages: int, per_key: int, page_bytes: int) -> None:
    """The hash is that of the payload as it was read, for each payload that is copied whole."""
    memory, payloads, results = np.zeros(pages * page_bytes, np.uint8), noise(pages * page_bytes), Results()
    count = pages // per_key
    plan = GroupPlan.build([Tensor(address(memory), pages, page_bytes, page_bytes)], [Ref(0, 0, page_bytes)], per_key)
    ids = np.random.default_rng(4).permutation(pages).astype(np.uint32).reshape(-1, per_key)
    at = np.uint64(address(payloads)) + np.arange(count, dtype=np.uint64) * np.uint64(per_key * page_bytes)
    one = BlockList((plan,), ids, np.arange(count), np.zeros(count, np.int64), at)
    if per_key > 1:
        ids[1, 1] = NO_BLOCK
    left_out = np.arange(count) == count - 1
    whole = hashable([one], device.hashed_load_bytes)
    assert whole.tolist() == [number != 1 or per_key == 1 for number in range(count)]
    deadline_s = asyncio.get_running_loop().time() + 20
    work = BlockWork([one], ~left_out).hashing()
    device.submit(CopyRequest(Direction.LOAD, work, deadline_s, urgent=True), results.done("a"))
    result = await results.get("a")
    assert (result.outcome, result.bytes) == (Outcome.DONE, work.total_bytes)
    assert result.digests is not None
    by_key = payloads.reshape(count, -1)
    for number in np.flatnonzero(whole & ~left_out):
        assert result.digests[number].astype(">u8").tobytes() == xxhash.xxh3_128_digest(by_key[number].data)
    assert not result.digests[left_out].any()
    rows, copied = memory.reshape(pages, -1), ids[~left_out]
    pages_of = payloads.reshape(count, per_key, -1)[~left_out]
    assert np.array_equal(rows[copied[copied != NO_BLOCK]], pages_of[copied != NO_BLOCK])


@pytest.mark.skipif(copy_payloads is None, reason="nothing hashes while it copies here")
async def test_a_load_that_fails_has_no_digests(device: HostDevice) -> None:
    src, dst, results = noise(4 * MIB), np.zeros(4 * MIB, np.uint8), Results()
    device.mover = FailingMover()
    deadline_s = asyncio.get_running_loop().time() + 20
    work = blocks_of(src, dst, 4096, 1).hashing()
    device.submit(CopyRequest(Direction.LOAD, work, deadline_s), results.done("a"))
    result = await results.get("a")
    assert (result.outcome, result.digests) == (Outcome.FAILED, None)


async def test_without_the_helper_no_load_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "copy_payloads", None)
    made = HostDevice(asyncio.get_running_loop(), 1, MIB)
    assert made.hashed_load_bytes == 0
    assert await made.close(10)


@pytest.mark.skipif(copy_payloads is None, reason="nothing hashes while it copies here")
async def test_a_store_that_fails_has_no_digests(device: HostDevice) -> None:
    src, dst, results = noise(4 * MIB), np.zeros(4 * MIB, np.uint8), Results()
    device.mover = FailingMover()
    deadline_s = asyncio.get_running_loop().time() + 20
    work = blocks_of(src, dst, 4096, 1)
    device.submit(CopyRequest(Direction.STORE, work, deadline_s), results.done("a"))
    result = await results.get("a")
    assert (result.outcome, result.digests) == (Outcome.FAILED, None)


async def test_nothing_to_copy_is_done(device: HostDevice) -> None:
    results = Results()
    empty = Copies(u64([]), u64([]), u64([]), 0)
    copy = submit(device, empty, results.done("a"))
    copy.cancel()
    assert results.pending("a")
    assert (await results.get("a")).outcome is Outcome.DONE


async def test_a_large_copy_is_split_over_the_threads(device: HostDevice) -> None:
    device.mover = gate = GatedMover()
    src, dst, results = noise(2 * MIB), np.zeros(2 * MIB, np.uint8), Results()
    submit(device, copies_of(src, dst), results.done("a"))
    await gate.wait_entered()
    await gate.wait_entered()
    assert device.gauges()["load_running"] == 2
    gate.open.set()
    assert (await results.get("a")).outcome is Outcome.DONE
    assert sorted(gate.calls) == [address(dst), address(dst) + MIB]
    assert np.array_equal(src, dst)


async def test_loads_never_wait_for_stores(device: HostDevice) -> None:
    device.mover = gate = GatedMover()
    src, dst, results = noise(4 * MIB), np.zeros(4 * MIB, np.uint8), Results()
    submit(device, copies_of(src, dst), results.done("store"), Direction.STORE)
    await gate.wait_entered()
    device.mover = copy_chunk
    other = np.zeros(4 * MIB, np.uint8)
    submit(device, copies_of(src, other), results.done("load"), Direction.LOAD)
    assert (await results.get("load")).outcome is Outcome.DONE
    assert results.pending("store")
    gate.open.set()
    await results.get("store")


async def test_urgent_loads_overtake_and_giants_share() -> None:
    device = HostDevice(asyncio.get_running_loop(), 1, MIB)
    device.mover = gate = GatedMover()
    src = noise(4 * MIB)
    giant, small, urgent = (np.zeros(size, np.uint8) for size in (4 * MIB, 4096, 4096))
    results = Results()
    submit(device, copies_of(src, giant), results.done("giant"))
    await gate.wait_entered()
    submit(device, copies_of(src[:4096], small), results.done("small"))
    submit(device, copies_of(src[:4096], urgent), results.done("urgent"), urgent=True)
    gate.open.set()
    await results.get("giant")
    assert results.order == ["urgent", "small", "giant"]
    first, *_, last = gate.calls
    assert (first, last) == (address(giant), address(giant) + 3 * MIB)
    assert np.array_equal(giant, src)
    assert await device.close(5)


async def test_a_copy_that_can_not_be_queued_whole_is_not_begun(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory for its second ticket: its blocks are free at once, so no thread may come for the first."""
    src, dst, results = noise(2 * MIB), np.zeros(2 * MIB, np.uint8), Results()
    push, calls = FairQueue.push, itertools.count()

    def short(queue: FairQueue[Any], *args: Any) -> None:
        if next(calls):
            raise MemoryError("planted")
        push(queue, *args)

    with monkeypatch.context() as planted:
        planted.setattr(FairQueue, "push", short)
        with pytest.raises(MemoryError, match="planted"):
            submit(device, copies_of(src, dst), results.done("a"), within_s=0.01)
    assert device.gauges() == dict.fromkeys(device.gauges(), 0)
    submit(device, copies_of(src[:4096], dst[:4096]), results.done("b"))
    assert (await results.get("b")).outcome is Outcome.DONE
    await asyncio.sleep(0.02)
    assert results.pending("a")
    assert not dst[4096:].any()


async def test_a_copy_that_has_ended_is_let_go_at_once(device: HostDevice) -> None:
    """No collection is needed: its job, its work and its chunks go with it."""
    src, dst, results = noise(2 * MIB), np.zeros(2 * MIB, np.uint8), Results()
    jobs: list[Copy] = []

    def begin(name: str) -> weakref.ref[Copy]:
        done = results.done(name)

        def on_end(result: CopyResult) -> None:
            done(result)
            jobs.remove(copy)

        copy = submit(device, copies_of(src, dst), on_end)
        jobs.append(copy)
        return weakref.ref(copy)

    gc.disable()
    try:
        for name in "abc":
            copy = begin(name)
            await results.get(name)
            async with asyncio.timeout(HANG_S):
                while copy() is not None:  # noqa: ASYNC110  until the lane's threads have let go of their tickets
                    await asyncio.sleep(0.0005)
    finally:
        gc.enable()


async def test_cancel_waits_for_what_has_begun_and_drops_the_rest() -> None:
    device = HostDevice(asyncio.get_running_loop(), 1, MIB)
    device.mover = gate = GatedMover()
    src, dst, results = noise(4 * MIB), np.zeros(4 * MIB, np.uint8), Results()
    copy = submit(device, copies_of(src, dst, 4), results.done("a"))
    waiting = submit(device, copies_of(src, dst, 4), results.done("b"))
    await gate.wait_entered()
    copy.cancel()
    waiting.cancel()
    dropped = await results.get("b")
    assert (dropped.outcome, dropped.bytes) == (Outcome.CANCELLED, 0)
    assert results.pending("a"), "its first chunk is still being copied"
    assert not dst.any()
    gate.open.set()
    result = await results.get("a")
    assert (result.outcome, result.bytes, result.descriptors, result.copies) == (Outcome.CANCELLED, MIB, 1, 1)
    assert np.array_equal(dst[:MIB], src[:MIB])
    assert not dst[MIB:].any()
    copy.cancel()
    assert await device.close(5)


async def test_cancel_of_the_last_chunk_comes_too_late(device: HostDevice) -> None:
    device.mover = gate = GatedMover()
    src, dst, results = noise(4096), np.zeros(4096, np.uint8), Results()
    copy = submit(device, copies_of(src, dst), results.done("a"))
    await gate.wait_entered()
    copy.cancel()
    gate.open.set()
    assert (await results.get("a")).outcome is Outcome.DONE
    assert np.array_equal(src, dst)


async def test_no_byte_moves_after_done() -> None:
    """Many copies, cancelled at random moments: from `done` on the destination is the caller's alone."""
    loop = asyncio.get_running_loop()
    device = HostDevice(loop, 2, 64 << 10)
    chance = np.random.default_rng(0)
    src, results = noise(MIB), Results()
    targets = {str(number): np.zeros(MIB, np.uint8) for number in range(40)}
    frozen: dict[str, U8Array] = {}
    outcomes: dict[str, CopyResult] = {}

    def on_done(name: str, inner: Callable[[CopyResult], None], result: CopyResult) -> None:
        frozen[name], outcomes[name] = targets[name].copy(), result
        inner(result)

    for name, dst in targets.items():
        copy = submit(device, copies_of(src, dst, 64), partial(on_done, name, results.done(name)))
        if chance.random() < 0.8:
            loop.call_later(float(chance.random()) * 0.01, copy.cancel)
    for name in targets:
        await results.get(name)
    assert await device.close(5)
    for name, dst in targets.items():
        assert np.array_equal(dst, frozen[name])
        rows = dst.reshape(64, -1) == src.reshape(64, -1)
        assert outcomes[name].bytes == int(rows.all(axis=1).sum()) * (MIB // 64)
        assert (outcomes[name].outcome is Outcome.DONE) == (outcomes[name].bytes == MIB)
    assert len(results.order) == len(targets)


@pytest.mark.parametrize("within_s", [-1.0, 0.05])
async def test_chunks_that_would_begin_after_the_deadline_are_dropped(within_s: float) -> None:
    device = HostDevice(asyncio.get_running_loop(), 1, MIB)
    device.mover = gate = GatedMover()
    src, dst, results = noise(MIB), np.zeros(MIB, np.uint8), Results()
    submit(device, copies_of(src, src), results.done("first"))
    await gate.wait_entered()
    submit(device, copies_of(src, dst), results.done("late"), within_s=within_s)
    result = await results.get("late")
    assert (result.outcome, result.bytes) == (Outcome.EXPIRED, 0)
    assert results.pending("first"), "it need not wait for a thread"
    gate.open.set()
    assert (await results.get("first")).outcome is Outcome.DONE
    assert not dst.any()
    assert await device.close(5)


async def test_a_running_chunk_outlives_its_deadline() -> None:
    device = HostDevice(asyncio.get_running_loop(), 1, MIB)
    device.mover = gate = GatedMover()
    src, dst, results = noise(2 * MIB), np.zeros(2 * MIB, np.uint8), Results()
    submit(device, copies_of(src, dst, 2), results.done("a"), within_s=0.05)
    await gate.wait_entered()
    await asyncio.sleep(0.1)
    assert results.pending("a")
    gate.open.set()
    result = await results.get("a")
    assert (result.outcome, result.bytes) == (Outcome.EXPIRED, MIB)
    assert np.array_equal(dst[:MIB], src[:MIB])
    assert not dst[MIB:].any()
    assert await device.close(5)


async def test_a_late_loop_does_not_extend_the_deadline() -> None:
    device = HostDevice(asyncio.get_running_loop(), 1, MIB)
    device.mover = gate = GatedMover()
    gate.open.set()
    src, dst, results = noise(MIB), np.zeros(MIB, np.uint8), Results()
    submit(device, copies_of(src, dst), results.done("late"), within_s=-1.0)
    time.sleep(0.05)  # noqa: ASYNC251  the lane's thread is at it while the loop can't expire it
    assert (await results.get("late")).outcome is Outcome.EXPIRED
    assert gate.calls == []
    assert await device.close(5)


async def test_one_failing_chunk_fails_the_copy_and_no_other() -> None:
    device = HostDevice(asyncio.get_running_loop(), 1, MIB)
    src, dst, other, results = noise(4 * MIB), np.zeros(4 * MIB, np.uint8), np.zeros(MIB, np.uint8), Results()
    device.mover = failing = FailingMover()
    submit(device, copies_of(src, dst, 4), results.done("a"))
    result = await results.get("a")
    assert (result.outcome, result.bytes, result.reason) == (Outcome.FAILED, MIB, "OSError: planted")
    assert failing.calls == 2, "the chunks behind it are dropped"
    submit(device, copies_of(src[:MIB], other), results.done("b"))
    assert (await results.get("b")).outcome is Outcome.DONE
    assert await device.close(5)


async def test_a_failing_chunk_drops_those_that_other_threads_would_take() -> None:
    device = HostDevice(asyncio.get_running_loop(), 2, MIB // 4)
    src, dst, results, calls = noise(16 * MIB), np.zeros(16 * MIB, np.uint8), Results(), itertools.count()

    def fail_first(chunk: Copies) -> None:
        if next(calls) == 0:
            raise OSError("planted")
        time.sleep(0.005)

    device.mover = fail_first
    submit(device, copies_of(src, dst, 64), results.done("a"))
    assert (await results.get("a")).outcome is Outcome.FAILED
    assert next(calls) < 64
    assert await device.close(5)


async def test_close_cancels_waits_and_tells_the_truth(device: HostDevice) -> None:
    device.mover = gate = GatedMover()
    src, dst, results = noise(MIB // 2), np.zeros(MIB // 2, np.uint8), Results()
    for name in ("a", "b", "c"):
        submit(device, copies_of(src, dst), results.done(name), Direction.STORE)
    await gate.wait_entered()
    await gate.wait_entered()
    assert not await device.close(0.05)
    assert (await results.get("c")).outcome is Outcome.CANCELLED
    assert results.pending("a")
    assert results.pending("b")
    with pytest.raises(UsageError, match="closed"):
        submit(device, copies_of(src, dst), results.done("d"))
    gate.open.set()
    assert await device.close(5)
    assert not results.pending("a")
    assert not results.pending("b")


async def test_busy_s_is_the_age_of_the_oldest_chunk(device: HostDevice) -> None:
    now = asyncio.get_running_loop().time
    assert device.busy_s(now() + 50) == 0
    device.mover = gate = GatedMover()
    src, dst, results = noise(4096), np.zeros(4096, np.uint8), Results()
    submit(device, copies_of(src, dst), results.done("a"))
    await gate.wait_entered()
    assert device.busy_s(now() + 50) == pytest.approx(50, abs=5)
    gauges = device.gauges()
    assert {name: gauges[name] for name in ("copies", "load_running", "load_queued", "store_running")} == {
        "copies": 1,
        "load_running": 1,
        "load_queued": 0,
        "store_running": 0,
    }
    gate.open.set()
    await results.get("a")
    assert device.gauges()["copies"] == 0


# --- several engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("urgent", [False, True])
async def test_an_engine_does_not_wait_for_all_that_another_has_queued(urgent: bool) -> None:
    """Whatever the chunks' size is set to: only a turn of each goes before."""
    device, results, gate = HostDevice(asyncio.get_running_loop(), 1, 1 << 30), Results(), GatedMover()
    device.mover = gate
    theirs, small, out = noise(3 * TURN_BYTES), noise(4 * MIB), np.zeros(3 * TURN_BYTES + 4 * MIB, np.uint8)
    for number in range(100):
        copies = copies_of(theirs, out[: len(theirs)])
        submit(device, copies, results.done(f"theirs {number}"), urgent=urgent, flow=Flow(1001, 1))
    await gate.wait_entered()
    copy = submit(device, copies_of(small, out[len(theirs) :]), results.done("small"), flow=Flow(1001, 2))
    assert copy.busy_s(time.monotonic() + 100) == 0, "it is queued"
    gate.open.set()
    assert (await results.get("small")).outcome is Outcome.DONE
    before = gate.calls.index(address(out) + len(theirs))
    assert before <= 2, "the turn that was under way, and at most one more"
    assert results.order[0] == "small"
    assert await device.close(10)
    assert gate.calls.count(address(out)) <= 100


async def test_how_long_a_chunk_of_a_copy_runs() -> None:
    device, results, gate = HostDevice(asyncio.get_running_loop(), 1, MIB), Results(), GatedMover()
    device.mover = gate
    src, dst = noise(MIB), np.zeros(MIB, np.uint8)
    copy = submit(device, copies_of(src, dst), results.done("a"))
    await gate.wait_entered()
    assert copy.busy_s(time.monotonic() + 100) == pytest.approx(100, abs=20)
    gate.open.set()
    await results.get("a")
    assert copy.busy_s(time.monotonic() + 100) == 0
    assert await device.close(10)


async def test_a_file_system_is_not_asked_before_it_is_known(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That of a peer's own may never answer."""
    asked: list[int] = []
    with (tmp_path / "file").open("w+b") as file, monkeypatch.context() as watched:
        watched.setattr(os, "fstat", asked.append)
        watched.setattr(os, "fstatvfs", asked.append)
        with pytest.raises(MemoryKindError, match="not shared memory"):
            device.measure(file.fileno(), FOREIGN_UID)
    assert asked == []


# --- memory that keeps the kernel waiting ---------------------------------------------------------------


class SlowHoles(UserfaultGuard):
    """Mappings of this size wait for `open` while they are made: the kernel takes its time."""

    def __init__(self, slow_bytes: int) -> None:
        self._slow_bytes = slow_bytes
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def forbid(self, mapping: Mapping) -> None:
        if mapping.size_bytes == self._slow_bytes:
            self.entered.release()
            self.open.wait(HANG_S)


async def test_copies_of_another_user_that_do_not_end_keep_nobody_else_waiting() -> None:
    device, results, gate = HostDevice(asyncio.get_running_loop(), 2, MIB), Results(), GatedMover()
    device.admit(FOREIGN_UID)
    src, dst = noise(MIB), np.zeros(MIB, np.uint8)
    plain, device.mover = device.mover, gate
    for number in range(5):
        for direction in Direction:
            theirs = results.done(f"theirs {number} {direction}")
            submit(device, copies_of(src, dst), theirs, direction, flow=Flow(FOREIGN_UID, 1), within_s=30.0)
    for _ in range(4):
        await gate.wait_entered()
    device.mover = plain
    device.admit(FOREIGN_UID + 1)
    for uid in (OWN_UID, DAEMON.uid, FOREIGN_UID + 1):
        for direction in Direction:
            submit(device, copies_of(src, dst), results.done("ours"), direction, flow=Flow(uid, 2))
            assert (await results.get("ours")).outcome is Outcome.DONE
    assert all(lane.running == 0 for lane in device.watched_lanes()), "the watchdog gets its answer"
    assert device.gauges()["load_running"] == 2
    assert await device.close(0.1), "nobody but them is waited for at the end"
    assert device.others_late
    gate.open.set()
    assert await device.close(20)
    assert not device.others_late
    assert device.gauges()["copies"] == 0


async def test_memory_of_another_user_that_can_not_be_mapped_keeps_nobody_else_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holes = SlowHoles(8192)
    device = HostDevice(asyncio.get_running_loop(), 1, MIB, holes=holes)
    device.admit(FOREIGN_UID)
    with opened(create_memfd("kvo-test", 8192)) as slow, opened(create_memfd("kvo-test", 4096)) as fd:
        late = [asyncio.create_task(mapped(device, slow, FOREIGN_UID)) for _ in range(3)]
        for _ in range(host.MAP_THREADS):
            await asyncio.to_thread(holes.entered.acquire, timeout=HANG_S)
        async with asyncio.timeout(HANG_S):
            await device.unmap(await mapped(device, fd, OWN_UID))
        device.measure(fd, FOREIGN_UID)  # what has begun just now is no reason to refuse
        monkeypatch.setattr(host, "MAP_STUCK_S", 0.0)
        with pytest.raises(BusyError, match=f"uid {FOREIGN_UID} has shared"):
            device.measure(fd, FOREIGN_UID)
        device.measure(fd, OWN_UID)
        assert not any(task.done() for task in late)
        holes.open.set()
        async with asyncio.timeout(HANG_S):
            for allocation in await asyncio.gather(*late):
                await device.unmap(allocation)
        await device.unmap(await mapped(device, fd, FOREIGN_UID))
    assert await device.close(10)


@pytest.mark.parametrize(
    ("uid", "slow"), [(FOREIGN_UID, host.MAP_THREADS - 1), (OWN_UID, host.MAP_THREADS)], ids=["others", "ours"]
)
async def test_a_mapping_that_takes_long_is_no_reason_to_refuse(
    monkeypatch: pytest.MonkeyPatch, uid: int, slow: int
) -> None:
    """Ending one of hundreds of GiB takes long, while the engine that had it comes back."""
    monkeypatch.setattr(host, "MAP_STUCK_S", 0.0)
    holes = SlowHoles(8192)
    device = HostDevice(asyncio.get_running_loop(), 1, MIB, holes=holes)
    device.admit(FOREIGN_UID)
    with opened(create_memfd("kvo-test", 8192)) as large, opened(create_memfd("kvo-test", 4096)) as fd:
        late = [asyncio.create_task(device.map(large, 8192, uid)) for _ in range(slow)]
        for _ in late:
            await asyncio.to_thread(holes.entered.acquire, timeout=HANG_S)
        assert device.measure(fd, uid) == 4096
        holes.open.set()
        async with asyncio.timeout(HANG_S):
            for allocation in await asyncio.gather(*late):
                await device.unmap(allocation)
    assert await device.close(10)


async def test_what_waits_to_be_mapped_or_unmapped_when_the_device_is_closed() -> None:
    """This is no misuse, and nothing has failed: it ends with the process."""
    holes = SlowHoles(8192)
    device = HostDevice(asyncio.get_running_loop(), 1, MIB, holes=holes)
    device.admit(FOREIGN_UID)
    with opened(create_memfd("kvo-test", 8192)) as slow, opened(create_memfd("kvo-test", 4096)) as fd:
        unmapped, left = [await mapped(device, fd, FOREIGN_UID) for _ in range(2)]
        late = [asyncio.create_task(mapped(device, slow, FOREIGN_UID)) for _ in range(host.MAP_THREADS + 1)]
        for _ in range(host.MAP_THREADS):
            await asyncio.to_thread(holes.entered.acquire, timeout=HANG_S)
        unmapping = asyncio.create_task(device.unmap(unmapped))
        assert await device.close(0.1)
        async with asyncio.timeout(HANG_S):
            with pytest.raises(DrainingError):
                await late.pop()
            await unmapping
            await device.unmap(left)
            with pytest.raises(DrainingError):
                await mapped(device, fd, FOREIGN_UID)
            holes.open.set()
            await asyncio.gather(*late)
    for allocation in device._mapped | {unmapped, left}:
        allocation.mapping.close()


async def test_a_user_without_threads_is_not_half_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the threads that were made is left."""
    device = HostDevice(asyncio.get_running_loop(), 2, MIB)
    start, left = threading.Thread.start, [3]

    def start_some(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", start_some)
        with pytest.raises(RuntimeError, match="new thread"):
            device.admit(FOREIGN_UID)
    name_part = f"-{FOREIGN_UID}-"
    async with asyncio.timeout(HANG_S):
        while any(name_part in thread.name for thread in threading.enumerate()):  # noqa: ASYNC110  they end by themselves
            await asyncio.sleep(0.001)
    device.admit(FOREIGN_UID)
    assert sum(name_part in thread.name for thread in threading.enumerate()) == 6
    assert await device.close(10)
