"""Fetching reads keys from the remote store into memory slots, verifies them, and only then serves them.

Event loop only. A fetch begins with a question: which of these keys does the store have, and does the era's marker
exist? From the answer it chooses the keys of the longest restorable prefix, and gets them in the order of the prompt.
Fetched keys are committed once the marker was seen again afterwards: so no clear preceded their complete arrival.

A request waits for `fetch_s` at most. Keys that have not arrived by then are misses, and other requests may store them.
A get that has begun can't be stopped: its slots are in quarantine, and count as under way, until `RemoteStore` calls
back.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from kvoffloadd.agentwire.frames import Presence
from kvoffloadd.cache.lower.fetches import Fetch, Fetches, KeysBelow, PendingRead, ReadBatch, Urgency, keys_below
from kvoffloadd.cache.lower.window import Window
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.index import distinct
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.remote.contents import RemoteContents, RemotePlace, object_bytes
from kvoffloadd.cache.remote.request import RemoteKeys, needed_keys
from kvoffloadd.cache.stats.histogram import Histogram
from kvoffloadd.model import BoolArray, I64Array, KeyState, U64Array
from kvoffloadd.scheduling.lanes import DAEMON, Flow
from kvoffloadd.storage.hashing import in_turns
from kvoffloadd.storage.remote.inflight import RemoteTransfer
from kvoffloadd.storage.remote.questions import QUESTION_KEYS, ExistsResult
from kvoffloadd.storage.remote.transfers import GetResult, Names, RemoteStatus

GET_BYTES, GET_KEYS = 8 << 20, 256
"""The approximate size of one get."""

CHECK_S: Final = 1.0
"""The time limit for seeing the era's marker again."""

FAILED_TTL_S: Final = 10.0
"""The store is not asked again for this long for a key that it reported and then did not deliver."""

WINDOW_SHARES: Final = {Urgency.LOAD: 4, Urgency.PIN: 2, Urgency.PREFETCH: 4}
"""By urgency, a fraction (1/n) of the bytes that may be under way."""

LATE_SHARE: Final = 8
"""Nothing is requested while more than this fraction (1/n) of the bytes that may be under way is late: half of the
smallest window.
"""

BOUNDS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

_RESERVED = int(KeyState.RESERVED)
_DROPPED: Final = 255
"""Replaces a `RemoteStatus`: no request waits for the key any more, or it may have been cleared. It is counted."""

NO_KEYS: U64Array = np.zeros((0, 4), np.uint64)


@dataclass(slots=True, eq=False)
class RemoteFetch(Fetch):
    """A request's wait for the store."""

    groups: Sequence[RemoteKeys] = field(kw_only=True)
    there: list[BoolArray] = field(kw_only=True)  # by group: keys that the store has, or that are under way
    until_s: float = field(kw_only=True)  # time.monotonic()
    whole: bool = field(kw_only=True)  # whether all available keys are wanted, not only those of a prefix
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class RemoteRead(PendingRead):
    """One get under way, of whole keys."""

    keyspace: Keyspace = field(kw_only=True)
    place: RemotePlace = field(kw_only=True)
    keys: U64Array = field(kw_only=True)
    began_s: float = field(kw_only=True)
    give_up: Callable[[RemoteRead], bool] = field(kw_only=True)
    transfer: RemoteTransfer | None = None
    result: GetResult | None = None  # set once the data has come, while the marker is checked
    over: bool = False

    def cancel(self) -> bool:
        """Returns True if its slots are free, False if they are in use until its end."""
        return self.give_up(self)


@dataclass(slots=True)
class FetchCounters:
    """Counts since the start. `not_fetched`: requested keys that did not come, by reason."""

    asked: int = 0
    found: int = 0
    keys: int = 0
    bytes: int = 0
    not_fetched: Counter[str] = field(default_factory=Counter)


class FetchRate:
    """The recent rate in bytes a second. Time with nothing under way does not count."""

    def __init__(self) -> None:
        self._bytes = self._seconds = self._last_s = 0.0

    def add(self, num_bytes: int, began_s: float, ended_s: float) -> None:
        """Records the bytes that came between these two times."""
        self._seconds = 0.8 * self._seconds + max(0.0, ended_s - max(began_s, self._last_s))
        self._bytes = 0.8 * self._bytes + num_bytes
        self._last_s = ended_s

    def bytes_within(self, seconds: float) -> int:
        """Returns the bytes expected within these seconds."""
        return int(self._bytes / self._seconds * seconds) if self._seconds else 1 << 62


class RemoteFetching(Fetches):
    """All fetches from the store that are under way."""

    def __init__(self, remote: RemoteContents) -> None:
        super().__init__(remote.cache, remote.loop)
        self._remote = remote
        self._store = remote.store
        self.counters = FetchCounters()
        self.lookup_s, self.get_s = Histogram(BOUNDS_S), Histogram(BOUNDS_S)
        self.rate = FetchRate()
        self._windows: dict[int, Window[Fetch]] = {
            urgent: Window(remote.config.inflight_bytes // share) for urgent, share in WINDOW_SHARES.items()
        }

    @property
    def is_worth_asking(self) -> bool:
        """Whether a fetch could bring anything: the store answers, and late bytes do not fill a window."""
        return self._store.can_read() and LATE_SHARE * self.quarantined_bytes <= self._remote.config.inflight_bytes

    # --- requests ---

    @changing
    def request(
        self, groups: Sequence[RemoteKeys], urgent: int, done: Callable[[], None], flow: Flow = DAEMON, *, whole: bool
    ) -> Fetch:
        """Asks for these keys, and fetches those of the longest prefix that can be restored with them (`whole`: all).
        `done` as in `fetch`; it is called within `fetch_s`.
        """
        config = self._remote.config
        patience_s = config.prefetch_s if urgent == Urgency.PREFETCH else config.fetch_s
        now_s = time.monotonic()
        there = [np.zeros(len(group.keys), bool) for group in groups]
        fetch = RemoteFetch(
            urgent, done, deque(), flow, groups=groups, there=there, until_s=now_s + patience_s, whole=whole
        )
        self._fetches.add(fetch)
        fetch.timer = self._loop.call_later(patience_s, self._expire, fetch)
        for group, mask in zip(groups, there, strict=True):
            self._ask(fetch, group, mask, now_s)
        if not fetch.lookups:
            fetch.lookups = 1
            self._loop.call_soon(self._answer, fetch)
        return fetch

    def _ask(self, fetch: RemoteFetch, group: RemoteKeys, there: BoolArray, now_s: float) -> None:
        """Asks for a group's keys, except those under way."""
        indices = np.zeros(0, np.int64) if group.requested is None else np.flatnonzero(group.requested)
        if not len(indices):
            return
        rows = self._cache.entries.find(group.keyspace, group.keys[indices])
        coming = (rows >= 0) & self.under_way(rows)
        there[indices[coming]] = True
        indices = indices[~coming]
        place = self._remote.place(group.keyspace)
        if place is None or not len(indices):
            return
        self.counters.asked += len(indices)
        for start in range(0, len(indices), QUESTION_KEYS):
            batch = indices[start : start + QUESTION_KEYS]
            names = Names(place.space, group.keys[batch])
            fetch.lookups += 1
            on_answer = partial(self._on_answer, fetch, group, there, batch, place, now_s)
            until_s = now_s + self._remote.config.lookup_s
            self._store.exists(names, until_s, on_answer, fetch.flow, fetch.urgent)

    @changing
    def _on_answer(
        self,
        fetch: RemoteFetch,
        group: RemoteKeys,
        there: BoolArray,
        indices: I64Array,
        place: RemotePlace,
        began_s: float,
        answer: ExistsResult | None,
    ) -> None:
        self.lookup_s.add(time.monotonic() - began_s)
        if answer is None:
            self.counters.not_fetched["no_answer"] += len(indices)
        elif self._has_marker(place, answer):
            has = answer.keys == Presence.YES
            there[indices[has]] = True
            self.counters.found += int(np.count_nonzero(has))
            missing = indices[answer.keys == Presence.NO]
            self._remote.add_misses(group.keyspace, group.keys[missing], self._remote.config.miss_ttl_s)
        self._answer(fetch)

    def _has_marker(self, place: RemotePlace, answer: ExistsResult) -> bool:
        """Returns whether the era counts, by the store's answer and by what is known here."""
        if answer.marker == Presence.NO:
            self._remote.eras.lost(place.space.fingerprint, place.number)
        return answer.marker == Presence.YES and self._remote.is_current(place)

    @changing
    def _answer(self, fetch: RemoteFetch) -> None:
        """Takes one of the answers that the fetch waits for."""
        if fetch.ended or not fetch.lookups:  # the fetch did not wait for this long
            return
        fetch.lookups -= 1
        if fetch.lookups:
            return
        wanted = self._choose(fetch)
        slices = self._slices(wanted, fetch.urgent)
        fetch.slices.extend(sorted(slices, key=_tokens_before))
        fetch.groups, fetch.there = (), []
        self._advance(fetch)

    def _choose(self, fetch: RemoteFetch) -> list[KeysBelow]:
        groups, there = fetch.groups, fetch.there
        if not any(mask.any() for mask in there):
            return []
        if fetch.whole:
            masks = [mask & ~group.local for group, mask in zip(groups, there, strict=True)]
        else:
            masks = needed_keys(groups, there, self.rate.bytes_within(fetch.until_s - time.monotonic()))
        total = sum(int(np.count_nonzero(mask)) for mask in masks)
        found = sum(int(np.count_nonzero(mask)) for mask in there)
        few = total < self._remote.config.min_keys
        self.counters.not_fetched["not_needed"] += found if few else found - total
        if few:
            return []
        return [
            keys_below(group.keyspace, group.keys, group.first, mask)
            for group, mask in zip(groups, masks, strict=True)
            if mask.any()
        ]

    @changing
    def _expire(self, fetch: RemoteFetch) -> None:
        """Ends the fetch, as its time is over, and gives up the reads that only it waits for."""
        if fetch.ended:
            return
        self.counters.not_fetched["late"] += sum(len(wanted.keys) for wanted in fetch.slices)
        if fetch.lookups:  # no key found by earlier answers is requested any more
            self.counters.not_fetched["late"] += sum(int(np.count_nonzero(mask)) for mask in fetch.there)
        fetch.slices.clear()
        fetch.lookups = 0
        for again in fetch.readings.values():
            again.clear()
        for reading in list(fetch.readings):
            if reading.waiters != [fetch]:
                reading.waiters.remove(fetch)
                del fetch.readings[reading]
                continue
            reading.cancelled = True
            for piece, ticket in list(reading.pieces.items()):
                self.counters.not_fetched["late"] += len(piece.parts) // reading.keyspace.schema.parts
                if not ticket.cancel():
                    self._put_in_quarantine(reading, piece)
        self._check_end(fetch)

    def _let_go(self, fetch: Fetch) -> None:
        if isinstance(fetch, RemoteFetch) and fetch.timer is not None:
            fetch.timer.cancel()
            fetch.timer = None
        super()._let_go(fetch)

    # --- gets ---

    def _windows_of(self, urgent: int) -> Iterable[Window[Fetch]]:
        return [self._windows[urgent]]

    def _all_windows(self) -> Iterable[Window[Fetch]]:
        return self._windows.values()

    def _count_given_up(self, piece: PendingRead) -> None:
        pass  # counted as late

    def _count_keys(self, number: int) -> None:
        self.counters.keys += number

    def _hurry(self, reading: ReadBatch, fetch: Fetch) -> None:
        pass  # the agent has it, or will soon: bytes under way are bounded

    def _give_room(self, piece: PendingRead) -> None:
        if not piece.quarantined:  # otherwise it is still under way
            super()._give_room(piece)

    def _start(self, fetch: Fetch, wanted: KeysBelow, woken: Window[Fetch] | None) -> Window[Fetch] | None:
        keyspace, window = wanted.keyspace, self._windows[fetch.urgent]
        if keyspace.retired:
            return None  # it was cleared meanwhile
        found = self._cache.find(keyspace, wanted.keys)
        missing = np.flatnonzero(found.rows < 0)
        missing = missing[~self._remote.leaving(keyspace, wanted.keys[missing])]  # deleted since the store was asked
        place = self._remote.place(keyspace)
        if place is not None and len(missing):
            num_bytes = len(missing) * object_bytes(keyspace)
            if not window.has_room(num_bytes) or (window.is_busy and woken is None):
                return window
        self._join_others(fetch, wanted, found)
        if len(missing):
            keys = KeysBelow(keyspace, wanted.keys[missing], wanted.positions[missing])
            if place is None:
                self.counters.not_fetched["cleared"] += len(missing)
            elif isinstance(fetch, RemoteFetch):
                self._get(fetch, keys, place)
        return None

    def _get(self, fetch: RemoteFetch, wanted: KeysBelow, place: RemotePlace) -> None:
        """Reserves slots, and makes the store fill them."""
        keyspace, width = wanted.keyspace, wanted.keyspace.schema.parts
        all_parts = np.arange(width, dtype=np.uint16)
        made = reserve(self._cache, keyspace, wanted.keys, all_parts, 0, positions=wanted.positions)
        self.counters.not_fetched["no_space"] += int((made.states > _RESERVED).sum())
        if not len(made.parts):
            return
        # The keys were new: each that got slots got one for every part.
        keys = wanted.keys[made.keys[::width]]
        parts, addresses = made.parts.reshape(-1, width), made.addresses.reshape(-1, width)
        reading = self._begin(fetch, keyspace, made.parts)
        each, now_s = object_bytes(keyspace), time.monotonic()
        for turn in in_turns(np.arange(len(keys)), np.full(len(keys), each), GET_BYTES, GET_KEYS):
            window = self._windows[fetch.urgent]
            read = RemoteRead(
                parts[turn].ravel(), window, each * len(turn), keyspace=keyspace, place=place, keys=keys[turn],
                began_s=now_s, give_up=partial(self._give_up, reading),
            )  # fmt: skip
            window.used_bytes += read.num_bytes
            reading.pieces[read] = read
            read.transfer = self._store.get(
                Names(place.space, read.keys), addresses[turn], keyspace.part_bytes, fetch.until_s,
                partial(self._came, reading, read), reading.flow, reading.urgent,
            )  # fmt: skip

    def _give_up(self, reading: ReadBatch, read: RemoteRead) -> bool:
        """Gives up a read without waiting fetches. Returns True if its slots are free."""
        if read.result is None and (read.transfer is None or not read.transfer.cancel()):
            return False
        self._settle(reading, read, np.full(len(read.keys), _DROPPED, np.uint8))
        return True

    @changing
    def _came(self, reading: ReadBatch, read: RemoteRead, result: GetResult) -> None:
        """Takes the result of a get, whose slots are free. Commits valid keys once the marker was seen afterwards."""
        read.transfer = None  # it refers to the read: see `Collector`
        now_s = time.monotonic()
        self.get_s.add(now_s - read.began_s)
        if read.quarantined:
            self._quarantine.remove(read)
            self._cache.abort(read.parts)
            read.quarantined = False
            self._give_room(read)
            return
        came = int(np.count_nonzero(result.status == RemoteStatus.OK))
        if not came:
            self._settle(reading, read, result.status)
            return
        self.rate.add(came * object_bytes(read.keyspace), read.began_s, now_s)
        read.result = result
        names = Names(read.place.space, NO_KEYS)
        checked = partial(self._checked, reading, read)
        self._store.exists(names, now_s + CHECK_S, checked, reading.flow, reading.urgent)

    @changing
    def _checked(self, reading: ReadBatch, read: RemoteRead, answer: ExistsResult | None) -> None:
        if read.over or read.result is None:
            return
        status = read.result.status
        if answer is None or not self._has_marker(read.place, answer):
            self.counters.not_fetched["cleared" if answer is not None else "no_answer"] += len(status)
            status = np.full(len(status), _DROPPED, np.uint8)
        self._settle(reading, read, status, read.result.digests)

    def _settle(
        self, reading: ReadBatch, read: RemoteRead, status: np.ndarray, digests: U64Array | None = None
    ) -> None:
        """Commits valid keys, and frees the slots of the rest."""
        read.over, read.transfer = True, None
        good, width = status == RemoteStatus.OK, read.keyspace.schema.parts
        of_parts = np.repeat(good, width)
        if digests is None:
            digests = np.zeros((len(good), width, 2), np.uint64)
        self._settle_read(reading, read, of_parts, digests.reshape(-1, 2))
        if good.any():
            parts = read.parts[of_parts]
            rows = self._cache.entries.live(distinct(self._cache.entries.parts.row[parts]))
            self._remote.believe(read.keyspace, rows, read.place)
            self.counters.bytes += int(np.count_nonzero(good)) * sum(read.keyspace.part_bytes)
            self._cache.sealed(parts)
        if not good.all():
            self._count_failures(read, status)
        self._leave(reading, read)

    def _count_failures(self, read: RemoteRead, status: np.ndarray) -> None:
        failed = (status != RemoteStatus.OK) & (status != _DROPPED)
        for code in distinct(status[failed]).tolist():
            self.counters.not_fetched[RemoteStatus(code).name.lower()] += int((status == code).sum())
        known = failed & (status != RemoteStatus.NOT_ASKED)
        if not read.keyspace.retired:
            self._remote.add_misses(read.keyspace, read.keys[known], FAILED_TTL_S)


def _tokens_before(wanted: KeysBelow) -> int:
    """Returns where a slice begins in its prompt."""
    return int(wanted.positions[0]) * wanted.keyspace.schema.tokens_per_key
