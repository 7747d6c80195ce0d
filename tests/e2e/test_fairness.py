"""Engines share copies and checksums, whatever one of them asks for. The order in which jobs end shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.client import Outcome
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import Hold
from tests.e2e.rank import Rank, new_keys
from tests.server.scene import BLOCKS, Scene, ids, keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
FLOOD = 200
"""Jobs of one engine, each of which takes a turn of the only copying thread."""


@pytest.mark.parametrize("expedited", [False, True])
def test_a_load_does_not_wait_for_all_that_another_engine_asked_for(
    start_daemon: Start, hold: Hold, expedited: bool
) -> None:
    daemon = start_daemon("copy.threads=1", faults=f"{hold.fault},delay_s=0.1")
    rng = np.random.default_rng(5)
    greedy, modest = (daemon.welcome(Rank(daemon.socket)) for _ in range(2))
    theirs, own = new_keys(rng, 4), new_keys(rng, 4)
    greedy.store_keys(theirs)
    modest.store_keys(own)
    blocks = np.arange(4)
    with hold:
        flood = [
            greedy.client.load(greedy.registration, {0: (theirs, blocks)}, expedited=expedited, deadline_s=600.0)
            for _ in range(FLOOD)
        ]
        job = modest.client.load(modest.registration, {0: (own, blocks)})
    assert modest.wait(job).outcome is Outcome.DONE
    assert daemon.status()["running"]["jobs"] > FLOOD // 10, "it went before most of what had been asked for before"
    for one in flood:
        greedy.client.cancel(one)
    for one in flood:
        greedy.wait(one)


SILENT = 20


def ask_in_silence(scene: Scene) -> None:
    """Ask for what is expensive, and read no answer, until nothing more fits into the socket."""
    packed, blocks = keys(*range(100, 100 + BLOCKS)), ids(*range(BLOCKS))
    scene.peer.socket.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        while True:
            scene.peer.begin("store", **scene.job(groups=[{"group": 0, "keys": packed, "blocks": blocks}]))
            scene.peer.begin("pin", groups=[{"group": 0, "keys": packed}])
            scene.peer.begin("snapshot", group=0)
            scene.peer.begin("status")


def test_sessions_that_read_no_answer_cost_the_others_nothing(start_daemon: Start) -> None:
    daemon = start_daemon()
    modest = daemon.welcome(Rank(daemon.socket, deadline_s=60.0))  # against hangs: the machine may be busy
    own = new_keys(np.random.default_rng(7), 16)
    for number in range(SILENT):
        ask_in_silence(Scene(daemon, f"silent {number}"))
        assert modest.store_keys(own).outcome is Outcome.DONE
        assert modest.loads_right(own)
    modest.close()
    assert daemon.alive
