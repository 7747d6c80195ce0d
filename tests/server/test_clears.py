"""A clear is the daemon's: it goes on to its end, whatever becomes of who asked for it."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.cache import clearing
from kvoffloadd.cache.clearing import Clearing
from kvoffloadd.cache.memory import keytable
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.config import Config
from kvoffloadd.errors import LimitError, MessageError, UnknownNameError
from kvoffloadd.model import GroupKind, GroupSchema
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.messages import TOKEN_BYTES
from kvoffloadd.scheduling import steps
from kvoffloadd.scheduling.lag import Lag
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers.account import Accounts, caps
from kvoffloadd.server.peers.clears import REMEMBERED
from kvoffloadd.server.peers.outbox import Outbox
from kvoffloadd.server.peers.peer import Peer
from kvoffloadd.server.session.session import Session
from tests.cache.fakes import events_of, keys_of, make_cache, store


def context_of(cache: Any) -> Context:
    """Makes as much of a daemon's context as a clear needs."""
    nothing: Any = None
    return Context(
        config=Config(),
        boot_id=b"b" * 16,
        loop=asyncio.get_running_loop(),
        cache=cache,
        jobs=nothing,
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


def session_of(context: Context) -> Session:
    """Returns one that has sent its hello."""
    session = Session(
        context,
        Peer(1, context.own_uid, 0, -1),
        Outbox(1 << 20, context.accounts.of(context.own_uid)),
        lambda message: None,
    )
    spec = m.NamespaceSpec(model="m")
    hello = m.Hello(seq=1, version=1, role="scheduler", instance=b"i" * 16, namespace=spec)
    assert isinstance(session.handle(hello, []), m.Welcome)
    return session


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
async def test_who_asks_for_a_clear_goes(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """All of it is done and reported, from the moment at which it was asked for."""
    monkeypatch.setattr(keytable, "STEP_ROWS", 4)  # many steps, and each is a turn
    monkeypatch.setattr(steps, "TURN_S", 0.0)
    cache = make_cache()
    context = context_of(cache)
    session = session_of(context)
    (namespace,) = cache.namespaces.values()
    namespace.listeners = 1
    keyspace = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16))
    cache.set_part_bytes(keyspace, {0: 4096})
    store(cache, keyspace, keys_of(*range(40)))
    events_of(cache)
    answer = session.handle(m.Clear(seq=2), [])
    assert asyncio.iscoroutine(answer)
    assert keyspace.retired, "its turn has paid for the costly part"
    task = asyncio.ensure_future(answer)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await context.clearings.close(60.0)
    assert keyspace.rows == keyspace.keys == 0
    assert sum(len(event.removed) for event in events_of(cache)) == 40 * 32
    assert cache.epochs.of(namespace.fingerprint) == namespace.epoch != 0
    assert not context.clearings._running
    assert check(cache, 0, 0) == []


async def test_a_clear_over_the_cap_is_refused_by_its_handler() -> None:
    cache = make_cache()
    context = context_of(cache)
    session = session_of(context)
    (namespace,) = cache.namespaces.values()
    keyspace = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16))
    cache.entries.keyspaces.groups_max = 0
    with pytest.raises(LimitError):
        session.handle(m.Clear(seq=2), [])
    assert (keyspace.retired, namespace.epoch, len(context.clearings._running)) == (False, 0, 0)


# --- tokens ---


async def test_the_last_tokens_of_each_user_are_remembered() -> None:
    context = context_of(make_cache())
    names, others = frozenset([b"n" * 16]), frozenset([b"o" * 16])
    tokens = [number.to_bytes(TOKEN_BYTES) for number in range(REMEMBERED + 1)]
    requested = context.requested_clears

    def begin(uid: int, names: frozenset[bytes], token: bytes) -> Clearing:
        return requested.begin(uid, names, token).result()

    def epoch(clearing: Clearing) -> int:
        ((_, begun),) = clearing.epochs
        return begun

    first, *_, last = [begin(1, names, token) for token in tokens[:REMEMBERED]]
    assert begin(1, names, tokens[0]) is first
    assert begin(1, names, tokens[REMEMBERED - 1]) is last
    elsewhere = [begin(2, names, tokens[0]), begin(2, others, tokens[0])]
    assert len(set(map(epoch, (first, *elsewhere)))) == 3, "one user's token is none of another's"
    begin(1, names, tokens[REMEMBERED])
    assert epoch(begin(1, names, tokens[1])) > epoch(first), "it was remembered"
    before = context.cache.epochs.last
    assert epoch(begin(1, names, tokens[0])) > before, "the oldest is forgotten"


async def test_a_clear_of_everything_is_not_one_of_a_namespace() -> None:
    context = context_of(make_cache())
    session = session_of(context)
    (namespace,) = context.cache.namespaces.values()
    epochs = []
    for everything in (False, True, True, False):
        answer = session.handle(m.Clear(seq=2, everything=everything, token=b"t" * 16), [])
        assert asyncio.iscoroutine(answer)
        assert await answer == m.Cleared(seq=2, keys=0, bytes=0)
        epochs.append(namespace.epoch)
    assert 0 < epochs[0] < epochs[1] == epochs[2] == epochs[3]


# --- by the names of namespaces ---


def spaces(cache: Any, *labels: str) -> list[Any]:
    """Returns the keyspaces of namespaces of these labels, with four keys each and no sessions."""
    found = []
    for label in labels:
        namespace = cache.open_namespace(label.encode().ljust(16), 1, label, 32)
        found.append(cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16)))
        cache.set_part_bytes(found[-1], {0: 4096})
        store(cache, found[-1], keys_of(*range(4)))
        cache.close_namespace(namespace)
    return found


def named(pattern: str, token: bytes = b"t" * 16) -> m.Clear:
    return m.Clear(seq=2, namespaces=pattern, token=token)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
async def test_who_asks_for_a_clear_by_names_goes(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """It reaches all of them, and the next session that asks gets its result, though they are gone by then."""
    monkeypatch.setattr(clearing, "GROUPS_AT_ONCE", 1)
    monkeypatch.setattr(steps, "TURN_S", 0.0)
    cache = make_cache()
    context = context_of(cache)
    session = session_of(context)
    *old, other = spaces(cache, "llama/a", "llama/b", "llama/c", "qwen")
    answer = session.handle(named("llama/*"), [])
    assert asyncio.iscoroutine(answer)
    task = asyncio.ensure_future(answer)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await context.clearings.close(60.0)
    assert [one.retired for one in (*old, other)] == [True, True, True, False]
    assert [one.rows for one in (*old, other)] == [0, 0, 0, 4]
    session_of(context)  # a new session has those forgotten that are not in use
    again = session.handle(named("llama/*"), [])
    assert asyncio.iscoroutine(again)
    assert await again == m.Cleared(seq=2, keys=12, bytes=12 * 4096, namespaces=3)
    with pytest.raises(UnknownNameError, match="no namespace that is in use, or has keys in memory, has a name like"):
        session.handle(named("llama/*", b"u" * 16), [])
    assert check(cache, 0, 0) == []


async def test_a_clear_of_a_user_reaches_all_of_its_namespaces_and_no_others() -> None:
    cache = make_cache()
    context = context_of(cache)
    session = session_of(context)
    mine = spaces(cache, "a", "b")
    other = cache.open_namespace(b"o" * 16, 2, "a", 32)
    theirs = cache.declare(other, GroupSchema(0, GroupKind.FULL, 16))
    cache.set_part_bytes(theirs, {0: 4096})
    store(cache, theirs, keys_of(1))
    with pytest.raises(UnknownNameError, match=r"has keys in memory, has a name like 'x' and belongs to uid 1$"):
        session.handle(m.Clear(seq=2, namespaces="x", uid=1, token=b"t" * 16), [])
    with pytest.raises(UnknownNameError, match=r"has keys in memory, belongs to uid 3$"):
        session.handle(m.Clear(seq=2, uid=3, token=b"t" * 16), [])
    with pytest.raises(UnknownNameError, match=r"has a name like ''$"):
        session.handle(m.Clear(seq=2, namespaces="", token=b"t" * 16), [])
    answer = session.handle(m.Clear(seq=2, namespaces="a#*", uid=1, token=b"t" * 16), [])
    assert asyncio.iscoroutine(answer)
    assert await answer == m.Cleared(seq=2, keys=4, bytes=4 * 4096, namespaces=1)
    answer = session.handle(m.Clear(seq=2, uid=1, token=b"t" * 16), [])
    assert asyncio.iscoroutine(answer)
    assert await answer == m.Cleared(seq=2, keys=4, bytes=4 * 4096, namespaces=2)
    assert [keyspace.rows for keyspace in (*mine, theirs)] == [0, 0, 1]
    assert check(cache, 0, 0) == []


async def test_a_clear_by_names_takes_effect_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "GROUPS_AT_ONCE", 1)
    monkeypatch.setattr(steps, "TURN_S", 0.0)
    cache = make_cache()
    session = session_of(context_of(cache))
    old = spaces(cache, *"abcdef")
    answer = session.handle(named("[a-f]#*"), [])
    assert asyncio.iscoroutine(answer)
    task, reached = asyncio.ensure_future(answer), [0]
    while not task.done():
        await asyncio.sleep(0)
        reached.append(sum(one.retired for one in old))
    assert max(after - before for before, after in itertools.pairwise(reached)) == 1
    assert reached[-1] == len(old)


async def test_a_clear_by_names_that_finds_no_number_for_a_group_tells_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clearing, "GROUPS_AT_ONCE", 1)
    cache = make_cache()
    context = context_of(cache)
    session = session_of(context)
    old = spaces(cache, "a", "b", "c")
    checked = iter(range(9))

    def check_numbers(count: int) -> None:
        if next(checked) >= 3:  # for all of them together, for `a`, and for its new group
            raise LimitError("all numbers are taken")

    monkeypatch.setattr(cache.entries.keyspaces, "check_numbers", check_numbers)
    answer = session.handle(named("[abc]#*"), [])
    assert asyncio.iscoroutine(answer)
    assert await answer == m.Cleared(seq=2, keys=4, bytes=4 * 4096, namespaces=1, left=2)
    assert [one.rows for one in old] == [0, 4, 4]
    monkeypatch.undo()
    assert check(cache, 0, 0) == []


async def test_a_clear_by_names_that_can_not_be_is_refused() -> None:
    session = session_of(context_of(make_cache()))
    for wrong in (
        m.Clear(seq=2, namespaces="*"),
        m.Clear(seq=2, uid=1),
        m.Clear(seq=2, namespaces="*", token=b"t" * 16, everything=True),
        m.Clear(seq=2, uid=1, token=b"t" * 16, everything=True),
    ):
        with pytest.raises(MessageError):
            session.handle(wrong, [])


def test_namespaces_are_cleared_in_batches_of_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "GROUPS_AT_ONCE", 4)
    counts = [1, 0, 3, 9, 2, 2, 1]
    found = [SimpleNamespace(fingerprint=b"%d" % at, keyspaces=range(count)) for at, count in enumerate(counts)]
    batches = clearing._batches(found)  # type: ignore[arg-type]
    assert [sorted(map(int, batch)) for batch in batches] == [[0, 1], [2], [3], [4, 5], [6]]
