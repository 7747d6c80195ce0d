"""Requests to clear: whoever asks for the same clear again is answered for it. Event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from kvoffloadd.cache.clearing import Clearing, Clearings, Names
from kvoffloadd.errors import LimitError, NotDurableError
from kvoffloadd.protocol import messages as m
from kvoffloadd.server.account import Account

REMEMBERED: Final = 64
"""Requests of a uid that are remembered by their tokens; the oldest are forgotten."""


class RequestedClears:
    """Clears by the tokens with which they were requested. They are of this run of the daemon alone."""

    def __init__(self, clearings: Clearings) -> None:
        self._clearings = clearings
        self._by_uid: dict[int, dict[tuple[Names, bytes], Clearing]] = {}

    def begin(self, uid: int, names: Names, token: bytes) -> Clearing:
        """The clear that this token stands for; a new one if there is none. Raises LimitError as `Clearings.begin`."""
        known = self._by_uid.setdefault(uid, {})
        clearing = known.get((names, token))
        if clearing is None:
            clearing = known[names, token] = self._clearings.begin(names)
            if len(known) > REMEMBERED:
                del known[next(iter(known))]
        return clearing


class SessionClears:
    """The clears that one session requests."""

    def __init__(self, clearings: Clearings, requested: RequestedClears, account: Account) -> None:
        self._clearings = clearings
        self._requested = requested
        self._account = account
        self.last: Clearing | None = None  # requested without a token, and nothing was stored since

    def clear(self, message: m.Clear, names: Names) -> Coroutine[Any, Any, m.Reply]:
        """Clear, unless this is a clear that was requested before. Raises LimitError as `Clearings.begin`."""
        if message.token is not None:
            return self._answer(message, self._requested.begin(self._account.uid, names, message.token))
        # Older clients were told to ask again until a clear is recorded.
        last = self.last
        if last is None or last.names != names or not self._clearings.unrecorded(last):
            last = self.last = self._clearings.begin(names)
        return self._answer_durable(message.seq, last)

    async def _answer(self, message: m.Clear, clearing: Clearing) -> m.Reply:
        keys, held_bytes = await asyncio.shield(clearing.swept)
        if message.wait_s:
            await self._wait(clearing, message.wait_s)
        unrecorded = self._clearings.unrecorded(clearing)
        return m.Cleared(seq=message.seq, keys=keys, bytes=held_bytes, unrecorded=unrecorded)

    async def _wait(self, clearing: Clearing, wait_s: float) -> None:
        try:
            self._account.charge(clears=1)
        except LimitError:  # the clear is done; what is not recorded is told at once
            return
        try:
            await self._clearings.wait_recorded(clearing, wait_s)
        finally:
            self._account.refund(clears=1)

    async def _answer_durable(self, seq: int, clearing: Clearing) -> m.Reply:
        """For clients that know no tokens: when every place has tried. Raises NotDurableError."""
        await asyncio.shield(clearing.tried)
        if unrecorded := self._clearings.unrecorded(clearing):
            raise NotDurableError(
                f"cleared, but not recorded yet in {', '.join(unrecorded)}: the daemon goes on trying"
            )
        keys, held_bytes = await asyncio.shield(clearing.swept)
        return m.Cleared(seq=seq, keys=keys, bytes=held_bytes)
