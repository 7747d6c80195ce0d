"""Key events: what came and went, gaps for slow readers, and snapshots to catch up with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Client, EventGap, KeyEvents, Tier
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import RawPeer
from scripts.harness.wait import throughout
from tests.e2e.disk import MIB, disk_settings, group_of, idle
from tests.e2e.rank import NAMESPACE, Keys, Rank, new_keys
from tests.e2e.test_parts import groups

Start = Callable[..., Daemon]


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 8)


@pytest.fixture
def rank(daemon: Daemon) -> Rank:
    found: Rank = daemon.welcome(Rank(daemon.socket))
    return found


@pytest.fixture
def subscriber(daemon: Daemon, rank: Rank) -> Iterator[Client]:
    with Client(daemon.socket, namespace=NAMESPACE, role="observer") as client:
        client.subscribe()
        yield client


def told(client: Client, count: int) -> list[tuple[int, str, bytes]]:
    """The next `count` keys of events: group, what happened, key."""
    found: list[tuple[int, str, bytes]] = []

    def enough() -> bool:
        for event in client.events(0.05):
            assert isinstance(event, KeyEvents)
            found.extend((event.group, "added", key.tobytes()) for key in event.added)
            found.extend((event.group, "removed", key.tobytes()) for key in event.removed)
        return len(found) >= count

    until(enough, f"{count} keys are told")
    return found


def everything(keys: Keys, what: str) -> set[tuple[int, str, bytes]]:
    return {(0, what, key.tobytes()) for key in keys}


def test_added_and_removed(rank: Rank, subscriber: Client, keys: Keys) -> None:
    rank.store_keys(keys)
    assert set(told(subscriber, 8)) == everything(keys, "added")
    rank.store_keys(keys)  # there already: nothing happens
    rank.client.clear()
    assert set(told(subscriber, 8)) == everything(keys, "removed")
    assert subscriber.events(0.1) == []


def test_a_key_is_told_when_it_is_complete(daemon: Daemon, keys: Keys) -> None:
    first, second = (daemon.welcome(Rank(daemon.socket, groups(part))) for part in (0, 1))
    first.client.subscribe()
    first.store_keys(keys)
    assert first.client.events(0.1) == []
    second.store_keys(keys[:3])
    assert set(told(first.client, 3)) == everything(keys[:3], "added")


def test_only_the_own_namespace(daemon: Daemon, subscriber: Client, keys: Keys) -> None:
    with Rank(daemon.socket, namespace=type(NAMESPACE)(model="another")) as other:
        other.store_keys(keys)
        other.client.clear()
    assert subscriber.events(0.1) == []


@pytest.mark.slow
def test_evictions_are_told(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon(memory="64KiB")
    rank = daemon.welcome(Rank(daemon.socket))
    rng = np.random.default_rng(seed)
    first = new_keys(rng, 16)
    rank.store_keys(first)
    rank.client.subscribe()
    rank.store_keys(new_keys(rng, 5))
    found = told(rank.client, 10)
    assert [what for _, what, _ in found].count("removed") == 5
    assert {key for _, what, key in found if what == "removed"} <= {key.tobytes() for key in first}
    held = {key.tobytes() for key in rank.client.snapshot(0)}
    assert held == {key.tobytes() for key in first} - {k for _, what, k in found if what == "removed"} | {
        k for _, what, k in found if what == "added"
    }


@pytest.fixture
def small_outbox(standing: Start) -> Daemon:
    """No room for many events."""
    return standing("limits.outbox_bytes=64KiB", memory="64MiB")


def silent_subscriber(daemon: Daemon) -> RawPeer:
    """Subscribes, and then reads nothing. Its socket takes a little, its outbox the rest."""
    peer = daemon.peer()
    peer.hello(namespace={"model": NAMESPACE.model})
    peer.ok("subscribe")
    return peer


def test_a_slow_reader_gets_a_gap_and_catches_up_by_snapshot(small_outbox: Daemon, seed: int) -> None:
    """The gap comes although nothing happens any more: otherwise the reader would believe what it has."""
    daemon = small_outbox
    rank = daemon.welcome(Rank(daemon.socket, num_blocks=1024))
    peer = silent_subscriber(daemon)
    rng = np.random.default_rng(seed)
    stored = [new_keys(rng, 1024) for _ in range(12)]  # 32 KiB of events each
    for keys in stored:
        rank.client.wait(rank.client.store(rank.registration, {0: (keys, np.arange(1024))}), 10.0)
    # All events are sent, or dropped, before anything is read: they are gathered for some milliseconds.
    throughout(lambda: len(daemon.sessions()) == 2, "nothing happens any more", 0.15)
    pushed = []
    while (push := peer.receive()) is not None and push["type"] != "gap":
        pushed.append(push)
    assert push == {"type": "gap"}
    assert 0 < sum(len(push["added"]) for push in pushed) < 12 * 1024 * 32
    seq = peer.begin("snapshot", group=0)
    listing = peer.answer(seq)
    assert (len(listing["keys"]), listing["cursor"]) == (12 * 1024 * 32, 0)
    assert {listing["keys"][at : at + 32] for at in range(0, len(listing["keys"]), 32)} == {
        key.tobytes() for keys in stored for key in keys
    }


def test_the_client_tells_the_gap(small_outbox: Daemon, seed: int) -> None:
    daemon = small_outbox
    rank = daemon.welcome(Rank(daemon.socket, num_blocks=1024))
    with Client(daemon.socket, namespace=NAMESPACE, role="observer") as client:
        client.subscribe()
        rng = np.random.default_rng(seed)
        for _ in range(24):
            job = rank.client.store(rank.registration, {0: (new_keys(rng, 1024), np.arange(1024))})
            rank.client.wait(job, 10.0)
        found: list[object] = []

        def gap() -> bool:
            found.extend(client.events(0.05))
            return any(isinstance(event, EventGap) for event in found)

        until(gap, "the gap is told")
        assert len(client.snapshot(0)) >= 1024


@pytest.mark.slow
def test_more_events_than_may_wait(standing: Start, seed: int) -> None:
    """`limits.events_per_session` counts them, however small they are."""
    daemon = standing("limits.events_per_session=8")
    rank = daemon.welcome(Rank(daemon.socket))
    peer = silent_subscriber(daemon)
    rng = np.random.default_rng(seed)
    for _ in range(600):  # the socket takes half of them
        rank.store_keys(new_keys(rng, 1))
    found = 0
    while (push := peer.receive()) is not None and push["type"] != "gap":
        found += len(push["added"]) // 32
    assert found < 600


def test_a_subscriber_follows_memory_and_disk(standing: Start, tmp_path: Path, seed: int) -> None:
    """Another who does not, on the same daemon, hears what there was to hear before."""
    daemon = standing(*disk_settings((tmp_path / "disk", 64 * MIB)), memory="8MiB")
    rank = daemon.welcome(Rank(daemon.socket, group_of(64 << 10)))
    follower, plain = (daemon.welcome(Client(daemon.socket, namespace=NAMESPACE, role="observer")) for _ in range(2))
    follower.subscribe(tiers=True)
    plain.subscribe()
    rng = np.random.default_rng(seed)
    believed: dict[Tier | None, set[bytes]] = {tier: set() for tier in (Tier.MEMORY, Tier.DISK, None)}

    def listen() -> None:
        for event in follower.events(0.05) + plain.events(0.05):
            assert isinstance(event, KeyEvents)
            believed[event.tier] |= {key.tobytes() for key in event.added}
            believed[event.tier] -= {key.tobytes() for key in event.removed}

    def holds() -> dict[Tier | None, set[bytes]]:
        return {tier: {key.tobytes() for key in follower.snapshot(0, tier=tier)} for tier in believed}

    def agree() -> bool:
        listen()
        return believed == holds()

    stored = [new_keys(rng, 32) for _ in range(8)]  # twice what memory has room for
    for keys in stored:
        rank.store_keys(keys)
        idle(daemon)
    until(agree, "all is told")
    assert len(believed[Tier.DISK]) == len(believed[None]) == 256
    assert 0 < len(believed[Tier.MEMORY]) < 256
    rank.client.clear()
    until(agree, "the clear is told")
    assert believed == {Tier.MEMORY: set(), Tier.DISK: set(), None: set()}
