"""Who shares keys with whom, and what `clear` and `drain` do to whom."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from kvoffloadd.cli import main
from kvoffloadd.client import Drained, KeyState, Outcome
from kvoffloadd.testing.leaks import UID
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import Hold
from tests.e2e.rank import NAMESPACE, Keys, Rank, new_keys

HIT, MISS = KeyState.HIT, KeyState.MISS
Start = Callable[..., Daemon]


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 8)


@pytest.fixture
def holdable(standing: Start, hold: Hold) -> Daemon:
    """Its copies can be held."""
    return standing(faults=hold.fault)


@pytest.mark.parametrize("field", ["model", "revision", "dtype", "layout", "parallel", "salt"])
def test_namespaces_that_differ_in_anything_never_meet(daemon: Daemon, keys: Keys, field: str) -> None:
    one = daemon.welcome(Rank(daemon.socket))
    other = daemon.welcome(Rank(daemon.socket, namespace=msgspec.structs.replace(NAMESPACE, **{field: "other"})))
    one.store_keys(keys)
    assert other.states(keys) == [MISS] * 8
    other.wipe()
    assert other.load({0: (keys, other.blocks_of(0, 0, 8))}).outcome is Outcome.PARTIAL
    assert other.clean()
    assert other.store_keys(keys).bytes == 8 * 4096
    other.client.clear()
    assert (one.states(keys), other.states(keys)) == ([HIT] * 8, [MISS] * 8)


def test_namespaces_are_cleared_by_the_names_that_status_shows(
    start_daemon: Start, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = start_daemon()
    labels = ("llama/8b", "llama/70b", "Llama/1b", "other")
    ranks = [daemon.welcome(Rank(daemon.socket, namespace=type(NAMESPACE)(model=label))) for label in labels]
    for rank in ranks:
        rank.store_keys(keys)

    def hits() -> list[bool]:
        return [rank.states(keys) == [HIT] * 8 for rank in ranks]

    def run(pattern: str) -> tuple[int, str]:
        code = main(["clear", "--yes", "--socket", str(daemon.socket), "--namespace", pattern])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    code, output = run("lama*")
    assert (code, hits()) == (4, [True] * 4)
    assert "no namespace that is in use, or has keys in memory, has a name like 'lama*'" in output
    (name,) = (row["namespace"] for row in daemon.status()["namespaces"] if row["label"] == "other")
    assert run(name) == (0, "dropped 8 keys, 32 KiB of 1 namespace\n")
    assert hits() == [True, True, True, False]
    assert run("llama/*") == (0, "dropped 16 keys, 64 KiB of 2 namespaces\n")
    assert hits() == [False, False, True, False]
    assert run("[Ll]*#????????") == (0, "dropped 8 keys, 32 KiB of 3 namespaces\n")
    assert hits() == [False] * 4
    assert run("")[0] == 4


def test_fields_do_not_run_into_each_other(daemon: Daemon, keys: Keys) -> None:
    names: list[dict[str, Any]] = [{"model": "ab", "revision": "c"}, {"model": "a", "revision": "bc"}, {"model": "abc"}]
    ranks = [daemon.welcome(Rank(daemon.socket, namespace=type(NAMESPACE)(**name))) for name in names]
    ranks[0].store_keys(keys)
    assert [rank.states(keys[:1]) for rank in ranks] == [[HIT], [MISS], [MISS]]


def test_two_instances_share_a_namespace(daemon: Daemon, keys: Keys) -> None:
    one, other = (daemon.welcome(Rank(daemon.socket)) for _ in range(2))
    one.store_keys(keys[:4])
    other.store_keys(keys[4:])
    assert one.loads_right(keys)
    assert other.loads_right(keys)
    assert daemon.status()["namespaces"][0]["keys"] == 8


def test_keys_outlive_their_sessions(daemon: Daemon, keys: Keys) -> None:
    with Rank(daemon.socket) as first:
        first.store_keys(keys)
    until(lambda: not daemon.sessions(), "the session is gone")
    assert daemon.mapped("e2e_cache") == 0
    with Rank(daemon.socket) as second:
        assert second.loads_right(keys)


# --- clear -------------------------------------------------------------------------------------------------------


def test_after_a_clear_nothing_old_hits(daemon: Daemon, keys: Keys) -> None:
    rank, other = (daemon.welcome(Rank(daemon.socket)) for _ in range(2))
    rank.store_keys(keys)
    before = daemon.status()["namespaces"][0]["epoch"]
    cleared = other.client.clear()
    assert (cleared.keys, cleared.bytes) == (8, 8 * 4096)
    assert rank.states(keys) == [MISS] * 8
    assert len(rank.client.snapshot(0)) == 0
    assert daemon.status()["namespaces"][0]["epoch"] > before
    assert daemon.status()["memory"]["used_bytes"] == 0
    assert rank.store_keys(keys).bytes == 8 * 4096
    assert rank.loads_right(keys)


def test_a_load_under_way_keeps_what_it_was_promised(holdable: Daemon, hold: Hold, keys: Keys) -> None:
    rank, other = (holdable.welcome(Rank(holdable.socket)) for _ in range(2))
    rank.store_keys(keys)
    rank.wipe()
    more = {0: (new_keys(np.random.default_rng(0), 64), other.blocks_of(0, 0, 64))}
    with hold:
        job = rank.client.load(rank.registration, {0: (keys, rank.blocks_of(0, 0, 8))})
        other.client.clear()
        assert other.states(keys) == [MISS] * 8
        theirs = other.begin_store(more)
        used_bytes = holdable.status()["memory"]["used_bytes"]
        assert used_bytes == (8 + 64) * 4096, "new keys may not take the slots that the load reads"
        assert not job.done
    assert other.wait(theirs).outcome is Outcome.DONE
    assert rank.wait(job).outcome is Outcome.DONE
    assert rank.wrong(0, keys, rank.blocks_of(0, 0, 8)) == 0
    assert other.states(keys) == [MISS] * 8


def test_a_store_under_way_does_not_come_back(holdable: Daemon, hold: Hold, keys: Keys) -> None:
    """Its result reports that: its keys are not stored."""
    rank, other = (holdable.welcome(Rank(holdable.socket)) for _ in range(2))
    with hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 8))})
        other.client.clear()
        assert other.states(keys) == [MISS] * 8
    result = rank.wait(job)
    assert other.states(keys) == [MISS] * 8
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, list(range(8)))
    assert holdable.status()["memory"]["used_bytes"] == 0
    assert rank.store_keys(keys).outcome is Outcome.DONE
    assert rank.loads_right(keys)


def test_pinned_keys_hit_no_more_after_a_clear(daemon: Daemon, keys: Keys) -> None:
    """What a lease holds goes with the lease; a load under it gets a miss, which is no error."""
    rank, other = (daemon.welcome(Rank(daemon.socket)) for _ in range(2))
    rank.store_keys(keys)
    lease = rank.client.pin({0: keys}).lease
    other.client.clear()
    assert daemon.status()["memory"]["used_bytes"] == 8 * 4096
    rank.wipe()
    result = rank.load({0: (keys, rank.blocks_of(0, 0, 8))}, lease=lease)
    assert (result.outcome, result.failed[0].tolist()) == (Outcome.PARTIAL, list(range(8)))
    assert rank.clean()
    rank.client.release(lease)
    assert daemon.status()["memory"]["used_bytes"] == 0


def test_reserved_slots_of_a_cleared_epoch_can_not_be_filled(daemon: Daemon, keys: Keys) -> None:
    rank, other = (daemon.welcome(Rank(daemon.socket)) for _ in range(2))
    lease = rank.client.reserve({0: keys}).lease
    other.client.clear()
    result = rank.store_keys(keys, lease=lease)
    assert (result.outcome, result.bytes, set(result.states[0].tolist())) == (Outcome.DONE, 0, {KeyState.MISS})
    assert not result.valid(0).any()
    rank.client.release(lease)
    assert daemon.status()["memory"]["used_bytes"] == 0
    assert rank.store_keys(keys).outcome is Outcome.DONE


def test_clearing_everything_reaches_every_namespace(daemon: Daemon, keys: Keys) -> None:
    ranks = [
        daemon.welcome(Rank(daemon.socket, namespace=msgspec.structs.replace(NAMESPACE, salt=str(n)))) for n in range(3)
    ]
    for rank in ranks:
        rank.store_keys(keys)
    cleared = ranks[0].client.clear(everything=True)
    assert cleared.keys == 24
    assert all(rank.states(keys) == [MISS] * 8 for rank in ranks)


# --- drain -------------------------------------------------------------------------------------------------------


def begin_drain(pool: Executor, daemon: Daemon, rank: Rank, **options: bool) -> Future[Drained]:
    """A drain that waits."""
    found = pool.submit(rank.client.drain, HANG_S, **options)
    until(lambda: daemon.status()["accounts"][str(UID)].get("drains"), "it waits")
    return found


def test_drain_waits_for_jobs_and_seals(holdable: Daemon, hold: Hold, keys: Keys) -> None:
    rank, other = (holdable.welcome(Rank(holdable.socket)) for _ in range(2))
    with ThreadPoolExecutor(1) as pool, hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 8))})
        late = other.client.drain(0.05)
        assert (late.jobs, job.done) == (1, False)
        done = begin_drain(pool, holdable, other)
        assert not done.done()
        hold.release()
        assert (done.result().jobs, done.result().unsealed) == (0, 0)
    assert holdable.status()["cache"]["unsealed"] == 0
    assert rank.wait(job).outcome is Outcome.DONE


def test_drain_does_not_wait_for_other_namespaces(holdable: Daemon, hold: Hold, keys: Keys) -> None:
    rank = holdable.welcome(Rank(holdable.socket))
    other = holdable.welcome(Rank(holdable.socket, namespace=msgspec.structs.replace(NAMESPACE, salt="other")))
    with ThreadPoolExecutor(1) as pool, hold:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 8))})
        assert other.client.drain(HANG_S).jobs == 0
        assert holdable.status()["running"]["jobs"] == 1
        done = begin_drain(pool, holdable, other, everything=True)
        assert not done.done()
        hold.release()
        assert done.result().jobs == 0
    assert holdable.status()["running"]["jobs"] == 0
    assert rank.wait(job).outcome is Outcome.DONE
