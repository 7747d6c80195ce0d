"""Jobs under way: one record owns all that a job needs until its last access, then settles it and tells the outcome.

Ownership: everything here belongs to the event loop. The copy lanes read and write the bytes that a record's copies
name; the hash lane reads slots. Both tell the loop when they are done, and only then is anything freed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.cache.parttable import PartState
from kvoffloadd.cache.progress import Progress, Waits
from kvoffloadd.cache.promotion import Urgency
from kvoffloadd.cache.sealing import Sealing
from kvoffloadd.device.base import CopyResult
from kvoffloadd.lanes import DAEMON, Flow
from kvoffloadd.model import BoolArray, Direction, Outcome
from kvoffloadd.tiers.hashing import hash_payloads, in_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvoffloadd.cache.cache import Cache
    from kvoffloadd.cache.promotion import KeysOnDisk
    from kvoffloadd.device.base import Copy, Device, Work
    from kvoffloadd.device.signals import ReadySignal, Signals
    from kvoffloadd.lanes import Lane, Ticket
    from kvoffloadd.model import I64Array, U32Array, U64Array

VERIFY_URGENT = 0
"""Before what is sealed: see `sealing`."""


STUCK_LOOKS = 10
"""A chunk that has not ended is looked at so many times before it is given up."""


_SHORT = (MemoryError, OSError, RuntimeError)
"""What a device raises that is short of memory or threads: it costs the job, which has its end all the same."""


@dataclass(frozen=True, slots=True, eq=False)
class TransferResult:
    """`bad`: which of its parts are of keys that failed verification (load), or were cleared while being stored."""

    outcome: Outcome
    bytes: int
    seconds: float
    bad: BoolArray
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """How a job is to be copied. `deadline_s`: loop time after which no further piece of it begins. `urgent`: before
    others of its direction. `ready`: nothing is copied before; None: at once. `flow`: whose job it is.
    """

    device: Device
    deadline_s: float
    urgent: bool = False
    ready: ReadySignal | None = None
    flow: Flow = DAEMON


@dataclass(slots=True)
class TransferCounters:
    """Jobs, also those that had nothing to move, and what they moved, by direction. `copies` are those issued after
    coalescing `descriptors`. `keys` counts payloads; those that were not moved are counted by the reason: how their job
    ended, and `bad` as its result has it.
    """

    jobs: int = 0
    keys: int = 0
    bytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0
    copies: int = 0
    not_done: int = 0
    keys_failed: int = 0
    keys_cancelled: int = 0
    keys_expired: int = 0
    keys_bad: int = 0


@dataclass(slots=True, eq=False)
class Transfer:
    """A running job. `parts`: record numbers it reads or writes; `rows`: of each its key, held by a load."""

    direction: Direction
    parts: I64Array
    rows: U32Array
    done: Callable[[TransferResult], None]
    bad: BoolArray
    flow: Flow
    copy: Copy | None = None
    give_up: Callable[[Outcome], None] | None = None
    timer: asyncio.TimerHandle | None = None
    checking: Ticket | None = None
    cancelled: bool = False
    late: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        """Whether `done` has been called, or is about to be."""
        return self.ended.is_set()

    @property
    def waits_for(self) -> str:
        """Its copy, the worker's signal, the disk, or the check of payloads before they are loaded."""
        if self.copy is not None:
            return "copy"
        if self.give_up is None:
            return "verification"
        return "signal" if self.timer is None or self.timer.cancelled() else "disk"

    def cancel(self) -> None:
        """Drop what has not begun. `done` is still called, after the last access."""
        self.cancelled = True
        if self.give_up is not None:
            self.give_up(Outcome.CANCELLED)
        elif self.copy is not None:
            self.copy.cancel()
        elif self.checking is not None:
            self.checking.cancel()

    def expire(self) -> None:
        """Its deadline has passed while its payloads are checked."""
        self.late = True
        if self.checking is not None:
            self.checking.cancel()


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """What a load copies as things stand: record numbers `parts`, and of each its key's row. `build(good)` makes the
    work of those that are good.
    """

    rows: U32Array
    parts: I64Array
    build: Callable[[BoolArray], Work]


@dataclass(slots=True, eq=False)
class Transfers:
    """All running jobs of the daemon, and the sealing of what they stored. `jobs`: the same jobs by number, counted by
    whoever begins them.
    """

    cache: Cache
    hash_lane: Lane
    signals: Signals
    verify_loads: bool
    running: set[Transfer] = field(default_factory=set)
    jobs: Progress = field(default_factory=Progress)
    waits: Waits = field(default_factory=Waits)
    sealing: Sealing = field(init=False)
    counters: dict[Direction, TransferCounters] = field(
        default_factory=lambda: {direction: TransferCounters() for direction in Direction}
    )

    def __post_init__(self) -> None:
        self.sealing = Sealing(self.cache, self.hash_lane)

    @property
    def unsealed(self) -> int:
        """Parts that wait for their checksum."""
        return self.sealing.unsealed

    @property
    def holds(self) -> int:
        """Rows that running loads hold."""
        return sum(len(t.rows) for t in self.running)

    @property
    def reserved(self) -> int:
        """Parts that running stores own."""
        return sum(len(t.parts) for t in self.running if t.direction is Direction.STORE)

    # --- store ---

    def store(self, parts: I64Array, work: Work, terms: Terms, done: Callable[[TransferResult], None]) -> Transfer:
        """Copy into reserved parts that the job owns from here on; commit or abort them at the end."""
        self.cache.begin(parts)
        transfer = Transfer(
            Direction.STORE, parts, np.zeros(0, np.uint32), done, np.zeros(len(parts), bool), terms.flow
        )
        self.running.add(transfer)
        self._begin(transfer, lambda: work, terms, partial(self._stored, transfer))
        return transfer

    def _stored(self, transfer: Transfer, result: CopyResult) -> None:
        if result.outcome is Outcome.DONE:
            kept = self.cache.commit(transfer.parts)
            if len(kept) < len(transfer.parts):  # cleared meanwhile
                transfer.bad = ~np.isin(transfer.parts, kept)
            self.sealing.add(transfer.flow, kept)
        else:
            self.cache.abort(transfer.parts)
        self._finish(transfer, result)

    # --- load ---

    def load(
        self,
        plan: Callable[[], LoadPlan],
        on_disk: list[KeysOnDisk],
        terms: Terms,
        done: Callable[[TransferResult], None],
    ) -> Transfer:
        """Copy the plan's parts out, of keys that are complete; they are held until the end.

        Keys that are `on_disk` are brought into memory first; then `plan` is asked again. A key whose payload was
        adopted (with `verify_loads`: sealed) and does not match its checksum is dropped before the copy.
        """
        transfer = Transfer(
            Direction.LOAD, np.zeros(0, np.int64), np.zeros(0, np.uint32), done, np.zeros(0, bool), terms.flow
        )
        self.running.add(transfer)
        first = plan()
        self._take(transfer, first)
        run = partial(self._load, transfer, terms)
        if self.cache.disk is None or not on_disk:
            run(first)
        else:
            promotion = self.cache.disk.promotion

            def fetched() -> None:
                transfer.give_up = None
                timer.cancel()
                again = plan()
                self._take(transfer, again)
                run(again)

            fetch = promotion.fetch(on_disk, Urgency.LOAD, fetched, terms.flow)
            transfer.give_up = partial(self._give_up, transfer, partial(promotion.cancel, fetch))
            timer = self.cache.disk.loop.call_at(terms.deadline_s, transfer.give_up, Outcome.EXPIRED)
            transfer.timer = timer
        return transfer

    async def verify_adopted(self) -> None:
        """Hash all that was adopted and not loaded since, and drop what is wrong. No engine is served yet, but a root
        that comes late may know that some of it was cleared.
        """
        columns = self.cache.entries.parts
        parts = np.flatnonzero(columns.unverified[: columns.runs.used])
        for turn in in_turns(parts, self.cache.payload_bytes(parts)):
            mine = turn[columns.unverified[turn] != 0]
            sizes = self.cache.payload_bytes(mine)
            work = partial(hash_payloads, self.cache.payload_addresses(mine), sizes)
            digests = await self.hash_lane.perform(work, cost_bytes=int(sizes.sum()))
            wrong = (digests != columns.digest[mine]).any(axis=1)
            columns.unverified[mine] = 0
            self.drop(columns.row[mine[wrong]])

    def drop(self, rows: U32Array) -> None:
        """These keys hold wrong bytes: they are misses now, and loads under way are told so: those that have not begun
        leave them out, and what others have copied, or copy yet, is not valid.
        """
        if not len(rows):
            return
        self.cache.drop(rows)
        for transfer in self.running:
            if transfer.direction is Direction.LOAD:
                transfer.bad |= np.isin(transfer.rows, rows)

    def _take(self, transfer: Transfer, plan: LoadPlan) -> None:
        """Hold the plan's keys in place of those held so far."""
        self.cache.hold(plan.rows)
        self.cache.unhold(transfer.rows)
        transfer.rows, transfer.parts = plan.rows, plan.parts
        transfer.bad = np.zeros(len(plan.rows), bool)

    def _give_up(self, transfer: Transfer, cancel: Callable[[], None], outcome: Outcome) -> None:
        """End a load that still waits for the disk: nothing has been copied."""
        transfer.give_up = None
        cancel()
        self._loaded(transfer, CopyResult(outcome, 0, 0, 0, 0.0))

    def _load(self, transfer: Transfer, terms: Terms, plan: LoadPlan) -> None:
        begin = partial(self._begin_load, transfer, terms, plan.build)
        columns = self.cache.entries.parts
        if self.verify_loads:
            sealed = np.flatnonzero(columns.state[plan.parts] == PartState.SEALED)
        else:
            sealed = np.flatnonzero(columns.unverified[plan.parts])
        if not len(sealed):
            begin()
            return
        transfer.timer = self.hash_lane.loop.call_at(terms.deadline_s, transfer.expire)
        self._verify(transfer, iter(in_turns(sealed, self.cache.payload_bytes(plan.parts[sealed]))), begin)

    def _verify(self, transfer: Transfer, turns: Iterator[I64Array], begin: Callable[[], None]) -> None:
        """Hash what is at these places of its parts, one turn of the lane after the other, then go on."""
        at = None if transfer.cancelled or transfer.late else next(turns, None)
        if at is None:
            transfer.checking = None
            if transfer.timer is not None:
                transfer.timer.cancel()
            begin()
            return
        parts = transfer.parts[at]
        work = partial(hash_payloads, self.cache.payload_addresses(parts), self.cache.payload_bytes(parts))

        def verified(digests: U64Array | BaseException) -> None:
            if isinstance(digests, BaseException):
                if transfer.cancelled or transfer.late:
                    self._verify(transfer, turns, begin)
                else:
                    self._loaded(transfer, CopyResult(Outcome.FAILED, 0, 0, 0, 0.0, f"verification failed: {digests}"))
                return
            columns = self.cache.entries.parts
            wrong = (digests != columns.digest[parts]).any(axis=1)
            columns.unverified[parts] = 0
            self.drop(transfer.rows[at[wrong]])  # at once: nobody else is to load them
            self._verify(transfer, turns, begin)

        transfer.checking = self.hash_lane.submit(
            work,
            verified,
            flow=transfer.flow,
            urgent=VERIFY_URGENT,
            cost_bytes=int(self.cache.payload_bytes(parts).sum()),
        )

    def _begin_load(self, transfer: Transfer, terms: Terms, build: Callable[[BoolArray], Work]) -> None:
        finish = partial(self._loaded, transfer)
        if transfer.cancelled:
            finish(CopyResult(Outcome.CANCELLED, 0, 0, 0, 0.0))
        elif transfer.late:
            finish(CopyResult(Outcome.EXPIRED, 0, 0, 0, 0.0))
        else:
            self._begin(transfer, lambda: build(~transfer.bad), terms, finish)

    def _loaded(self, transfer: Transfer, result: CopyResult) -> None:
        self.cache.unhold(transfer.rows)
        self._finish(transfer, result)

    # --- both ---

    def _begin(
        self, transfer: Transfer, build: Callable[[], Work], terms: Terms, finish: Callable[[CopyResult], None]
    ) -> None:
        """Start the copy, or the wait for the worker's signal before it."""

        def failed(error: Exception) -> None:
            reason = f"it could not begin: {type(error).__name__}: {error}"
            self.hash_lane.loop.call_soon(finish, CopyResult(Outcome.FAILED, 0, 0, 0, 0.0, reason))

        def submit() -> None:
            self._submit(transfer, build, terms, finish, failed)

        if terms.ready is None:
            submit()
        else:
            self._wait(transfer, terms, terms.ready, submit, finish, failed)

    def _wait(
        self,
        transfer: Transfer,
        terms: Terms,
        ready: ReadySignal,
        submit: Callable[[], None],
        finish: Callable[[CopyResult], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """For the worker's signal, then `submit`."""

        def settled(outcome: Outcome) -> None:
            transfer.give_up = None
            if transfer.cancelled:
                outcome = Outcome.CANCELLED
            if outcome is Outcome.DONE:
                submit()
            else:
                gone = outcome is Outcome.FAILED
                reason = "the page of the worker's signal is gone" if gone else "the worker's signal had not come"
                finish(CopyResult(outcome, 0, 0, 0, 0.0, reason))

        def give_up(outcome: Outcome) -> None:
            if self.signals.cancel(wait):
                settled(outcome)

        try:
            wait = self.signals.wait(ready, terms.deadline_s, settled)
        except _SHORT as error:
            failed(error)
        else:
            transfer.give_up = give_up

    def _submit(
        self,
        transfer: Transfer,
        build: Callable[[], Work],
        terms: Terms,
        finish: Callable[[CopyResult], None],
        failed: Callable[[Exception], None],
    ) -> None:
        try:
            transfer.copy = terms.device.submit(
                transfer.direction,
                build(),
                deadline_s=terms.deadline_s,
                urgent=terms.urgent,
                done=finish,
                flow=terms.flow,
            )
        except _SHORT as error:
            failed(error)

    def _finish(self, transfer: Transfer, result: CopyResult) -> None:
        self.running.remove(transfer)
        transfer.ended.set()
        if transfer.timer is not None:
            transfer.timer.cancel()
        counters = self.counters[transfer.direction]
        counters.jobs += 1
        counters.bytes += result.bytes
        counters.seconds += result.seconds
        counters.descriptors += result.descriptors
        counters.copies += result.copies
        if result.outcome is Outcome.DONE:
            bad = int(transfer.bad.sum())
            counters.keys += len(transfer.parts) - bad
            counters.keys_bad += bad
        else:
            counters.not_done += 1
            name = f"keys_{result.outcome.value}"
            setattr(counters, name, getattr(counters, name) + len(transfer.parts))
        outcome = Outcome.PARTIAL if result.outcome is Outcome.DONE and transfer.bad.any() else result.outcome
        transfer.done(TransferResult(outcome, result.bytes, result.seconds, transfer.bad, result.reason))

    async def drain(self, jobs: Progress, last: int, deadline_s: float) -> bool:
        """Wait until these jobs up to the number `last` have ended, and all that was stored by then has its checksum,
        or has gone; False at the deadline. For any number of callers: see `Waits`.
        """
        until_s = asyncio.get_running_loop().time() + deadline_s
        return await self.waits.until_past(jobs, last, until_s) and await self.until_sealed(until_s)

    async def until_sealed(self, until_s: float) -> bool:
        """Wait until all that was stored by now has its checksum, or has gone; False: not by that time of the loop."""
        return await self.waits.until_past(self.sealing.stores, self.sealing.stores.last, until_s)

    async def settle(self, transfers: set[Transfer], deadline_s: float) -> bool:
        """Wait until these transfers have ended; False at the deadline. For one caller for each transfer: all who wait
        for the same one go on in the same turn.
        """
        try:
            async with asyncio.timeout(deadline_s):
                for transfer in list(transfers):  # each wakes who waits for it alone, however many wait
                    await transfer.ended.wait()
        except TimeoutError:
            return False
        return True

    async def end(self, transfers: set[Transfer], stuck_s: float) -> bool:
        """Wait until these transfers, of which nothing more is to begin, have ended. False: a thread has been at one
        chunk of one of them for `stuck_s` seconds, and may be at it for ever.

        However long it takes until the loop hears of their ends, or chunks of others have ended, is no reason. Time in
        which the process did not run, or the loop did not turn, counts as one look.
        """
        look_s, stuck = stuck_s / STUCK_LOOKS, 0
        began_s = time.monotonic()
        while not await self.settle(transfers, look_s):
            now, since_s = time.monotonic(), began_s
            began_s = now
            busy_s = max((t.copy.busy_s(now) for t in transfers if t.copy is not None and not t.finished), default=0.0)
            stuck = stuck + 1 if busy_s >= now - since_s else 0
            if stuck >= STUCK_LOOKS and busy_s >= stuck_s:  # one look may have been at one chunk, the next at another
                return False
        return True
