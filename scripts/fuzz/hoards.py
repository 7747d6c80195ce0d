"""Attacks that take as much as the daemon gives, however short the time is, and keep it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

from kvoffloadd.testing.wait import HANG_S
from scripts.fuzz.enemy import PAGE, Attack, Enemy, RefusedError, memory, named
from scripts.harness.peer import RawPeer

MIB = 1 << 20
LABEL = "\N{PILE OF POO}" * 512
"""The longest, in 2 KiB."""
LABELS = ("revision", "dtype", "layout", "parallel", "salt")
SPARSE_BYTES = 1 << 30
HUGE_PAGE = 2 * MIB
FDS = 64
SCRAPERS = 80
"""More than the endpoint has places for."""
SCRAPE = b"GET /metrics HTTP/1.0\r\n\r\n"


def long_labels(enemy: Enemy) -> None:
    """Every session that its user may have, each in its own namespace with the longest names."""
    with suppress(RefusedError):
        while True:
            enemy.session(enemy.new_model() + LABEL[:400], **dict.fromkeys(LABELS, LABEL))
    enemy.hold()


def silent_scrapers(enemy: Enemy) -> None:
    """Connections at the metrics port that say nothing, or half of a request, and others that ask all the time."""
    address = ("127.0.0.1", enemy.target.metrics_port)
    silent: list[socket.socket] = []
    try:
        while enemy.goes_on:
            while len(silent) < SCRAPERS:
                silent.append(socket.create_connection(address, HANG_S))
                silent[-1].send(enemy.rng.choice((b"G", SCRAPE[:-1])))
            enemy.deeds.asked += 1
            with suppress(ConnectionError), socket.create_connection(address, HANG_S) as asking:
                asking.sendall(SCRAPE)
                while asking.recv(1 << 16):
                    pass
            for _ in range(4):
                silent.pop(enemy.rng.randrange(len(silent))).close()
    finally:
        for one in silent:
            one.close()


def page_tables(enemy: Enemy) -> None:
    """One sparse file, attached again and again; a byte of each 2 MiB is stored."""
    peer = enemy.session()
    fd = memory(SPARSE_BYTES)
    ref = {"tensor": 0, "offset": 0, "length": 1, "count": SPARSE_BYTES // HUGE_PAGE, "stride": HUGE_PAGE}
    group = {"group": 0, "kind": "full", "tokens_per_key": 16, "refs": [ref]}
    try:
        with suppress(RefusedError):
            while True:
                (allocation,) = enemy.attach(peer, [fd])
                tensor = {
                    "allocation": allocation, "offset": 0, "num_blocks": 1, "page_bytes": SPARSE_BYTES,
                    "stride_bytes": SPARSE_BYTES,
                }  # fmt: skip
                registered = enemy.must(peer, "register", tensors=[tensor], groups=[group])
                enemy.run(peer, "store", enemy.job(enemy.keys(1), registered["registration"], blocks=1))
    finally:
        os.close(fd)
    enemy.hold()


def mappings(enemy: Enemy) -> None:
    """Attaches as many small files as its user may attach, each with a page that is touched."""
    peer = enemy.session()
    fds = [memory(PAGE) for _ in range(FDS)]
    try:
        for fd in fds:
            os.pwrite(fd, b"touched", 0)
        with suppress(RefusedError):
            while True:
                for allocation in enemy.attach(peer, fds)[::16]:
                    registration = enemy.register_pages(peer, allocation, 1)
                    enemy.run(peer, "store", enemy.job(enemy.keys(1), registration, blocks=1))
    finally:
        for fd in fds:
            os.close(fd)
    enemy.hold()


def pins_of_everything(enemy: Enemy) -> None:
    """Leases on all that it has stored, until it gets no more; then loads and prefetches of the same."""
    peer, registration = enemy.worker(blocks=512)
    packed = enemy.keys(2048)
    enemy.run(peer, "store", enemy.job(packed, registration, blocks=512))
    with suppress(RefusedError):
        while enemy.must(peer, "pin", groups=named(packed))["lease"]:  # none: others have taken the room of all keys
            pass
    while enemy.goes_on:
        enemy.ask(peer, "prefetch", groups=named(packed))
        if enemy.ask(peer, "pin", groups=named(packed[: 32 * enemy.rng.randrange(1, 64)]))["type"] == "error":
            enemy.rest(0.01)


def reservations(enemy: Enemy) -> None:
    """Slots for keys that are never stored, until there is no room; then one by one, of what still comes free."""
    peer, _ = enemy.worker()
    with suppress(RefusedError):
        while True:
            reply = enemy.must(peer, "reserve", groups=named(enemy.keys(1024)))
            if 3 not in reply["states"][0]:  # no slot at all
                break
    while enemy.goes_on:
        reply = enemy.ask(peer, "reserve", groups=named(enemy.keys(1)))
        if reply["type"] == "error" or enemy.rng.random() < 0.01:
            enemy.rest(0.01)


def drains(enemy: Enemy) -> None:
    """Begins as many drains as its user may have, behind jobs whose signal never comes; half of the sessions leave in
    the midst.
    """
    peer, registration = enemy.worker()
    for _ in range(16):
        waits = enemy.job(enemy.keys(4), registration, deadline_s=2.0)
        enemy.must(peer, "store", **waits, ready={"signal": 0, "offset": 0, "value": 1})
    others = [enemy.session() for _ in range(5)]
    while enemy.goes_on:
        waiting = [(other, other.begin("drain", deadline_s=1.0)) for other in others for _ in range(64)]
        enemy.deeds.asked += len(waiting)
        gone = enemy.rng.sample(others, 2)
        for other in gone:
            enemy.end(other)
        for other, seq in waiting:
            if other not in gone:
                enemy.counted(other.answer(seq))
        others = [other for other in others if other not in gone] + [enemy.session() for _ in gone]


def mute_subscribers(enemy: Enemy) -> None:
    """Sessions that subscribe and never read, and two that store key after key for them."""
    model = enemy.new_model()
    writers = [enemy.worker(model) for _ in range(2)]
    with suppress(RefusedError):
        for _ in range(60):
            enemy.must(enemy.session(model, "observer"), "subscribe")
    while enemy.goes_on:
        for peer, registration in writers:
            jobs = [enemy.job(enemy.keys(1), registration) for _ in range(32)]
            granted = [enemy.ask(peer, "store", **job)["type"] == "accepted" for job in jobs]
            for job in (job for job, is_granted in zip(jobs, granted, strict=True) if is_granted):
                peer.completed(job["job"])


def unread_replies(enemy: Enemy) -> None:
    """Sessions that ask for much, and never read it."""
    peers = [enemy.session() for _ in range(24)]
    packed = enemy.keys(4096)
    tags = ("status", "lookup", "pin", "prefetch", "ping")
    while enemy.goes_on:
        for peer in peers:
            _ask_blindly(enemy, peer, enemy.rng.choice(tags), packed)
        enemy.rest(0.01)


def _ask_blindly(enemy: Enemy, peer: RawPeer, tag: str, packed: bytes) -> None:
    """What the kernel does not take any more stays unsent: the daemon reads no further either."""
    enemy.deeds.asked += 1
    peer.socket.settimeout(0.01)
    with suppress(TimeoutError):
        wanted: dict[str, Any] = {} if tag in ("status", "ping") else {"groups": named(packed)}
        peer.begin(tag, **wanted)
    peer.socket.settimeout(HANG_S)


def signals_that_never_come(enemy: Enemy) -> None:
    """Jobs that wait for theirs, as many as its user may have; each ends at its deadline, and once."""
    peer, registration = enemy.worker()
    while enemy.goes_on:
        begun = set()
        for _ in range(64):
            job = enemy.job(enemy.keys(2), registration, deadline_s=0.3)
            if enemy.ask(peer, "store", **job, ready={"signal": 0, "offset": 8, "value": 1})["type"] == "accepted":
                begun.add(job["job"])
        outcomes = {peer.completed(job)["outcome"] for job in begun}
        if not outcomes <= {"expired", "partial", "done"}:  # done: a job without a key to store
            enemy.problem(f"jobs whose signal never comes ended {outcomes}")


def slot_sizes(enemy: Enemy) -> None:
    """Payloads of as many sizes as there are slabs, so that each size wants one."""
    peer = enemy.session()
    sizes = [PAGE * enemy.rng.randrange(1, 64) for _ in range(64)]
    refs = [[{"tensor": 0, "offset": 0, "length": size}] for size in sizes]
    groups = [{"group": n, "kind": "full", "tokens_per_key": 16, "refs": ref} for n, ref in enumerate(refs)]
    fd = memory(MIB)
    (allocation,) = enemy.attach(peer, [fd])
    os.close(fd)
    tensor = {
        "allocation": allocation, "offset": 0, "num_blocks": 4, "page_bytes": 64 * PAGE, "stride_bytes": 64 * PAGE
    }  # fmt: skip
    registration = enemy.must(peer, "register", tensors=[tensor], groups=groups)["registration"]
    while enemy.goes_on:
        job = enemy.job(enemy.keys(4), registration, blocks=4)
        job["groups"][0]["group"] = enemy.rng.randrange(len(sizes))
        enemy.run(peer, "store", job)


HOARDS: tuple[Attack, ...] = (
    long_labels, silent_scrapers, page_tables, mappings, pins_of_everything, reservations, drains, mute_subscribers,
    unread_replies, signals_that_never_come, slot_sizes,
)  # fmt: skip
