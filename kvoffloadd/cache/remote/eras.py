"""Eras: what was stored in the remote store before a `clear` is never fetched after it, by no host. Event loop only.

A namespace's **era** is a generation and an id. It is part of the name of each object, so that another era's keys have
other names. Three kinds of small objects say which era counts:

- The era's **marker**: no key of the era counts while it is absent. Each question to the store asks for it, too. So
  whoever removes it has cleared the store for everybody, at once.
- The era's **successor** names the era after it, as soon as there is one. It is only ever written where there is none,
  so of several hosts that end an era at once one wins, and the others go on from what that one wrote.
- The namespace's **pointer** names an era from which successors lead to the last one, which is the one that counts. It
  only saves the way: it may lag behind.

Eras are in order (generation, id), and successors lead upwards alone. The generation is the namespace's epoch (see
`epochs`), on every host: the number of the last clear that reached it. So the store remembers clears as a disk's
manifest does, and the same rules hold for the last era:

- Its generation is later than our epoch: another host has cleared. We clear what is here, and go on in that epoch,
  which is durable in the manifests and beside the arena.
- It is earlier: we have cleared, and the store does not know, or has forgotten it (it was away, or it failed over to a
  copy from before). It gets a successor with our epoch. Nobody goes back.
- It is equal: the era is taken, if its marker is there. If not, the store has lost the marker: the era gets a successor
  with the same generation, since nothing was cleared. A marker that is gone is never put again.

If the store loses the pointer, hosts may be in eras that no path joins. Then the earlier one gets the later one for its
successor. Until all have looked, within `poll_s`, a clear may miss an era of which its host never heard.

The way is gone every `poll_s` for each namespace that is open. A clear is made again after a while, and whenever the
store was away, since a store that fails over may bring back what was removed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Final

import xxhash

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.changes import Changes
from kvoffloadd.errors import KvOffloadError, NotDurableError, RemoteStoreError
from kvoffloadd.model import EPOCH_MAX
from kvoffloadd.objectnames import ERA_BYTES, era_prefix, marker_name, markers_prefix, pointer_name, successor_name
from kvoffloadd.storage.remote.store import RemoteState, RemoteStore

log = logging.getLogger(__name__)

VALUE_S: Final = 2.0
"""How long one small object may take."""

SWEEP_S: Final = 4.0
"""How long the objects of an era that is over may take to be removed; what is left goes when the store needs room."""

KEPT_S: Final = 31 * 86400.0
"""How long the small objects are kept in the store."""

TRIES: Final = 8
"""How often others may come between, before it is left to the next time."""

REMEMBERED: Final = 16
"""Eras of a namespace that were cleared here: removed again when the store was away."""

PATH_MAX: Final = 4
"""Eras behind the pointer, before it is written anew. Successors of so many are kept: a host may be on the way."""

GAP_S: Final = 0.05
"""Where there is no pointer, it is looked for again after so long."""

_ORDER_BYTES = 4
_POINTER = struct.Struct("<8sQ8s")  # magic, generation, id; then the xxh3_128 of the fingerprint and these
_MAGIC = b"KVOERA1\n"


@dataclass(frozen=True, slots=True, order=True)
class Era:
    """See the module. `id`: four bytes that count eras of the generation, big-endian, then random ones."""

    generation: int
    id: bytes

    def after(self, epoch: int) -> Era:
        """What a later era of this generation, or of a later one, begins with."""
        count = 0 if epoch > self.generation else int.from_bytes(self.id[:_ORDER_BYTES]) + 1
        return Era(epoch, count.to_bytes(_ORDER_BYTES))


def encode_pointer(fingerprint: bytes, era: Era) -> bytes:
    """The pointer's value."""
    fields = _POINTER.pack(_MAGIC, era.generation, era.id)
    return fields + xxhash.xxh3_128_digest(fingerprint + fields)


def decode_pointer(fingerprint: bytes, value: bytes) -> Era | None:
    """The era that it names; None: it is damaged, or another namespace's."""
    fields = value[: _POINTER.size]
    if len(fields) < _POINTER.size or value[_POINTER.size :] != xxhash.xxh3_128_digest(fingerprint + fields):
        return None
    magic, generation, era = _POINTER.unpack(fields)
    return Era(generation, era) if magic == _MAGIC and generation <= EPOCH_MAX else None


@dataclass(slots=True, eq=False)
class NamespaceEra:
    """What is known of one namespace's era."""

    fingerprint: bytes
    era: Era | None = None  # None: nothing may be asked, fetched or pushed
    number: int = 0  # of the era in this run, rising over all namespaces; 0: none was known yet
    unmade: bool = False  # a clear was made here that the store has not heard of
    over: list[Era] = field(default_factory=list)  # that were cleared here
    again_s: float | None = None  # when their markers are to be removed again
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Eras:
    """The eras of all namespaces that are open. `clear_here(fingerprint, epoch)` clears this host's memory and disk,
    since another host has cleared the namespace; None: with a number of our own.
    """

    def __init__(
        self,
        store: RemoteStore,
        cache: Cache,
        poll_s: float,
        clear_here: Callable[[bytes, int | None], Awaitable[None]],
    ) -> None:
        self.changes = Changes()
        """Hears of each era that is known from now on."""
        self._store = store
        self._cache = cache
        self._poll_s = poll_s
        self._clear_here = clear_here
        self._known: dict[bytes, NamespaceEra] = {}
        self._numbers = 0
        self._wanted = Changes()
        self._urgent: set[bytes] = set()
        self._starts = 0
        self.made = 0  # eras made here
        self.lost_markers = 0
        self.cleared_elsewhere = 0

    def of(self, fingerprint: bytes) -> NamespaceEra | None:
        """The namespace's era, if one is known, of the epoch in which this host is."""
        known = self._known.get(fingerprint)
        if known is None or known.era is None or known.era.generation != self._cache.epochs.of(fingerprint):
            return None
        return known

    def is_current(self, fingerprint: bytes, number: int) -> bool:
        """Whether this is still the era."""
        known = self.of(fingerprint)
        return known is not None and known.number == number

    def want(self, fingerprint: bytes) -> None:
        """Find out its era soon."""
        if self.of(fingerprint) is None:
            self._urgent.add(fingerprint)
            self._wanted.notify_all()

    def lost(self, fingerprint: bytes, number: int) -> None:
        """The marker of the era with this number is absent: somebody has cleared, or the store has lost it."""
        known = self._known.get(fingerprint)
        if known is not None and known.number == number and known.era is not None:
            known.era = None
            self.lost_markers += 1
            self.want(fingerprint)

    # --- finding out ---

    async def run(self) -> None:
        """Look at the pointers of all namespaces that are open, until cancelled."""
        answered = False
        while True:
            if not self._is_connected():
                answered = False
                await self._store.changes.wait(self._poll_s)
                continue
            starts = self._store.starts
            answered = await self._look_at_all(back=not answered or self._starts != starts)
            self._starts = starts
            if not (self._urgent and answered):
                await self._wanted.wait(self._poll_s)
            await asyncio.sleep(0)

    def _is_connected(self) -> bool:
        """Whether it may be asked. Also while it fails: it may tell of other hosts' clears any time."""
        return self._store.state in (RemoteState.OK, RemoteState.OPEN)

    async def _look_at_all(self, *, back: bool) -> bool:
        """Whether the store has answered. `back`: it was away."""
        urgent, self._urgent = self._urgent, set()
        names = set(self._cache.namespaces)
        for known in list(self._known.values()):
            if known.fingerprint not in names and not known.unmade and known.again_s is None:
                del self._known[known.fingerprint]  # it is not open any more
        names |= self._known.keys()
        for fingerprint in sorted(names, key=lambda name: name not in urgent):
            known = self._known.setdefault(fingerprint, NamespaceEra(fingerprint))
            try:
                async with known.changing:
                    await self._look_at(known, back=back)
            except (KvOffloadError, OSError) as error:
                log.debug("remote: the era of a namespace is not known: %s", error)
                if isinstance(error, RemoteStoreError):
                    return False  # the others would wait as long for nothing
        return True

    async def _look_at(self, known: NamespaceEra, *, back: bool) -> None:
        await self._settle(known)
        due = known.again_s is not None and time.monotonic() >= known.again_s
        if due or back:
            await self._remove_markers(known, known.over)
        if due:
            known.again_s = None
            last = known.over[-1]
            await self._store.sweep(era_prefix(known.fingerprint, last.generation, last.id), _until(SWEEP_S))

    async def _settle(self, known: NamespaceEra) -> None:
        """Agree with the store on the era. A clear may begin here meanwhile: then this goes on to the era after it.

        Raises RemoteStoreError: the store does not answer, or other hosts come between.
        """
        for _ in range(TRIES):
            path = await self._path(known)
            if path and await self._agree(known, path):
                return
        raise RemoteStoreError("other hosts keep changing the era of a namespace")

    async def _path(self, known: NamespaceEra) -> list[Era]:
        """The eras from the pointer to the last one. Empty: look again."""
        name, first = known.fingerprint, await self._first(known)
        if first is not None:
            return await self._follow(known, first)
        if known.unmade:  # the pointer that is gone may have led to an era that others are in
            await self._store.sweep(markers_prefix(name), _until(SWEEP_S))
        era = known.era or await self._make(known, Era(self._cache.epochs.of(name), bytes(ERA_BYTES)))
        await self._write(known, pointer_name(name), era)
        if known.era is None and await self._read(known, pointer_name(name)) != era:  # another host was faster
            await self._store.remove([self._marker(known, era)], _until())
        return []

    async def _first(self, known: NamespaceEra) -> Era | None:
        """The era that the pointer names."""
        first = await self._read(known, pointer_name(known.fingerprint))
        if first is None and known.era is None:  # an engine may write it anew by removing it first
            await asyncio.sleep(GAP_S)
            first = await self._read(known, pointer_name(known.fingerprint))
        return first

    async def _follow(self, known: NamespaceEra, first: Era) -> list[Era]:
        path = [first]
        while (after := await self._read(known, self._successor(known, path[-1]))) is not None and path[-1] < after:
            path.append(after)
        return path

    async def _agree(self, known: NamespaceEra, path: list[Era]) -> bool:
        """Whether the last era can be taken; if not, do what has to be done about it."""
        name, last = known.fingerprint, path[-1]
        if known.era is not None and last != known.era:
            mine = (await self._follow(known, known.era))[-1]
            if mine != last:
                await self._end(known, min(mine, last), max(mine, last))
                return False
        epoch = self._cache.epochs.of(name)
        if last.generation > epoch:
            known.era = None
            self.cleared_elsewhere += 1
            await self._clear_here(name, last.generation)
        elif last.generation < epoch:
            self._forget(known, last)
            await self._remove_markers(known, path)
            await self._replace(known, last, epoch)
        elif last == known.era:
            known.unmade = False
            if len(path) > PATH_MAX:
                await self._shorten(known, path)
            return True
        elif await self._store.read_value(self._marker(known, last), _until()) is None:
            await self._replace(known, last, epoch)
        elif last.generation == self._cache.epochs.of(name):  # else a clear has begun meanwhile
            self._numbers += 1
            known.era, known.number, known.unmade = last, self._numbers, False
            self.changes.notify_all()
            return True
        return False

    async def _replace(self, known: NamespaceEra, last: Era, epoch: int) -> None:
        """End the last era, with a new one of this generation."""
        made = await self._make(known, last.after(epoch))
        if await self._end(known, last, made) != made:
            await self._store.remove([self._marker(known, made)], _until())

    async def _end(self, known: NamespaceEra, era: Era, after: Era) -> Era | None:
        """End an era. Returns its successor, which is another one if another host was faster."""
        await self._write(known, self._successor(known, era), after)
        found = await self._read(known, self._successor(known, era))
        if found is not None:
            await self._store.remove([self._marker(known, era)], _until())
        return found

    async def _shorten(self, known: NamespaceEra, path: list[Era]) -> None:
        """Have the pointer name the last era, and forget eras that are long over. Who ended one may have gone before it
        had removed the marker.
        """
        await self._remove_markers(known, path[:-1])
        value = encode_pointer(known.fingerprint, path[-1])
        await self._store.write_value(pointer_name(known.fingerprint), value, _until(), kept_s=KEPT_S)
        await self._store.remove([self._successor(known, era) for era in path[:-PATH_MAX]], _until())

    async def _make(self, known: NamespaceEra, era: Era) -> Era:
        """Make an era: its marker comes before anything that leads to it. Its id gets its random bytes."""
        made = Era(era.generation, era.id[:_ORDER_BYTES] + secrets.token_bytes(ERA_BYTES - _ORDER_BYTES))
        await self._write(known, self._marker(known, made), made)
        self.made += 1
        return made

    async def _read(self, known: NamespaceEra, name: str) -> Era | None:
        """The era that a small object names. One that is damaged is removed."""
        value = await self._store.read_value(name, _until())
        era = None if value is None else decode_pointer(known.fingerprint, value)
        if value is not None and era is None:
            log.warning("remote: a pointer to a namespace's era is damaged; the daemon writes it again")
            await self._store.remove([name], _until())
        return era

    async def _write(self, known: NamespaceEra, name: str, era: Era) -> None:
        """Have a small object name an era, unless it is there."""
        value = encode_pointer(known.fingerprint, era)
        await self._store.write_value(name, value, _until(), if_absent=True, kept_s=KEPT_S)

    def _forget(self, known: NamespaceEra, era: Era) -> None:
        """This era was cleared here."""
        if era not in known.over:
            known.over = [*known.over, era][-REMEMBERED:]
        known.again_s = time.monotonic() + max(1.0, self._poll_s)

    async def _remove_markers(self, known: NamespaceEra, eras: Collection[Era]) -> None:
        if eras:
            await self._store.remove([self._marker(known, era) for era in eras], _until())

    @staticmethod
    def _successor(known: NamespaceEra, era: Era) -> str:
        return successor_name(known.fingerprint, era.generation, era.id)

    @staticmethod
    def _marker(known: NamespaceEra, era: Era) -> str:
        return marker_name(known.fingerprint, era.generation, era.id)

    # --- clears ---

    def begin_clear(self, names: Collection[bytes] | None) -> list[NamespaceEra]:
        """The epochs of these namespaces (None: of all) have advanced: nothing of their eras counts here from now on.
        Returns what is to be given to `finish_clear`.
        """
        fingerprints = self._known.keys() | self._cache.namespaces.keys() if names is None else names
        cleared = [self._known.setdefault(name, NamespaceEra(name)) for name in fingerprints]
        for known in cleared:
            known.unmade = True
            if known.era is not None:
                self._forget(known, known.era)
                known.era = None
        return cleared

    async def finish_clear(self, cleared: Collection[NamespaceEra]) -> None:
        """When this returns no host fetches anything that was stored there before.

        Raises:
            NotDurableError: the store did not do it, or did not say so. It is tried again as long as this daemon runs.
        """
        await self._store.changes.wait_for(lambda: self._store.state is not RemoteState.STARTING, VALUE_S)
        try:
            for known in cleared:
                async with known.changing:
                    await self._clear(known)
        except (KvOffloadError, OSError) as error:
            raise NotDurableError(
                f"cleared on this host, but not everywhere: the remote store: {error}. Clear again when the store works"
            ) from error

    async def _clear(self, known: NamespaceEra) -> None:
        name, last = known.fingerprint, None
        first = await self._first(known)
        if first is not None and known.unmade:  # else another clear, or the poll, has done it since
            path = await self._follow(known, first)
            last = path[-1]
            await self._remove_markers(known, path)
            self._forget(known, last)
        await self._remove_markers(known, known.over)
        if last is not None and last.generation >= self._cache.epochs.of(name) and known.unmade:
            # A host whose clock is ahead has cleared before, and we did not know: our clear must have a later number.
            self._cache.epochs.last = max(self._cache.epochs.last, last.generation)
            await self._clear_here(name, None)
        await self._settle(known)

    def figures(self) -> dict[str, object]:
        """For `status`: by namespace, and counts."""
        namespaces = self._cache.namespaces
        return {
            "eras": {
                namespaces[name].name: f"{known.era.generation:08x}.{known.era.id.hex()}" if known.era else ""
                for name, known in self._known.items()
                if name in namespaces
            },
            "eras_made": self.made,
            "markers_lost": self.lost_markers,
            "cleared_elsewhere": self.cleared_elsewhere,
        }


def _until(seconds: float = VALUE_S) -> float:
    return time.monotonic() + seconds
