"""A worker's GPU memory in the daemon: how long it is mapped, what is refused, and the arena that it is copied to."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, GpuTensor, Group, GroupKind, KvCache, Outcome, Ref
from kvoffloadd.client.base import GPU_OPEN_S
from kvoffloadd.client.memory.gpu import IpcMemory, gpu_allocation
from kvoffloadd.errors import DeadlineError, RemoteError, UsageError
from kvoffloadd.linux.sharedmem import create_memfd
from kvoffloadd.testing.process import ROOT
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from scripts.harness.gpu import GpuBuffer
from tests import softcuda
from tests.e2e import gpu_rank
from tests.e2e.daemons import Hold, gpu_mappings
from tests.e2e.gpu_rank import HOST, Where
from tests.e2e.rank import HYBRID, NAMESPACE, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]

MIB = 1 << 20
ONE, CHUNKS = Where(kind="one"), Where(kind="chunks")
CYCLES = 20
UNREGISTERED_PIECE_S = 0.2
"""How long a piece of the arena takes to pin, where that is slow."""
PAGE_GROUP = {"group": 0, "kind": "full", "tokens_per_key": 16, "refs": [{"tensor": 0, "offset": 0, "length": 4096}]}


def rank_of(daemon: Daemon, **options: Any) -> Rank:
    """Closed at the end."""
    found: Rank = daemon.welcome(Rank(daemon.socket, **options))
    return found


def roundtrip(rank: Rank, seed: int) -> None:
    """What it stores it loads."""
    keys = new_keys(np.random.default_rng([seed, 99]), 8)
    assert rank.store_keys(keys).outcome is Outcome.DONE
    assert rank.loads_right(keys)


# --- how long it is mapped -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [ONE, CHUNKS], ids=["one", "chunks"])
def test_unregister_waits_for_running_copies_and_unmaps(
    start_daemon: Start, hold: Hold, seed: int, where: Where
) -> None:
    daemon = start_daemon(faults=hold.fault)
    rank = rank_of(daemon, where=where)
    keys = new_keys(np.random.default_rng(seed), 4)
    call = threading.Thread(target=rank.client.unregister, args=(rank.registration,))
    with hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 4))})
        call.start()
        until(lambda: daemon.sessions()[0]["registrations"] == 0, "no new job can name it")
        assert daemon.status()["running"]["jobs"] == 1
        assert gpu_mappings(daemon) >= 1
    call.join(HANG_S)
    assert gpu_mappings(daemon) == 0
    assert rank.wait(job).outcome is Outcome.DONE


@pytest.mark.parametrize("kind", ["one", "each", "chunks"])
def test_sleep_and_wake(daemon: Daemon, seed: int, kind: str) -> None:
    """An engine that sleeps gives its memory back: unregistered, freed, made and registered again."""
    rank = rank_of(daemon, where=Where(kind=kind))
    roundtrip(rank, seed)
    gc.collect()  # what earlier tests had
    fds, live = daemon.open_fds(), gpu_rank.extras().counters()
    for cycle in range(CYCLES):
        rank.client.unregister(rank.registration)
        assert gpu_mappings(daemon) == 0
        rank.renew()
        if cycle % 5 == 0:
            roundtrip(rank, seed + cycle)
    roundtrip(rank, seed)
    now = gpu_rank.extras().counters()
    assert (now.live_allocations, now.live_mappings, now.live_reservations, now.live_registrations) == (
        live.live_allocations, live.live_mappings, live.live_reservations, live.live_registrations,
    )  # fmt: skip
    assert daemon.open_fds() <= fds
    assert daemon.gpus()[0]["mapped_bytes"] == rank.mapped_bytes


def test_a_close_that_takes_long_keeps_nobody_waiting(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon(driver={"faults": f"close_delay_ns={10**9}"})
    rank, other = rank_of(daemon, where=ONE), rank_of(daemon, where=HOST)
    call = threading.Thread(target=rank.client.unregister, args=(rank.registration,))
    began = time.monotonic()
    call.start()
    slowest = 0.0
    while call.is_alive():
        slowest = max(slowest, daemon.ping_s())
        roundtrip(other, seed)
    assert time.monotonic() - began >= 1.0
    assert slowest < 1.0  # not for as long as the call takes


def test_memory_that_is_registered_twice_goes_with_the_last(daemon: Daemon, seed: int) -> None:
    rank = rank_of(daemon, where=ONE)
    first, rank.registration = rank.registration, rank.client.register(rank.cache)
    assert gpu_mappings(daemon) == 1  # the driver maps it once
    rank.client.unregister(first)
    roundtrip(rank, seed)
    rank.client.unregister(rank.registration)
    assert gpu_mappings(daemon) == 0


@pytest.mark.parametrize("where", [ONE, CHUNKS], ids=["one", "chunks"])
def test_two_sessions_with_the_same_memory(daemon: Daemon, seed: int, where: Where) -> None:
    rank = rank_of(daemon, where=where)
    before = gpu_mappings(daemon)
    with Client(daemon.socket, namespace=NAMESPACE) as other:
        other.register(rank.cache)
        roundtrip(rank, seed)
    until(lambda: len(daemon.sessions()) == 1, "the other has left")
    roundtrip(rank, seed + 1)
    assert gpu_mappings(daemon) == before


def test_two_gpus_at_once(daemon: Daemon, seed: int) -> None:
    rng = np.random.default_rng(seed)
    here, there = rank_of(daemon, where=Where(gpu=0)), rank_of(daemon, where=Where(gpu=1))
    assert len(daemon.gpus()) == 2
    for one, other in ((here, there), (there, here)):
        keys = new_keys(rng, 32)
        assert one.store_keys(keys).outcome is Outcome.DONE
        assert other.loads_right(keys)
    jobs = [(rank, rank.begin_store({0: (new_keys(rng, 32), rank.blocks_of(0, 32, 32))})) for rank in (here, there)]
    assert [rank.wait(job).outcome for rank, job in jobs] == [Outcome.DONE] * 2


_THREE_THOUSAND = """
import sys
import numpy as np
from scripts.harness.gpu import Gpu, GpuBuffer
from kvoffloadd.client import Client, GpuTensor, Group, GroupKind, KvCache, NamespaceSpec, Ref

CHUNKS, CHUNK = 3000, 2 << 20
memory = GpuBuffer(Gpu(), CHUNKS * CHUNK, chunk_bytes=CHUNK)
# Block i ends 4095 bytes behind the beginning of chunk i: most of it lies in that chunk, one byte in the one before.
tensor = GpuTensor.adopt(memory.rows(CHUNK - 1, CHUNKS - 1, 4096, CHUNK))
cache = KvCache([tensor], [Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 4096),))])
rng = np.random.default_rng(0)
blocks = np.array([0, 1, 1499, 2047, 2998])
keys = rng.integers(0, 256, (5, 32), dtype=np.uint8)
pages = rng.integers(0, 256, (5, 4096), dtype=np.uint8)
with Client(sys.argv[1], namespace=NamespaceSpec(model="chunks"), deadline_s=40.0) as client:
    registration = client.register(cache)
    for block, page in zip(blocks.tolist(), pages):
        memory.upload(CHUNK - 1 + block * CHUNK, page)
    stored = client.wait(client.store(registration, {0: (keys, blocks)}), 30.0)
    loaded = client.wait(client.load(registration, {0: (keys, blocks[::-1].copy())}), 30.0)
    found = np.stack([memory.download(CHUNK - 1 + block * CHUNK, 4096) for block in blocks[::-1].tolist()])
    print(stored.outcome, loaded.outcome, np.array_equal(found, pages), sum(
        session["mapped_bytes"] for session in client.status()["sessions"]
    ))
    client.unregister(registration)
"""


def test_three_thousand_chunks(daemon: Daemon) -> None:
    """It runs in a separate process, which sees a larger GPU."""
    environment = {**os.environ, **softcuda.environment(memory_bytes=16 << 30), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _THREE_THOUSAND, str(daemon.socket)],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + daemon.log()
    assert done.stdout.split() == ["done", "done", "True", str(3000 * 2 * MIB)]
    assert gpu_mappings(daemon) == 0


# --- what is refused -----------------------------------------------------------------------------------------------


def test_memory_that_can_not_be_exported_names_the_setting(daemon: Daemon) -> None:
    memory = GpuBuffer(gpu_rank.gpu(), 2 * MIB, chunk_bytes=2 * MIB, handle_type=0)
    with pytest.raises(UsageError, match=r"expandable_segments:False.*sleep mode"):
        GpuTensor.adopt(memory.rows(0, 4, 64, 64))


@pytest.fixture
def memory() -> IpcMemory:
    """1 MiB, and what a worker announces of it."""
    buffer = GpuBuffer(gpu_rank.gpu(), MIB)
    found = gpu_allocation(buffer.address, MIB)
    assert isinstance(found, IpcMemory)
    _kept.append(buffer)
    return found


_kept: list[GpuBuffer] = []


def test_a_gpu_that_is_not_there(daemon: Daemon, memory: IpcMemory) -> None:
    peer = daemon.peer()
    peer.hello()
    refusal = peer.refused("bad_memory", "attach_ipc", device=os.urandom(16), handles=memory.handle)
    assert "sees no GPU with UUID" in refusal
    assert "MIG" in refusal


def test_memory_of_another_gpu(daemon: Daemon, memory: IpcMemory, seed: int) -> None:
    """The driver opens it all the same, and copies over the link between the two."""
    other = GpuBuffer(gpu_rank.gpu(1), MIB)
    found = gpu_allocation(other.address, MIB)
    assert isinstance(found, IpcMemory)
    peer = daemon.peer()
    peer.hello()
    assert "memory of GPU 1" in peer.refused("bad_memory", "attach_ipc", device=memory.uuid, handles=found.handle)
    assert gpu_mappings(daemon) == 0
    peer.ok("attach_ipc", device=found.uuid, handles=found.handle)
    assert gpu_mappings(daemon) == 1
    other.free()


@pytest.mark.parametrize(
    ("code", "handles"),
    [
        ("bad_memory", os.urandom(64)),
        ("bad_memory", bytes(64)),
        ("bad_message", os.urandom(63)),
        ("bad_memory", b"softcuda" + os.urandom(56)),
    ],
    ids=["random", "zeros", "short", "almost"],
)
def test_handles_that_are_garbage(start_daemon: Start, memory: IpcMemory, code: str, handles: bytes, seed: int) -> None:
    daemon = start_daemon(driver={"misuse": "error"})
    peer = daemon.peer()
    peer.hello()
    peer.refused(code, "attach_ipc", device=memory.uuid, handles=handles)
    # All of them or none.
    if code == "bad_memory":
        peer.refused(code, "attach_ipc", device=memory.uuid, handles=memory.handle + handles)
    assert gpu_mappings(daemon) == 0
    peer.ok("ping")
    roundtrip(rank_of(daemon), seed)


def test_descriptors_that_are_no_chunks(start_daemon: Start, memory: IpcMemory, seed: int) -> None:
    daemon = start_daemon(driver={"misuse": "error"})
    peer = daemon.peer()
    peer.hello()
    fd = create_memfd("no-chunk", 2 * MIB)
    size = np.array([2 * MIB], "<u8").tobytes()
    wanted = {"device": memory.uuid, "fds": 1, "chunks": size, "total_bytes": 2 * MIB}
    peer.refused("bad_memory", "attach_vmm", rights=[fd], **wanted)
    peer.refused("bad_memory", "attach_vmm", rights=[fd], **{**wanted, "total_bytes": 2 * MIB + 1})
    os.close(fd)
    roundtrip(rank_of(daemon), seed)


@pytest.mark.parametrize(
    "changes",
    [{"offset": 1}, {"num_blocks": 257}, {"stride_bytes": 4097}, {"offset": 2**47}, {"page_bytes": MIB + 1}],
)
def test_tensors_that_leave_their_memory(daemon: Daemon, memory: IpcMemory, changes: dict[str, int]) -> None:
    peer = daemon.peer()
    peer.hello()
    (number,) = peer.ok("attach_ipc", device=memory.uuid, handles=memory.handle)["allocations"]
    tensor = {"allocation": number, "offset": 0, "num_blocks": 256, "page_bytes": 4096, "stride_bytes": 4096}
    peer.refused("bad_extent", "register", tensors=[{**tensor, **changes}], groups=[PAGE_GROUP])
    peer.ok("register", tensors=[tensor], groups=[PAGE_GROUP])


def test_tensors_of_two_gpus_in_one_registration(daemon: Daemon) -> None:
    tensors = [GpuTensor.adopt(GpuBuffer(gpu_rank.gpu(ordinal), MIB).rows(0, 4, 4096, 4096)) for ordinal in range(2)]
    cache = KvCache(tensors, [Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, 64), Ref(1, 0, 64)))])
    with Client(daemon.socket, namespace=NAMESPACE) as client, pytest.raises(RemoteError, match="several devices"):
        client.register(cache)


def test_allocations_side_by_side_are_copied_apart(start_daemon: Start, seed: int) -> None:
    """The last block of one tensor and the first of the next are neighbours in the daemon and in the payload, too. No
    copy may take both: the driver knows each allocation alone.
    """
    daemon = start_daemon(driver={"faults": "packed"})
    size, page = 2 * MIB, 4096
    last = size // page - 1
    buffers = [GpuBuffer(gpu_rank.gpu(), size) for _ in range(2)]
    tensors = [GpuTensor.adopt(buffer.rows(0, last + 1, page, page)) for buffer in buffers]
    group = Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, page), Ref(1, 0, page)), blocks_per_key=2)
    rng = np.random.default_rng(seed)
    keys, ids = new_keys(rng, 2), np.array([[0, last], [last - 1, 1]])
    before = [rng.integers(0, 256, size, np.uint8) for _ in buffers]
    with Client(daemon.socket, namespace=NAMESPACE) as client:
        registration = client.register(KvCache(tensors, [group]))
        for buffer, content in zip(buffers, before, strict=True):
            buffer.upload(0, content)
        assert client.wait(client.store(registration, {0: (keys, ids)}), 20.0).outcome is Outcome.DONE
        for buffer in buffers:
            buffer.upload(0, np.zeros(size, np.uint8))
        assert client.wait(client.load(registration, {0: (keys, ids)}), 20.0).outcome is Outcome.DONE
        for buffer, content in zip(buffers, before, strict=True):
            found = buffer.download(0, size).reshape(-1, page)
            np.testing.assert_array_equal(found[ids.ravel()], content.reshape(-1, page)[ids.ravel()])


def test_a_daemon_that_does_without_cuda(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon("cuda.enabled=false")
    rank = rank_of(daemon, register=False)
    with pytest.raises(RemoteError, match=r"cuda\.enabled = false") as caught:
        rank.client.register(rank.cache)
    assert caught.value.code == "bad_memory"
    roundtrip(rank_of(daemon, where=HOST), seed)


# --- the arena that is pinned --------------------------------------------------------------------------------------


def test_pieces_below_the_drivers_limit(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon("cuda.pin_bytes=4MiB", driver={"register_max_bytes": 8 * MIB})
    rank = rank_of(daemon)
    daemon.await_pinned()
    roundtrip(rank, seed)


NOTHING = {"register_max_bytes": 1}
REFUSED = [NOTHING, {"faults": f"register_error_after={9 * MIB}"}, {"faults": "register_fails_every=3"}]


@pytest.mark.parametrize("kind", ["one", "each", "chunks"])
@pytest.mark.parametrize("refused", REFUSED, ids=["all", "behind the first", "each third"])
def test_what_can_not_be_pinned_is_copied_all_the_same(
    start_daemon: Start, seed: int, refused: dict[str, Any], kind: str
) -> None:
    """The reason stands once in the log, and in `status`. All of memory can be used."""
    daemon = start_daemon("cuda.pin_bytes=4MiB", driver=refused)
    rng = np.random.default_rng(seed)
    rank = rank_of(daemon, groups=HYBRID, where=Where("cuda", kind=kind), num_blocks=1024)
    until(lambda: "CUDA_ERROR_OUT_OF_MEMORY" in daemon.gpus()[0]["pinning_failure"], "it is told")
    for _ in range(3):
        keys = {one.group: (new_keys(rng, 300), rank.blocks_of(one.group, 0, 300)) for one in HYBRID}
        assert rank.store(keys).outcome is Outcome.DONE
        rank.wipe()
        assert rank.load(keys).outcome is Outcome.DONE
        assert [rank.wrong(group, *those) for group, those in keys.items()] == [0] * len(HYBRID)
    gpu = daemon.gpus()[0]
    assert gpu["unpinned_copies"] > 0
    assert gpu["pinned_bytes"] < 32 * MIB
    assert (gpu["pinned_bytes"] == 0) == (refused is NOTHING)
    assert len([line for line in daemon.log().splitlines() if "can't be pinned" in line]) == 1
    roundtrip(rank_of(daemon, groups=HYBRID, where=HOST), seed)


SLOWLY = {"register_ns_per_gib": round(UNREGISTERED_PIECE_S * 256 * 1e9)}


def test_jobs_do_not_wait_for_pinning(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon("cuda.pin_bytes=4MiB", driver=SLOWLY)
    rng, rank = np.random.default_rng(seed), rank_of(daemon, num_blocks=1024)
    for _ in range(6):  # all of memory
        keys = new_keys(rng, 1024)
        assert rank.store_keys(keys).outcome is Outcome.DONE
        assert rank.loads_right(keys)
    daemon.await_pinned()
    before = daemon.gpus()[0]["unpinned_copies"]
    assert rank.loads_right(keys)
    assert daemon.gpus()[0]["unpinned_copies"] == before


def test_after_a_warm_restart_hits_do_not_wait_for_pinning(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    """Nothing is ever pinned here, so that a load that waits for it waits for good."""
    daemon = start_daemon(f"memory.pool_file={tmp_path / 'pool'}", driver=NOTHING)
    keys = new_keys(np.random.default_rng(seed), 1024)
    rank = rank_of(daemon, num_blocks=1024)
    assert rank.store_keys(keys).outcome is Outcome.DONE
    daemon.leave_guests()
    assert daemon.stop() == 0
    daemon.start()
    again = rank_of(daemon, num_blocks=1024)
    assert again.loads_right(keys)
    assert daemon.gpus()[0]["pinned_bytes"] == 0


def test_pieces_that_hold_the_drivers_lock_let_others_in_between(start_daemon: Start, seed: int) -> None:
    """Page-locking does this: all of it takes longer than a call may, but no call waits for more
    than a piece or two.
    """
    pace = {**SLOWLY, "faults": "register_holds_lock"}
    daemon = start_daemon("cuda.pin_bytes=4MiB", f"cuda.stuck_s={4 * UNREGISTERED_PIECE_S}", driver=pace)
    rank, other = rank_of(daemon, where=ONE), rank_of(daemon, where=HOST)
    while daemon.gpus()[0]["pinned_bytes"] < 32 * MIB:
        roundtrip(rank, seed)
        roundtrip(other, seed + 1)
        rank.client.unregister(rank.registration)
        rank.renew()
        assert daemon.alive


@pytest.mark.parametrize("pace", [{"context_ns": 10**9, "context_bytes": 512 * MIB}, {"init_ns": 10**9}])
def test_a_driver_that_takes_long_to_begin_keeps_host_workers_from_nothing(
    start_daemon: Start, seed: int, pace: dict[str, int]
) -> None:
    daemon = start_daemon(driver=pace)
    other = rank_of(daemon, where=HOST)
    rank = rank_of(daemon, register=False)
    call = threading.Thread(target=lambda: setattr(rank, "registration", rank.client.register(rank.cache)))
    call.start()
    trips = 0
    while call.is_alive():
        roundtrip(other, seed)
        trips += 1
    assert trips > 1
    roundtrip(rank, seed)


@pytest.mark.parametrize("pace", [{"context_ns": 15 * 10**8}, {"init_ns": 15 * 10**8}])
def test_a_registration_waits_for_a_driver_that_takes_longer_than_other_calls_may(
    start_daemon: Start, seed: int, pace: dict[str, int]
) -> None:
    daemon = start_daemon(driver=pace)
    rank = rank_of(daemon, register=False, deadline_s=0.5)
    rank.registration = rank.client.register(rank.cache)
    rank.close()
    roundtrip(rank_of(daemon), seed)


def test_a_registration_in_shared_memory_waits_no_longer_than_told(start_daemon: Start) -> None:
    daemon = start_daemon()
    rank = rank_of(daemon, register=False, where=HOST, deadline_s=0.5)
    os.kill(daemon.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        with pytest.raises(DeadlineError):
            rank.client.register(rank.cache)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert time.monotonic() - began_s < GPU_OPEN_S
