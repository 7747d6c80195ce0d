"""The largest requests to daemons that are set up for them: with a disk, full, of many parts.

What comes before a case's `yield` is not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvoffloadd.testing.figures import keys_of
from scripts.extremes.scene import (
    GROUPS,
    KEYS,
    PAGE,
    REPLY_S,
    ExtremeCase,
    Scene,
    asks,
    group,
    held_in_groups,
    jobs_of,
    ready,
    register,
    run,
    shares,
    written,
)
from scripts.harness.peer import RawPeer

PARTS = 1024


# --- with a disk, on which all keys are and in whose memory the last ones are -----------------------------------------


def on_disk(scene: Scene) -> bytes:
    """Takes as many keys as a request may have that memory no longer holds; other cases take others."""
    begin = scene.taken
    scene.taken += KEYS
    return keys_of(np.arange(begin, begin + KEYS)).tobytes()


@asks("lookup", "16,384 keys in 256 groups, with a disk")
def lookup_of_held_keys_beside_a_disk(scene: Scene) -> Iterator[None]:
    peer, _, packed = held_in_groups(scene)
    written(peer)
    yield
    peer.ok("lookup", groups=shares(packed))


@asks("pin, release", "16,384 keys in 256 groups, with a disk")
def pin_of_held_keys_beside_a_disk(scene: Scene) -> Iterator[None]:
    peer, _, packed = held_in_groups(scene)
    written(peer)
    yield
    lease = peer.ok("pin", groups=shares(packed))["lease"]
    peer.ok("release", lease=lease)


@asks("lookup", "16,384 unknown keys in 256 groups, with a disk")
def lookup_of_unknown_keys_beside_a_disk(scene: Scene) -> Iterator[None]:
    peer, _, _ = held_in_groups(scene)
    unknown = [scene.keys(KEYS // GROUPS, new=True) for _ in range(GROUPS)]
    yield
    peer.ok("lookup", groups=shares(unknown))


@asks("lookup", "16,384 keys on disk")
def lookup_of_keys_on_disk(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    packed = on_disk(scene)
    scene.taken -= KEYS
    yield
    peer.ok("lookup", groups=[{"group": 0, "keys": packed}])


@asks("prefetch", "16,384 keys on disk")
def prefetch_of_keys_on_disk(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    packed = on_disk(scene)
    yield
    assert peer.ok("prefetch", groups=[{"group": 0, "keys": packed}])["promoting"]
    ready(peer)


@asks("pin, release", "16,384 keys on disk")
def pin_of_keys_on_disk(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    packed = on_disk(scene)
    yield
    lease = peer.ok("pin", groups=[{"group": 0, "keys": packed}])["lease"]
    ready(peer)
    peer.ok("release", lease=lease)


@asks("load", "16,384 keys on disk")
def load_of_keys_on_disk(scene: Scene) -> Iterator[None]:
    peer = scene.session()
    registration = register(peer, [(PAGE, KEYS)], [group(0, [(0, 0, PAGE, 1)])])
    packed = on_disk(scene)
    yield
    run(peer, "load", 1, registration, packed, np.arange(KEYS))


@asks("snapshot", "131,072 keys on disk")
def snapshot_beside_a_disk(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    cursor = 0
    while cursor := peer.ok("snapshot", group=0, cursor=cursor)["cursor"]:
        pass


@asks("clear", "256 groups, 16,384 keys on disk")
def clear_of_256_groups_beside_a_disk(scene: Scene) -> Iterator[None]:
    peer, _, _ = held_in_groups(scene)
    written(peer)
    yield
    peer.ok("clear")


@asks("clear", "131,072 keys on disk")
def clear_beside_a_disk(scene: Scene) -> Iterator[None]:
    """The last: nothing is held behind it."""
    peer, _ = scene.worker()
    yield
    peer.ok("clear")


DISK: tuple[ExtremeCase, ...] = (
    lookup_of_held_keys_beside_a_disk, pin_of_held_keys_beside_a_disk, lookup_of_unknown_keys_beside_a_disk,
    lookup_of_keys_on_disk, prefetch_of_keys_on_disk, pin_of_keys_on_disk, load_of_keys_on_disk,
    snapshot_beside_a_disk, clear_of_256_groups_beside_a_disk, clear_beside_a_disk,
)  # fmt: skip


# --- full: whatever comes has to evict --------------------------------------------------------------------------------


@asks("reserve, release", "16,384 keys, evicting others")
def reserve_with_eviction(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    yield
    lease = peer.ok("reserve", groups=[{"group": 0, "keys": scene.keys(KEYS, new=True)}])["lease"]
    peer.ok("release", lease=lease)


@asks("store", "16,384 keys, evicting others")
def store_with_eviction(scene: Scene) -> Iterator[None]:
    peer, registration = scene.worker()
    run(peer, "store", 1, registration, scene.keys(KEYS, new=True), np.zeros(KEYS))  # what was given back is taken
    keys = scene.keys(KEYS, new=True)
    yield
    run(peer, "store", 2, registration, keys, np.zeros(KEYS))


@asks("store", "16,384 keys in 256 groups, evicting others")
def store_with_eviction_in_256_groups(scene: Scene) -> Iterator[None]:
    peer, registration, _ = held_in_groups(scene)
    fresh = [scene.keys(KEYS // GROUPS, new=True) for _ in range(GROUPS)]
    yield
    run(peer, "store", 1, registration, b"", None, groups=jobs_of(fresh, np.arange(KEYS // GROUPS)))


@asks("reserve", "8 times 16,384 keys where 200,000 are leased")
def reserve_where_most_are_pinned(scene: Scene) -> Iterator[None]:
    peer, _ = scene.worker()
    for begin in range(0, scene.held, KEYS):
        keys = keys_of(np.arange(begin, min(begin + KEYS, scene.held))).tobytes()
        peer.ok("pin", groups=[{"group": 0, "keys": keys}])
    yield
    for _ in range(8):
        peer.ok("reserve", groups=[{"group": 0, "keys": scene.keys(KEYS, new=True)}])


@asks("store", "16,384 keys, evicting incomplete ones of 64 parts")
def store_over_incomplete_keys_of_many_parts(scene: Scene) -> Iterator[None]:
    """Memory is full of keys that have one part of many, so that each one's end frees one slot alone."""
    peer = scene.session(scene.new_model())
    parts = 64
    groups = [{**group(0, [(0, 0, PAGE, 1)]), "parts": parts, "part": part} for part in range(parts)]
    register(peer, [(PAGE, 1)], groups)
    one = [{**groups[0]}, {**group(1, [(0, 0, PAGE, 1)])}]
    registration = register(peer, [(PAGE, 1)], one)
    left, job = scene.held + KEYS, 0
    while left > 0:
        job, left = job + 1, left - KEYS // 4
        run(peer, "store", job, registration, scene.keys(KEYS // 4, new=True), np.zeros(KEYS // 4))
    keys = scene.keys(KEYS, new=True)
    yield
    run(peer, "store", job + 1, registration, keys, np.zeros(KEYS), group=1)


FULL: tuple[ExtremeCase, ...] = (
    reserve_with_eviction, store_with_eviction, store_with_eviction_in_256_groups, reserve_where_most_are_pinned,
    store_over_incomplete_keys_of_many_parts,
)  # fmt: skip


# --- groups of many parts ---------------------------------------------------------------------------------------------


def of_parts(scene: Scene, parts: int) -> RawPeer:
    """Opens a session whose namespace has a group 0 of `parts` parts, all of them registered."""
    peer = scene.session(scene.new_model())
    groups = [{**group(0, [(0, 0, 16, 1)]), "parts": parts, "part": part} for part in range(parts)]
    register(peer, [(16, KEYS)], groups)
    return peer


def most_reserved(scene: Scene, peer: RawPeer, **fields: Any) -> None:
    """Reserves as many keys as the daemon takes in one `reserve`, and gives them back."""
    for count in (KEYS >> halved for halved in range(KEYS.bit_length())):
        groups = [{"group": 0, "keys": scene.keys(count, new=True)}]
        reply = peer.ask("reserve", groups=groups, **fields)
        if reply["type"] == "reserved":
            peer.ok("release", lease=reply["lease"])
            return
    raise SystemExit("no reserve is small enough")


@asks("reserve, release", "the most keys of 1,024 parts")
def reserve_of_1024_parts(scene: Scene) -> Iterator[None]:
    peer = of_parts(scene, PARTS)
    yield
    most_reserved(scene, peer)


@asks("reserve, release", "the most keys of 8 parts")
def reserve_of_8_parts(scene: Scene) -> Iterator[None]:
    peer = of_parts(scene, 8)
    yield
    most_reserved(scene, peer)


@asks("reserve, release", "one part each of 16,384 keys of 1,024")
def reserve_of_one_part_of_1024(scene: Scene) -> Iterator[None]:
    peer = of_parts(scene, PARTS)
    yield
    most_reserved(scene, peer, parts=[0])


@asks("lookup", "incomplete keys of 1,024 parts")
def lookups_of_reserved_keys_of_1024_parts(scene: Scene) -> Iterator[None]:
    peer = of_parts(scene, PARTS)
    packed = b""
    while len(packed) < 32 * KEYS // 8:
        packed += (new_keys := scene.keys(128, new=True))
        peer.ok("reserve", groups=[{"group": 0, "keys": new_keys}], parts=[0])
    yield
    while packed:  # as many as it takes
        if peer.ask("lookup", groups=[{"group": 0, "keys": packed}])["type"] == "found":
            return
        packed = packed[: len(packed) // 64 * 32]


WIDE: tuple[ExtremeCase, ...] = (
    reserve_of_1024_parts, reserve_of_8_parts, reserve_of_one_part_of_1024, lookups_of_reserved_keys_of_1024_parts,
)  # fmt: skip


# --- loads are verified -----------------------------------------------------------------------------------------------


@asks("load", "16,384 keys, verified")
def verified_load(scene: Scene) -> Iterator[None]:
    peer = scene.session()
    registration = register(peer, [(PAGE, KEYS)], [group(0, [(0, 0, PAGE, 1)])])
    keys = scene.keys(KEYS)
    peer.ok("drain", deadline_s=REPLY_S)
    yield
    run(peer, "load", 1, registration, keys, np.arange(KEYS))


@asks("load", "16,384 keys in 256 groups, verified")
def verified_load_in_256_groups(scene: Scene) -> Iterator[None]:
    peer, registration, packed = held_in_groups(scene)
    peer.ok("drain", deadline_s=REPLY_S)
    yield
    run(peer, "load", 2, registration, b"", None, groups=jobs_of(packed, np.arange(KEYS // GROUPS)))


CAREFUL: tuple[ExtremeCase, ...] = (verified_load, verified_load_in_256_groups)
