"""Bugs, planted: one in the cache, whose tables may be half-written, ends the process; another costs a request."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import KeyState
from kvoffloadd.errors import ClientError, RemoteError
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import make_daemon
from tests.e2e.disk import disk_settings
from tests.e2e.rank import Rank, new_keys

EXIT_FATAL = 70
Plant = Callable[[str], Daemon]


def program(function: str, switch: Path) -> str:
    """`kvoffloadd`, in which the function of this name fails once the file `switch` is there."""
    module, owner, name = function.split(":")
    lines = (
        f"import os, sys, {module} as module",
        f"owner = eval({owner or 'module'!r}, vars(module) | {{'module': module}})",
        f"right = owner.{name}",
        "def wrong(*arguments, **options):",
        f"    if os.path.exists({os.fspath(switch)!r}): [][7]",
        "    return right(*arguments, **options)",
        f"owner.{name} = wrong",
        "from kvoffloadd.cli import main",
        "sys.exit(main(sys.argv[1:]))",
    )
    return "\n".join(lines)


def switch_of(daemon: Daemon) -> Path:
    """The file."""
    return daemon.socket.with_name("switch")


@pytest.fixture
def plant() -> Iterator[Plant]:
    daemons: list[Daemon] = []

    def make(function: str) -> Daemon:
        folder = Path(tempfile.mkdtemp(prefix="kvo-", dir="/tmp"))
        bug = ("-c", program(function, folder / "switch"))
        daemons.append(make_daemon(folder, *disk_settings((folder / "disk", 64 << 20)), program=bug))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.destroy()


def use(rank: Rank, seed: int) -> None:
    """Store, pin some that are there and some that are not, clear."""
    keys = new_keys(np.random.default_rng(seed), 8)
    rank.store_keys(keys[:6])
    found = rank.client.pin({0: keys})
    if found.lease:
        rank.client.release(found.lease)
    rank.client.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        pytest.param("kvoffloadd.cache.memory.index:Index:_place", id="a request, between rows and table"),
        pytest.param("kvoffloadd.cache.memory.keytable:KeyTable:account", id="a completion, between states and events"),
        pytest.param("kvoffloadd.storage.memory:MemoryTier:take", id="memory that the cache keeps"),
        pytest.param("kvoffloadd.cache.memory.keytable:KeyTable:count_leases", id="a hold"),
        pytest.param(
            "kvoffloadd.cache.memory.deferredtouches:DeferredTouches:_count", id="uses that are counted later"
        ),
        pytest.param("kvoffloadd.cache.jobs.sealing:Sealing:_seal", id="a store behind its completion"),
        pytest.param("kvoffloadd.cache.memory.epochs:Epochs:advance", id="a clear"),
        pytest.param("kvoffloadd.cache.disk.catalog:Catalog:put", id="a disk that has written"),
        pytest.param("kvoffloadd.cache.lower.backlog:Backlog:enqueue", id="a key that is to be written"),
        pytest.param("kvoffloadd.cache.stats.missreasons:MissReasons:why", id="a callback of the loop"),
        pytest.param("kvoffloadd.cache.memory.keytable:KeyTable:vacate", id="a request that goes on later"),
        pytest.param("kvoffloadd.cache.disk.demotion:Demotion:_append", id="a task that nobody waits for"),
    ],
)
def test_a_bug_in_the_cache_ends_the_process(plant: Plant, seed: int, function: str) -> None:
    daemon = plant(function)
    rank = daemon.welcome(Rank(daemon.socket, role="worker"))
    use(rank, seed)
    switch_of(daemon).touch()
    seeds = count(seed + 1)

    def has_ended() -> bool:
        """It is used until then: what is cleared at once may never come to the disk."""
        with suppress(ClientError):  # it may be gone before the last answer
            use(rank, next(seeds))
        return not daemon.alive

    until(has_ended, "the bug has ended the daemon")
    assert daemon.wait() == EXIT_FATAL
    assert daemon.says("exiting: a bug in the cache, whose tables may be half-written: IndexError")
    assert daemon.says("in wrong"), "the stack is there"
    daemon.leave_guests()
    switch_of(daemon).unlink()
    daemon.start()
    use(daemon.welcome(Rank(daemon.socket)), seed)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param("kvoffloadd.server.session.pins::find_all", id="the server"),
        pytest.param("kvoffloadd.cache.memory.lookup::_full_boundaries", id="a pure function of the cache"),
    ],
)
def test_a_bug_elsewhere_costs_the_request(plant: Plant, rng_keys: np.ndarray, function: str) -> None:
    daemon = plant(function)
    rank = daemon.welcome(Rank(daemon.socket))
    rank.store_keys(rng_keys)
    switch_of(daemon).touch()
    with pytest.raises(RemoteError, match="internal"):
        rank.states(rng_keys)
    switch_of(daemon).unlink()
    assert rank.states(rng_keys) == [KeyState.HIT] * len(rng_keys)
    assert daemon.alive
    assert daemon.verify() == ()


@pytest.fixture
def rng_keys(seed: int) -> np.ndarray:
    return new_keys(np.random.default_rng(seed), 8)
