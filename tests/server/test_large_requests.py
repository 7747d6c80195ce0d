"""Registrations and statuses that are too large for one turn of the loop: the same answers, over several turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.cache.jobs.jobs import Verification
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.cache.progress import Progress
from kvoffloadd.config import Config
from kvoffloadd.errors import ExtentError, LimitError, SchemaError, StateError, UnknownNameError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.protocol import messages as m
from kvoffloadd.scheduling import steps
from kvoffloadd.scheduling.lag import Lag
from kvoffloadd.scheduling.steps import in_turns
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers.account import Account, Accounts, caps
from kvoffloadd.server.peers.outbox import Outbox
from kvoffloadd.server.peers.peer import Peer
from kvoffloadd.server.session import registration, registry
from kvoffloadd.server.session.registration import Attachment
from kvoffloadd.server.session.session import Session
from kvoffloadd.testing.wait import HANG_S
from tests.cache.fakes import make_cache

MEMORY = 7
NOBODY: Any = None


class Named(SimpleNamespace):
    """One of a kind."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@dataclass
class Room:
    """A session with 1 MiB of memory that no copy touches."""

    cache: Cache
    context: Context
    session: Session

    @property
    def registry(self) -> Any:
        return self.session._registry

    @property
    def descriptors(self) -> int:
        return self.context.accounts.of(0).used.get("descriptors", 0)

    async def ask(self, message: m.Message) -> Any:
        answer: Any = self.session.handle(message, [])
        if isinstance(answer, Generator):
            answer = in_turns(answer)
        return await answer if asyncio.iscoroutine(answer) else answer


@pytest.fixture
async def room() -> Room:
    cache = make_cache()
    loop = asyncio.get_running_loop()
    host: Any = Named(kind="host", gauges=dict, lanes=list)
    jobs: Any = SimpleNamespace(
        running=set(), counters={}, unsealed=0, holds=0, verification=lambda _: Verification.ADOPTED
    )
    lane: Any = SimpleNamespace(queued=0, running=0, figures=dict)
    gpus: Any = SimpleNamespace(devices=list)
    context = Context(
        Config(), b"b" * 16, loop, cache, jobs, host, gpus, NOBODY, lane, NOBODY,
        Accounts(caps(Config().limits)), Lag(loop), NOBODY, NOBODY, own_uid=0,
    )  # fmt: skip
    session = Session(context, Peer(1, 0, 0, -1), Outbox(1 << 20, context.accounts.of(0)), lambda message: None)
    context.sessions.add(session)
    made = Room(cache, context, session)
    await made.ask(
        m.Hello(seq=1, version=1, role="worker", instance=b"i" * 16, namespace=m.NamespaceSpec(model="large"))
    )
    memory: Any = SimpleNamespace(
        base_address=1 << 30, size_bytes=1 << 20, charged_bytes=1 << 20, whole=True, kind="host"
    )
    made.registry.attached[MEMORY] = Attachment(memory, host)
    return made


def message(number: int = 600, group: int = 0, **more: Any) -> m.Register:
    """Returns a registration of `number` tensors of 64 bytes, side by side."""
    tensors = [
        m.TensorSpec(allocation=MEMORY, offset=64 * n, num_blocks=1, page_bytes=64, stride_bytes=64)
        for n in range(number)
    ]
    refs = [m.RefSpec(tensor=n, offset=0, length=64) for n in range(number)]
    fields = {"group": group, "kind": "full", "tokens_per_key": 16, "refs": refs, **more}
    return m.Register(seq=1, tensors=tensors, groups=[m.GroupSpec(**fields)])


def clash() -> m.Register:
    """Its last ref shares bytes with the one before."""
    good = message()
    (group,) = good.groups
    again = m.GroupSpec(
        group=0, kind="full", tokens_per_key=16, refs=[*group.refs, m.RefSpec(tensor=599, offset=8, length=1)]
    )
    return m.Register(seq=1, tensors=good.tensors, groups=[again])


async def test_large_ones_are_what_small_ones_are(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registration.is_large(message())
    large = (await room.ask(message())).registration
    monkeypatch.setattr(registration, "LARGE_SPECS", 2000)
    assert not registration.is_large(message())
    small = (await room.ask(message())).registration
    one, other = (room.registry.registrations[number] for number in (large, small))
    assert room.registry.attached[MEMORY].uses == 2
    assert (one.descriptors, one.allocations, one.families) == (other.descriptors, other.allocations, other.families)
    for name in ("block", "base", "stride", "offset", "size"):
        own, its = (getattr(found.groups[0].held[0].plan, name) for found in (one, other))
        assert own.tolist() == its.tolist()


@pytest.mark.parametrize("wrong", [clash(), message(group=1, window_keys=3), message(20_000)])
async def test_what_is_refused_changes_nothing(room: Room, wrong: m.Register) -> None:
    with pytest.raises((ExtentError, SchemaError, LimitError)):
        await room.ask(wrong)
    assert not room.registry.registrations
    assert room.descriptors == room.registry.attached[MEMORY].uses == 0
    assert not next(iter(room.cache.namespaces.values())).keyspaces


async def begun(room: Room) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(room.ask(message()))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_memory_that_goes_meanwhile(room: Room) -> None:
    task = await begun(room)
    del room.registry.attached[MEMORY]
    with pytest.raises(UnknownNameError, match="was unmapped"):
        await task
    assert room.descriptors == 0
    assert not room.registry.registrations


async def test_a_group_that_becomes_another_meanwhile(room: Room) -> None:
    task = await begun(room)
    await room.ask(m.Register(seq=2, tensors=[], groups=[m.GroupSpec(group=0, kind="full", tokens_per_key=32)]))
    with pytest.raises(SchemaError):
        await task
    assert len(room.registry.registrations) == 1
    assert room.registry.attached[MEMORY].uses == 0


async def test_a_session_that_ends_meanwhile(room: Room) -> None:
    task = await begun(room)
    room.registry._closed = True
    with pytest.raises(StateError):
        await task
    assert room.descriptors == 0


@dataclass
class DraftGate:
    """Large drafts wait in it."""

    began: list[m.Register]
    opened: threading.Event

    async def begun(self) -> None:
        """A draft has."""
        async with asyncio.timeout(HANG_S):
            while not self.began:  # noqa: ASYNC110  a thread fills it
                await asyncio.sleep(0.001)

    def draft(self, message: m.Register, attached: Any) -> registration.Draft:
        self.began.append(message)
        assert not registration.is_large(message) or self.opened.wait(HANG_S)
        return registration.draft(message, attached)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[DraftGate]:
    made = DraftGate([], threading.Event())
    monkeypatch.setattr(registry, "draft", made.draft)
    yield made
    made.opened.set()


async def settled(room: Room) -> None:
    await asyncio.wait_for(asyncio.gather(*room.context.tasks, return_exceptions=True), HANG_S)
    await asyncio.sleep(0)
    if room.context.tasks:  # those that these have begun
        await settled(room)


@pytest.mark.parametrize("ended", [False, True])
async def test_a_request_that_is_given_up(room: Room, gate: DraftGate, ended: bool) -> None:
    """It is charged until its thread is done; a session that goes gets no registration."""
    task = await begun(room)
    await gate.begun()
    room.registry._closed = ended
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    charged = room.descriptors
    assert charged > 0
    gate.opened.set()
    await settled(room)
    assert len(room.registry.registrations) == int(not ended)
    assert room.descriptors == (0 if ended else charged)
    assert room.registry.attached[MEMORY].drafts == 0


async def test_one_thread_at_a_time_for_a_user(room: Room, gate: DraftGate) -> None:
    """What waits for a session that goes is never begun."""
    tasks = [await begun(room), await begun(room)]
    await gate.begun()
    for _ in range(10):
        await asyncio.sleep(0)
    assert room.context.accounts.of(0).drafting.locked()
    room.registry._closed = True
    gate.opened.set()
    for task in tasks:
        with pytest.raises(StateError):
            await task
    assert len(gate.began) == 1
    assert room.descriptors == 0


@pytest.mark.parametrize("wrong", [False, True])
async def test_memory_that_another_lets_go_meanwhile(room: Room, gate: DraftGate, wrong: bool) -> None:
    """It stays, until the last that names it has gone, or was refused."""
    unmapped: list[Any] = []

    async def end(*_: object) -> bool:
        return True

    async def unmap(allocation: Any) -> None:
        unmapped.append(allocation)

    entry = room.registry.attached[MEMORY]
    entry.device.unmap = unmap
    jobs: Any = room.context.jobs
    jobs.end = end
    room.registry.account.used.update(mapped_bytes=1 << 20, fds=1)
    first = (await room.ask(message(1, group=1))).registration
    task = asyncio.ensure_future(room.ask(clash() if wrong else message()))
    last = asyncio.ensure_future(room.ask(m.Unregister(seq=2, registration=first)))
    await last
    assert not unmapped
    gate.opened.set()
    if wrong:
        with pytest.raises(ExtentError):
            await task
    else:
        await room.ask(m.Unregister(seq=3, registration=(await task).registration))
    await settled(room)
    assert unmapped == [entry.allocation]
    assert not room.registry.attached


async def test_memory_that_a_refused_draft_lets_go_is_named_no_more(
    room: Room, gate: DraftGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by a request that was read in the turn in which the draft is refused."""
    refused: list[Exception] = []
    waiting: list[asyncio.Handle] = []

    async def end(*_: object) -> bool:
        return True

    async def unmap(_: Any) -> None:
        pass

    def at_once() -> None:
        try:
            room.session.handle(message(1, group=2), [])
        except UnknownNameError as error:
            refused.append(error)

    def refund(account: Account, **amounts: int) -> None:
        if "descriptors" in amounts and gate.opened.is_set() and not waiting:
            waiting.append(asyncio.get_running_loop().call_soon(at_once))
        whole_refund(account, **amounts)

    whole_refund = Account.refund
    monkeypatch.setattr(Account, "refund", refund)
    room.registry.attached[MEMORY].device.unmap = unmap
    jobs: Any = room.context.jobs
    jobs.end = end
    room.registry.account.used.update(mapped_bytes=1 << 20, fds=1)
    first = (await room.ask(message(1, group=1))).registration
    task = asyncio.ensure_future(room.ask(clash()))
    await gate.begun()
    await room.ask(m.Unregister(seq=2, registration=first))
    gate.opened.set()
    with pytest.raises(ExtentError):
        await task
    await settled(room)
    assert len(refused) == 1
    assert not room.registry.attached
    assert not room.registry.registrations


async def test_memory_that_nothing_names_stays(room: Room) -> None:
    """A registration that is refused lets nothing go."""
    with pytest.raises(ExtentError):
        await room.ask(clash())
    await settled(room)
    assert room.registry.attached[MEMORY].drafts == 0


async def test_a_clear_meanwhile(room: Room) -> None:
    """The group goes on, in the new epoch."""
    await room.ask(message())
    task = await begun(room)
    await room.ask(m.Clear(seq=3))
    number = (await task).registration
    (namespace,) = room.cache.namespaces.values()
    assert namespace.keyspaces[0].part_bytes == [
        room.registry.registrations[number].groups[0].held[0].plan.payload_bytes
    ]


async def test_a_status_of_many(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = (await room.ask(m.Status(seq=1))).status
    monkeypatch.setattr(steps, "TURN_S", 0.0)  # each step is a turn
    turns = 0
    task = asyncio.ensure_future(room.ask(m.Status(seq=2)))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 5
    later = task.result().status
    assert later.keys() == at_once.keys()
    for name in ("leases", "accounts", "namespaces", "sessions", "slow_jobs", "lookups"):
        found, expected = later[name], at_once[name]
        if name == "sessions":
            found, expected = ([{**one, "requests": 0} for one in sessions] for sessions in (found, expected))
        assert found == expected


async def test_keys_of_many_parts_count_as_more(room: Room) -> None:
    """A reservation counts each part that is asked for; anything else counts a sixteenth of all parts."""
    for group, parts in ((0, 1), (1, 8), (2, 64)):
        specs = [
            m.GroupSpec(
                group=group, kind="full", tokens_per_key=16, parts=parts, part=part,
                refs=[m.RefSpec(tensor=0, offset=0, length=64)],
            )
            for part in range(parts)
        ]  # fmt: skip
        await room.ask(m.Register(seq=1, tensors=message(1).tensors, groups=specs))

    def keys_of_group(group: int, count: int) -> list[m.GroupKeys]:
        return [m.GroupKeys(group=group, keys=bytes(range(256)) * (count // 8))]

    cap = room.session._limits.keys_per_request
    for group, price in ((0, 1), (1, 1), (2, 4)):
        await room.ask(m.Lookup(seq=1, groups=keys_of_group(group, cap // price)))
        with pytest.raises(LimitError, match=f"the cap is {cap}"):
            await room.ask(m.Lookup(seq=1, groups=keys_of_group(group, cap // price + 8)))
    # Of keys that are named twice: the price is looked at first.
    reserved: list[tuple[int, list[int] | None, int]] = [
        (0, None, 1), (1, None, 8), (1, [3, 3, 4], 2), (2, None, 64), (2, [0], 4),
    ]  # fmt: skip
    for group, wanted, price in reserved:
        with pytest.raises(LimitError, match=f"the cap is {cap}"):
            await room.ask(m.Reserve(seq=1, groups=keys_of_group(group, cap // price + 8), parts=wanted))
        keys = b"".join(number.to_bytes(32, "little") for number in range(cap // price))
        made = await room.ask(m.Reserve(seq=1, groups=[m.GroupKeys(group=group, keys=keys)], parts=wanted))
        if made.lease:
            await room.ask(m.Release(seq=1, lease=made.lease))


async def test_memory_that_is_attached_when_the_session_has_ended(room: Room) -> None:
    """A worker that dies at that moment is no bug of the daemon."""
    assert room.registry.sizes_bytes([MEMORY]) == [1 << 20]
    room.registry.attached.clear()
    with pytest.raises(StateError, match="ended"):
        room.registry.sizes_bytes([MEMORY])


async def test_a_job_that_a_bug_ends_before_it_begins_gives_back_its_charges(room: Room) -> None:
    """The request fails; nothing counts for it."""
    number = (await room.ask(message(1))).registration

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    jobs: Any = room.context.jobs
    jobs.progress = Progress()
    jobs.store = jobs.load = fail
    account = room.context.accounts.of(0)
    before = dict(account.used)
    blocks = m.GroupBlocks(group=0, keys=bytes(32), blocks=bytes(4))
    for request in (
        m.Store(seq=2, job=1, registration=number, groups=[blocks]),
        m.Load(seq=3, job=2, registration=number, groups=[blocks]),
    ):
        with pytest.raises(ZeroDivisionError):
            await room.ask(request)
    assert {name: count for name, count in account.used.items() if count} == {n: c for n, c in before.items() if c}
    assert room.session._outbox.reserved_bytes == 0
    assert jobs.progress.is_past(jobs.progress.last)


async def test_too_many_keys_are_not_searched_for_duplicates(room: Room) -> None:
    """A frame of 4 MiB may name half a million: the price is looked at before anything that takes time by the key."""
    number = (await room.ask(message(1))).registration
    cap = room.session._limits.keys_per_request
    twice = m.GroupBlocks(group=0, keys=bytes(32) * (cap + 1), blocks=b"")
    for request in (
        m.Store(seq=2, job=1, registration=number, groups=[twice]),
        m.Load(seq=3, job=2, registration=number, groups=[twice]),
    ):
        with pytest.raises(LimitError, match=f"the cap is {cap}"):
            await room.ask(request)


async def test_a_registration_whose_tables_find_no_memory_changes_nothing(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour may have taken all mappings that the kernel allows."""
    make, sizes = room.cache.eviction._make_policy, list[int]()

    def fail_at_the_second(capacity_rows: int, max_rows: int) -> Policy:
        sizes.append(capacity_rows)
        if len(sizes) == 2:
            raise MemoryError("no address space for 480 bytes")
        return make(capacity_rows, max_rows)

    monkeypatch.setattr(room.cache.eviction, "_make_policy", fail_at_the_second)
    tensor = m.TensorSpec(allocation=MEMORY, offset=0, num_blocks=1, page_bytes=1 << 20, stride_bytes=1 << 20)
    groups = [
        m.GroupSpec(
            group=number, kind="full", tokens_per_key=16,
            refs=[m.RefSpec(tensor=0, offset=0, length=PAGE_BYTES * (number + 1))],
        )
        for number in range(3)
    ]  # fmt: skip
    request = m.Register(seq=2, tensors=[tensor], groups=groups)
    with pytest.raises(LimitError, match=r"no memory for tables .* 480"):
        await room.ask(request)
    (namespace,) = room.cache.namespaces.values()
    assert not namespace.keyspaces
    assert (room.registry.registrations, room.descriptors) == ({}, 0)
    assert check(room.cache, 0, 0) == []
    await room.ask(request)
    assert len(namespace.keyspaces) == len(room.cache.eviction.queues) == 3
    assert check(room.cache, 0, 0) == []


async def test_a_store_that_a_bug_ends_behind_its_reservation_gives_its_slots_back(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = (await room.ask(message(1))).registration

    def fail(**_: object) -> None:
        raise MemoryError

    blocks = m.GroupBlocks(group=0, keys=bytes(32), blocks=bytes(4))
    with monkeypatch.context() as planted:
        planted.setattr("kvoffloadd.server.session.jobs.Accepted", fail)
        with pytest.raises(MemoryError):
            await room.ask(m.Store(seq=2, job=1, registration=number, groups=[blocks]))
    assert check(room.cache, 0, 0) == []
    assert room.cache.counters.parts_aborted == 1
