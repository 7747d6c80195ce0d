"""How long a worker's memory stays mapped, and in use."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.client import Outcome
from scripts.harness.daemon import Daemon
from scripts.harness.wait import until
from tests.e2e.rank import Rank, new_keys
from tests.server.scene import Scene, ids
from tests.server.scene import keys as packed

DELAY_S = 0.4


@pytest.fixture
def slow(standing: Callable[..., Daemon]) -> Daemon:
    return standing(faults=f"delay_s={DELAY_S}")


@pytest.fixture
def rank(slow: Daemon) -> Rank:
    found: Rank = slow.welcome(Rank(slow.socket, name="mine"))
    return found


def test_unregister_waits_for_running_copies_and_unmaps(slow: Daemon, rank: Rank, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 4)
    job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 4))})
    call = threading.Thread(target=rank.client.unregister, args=(rank.registration,))
    call.start()
    until(lambda: slow.sessions()[0]["registrations"] == 0, "no new job can name it")
    assert slow.status()["running"]["jobs"] == 1
    assert slow.mapped("mine") == 1
    call.join(10.0)
    assert slow.mapped("mine") == 0
    assert job.done
    assert rank.wait(job).outcome is Outcome.DONE
    with Rank(slow.socket) as other:
        assert other.loads_right(keys)


def test_nothing_new_begins_in_what_is_being_unregistered(slow: Daemon, seed: int) -> None:
    """On the wire, since the client would not let us."""
    scene = Scene(slow, "unregister")
    load = scene.job(groups=[{"group": 0, "keys": packed(1), "blocks": ids(5)}])
    scene.peer.ok("load", **load)
    gone = scene.peer.begin("unregister", registration=scene.registration)
    scene.peer.ok("ping")
    scene.peer.refused("unknown_name", "load", **scene.job())
    # Asked again, as after a deadline: it is answered when it is true.
    again = scene.peer.begin("unregister", registration=scene.registration)
    scene.peer.ok("ping")
    assert slow.mapped("bad_input") == 1
    assert scene.peer.completed(load["job"])["outcome"] == "done"
    assert [scene.peer.answer(seq)["type"] for seq in (gone, again)] == ["done", "done"]
    assert slow.mapped("bad_input") == 0
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


def test_bye_waits_for_running_copies(slow: Daemon, rank: Rank, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 4)
    job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 4))})
    assert not job.done
    rank.close()
    assert job.done
    assert slow.mapped("mine") == 0
    assert slow.status()["running"]["jobs"] == 0


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
