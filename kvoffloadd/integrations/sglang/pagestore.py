"""Looking up, loading and storing pages of SGLang's pools, without SGLang: keys and slots in, answers out.

Whatever goes wrong with the daemon is a miss. Three lines, one for each of the threads that come here; a fourth thread
keeps them connected.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvoffloadd.client import Client, Found, KeyState, KvCache, Ready
from kvoffloadd.integrations.common.keys import KEY_BYTES, mask_of, pieces
from kvoffloadd.integrations.sglang.line import Line
from kvoffloadd.integrations.sglang.pools import KV, Pools
from kvoffloadd.integrations.sglang.prefixes import Needed, Restorable, restorable
from kvoffloadd.model import BoolArray, Direction, U8Array, U32Array

logger = logging.getLogger("sglang.kvoffloadd")

_KEEP_S = 0.5
_CLOSE_S = 2.0
_MOVED_MAX = 1024

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
    """What a call has moved."""

    pages: int
    gb_per_s: float


class PageStore:
    """Calls of one kind come from one thread at a time. `load` and `store` return when their pages are SGLang's again,
    `at_rest` begins then; everything else within the client's deadline.
    """

    def __init__(self, pools: Pools, client: MakeClient, *, job_deadline_s: float) -> None:
        """Connects, if there is a daemon. `client`: makes one for a purpose (for lookups a scheduler, else a worker),
        which tries once to connect.
        """
        self._pools = pools
        announced = KvCache((), [replace(group, refs=()) for group in pools.caches.groups])
        warning = "no cache until the daemon answers"
        self._lookups = Line(client("lookups"), announced, job_deadline_s=job_deadline_s, warning=warning)
        self._loads = Line(client("loads"), pools.caches, job_deadline_s=job_deadline_s)
        self._stores = Line(client("stores"), pools.caches, job_deadline_s=job_deadline_s)
        self._lines = (self._lookups, self._loads, self._stores)
        self._page_bytes = {group.group: group.payload_bytes for group in pools.caches.groups}
        self._generation = 0
        self._suspended = False
        self._clearing = False
        self._moved: dict[Direction, deque[Moved]] = {direction: deque(maxlen=_MOVED_MAX) for direction in Direction}
        self._closing = threading.Event()
        self._keep()
        self._keeper = threading.Thread(target=self._run, name="kvoffloadd-lines", daemon=True)
        self._keeper.start()

    # --- the threads that come here --------------------------------------------------------------------------

    def restorable(self, keys: Sequence[str], needed: Sequence[Needed] = ()) -> Restorable:
        """`keys`: of consecutive pages of one prompt. What of them is on disk begins to be read."""
        nothing = Restorable(0, (), {})
        if not keys or not self.available:
            return nothing
        packed = self._packed(keys)
        every = [KV, *(one.pool for one in needed)]
        states = self._states({pool: slice(0, len(keys)) for pool in every}, packed, Client.lookup)
        if states is None:
            return nothing
        there = {pool: np.isin(found, (KeyState.HIT, KeyState.PENDING)) for pool, found in states.items()}
        longest = restorable(there, needed)
        wanted = {KV: slice(0, longest.pages)}
        for one in needed:
            wanted[one.pool] = slice(max(0, longest.pages - one.trailing) if one.trailing else 0, longest.pages)
        if all((states[pool][some] == KeyState.HIT).all() for pool, some in wanted.items()):
            return longest
        if self._promotes(wanted, packed):
            return longest
        return restorable({pool: found == KeyState.HIT for pool, found in states.items()}, needed)

    def load(self, transfers: Sequence[Pages], ready: Ready | None = None) -> dict[str, BoolArray]:
        """Fill pages. bool (keys,) by pool: True where the page holds what its key names; others may hold anything.

        `ready`: when they may be written to; None: now.
        """
        return self._move(self._loads, Direction.LOAD, transfers, ready)

    def store(self, transfers: Sequence[Pages]) -> dict[str, BoolArray]:
        """Store pages. bool (keys,) by pool: True where the daemon has the key, or somebody is storing it."""
        return self._move(self._stores, Direction.STORE, transfers)

    def moved(self, direction: Direction) -> list[Moved]:
        """Calls that have moved anything since the last time."""
        moved = self._moved[direction]
        return [moved.popleft() for _ in range(len(moved))]

    # --- the scheduler's thread --------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the daemon answered last, on every line: what can't be loaded is not to be found."""
        return all(line.connected for line in self._lines)

    @property
    def available(self) -> bool:
        """Whether there is any use in asking."""
        return self.connected and not self._paused

    def responds(self) -> bool:
        """Ask the daemon, within the deadline of a lookup, whether it answers."""
        return self.available and self._lookups.ask(_pinged) is not None

    def suspend(self) -> None:
        """The weights change: what pages hold is no longer what their keys name. Until `renew` all is a miss."""
        self._suspended = True

    def renew(self, generation: int) -> None:
        """SGLang has forgotten all pages: go on, under other names. `generation`: u64, alike in all ranks."""
        self._generation = generation
        self._suspended = False

    def clear(self) -> None:
        """Drop every key of the namespace; where no daemon answers, as soon as one does. Until then all is a miss."""
        self._clearing = True
        self._clear()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within, nothing is loaded or stored: waits until what is under way has ended, as `load` and `store` do."""
        lines = self._loads, self._stores
        try:
            for line in lines:
                line.rest()
            yield
        finally:
            for line in lines:
                line.resume()

    def close(self) -> None:
        """End the sessions. Idempotent."""
        self._closing.set()
        self._keeper.join(_CLOSE_S)
        for line in self._lines:
            line.close(_CLOSE_S)

    # --- our thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.wait(_KEEP_S):
            try:
                self._keep()
            except Exception:  # the thread's boundary: SGLang goes on, without a cache at worst
                logger.exception("kvoffloadd: a bug, please report it")

    def _keep(self) -> None:
        """A daemon that hangs is waited for by the lookups alone, whose deadline is short."""
        self._lookups.keep()
        if self._clearing:
            self._clear()
        if self._lookups.connected:
            self._loads.keep()
            self._stores.keep()

    # --- helpers -----------------------------------------------------------------------------------

    @property
    def _paused(self) -> bool:
        return self._suspended or self._clearing

    def _clear(self) -> None:
        if self._lookups.ask(Client.clear) is not None:
            self._clearing = False

    def _packed(self, keys: Iterable[str]) -> U8Array:
        """u8 (keys, KEY_BYTES): SGLang's hexadecimal names, as this generation calls them. Raises ValueError."""
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
            for pool, some in zip(named, found.states, strict=True):
                states[pool].append(some)
        return {pool: np.concatenate(some) for pool, some in states.items()}

    def _promotes(self, wanted: Mapping[str, slice], packed: U8Array) -> bool:
        """Have keys that are on disk read; whether there are any."""
        answers = self._answers(wanted, packed, Client.prefetch)
        return answers is not None and any(found.promoting for _, found in answers)

    def _answers(
        self, wanted: Mapping[str, slice], packed: U8Array, call: Callable[[Client, Any, Any], Found]
    ) -> list[tuple[list[str], Found]] | None:
        """Ask for keys of pools, in as many requests as it takes; with each answer, which pools it is about."""
        pools = {self._pools.pools[pool].group: pool for pool in wanted}
        starts = {group: wanted[pool].start for group, pool in pools.items()}
        counts = {group: wanted[pool].stop - wanted[pool].start for group, pool in pools.items()}
        answers = []
        for piece in pieces(counts, self._lookups.most_keys(len(pools))):
            first = {group: starts[group] + some.start for group, some in piece.items()}
            groups = {group: packed[first[group] : starts[group] + some.stop] for group, some in piece.items()}
            found = self._lookups.ask(partial(_asked, call, groups, first))
            if found is None:
                return None
            answers.append(([pools[group] for group in piece], found))
        return answers

    def _move(
        self, line: Line, direction: Direction, transfers: Sequence[Pages], ready: Ready | None = None
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
        for group, copied in line.carry(direction, chunks, ready).items():
            done[pools[group]] = copied
            copied_bytes += int(copied.sum()) * self._page_bytes[group]
        if copied_bytes:
            copied_pages = sum(int(copied.sum()) for copied in done.values())
            self._moved[direction].append(Moved(copied_pages, copied_bytes / (monotonic() - begun) / 1e9))
        return done


def _asked(
    call: Callable[[Client, Any, Any], Found], groups: dict[int, U8Array], first: dict[int, int], client: Client
) -> Found:
    return call(client, groups, first)


def _pinged(client: Client) -> bool:
    client.ping()
    return True
