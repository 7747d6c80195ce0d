"""Requests to clear: a repeated request gets the answer of the first. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from kvoffloadd.cache.clearing import Clearing, Clearings, Matching, Names
from kvoffloadd.errors import LimitError, MessageError, NotDurableError
from kvoffloadd.protocol import messages as m
from kvoffloadd.server.peers.account import Account

REMEMBERED: Final = 64
"""The number of requests per uid that are remembered by their tokens; the oldest are forgotten."""

Scope = Names | Matching
"""The namespaces of a clear."""


class RequestedClears:
    """Clears by the tokens with which they were requested. A restarted daemon does not know them."""

    def __init__(self, clearings: Clearings) -> None:
        self._clearings = clearings
        self._by_uid: dict[int, dict[tuple[Scope, bytes], asyncio.Future[Clearing]]] = {}

    def begin(self, uid: int, scope: Scope, token: bytes) -> asyncio.Future[Clearing]:
        """Returns the clear of this token, and begins it if there is none. Raises the errors of `Clearings.begin` or
        `begin_matching`.
        """
        known = self._by_uid.setdefault(uid, {})
        begun = known.get((scope, token))
        if begun is None:
            begun = known[scope, token] = self._begin(scope)
            if len(known) > REMEMBERED:
                del known[next(iter(known))]
        return begun

    def _begin(self, scope: Scope) -> asyncio.Future[Clearing]:
        if isinstance(scope, Matching):
            return self._clearings.begin_matching(scope)
        begun: asyncio.Future[Clearing] = asyncio.get_running_loop().create_future()
        begun.set_result(self._clearings.begin(scope))
        return begun


class SessionClears:
    """The clears that one session requests."""

    def __init__(self, clearings: Clearings, requested: RequestedClears, account: Account) -> None:
        self._clearings = clearings
        self._requested = requested
        self._account = account
        self.last: Clearing | None = None  # the last clear without a token, if nothing was stored since

    def clear(self, message: m.Clear, scope: Scope) -> Coroutine[Any, Any, m.Reply]:
        """Clears, unless the request repeats an earlier one. Raises MessageError if a pattern or a user comes without a
        token or with `everything`, and the errors of `Clearings.begin` or `begin_matching`.
        """
        if message.everything and isinstance(scope, Matching):
            raise MessageError("a clear is of everything, or of the namespaces that it names")
        if message.token is not None:
            return self._answer(message, self._requested.begin(self._account.uid, scope, message.token))
        if isinstance(scope, Matching):
            raise MessageError("a clear of namespaces by their names, or of a user, needs a token")
        return self._clear_without_token(message, scope)

    def _clear_without_token(self, message: m.Clear, names: Names) -> Coroutine[Any, Any, m.Reply]:
        # Older clients repeat the request until the clear is recorded.
        last = self.last
        if last is None or last.names != names or not self._clearings.unrecorded(last):
            last = self.last = self._clearings.begin(names)
        return self._answer_durable(message.seq, last)

    async def _answer(self, message: m.Clear, begun: asyncio.Future[Clearing]) -> m.Reply:
        clearing = await asyncio.shield(begun)
        keys, held_bytes = await asyncio.shield(clearing.swept)
        if message.wait_s:
            await self._wait(clearing, message.wait_s)
        by_name = message.namespaces is not None or message.uid is not None
        return m.Cleared(
            seq=message.seq,
            keys=keys,
            bytes=held_bytes,
            unrecorded=self._clearings.unrecorded(clearing),
            namespaces=len(clearing.names or ()) if by_name else 0,
            left=clearing.left,
        )

    async def _wait(self, clearing: Clearing, wait_s: float) -> None:
        try:
            self._account.charge(clears=1)
        except LimitError:  # the clear is done; the reply lists the missing records at once
            return
        try:
            await self._clearings.wait_recorded(clearing, wait_s)
        finally:
            self._account.refund(clears=1)

    async def _answer_durable(self, seq: int, clearing: Clearing) -> m.Reply:
        """Answers clients that know no tokens, after every place has tried. Raises NotDurableError."""
        await asyncio.shield(clearing.tried)
        if unrecorded := self._clearings.unrecorded(clearing):
            raise NotDurableError(
                f"cleared, but not recorded yet in {', '.join(unrecorded)}: the daemon goes on trying"
            )
        keys, held_bytes = await asyncio.shield(clearing.swept)
        return m.Cleared(seq=seq, keys=keys, bytes=held_bytes)
