"""How long a worker's memory stays mapped, and in use."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.client import Outcome
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import Hold
from tests.e2e.rank import Rank, new_keys
from tests.server.scene import Scene, ids
from tests.server.scene import keys as packed


@pytest.fixture
def holdable(standing: Callable[..., Daemon], hold: Hold) -> Daemon:
    """Its copies can be held."""
    return standing(faults=hold.fault)


@pytest.fixture
def rank(holdable: Daemon) -> Rank:
    found: Rank = holdable.welcome(Rank(holdable.socket, name="mine"))
    return found


def test_unregister_waits_for_running_copies_and_unmaps(holdable: Daemon, hold: Hold, rank: Rank, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 4)
    call = threading.Thread(target=rank.client.unregister, args=(rank.registration,))
    with hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 4))})
        call.start()
        until(lambda: holdable.sessions()[0]["registrations"] == 0, "no new job can name it")
        assert holdable.status()["running"]["jobs"] == 1
        assert holdable.mapped("mine") == 1
    call.join(HANG_S)
    assert holdable.mapped("mine") == 0
    assert job.done
    assert rank.wait(job).outcome is Outcome.DONE
    with Rank(holdable.socket) as other:
        assert other.loads_right(keys)


def test_nothing_new_begins_in_what_is_being_unregistered(holdable: Daemon, hold: Hold, seed: int) -> None:
    """The requests are made on the wire, since the client would refuse them."""
    scene = Scene(holdable, "unregister")
    load = scene.job(groups=[{"group": 0, "keys": packed(1), "blocks": ids(5)}])
    with hold:
        scene.peer.ok("load", **load)
        gone = scene.peer.begin("unregister", registration=scene.registration)
        scene.peer.ok("ping")
        scene.peer.refused("unknown_name", "load", **scene.job())
        # Asked again, as after a deadline: it is answered when it is true.
        again = scene.peer.begin("unregister", registration=scene.registration)
        scene.peer.ok("ping")
        assert holdable.mapped("bad_input") == 1
    assert scene.peer.completed(load["job"])["outcome"] == "done"
    assert [scene.peer.answer(seq)["type"] for seq in (gone, again)] == ["done", "done"]
    assert holdable.mapped("bad_input") == 0
    scene.peer.refused("unknown_name", "unregister", registration=scene.registration)
    # The allocation went with its last registration.
    scene.peer.refused("unknown_name", "register", tensors=[scene.tensor], groups=[])


def test_memory_of_two_registrations_goes_with_the_last(daemon: Daemon) -> None:
    scene = Scene(daemon, "unregister")
    again = scene.peer.ok("register", tensors=[scene.tensor], groups=[])["registration"]
    scene.peer.ok("unregister", registration=scene.registration)
    assert daemon.mapped("bad_input") == 1
    scene.peer.ok("unregister", registration=again)
    assert daemon.mapped("bad_input") == 0


def test_bye_waits_for_running_copies(holdable: Daemon, hold: Hold, rank: Rank, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 4)
    bye = threading.Thread(target=rank.close)
    with hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 4))})
        requests = holdable.sessions()[0]["requests"]
        bye.start()
        until(lambda: holdable.sessions()[0]["requests"] > requests, "it has said bye")
        assert holdable.status()["running"]["jobs"] == 1
        assert holdable.mapped("mine") == 1
        assert not job.done
    bye.join(HANG_S)
    assert job.done
    assert holdable.mapped("mine") == 0
    assert holdable.status()["running"]["jobs"] == 0


def test_registering_again_and_again_leaves_nothing(daemon: Daemon, seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = daemon.open_fds()
    for _ in range(20):
        with Rank(daemon.socket, name="again") as rank:
            rank.store_keys(new_keys(rng, 2))
            rank.client.unregister(rank.registration)
            rank.registration = rank.client.register(rank.cache)
            rank.store_keys(new_keys(rng, 2))
    until(lambda: daemon.mapped("again") == 0, "nothing is mapped")
    until(lambda: daemon.open_fds() <= before, "no descriptor is left")
