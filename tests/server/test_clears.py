"""A clear is the daemon's: it goes on to its end, whatever becomes of who asked for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvoffloadd import steps
from kvoffloadd.cache.memory import keytable
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.config import Config
from kvoffloadd.errors import LimitError
from kvoffloadd.model import GroupKind, GroupSchema
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.messages import TOKEN_BYTES
from kvoffloadd.server.account import Accounts, caps
from kvoffloadd.server.clears import REMEMBERED
from kvoffloadd.server.context import Context
from kvoffloadd.server.lag import Lag
from kvoffloadd.server.outbox import Outbox
from kvoffloadd.server.peer import Peer
from kvoffloadd.server.session import Session
from tests.cache.fakes import events_of, keys_of, make_cache, store


def context_of(cache: Any) -> Context:
    """As much of a daemon as a clear needs."""
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
    """One that has said hello."""
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
    """From the moment at which it was asked for, all of it is done, and told."""
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
    first, *_, last = [requested.begin(1, names, token) for token in tokens[:REMEMBERED]]
    assert requested.begin(1, names, tokens[0]) is first
    assert requested.begin(1, names, tokens[REMEMBERED - 1]) is last
    elsewhere = [requested.begin(2, names, tokens[0]), requested.begin(2, others, tokens[0])]
    assert len({clearing.epoch for clearing in (first, *elsewhere)}) == 3, "one user's token is none of another's"
    requested.begin(1, names, tokens[REMEMBERED])
    assert requested.begin(1, names, tokens[1]).epoch > first.epoch, "it was remembered"
    before = context.cache.epochs.last
    assert requested.begin(1, names, tokens[0]).epoch > before, "the oldest is forgotten"


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
