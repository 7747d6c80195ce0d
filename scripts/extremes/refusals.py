"""Frames of about 4 MiB of every type, and requests that are refused late, when most of the work is done.

What comes before a case's `yield` is not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvoffloadd.device.plan import DESCRIPTORS_PER_KEY_MAX
from scripts.extremes.scene import (
    FRAME_IDS,
    KEYS,
    MIB,
    ExtremeCase,
    Scene,
    asks,
    completed,
    group,
    refused,
    register,
    run,
)

FRAME_BYTES = (4 << 20) - 4096
KEYED = ("lookup", "pin", "prefetch", "touch", "reserve")


@asks("lookup, pin, prefetch, touch, reserve", "4 MiB of keys, or 16,000 lists of none; refused")
def keys_of_4_mib(scene: Scene) -> Iterator[None]:
    """Far more than a request may have, in one group or in many."""
    peer, _ = scene.worker()
    packed = bytes(FRAME_BYTES // 32 * 32)
    yield
    for tag in KEYED:
        refused(peer, tag, groups=[{"group": 0, "keys": packed}])
        refused(peer, tag, groups=[{"group": 0, "keys": b""}] * 16_000)


@asks("store, load", "4 MiB of keys, or 16,000 lists of none; refused")
def jobs_of_4_mib(scene: Scene) -> Iterator[None]:
    peer, registration = scene.worker()
    groups = [{"group": 0, "keys": bytes(FRAME_BYTES // 36 * 32), "blocks": bytes(FRAME_BYTES // 36 * 4)}]
    empty = [{"group": 0, "keys": b"", "blocks": b""}] * 16_000
    yield
    for tag in ("store", "load"):
        refused(peer, tag, job=1, registration=registration, groups=groups)
        refused(peer, tag, job=1, registration=registration, groups=empty)


@asks("all others", "4 MiB of a field that there is not; refused")
def other_types_of_4_mib(scene: Scene) -> Iterator[None]:
    """Each type that has no list itself is sent with an unknown field that is too large."""
    peer, _ = scene.worker()
    stuffing = bytes(FRAME_BYTES)
    tags = ("ping", "attach", "attach_ipc", "attach_vmm", "detach", "unregister", "release", "cancel", "clear", "drain",
            "status", "verify", "subscribe", "snapshot", "hello", "bye")  # fmt: skip
    yield
    for tag in tags:
        refused(peer, tag, more=stuffing)
        refused(peer, tag, more=["ab"] * 16_000)


@asks("register", "16,000 tensors, 8,000 groups, 128,000 signals; refused")
def a_frame_of_the_most_items(scene: Scene) -> Iterator[None]:
    """Sends as many small maps and values as a frame may hold."""
    peer, _ = scene.worker()
    spec: dict[str, Any] = {"allocation": 9, "offset": 0, "num_blocks": 64, "page_bytes": 64, "stride_bytes": 64}
    wide = [[n] * 16_000 for n in range(8)]
    yield
    refused(peer, "register", tensors=[spec] * 16_000, groups=[])
    refused(peer, "register", tensors=[], groups=[group(n, []) for n in range(8000)])
    refused(peer, "register", tensors=[], groups=[], signals=wide)


@asks("reserve, store", "16,384 keys of which two are equal; refused")
def duplicates_at_the_end(scene: Scene) -> Iterator[None]:
    """The last key is the first one again; all others are legal."""
    peer, registration = scene.worker()
    packed = scene.keys(KEYS - 1, new=True)
    packed += packed[:32]
    blocks = np.zeros(KEYS, "<u4").tobytes()
    yield
    refused(peer, "reserve", groups=[{"group": 0, "keys": packed}])
    groups = [{"group": 0, "keys": packed, "blocks": blocks}]
    refused(peer, "store", job=1, registration=registration, groups=groups)


@asks("load", "245,760 blocks of which two are equal; refused")
def a_block_twice_among_a_million(scene: Scene) -> Iterator[None]:
    peer = scene.session(scene.new_model())
    per_key = FRAME_IDS // KEYS
    registration = register(peer, [(8, FRAME_IDS)], [group(0, [(0, 0, 8, 1)], per_key)])
    keys, ids = scene.keys(KEYS, new=True), np.arange(FRAME_IDS)
    run(peer, "store", 1, registration, keys[: 32 * 4096], ids[: 4096 * per_key])
    ids[4096 * per_key - 1] = 0
    groups = [{"group": 0, "keys": keys[: 32 * 4096], "blocks": ids[: 4096 * per_key].astype("<u4").tobytes()}]
    yield
    refused(peer, "load", job=2, registration=registration, groups=groups)


@asks("load", "65,536 runs that overlap; refused")
def destinations_that_overlap(scene: Scene) -> Iterator[None]:
    """Two groups of the same bytes: only descriptors show it, as many as are compared at most."""
    peer = scene.session(scene.new_model())
    runs = 1 << 11
    both = [group(n, [(0, n, 1, runs)]) for n in range(2)]
    registration = register(peer, [(2 * runs + 8, 64)], both)
    keys = scene.keys(16, new=True)
    ids = np.arange(16)
    for number in range(2):
        run(peer, "store", number + 1, registration, keys, ids, group=number)
    blocks = ids.astype("<u4").tobytes()
    groups = [{"group": number, "keys": keys, "blocks": blocks} for number in range(2)]
    yield
    peer.ask("load", job=9, registration=registration, groups=groups)
    completed(peer)


@asks("register", "refs of 2^20 runs of which two overlap; refused")
def refs_that_overlap_at_the_end(scene: Scene) -> Iterator[None]:
    """A registration has as many runs as a key may have, and the last two share a byte."""
    peer = scene.session(scene.new_model())
    half = DESCRIPTORS_PER_KEY_MAX // 2
    overlapping = group(0, [])
    overlapping["refs"] = [
        {"tensor": 0, "offset": 0, "length": 1, "count": half, "stride": 2},
        {"tensor": 0, "offset": 1, "length": 1, "count": half - 1, "stride": 2},
        {"tensor": 0, "offset": 2 * half - 2, "length": 1},
    ]
    good = group(1, [(0, 0, 1, half)])
    first = register(peer, [(2 * MIB, 2)], [good])
    allocation = 1
    tensor = {"allocation": allocation, "offset": 0, "num_blocks": 2, "page_bytes": 2 * MIB, "stride_bytes": 2 * MIB}
    yield
    refused(peer, "register", tensors=[tensor], groups=[overlapping])
    peer.ok("unregister", registration=first)


@asks("load", "1,000 of 4 keys at once")
def jobs_in_flocks(scene: Scene) -> Iterator[None]:
    """Small requests of one session, as many as it may send at once."""
    peer, registration = scene.worker()
    packed = scene.keys(4)
    blocks = np.arange(4, dtype="<u4").tobytes()
    yield
    for job in range(1000):
        groups = [{"group": 0, "keys": packed, "blocks": blocks}]
        peer.begin("load", job=job, registration=registration, groups=groups)
    completed(peer, 1000)


REFUSALS: tuple[ExtremeCase, ...] = (
    keys_of_4_mib, jobs_of_4_mib, other_types_of_4_mib, a_frame_of_the_most_items, duplicates_at_the_end,
    a_block_twice_among_a_million, destinations_that_overlap, refs_that_overlap_at_the_end, jobs_in_flocks,
)  # fmt: skip
