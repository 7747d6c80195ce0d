"""Requests of many keys: each is one step, so the next request of the session finds it done, or not begun."""

from __future__ import annotations

import os
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.memory import audit
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.reservation import STEP_KEYS, Wanted, reserve, reserve_in_steps
from kvoffloadd.cache.policy import DEFAULT_POLICY, create_policy
from kvoffloadd.config import LimitsConfig
from kvoffloadd.errors import DrainingError, StateError
from kvoffloadd.model import PAGE_BYTES, U64Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.scheduling.steps import Steps
from kvoffloadd.server.context import Context
from kvoffloadd.server.session.jobs import STEP_GROUPS, SessionJobs
from kvoffloadd.server.session.sessionjob import GroupJob
from kvoffloadd.storage.memory import MemoryTier
from kvoffloadd.testing.wait import until
from tests.cache.fakes import keys_of, make_cache, make_context, make_keyspace
from tests.calls import Calls, assert_short
from tests.server.scene import Scene, ids, keys
from tests.steps import finish

MANY = 6000
"""More than one turn of the loop admits."""
BIG, ROUNDS = 16_384, 12
NOBODY: Any = None
DONE = object()
STEP_CPU_MAX_S = 0.06
"""Of the thread's CPU time; three times what a step may take on an idle machine."""


def groups(count: int, *, last_key: int | None = None, last_block: int = 0) -> list[dict[str, object]]:
    """Keys 1000, 1001... of group 0, all from block 0."""
    numbers = list(range(1000, 1000 + count))
    if last_key is not None:
        numbers[-1] = last_key
    return [{"group": 0, "keys": keys(*numbers), "blocks": ids(*[0] * (count - 1), last_block)}]


def test_what_follows_a_big_store_finds_it_admitted(scene: Scene) -> None:
    job = scene.new_job()
    store = scene.peer.begin("store", job=job, registration=scene.registration, groups=groups(MANY))
    asked = [{"group": 0, "keys": keys(*range(1000, 1000 + MANY))}]
    lookup = scene.peer.begin("lookup", groups=asked)
    again = scene.peer.begin("store", job=job + 50_000, registration=scene.registration, groups=groups(MANY))
    assert scene.peer.answer(store)["states"] == [bytes([3]) * MANY], "all are reserved"
    assert set(scene.peer.answer(lookup)["states"][0]) <= {1, 2}, "they hit, or are pending: none is a miss"
    assert set(scene.peer.answer(again)["states"][0]) <= {1, 2}, "no key is stored twice"
    assert scene.peer.completed(job)["outcome"] == "done"
    assert scene.peer.completed(job + 50_000)["outcome"] == "done"
    assert scene.peer.ok("lookup", groups=asked)["states"] == [b"\1" * MANY]


def test_a_big_store_that_is_cancelled_at_once_leaves_nothing_half_done(scene: Scene) -> None:
    job = scene.new_job()
    store = scene.peer.begin("store", job=job, registration=scene.registration, groups=groups(MANY))
    cancel = scene.peer.begin("cancel", job=job)
    assert scene.peer.answer(store)["type"] == "accepted"
    assert scene.peer.answer(cancel).get("code", "unknown_name") == "unknown_name", "it may have ended already"
    outcome = scene.peer.completed(job)["outcome"]
    states = scene.peer.ok("lookup", groups=[{"group": 0, "keys": keys(*range(1000, 1000 + MANY))}])["states"]
    assert states == [bytes([int(outcome == "done")]) * MANY], outcome


def test_a_peer_that_leaves_while_its_big_store_is_admitted(scene: Scene) -> None:
    """Whenever it leaves: nothing of it stays reserved."""
    asked = [{"group": 0, "keys": keys(*range(1000, 1000 + MANY))}]
    for wait_s in (0.0, 0.001, 0.003, 0.006):
        leaving = Scene(scene.daemon, scene.salt, os.urandom(16))
        job = leaving.new_job()
        leaving.peer.begin("store", job=job, registration=leaving.registration, groups=groups(MANY))
        time.sleep(wait_s)
        leaving.peer.close()
        until(lambda: 2 not in scene.peer.ok("lookup", groups=asked)["states"][0], "no key is pending any more")
    scene.settle()
    assert scene.daemon.verify() == ()


def test_a_clear_while_a_big_store_is_admitted(scene: Scene) -> None:
    other = scene.stranger()
    asked = [{"group": 0, "keys": keys(*range(1000, 1000 + MANY))}]
    for _ in range(4):
        job = scene.new_job()
        store = scene.peer.begin("store", job=job, registration=scene.registration, groups=groups(MANY))
        clear = other.begin("clear")
        assert scene.peer.answer(store)["type"] == "accepted"
        assert other.answer(clear)["type"] == "cleared"
        completed = scene.peer.completed(job)
        assert completed["outcome"] in ("done", "partial")
        states = np.frombuffer(scene.peer.ok("lookup", groups=asked)["states"][0], np.uint8)
        assert set(states.tolist()) <= {0, 1}
        lost = np.frombuffer(completed["failed"][0], "<u4")
        assert not states[lost].any(), "what it said is lost is not there"
        scene.settle()
        assert scene.daemon.verify() == ()
        other.ok("clear")


def test_big_reservations_are_answered_in_order(scene: Scene) -> None:
    asked = [{"group": 0, "keys": keys(*range(1000, 1000 + MANY))}]
    reserve = scene.peer.begin("reserve", groups=asked)
    again = scene.peer.begin("reserve", groups=asked)
    reserved, rest = scene.peer.answer(reserve), scene.peer.answer(again)
    assert reserved["states"] == [bytes([3]) * MANY]
    assert rest["states"] == [bytes([2]) * MANY]
    assert not rest["lease"]
    release = scene.peer.begin("release", lease=reserved["lease"])
    lookup = scene.peer.begin("lookup", groups=asked)
    assert scene.peer.answer(release)["type"] == "done"
    assert scene.peer.answer(lookup)["states"] == [bytes(MANY)], "all are freed before the next request"
    scene.peer.refused("bad_lease", "release", lease=reserved["lease"])
    assert scene.daemon.verify() == ()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 99])
def test_between_two_steps_the_audit_knows_what_is_reserved_and_a_close_frees_it(steps: int) -> None:
    cache = make_cache(pages=3 * STEP_KEYS, slab_pages=256)
    _, keyspace = make_keyspace(cache)
    wanted = Wanted.from_first(keyspace, keys_of(*range(2 * STEP_KEYS + 5)), np.zeros(1, np.uint16), 0)
    context = make_context(cache)
    work = reserve_in_steps(cache, [wanted])
    for _ in range(steps):
        if next(work, DONE) is DONE:
            break
        assert cache.unfinished
        assert audit.check(cache, *Context._accounts(context)) == []
    else:
        work.close()
        assert audit.check(cache, 0, 0) == []
    assert not cache.unfinished
    cache.tier.close()


@pytest.mark.parametrize("ending", ["closed", "draining"])
def test_no_job_begins_whose_session_ends_between_two_steps(ending: str) -> None:
    """Nor while the daemon shuts down; and what was done is undone."""
    context: Any = SimpleNamespace(draining=False)
    jobs = SessionJobs(context, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, LimitsConfig())
    undone = False

    def work() -> Steps[int]:
        nonlocal undone
        try:
            yield
            yield
        finally:
            undone = True
        return 7

    assert finish(jobs.while_open(work())) == 7
    undone = False
    begun = jobs.while_open(work())
    next(begun)
    setattr(jobs if ending == "closed" else context, ending, True)
    with pytest.raises(StateError if ending == "closed" else DrainingError):
        next(begun)
    assert undone


def test_no_job_begins_behind_the_end_of_all() -> None:
    context: Any = SimpleNamespace(draining=False)
    jobs = SessionJobs(context, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, LimitsConfig())
    jobs.check_open()
    assert finish(jobs.cancel_all()) == set()
    with pytest.raises(StateError):
        jobs.check_open()


def checked_in_steps(jobs: SessionJobs) -> Steps[list[GroupJob]]:
    """The check of a job of many groups, of one key each."""
    group: Any = SimpleNamespace(held=(0,), price=1, num_blocks=16, schema=SimpleNamespace(blocks_per_key=1))
    registration: Any = SimpleNamespace(id=1, groups=dict.fromkeys(range(4 * STEP_GROUPS), group))
    named = [m.GroupBlocks(group=n, keys=keys(n), blocks=ids(n % 16)) for n in registration.groups]
    return jobs._check(named, registration)


def test_groups_that_are_cleared_while_a_job_is_checked_go_on_in_their_new_keyspaces() -> None:
    """A cleared keyspace still has its keys for a while; what asks for them by the new one does not find them."""
    namespace: Any = SimpleNamespace(key_bytes=32, keyspaces=dict.fromkeys(range(4 * STEP_GROUPS), "cleared"))
    context: Any = SimpleNamespace(draining=False)
    work = checked_in_steps(SessionJobs(context, namespace, NOBODY, NOBODY, NOBODY, NOBODY, LimitsConfig()))
    next(work)
    namespace.keyspaces.update(dict.fromkeys(namespace.keyspaces, "new"))
    spaces: set[Any] = {group.keyspace for group in finish(work)}
    assert spaces == {"new"}


def test_a_session_that_ends_while_a_job_is_checked() -> None:
    context: Any = SimpleNamespace(draining=False)
    namespace: Any = SimpleNamespace(key_bytes=32)
    jobs = SessionJobs(context, namespace, NOBODY, NOBODY, NOBODY, NOBODY, LimitsConfig())
    work = checked_in_steps(jobs)
    next(work)
    jobs.closed = True
    with pytest.raises(StateError):
        finish(work)


@pytest.mark.parametrize(
    ("wrong", "code"), [({"last_key": 1000}, "duplicate"), ({"last_block": 16}, "bad_block_id")], ids=["key", "block"]
)
def test_a_big_store_with_a_mistake_at_its_end_changes_nothing(
    unchanged: Scene, wrong: dict[str, int], code: str
) -> None:
    job = unchanged.job(groups=groups(MANY, **wrong))
    unchanged.peer.refused(code, "store", **job)


def test_no_step_of_the_cache_is_long() -> None:
    """No call that the loop makes is long, while the index grows, and while each store evicts another."""
    assert_short(all_steps, STEP_CPU_MAX_S)


def all_steps() -> Calls:
    tier = MemoryTier(8 * BIG * PAGE_BYTES, 256 * PAGE_BYTES)
    cache = Cache(tier, partial(create_policy, DEFAULT_POLICY), seed=5)
    namespace, keyspace = make_keyspace(cache)
    rng = np.random.default_rng(5)
    calls = Calls()
    for number in range(ROUNDS):
        asked: U64Array = rng.integers(0, 1 << 63, (BIG, 4), dtype=np.uint64)
        with calls.timed("reserve"):
            reserved = reserve(cache, keyspace, asked, np.zeros(1, np.uint16), 0)
        assert len(reserved.parts) == BIG
        if number % 4 == 3:
            with calls.timed("abort"):
                cache.abort(reserved.parts)
            continue
        with calls.timed("commit"):
            cache.commit(reserved.parts)
        generations = cache.entries.parts.generation[reserved.parts]
        with calls.timed("seal"):
            cache.seal(reserved.parts, generations, np.zeros((BIG, 2), np.uint64))
        with calls.timed("find"):
            found = cache.find(keyspace, asked)
        assert found.hits.all()
        with calls.timed("use"):
            cache.hold(found.hit_rows)
            cache.uses.add([(keyspace, found, 0)])
            cache.uses.settle()
            cache.unhold(found.hit_rows)
    cache.epochs.advance(namespace.fingerprint)
    turns = iter(cache.clear(namespace))
    left = True
    while left:
        with calls.timed("clear"):
            left = next(turns, None) is not None
    assert len(cache.entries.index) == 0
    tier.close()
    return calls
