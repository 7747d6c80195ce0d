"""The leases of an instance that is gone: they end over several turns of the loop, and count until then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.jobs.jobs import Jobs
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.keys import pack
from kvoffloadd.cache.memory.lease import LEASE_KEYS
from kvoffloadd.config import Config
from kvoffloadd.errors import LeaseError, LimitError
from kvoffloadd.protocol import messages as m
from kvoffloadd.scheduling import steps as steps_module
from kvoffloadd.scheduling.lag import Lag
from kvoffloadd.scheduling.steps import in_turns
from kvoffloadd.server import context as contexts
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers.account import Accounts, caps
from kvoffloadd.server.peers.outbox import Outbox
from kvoffloadd.server.peers.peer import Peer
from kvoffloadd.server.session.session import Session
from kvoffloadd.testing.wait import HANG_S
from tests.cache.fakes import keys_of, make_cache, store
from tests.steps import finish

KEYS = 512
SPEC = m.NamespaceSpec(model="m")
GROUP = m.GroupSpec(group=0, kind="full", tokens_per_key=16)


class LeaseScene:
    """A context whose cache holds KEYS keys, and sessions of schedulers."""

    def __init__(self) -> None:
        nothing: Any = None
        self.cache: Cache = make_cache(2 * KEYS, 64, policy="hit-density")
        self.context = Context(
            config=Config(),
            boot_id=b"b" * 16,
            loop=asyncio.get_running_loop(),
            cache=self.cache,
            jobs=Jobs(self.cache, None, nothing, nothing, verify_loads=False),
            host=nothing,
            gpus=nothing,
            signals=nothing,
            hash_lane=nothing,
            fatal=nothing,
            accounts=Accounts(caps(Config().limits)),
            lag=Lag(asyncio.get_running_loop()),
            turns=nothing,
            closer=nothing,
        )
        self.uid = self.context.own_uid
        self.first = self.session(b"0" * 16)
        self.first.handle(m.Register(seq=2, tensors=[], groups=[GROUP]), [])
        (namespace,) = self.cache.namespaces.values()
        self.cache.set_part_bytes(namespace.keyspaces[0], {0: 4096})
        store(self.cache, namespace.keyspaces[0], keys_of(*range(KEYS)))

    def session(self, token: bytes) -> Session:
        outbox = Outbox(1 << 20, self.context.accounts.of(self.uid))
        made = Session(self.context, Peer(1, self.uid, 0, -1), outbox, lambda message: None)
        made.handle(m.Hello(seq=1, version=1, role="scheduler", instance=token, namespace=SPEC), [])
        self.context.sessions.add(made)
        return made

    def pin(self, session: Session, *numbers: int) -> int:
        found = session.handle(m.Pin(seq=1, groups=[asked(*numbers)]), [])
        assert isinstance(found, m.Found)
        return found.lease

    def reserve(self, session: Session, *numbers: int) -> int:
        made: Any = session.handle(m.Reserve(seq=1, groups=[asked(*numbers)]), [])
        lease: int = finish(made).lease
        return lease

    def release(self, session: Session, lease: int) -> None:
        releasing: Any = session.handle(m.Release(seq=1, lease=lease), [])
        assert isinstance(finish(releasing), m.Done)

    def leases(self) -> dict[str, int]:
        found = self.context.instances.held()
        return {"read": found.read, "keys": found.keys, "write": found.write, "parts": found.parts}

    def charged(self) -> int:
        return self.context.accounts.of(self.uid).used.get("leases", 0)

    async def watch(self, *closing: asyncio.Future[Any]) -> list[dict[str, int]]:
        """What leases hold each turn of the loop until all have closed; the audit finds nothing in any."""
        seen = [self.leases()]
        async with asyncio.timeout(HANG_S):
            while not all(one.done() for one in closing):
                await asyncio.sleep(0)
                assert [finding for step in self.context.audit() for finding in step] == []
                seen.append(self.leases())
        return seen

    async def until(self, fact: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not fact():  # noqa: ASYNC110  it is the loop's turns that are tried here
                await asyncio.sleep(0)

    async def close(self) -> None:
        for session in list(self.context.sessions):
            assert isinstance(session, Session)
            await session.close()
            self.context.sessions.discard(session)
        assert (self.leases(), self.charged()) == (dict.fromkeys(self.leases(), 0), 0)
        assert self.context.accounts.leaks() == []
        assert check(self.cache, 0, 0) == []


def asked(*numbers: int) -> m.GroupKeys:
    return m.GroupKeys(group=0, keys=pack(keys_of(*numbers), 32))


def steps(seen: list[dict[str, int]]) -> list[int]:
    """How much each turn ended: rows, parts, and one more for each lease."""
    totals = [sum(held.values()) for held in seen]
    return [before - after for before, after in pairwise(totals)]


PER_TURN = 64


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> LeaseScene:
    """Turns are small."""
    monkeypatch.setattr(contexts, "ENDED_PER_TURN", PER_TURN)
    return LeaseScene()


async def test_many_pins_of_one_key_end_over_many_turns(scene: LeaseScene) -> None:
    dying = scene.session(b"1" * 16)
    for number in range(1000):
        scene.pin(dying, number % KEYS)
    scene.reserve(dying, *range(KEYS, KEYS + 200))
    for number in range(KEYS + 200, KEYS + 210):
        scene.reserve(dying, number)
    assert scene.leases() == {"read": 1000, "keys": 1000, "write": 11, "parts": 210}
    seen = await scene.watch(asyncio.ensure_future(dying.close()))
    assert max(steps(seen)) <= PER_TURN + 1
    assert len([step for step in steps(seen) if step]) >= 2221 // (PER_TURN + 1)
    assert sum(seen[-1].values()) == scene.charged() == 0, "its close was not done before"
    await scene.close()


async def test_many_instances_that_go_at_once_take_turns(scene: LeaseScene) -> None:
    dying = [scene.session(bytes([number]) * 16) for number in range(101, 201)]
    for number, session in enumerate(dying):
        for _ in range(10):
            scene.pin(session, number)
    seen = await scene.watch(*(asyncio.ensure_future(session.close()) for session in dying))
    assert max(steps(seen)) <= PER_TURN + 1
    assert len([step for step in steps(seen) if step]) >= 100, "in one turn only one instance's"
    await scene.close()


async def test_who_names_the_token_of_one_that_is_gone_neither_gets_nor_loses_anything(scene: LeaseScene) -> None:
    token = b"1" * 16
    dying = scene.session(token)
    old = [scene.pin(dying, number % KEYS) for number in range(500)]
    closing = asyncio.ensure_future(dying.close())
    await scene.until(lambda: 0 < scene.leases()["read"] < 400)
    joined = scene.session(token)
    assert joined.instance_id != dying.instance_id
    left = scene.leases()
    for lease in (old[0], old[-1]):
        with pytest.raises(LeaseError):
            scene.release(joined, lease)
    assert scene.leases() == left
    own = scene.pin(joined, 1, 2, 3)
    await scene.watch(closing)
    assert scene.leases() == {"read": 1, "keys": 3, "write": 0, "parts": 0}
    assert scene.charged() == LEASE_KEYS + 3
    scene.release(joined, own)
    assert scene.charged() == 0
    await scene.close()


async def test_the_namespace_and_its_instances_go_behind_the_leases(scene: LeaseScene) -> None:
    """A lease that waits for its end keeps what it names."""
    dying = scene.session(b"1" * 16)
    for number in range(200):
        scene.reserve(dying, KEYS + number)
    (namespace,) = scene.cache.namespaces.values()
    closing = asyncio.ensure_future(dying.close())
    await scene.until(lambda: 0 < scene.leases()["write"] < 200)
    assert namespace.sessions == 2
    assert not closing.done()
    await scene.watch(closing)
    assert (namespace.sessions, namespace.keyspaces[0].rows) == (1, KEYS)
    await scene.close()


async def test_a_lease_counts_for_more_than_its_keys(scene: LeaseScene) -> None:
    """So that the cap bounds what leases of few keys, or of none any more, take of the daemon's memory."""
    pinned = scene.pin(scene.first, 1)
    assert scene.charged() == LEASE_KEYS + 1
    reserved = scene.reserve(scene.first, KEYS, KEYS + 1, 1)
    assert scene.charged() == 2 * LEASE_KEYS + 3
    assert scene.reserve(scene.first, 1, 2) == scene.pin(scene.first, KEYS + 9) == 0, "nothing to reserve or to hold"
    assert scene.charged() == 2 * LEASE_KEYS + 3
    scene.context.accounts.change({"leases": 4 * LEASE_KEYS})
    with pytest.raises(LimitError):
        scene.pin(scene.first, *range(LEASE_KEYS - 2))
    with pytest.raises(LimitError):
        scene.reserve(scene.first, *range(KEYS + 10, KEYS + 10 + LEASE_KEYS - 2))
    assert scene.charged() == 2 * LEASE_KEYS + 3
    scene.pin(scene.first, *range(LEASE_KEYS - 3))
    for lease in (pinned, reserved):
        scene.release(scene.first, lease)
    assert scene.charged() == LEASE_KEYS + LEASE_KEYS - 3
    await scene.close()


async def test_a_reservation_that_fails_is_not_charged(scene: LeaseScene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as planted:
        planted.setattr("kvoffloadd.cache.memory.reservation.reserve_all", fail)
        with pytest.raises(ZeroDivisionError):
            scene.reserve(scene.first, KEYS)
    assert scene.charged() == 0
    await scene.close()


@pytest.mark.parametrize("leased", [False, True])
async def test_a_store_that_fails_behind_its_reservation_frees_what_is_not_leased(
    scene: LeaseScene, leased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a lease has reserved stays its own."""

    def fail(*_: object) -> None:
        raise MemoryError

    (namespace,) = scene.cache.namespaces.values()
    group = SimpleNamespace(schema=namespace.keyspaces[0].schema, held=(0,), price=1, num_blocks=2, descriptors=1)
    group.parts, group.plans = np.zeros(1, np.uint16), ()
    registration: Any = SimpleNamespace(id=1, groups={0: group}, device=object())
    lease = scene.reserve(scene.first, KEYS, KEYS + 1) if leased else 0
    before = scene.leases(), dict(scene.context.accounts.of(scene.uid).used)
    blocks = np.arange(2, dtype="<u4").tobytes()
    named = [m.GroupBlocks(group=0, keys=pack(keys_of(KEYS, KEYS + 1), 32), blocks=blocks)]
    jobs: Any = scene.first._jobs
    monkeypatch.setattr("kvoffloadd.server.session.jobs._lacking", fail)
    with pytest.raises(MemoryError):
        finish(jobs.store(m.Store(seq=2, job=1, registration=1, groups=named, lease=lease), registration))
    used = scene.context.accounts.of(scene.uid).used
    assert (scene.leases(), {name: used[name] for name in before[1]}) == before
    assert [finding for step in scene.context.audit() for finding in step] == []
    if lease:
        scene.release(scene.first, lease)
    assert scene.charged() == 0
    await scene.close()


async def test_a_large_lease_is_released_some_each_turn(scene: LeaseScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes behind the release on the same connection finds all of it free."""
    monkeypatch.setattr(steps_module, "TURN_S", 0.0)  # each step is a turn
    lease = scene.pin(scene.first, *range(5 * PER_TURN))
    releasing: Any = scene.first.handle(m.Release(seq=2, lease=lease), [])
    released = asyncio.create_task(in_turns(releasing))
    ended = steps(await scene.watch(released))
    assert max(ended) <= PER_TURN + LEASE_KEYS
    assert sum(1 for step in ended if step) >= 5
    assert isinstance(released.result(), m.Done)
    assert (scene.leases()["keys"], scene.charged()) == (0, 0)
    with pytest.raises(LeaseError):
        scene.release(scene.first, lease)
    await scene.close()


@pytest.mark.parametrize("begun", [1, 3])
async def test_a_release_goes_to_its_end_whatever_becomes_of_who_asked_for_it(scene: LeaseScene, begun: int) -> None:
    """Its session ends between two steps, and the instance has others: nothing else would end the lease."""
    asking = scene.session(b"0" * 16)
    lease = scene.pin(asking, *range(5 * PER_TURN))
    releasing: Any = asking.handle(m.Release(seq=2, lease=lease), [])
    for _ in range(begun):
        next(releasing)
    releasing.close()
    assert scene.leases()["keys"] == (5 - begun) * PER_TURN
    await scene.watch(*scene.context.tasks)
    assert (scene.leases()["keys"], scene.charged()) == (0, 0)
    await scene.close()
