"""Small objects of the remote store, read and written whole, and removals. Event loop only; nobody's pin waits here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvoffloadd.agentframes import (
    NAMES_MAX,
    VALUE_BYTES_MAX,
    Call,
    Code,
    Read,
    Remove,
    Sweep,
    Value,
    Write,
)
from kvoffloadd.errors import RemoteStoreError, UsageError
from kvoffloadd.model import I64Array
from kvoffloadd.storage.remote.calls import RESULT_MAX, Calls, PendingCall


class Values:
    """One call at a time, in order. Times (`until_s`) are of `time.monotonic()`."""

    def __init__(self, calls: Calls, loop: asyncio.AbstractEventLoop) -> None:
        self._calls = calls
        self._loop = loop
        self._line = calls.line(1)

    async def read(self, name: str, until_s: float) -> bytes | None:
        """See `RemoteStore.read_value`."""
        result = await self._ask(lambda call_id: Read(call_id, name), 1, until_s, f"reading {name}", reads_value=True)
        if not isinstance(result, Value):
            raise RemoteStoreError(f"reading {name}: the store failed")
        return result.value

    async def write(self, name: str, value: bytes, until_s: float, *, if_absent: bool, pinned: bool) -> None:
        """See `RemoteStore.write_value`."""
        if len(value) > VALUE_BYTES_MAX:
            raise UsageError(f"a value of {len(value)} bytes; the cap is {VALUE_BYTES_MAX}")
        await self._ask(lambda call_id: Write(call_id, name, value, if_absent, pinned), 1, until_s, f"writing {name}")

    async def remove(self, names: Sequence[str], until_s: float) -> None:
        """See `RemoteStore.remove`."""
        for at in range(0, len(names), NAMES_MAX):
            some = list(names[at : at + NAMES_MAX])
            await self._ask(lambda call_id, some=some: Remove(call_id, some), len(some), until_s, "removing")  # type: ignore[misc]

    async def sweep(self, prefix: str, until_s: float) -> int:
        """See `RemoteStore.sweep`."""
        result = await self._ask(lambda call_id: Sweep(call_id, prefix), 1, until_s, f"sweeping {prefix}")
        return int(result[0]) if isinstance(result, np.ndarray) else 0

    async def _ask(
        self, make: Callable[[int], Call], items: int, until_s: float, what: str, *, reads_value: bool = False
    ) -> I64Array | Value:
        """Raises RemoteStoreError if it is not done by then, or not everything is."""
        if not self._calls.serving:
            raise RemoteStoreError(f"{what}: there is no connection to the store")
        ended: asyncio.Future[I64Array | Value | None] = self._loop.create_future()

        def settle(result: I64Array | Value | None) -> None:
            if not ended.done():
                ended.set_result(result)

        call = PendingCall(
            self._line, make, items, RESULT_MAX, until_s, settle, lambda: settle(None), reads_value=reads_value
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
        if isinstance(result, np.ndarray) and (result < 0).any():
            code = Code(int(result.min())).name.lower().replace("_", " ")
            raise RemoteStoreError(f"{what}: {int((result < 0).sum())} of {items} failed ({code})")
        return result
