"""Tests that users other than root and the daemon's can't reach others' GPU memory. The driver checks no users: the
daemon does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Outcome
from kvoffloadd.client.memory.gpu import IpcMemory
from kvoffloadd.errors import RemoteError
from scripts.harness.daemon import Daemon
from tests.conftest import OTHER_UID
from tests.e2e import gpu_rank
from tests.e2e.daemons import gpu_mappings
from tests.e2e.gpu_rank import Where
from tests.e2e.rank import Rank, new_keys
from tests.e2e.users import Stranger, needs_root

pytestmark = [pytest.mark.slow, needs_root]

Start = Callable[..., Daemon]

ALLOWED = (f"server.allowed_uids=[{OTHER_UID}, {OTHER_UID - 1}]", "server.socket_mode=0o666")
ONE, CHUNKS = Where("cuda", kind="one"), Where("cuda", kind="chunks")


def started(start_daemon: Start, *settings: str) -> Daemon:
    """A daemon that others may reach, too."""
    daemon = start_daemon(*ALLOWED, *settings)
    os.chmod(daemon.socket.parent, 0o755)
    return daemon


def rank_of(daemon: Daemon, uid: int, **options: Any) -> Rank:
    """A rank of that user, which has registered nothing. Closed at the end."""
    gpu_rank.gpu()  # the driver is loaded by who may read it
    os.seteuid(uid)
    try:
        rank: Rank = daemon.welcome(Rank(daemon.socket, register=False, **options))
    finally:
        os.seteuid(os.getuid())
    return rank


def works(rank: Rank, seed: int) -> bool:
    """What it stores it loads."""
    keys = new_keys(np.random.default_rng([seed, OTHER_UID]), 8)
    return rank.store_keys(keys).outcome is Outcome.DONE and rank.loads_right(keys)


@pytest.fixture(params=[False, True], ids=["never named", "registered"])
def victim(request: pytest.FixtureRequest, start_daemon: Start) -> tuple[Daemon, Rank]:
    """An engine of root's, whose memory the daemon has or has not opened."""
    daemon = started(start_daemon)
    rank = rank_of(daemon, 0, where=ONE)
    if request.param:
        rank.registration = rank.client.register(rank.cache)
        daemon.await_pinned()  # else the status of its devices changes by itself
    return daemon, rank


def test_a_handle_of_another_users_memory(victim: tuple[Daemon, Rank], seed: int) -> None:
    daemon, rank = victim
    (memory,) = rank.cache.allocations()
    assert isinstance(memory, IpcMemory)
    stranger = daemon.welcome(Stranger.connect(daemon.socket, OTHER_UID)).peer
    stranger.hello()
    opened, before = gpu_mappings(daemon), daemon.state()
    refusal = stranger.refused("forbidden", "attach_ipc", device=memory.uuid, handles=memory.handle)
    assert f"uid {OTHER_UID}" in refusal
    assert "cuda.ipc_uids" in refusal
    assert (gpu_mappings(daemon), daemon.state()) == (opened, before)
    stranger.ok("ping")
    if not opened:
        rank.registration = rank.client.register(rank.cache)
    assert works(rank, seed)


def test_a_worker_of_another_user_is_told_what_to_change(start_daemon: Start) -> None:
    """Its own memory, which it can't prove to have, registered by the client. The connection stays usable."""
    daemon = started(start_daemon)
    rank = rank_of(daemon, OTHER_UID, where=ONE)
    with pytest.raises(RemoteError, match=r"run the engine as uid .* cuda\.ipc_uids") as caught:
        rank.client.register(rank.cache)
    assert (caught.value.code, caught.value.retryable) == ("forbidden", False)
    rank.client.ping()


def test_descriptors_prove_whose_memory_it_is(start_daemon: Start, seed: int) -> None:
    rank = rank_of(started(start_daemon), OTHER_UID, where=CHUNKS)
    rank.registration = rank.client.register(rank.cache)
    assert works(rank, seed)


def test_users_whose_handles_are_opened(start_daemon: Start, seed: int) -> None:
    daemon = started(start_daemon, f"cuda.ipc_uids=[{OTHER_UID}]")
    rank, other = rank_of(daemon, OTHER_UID, where=ONE), rank_of(daemon, OTHER_UID - 1, where=ONE)
    rank.registration = rank.client.register(rank.cache)
    assert works(rank, seed)
    with pytest.raises(RemoteError, match=f"uid {OTHER_UID - 1} may not name"):
        other.client.register(other.cache)
