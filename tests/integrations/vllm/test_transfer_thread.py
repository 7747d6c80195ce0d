"""A rank's line to a real daemon: transfers of any size end once, whatever becomes of the daemon."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, Job
from kvoffloadd.errors import DeadlineError
from kvoffloadd.integrations.vllm.blocks import Chunks, GroupChunks
from kvoffloadd.integrations.vllm.transfer_thread import Ended, Transfer, TransferThread
from kvoffloadd.model import Direction
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.wait import throughout
from tests.e2e.daemons import Hold
from tests.e2e.rank import PAGE, Keys, Rank, new_keys
from tests.integrations.vllm.conftest import Lines

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
Make = Callable[[Daemon], Lines]
STORE, LOAD = Direction.STORE, Direction.LOAD


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 12)


def chunks(keys: Keys, *groups: int) -> Chunks:
    """Makes chunks from block 0 on, group by group."""
    ids = np.arange(len(groups) * len(keys), dtype=np.uint32).reshape(len(groups), len(keys), 1)
    return {group: GroupChunks(keys.tobytes(), ids[at]) for at, group in enumerate(groups)}


def ended(transfer_thread: TransferThread, *numbers: int) -> list[Ended]:
    """Exactly these, by number."""
    transfer_thread.wait(numbers)
    found = sorted(transfer_thread.ended(), key=lambda one: one.number)
    assert [one.number for one in found] == sorted(numbers)
    return found


def fill(rank: Rank, wanted: Chunks) -> None:
    for group, (packed, blocks, _) in wanted.items():
        rank.fill(group, np.frombuffer(packed, np.uint8).reshape(-1, 32), blocks.ravel())


def wrong(rank: Rank, wanted: Chunks) -> int:
    return sum(
        rank.wrong(group, np.frombuffer(packed, np.uint8).reshape(-1, 32), blocks.ravel())
        for group, (packed, blocks, _) in wanted.items()
    )


def jobs(daemon: Daemon, direction: str) -> int:
    return int(daemon.status()["transfers"][direction]["jobs"])


def test_more_keys_than_a_request_may_have(
    start_daemon: Start, lines: Make, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request names where in the prompt its keys begin."""
    daemon = start_daemon("limits.keys_per_request=5")
    transfer_thread, rank = lines(daemon).transfer_thread()
    wanted = chunks(keys, 0, 1)
    fill(rank, wanted)
    begins = list[int]()

    def noting(client: Client, registration: Any, groups: Any, *, first: dict[int, int], **how: Any) -> Job:
        begins.extend(first[group] for group in groups if group == 1)
        return store(client, registration, groups, first=first, **how)

    store = Client.store
    monkeypatch.setattr(Client, "store", noting)
    wanted[1] = wanted[1]._replace(first=7)
    transfer_thread.submit(Transfer(1, STORE, wanted))
    (stored,) = ended(transfer_thread, 1)
    assert (stored.success, stored.bytes) == (True, 24 * PAGE)
    assert begins == [7, 10, 15], "three keys fit into the request that ends group 0"
    rank.wipe()
    transfer_thread.submit(Transfer(2, LOAD, wanted))
    (loaded,) = ended(transfer_thread, 2)
    assert (loaded.success, loaded.bytes) == (True, 24 * PAGE)
    assert wrong(rank, wanted) == 0
    assert (jobs(daemon, "store"), jobs(daemon, "load")) == (5, 5)


@pytest.mark.parametrize("missing", [0, 6, 11])
def test_a_load_fails_where_one_piece_does(start_daemon: Start, lines: Make, keys: Keys, missing: int) -> None:
    daemon = start_daemon("limits.keys_per_request=5")
    transfer_thread, rank = lines(daemon).transfer_thread()
    there = chunks(np.delete(keys, missing, 0), 0)
    fill(rank, there)
    transfer_thread.submit(Transfer(1, STORE, there))
    ended(transfer_thread, 1)
    transfer_thread.submit(Transfer(2, LOAD, chunks(keys, 0)))
    (loaded,) = ended(transfer_thread, 2)
    assert (loaded.success, loaded.partial) == (False, True)


def test_without_a_daemon_stores_are_dropped_and_loads_fail(start_daemon: Start, lines: Make, keys: Keys) -> None:
    daemon = start_daemon()
    transfer_thread, rank = lines(daemon).transfer_thread()
    fill(rank, chunks(keys, 0))
    transfer_thread.submit(Transfer(1, STORE, chunks(keys, 0)))
    ended(transfer_thread, 1)
    daemon.kill()
    for number in range(2, 6):
        transfer_thread.submit(Transfer(number, STORE if number % 2 else LOAD, chunks(keys, 0)))
    found = ended(transfer_thread, 2, 3, 4, 5)
    assert [one.success for one in found] == [False, True, False, True]
    assert not any(one.partial for one in found)
    daemon.start()
    until(lambda: daemon.sessions(), "it is back")
    transfer_thread.submit(Transfer(6, STORE, chunks(keys, 0)))
    assert ended(transfer_thread, 6)[0].success
    until(lambda: daemon.status()["cache"]["keys"] == 12, "it stores again")


@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_a_daemon_that_dies_at_work(
    start_daemon: Start, lines: Make, hold: Hold, keys: Keys, direction: Direction
) -> None:
    """It has several jobs: some run, and some may not have been asked for."""
    daemon = start_daemon("limits.keys_per_request=2", faults=hold.fault)
    transfer_thread, rank = lines(daemon).transfer_thread()
    wanted = chunks(keys, 0)
    fill(rank, wanted)
    if direction is LOAD:
        transfer_thread.submit(Transfer(1, STORE, wanted))
        ended(transfer_thread, 1)
    with hold:
        transfer_thread.submit(Transfer(2, direction, wanted))
        until(lambda: daemon.status()["running"]["jobs"] > 0, "it is at work")
        daemon.kill()
    (lost,) = ended(transfer_thread, 2)
    assert (lost.success, lost.partial) == (direction is STORE, False)
    daemon.start()
    until(lambda: mapped(daemon) > 0, "it is registered with again")


def test_a_load_that_fails_whole_is_not_partial(start_daemon: Start, lines: Make, keys: Keys) -> None:
    """The copy of one of its jobs fails, the third there is; of the other job a key is missing."""
    daemon = start_daemon("limits.keys_per_request=6", faults="fail_every=3")
    transfer_thread, rank = lines(daemon).transfer_thread()
    there = chunks(keys[:11], 0)
    fill(rank, there)
    transfer_thread.submit(Transfer(1, STORE, there))
    ended(transfer_thread, 1)
    transfer_thread.submit(Transfer(2, LOAD, chunks(keys, 0)))
    (lost,) = ended(transfer_thread, 2)
    assert (lost.success, lost.partial) == (False, False)


def test_a_load_that_expires_is_not_partial(start_daemon: Start, lines: Make, hold: Hold, keys: Keys) -> None:
    """Its deadline passes while another one is copied."""
    daemon = start_daemon("copy.threads=1", faults=hold.fault)
    transfer_thread, _rank = lines(daemon).transfer_thread(job_deadline_s=0.2)
    lines(daemon).rank().store_keys(keys)
    with hold:
        for number in (1, 2):
            transfer_thread.submit(Transfer(number, LOAD, chunks(keys, 0)))
        until(lambda: jobs(daemon, "load") >= 1, "the second has expired")
    lost = ended(transfer_thread, 1, 2)[1]
    assert (lost.success, lost.partial) == (False, False)


def mapped(daemon: Daemon) -> int:
    return sum(device["mapped_bytes"] for device in daemon.status()["devices"].values())


def test_a_daemon_that_dies_and_comes_back_while_nothing_is_carried(start_daemon: Start, lines: Make) -> None:
    """It is registered with before the first transfer wants it."""
    daemon = start_daemon()
    lines(daemon).transfer_thread()
    until(lambda: mapped(daemon) > 0, "it is registered with")
    for _ in range(2):
        daemon.kill()
        daemon.start()
        until(lambda: mapped(daemon) > 0, "it is registered with again")


def test_started_before_the_daemon(start_daemon: Start, lines: Make, keys: Keys) -> None:
    daemon = start_daemon()
    line = lines(daemon)
    transfer_thread, _rank = line.transfer_thread()
    until(lambda: mapped(daemon) > 0, "it is registered with")
    transfer_thread.close(5.0)
    daemon.kill()
    daemon.start()
    throughout(lambda: not daemon.sessions(), "who has closed does not come back", 0.3)


def test_a_sleep_that_fails_is_none(start_daemon: Start, lines: Make, hold: Hold, keys: Keys) -> None:
    """vLLM stays awake then, and does not wake the thread."""
    daemon = start_daemon(faults=hold.fault)
    transfer_thread, rank = lines(daemon).transfer_thread()
    wanted = chunks(keys, 0)
    fill(rank, wanted)
    with hold:
        transfer_thread.submit(Transfer(1, STORE, wanted))
        until(lambda: daemon.status()["running"]["jobs"] == 1, "it has begun")
        with pytest.raises(DeadlineError, match="can't sleep"):
            transfer_thread.sleep(0.1)
    assert ended(transfer_thread, 1)[0].success
    rank.wipe()
    transfer_thread.submit(Transfer(2, LOAD, wanted))
    assert ended(transfer_thread, 2)[0].success
    assert wrong(rank, wanted) == 0


def test_what_was_submitted_asleep_is_not_begun_awake(daemon: Daemon, lines: Make, keys: Keys) -> None:
    """However soon the engine wakes up: its blocks hold something else by then."""
    transfer_thread, rank = lines(daemon).transfer_thread()
    wanted = chunks(keys, 0)
    fill(rank, wanted)
    before = jobs(daemon, "store")
    for number in range(20):
        transfer_thread.sleep(5.0)
        transfer_thread.submit(Transfer(number, STORE, wanted))
        transfer_thread.wake()
    ended(transfer_thread, *range(20))
    assert jobs(daemon, "store") == before
    transfer_thread.submit(Transfer(20, STORE, wanted))
    ended(transfer_thread, 20)
    assert jobs(daemon, "store") == before + 1


def test_a_bug_is_no_hang(daemon: Daemon, lines: Make, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that may still be written to can't be used: better an engine that ends than one that waits for ever."""

    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    transfer_thread, _rank = lines(daemon).transfer_thread()
    monkeypatch.setattr(transfer_thread, "_begin", bug)
    transfer_thread.submit(Transfer(1, STORE, chunks(keys, 0)))
    submit = partial(transfer_thread.submit, Transfer(2, STORE, {}))
    for attempt in (
        partial(transfer_thread.wait, [1]),
        transfer_thread.ended,
        submit,
        partial(transfer_thread.sleep, 5.0),
    ):
        with pytest.raises(RuntimeError, match="has failed"):
            attempt()


def test_nothing_to_carry(daemon: Daemon, lines: Make) -> None:
    transfer_thread, _rank = lines(daemon).transfer_thread()
    transfer_thread.submit(Transfer(1, LOAD, {}))
    assert ended(transfer_thread, 1) == [Ended(1, True, 0, 0.0)]
    transfer_thread.wait([])
