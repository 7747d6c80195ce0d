"""Gets, or puts, that are under way: the memory they hold, and its limit. Event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvoffloadd.agentwire.frames import Code, Get, Put
from kvoffloadd.config import RemoteConfig
from kvoffloadd.model import U8Array, U64Array
from kvoffloadd.scheduling.lanes import DAEMON, Flow
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.remote.breaker import Breaker
from kvoffloadd.storage.remote.calls import RESULT_MAX, CallLine, Calls, PendingCall, Result
from kvoffloadd.storage.remote.headerpages import HeaderPages
from kvoffloadd.storage.remote.transfers import Names, ObjectBatch, RemoteStatus, checked_shapes

HEADERS_MAX = 4096
"""The header pages of one flight."""

Ended = Callable[["RemoteTransfer", U8Array], None]
"""The result for each key, (n,) u8 of `RemoteStatus`."""


class RemoteTransfer:
    """A get or put. `batch` is its memory, which the caller must leave alone until it has ended."""

    def __init__(self, flight: InflightTransfers, batch: ObjectBatch, until_s: float, ended: Ended) -> None:
        self.batch = batch
        self.until_s = until_s
        self._flight = flight
        self._ended = ended
        self._over = False
        self._call: PendingCall | None = None
        self._token: int | None = None

    def cancel(self) -> bool:
        """Returns True if it had not begun: its memory is free now, and its `done` is never called. False: the memory
        is in use until `done`.
        """
        if self._over or (self._call is not None and not self._flight.withdraw(self._call)):
            return False
        self._over = True
        self._flight.let_go(self)
        self._tell_breaker(None)
        return True

    # --- called by its flight ---

    def submit(self, call: PendingCall, token: int) -> None:
        """Submits the call. `token`: the breaker's."""
        self._call, self._token = call, token

    def refuse(self) -> None:
        """Ends a transfer that is not made."""
        if not self._over:
            self._end(np.full(len(self.batch.names.keys), RemoteStatus.NOT_ASKED, np.uint8))

    def on_overdue(self) -> None:
        """Notes that its turn takes too long, and continues."""
        self._tell_breaker(ok=False, timed_out=True)

    def on_end(self, result: Result | None) -> None:
        """Ends the transfer: the agent does not touch its memory any more, or never has."""
        if self._call is None or not self._call.begun:
            self._tell_breaker(None)
            self.refuse()
            return
        codes = result if isinstance(result, np.ndarray) else None
        failed = codes is None or bool(((codes == Code.FAILED) | (codes == Code.REFUSED)).any())
        self._tell_breaker(ok=not failed)
        self._end(self.batch.status(codes))

    def _end(self, status: U8Array) -> None:
        self._over = True
        self._ended(self, status)

    def _tell_breaker(self, ok: bool | None, *, timed_out: bool = False) -> None:
        """Reports the result to the breaker, once: a call may be late first, and end after that. None: not made."""
        token, self._token = self._token, None
        if token is not None:
            self._flight.tell_breaker(token, ok, timed_out=timed_out)


class InflightTransfers:
    """All gets, or all puts, that have not ended. `on_breaker` is called after each report to the `breaker`. The store
    has `fetch_s` for a transfer, whatever time the caller leaves.
    """

    def __init__(
        self,
        kind: type[Get] | type[Put],
        threads: int,
        config: RemoteConfig,
        calls: Calls,
        headers: HeaderPages,
        pool: ArenaFile,
        loop: asyncio.AbstractEventLoop,
        on_breaker: Callable[[], None],
    ) -> None:  # fmt: skip
        self.breaker = Breaker()
        self.transfers: set[RemoteTransfer] = set()
        self.used_bytes = 0
        self.headers_used = 0
        self._kind = kind
        self._line: CallLine = calls.line(threads)
        self._bytes_max = config.inflight_bytes
        self._calls = calls
        self._headers = headers
        self._pool = pool
        self._loop = loop
        self._on_breaker = on_breaker
        self._patience_s = config.fetch_s

    @property
    def room_bytes(self) -> int:
        """The number of further bytes, including headers, that can be under way."""
        return self._bytes_max - self.used_bytes if self.headers_used < HEADERS_MAX else 0

    @property
    def late_bytes(self) -> int:
        """Returns the bytes of transfers that are past their deadlines, but still run."""
        now = time.monotonic()
        return sum(transfer.batch.total_bytes for transfer in self.transfers if transfer.until_s < now)

    def held_addresses(self) -> U64Array:
        """Returns the places of payloads that the agent may touch, unordered."""
        return np.concatenate([np.zeros(0, np.uint64), *(t.batch.addresses.ravel() for t in self.transfers)])

    def move(
        self,
        names: Names,
        addresses: U64Array,
        part_bytes: Sequence[int],
        until_s: float,
        ended: Ended,
        make_headers: Callable[[U64Array], U8Array] | None = None,
        flow: Flow = DAEMON,
        urgent: int = 0,
    ) -> RemoteTransfer:
        """Begins a transfer, if there is an agent, and the breaker and the room allow it. `ended` is called once,
        later. `make_headers`: of the sizes of parts. Raises UsageError.
        """
        sizes = checked_shapes(names, addresses, part_bytes, self._pool.address, self._pool.capacity_bytes)
        batch = ObjectBatch(names, addresses, sizes, np.zeros(0, np.uint32))
        count = len(names.keys)
        has_room = self.used_bytes + batch.total_bytes <= self._bytes_max and self.headers_used + count <= HEADERS_MAX
        if not (self._calls.serving and has_room and self.breaker.allows()):
            refused = RemoteTransfer(self, batch, until_s, ended)
            self._loop.call_soon(refused.refuse)
            return refused
        batch = ObjectBatch(names, addresses, sizes, self._headers.take(count))
        if make_headers is not None:
            self._headers.pages[batch.headers] = make_headers(sizes)
        transfer = RemoteTransfer(self, batch, until_s, ended)
        self.transfers.add(transfer)
        self.used_bytes += batch.total_bytes
        self.headers_used += count
        call = PendingCall(
            self._line, partial(batch.frame, self._kind, self._pool.address), count, RESULT_MAX, until_s,
            transfer.on_end, on_overdue=transfer.on_overdue, moves_bytes=True, flow=flow, urgent=urgent,
            cost=batch.total_bytes, patience_s=self._patience_s,
        )  # fmt: skip
        transfer.submit(call, self.breaker.begin())
        self._calls.submit(call)
        return transfer

    def let_go(self, transfer: RemoteTransfer) -> None:
        """Releases a transfer's memory, which nothing uses any more."""
        if transfer in self.transfers:
            self.transfers.remove(transfer)
            self.used_bytes -= transfer.batch.total_bytes
            self.headers_used -= len(transfer.batch.headers)
            self._headers.give(transfer.batch.headers)

    def withdraw(self, call: PendingCall) -> bool:
        """See `Calls.withdraw`."""
        return self._calls.withdraw(call)

    def tell_breaker(self, token: int, ok: bool | None, *, timed_out: bool) -> None:
        """Reports the result of a call to the breaker. None: it was not made after all."""
        if ok is None:
            self.breaker.withdraw(token)
        else:
            self.breaker.end(token, time.monotonic(), ok=ok, timed_out=timed_out)
        self._on_breaker()

    def figures(self) -> dict[str, int | str]:
        """Returns the figures for `status`."""
        return {
            "calls": len(self.transfers),
            "bytes": self.used_bytes,
            "late_bytes": self.late_bytes,
            "breaker": self.breaker.state.value,
            "opened": self.breaker.opened,
        }

    def check(self) -> list[str]:
        """Audits the flight; an empty list: no errors."""
        found = []
        if self.used_bytes != sum(transfer.batch.total_bytes for transfer in self.transfers):
            found.append("remote: bytes in flight are counted wrong")
        if self.headers_used != sum(len(transfer.batch.headers) for transfer in self.transfers):
            found.append("remote: header pages in flight are counted wrong")
        return found
