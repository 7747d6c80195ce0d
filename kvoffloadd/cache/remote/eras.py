"""Eras: no host ever fetches what was stored in the remote store before a `clear` after it. Event loop only.

A namespace's **era** is a generation and an id. It is part of the name of each object, so that another era's keys have
other names. Three kinds of small objects determine the current era:

- The era's **marker**: no key of the era counts while it is absent. Each question to the store asks for it, too. So
  removing it clears the store for all hosts at once.
- The era's **successor** names the next era once that exists. A host writes it only where none exists, so among several
  hosts that end an era at once one wins, and the others continue from the winner's successor.
- The namespace's **pointer** names an era from which successors lead to the last one, which is current. A host that
  finds a lagging pointer moves it to the last era, so that hosts learn of an era from the pointer and from the
  successor of their era: the store may lose either.

Eras are ordered by (generation, id), and successors lead only upwards. The generation is the namespace's epoch (see
`epochs`) on every host: the number of the last clear that reached it. So the store remembers clears as a disk's
manifest does, and the same rules hold for the last era:

- Its generation is later than this host's epoch: another host has cleared. This host clears its own contents and
  continues in that epoch, which is durable in the manifests and next to the arena.
- Its generation is earlier: this host has cleared, and the store does not know, or has forgotten the clear (it was
  away, or it failed over to an older copy). The era gets a successor with this host's epoch. No host goes back.
- Its generation is equal: the era is taken if its marker exists. If not, the store has lost the marker: the era gets a
  successor with the same generation, since nothing was cleared. No host ever restores a lost marker.

If the store loses the pointer, hosts may use eras that no path joins. Then the earlier era gets the later one as its
successor. Until all hosts have looked, within `poll_s`, a clear may miss an era unknown to its host.

A **round** looks at every namespace in memory or on a disk, every `poll_s`. Few calls read all pointers and successors,
and most show no change. Each changed namespace has a separate **look** (see `agreement`): its time is bounded, looks
run concurrently, and the round continues regardless of their results.

Contents that no look has confirmed are in **doubt** (see `doubt`), unless the store is known to be away:

- Before the first look at a namespace in this run nothing from an earlier run hits: a clear may have come meanwhile.
- Nothing at all hits for some looks if the store has lost the pointer and the era's marker: other hosts may know of a
  clear that it has lost, too. If the first look found no pointer, nothing from an earlier run hits meanwhile.
- If the last look is older than `doubt_s`, counted only while the store answers, nothing hits.

Clears are repeated after a while, and after each absence of the store, since a failover may restore removed objects.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

from kvoffloadd.agentwire.frames import Code
from kvoffloadd.agentwire.names import FINGERPRINT_BYTES, era_prefix, pointer_name
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import CacheTornError, changing
from kvoffloadd.cache.memory.doubt import Doubt
from kvoffloadd.cache.remote.agreement import (
    VALUE_S,
    AheadError,
    EraAgreement,
    successor_of,
    until,
)
from kvoffloadd.cache.remote.era import decode_era
from kvoffloadd.cache.remote.namespaceera import NamespaceEra
from kvoffloadd.cache.remote.storeclock import StoreClock
from kvoffloadd.cache.remote.sweeps import Sweeps
from kvoffloadd.errors import KvOffloadError, NotDurableError, RemoteStoreError
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.storage.remote.store import RemoteState, RemoteStore
from kvoffloadd.storage.remote.values import NotRead

log = logging.getLogger(__name__)

LOOK_S: Final = 6.0
"""The time limit of one look."""

LOOKS_MAX: Final = 16
"""The number of concurrent looks at namespaces with a previously known era, of concurrent clears, and of concurrent
first looks, which are many when many namespaces are opened.
"""

READ_NAMESPACES: Final = 128
"""The number of namespaces in one call."""

OVERDUE_POLLS: Final = 5
OVERDUE_S_MIN: Final = 5.0
"""A namespace is reported as overdue if `OVERDUE_POLLS` polls and at least these seconds have passed since a look."""

DOUBT_POLLS: Final = 10
DOUBT_S_MIN: Final = 15.0
"""A namespace's keys no longer hit if `DOUBT_POLLS` polls and at least these seconds have passed since a look."""

AWAY_ROUNDS: Final = 1
"""After more rounds without any answer the store is known to be away."""

SHOWN_MAX: Final = 1000
"""The number of namespaces whose eras `status` reports, since its frame is bounded."""

NAMED_MAX: Final = 64
"""The number of namespaces in one list of `status`."""

_CANARY: Final = pointer_name(bytes(FINGERPRINT_BYTES))
"""A name that no host writes: a store that reports it as absent works."""


class Eras:
    """The eras of all namespaces in memory or on a disk. `clear_here(fingerprint, epoch)` clears this host's memory and
    disk after another host's clear; with None it uses a number of this host. It runs to completion.
    """

    def __init__(
        self,
        store: RemoteStore,
        cache: Cache,
        poll_s: float,
        clear_here: Callable[[bytes, int | None], Awaitable[None]],
    ) -> None:
        self.changes = Changes()
        """Reports each newly known era, and each clear that the store has recorded."""
        self.sweeps = Sweeps(store)
        self.lost_markers = 0
        self._store = store
        self._cache = cache
        self._poll_s = poll_s
        self._overdue_s = max(OVERDUE_POLLS * poll_s, OVERDUE_S_MIN)
        self._doubt_s = max(DOUBT_POLLS * poll_s, DOUBT_S_MIN)
        self._clear_here = clear_here
        self._known: dict[bytes, NamespaceEra] = {}
        self._clock = StoreClock(2 * poll_s + VALUE_S)
        self._agreement = EraAgreement(store, cache.epochs, self._clock, poll_s, self._clear_to_its_end, self._on_taken)
        self._silences = 0  # rounds without an answer since the last answered one
        self._was_away = False  # since the last answered round
        self._numbers = 0
        self._wanted = Changes()
        self._urgent: set[bytes] = set()
        self._checked: set[bytes] = set()  # namespaces with nothing here but a remembered clear
        self._starts = 0
        self._looks: dict[NamespaceEra, asyncio.Task[None]] = {}
        self._clears: set[asyncio.Task[None]] = set()
        self._slots, self._first_slots, self._clear_slots = (asyncio.Semaphore(LOOKS_MAX) for _ in range(3))
        self._bug: CacheTornError | None = None
        cache.confirmed.required = True
        cache.doubt_of = self.doubt_of

    def of(self, fingerprint: bytes) -> NamespaceEra | None:
        """Returns the namespace's era, if it is known and belongs to this host's epoch."""
        known, epochs = self._known.get(fingerprint), self._cache.epochs
        if known is None or known.era is None or known.era.generation != epochs.of(fingerprint):
            return None
        return None if epochs.is_rising(fingerprint) else known

    def is_current(self, fingerprint: bytes, number: int) -> bool:
        """Returns whether this is still the era."""
        known = self.of(fingerprint)
        return known is not None and known.number == number

    @changing
    def want(self, fingerprint: bytes) -> None:
        """Requests a look at the namespace soon."""
        known = self._known.get(fingerprint)
        if known is not None and time.monotonic() - known.tried_s < self._poll_s:
            return  # the next round comes as soon as a look would
        if self.of(fingerprint) is None:
            self._urgent.add(fingerprint)
            self._wanted.notify_all()

    @changing
    def lost(self, fingerprint: bytes, number: int) -> None:
        """Handles the absence of the marker of the era with this number: a host has cleared, or the store lost it."""
        known = self._known.get(fingerprint)
        if known is not None and known.number == number and known.era is not None:
            known.era, known.tried_s, known.is_outdated = None, float("-inf"), known in self._looks
            self.lost_markers += 1
            self.want(fingerprint)

    # --- doubt ---

    def doubt_of(self, fingerprint: bytes) -> Doubt:
        """Returns how far this host's contents of the namespace are trusted now."""
        if self._is_away():
            return Doubt.NONE
        known = self._known.get(fingerprint)
        if known is None:
            return Doubt.INHERITED
        if known.seen_s is None and self._clock.now_s - known.absent_s <= self._doubt_s:
            return Doubt.INHERITED  # the store knows of no clear in this run, even if it can't record an era
        if self._unseen_s(known) > self._doubt_s:
            return Doubt.ALL
        if known.seen_s is None:
            return Doubt.INHERITED
        return Doubt.NONE if known.unsure_until_s is None else Doubt.ALL

    def _is_away(self) -> bool:
        """Returns whether the store is known not to answer."""
        if self._store.state is RemoteState.STARTING:
            return bool(self._store.reason)
        return not self._is_connected() or self._silences > AWAY_ROUNDS

    def _unseen_s(self, known: NamespaceEra) -> float:
        """Returns how long the store has answered since it last reported this era, or was first due to report it."""
        return self._clock.now_s - (known.since_s if known.seen_s is None else known.seen_s)

    def _tell(self) -> None:
        """Updates the doubt of each namespace in memory."""
        for fingerprint, namespace in self._cache.namespaces.items():
            namespace.doubt = self.doubt_of(fingerprint)

    async def watch(self) -> None:
        """Follows the state of the store, until cancelled."""
        with changing:
            while True:
                self._tell()
                await self._store.changes.wait(self._poll_s)

    # --- rounds ---

    async def run(self) -> None:
        """Looks at the eras of all namespaces, until cancelled."""
        with changing:
            await self._look_in_rounds()

    async def _look_in_rounds(self) -> None:
        due_s = 0.0  # when the next round is due; urgent looks come before it
        try:
            while True:
                if not self._is_connected():
                    self._clock.silent()
                    self._was_away = True
                    await self._store.changes.wait(self._poll_s)
                    continue
                self._was_away |= self._starts != self._store.starts
                self._starts = self._store.starts
                if self._was_away or time.monotonic() >= due_s:
                    await self._round()
                    due_s = time.monotonic() + self._poll_s
                elif urgent := self._take_urgent():
                    await self._ask(urgent)
                if self._bug is not None:
                    raise self._bug
                if not self._urgent or self._silences:
                    await self._wanted.wait(max(due_s - time.monotonic(), 0.0))
                await asyncio.sleep(0)
        finally:
            for look in self._looks.values():
                look.cancel()

    def _is_connected(self) -> bool:
        """Returns whether the store may be asked. A failing store counts: it may report other hosts' clears."""
        return self._store.state in (RemoteState.OK, RemoteState.OPEN)

    async def _round(self) -> None:
        """Looks at all namespaces once."""
        names, urgent = self._names(), self._take_urgent()
        for known in list(self._known.values()):
            if known.is_idle and known not in self._looks and known.fingerprint not in names:
                del self._known[known.fingerprint]  # the host has nothing of it any more
        names |= self._known.keys()
        for name in names:
            self._know(name).is_remembered = False
            self._known[name].is_back |= self._was_away
        self._checked &= self._cache.epochs.by_namespace.keys()
        for name in self._cache.epochs.by_namespace.keys() - names - self._checked:
            self._know(name).is_remembered = True  # the store may not know of that clear
            names.add(name)

        def order(name: bytes) -> tuple[bool, bool, float]:
            """Puts namespaces seen longest ago first: the store may not read the last of many in time."""
            known = self._known[name]
            return name not in urgent, known.is_remembered, known.seen_s or 0.0

        if await self._ask(sorted(names, key=order)):
            self._was_away = False
            self._confirm(names)
        self._tell()

    def _take_urgent(self) -> set[bytes]:
        urgent, self._urgent = self._urgent, set()
        return urgent

    async def _ask(self, names: Collection[bytes]) -> bool:
        """Looks at these namespaces. Returns False if the store does not answer."""
        order = list(names)
        try:
            for begin in range(0, max(len(order), 1), READ_NAMESPACES):
                batch = [self._know(name) for name in order[begin : begin + READ_NAMESPACES]]
                for known in await self._with_news(batch):
                    self._begin_look(known)
        except (RemoteStoreError, OSError) as error:
            log.debug("remote: the eras of namespaces are not known: %s", error)
            self._silences += 1
            self._was_away = True
            self._clock.silent()
            return False
        self._silences = 0
        return True

    def _names(self) -> set[bytes]:
        """Returns namespaces with contents on this host that another host may have cleared."""
        local = self._cache.local
        return set(self._cache.namespaces) | (local.namespaces() if local is not None else set())

    def _know(self, fingerprint: bytes) -> NamespaceEra:
        known = self._known.get(fingerprint)
        if known is None:
            known = self._known[fingerprint] = NamespaceEra(fingerprint, since_s=self._clock.now_s)
        return known

    async def _with_news(self, batch: Sequence[NamespaceEra]) -> list[NamespaceEra]:
        """Returns the namespaces that need a look. The others are unchanged, or unreadable now.

        Raises RemoteStoreError if the store does not answer.
        """
        eras = [known.era for known in batch]
        names = [_CANARY, *(pointer_name(known.fingerprint) for known in batch)]
        names += [successor_of(known, era) for known, era in zip(batch, eras, strict=True) if era is not None]
        values = await self._store.read_values(names, until())
        if all(isinstance(value, NotRead) for value in values):
            raise RemoteStoreError("it answers no call")
        now_s = time.monotonic()
        self._clock.answered(now_s)
        news, successors = [], iter(values[1 + len(batch) :])
        for known, era, pointer in zip(batch, eras, values[1:]):  # noqa: B905  successors are behind the pointers
            after = next(successors) if era is not None else None
            known.tried_s = now_s
            if _unreadable(pointer) or _unreadable(after):
                if known.has_markers_to_remove(now_s):
                    news.append(known)
                continue
            if known.is_remembered and pointer is None:  # the store has nothing of it either
                self._checked.add(known.fingerprint)
                continue
            pointed = decode_era(known.fingerprint, pointer) if isinstance(pointer, bytes) else None
            same = era is not None and era is known.era and after is None and pointed == known.pointed is not None
            if same and not known.has_work(now_s):
                self._seen(known)
            else:
                news.append(known)
        return news

    def _seen(self, known: NamespaceEra) -> None:
        """Records that the store has just reported the era."""
        if known.unsure_until_s is None or self._clock.now_s >= known.unsure_until_s:
            known.unsure_until_s, known.is_ahead = None, False
            known.seen_s, known.confirmed_s = self._clock.now_s, time.time()
            if known.is_remembered:
                self._checked.add(known.fingerprint)
        namespace = self._cache.namespaces.get(known.fingerprint)
        if namespace is not None:
            namespace.doubt = self.doubt_of(known.fingerprint)

    def _confirm(self, names: set[bytes]) -> None:
        """Records, at the end of a round, the time since which all contents of this host are confirmed."""
        times = [known.confirmed_s for name in names if (known := self._known.get(name)) is not None]
        confirmed_s = [at_s for at_s in times if at_s is not None]
        if len(confirmed_s) == len(times) and names >= self._names():
            self._cache.confirmed.at_s = int(min(confirmed_s, default=time.time()))

    # --- looks ---

    def _begin_look(self, known: NamespaceEra) -> None:
        if known not in self._looks:
            look = self._looks[known] = asyncio.get_running_loop().create_task(self._look(known))
            look.add_done_callback(lambda _: self._end_look(known))

    def _end_look(self, known: NamespaceEra) -> None:
        del self._looks[known]
        if known.is_outdated:
            known.is_outdated, known.tried_s = False, float("-inf")
            self.want(known.fingerprint)

    async def _look(self, known: NamespaceEra) -> None:
        try:
            slots = self._first_slots if known.seen_s is None else self._slots
            async with slots, asyncio.timeout(LOOK_S), known.changing:
                await self._look_at(known)
        except AheadError as error:
            known.is_ahead = True
            log.debug("remote: %s", error)
        except (KvOffloadError, OSError, TimeoutError) as error:
            log.debug("remote: the era of a namespace is not known: %s", error)
        except CacheTornError as error:
            self._bug = error
        except Exception:
            log.exception("remote: a bug: the era of a namespace can't be agreed on")

    async def _look_at(self, known: NamespaceEra) -> None:
        if self._cache.confirmed.is_over(int(known.confirmed_s or 0), time.time()):
            await self._clear_to_its_end(known.fingerprint, None)  # the store has forgotten the clears made meanwhile
        # Neither depends on the success of the other: an era without agreement hides no marker that came back.
        with suppress(RemoteStoreError):
            await self._remove_again(known)
        await self._agreement.settle(known)
        self._seen(known)
        if known.is_to_renew(time.monotonic()):
            await self._agreement.renew(known)
            known.renewed_s = time.monotonic()

    async def _remove_again(self, known: NamespaceEra) -> None:
        """Removes the markers of eras cleared here, when due or after an absence of the store. Then queues sweeps."""
        due, eras, again_s = known.is_due(time.monotonic()), known.over, known.again_s
        if not (due or known.is_back):
            return
        await self._agreement.remove_markers(known, eras)
        known.is_back = False
        if due and known.again_s == again_s:  # otherwise another era was cleared meanwhile: all removals repeat
            for era in known.unswept:
                self.sweeps.add(era_prefix(known.fingerprint, era.generation, era.id))
            known.again_s, known.unswept = None, []

    def _on_taken(self, known: NamespaceEra) -> None:
        self._numbers += 1
        known.number = self._numbers
        self.changes.notify_all()

    async def _clear_to_its_end(self, fingerprint: bytes, epoch: int | None) -> None:
        """Clears here, to the end even if the look that requested it ends earlier."""

        async def clear() -> None:
            await self._clear_here(fingerprint, epoch)

        task = asyncio.get_running_loop().create_task(clear())
        self._clears.add(task)
        task.add_done_callback(self._clears.discard)
        await asyncio.shield(task)

    # --- clears ---

    @changing
    def begin_clear(self, names: Collection[bytes] | None) -> list[NamespaceEra]:
        """Ends the eras of these namespaces (None: of all), whose epochs have advanced: nothing of them counts here
        from now on. Returns the argument for `finish_clear`.
        """
        fingerprints = self._known.keys() | self._names() if names is None else names
        cleared = [self._know(name) for name in fingerprints]
        for known in cleared:
            known.unmade = True
            if known.era is not None:
                known.forget(known.era, max(1.0, self._poll_s))
                known.era = None
        return cleared

    async def finish_clear(self, cleared: Collection[NamespaceEra]) -> None:
        """Completes a clear. After it returns no host fetches anything that was stored there before.

        Raises:
            NotDurableError: the store did not clear some namespaces, or did not confirm it. This daemon retries
                until it ends.
        """
        await self._store.changes.wait_for(lambda: self._store.state is not RemoteState.STARTING, VALUE_S)
        failed = list(filter(None, await asyncio.gather(*map(self._clear, cleared))))
        if failed:
            raise NotDurableError(
                f"cleared on this host, but not everywhere: the remote store: {failed[0]} "
                f"({len(failed)} of {len(cleared)} namespaces)"
            )

    async def _clear(self, known: NamespaceEra) -> str:
        """Returns why the store did not clear; empty: it did."""
        try:
            async with self._clear_slots, asyncio.timeout(LOOK_S), known.changing:
                await self._agreement.clear(known)
                self._seen(known)
            self.changes.notify_all()
        except (KvOffloadError, OSError, TimeoutError) as error:
            return str(error) or "it does not answer"
        return ""

    # --- figures ---

    def figures(self) -> dict[str, object]:
        """Returns the figures for `status`: by namespace, and counts."""
        namespaces = self._cache.namespaces

        def label(name: bytes) -> str:
            return namespaces[name].name if name in namespaces else name.hex()

        overdue = [] if self._is_away() else [k for k in self._known.values() if self._unseen_s(k) > self._overdue_s]
        return {
            "eras": {
                namespaces[name].name: f"{known.era.generation:08x}.{known.era.id.hex()}" if known.era else ""
                for name, known in itertools.islice(self._known.items(), SHOWN_MAX)
                if name in namespaces
            },
            "eras_made": self._agreement.made,
            "eras_overdue": sorted(label(known.fingerprint) for known in overdue)[:NAMED_MAX],
            "eras_ahead": sorted(label(known.fingerprint) for known in self._known.values() if known.is_ahead)[
                :NAMED_MAX
            ],
            "answering_s": round(self._clock.now_s, 3),
            "markers_lost": self.lost_markers,
            "cleared_elsewhere": self._agreement.cleared_elsewhere,
        }


def _unreadable(value: bytes | NotRead | None) -> bool:
    """Returns whether the value can't be read now. An object too large to be valid counts as a change."""
    return isinstance(value, NotRead) and value.code != Code.SIZE
