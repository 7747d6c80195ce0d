"""The daemon's interface to the remote store: requests with deadlines, and the memory that the store may touch
meanwhile.

Event loop only. The store's client runs in the agent. The hash lane verifies received bytes.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvoffloadd.agentwire.frames import KEYS_MAX, Get, Presence, Put, Reply, Start, Started
from kvoffloadd.agentwire.names import ERA_BYTES, FINGERPRINT_BYTES, KEY_BYTES, SHAPE_BYTES, Space, key_names
from kvoffloadd.config import RemoteConfig
from kvoffloadd.errors import RemoteStoreError, UsageError
from kvoffloadd.model import U8Array, U64Array
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.scheduling.lanes import DAEMON, CancelledWork, Flow, Lane
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.remote.agent import AgentState, AgentSupervisor
from kvoffloadd.storage.remote.breaker import Breaker, BreakerState
from kvoffloadd.storage.remote.calls import Calls
from kvoffloadd.storage.remote.header import encode_headers
from kvoffloadd.storage.remote.headerpages import HeaderPages
from kvoffloadd.storage.remote.inflight import HEADERS_MAX, InflightTransfers, RemoteTransfer
from kvoffloadd.storage.remote.questions import Answered, ExistsResult, Questions
from kvoffloadd.storage.remote.transfers import CORRUPT, GetResult, Names, RemoteStatus, verify
from kvoffloadd.storage.remote.values import NotRead, SmallObjects

log = logging.getLogger(__name__)

PROBE_S = 1.0
"""The time in which a working store answers a lookup without a caller."""

DUE_S = 0.1
"""Clocks differ: breakers that are due within this time are tried now."""

START_S = 30.0
"""The time in which the agent must be ready, or is ended."""

REMOVE_S = 5.0
"""The time limit for removing corrupt objects, which otherwise stay."""

_NOBODY = Space(bytes(FINGERPRINT_BYTES), bytes(SHAPE_BYTES), 0, bytes(ERA_BYTES), 0, KEY_BYTES)
_NO_KEYS = np.zeros((0, 4), np.uint64)


class RemoteState(enum.StrEnum):
    """STARTING: there is no agent to ask yet, or again. OPEN: calls fail, and none is made for a while. STUCK: the
    agent is being killed and does not end. CLOSED.
    """

    STARTING = "starting"
    OK = "ok"
    OPEN = "open"
    STUCK = "stuck"
    CLOSED = "closed"


class RemoteStore:
    """Owns the agent, the header pages and the breakers. Times (`until_s`) are of `time.monotonic()`.

    `changes` reports each change of `state`.
    """

    def __init__(
        self,
        pool: ArenaFile,
        config: RemoteConfig,
        engine_settings: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop,
        hash_lane: Lane,
        boot_id: bytes,
        start_s: float = START_S,
    ) -> None:
        """`engine_settings`: of the configured engine, as msgpack can carry them. `start_s`: a longer start ends the
        agent, as does a call longer than `stuck_s` of the config.

        Raises LimitError or OSError if the kernel has no memory for header pages.
        """
        self.changes = Changes()
        self.corrupt: Counter[RemoteStatus] = Counter()
        self._pool = pool
        self._loop = loop
        self._hash_lane = hash_lane
        self._boot_id = boot_id
        self._headers = HeaderPages(2 * HEADERS_MAX)
        start = Start(
            config.engine, dict(engine_settings), pool.arena_offset, pool.capacity_bytes, self._headers.size_bytes,
            config.get_threads, config.put_threads,
        )  # fmt: skip
        self._agent = AgentSupervisor(pool, self._headers.fd, start, config.python, start_s, loop, self, self.changes)
        self._calls = Calls(loop, self._agent.send, self._agent.kill, config.stuck_s)
        self._values = SmallObjects(self._calls, loop)
        self._questions = Questions(self._calls, loop, self._watch_breakers)
        self._gets, self._puts = (
            InflightTransfers(kind, threads, config, self._calls, self._headers, pool, loop, self._watch_breakers)
            for kind, threads in ((Get, config.get_threads), (Put, config.put_threads))
        )
        self._closing = False
        self._probing: list[Breaker] = []
        self._probe: asyncio.TimerHandle | None = None
        self._removals: set[asyncio.Task[None]] = set()

    # --- life ---

    def start(self) -> None:
        """Starts the agent, and restarts it whenever it ends. Returns at once."""
        self._agent.start()

    async def close(self, deadline_s: float) -> bool:
        """Ends the agent. True: it is dead, every `done` has been called, and only this process touches the arena.
        False: it does not end, and the arena must stay. The hash lane must still work.
        """
        ends_s = time.monotonic() + deadline_s
        self._closing = True
        self._calls.stop()
        self._calls.drop_waiting()
        if self._probe is not None:
            self._probe.cancel()
        if not await self._agent.close(deadline_s):
            return False
        if not await self.changes.wait_for(self._is_settled, max(ends_s - time.monotonic(), 0.1)):
            return False
        if self._removals:
            await asyncio.wait(self._removals, timeout=max(ends_s - time.monotonic(), 0.1))
        await asyncio.sleep(0)  # for the last calls of `done`
        self._headers.close()
        return True

    def _is_settled(self) -> bool:
        return not (self._gets.transfers or self._puts.transfers)

    def on_ready(self, started: Started) -> None:
        """See `AgentUser`."""
        if not self._closing:
            self._calls.begin(stops_at_once=started.stops_at_once)
            self._watch_breakers()

    def on_answer(self, message: Reply) -> None:
        """See `AgentUser`."""
        self._calls.on_answer(message)

    def on_silence(self) -> None:
        """See `AgentUser`."""
        self._calls.stop()

    def on_end(self, reason: str) -> None:
        """See `AgentUser`."""
        self._calls.finish()

    @property
    def starts(self) -> int:
        """The number of agents that have become ready since the start: each one is another connection."""
        return self._agent.starts

    @property
    def state(self) -> RemoteState:
        """The state for `status`, and for waiters on `changes`."""
        if self._agent.state is AgentState.CLOSED:
            return RemoteState.CLOSED
        if self._agent.state is AgentState.DYING or (self._agent.state is AgentState.READY and not self._calls.serving):
            return RemoteState.STUCK
        if self._agent.state is not AgentState.READY:
            return RemoteState.STARTING
        return RemoteState.OPEN if any(b.state is BreakerState.OPEN for b in self._breakers) else RemoteState.OK

    @property
    def reason(self) -> str:
        """Why there was no agent last, or is none; for people."""
        return self._agent.reason

    @property
    def _breakers(self) -> tuple[Breaker, Breaker, Breaker]:
        return self._questions.breaker, self._gets.breaker, self._puts.breaker

    def can_read(self) -> bool:
        """Returns whether asking is worthwhile: an `exists` and a `get` would be made now. Costs nothing."""
        return self._calls.serving and self._questions.breaker.allows() and self._gets.breaker.allows()

    def can_write(self) -> bool:
        """Returns whether a `put` would be made now."""
        return self._calls.serving and self._puts.breaker.allows()

    def put_room_bytes(self) -> int:
        """Returns how many more bytes, including headers (4096 a key), can be under way to the store."""
        return self._puts.room_bytes

    # --- lookups ---

    def exists(self, names: Names, until_s: float, done: Answered, flow: Flow = DAEMON, urgent: int = 0) -> None:
        """Asks for the era's marker and for keys; no keys: for the marker alone. `done` is called once, later: with
        None if there is no answer by `until_s`. Raises UsageError for more than KEYS_MAX keys.
        """
        if len(names.keys) > KEYS_MAX:
            raise UsageError(f"{len(names.keys)} keys are too many for one call")
        self._questions.exists(names, until_s, done, flow, urgent)

    # --- gets and puts ---

    def get(
        self,
        names: Names,
        addresses: U64Array,
        part_bytes: Sequence[int],
        until_s: float,
        done: Callable[[GetResult], None],
        flow: Flow = DAEMON,
        urgent: int = 0,
    ) -> RemoteTransfer:
        """Fetches keys with all their parts into slots, and verifies them.

        `addresses`: (n, parts), of slots in the arena, which belong to the store until `done`. It is called once, never
        within this call, when nothing touches them any more: this may be long after `until_s`. A get that has not begun
        by then does not begin. The caller checks marker and era. Best with some MiB to 16 MiB a call.

        Raises:
            UsageError: shapes differ, too many keys or parts, an address outside the arena.
        """
        on_got = partial(self._on_got, done, flow, urgent)
        return self._gets.move(names, addresses, part_bytes, until_s, on_got, flow=flow, urgent=urgent)

    def put(
        self,
        names: Names,
        addresses: U64Array,
        part_bytes: Sequence[int],
        digests: U64Array,
        until_s: float,
        done: Callable[[U8Array], None],
    ) -> RemoteTransfer:
        """Puts keys with all their parts. `digests`: (n, parts, 2), of the payloads. `done(status)`, (n,) u8 of
        `RemoteStatus`, as for `get`: until then the payloads don't change.
        """
        if digests.shape != (*addresses.shape, 2):
            raise UsageError(f"digests {digests.shape} for addresses {addresses.shape}")

        def make_headers(sizes: U64Array) -> U8Array:
            return encode_headers(names.space, names.keys, sizes, digests, self._boot_id, int(time.time()))

        def on_put(transfer: RemoteTransfer, status: U8Array) -> None:
            self._puts.let_go(transfer)
            self._loop.call_soon(done, status)
            self.changes.notify_all()

        return self._puts.move(names, addresses, part_bytes, until_s, on_put, make_headers)

    def _on_got(
        self, done: Callable[[GetResult], None], flow: Flow, urgent: int, transfer: RemoteTransfer, status: U8Array
    ) -> None:
        """Verifies the keys that the agent reports as fetched."""
        batch = transfer.batch
        came = int((status == RemoteStatus.OK).sum())
        if not came:
            none = np.zeros((len(status), len(batch.part_bytes), 2), np.uint64)
            self._finish(done, transfer, GetResult(status, none))
            return

        def on_verified(result: GetResult | BaseException) -> None:
            if isinstance(result, BaseException):
                failed = np.full_like(status, RemoteStatus.FAILED)
                none = np.zeros((len(status), len(batch.part_bytes), 2), np.uint64)
                self._finish(done, transfer, GetResult(failed, none))
                if not isinstance(result, CancelledWork):
                    raise result
            else:
                self._finish(done, transfer, result)

        self._hash_lane.submit(
            lambda: verify(batch, status, self._headers.pages[batch.headers]), on_verified, flow=flow, urgent=urgent,
            cost_bytes=came * batch.object_bytes,
        )  # fmt: skip

    def _finish(self, done: Callable[[GetResult], None], transfer: RemoteTransfer, result: GetResult) -> None:
        self._gets.let_go(transfer)
        self._loop.call_soon(done, result)
        self.changes.notify_all()
        bad = np.flatnonzero(np.isin(result.status, CORRUPT))
        if not len(bad):
            return
        reasons = Counter(RemoteStatus(status) for status in result.status[bad].tolist())
        self.corrupt += reasons
        text = ", ".join(f"{count} by {reason.name.lower()}" for reason, count in reasons.items())
        log.warning(
            "remote: %d of %d keys failed verification (%s) and are removed from the store",
            len(bad),
            len(result.status),
            text,
        )
        names = transfer.batch.names
        keys = np.ascontiguousarray(names.keys[bad], "<u8").tobytes()
        removal = self._loop.create_task(self._remove_corrupt(key_names(names.space, keys)))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove_corrupt(self, names: list[str]) -> None:
        try:
            await self._values.remove(names, time.monotonic() + REMOVE_S)
        except RemoteStoreError as error:
            log.warning("remote: keys that failed verification could not be removed: %s", error)

    # --- small objects ---

    async def read_values(self, names: Sequence[str], until_s: float) -> list[bytes | NotRead | None]:
        """Returns small objects; None: there is none. An unreadable one does not affect the others. Raises
        RemoteStoreError: nothing is known of any.
        """
        return await self._values.read(names, until_s)

    async def write_value(
        self, name: str, value: bytes, until_s: float, *, if_absent: bool = False, kept_s: float | None = None
    ) -> None:
        """Writes a small object. `if_absent`: an existing one stays, and the caller does not learn of it. `kept_s`: the
        time in which it is not evicted; it may go after that. Raises RemoteStoreError: it may or may not be there.
        UsageError: it is too large.
        """
        await self._values.write(name, value, until_s, if_absent=if_absent, kept_s=kept_s)

    async def renew(self, names: Sequence[str], kept_s: float, until_s: float) -> list[bool]:
        """Keeps small objects for this long from now on, or, if the store can't, as long as hosts ask for them. Returns
        whether each is there. Raises RemoteStoreError: some are kept no longer than before.
        """
        return await self._values.renew(names, kept_s, until_s)

    async def remove(self, names: Sequence[str], until_s: float) -> None:
        """Removes objects, regardless of leases and pins. Raises RemoteStoreError: some may still be there."""
        await self._values.remove(names, until_s)

    async def sweep(self, prefix: str, until_s: float, after: str = "") -> tuple[int, str]:
        """Removes all objects below a prefix that were there before, in steps. Meanwhile nothing waits, except other
        sweeps for a step. Returns how many, and where to continue (`after`) if time was over before the end; "": all
        are gone. Raises RemoteStoreError: not one step was made.
        """
        return await self._values.sweep(prefix, until_s, after)

    # --- breakers ---

    def _watch_breakers(self) -> None:
        """Handles a report to a breaker: makes the probe of the store if a breaker is open."""
        now = time.monotonic()
        waits = [wait for breaker in self._breakers if (wait := breaker.probe_in_s(now)) is not None]
        if waits and self._probe is None and self._calls.serving:
            self._probe = self._loop.call_later(min(waits), self._try_store)
            self.changes.notify_all()

    def _try_store(self) -> None:
        """Looks up a marker that never exists, without a caller."""
        now_s = time.monotonic()
        self._probing = [b for b in self._breakers if (left_s := b.probe_in_s(now_s)) is not None and left_s < DUE_S]
        self._questions.probe(Names(_NOBODY, _NO_KEYS), now_s + PROBE_S, self._on_tried)

    def _on_tried(self, answer: ExistsResult | None) -> None:
        ok = answer is not None and answer.marker != Presence.UNKNOWN
        for breaker in self._probing:
            breaker.probed(time.monotonic(), ok=ok)
        self._probe = None
        self.changes.notify_all()
        self._watch_breakers()

    # --- activity ---

    def held_addresses(self) -> U64Array:
        """Returns the places of payloads that the agent may write or read, unordered: for audits."""
        return np.concatenate([self._gets.held_addresses(), self._puts.held_addresses()])

    def figures(self) -> dict[str, Any]:
        """Returns the figures for `status`."""
        return {
            "state": str(self.state),
            "reason": self.reason,
            "agent": {
                "pid": self._agent.pid,
                "about": self._agent.about,
                "starts": self._agent.starts,
                "ends": self._agent.ends,
            },
            "lookups": {"breaker": self._questions.breaker.state.value, "opened": self._questions.breaker.opened},
            "gets": self._gets.figures(),
            "puts": self._puts.figures(),
            "corrupt": {reason.name.lower(): self.corrupt[reason] for reason in CORRUPT},
        }

    def check(self) -> list[str]:
        """Audits the store; an empty list: no errors."""
        found = [*self._calls.check(), *self._headers.check(), *self._gets.check(), *self._puts.check()]
        if self._headers.count - self._headers.num_free != self._gets.headers_used + self._puts.headers_used:
            found.append("remote: a header page is lost or held twice")
        return found
