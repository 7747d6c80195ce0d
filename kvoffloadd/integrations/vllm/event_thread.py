"""The scheduler's second client of the daemon, for routers: a thread that learns which keys come and go, in memory and
on disk.

It has a separate client, so that a long list never delays a lookup. Ownership: the thread alone has client and
published keys; the scheduler's thread queues commands and takes news.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvoffloadd.client import Client, Event, EventGap, KvCache, Tier
from kvoffloadd.integrations.common.bugs import log_bug
from kvoffloadd.integrations.common.link import DaemonLink

logger = logging.getLogger("vllm.kvoffloadd")

_EVENTS_S = 0.1
_ROOM_S = 0.05
_CLOSE_S = 2.0
_NEWS_KEYS = 256
_NEWS_MAX = 512

TOLD_MAX = 1 << 20
"""Limit of remembered keys, at some 120 bytes each. Keys beyond it are not published: hits that routers do not
expect.
"""

EXPECTED_MAX = 1 << 16

TIERS = (Tier.MEMORY, Tier.DISK)
Place = tuple[int, Tier]
"""A group, and a tier in which the daemon has keys of it."""


@dataclass(frozen=True, slots=True, eq=False)
class News:
    """Keys of a group that can be loaded from this tier from now on, or, `removed`, no more. `generation`: of their
    names.
    """

    generation: int
    group: int
    tier: Tier
    keys: list[bytes]
    removed: bool


class PublishedKeys:
    """The keys that were published to routers of requests, so that none is published twice, or wrongly.

    They are kept by group and tier. Each key that is published as stored in a tier is published as removed from it
    once, when it goes or can't be known any more.

    In generation 0 keys are published no matter which engine stored them. Later generations are unique to the engine:
    other keys have been named by others, or before the engine's reset, and their names do not show what the engine
    could load.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        self.generation = 0
        self.groups = tuple(groups)
        self._stored: dict[Place, set[bytes]] = {(group, tier): set() for group in groups for tier in TIERS}
        self._expected: dict[tuple[int, bytes], None] = {}
        self._room = TOLD_MAX

    def renew(self, generation: int) -> Iterator[tuple[Place, list[bytes]]]:
        """Starts a generation after the engine's reset. Yields all published keys, to publish as removed."""
        yield from self.forget()
        self._expected.clear()
        self.generation = generation

    def expect(self, group: int, keys: Iterable[bytes]) -> None:
        """Records keys that the engine stores. A store that is dropped leaves them behind, so the oldest make room."""
        if self.generation:
            self._expected.update(dict.fromkeys((group, key) for key in keys))
            while len(self._expected) > EXPECTED_MAX:
                del self._expected[next(iter(self._expected))]

    def came(self, place: Place, keys: Iterable[bytes]) -> list[bytes]:
        """Returns those of the keys to publish as stored."""
        stored = self._stored.get(place)
        if stored is None:
            return []
        found = [key for key in keys if key not in stored and self._is_ours(place[0], key)][: self._room]
        stored.update(found)
        self._room -= len(found)
        return found

    def went(self, place: Place, keys: Iterable[bytes]) -> list[bytes]:
        """Returns those of the keys to publish as removed."""
        stored = self._stored.get(place, set())
        found = [key for key in keys if key in stored]
        stored.difference_update(found)
        self._room += len(found)
        return found

    def intersection(self, place: Place, keys: Iterable[bytes]) -> set[bytes]:
        """Returns those of the keys that were published as stored."""
        return self._stored.get(place, set()).intersection(keys)

    def amiss(self, place: Place, there: set[bytes]) -> list[bytes]:
        """Does what `went` does, for all keys that are not `there`."""
        return self.went(place, self._stored.get(place, set()) - there)

    def forget(self) -> Iterator[tuple[Place, list[bytes]]]:
        """Yields all published keys, to publish as removed, and as stored again if they turn out to be there."""
        for place, stored in self._stored.items():
            keys = self.went(place, list(stored))
            self.expect(place[0], keys)
            yield place, keys

    def _is_ours(self, group: int, key: bytes) -> bool:
        """Returns whether the engine has stored this key. One that is published in another tier is its own: a key comes
        to the second tier before it leaves the first.
        """
        if not self.generation or any(key in self._stored[group, tier] for tier in TIERS):
            return True
        return self._expected.pop((group, key), 0) is None


class EventThread:
    """Follows the keys that the daemon has for this engine. All methods but `close` return at once.

    After a gap in the daemon's events, and at the start, the daemon's keys are listed and the difference is published;
    while it can't be reached, everything is published as removed. News that are not taken are kept up to a bound; then
    the thread waits, which leads to a gap.
    """

    def __init__(self, client: Client, groups: Sequence[int]) -> None:
        """Starts the thread. `client`: an observer of the engine's namespace."""
        self._link = DaemonLink(client, KvCache((), ()), logger)  # an observer registers nothing
        self._published = PublishedKeys(groups)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._news: deque[News] = deque()
        self._gap = True
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvoffloadd-events", daemon=True)
        self._thread.start()

    # --- for the scheduler's thread ----------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `news` would yield any."""
        return bool(self._news)

    def news(self, most: int) -> Iterator[News]:
        """Yields the news since the last call, in order; beyond `most` keys the rest comes later."""
        taken = 0
        while self._news and taken < most:
            news = self._news.popleft()
            taken += len(news.keys)
            yield news

    def expect(self, groups: Mapping[int, Iterable[bytes]]) -> None:
        """Announces keys that the engine is about to store."""
        self._commands.put(partial(self._expect, groups))

    def renew(self, generation: int) -> None:
        """Continues under other names: the engine was reset."""
        self._commands.put(partial(self._renew, generation))

    def close(self, deadline_s: float) -> None:
        """Ends the session."""
        self._closing.set()
        self._thread.join(deadline_s)

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._obey()
                if not self._link.attempt(self._follow):
                    self._lost()
            except Exception as error:  # noqa: BLE001  the thread's boundary: routers learn all anew
                log_bug(logger, self._thread.name, error)
                self._link.lost(error)
                self._lost()
        self._link.close(_CLOSE_S)

    def _obey(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _expect(self, groups: Mapping[int, Iterable[bytes]]) -> None:
        for group, keys in groups.items():
            self._published.expect(group, keys)

    def _renew(self, generation: int) -> None:
        for place, keys in self._published.renew(generation):
            self._tell(place, keys, removed=True)
        self._news.append(News(generation, 0, Tier.MEMORY, [], removed=True))  # no older news come any more

    def _follow(self, client: Client) -> None:
        if self._gap:
            self._catch_up(client)
        events = client.events(_EVENTS_S)
        self._obey()  # the engine has announced its stores before
        for event in events:
            self._take(event)

    def _catch_up(self, client: Client) -> None:
        client.subscribe(tiers=True)  # before the list: keys that come or go meanwhile are reported after it
        self._gap = False
        names_tiers = "event_tiers" in client.features
        for group in self._published.groups:
            for tier in TIERS:
                self._list((group, tier), client, names_tiers=names_tiers)

    def _list(self, place: Place, client: Client, *, names_tiers: bool) -> None:
        """Lists keys page by page: a disk may hold more than are remembered here. An older daemon's are all listed as
        in memory, as its events are.
        """
        group, tier = place
        there: set[bytes] = set()
        cursor, last = 0, tier != Tier.MEMORY and not names_tiers
        while not last:
            page, cursor = client.snapshot_page(group, cursor, tier=tier if names_tiers else None)
            last = not cursor
            self._obey()
            keys = [key.tobytes() for key in page]
            self._tell(place, self._published.came(place, keys), removed=False)
            there |= self._published.intersection(place, keys)
        self._tell(place, self._published.amiss(place, there), removed=True)

    def _take(self, event: Event) -> None:
        if isinstance(event, EventGap):
            self._gap = True
            return
        place = (event.group, Tier.MEMORY if event.tier is None else event.tier)
        self._tell(place, self._published.went(place, map(bytes, event.removed)), removed=True)
        self._tell(place, self._published.came(place, map(bytes, event.added)), removed=False)

    def _lost(self) -> None:
        """Publishes everything as removed: there is no daemon, which the lookup thread logs, or the scheduler has not
        registered the groups yet.
        """
        self._gap = True
        for place, keys in self._published.forget():
            self._tell(place, keys, removed=True)
        self._closing.wait(self._link.retry_in_s)

    def _tell(self, place: Place, keys: list[bytes], *, removed: bool) -> None:
        for start in range(0, len(keys), _NEWS_KEYS):
            while len(self._news) >= _NEWS_MAX and not self._closing.is_set():
                self._closing.wait(_ROOM_S)
            self._news.append(News(self._published.generation, *place, keys[start : start + _NEWS_KEYS], removed))
