"""Attacks by what peers do in the midst of something, over and over."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvoffloadd.testing.wait import HANG_S
from scripts.fuzz.enemy import PAGE, Attack, Enemy, RefusedError, become, memory, named, pages_of
from scripts.harness.peer import PREFIX, RawPeer, frame

KEYS = 16_384
"""Of one request, at the most."""
LARGEST = PREFIX.pack(4 << 20) + b"\x83"
"""The beginning of the largest frame."""
SMALL = PREFIX.pack(5000) + b"\x83"
DRIP_S = 0.02
BLOCKS = 64
AT_ONCE = 32
KEEP_SIZE_AND_PUNCH = 0x01 | 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def dripped_frames(enemy: Enemy) -> None:
    """Frames, large and small, that come a byte at a time: their sessions must end, however busy others are."""
    dripping = [enemy.session() for _ in range(16)]
    for number, peer in enumerate(dripping):
        enemy.push(peer, LARGEST if number % 2 else SMALL)
    limit = time.monotonic() + HANG_S
    while dripping and time.monotonic() < limit:
        for peer in list(dripping):
            if enemy.is_ended(peer) or not enemy.push(peer, b"\0"):
                dripping.remove(peer)
        time.sleep(DRIP_S)
    if dripping:
        enemy.problem(f"{len(dripping)} sessions drip a frame for {HANG_S:.0f} s, and have not ended")


def hung_in_a_frame(enemy: Enemy) -> None:
    """Subscribers that stop to read, and to write in the midst of the largest frame: others of their user go on."""
    model = enemy.new_model()
    peer, registration = enemy.worker(model, blocks=512, page_bytes=64)
    hung = [enemy.session(model, "observer") for _ in range(16)]
    for one in hung:
        enemy.must(one, "subscribe")
    while enemy.goes_on:
        enemy.run(peer, "store", enemy.job(enemy.keys(512), registration, blocks=512))
        for at, one in enumerate(hung):
            if not enemy.push(one, LARGEST if enemy.rng.random() < 0.1 else b"\0"):
                enemy.end(one)
                hung[at] = enemy.session(model, "observer")
                enemy.must(hung[at], "subscribe")
        enemy.ask(peer, "lookup", groups=named(enemy.keys(12_000)))


def descriptors_of_no_frame(enemy: Enemy) -> None:
    """Frames that bring descriptors and do not end, or bring others than they say; connections without a hello."""
    fds = [memory(PAGE) for _ in range(8)]
    try:
        while enemy.goes_on:
            peers = [enemy.session() for _ in range(8)]
            for peer in peers:
                attach = frame({"type": "attach", "seq": 7, "kind": "shm", "fds": enemy.rng.randrange(1, 9)})
                peer.send(attach[: enemy.rng.randrange(1, len(attach) + 1)], fds)
            silent = [enemy.connect() for _ in range(8)]
            for peer in silent:
                enemy.push(peer, LARGEST if enemy.rng.random() < 0.5 else PREFIX.pack(40))
            enemy.rest(0.1)
            for peer in (*peers, *silent):
                enemy.end(peer)
    finally:
        for fd in fds:
            os.close(fd)


def unknown_prefetches(enemy: Enemy) -> None:
    """Prefetches keys that no host has, four at a time: the store of all hosts is asked for each."""
    peer, _ = enemy.worker()
    while enemy.goes_on:
        begun = [peer.begin("prefetch", groups=named(enemy.keys(1024))) for _ in range(4)]
        enemy.deeds.asked += len(begun)
        due = 0
        for seq in begun:
            due += bool(enemy.counted(peer.answer(seq)).get("promoting"))
        while due:
            message = peer.pushes.pop(0) if peer.pushes else peer.receive()
            if message is None:
                enemy.problem("a session that prefetches was ended")
                return
            due -= message["type"] == "ready"


def prefetches_of_everything(enemy: Enemy) -> None:
    """More than memory holds is stored; then all of it is asked for, again and again."""
    peer, registration = enemy.worker(blocks=1024)
    lots = [enemy.keys(1024) for _ in range(24)]
    for packed in lots:
        if not enemy.goes_on:
            return
        enemy.run(peer, "store", enemy.job(packed, registration, blocks=1024))
    while enemy.goes_on:
        enemy.ask(peer, "prefetch", groups=named(enemy.rng.choice(lots)))
        with suppress(RefusedError):
            lease = enemy.must(peer, "pin", groups=named(enemy.rng.choice(lots)[: 32 * 64]))["lease"]
            if lease:
                enemy.must(peer, "release", lease=lease)
        peer.pushes.clear()
        if enemy.rng.random() < 0.3:
            job = enemy.job(enemy.rng.choice(lots), registration, blocks=1024)
            if (outcome := enemy.run(peer, "load", job)) not in ("done", "partial"):
                enemy.problem(f"a load of keys that may be on disk ended {outcome}")


def large_frames(enemy: Enemy) -> None:
    """Requests of as many keys as they may have: reservations, commits, loads, releases."""
    peer, registration = enemy.worker()
    while enemy.goes_on:
        packed = enemy.keys(KEYS)
        with suppress(RefusedError):
            lease = enemy.must(peer, "reserve", groups=named(packed))["lease"]
            enemy.run(peer, "store", enemy.job(packed, registration, lease=lease))
            enemy.must(peer, "release", lease=lease)
        with suppress(RefusedError):
            enemy.run(peer, "store", enemy.job(enemy.keys(KEYS), registration))
            lease = enemy.must(peer, "pin", groups=named(packed))["lease"]
            enemy.must(peer, "touch", groups=named(packed))
            enemy.must(peer, "keep", groups=named(packed), how=enemy.rng.choice(("soon", "drop")))
            enemy.must(peer, "release", lease=lease)


def holes(enemy: Enemy) -> None:
    """Memory whose pages go, and whose file grows, while it is copied to and from."""
    _copy_amid(enemy, fcntl.F_SEAL_SHRINK, _punch)


def truncated_files(enemy: Enemy) -> None:
    """Memory whose file is cut off while it is copied to and from, as the daemon's own user may."""
    enemy.be_trusted()
    _copy_amid(enemy, 0, lambda enemy, fd: os.truncate(fd, PAGE * enemy.rng.randrange(BLOCKS)))


def _copy_amid(enemy: Enemy, seals: int, damage: Callable[[Enemy, int], None]) -> None:
    """Each job ends, whatever becomes of its memory meanwhile."""
    peer = enemy.session()
    size = BLOCKS * PAGE
    fd = memory(size, seals)
    try:
        (allocation,) = enemy.attach(peer, [fd])
        registration = enemy.register_pages(peer, allocation, BLOCKS)
        while enemy.goes_on:
            packed = enemy.keys(BLOCKS)
            for tag in ("store", "load"):
                job = enemy.job(packed, registration)
                if enemy.ask(peer, tag, **job)["type"] == "error":
                    continue
                damage(enemy, fd)
                outcome = peer.completed(job["job"])["outcome"]
                if outcome not in ("done", "partial", "failed"):
                    enemy.problem(f"a {tag} amid damage to its memory ended {outcome}")
                os.truncate(fd, max(size, os.fstat(fd).st_size))
    finally:
        os.close(fd)


def _punch(enemy: Enemy, fd: int) -> None:
    if enemy.rng.random() < 0.2:
        os.truncate(fd, os.fstat(fd).st_size + PAGE)
    begin = PAGE * enemy.rng.randrange(BLOCKS)
    _libc.fallocate(fd, KEEP_SIZE_AND_PUNCH, begin, BLOCKS * PAGE - begin)
    os.pwrite(fd, enemy.rng.randbytes(PAGE), PAGE * enemy.rng.randrange(BLOCKS))


def refused_registers(enemy: Enemy) -> None:
    """Memory that was attached for registrations which are refused; some of it is detached, the rest kept."""
    peer = enemy.session()
    fds = [memory(BLOCKS * PAGE) for _ in range(8)]
    kept: list[int] = []
    try:
        while enemy.goes_on:
            if len(kept) > 256:
                enemy.must(peer, "detach", allocations=kept)
                kept.clear()
            allocations = enemy.attach(peer, fds)
            for allocation in allocations:
                if enemy.ask(peer, "register", **_wrong(enemy, allocation))["type"] != "error":
                    enemy.problem("a register that is wrong was granted")
            gone = enemy.rng.sample(allocations, 4)
            enemy.must(peer, "detach", allocations=gone)
            kept += [allocation for allocation in allocations if allocation not in gone]
    finally:
        for fd in fds:
            os.close(fd)


def _wrong(enemy: Enemy, allocation: int) -> dict[str, Any]:
    fields = pages_of(allocation, BLOCKS)
    tensor, group = fields["tensors"][0], fields["groups"][0]
    change = enemy.rng.randrange(4)
    if change == 0:
        tensor["num_blocks"] += 1
    elif change == 1:
        tensor["allocation"] += 1 << 40
    elif change == 2:
        group["refs"] *= 2  # which share their bytes
    else:
        fields["signals"] = [allocation + (1 << 40)]
    return fields


def detaches_in_the_midst(enemy: Enemy) -> None:
    """Registrations that end, and allocations that are let go, while jobs use them; sessions that end before it."""
    while enemy.goes_on:
        peer = enemy.session()
        registrations = [enemy.register(peer) for _ in range(4)]
        waits = [enemy.job(enemy.keys(16), one, deadline_s=0.5) for one in registrations]
        for job in waits:
            ready = {"signal": 0, "offset": 0, "value": 1} if enemy.rng.random() < 0.5 else None
            enemy.ask(peer, "store", **job, ready=ready)
        seqs = [peer.begin("unregister", registration=one) for one in (*registrations, registrations[0])]
        seqs += [peer.begin("detach", allocations=[number]) for number in range(1, 5)]
        enemy.deeds.asked += len(seqs)
        if enemy.rng.random() < 0.5:
            for seq in seqs:
                enemy.counted(peer.answer(seq))
        enemy.end(peer)


def killed_in_the_midst(enemy: Enemy) -> None:
    """Processes that die by SIGKILL with all that they have just asked for; some have left their socket to others."""
    while enemy.goes_on:
        with become:
            child = os.fork()
        if not child:
            try:
                enemy.be()
                _ask_for_all(enemy)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        enemy.deeds.asked += 4
        os.waitpid(child, 0)


def _ask_for_all(enemy: Enemy) -> None:
    """Runs in a child, which takes no lock that another thread may have held when it was forked."""
    rng = enemy.rng
    rng.seed(os.getpid())
    peer = RawPeer(enemy.target.socket, HANG_S)
    peer.hello(namespace={"model": enemy.new_model(), "key_bytes": 32})
    fd = memory(1 << 20)
    (allocation,) = peer.attach([fd])
    registered = peer.ok("register", **pages_of(allocation, 256), signals=[allocation])
    for tag in rng.sample(("reserve", "pin", "prefetch", "clear", "drain"), 3):
        wanted: dict[str, Any] = {} if tag in ("clear", "drain") else {"groups": named(enemy.keys(4096))}
        peer.begin(tag, **wanted)
    for ready in (None, {"signal": 0, "offset": 0, "value": 1}):
        peer.begin("store", **enemy.job(enemy.keys(4096), registered["registration"], blocks=256), ready=ready)
    peer.begin("load", **enemy.job(enemy.keys(4096), registered["registration"], blocks=256))
    if rng.random() < 0.5:
        peer.receive()


def forked_clients(enemy: Enemy) -> None:
    """A process and its child that write to the same session; one of them dies, and the other keeps the socket."""
    while enemy.goes_on:
        peer, registration = enemy.worker()
        data = frame({"type": "store", "seq": 99, **enemy.job(enemy.keys(64), registration)})
        with become:
            child = os.fork()
        if not child:
            try:
                for at in range(0, len(data), 97):
                    os.write(peer.fileno(), data[at : at + 97])
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        for at in range(0, len(data), 89):
            enemy.push(peer, data[at : at + 89])
        enemy.end(peer)
        os.waitpid(child, 0)


def comes_and_goes(enemy: Enemy) -> None:
    """Sessions that begin and end as fast as they may, in separate namespaces."""
    while enemy.goes_on:
        peers: list[RawPeer] = []
        with suppress(RefusedError):
            while len(peers) < AT_ONCE:
                peers.append(enemy.session())
        for peer in peers:
            if enemy.rng.random() < 0.5:
                peer.begin("bye")
            enemy.end(peer)
        if len(peers) < AT_ONCE:
            enemy.leave()
            enemy.rest(0.05)


def clears(enemy: Enemy) -> None:
    """A clear follows each store; most are not waited for."""
    peer, registration = enemy.worker()
    while enemy.goes_on:
        waiting = []
        for _ in range(8):
            enemy.must(peer, "store", **enemy.job(enemy.keys(64), registration))
            waiting.append(peer.begin("clear", token=enemy.rng.randbytes(16), wait_s=enemy.rng.choice((0.0, 0.1))))
        enemy.deeds.asked += len(waiting)
        for seq in waiting:
            enemy.counted(peer.answer(seq))
        peer.pushes.clear()


STRIKES: tuple[Attack, ...] = (
    dripped_frames, hung_in_a_frame, descriptors_of_no_frame, unknown_prefetches, prefetches_of_everything,
    large_frames, holes, truncated_files, refused_registers, detaches_in_the_midst, killed_in_the_midst,
    forked_clients, comes_and_goes, clears,
)  # fmt: skip
