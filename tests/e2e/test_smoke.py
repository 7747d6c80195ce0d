"""Store and load on a real daemon, byte for byte, on both event loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.client import KeyState
from kvoffloadd.model import NO_BLOCK
from tests.e2e.process import Daemon
from tests.e2e.rank import HYBRID, Rank, new_keys

Start = Callable[..., Daemon]


@pytest.fixture(params=["true", "false"], ids=["uvloop", "asyncio"])
def on_loop(request: pytest.FixtureRequest, start_daemon: Start) -> Daemon:
    """A daemon on each event loop."""
    return start_daemon(f"server.use_uvloop={request.param}")


def test_every_byte_of_hybrid_groups_comes_back_and_no_other_is_touched(on_loop: Daemon, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank = on_loop.welcome(Rank(on_loop.socket, HYBRID, num_blocks=64))
    keys = {group: new_keys(rng, 6) for group in (0, 1, 2)}
    places = {group: rank.blocks_of(group, 0, 6) for group in keys}
    done = {group: (keys[group], places[group]) for group in keys}
    result = rank.store(done)
    assert str(result.outcome) == "done"
    assert all((states == KeyState.RESERVED).all() for states in result.states)

    rank.wipe()
    elsewhere = {group: (keys[group], places[group] + 30) for group in keys}
    result = rank.load(elsewhere)
    assert str(result.outcome) == "done"
    assert sum(rank.wrong(group, *elsewhere[group]) for group in keys) == 0
    for group in keys:
        rank.wipe_loaded(group, elsewhere[group][1])
    assert rank.clean()
