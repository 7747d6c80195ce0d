"""Looks up, loads and stores pages of SGLang's pools, without SGLang: keys and slots in, answers out.

Every failure of the daemon is a miss. There are three links, one for each of the threads that come here; a fourth
thread keeps them connected.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffloadd.client import Client, Found, KeyState, KvCache, Ready
from kvoffloadd.errors import DeadlineError
from kvoffloadd.integrations.common.bugs import log_bug
from kvoffloadd.integrations.common.keys import KEY_BYTES, mask_of
from kvoffloadd.integrations.sglang import counters
from kvoffloadd.integrations.sglang.claims import ClaimQueue, RetainedPages
from kvoffloadd.integrations.sglang.pools import KV, STATES, Pools
from kvoffloadd.integrations.sglang.prefixes import Needed, Restorable, restorable
from kvoffloadd.integrations.sglang.sharedlink import SharedLink
from kvoffloadd.model import BoolArray, Direction, U8Array, U32Array

logger = logging.getLogger("sglang.kvoffloadd")

_KEEP_S = 0.5
_CLOSE_S = 2.0
_MOVED_MAX = 1024
_WAIT_STEP_S = 0.05
_USED_MAX = 1024
"""Limit of prompts that wait to be reported as used. Beyond it the oldest are dropped."""

_NOTHING = Restorable(0, (), {})

# Keys from other hosts count as found once they have come: how long that takes is unknown.
_LOOK_HERE = partial(Client.lookup, local=True)
_READ_HERE = partial(Client.prefetch, local=True)

R = TypeVar("R")

Purpose = Literal["lookups", "loads", "stores"]
MakeClient = Callable[[Purpose], Client]


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of one pool: their names, and all of their slots, i64 (keys * tokens of a page,)."""

    pool: str
    keys: Sequence[str]
    slots: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Moved:
    """Counts what a call has moved."""

    pages: int
    gb_per_s: float


class PageStore:
    """Calls of one kind come from one thread at a time. `load` and `store` return when SGLang owns their pages again,
    `at_rest` begins then; everything else within the client's deadline, and a lookup within `wait_s` more.
    """

    def __init__(self, pools: Pools, client: MakeClient, *, job_deadline_s: float) -> None:
        """Connects, if there is a daemon. `client`: makes a client for a purpose (for lookups a scheduler, else a
        worker), which tries once to connect.
        """
        self._pools = pools
        announced = KvCache((), [replace(group, refs=()) for group in pools.caches.groups])
        warning = "no cache until the daemon answers"
        self._lookups = SharedLink(client("lookups"), announced, job_deadline_s=job_deadline_s, warning=warning)
        self._loads = SharedLink(client("loads"), pools.caches, job_deadline_s=job_deadline_s)
        self._stores = SharedLink(client("stores"), pools.caches, job_deadline_s=job_deadline_s)
        self._links = (self._lookups, self._loads, self._stores)
        self._page_bytes = {group.group: group.payload_bytes for group in pools.caches.groups}
        self._generation = 0
        self._suspended = False
        self._resting = False
        self._used: deque[Sequence[str]] = deque(maxlen=_USED_MAX)
        self._claims = ClaimQueue(self._lookups, pools.pools)
        self._trailing: dict[str, int] = {}  # of each pool besides keys and values: SGLang's last request, see `Needed`
        self._moved: dict[Direction, deque[Moved]] = {direction: deque(maxlen=_MOVED_MAX) for direction in Direction}
        self._closing = threading.Event()
        self._keep()
        self._keeper = threading.Thread(target=self._run, name="kvoffloadd-lines", daemon=True)
        self._keeper.start()

    # --- the threads that come here --------------------------------------------------------------------------

    def restorable(self, keys: Sequence[str], needed: Sequence[Needed] = (), wait_s: float = 0.0) -> Restorable:
        """Looks up `keys`: of consecutive pages of one prompt. Those on disk begin to be read.

        `wait_s`: how long to wait for pages that other hosts have stored. 0: other hosts' pages are not requested.
        """
        if not keys or not self.available:
            return _NOTHING
        if needed:  # for short prompts SGLang may need less
            more = {need.pool: max(need.trailing, self._trailing.get(need.pool, 0)) for need in needed}
            self._trailing = {**self._trailing, **more}  # replaced, never changed: other threads read it
        packed = self._packed(keys)
        there = self._there_here(packed, needed)
        if there is None:
            return _NOTHING
        here = restorable(there, needed)
        if here.pages < len(keys) and wait_s and self._lookups.supports("remote") and _told_apart(needed):
            return self._restorable_anywhere(here, there, packed, needed, monotonic() + wait_s)
        return here

    def _there_here(self, packed: U8Array, needed: Sequence[Needed]) -> dict[str, BoolArray] | None:
        """Returns the pages that this host has, or is reading from its disks, for each pool. None: the daemon gave no
        answer.
        """
        every = [KV, *(need.pool for need in needed)]
        states = self._states({pool: slice(0, len(packed)) for pool in every}, packed, _LOOK_HERE)
        if states is None:
            return None
        there = {pool: np.isin(found, (KeyState.HIT, KeyState.PENDING)) for pool, found in states.items()}
        wanted = _wanted(restorable(there, needed).pages, {need.pool: need.trailing for need in needed})
        if all((states[pool][span] == KeyState.HIT).all() for pool, span in wanted.items()):
            return there
        if self._promotes(wanted, packed):
            return there
        return {pool: found == KeyState.HIT for pool, found in states.items()}

    def _restorable_anywhere(
        self,
        here: Restorable,
        there: Mapping[str, BoolArray],
        packed: U8Array,
        needed: Sequence[Needed],
        until: float,
    ) -> Restorable:
        """Adds the pages behind `here.pages` that come from other hosts before `until`, in time.monotonic seconds.
        Later ones are there for the next lookup.
        """
        behind = dict.fromkeys(there, slice(here.pages, len(packed)))
        answers = self._answers(behind, packed, Client.prefetch)
        if answers is None:
            return here
        for _, found in answers:
            while found.promoting and not found.ready and monotonic() < until:
                if self._paused or self._resting or self._closing.is_set():
                    return here
                if not self._lookups.attempt(partial(_wait, found, min(until, monotonic() + _WAIT_STEP_S))):
                    return here
        # A new lookup, whether all have come or not: those that have come are in memory now.
        states = self._states(behind, packed, Client.lookup)
        if states is None:
            return here
        with_others = {
            pool: np.concatenate([present[: here.pages], states[pool] == KeyState.HIT])
            for pool, present in there.items()
        }
        return restorable(with_others, needed)

    def load(self, transfers: Sequence[Pages], ready: Ready | None = None) -> dict[str, BoolArray]:
        """Fills pages. Returns bool (keys,) by pool: True where the page holds its key's contents; others may hold
        anything.

        `ready`: when they may be written to; None: now.
        """
        return self._move(self._loads, Direction.LOAD, transfers, ready)

    def store(self, transfers: Sequence[Pages]) -> dict[str, BoolArray]:
        """Stores pages. Returns bool (keys,) by pool: True where the daemon has the key, or a job is storing it."""
        self._tell_used()  # the prefix of these pages must not make room for them
        return self._move(self._stores, Direction.STORE, transfers)

    def moved(self, direction: Direction) -> list[Moved]:
        """Returns the calls that have moved anything since the last time."""
        moved = self._moved[direction]
        return [moved.popleft() for _ in range(len(moved))]

    # --- the scheduler's thread --------------------------------------------------------------------

    def used(self, keys: Sequence[str]) -> None:
        """Records that SGLang had these pages, which begin a prompt, in its other levels. Returns at once: the daemon
        gets them before the next store, or soon.
        """
        if keys and self.available:
            self._used.append(keys)

    def retain(self, wanted: RetainedPages) -> None:
        """Has pages of a request that has ended claimed. Returns at once: the daemon is asked soon, and the claims are
        lost if it does not answer.
        """
        if wanted.keys and self.available:
            self._claims.add(wanted)
        elif wanted.keys and not self._closing.is_set():
            counters.LOST_CLAIMS.inc()

    @property
    def connected(self) -> bool:
        """Whether the daemon answered last, on every link: pages that can't be loaded must not be found."""
        return all(link.connected for link in self._links)

    @property
    def available(self) -> bool:
        """Whether a request may succeed."""
        return self.connected and not self._paused

    def responds(self) -> bool:
        """Checks, within the deadline of a lookup, whether the daemon answers."""
        return self.available and self._lookups.attempt(Client.ping)

    def suspend(self) -> None:
        """Makes everything a miss until `renew`: the weights change, and pages no longer hold what their keys name."""
        self._suspended = True

    def renew(self, generation: int) -> None:
        """Continues under other names: SGLang has forgotten all pages. `generation`: u64, alike in all ranks."""
        self._generation = generation
        self._used.clear()  # these name what was computed with other weights
        self._claims.clear()
        self._suspended = False

    def clear(self, token: bytes = b"") -> None:
        """Drops every key of the namespace; where no daemon answers, as soon as one does. Until then all is a miss.

        `token`: 16 bytes that name this clear, which a daemon carries out once even if several ranks request it; empty:
        a new token.
        """
        self._lookups.clear(token)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Keeps loads and stores out of its body: waits until those under way have ended, as `load` and `store` do. No
        lookup waits for other hosts.
        """
        links = self._loads, self._stores
        self._resting = True
        try:
            for link in links:
                link.rest()
            yield
        finally:
            self._resting = False
            for link in links:
                link.resume()

    def close(self) -> None:
        """Ends the sessions. Idempotent."""
        self._closing.set()
        self._keeper.join(_CLOSE_S)
        for link in self._links:
            link.close(_CLOSE_S)

    # --- our thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.wait(_KEEP_S):
            try:
                self._keep()
            except Exception as error:  # noqa: BLE001  the thread's boundary: SGLang goes on, without a cache at worst
                log_bug(logger, self._keeper.name, error)

    def _keep(self) -> None:
        """Keeps the links connected. Only the lookups wait for a daemon that hangs, since their deadline is short."""
        self._lookups.keep()
        if self._lookups.connected:
            self._loads.keep()
            self._stores.keep()
            self._tell_used()
        self._claims.send(self._packed, self._trailing)

    # --- helpers -----------------------------------------------------------------------------------

    @property
    def _paused(self) -> bool:
        return self._suspended or self._lookups.clearing

    def _packed(self, keys: Iterable[str]) -> U8Array:
        """Returns u8 (keys, KEY_BYTES): SGLang's hexadecimal names, renamed for this generation. Raises ValueError."""
        named = np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, KEY_BYTES)
        mask = np.frombuffer(mask_of(self._generation).to_bytes(KEY_BYTES, "little"), np.uint8)
        masked: U8Array = named ^ mask
        return masked

    def _states(
        self, wanted: Mapping[str, slice], packed: U8Array, call: Callable[[Client, Any, Any], Found]
    ) -> dict[str, U8Array] | None:
        answers = self._answers(wanted, packed, call)
        if answers is None:
            return None
        states: dict[str, list[U8Array]] = {pool: [] for pool in wanted}
        for named, found in answers:
            for pool, piece in zip(named, found.states, strict=True):
                states[pool].append(piece)
        return {pool: np.concatenate(pieces) for pool, pieces in states.items()}

    def _promotes(self, wanted: Mapping[str, slice], packed: U8Array) -> bool:
        """Has keys that are on disk read; returns whether there are any."""
        answers = self._answers(wanted, packed, _READ_HERE)
        return answers is not None and any(found.promoting for _, found in answers)

    def _tell_used(self) -> None:
        """Reports all prompts that wait as used. They are hints, and are lost if no daemon answers. They go over the
        lookups' link, because its deadline is short.
        """
        while self._used and not self._resting:
            try:
                keys = self._used.popleft()
            except IndexError:  # another thread has reported the last one
                return
            if self.available:
                self._answers(_wanted(len(keys), self._trailing), self._packed(keys), _touched)

    def _answers(
        self, wanted: Mapping[str, slice], packed: U8Array, call: Callable[[Client, Any, Any], R]
    ) -> list[tuple[list[str], R]] | None:
        """Requests keys of pools, in as many requests as necessary; returns each answer with its pools."""
        pools = {self._pools.pools[pool].group: pool for pool in wanted}
        starts = {group: wanted[pool].start for group, pool in pools.items()}
        counts = {group: wanted[pool].stop - wanted[pool].start for group, pool in pools.items()}
        answers = []
        for piece, first in self._lookups.pieces(counts, starts):
            groups = {group: packed[first[group] : starts[group] + span.stop] for group, span in piece.items()}
            found = self._lookups.ask(partial(_with_client, call, groups, first))
            if found is None:
                return None
            answers.append(([pools[group] for group in piece], found))
        return answers

    def _move(
        self, link: SharedLink, direction: Direction, transfers: Sequence[Pages], ready: Ready | None = None
    ) -> dict[str, BoolArray]:
        done = {pages.pool: np.zeros(len(pages.keys), np.bool_) for pages in transfers}
        chunks: dict[int, tuple[bytes, U32Array]] = {}
        pools = {}
        if self._paused or not self._lookups.connected:
            return done
        for pages in transfers:
            pool = self._pools.pools[pages.pool]
            blocks = pool.blocks(pages.slots, len(pages.keys))
            if blocks is None:
                logger.warning(
                    "kvoffloadd: %d slots of %r are not %d pages", pages.slots.size, pages.pool, len(pages.keys)
                )
            elif blocks.size:
                chunks[pool.group] = (self._packed(pages.keys).tobytes(), blocks)
                pools[pool.group] = pages.pool
        begun = monotonic()
        copied_bytes = 0
        for group, copied in link.carry(direction, chunks, ready).items():
            done[pools[group]] = copied
            copied_bytes += int(copied.sum()) * self._page_bytes[group]
        if copied_bytes:
            copied_pages = sum(int(copied.sum()) for copied in done.values())
            self._moved[direction].append(Moved(copied_pages, copied_bytes / (monotonic() - begun) / 1e9))
        return done


def _wanted(pages: int, trailing: Mapping[str, int]) -> dict[str, slice]:
    """Returns the pages of each pool that a prefix of this many pages needs; `trailing`: as in `Needed`."""
    others = {pool: slice(max(0, pages - last) if last else 0, pages) for pool, last in trailing.items()}
    return {KV: slice(0, pages)} | others


def _with_client(
    call: Callable[[Client, Any, Any], R], groups: dict[int, U8Array], first: dict[int, int], client: Client
) -> R:
    return call(client, groups, first)


def _touched(client: Client, groups: dict[int, U8Array], first: dict[int, int]) -> bool:
    client.touch(groups, first)
    return True


def _wait(found: Found, until: float, client: Client) -> None:
    with suppress(DeadlineError):
        client.wait_ready(found, max(0.0, until - monotonic()))


def _told_apart(needed: Sequence[Needed]) -> bool:
    """Returns whether the daemon knows which keys a prefix needs: it does not know the length of windows."""
    return all(not need.trailing or need.pool == STATES for need in needed)
