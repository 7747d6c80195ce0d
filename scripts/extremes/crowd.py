"""The largest requests to a daemon that has as many namespaces as one user may fill, and thousands of sessions.

What comes before a case's `yield` is not measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scripts.extremes.scene import GROUPS, KEYS, PAGE, ExtremeCase, Scene, asks, group, jobs_of, register, run
from scripts.harness.metrics import Scraped

NAMESPACES = 1900
"""Of one group each; a user may have 2,048."""
CROWD = 2000
FLOCK = 200
"""Sessions that come or go at once."""


def crowded(scene: Scene) -> None:
    """Adds namespaces up to the most that there may be, with a key each and no session."""
    add_namespaces(scene, NAMESPACES - scene.models)


def add_namespaces(scene: Scene, count: int) -> None:
    """Adds namespaces with a key each and no session."""
    for _ in range(count):
        peer = scene.session(scene.new_model())
        registration = register(peer, [(PAGE, 1)], [group(0, [(0, 0, PAGE, 1)])])
        run(peer, "store", 1, registration, scene.keys(1, new=True), np.zeros(1))
        scene.leave(peer)


@asks("hello", f"{FLOCK} sessions come beside {NAMESPACES:,} namespaces")
def hellos_beside_a_crowd(scene: Scene) -> Iterator[None]:
    crowded(scene)
    models = [scene.new_model() for _ in range(FLOCK)]
    yield
    for model in models:
        scene.session(model)


@asks("bye", f"{FLOCK} sessions go beside {NAMESPACES:,} namespaces")
def byes_beside_a_crowd(scene: Scene) -> Iterator[None]:
    crowded(scene)
    peers = [scene.session(scene.new_model()) for _ in range(FLOCK)]
    yield
    for peer in peers:
        peer.begin("bye")
    for peer in peers:
        peer.reply()


@asks("end of a session", f"{FLOCK} sessions break off beside {NAMESPACES:,} namespaces")
def ends_beside_a_crowd(scene: Scene) -> Iterator[None]:
    crowded(scene)
    peers = [scene.session(scene.new_model()) for _ in range(FLOCK)]
    yield
    for peer in peers:
        scene.leave(peer)


@asks("register, store", f"a group and its first key beside {NAMESPACES:,} namespaces")
def first_store_beside_a_crowd(scene: Scene) -> Iterator[None]:
    crowded(scene)
    peer = scene.session(scene.new_model())
    key = scene.keys(1, new=True)
    yield
    registration = register(peer, [(PAGE, 1)], [group(0, [(0, 0, PAGE, 1)])])
    run(peer, "store", 1, registration, key, np.zeros(1))
    peer.ok("drain")


@asks("clear", f"a namespace of 16,384 keys in 64 groups beside {NAMESPACES:,} namespaces")
def clear_beside_a_crowd(scene: Scene) -> Iterator[None]:
    crowded(scene)
    peer = scene.session(scene.new_model())
    count = 64
    registration = register(peer, [(PAGE, GROUPS)], [group(n, [(0, 16 * n, 16, 1)]) for n in range(count)])
    packed = [scene.keys(KEYS // count, new=True) for _ in range(count)]
    run(peer, "store", 1, registration, b"", None, groups=jobs_of(packed, np.arange(KEYS // count) % GROUPS))
    yield
    peer.ok("clear")


@asks("status", f"{NAMESPACES:,} namespaces, {CROWD:,} sessions")
def status_of_a_crowd(scene: Scene) -> Iterator[None]:
    """Each session is a separate engine with a lease."""
    crowded(scene)
    peers = [scene.worker()[0] for _ in range(CROWD)]
    for peer in peers:
        peer.ok("pin", groups=[{"group": 0, "keys": scene.keys(2)}])
    yield
    peers[0].ok("status")


@asks("a scrape", f"{NAMESPACES:,} namespaces, {CROWD:,} sessions")
def scrape_of_a_crowd(scene: Scene) -> Iterator[None]:
    crowded(scene)
    for _ in range(CROWD):
        scene.session()
    yield
    Scraped(scene.metrics)


@asks("subscribe", f"{FLOCK} subscribers of a clear of 16,384 keys")
def events_of_a_clear(scene: Scene) -> Iterator[None]:
    model = scene.new_model()
    peer = scene.session(model)
    registration = register(peer, [(PAGE, KEYS)], [group(0, [(0, 0, 16, 1)])])
    run(peer, "store", 1, registration, scene.keys(KEYS, new=True), np.arange(KEYS))
    peers = [scene.session(model) for _ in range(FLOCK)]
    yield
    for each in peers:
        each.ok("subscribe")
    peer.ok("clear")
    for each in peers:
        while (message := each.receive()) is not None and message["type"] != "events":
            pass


@asks("clear", f"by their names: {NAMESPACES:,} namespaces")
def clear_of_a_crowd_by_name(scene: Scene) -> Iterator[None]:
    crowded(scene)
    peer = scene.session()
    yield
    peer.ok("clear", token=bytes(16), namespaces="*")


@asks("clear", f"everything: {NAMESPACES:,} namespaces")
def clear_of_a_crowd(scene: Scene) -> Iterator[None]:
    """The last: nothing is held behind it."""
    add_namespaces(scene, NAMESPACES)
    peer = scene.session()
    yield
    peer.ok("clear", everything=True)


CROWDED: tuple[ExtremeCase, ...] = (
    hellos_beside_a_crowd, byes_beside_a_crowd, ends_beside_a_crowd, first_store_beside_a_crowd, clear_beside_a_crowd,
    status_of_a_crowd, scrape_of_a_crowd, events_of_a_clear, clear_of_a_crowd_by_name,
    clear_of_a_crowd,
)  # fmt: skip
