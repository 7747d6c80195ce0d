"""Hosts that share a store, in one process: their epochs and eras are real, and the store is a dictionary.

Each call takes some turns of the loop, before and after it happens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from kvoffloadd.agentwire.frames import Code
from kvoffloadd.agentwire.names import marker_name
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.confirmed import Confirmed
from kvoffloadd.cache.memory.doubt import Doubt
from kvoffloadd.cache.memory.epochs import Epochs
from kvoffloadd.cache.remote.era import Era
from kvoffloadd.cache.remote.eras import Eras
from kvoffloadd.errors import RemoteStoreError
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.storage.remote.store import RemoteState, RemoteStore
from kvoffloadd.storage.remote.values import NotRead
from kvoffloadd.testing.wait import HANG_S

NAME = b"n" * 16


@dataclass
class Objects:
    """What the store holds. `unreadable`: names that no read brings, and why."""

    rng: random.Random
    values: dict[str, bytes] = field(default_factory=dict)
    unreadable: dict[str, Code] = field(default_factory=dict)
    hanging: set[str] = field(default_factory=set)  # names whose reads alone, and writes, never end
    unwritable: set[str] = field(default_factory=set)  # names whose writes never end
    ever: set[str] = field(default_factory=set)  # names of all that was ever written


class FakeStore:
    """One host's connection."""

    reason = ""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.changes = Changes()
        self.starts = 1
        self.is_away = False
        self.is_silent = False  # it answers nothing, and this has not been noticed yet
        self.is_open = False  # a breaker is open: of puts, say; the store answers
        self.calls = 0
        self.swept: list[str] = []
        self.sweep_most = 1 << 30

    @property
    def state(self) -> RemoteState:
        return RemoteState.OPEN if self.is_away or self.is_open else RemoteState.OK

    async def _turns(self, *names: str) -> None:
        for _ in range(self.objects.rng.randrange(4)):
            await asyncio.sleep(0)
        if self.is_away or self.is_silent:
            raise RemoteStoreError("away")
        if len(names) == 1 and names[0] in self.objects.hanging:
            await asyncio.Event().wait()

    async def read_values(self, names: Sequence[str], until_s: float) -> list[bytes | NotRead | None]:
        self.calls += 1
        await self._turns(*names)
        objects = self.objects
        values = [
            NotRead(objects.unreadable.get(name, Code.FAILED))
            if name in objects.unreadable or name in objects.hanging
            else objects.values.get(name)
            for name in names
        ]
        await self._turns()
        return values

    async def write_value(
        self, name: str, value: bytes, until_s: float, *, if_absent: bool = False, kept_s: float | None = None
    ) -> None:
        await self._turns(name)
        if name in self.objects.unwritable:
            await asyncio.Event().wait()
        if not if_absent:  # as engines do that can't write anew
            self.objects.values.pop(name, None)
            await self._turns()
        if name not in self.objects.values:
            self.objects.values[name] = value
            self.objects.ever.add(name)
        await self._turns()

    async def renew(self, names: Sequence[str], kept_s: float, until_s: float) -> list[bool]:
        await self._turns()
        return [name in self.objects.values for name in names]

    async def remove(self, names: Sequence[str], until_s: float) -> None:
        for name in names:
            await self._turns()
            self.objects.values.pop(name, None)
            self.objects.unreadable.pop(name, None)
        await self._turns()

    async def sweep(self, prefix: str, until_s: float, after: str = "") -> tuple[int, str]:
        """Sweeps in the order of the names. `sweep_most`: time is over when this many were looked at, whatever their
        names.
        """
        self.swept.append(prefix)
        await self._turns()
        names = sorted(name for name in self.objects.values if name > after)
        gone = [name for name in names[: self.sweep_most] if name.startswith(prefix)]
        for name in gone:
            del self.objects.values[name]
        await self._turns()
        return len(gone), names[self.sweep_most - 1] if len(names) > self.sweep_most else ""


class EraHost:
    """A daemon's epochs, and its eras. `on_disk`: namespaces that only its disk has."""

    def __init__(self, objects: Objects, now: Callable[[], int], poll_s: float = 0.001) -> None:
        self.store = FakeStore(objects)
        self.ahead = 0  # its clock, of the others'
        self.epochs = Epochs(clock=lambda: now() + self.ahead)
        self.on_disk: set[bytes] = set()
        self.cache = SimpleNamespace(
            epochs=self.epochs,
            confirmed=Confirmed(),
            namespaces={},
            local=SimpleNamespace(namespaces=lambda: self.on_disk),
            doubt_of=None,
        )
        self.cleared: list[int] = []  # epochs that came from elsewhere
        self.eras = Eras(cast(RemoteStore, self.store), cast(Cache, self.cache), poll_s, self._clear_here)
        self.tasks: list[asyncio.Task[None]] = []
        self.open(NAME)

    def open(self, name: bytes) -> SimpleNamespace:
        """An engine opens this namespace."""
        namespace = SimpleNamespace(name=name.hex(), doubt=self.eras.doubt_of(name))
        self.cache.namespaces[name] = namespace
        return namespace

    def doubt(self, name: bytes = NAME) -> Doubt:
        """Returns the doubt of an open namespace, as lookups see it."""
        return cast(Doubt, self.cache.namespaces[name].doubt)

    async def _clear_here(self, name: bytes, epoch: int | None) -> None:
        if epoch is None:
            self.epochs.advance(name)
        else:
            self.epochs.follow(name, epoch)
            self.cleared.append(epoch)
        await asyncio.sleep(0)

    def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(work()) for work in (self.eras.run, self.eras.watch, self.eras.sweeps.run)]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        ended = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
        self.tasks = []

    @property
    def epoch(self) -> int:
        return self.epochs.of(NAME)

    @property
    def era(self) -> Era | None:
        known = self.eras.of(NAME)
        return known.era if known is not None else None

    def hits(self) -> Era | None:
        """The era whose keys it would take: its own, if the marker is there."""
        era = self.era
        if era is None or marker_name(NAME, era.generation, era.id) not in self.store.objects.values:
            return None
        return era

    def look(self) -> None:
        """Find the marker absent, if it is, as the next question would."""
        known = self.eras.of(NAME)
        if known is not None and self.hits() is None:
            self.eras.lost(NAME, known.number)

    def go(self, *, away: bool) -> None:
        """The store answers this host no more, or again."""
        self.store.is_away = away
        self.store.changes.notify_all()

    async def clear(self) -> int:
        """The number that the clear has at first; it may get a later one. Raises NotDurableError."""
        self.epochs.advance(NAME)
        number = self.epoch
        await self.eras.finish_clear(self.eras.begin_clear({NAME}))
        return number  # not `epoch`: another clear may have begun


async def settled(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds. `what`: for people, if it never does."""
    ends_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < ends_s, f"not so: {what}"
        await asyncio.sleep(0.001)


def agree(hosts: list[EraHost]) -> bool:
    eras = {host.hits() for host in hosts}
    return len(eras) == 1 and None not in eras and len({host.epoch for host in hosts}) == 1


class Lab:
    def __init__(self, seed: int, count: int) -> None:
        self.rng = random.Random(seed)
        self.objects = Objects(self.rng)
        self.now = 1000
        self.hosts = [EraHost(self.objects, self._clock) for _ in range(count)]

    def _clock(self) -> int:
        self.now += self.rng.randrange(3)
        return self.now

    async def stop(self) -> None:
        for host in self.hosts:
            await host.stop()
