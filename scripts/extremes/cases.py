"""The largest requests to a daemon with a memory tier alone. What comes before a case's `yield` is not measured."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvoffloadd.cache.memory.retention import CLAIMS_PER_USER
from kvoffloadd.device.plan import DESCRIPTORS_PER_KEY_MAX
from scripts.extremes.scene import (
    FRAME_IDS,
    GROUPS,
    KEYS,
    LAYERS,
    MIB,
    PAGE,
    WAITING_JOBS,
    ExtremeCase,
    Scene,
    asks,
    completed,
    group,
    held_in_groups,
    jobs_of,
    register,
    run,
    shares,
)
from scripts.harness.peer import RawPeer

CLAIMS_S = 20.0
DRAINS = 256
"""Of one user, that may wait."""


@asks("lookup", "16,384 keys")
def lookup_of_held_keys(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    peer.ok("lookup", groups=[{"group": 0, "keys": scene.keys(KEYS)}])


@asks("lookup", "16,384 unknown keys")
def lookup_of_unknown_keys(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    peer.ok("lookup", groups=[{"group": 0, "keys": scene.keys(KEYS, new=True)}])


@asks("lookup", "16,384 keys in 256 groups")
def lookup_in_256_groups(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    peer.ok("register", tensors=[], groups=[group(n, []) for n in range(GROUPS)])
    keys = [scene.keys(KEYS // GROUPS) for _ in range(GROUPS)]
    yield
    peer.ok("lookup", groups=shares(keys))


@asks("pin, release", "16,384 keys in 256 groups")
def pin_of_held_keys_in_256_groups(scene: Scene) -> Iterator[None]:
    peer, _, packed = held_in_groups(scene)
    yield
    lease = peer.ok("pin", groups=shares(packed))["lease"]
    peer.ok("release", lease=lease)


@asks("touch", "16,384 keys in 256 groups")
def touch_in_256_groups(scene: Scene) -> Iterator[None]:
    peer, _, packed = held_in_groups(scene)
    yield
    peer.ok("touch", groups=shares(packed))


@asks("pin, release", "16,384 keys")
def pin_and_release(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    lease = peer.ok("pin", groups=[{"group": 0, "keys": scene.keys(KEYS)}])["lease"]
    peer.ok("release", lease=lease)


@asks("touch", "16,384 keys")
def touch(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    peer.ok("touch", groups=[{"group": 0, "keys": scene.keys(KEYS)}])


@asks("keep", "16,384 keys")
def keep(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    peer.ok("keep", groups=[{"group": 0, "keys": scene.keys(KEYS)}], how="drop")


@asks("delete", "1,024 keys")
def delete(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    peer.ok("delete", groups=[{"group": 0, "keys": scene.keys(1024)}], wait_s=0.0)


@asks("delete", "1,024 keys in 64 groups")
def delete_in_64_groups(scene: Scene) -> Iterator[None]:
    peer, _, packed = held_in_groups(scene)
    yield
    groups = [{**one, "keys": one["keys"][: 16 * 32]} for one in shares(packed)[:64]]
    peer.ok("delete", groups=groups, wait_s=0.0)


@asks("retain, forget", "16,384 keys")
def retain_and_forget(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    peer.ok("retain", groups=[{"group": 0, "keys": scene.keys(KEYS)}], seconds=60.0, name="a")
    peer.ok("retain", groups=[], seconds=30.0, name="a", priority=9)
    peer.ok("forget", name="a")


@asks("retain, forget", "16,384 keys in 256 groups")
def retain_in_256_groups(scene: Scene) -> Iterator[None]:
    peer, _, packed = held_in_groups(scene)
    yield
    peer.ok("retain", groups=shares(packed), seconds=60.0, name="b")
    peer.ok("forget", name="b")


@asks("prefetch_claims", "16,384 keys in 256 groups")
def prefetch_in_256_groups(scene: Scene) -> Iterator[None]:
    peer, _, packed = held_in_groups(scene)
    peer.ok("retain", groups=shares(packed), seconds=60.0, name="c")
    yield
    peer.ok("prefetch_claims", name="c")
    peer.ok("forget", name="c")


@asks("retain", "16 claims of the same 16,384 keys, and the next one, for which the first lapses")
def large_claims(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    groups = [{"group": 0, "keys": scene.keys(KEYS)}]
    for number in range(16):
        peer.ok("retain", groups=groups, seconds=60.0, name=f"large {number}", priority=number)
    yield
    peer.ok("retain", groups=groups, seconds=60.0, name="large 16", priority=99)
    peer.ok("retain", groups=[], seconds=60.0, name="large 16", priority=1)
    for number in range(1, 17):
        peer.ok("forget", name=f"large {number}")


@asks("retain, claims", "1,023 claims of the same 255 keys, and one of another priority")
def many_claims(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    groups = [{"group": 0, "keys": scene.keys(255)}]
    for number in range(CLAIMS_PER_USER - 1):
        peer.ok("retain", groups=groups, seconds=60.0, name=f"claim {number}")
    yield
    peer.ok("retain", groups=groups, seconds=60.0, name="high", priority=99)
    peer.ok("retain", groups=[], seconds=60.0, name="high", priority=1)
    listed, cursor = 0, 0
    while cursor or not listed:
        answer = peer.ok("claims", cursor=cursor)
        listed, cursor = listed + len(answer["claims"]), answer["cursor"]
    peer.ok("forget", name="high")
    for number in range(CLAIMS_PER_USER - 1):
        peer.ok("forget", name=f"claim {number}")


@asks("retain", "1,024 claims end at once")
def claims_end(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    keys, end = scene.keys(KEYS), time.monotonic() + CLAIMS_S
    for number in range(CLAIMS_PER_USER):
        claimed = [{"group": 0, "keys": keys[number * 32 : (number + 255) * 32]}]
        peer.ok("retain", groups=claimed, seconds=max(0.1, end - time.monotonic()))
    yield
    while peer.ok("status")["status"]["retention"]["claims"]:
        time.sleep(0.05)


@asks("reserve, release", "16,384 keys")
def reserve_and_release(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    lease = peer.ok("reserve", groups=[{"group": 0, "keys": scene.keys(KEYS, new=True)}])["lease"]
    peer.ok("release", lease=lease)


@asks("store", "16,384 keys")
def store_and_load(scene: Scene) -> Iterator[None]:
    peer, registration = scene.worker()
    keys, ids = scene.keys(KEYS, new=True), np.zeros(KEYS)
    yield
    run(peer, "store", 1, registration, keys, ids)


@asks("store, load", "16,384 keys of 160 layers")
def store_and_load_of_160_layers(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    registration = register(peer, [(16, KEYS)] * LAYERS, [group(0, [(n, 0, 16, 1) for n in range(LAYERS)])])
    keys, ids = scene.keys(KEYS, new=True), scene.rng.permutation(KEYS)
    yield
    run(peer, "store", 1, registration, keys, ids)
    run(peer, "load", 2, registration, keys, ids[::-1])


@asks("store, load", "245,760 blocks")
def jobs_of_a_million_block_ids(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    per_key = FRAME_IDS // KEYS
    registration = register(peer, [(8, FRAME_IDS)], [group(0, [(0, 0, 8, 1)], per_key)])
    keys, ids = scene.keys(KEYS // 4, new=True), scene.rng.permutation(FRAME_IDS)[: FRAME_IDS // 4]
    yield
    run(peer, "store", 1, registration, keys, ids)
    run(peer, "load", 2, registration, keys, ids[::-1])


@asks("store, load", "2^22 runs")
def jobs_of_four_million_runs(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    registration = register(peer, [(MIB, 8)], [group(0, [(0, 0, 1, 1 << 19)])])
    keys = scene.keys(8, new=True)
    yield
    run(peer, "store", 1, registration, keys, np.arange(8))
    run(peer, "load", 2, registration, keys, np.arange(8))


@asks("store, load", "4,096 keys in 64 groups")
def jobs_of_64_groups(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    registration = register(peer, [(PAGE, 256)], [group(n, [(0, 16 * n, 16, 1)]) for n in range(64)])
    groups = jobs_of([scene.keys(KEYS // 256, new=True) for _ in range(64)], np.arange(KEYS // 256))
    yield
    run(peer, "store", 1, registration, b"", None, groups=groups)
    run(peer, "load", 2, registration, b"", None, groups=groups)


def waiting(scene: Scene) -> tuple[RawPeer, Callable[[], None]]:
    """Jobs that wait for a signal, and what raises it."""
    peer = scene.session()
    fds = [os.memfd_create("extremes") for _ in range(2)]
    for fd in fds:
        os.ftruncate(fd, 64 * PAGE)
    memory, word = peer.attach(fds)
    tensor = {"allocation": memory, "offset": 0, "num_blocks": 64, "page_bytes": PAGE, "stride_bytes": PAGE}
    made = peer.ok("register", tensors=[tensor], groups=[group(0, [(0, 0, PAGE, 1)])], signals=[word])
    for job in range(WAITING_JOBS):
        groups = [{"group": 0, "keys": scene.keys(16), "blocks": struct.pack("<16I", *range(16))}]
        ready = {"signal": 0, "offset": 0, "value": 1}
        peer.ok("load", job=job, registration=made["registration"], groups=groups, ready=ready, deadline_s=600.0)

    def raise_signal() -> None:
        os.pwrite(fds[1], b"\1", 0)

    return peer, raise_signal


@asks("store, load", "16,384 keys in 256 groups")
def jobs_of_256_groups(scene: Scene) -> Iterator[None]:
    peer, registration, packed = held_in_groups(scene)
    fresh = [scene.keys(KEYS // GROUPS, new=True) for _ in range(GROUPS)]
    yield
    run(peer, "store", 1, registration, b"", None, groups=jobs_of(fresh, np.arange(KEYS // GROUPS)))
    run(peer, "load", 2, registration, b"", None, groups=jobs_of(packed, np.arange(KEYS // GROUPS)))


@asks("reserve, release", "16,384 keys in 256 groups")
def reserve_in_256_groups(scene: Scene) -> Iterator[None]:
    peer, _, _ = held_in_groups(scene)
    fresh = [scene.keys(KEYS // GROUPS, new=True) for _ in range(GROUPS)]
    yield
    lease = peer.ok("reserve", groups=shares(fresh))["lease"]
    peer.ok("release", lease=lease)


@asks("clear", "256 groups, 16,384 keys")
def clear_of_256_groups(scene: Scene) -> Iterator[None]:
    peer, _, _ = held_in_groups(scene)
    yield
    peer.ok("clear")


@asks("cancel", "16 loads of 16,384 keys of 160 layers")
def cancel_of_big_jobs(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    registration = register(peer, [(16, KEYS)] * LAYERS, [group(0, [(n, 0, 16, 1) for n in range(LAYERS)])])
    keys, ids = scene.keys(KEYS, new=True), scene.rng.permutation(KEYS)
    groups = [{"group": 0, "keys": keys, "blocks": ids.astype("<u4").tobytes()}]
    run(peer, "store", 1, registration, b"", None, groups=groups)
    for job in range(2, 18):
        peer.ok("load", job=job, registration=registration, groups=groups)
    yield
    for job in range(17, 1, -1):
        peer.begin("cancel", job=job)
    completed(peer, 16)


@asks("cancel", "a store of 16,384 keys of 160 layers")
def cancel_of_a_big_store(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    registration = register(peer, [(16, KEYS)] * LAYERS, [group(0, [(n, 0, 16, 1) for n in range(LAYERS)])])
    keys, ids = scene.keys(KEYS, new=True), scene.rng.permutation(KEYS)
    groups = [{"group": 0, "keys": keys, "blocks": ids.astype("<u4").tobytes()}]
    yield
    peer.ok("store", job=1, registration=registration, groups=groups)
    peer.begin("cancel", job=1)
    completed(peer)


@asks("end of a session", "30,000 leases")
def a_session_with_30000_pins_ends(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    packed = scene.keys(KEYS)
    for at in range(30_000):
        peer.ok("pin", groups=[{"group": 0, "keys": packed[32 * (at % KEYS) :][:32]}])
    yield
    peer.close()
    time.sleep(0.5)


@asks("a signal", "1,000 loads wait for it")
def a_thousand_jobs_begin_at_once(scene: Scene) -> Iterator[None]:
    peer, raise_signal = waiting(scene)
    yield
    raise_signal()
    completed(peer, WAITING_JOBS)


@asks("end of a session", "1,000 jobs")
def a_session_with_a_thousand_jobs_ends(scene: Scene) -> Iterator[None]:
    peer, _ = waiting(scene)
    yield
    peer.close()


@asks("drain", "64 of one session, 1,000 jobs")
def drains_of_a_thousand_jobs(scene: Scene) -> Iterator[None]:
    peer, raise_signal = waiting(scene)
    yield
    for _seq in range(2, 66):
        peer.begin("drain", deadline_s=60.0)
    raise_signal()
    completed(peer, WAITING_JOBS)


@asks("drain", "256 of 256 sessions, 1,000 jobs")
def drains_of_many_sessions(scene: Scene) -> Iterator[None]:
    """Begins as many drains as a user may have."""
    peer, raise_signal = waiting(scene)
    peers = [scene.session() for _ in range(DRAINS // 64)]
    yield
    for one in peers:
        for _seq in range(2, 66):
            one.begin("drain", deadline_s=60.0)
    raise_signal()
    completed(peer, WAITING_JOBS)
    for one in peers:
        for _ in range(64):
            one.receive()


@asks("status", "1,000 jobs")
def status_of_a_thousand_jobs(scene: Scene) -> Iterator[None]:
    peer, _ = waiting(scene)
    yield
    peer.ok("status")


@asks("attach", "64 descriptors")
def attach_64(scene: Scene) -> Iterator[None]:
    peer = scene.session()
    fds = [os.memfd_create("extremes") for _ in range(64)]
    for fd in fds:
        os.ftruncate(fd, MIB)
    yield
    peer.attach(fds)
    for fd in fds:
        os.close(fd)


@asks("attach", "64 times 64 descriptors")
def attach_64_times_64(scene: Scene) -> Iterator[None]:
    peer = scene.session()
    fds = [os.memfd_create("extremes") for _ in range(64)]
    for fd in fds:
        os.ftruncate(fd, MIB)
    yield
    for _seq in range(1, 65):
        peer.begin("attach", rights=fds, kind="shm", fds=64)
    for _ in range(64):
        peer.reply()
    for fd in fds:
        os.close(fd)


@asks("register", "256 groups")
def register_256_groups(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    yield
    peer.ok("register", tensors=[], groups=[group(n, []) for n in range(256)])


@asks("register", "2,048 tensors")
def register_2048_tensors(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    yield
    register(peer, [(64, 64)] * 2048, [group(0, [(n, 0, 64, 1) for n in range(2048)])])


@asks("register", "2^20 runs")
def register_the_most_runs(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    yield
    register(peer, [(2 * MIB, 2)], [group(0, [(0, 0, 1, DESCRIPTORS_PER_KEY_MAX - 1)])])


@asks("register", "2^20 runs between each other's")
def register_interleaved_refs(scene: Scene) -> Iterator[None]:
    """Refs of one tensor whose runs lie between each other's, so that all runs have to be compared."""
    peer = scene.session(scene.new_model())
    count = DESCRIPTORS_PER_KEY_MAX // 64
    interleaved = group(0, [])
    interleaved["refs"] = [{"tensor": 0, "offset": n, "length": 1, "count": count, "stride": 64} for n in range(64)]
    yield
    register(peer, [(2 * MIB, 2)], [interleaved])


@asks("register", "15,360 refs in 256 groups")
def register_the_most_refs(scene: Scene) -> Iterator[None]:
    """Registers as many refs as a frame has maps for, in 256 groups that lie in each other's tensors."""
    peer = scene.session(scene.new_model())
    per_group = 60
    groups = [group(n, [(0, 64 * (per_group * n + r), 64, 1) for r in range(per_group)]) for n in range(GROUPS)]
    yield
    register(peer, [(MIB, 2)], groups)


@asks("register", "2,048 tensors of the same bytes")
def register_overlapping_tensors(scene: Scene) -> Iterator[None]:
    """2,000 groups' worth of tensors with the same bytes: all lie in one piece."""
    peer = scene.session(scene.new_model())
    fd = os.memfd_create("extremes")
    os.ftruncate(fd, MIB)
    (allocation,) = peer.attach([fd])
    os.close(fd)
    tensors = [
        {"allocation": allocation, "offset": n, "num_blocks": 64, "page_bytes": 4096, "stride_bytes": 4096 + n}
        for n in range(2048)
    ]
    groups = [group(n, [(8 * n + r, 0, 64, 1) for r in range(8)]) for n in range(GROUPS)]
    yield
    peer.ok("register", tensors=tensors, groups=groups)


@asks("register", "8,192 tensors, 8,000 refs")
def register_8192_tensors(scene: Scene) -> Iterator[None]:
    """`limits.tensors_per_registration`."""
    peer = scene.session(scene.new_model())
    yield
    register(peer, [(64, 2)] * 8192, [group(0, [(n, 0, 64, 1) for n in range(8000)])])


@asks("ping", "1,000 at once")
def pings(scene: Scene) -> Iterator[None]:
    peer = scene.session()
    yield
    for _ in range(1000):
        peer.begin("ping")
    for _ in range(1000):
        peer.reply()


@asks("detach", "4,096 allocations")
def detach_4096(scene: Scene) -> Iterator[None]:
    peer = scene.session()
    fd = os.memfd_create("extremes")
    os.ftruncate(fd, MIB)
    allocations = [number for _ in range(64) for number in peer.attach([fd] * 64)]
    os.close(fd)
    yield
    peer.ok("detach", allocations=allocations)


@asks("unregister", "8,192 tensors, 8,000 refs")
def unregister_8192_tensors(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    registration = register(peer, [(64, 2)] * 8192, [group(0, [(n, 0, 64, 1) for n in range(8000)])])
    yield
    peer.ok("unregister", registration=registration)


@asks("snapshot", "all 200,000 keys of a group")
def snapshot(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    cursor = 0
    while True:
        cursor = peer.ok("snapshot", group=0, cursor=cursor)["cursor"]
        if not cursor:
            return


@asks("status", "200 sessions")
def status(scene: Scene) -> Iterator[None]:
    peers = [scene.session() for _ in range(200)]
    yield
    peers[0].ok("status")


@asks("verify", "payloads of 200,000 keys")
def verify(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    peer.ok("verify", payloads=True)


@asks("subscribe, clear", "all 200,000 keys")
def subscribe_and_clear(scene: Scene) -> Iterator[None]:
    """The last: nothing is held behind it."""
    peer, _ = scene.worker()
    peer.ok("subscribe")
    yield
    peer.ok("clear")


CASES: tuple[ExtremeCase, ...] = (
    lookup_of_held_keys, lookup_of_unknown_keys, lookup_in_256_groups, pin_of_held_keys_in_256_groups,
    touch_in_256_groups, pin_and_release, touch, keep, retain_and_forget, retain_in_256_groups,
    prefetch_in_256_groups, large_claims,
    many_claims, claims_end, delete, delete_in_64_groups,
    reserve_and_release, store_and_load, store_and_load_of_160_layers,
    jobs_of_a_million_block_ids, jobs_of_four_million_runs, jobs_of_64_groups,
    jobs_of_256_groups, reserve_in_256_groups, clear_of_256_groups, cancel_of_big_jobs, cancel_of_a_big_store,
    a_session_with_30000_pins_ends, a_thousand_jobs_begin_at_once, a_session_with_a_thousand_jobs_ends,
    drains_of_a_thousand_jobs, drains_of_many_sessions, status_of_a_thousand_jobs, attach_64, attach_64_times_64,
    register_256_groups, register_2048_tensors, register_the_most_runs, register_interleaved_refs,
    register_the_most_refs, register_overlapping_tensors, register_8192_tensors, unregister_8192_tensors,
    detach_4096, pings, snapshot, status, verify, subscribe_and_clear,
)  # fmt: skip
