"""Small objects of the remote store, read and written whole, and removals. Event loop only; no pin waits here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from kvoffloadd.agentwire.frames import (
    CHANGE_THREADS,
    NAMES_MAX,
    READ_NAMES_MAX,
    READ_THREADS,
    VALUE_BYTES_MAX,
    Answer,
    Call,
    Code,
    Read,
    Remove,
    Renew,
    Reply,
    Sweep,
    Swept,
    Values,
    Write,
)
from kvoffloadd.errors import RemoteStoreError, UsageError
from kvoffloadd.model import I64Array
from kvoffloadd.storage.remote.calls import RESULT_MAX, CallLine, Calls, PendingCall, Result


@dataclass(frozen=True, slots=True)
class NotRead:
    """Stands for a small object that the store could not read: nothing is known of it."""

    code: Code

    @property
    def reason(self) -> str:
        """Returns the reason for people to read."""
        return _spelled(self.code)


class SmallObjects:
    """Reads wait only for reads, and nothing waits for sweeps. Concurrent calls may end in any order. Times (`until_s`)
    are of `time.monotonic()`.
    """

    def __init__(self, calls: Calls, loop: asyncio.AbstractEventLoop) -> None:
        self._calls = calls
        self._loop = loop
        self._reading = calls.line(READ_THREADS)
        self._changing = calls.line(CHANGE_THREADS)
        self._sweeping = calls.line(1, may_hang=True)

    async def read(self, names: Sequence[str], until_s: float) -> list[bytes | NotRead | None]:
        """See `RemoteStore.read_values`."""
        found: list[bytes | NotRead | None] = []
        while len(found) < len(names):
            batch = list(names[len(found) : len(found) + READ_NAMES_MAX])
            make = partial(Read, names=batch)
            answer = await self._ask(self._reading, make, len(batch), until_s, f"reading {batch[0]}", Values)
            values = cast(Values, answer).values
            found += [NotRead(Code(value)) if isinstance(value, int) else value for value in values]
        return found

    async def write(self, name: str, value: bytes, until_s: float, *, if_absent: bool, kept_s: float | None) -> None:
        """See `RemoteStore.write_value`."""
        if len(value) > VALUE_BYTES_MAX:
            raise UsageError(f"a value of {len(value)} bytes; the cap is {VALUE_BYTES_MAX}")
        make = partial(Write, name=name, value=value, if_absent=if_absent, kept_s=kept_s)
        await self._change(make, 1, until_s, f"writing {name}")

    async def renew(self, names: Sequence[str], kept_s: float, until_s: float) -> list[bool]:
        """See `RemoteStore.renew`."""
        there: list[bool] = []
        for start in range(0, len(names), NAMES_MAX):
            batch = list(names[start : start + NAMES_MAX])
            codes = await self._change(partial(Renew, names=batch, kept_s=kept_s), len(batch), until_s, "renewing")
            there += (codes > 0).tolist()
        return there

    async def remove(self, names: Sequence[str], until_s: float) -> None:
        """See `RemoteStore.remove`."""
        for start in range(0, len(names), NAMES_MAX):
            batch = list(names[start : start + NAMES_MAX])
            await self._change(partial(Remove, names=batch), len(batch), until_s, "removing")

    async def sweep(self, prefix: str, until_s: float, after: str) -> tuple[int, str]:
        """See `RemoteStore.sweep`."""
        removed, begun = 0, after
        while True:
            try:
                step = await self._sweep_step(prefix, until_s, after)
            except RemoteStoreError:
                if after == begun:
                    raise
                return removed, after
            removed, after = removed + step.removed, step.after
            if not after:
                return removed, ""

    async def _sweep_step(self, prefix: str, until_s: float, after: str) -> Swept:
        what = f"sweeping {prefix}"
        make = partial(Sweep, prefix=prefix, after=after)
        step = cast(Swept, await self._ask(self._sweeping, make, 1, until_s, what, Swept))
        if step.removed < 0:
            raise RemoteStoreError(f"{what}: the store failed ({_spelled(step.removed)})")
        return step

    async def _change(self, make: Callable[[int], Call], items: int, until_s: float, what: str) -> I64Array:
        """Makes a change. Raises RemoteStoreError if it is not done completely by then."""
        codes = cast(I64Array, await self._ask(self._changing, make, items, until_s, what))
        if (codes < 0).any():
            failed = int((codes < 0).sum())
            raise RemoteStoreError(f"{what}: {failed} of {items} failed ({_spelled(int(codes.min()))})")
        return codes

    async def _ask(
        self,
        line: CallLine,
        make: Callable[[int], Call],
        items: int,
        until_s: float,
        what: str,
        answered_by: type[Reply] = Answer,
    ) -> Result:
        """Returns an answer. Raises RemoteStoreError if there is none by then."""
        if not self._calls.serving:
            raise RemoteStoreError(f"{what}: there is no connection to the store")
        ended: asyncio.Future[Result | None] = self._loop.create_future()

        def settle(result: Result | None) -> None:
            if not ended.done():
                ended.set_result(result)

        call = PendingCall(
            line, make, items, RESULT_MAX, until_s, settle, lambda: settle(None), answered_by=answered_by
        )
        self._calls.submit(call)
        try:
            result = await ended
        except asyncio.CancelledError:
            self._calls.withdraw(call)
            raise
        if result is None:
            began = "it may still be done" if call.begun else "it had not begun"
            after = "in time" if time.monotonic() >= until_s else "before the connection was lost"
            raise RemoteStoreError(f"{what}: not done {after}; {began}")
        return result


def _spelled(code: int) -> str:
    return Code(code).name.lower().replace("_", " ")
