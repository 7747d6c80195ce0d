"""Agrees with the store, and so with other hosts, on the era of one namespace. See `eras`. Event loop only.

Each call works on one `NamespaceEra`, whose lock the caller holds, and has a deadline. It raises RemoteStoreError if
the store does not answer, an object can't be read, or other hosts interfere; the next look continues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from kvoffloadd.agentwire.frames import Code
from kvoffloadd.agentwire.names import ERA_BYTES, marker_name, markers_prefix, pointer_name, successor_name
from kvoffloadd.cache.memory.epochs import Epochs
from kvoffloadd.cache.remote.era import Era, decode_era, encode_era, new_era
from kvoffloadd.cache.remote.namespaceera import REMEMBERED, NamespaceEra
from kvoffloadd.cache.remote.storeclock import StoreClock
from kvoffloadd.errors import RemoteStoreError
from kvoffloadd.storage.remote.store import RemoteStore
from kvoffloadd.storage.remote.values import NotRead

log = logging.getLogger(__name__)

VALUE_S: Final = 2.0
"""The time limit for one small object."""

SWEEP_S: Final = 4.0
"""The time that one look spends on removing markers of unknown eras; the next look continues from there."""

TRIES: Final = 8
"""The number of interferences by other hosts after which a look gives up until the next one."""

LINKS_KEPT: Final = 4
"""The number of ended eras that keep their successors: a host may still follow them."""

LINKS_MAX: Final = 64
"""The number of successors that one look follows. Then it rewrites the pointer, and the next look continues there."""

UNSURE_POLLS: Final = 3
"""A host that finds neither the pointer nor the marker of its known era waits for this number of polls before it trusts
its own state: the store may have lost a clear that other hosts know and record again in their next round.
"""

GAP_S: Final = 0.05
"""The delay before a second look for an absent pointer."""

KEPT_S: Final = 31 * 24 * 3600.0
"""The time for which the store keeps small objects without renewal. It exceeds `UNCONFIRMED_MAX_S`: a host that has not
looked for that long trusts none of its data.
"""


class AheadError(RemoteStoreError):
    """An era is too far ahead of this host's clock to be believed."""


class EraAgreement:
    """`clear_here`: see `Eras`. `on_taken(known)` is called when a previously unknown era is taken."""

    def __init__(
        self,
        store: RemoteStore,
        epochs: Epochs,
        clock: StoreClock,
        poll_s: float,
        clear_here: Callable[[bytes, int | None], Awaitable[None]],
        on_taken: Callable[[NamespaceEra], None],
    ) -> None:
        self.made = 0  # the number of eras that this host has made
        self.cleared_elsewhere = 0
        self._store = store
        self._epochs = epochs
        self._clock = clock
        self._unsure_s = UNSURE_POLLS * poll_s
        self._again_s = max(1.0, poll_s)
        self._clear_here = clear_here
        self._on_taken = on_taken

    async def settle(self, known: NamespaceEra) -> None:
        """Agrees with the store on the era. If a clear begins here meanwhile, this continues to the era after it."""
        for _ in range(TRIES):
            path = await self._path(known)
            if path and await self._agree(known, path):
                if len(path) > 1:
                    await self._move_pointer(known, path)
                known.pointed = path[-1]
                return
        raise RemoteStoreError("other hosts keep changing the era of a namespace")

    async def clear(self, known: NamespaceEra) -> None:
        """Ends the era that the store has, since this host has cleared."""
        await self.remove_markers(known, known.over)
        await self.settle(known)

    async def remove_markers(self, known: NamespaceEra, eras: Collection[Era]) -> None:
        """Removes the eras' markers, so that none of their keys counts any more."""
        if eras:
            await self._store.remove([marker_of(known, era) for era in eras], until())

    async def renew(self, known: NamespaceEra) -> None:
        """Makes the store keep the small objects of the current era."""
        if known.era is not None:
            names = [pointer_name(known.fingerprint), marker_of(known, known.era)]
            await self._store.renew(names, KEPT_S, until())

    # --- the path ---

    async def _path(self, known: NamespaceEra) -> list[Era]:
        """Returns the eras from the pointer to the last one. Empty: look again."""
        name, first = known.fingerprint, await self._first(known)
        if first is not None:
            return await self._follow(known, first)
        if known.unmade:  # the lost pointer may have led to an era that other hosts use
            await self._sweep_markers(known)
        if known.era is None or await self._value(marker_of(known, known.era)) is None:
            known.unsure_until_s = self._clock.now_s + self._unsure_s
        era = known.era or await self._make(known, Era(self._epochs.of(name), bytes(ERA_BYTES)))
        await self._write(known, pointer_name(name), era)
        if known.era is None and await self._read(known, pointer_name(name)) != era:  # another host was faster
            await self._store.remove([marker_of(known, era)], until())
        return []

    async def _sweep_markers(self, known: NamespaceEra) -> None:
        """Removes the markers of all eras of the namespace. A store with very many objects takes several looks."""
        starts, after = known.swept
        if starts != self._store.starts:  # a new connection: the store may have restarted, too
            after = ""
        _, after = await self._store.sweep(markers_prefix(known.fingerprint), until(SWEEP_S), after)
        known.swept = self._store.starts, after
        if after:
            raise RemoteStoreError("the markers of a namespace's eras are not all removed yet")

    async def _first(self, known: NamespaceEra) -> Era | None:
        """Returns the era that the pointer names."""
        first = await self._read(known, pointer_name(known.fingerprint))
        if first is None and known.era is None:  # an engine may rewrite the pointer by removing it first
            await asyncio.sleep(GAP_S)
            first = await self._read(known, pointer_name(known.fingerprint))
        if first is None:
            known.absent_s = self._clock.now_s
        return first

    async def _follow(self, known: NamespaceEra, first: Era) -> list[Era]:
        self._check_believable(first)
        path = [first]
        while (after := await self._after(known, path[-1])) is not None:
            path.append(after)
            if len(path) > LINKS_MAX:
                await self._move_pointer(known, path)
                raise RemoteStoreError(f"a namespace has more than {LINKS_MAX} eras behind its pointer; it is moved on")
        return path

    async def _after(self, known: NamespaceEra, era: Era) -> Era | None:
        """Returns the era's successor; None: there is none that leads upwards."""
        after = await self._read(known, successor_of(known, era))
        if after is None or after <= era:
            return None
        self._check_believable(after)
        return after

    def _check_believable(self, era: Era) -> None:
        if not self._epochs.believes(era.generation):
            raise AheadError(
                "an era of a namespace is more than a year ahead of this host's clock, and is not believed"
            )

    # --- agreeing ---

    async def _agree(self, known: NamespaceEra, path: list[Era]) -> bool:
        """Returns whether the last era can be taken; if not, does what is necessary."""
        name, last = known.fingerprint, path[-1]
        if known.era is not None and not await self._joined(known, known.era, last):
            return False
        epoch = self._epochs.of(name)
        # An earlier one, too: the store may carry out a write late, after another era was made.
        if any(made.generation == epoch and made in path for made in known.made):
            known.unmade = False
        if known.unmade and last.generation >= epoch:
            # This host's clear needs a later number than the clear of a host whose clock is ahead, which was unknown
            # here.
            known.forget(last, self._again_s)
            await self.remove_markers(known, path)
            self._epochs.last = max(self._epochs.last, last.generation)
            await self._clear_here(name, None)
        elif last.generation > epoch:
            known.era = None
            self.cleared_elsewhere += 1
            await self._clear_here(name, last.generation)
        elif last.generation < epoch:
            known.forget(last, self._again_s)
            await self.remove_markers(known, path)
            await self._replace(known, last, epoch)
        elif last == known.era:
            return True
        elif await self._value(marker_of(known, last)) is None:
            await self._replace(known, last, epoch)
        elif last.generation == self._epochs.of(name):  # else a clear has begun meanwhile
            known.era = last
            self._on_taken(known)
            return True
        return False

    async def _joined(self, known: NamespaceEra, own: Era, last: Era) -> bool:
        """Returns whether successors lead from this host's era to the last one; if not, makes the earlier of two eras
        that no path joins lead to the later one. The pointer stays: it may name a clear that no other path leads to.
        """
        while own < last and (after := await self._after(known, own)) is not None:
            own = after
        if own != last:
            await self._end(known, min(own, last), max(own, last))
        return own == last

    async def _replace(self, known: NamespaceEra, last: Era, epoch: int) -> None:
        """Ends the last era with a new one of this generation."""
        if epoch == last.generation and last.is_last:
            await self._clear_here(known.fingerprint, None)
            return
        made = await self._make(known, last.after(epoch))
        if await self._end(known, last, made) != made:
            await self._store.remove([marker_of(known, made)], until())

    async def _end(self, known: NamespaceEra, era: Era, after: Era) -> Era | None:
        """Ends an era. Returns its successor, which another host may have made first."""
        await self._write(known, successor_of(known, era), after)
        found = await self._read(known, successor_of(known, era))
        if found is not None:
            await self._store.remove([marker_of(known, era)], until())
        return found

    async def _move_pointer(self, known: NamespaceEra, path: list[Era]) -> None:
        """Makes the pointer name the last era, so that pointer and successor both lead there: the store may lose
        either. Forgets eras that ended long ago. The host that ended one may have stopped before it removed the marker.
        """
        await self.remove_markers(known, path[:-1])
        value = encode_era(known.fingerprint, path[-1])
        await self._store.write_value(pointer_name(known.fingerprint), value, until(), kept_s=KEPT_S)
        passed = list(dict.fromkeys([*known.passed, *path[:-1]]))
        if forgotten := passed[:-LINKS_KEPT]:
            await self._store.remove([successor_of(known, era) for era in forgotten], until())
        known.passed = passed[-LINKS_KEPT:]

    async def _make(self, known: NamespaceEra, era: Era) -> Era:
        """Makes a new era with its marker. The era's id begins with `era`."""
        made = new_era(era)
        value = encode_era(known.fingerprint, made)
        await self._store.write_value(marker_of(known, made), value, until(), if_absent=True, kept_s=KEPT_S)
        known.made = [*known.made, made][-REMEMBERED:]
        self.made += 1
        return made

    # --- small objects ---

    async def _value(self, name: str) -> bytes | NotRead | None:
        """Returns a small object; `NotRead`: it is too large to be valid."""
        (value,) = await self._store.read_values([name], until())
        if isinstance(value, NotRead) and value.code != Code.SIZE:
            raise RemoteStoreError(f"a small object can't be read ({value})")
        return value

    async def _read(self, known: NamespaceEra, name: str) -> Era | None:
        """Returns the era that a small object names. Removes a damaged object."""
        value = await self._value(name)
        if value is None:
            return None
        era = None if isinstance(value, NotRead) else decode_era(known.fingerprint, value)
        if era is None:
            log.warning("remote: a pointer to a namespace's era is damaged; the daemon writes it again")
            await self._store.remove([name], until())
        return era

    async def _write(self, known: NamespaceEra, name: str, era: Era) -> None:
        """Makes a small object name an era, unless the object exists."""
        value = encode_era(known.fingerprint, era)
        await self._store.write_value(name, value, until(), if_absent=True, kept_s=KEPT_S)


def until(seconds: float = VALUE_S) -> float:
    """Returns the deadline of a call that begins now."""
    return time.monotonic() + seconds


def successor_of(known: NamespaceEra, era: Era) -> str:
    """Returns the name of the object that names the era after this one."""
    return successor_name(known.fingerprint, era.generation, era.id)


def marker_of(known: NamespaceEra, era: Era) -> str:
    """Returns the name of the object without which no key of the era counts."""
    return marker_name(known.fingerprint, era.generation, era.id)
