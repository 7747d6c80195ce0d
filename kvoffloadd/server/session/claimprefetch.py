"""Brings what memory keeps of claims into memory, some keys at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from kvoffloadd.cache.lower.fetches import Urgency
from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.errors import BusyError, LimitError
from kvoffloadd.model import U64Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.scheduling.lanes import Flow
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers.account import Account
from kvoffloadd.server.session.pins import find_all

BATCH_KEYS, BATCH_SHARE = 1024, 64
"""The maximum number of keys that are brought at once, and the fraction (1/n) of memory that they may take: all are
held until the last one has come.
"""


async def prefetch_claims(
    message: m.PrefetchClaims, claims: Sequence[Claim], context: Context, account: Account, flow: Flow
) -> m.Reply:
    """Brings the keys of claims from the tiers below into memory, from the `cursor` of the message on and for no longer
    than its `wait_s`. Raises BusyError if the user waits for too much at once.
    """
    try:
        account.charge(drains=1)
    except LimitError as error:
        raise BusyError(str(error)) from None
    try:
        return await _prefetch(message, claims, context, flow)
    finally:
        account.refund(drains=1)


async def _prefetch(message: m.PrefetchClaims, claims: Sequence[Claim], context: Context, flow: Flow) -> m.Reply:
    until, position, came, cursor = context.loop.time() + message.wait_s, 0, 0, 0
    for keyspace, first, keys in _batches(claims, context):
        position += len(keys)
        if position < message.cursor:
            continue
        if not await _bring(keyspace, first, keys, context, flow, until):
            cursor = position - len(keys) + 1
            break
        came += int(np.count_nonzero(context.cache.find(keyspace, keys).hits))
    num_keys = sum(claim.num_keys for claim in claims)
    return m.PrefetchedClaims(seq=message.seq, claims=len(claims), keys=num_keys, memory_keys=came, cursor=cursor)


def _batches(claims: Sequence[Claim], context: Context) -> Iterator[tuple[Keyspace, int, U64Array]]:
    """Yields what is brought at once: a keyspace, the position of the first key, and the keys. Once memory keeps less
    of a claim, the rest of it finds no place there: it would displace what came before, and others' keys.
    """
    cache, memory = context.cache, context.cache.retention.memory
    for claim in claims:
        kept = memory.num_keys(claim)
        for keyspace, first, keys in memory.prompt_of(claim):
            pages = max(int(cache.entries.keyspaces.pages[keyspace.id]), 1)
            step = max(min(BATCH_KEYS, cache.tier.num_pages // BATCH_SHARE // pages), 1)
            for begin in range(0, len(keys), step):
                if memory.num_keys(claim) == kept:
                    yield keyspace, first + begin, keys[begin : begin + step]


async def _bring(keyspace: Keyspace, first: int, keys: U64Array, context: Context, flow: Flow, until: float) -> bool:
    """Brings keys as far as the tiers below have them. Returns False if the time is over before."""
    await asyncio.sleep(0)
    found = find_all(context.cache, context.lower, [(keyspace, first, keys)], ask=True)
    if not found.num_below or context.lower is None or keyspace.retired:
        return True
    if context.loop.time() >= until:
        return False
    ended = asyncio.Event()
    fetch = context.lower.fetch(found.groups, Urgency.PREFETCH, ended.set, flow, whole=True)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await ended.wait()
        return ended.is_set()
    finally:
        fetch.cancel()
