"""Eras: hosts that share a store agree, whatever comes between, and what was cleared stays cleared."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.epochs import Epochs
from kvoffloadd.cache.remote.eras import Era, Eras, decode_pointer, encode_pointer
from kvoffloadd.changes import Changes
from kvoffloadd.errors import NotDurableError, RemoteStoreError
from kvoffloadd.model import EPOCH_MAX
from kvoffloadd.objectnames import marker_name, pointer_name
from kvoffloadd.storage.remote.store import RemoteState, RemoteStore

NAME = b"n" * 16


@dataclass
class Objects:
    """What the store holds. Each call takes some turns of the loop, before and after it happens."""

    rng: random.Random
    values: dict[str, bytes] = field(default_factory=dict)


class FakeStore:
    """One host's connection."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.changes = Changes()
        self.starts = 1
        self.is_away = False

    @property
    def state(self) -> RemoteState:
        return RemoteState.OPEN if self.is_away else RemoteState.OK

    async def _turns(self) -> None:
        for _ in range(self.objects.rng.randrange(4)):
            await asyncio.sleep(0)
        if self.is_away:
            raise RemoteStoreError("away")

    async def read_value(self, name: str, until_s: float) -> bytes | None:
        await self._turns()
        value = self.objects.values.get(name)
        await self._turns()
        return value

    async def write_value(
        self, name: str, value: bytes, until_s: float, *, if_absent: bool = False, kept_s: float | None = None
    ) -> None:
        await self._turns()
        if not if_absent:  # as engines do that can't write anew
            self.objects.values.pop(name, None)
            await self._turns()
        if name not in self.objects.values:
            self.objects.values[name] = value
        await self._turns()

    async def remove(self, names: list[str], until_s: float) -> None:
        for name in names:
            await self._turns()
            self.objects.values.pop(name, None)
        await self._turns()

    async def sweep(self, prefix: str, until_s: float) -> int:
        await self._turns()
        gone = [name for name in self.objects.values if name.startswith(prefix)]
        for name in gone:
            del self.objects.values[name]
        await self._turns()
        return len(gone)


class Host:
    """A daemon's epochs, and its eras."""

    def __init__(self, objects: Objects, now: Callable[[], int]) -> None:
        self.store = FakeStore(objects)
        self.epochs = Epochs(clock=now)
        self.cache = SimpleNamespace(epochs=self.epochs, namespaces={NAME: SimpleNamespace(name="n")})
        self.cleared: list[int] = []  # epochs that came from elsewhere
        self.eras = Eras(cast(RemoteStore, self.store), cast(Cache, self.cache), 0.001, self._clear_here)
        self.task: asyncio.Task[None] | None = None

    async def _clear_here(self, name: bytes, epoch: int | None) -> None:
        if epoch is None:
            self.epochs.advance(name)
        else:
            self.epochs.merge(0, epoch, {name: epoch})
            self.cleared.append(epoch)
        await asyncio.sleep(0)

    def run(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self.eras.run())

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    @property
    def epoch(self) -> int:
        return self.epochs.of(NAME)

    @property
    def era(self) -> Era | None:
        known = self.eras.of(NAME)
        return known.era if known is not None else None

    def hits(self) -> Era | None:
        """The era of which it would take keys: its own, if the marker is there."""
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
        """The number of the clear. Raises NotDurableError."""
        self.epochs.advance(NAME)
        begun = self.eras.begin_clear({NAME})
        await self.eras.finish_clear(begun)
        return self.epoch


async def settled(condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  many things change it
            await asyncio.sleep(0.001)
    assert what


def agree(hosts: list[Host]) -> bool:
    eras = {host.hits() for host in hosts}
    return len(eras) == 1 and None not in eras and len({host.epoch for host in hosts}) == 1


class Lab:
    def __init__(self, seed: int, count: int) -> None:
        self.rng = random.Random(seed)
        self.objects = Objects(self.rng)
        self.now = 1000
        self.hosts = [Host(self.objects, self._clock) for _ in range(count)]

    def _clock(self) -> int:
        self.now += self.rng.randrange(3)
        return self.now

    async def stop(self) -> None:
        for host in self.hosts:
            await host.stop()


@pytest.mark.parametrize("number", range(20))
async def test_hosts_that_begin_at_once_agree_and_nobody_clears(seed: int, number: int) -> None:
    lab = Lab(seed + number, 4)
    for host in lab.hosts:
        host.run()
    await settled(lambda: agree(lab.hosts), "they agree")
    assert [host.cleared for host in lab.hosts] == [[]] * 4
    assert lab.hosts[0].era is not None
    await settled(lambda: len(lab.objects.values) == 2, "markers of those that lost are gone")
    await lab.stop()


class Chaos:
    """Clears by any of the hosts, several at once; hosts that are away meanwhile; small objects that are lost."""

    def __init__(self, lab: Lab, loses: bool) -> None:
        self.lab, self.loses = lab, loses
        self.promised = 0  # the latest clear that was answered
        self.tasks: list[asyncio.Task[None]] = []

    def step(self) -> None:
        lab = self.lab
        host, what = lab.rng.choice(lab.hosts), lab.rng.random()
        if what < 0.25:
            self.tasks.append(asyncio.get_running_loop().create_task(self._clear(host)))
        elif what < 0.35:
            host.go(away=not host.store.is_away)
        elif self.loses and what < 0.4 and lab.objects.values:
            del lab.objects.values[lab.rng.choice(sorted(lab.objects.values))]
            host.look()
        else:
            self.check()

    async def _clear(self, host: Host) -> None:
        try:
            self.promised = max(self.promised, await host.clear())
        except NotDurableError:
            return
        self.check()

    def check(self) -> None:
        for host in [] if self.loses else self.lab.hosts:
            era = host.hits()
            assert era is None or era.generation >= self.promised, "it takes keys from before a clear that was answered"


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("number", range(40))
async def test_after_a_clear_no_host_hits_what_was_there_before(seed: int, number: int, loses: bool) -> None:
    """With small objects that are lost in the same moments, what is promised holds once all have looked again."""
    lab = Lab(seed + number, 3)
    for host in lab.hosts:
        host.run()
    await settled(lambda: agree(lab.hosts), "they agree")
    chaos = Chaos(lab, loses)
    for _ in range(60):
        chaos.step()
        for _ in range(lab.rng.randrange(6)):
            await asyncio.sleep(0)
    for host in lab.hosts:
        host.go(away=False)
    await asyncio.gather(*chaos.tasks)
    for host in lab.hosts:
        host.look()
    await settled(lambda: agree(lab.hosts), "they agree in the end")
    assert lab.hosts[0].epoch >= chaos.promised
    await lab.stop()


async def test_a_clear_by_a_host_whose_clock_is_behind_gets_a_later_number(seed: int) -> None:
    lab = Lab(seed, 2)
    ahead, behind = lab.hosts
    ahead.epochs.clock = lambda: 10**9
    ahead.run()
    await ahead.clear()
    await settled(lambda: ahead.hits() is not None, "it is in its era")
    mine = await behind.clear()  # before it has ever looked
    assert mine > 10**9
    assert ahead.hits() is None or cast(Era, ahead.hits()).generation == mine
    behind.run()
    await settled(lambda: agree(lab.hosts), "they agree")
    assert ahead.cleared == [mine]
    await lab.stop()


async def test_a_clear_that_was_refused_is_made_up_for(seed: int) -> None:
    lab = Lab(seed, 2)
    for host in lab.hosts:
        host.run()
    await settled(lambda: agree(lab.hosts), "they agree")
    one, other = lab.hosts
    one.store.is_away = True
    with pytest.raises(NotDurableError, match="not everywhere"):
        await one.clear()
    assert one.hits() is None
    assert other.hits() is not None
    one.store.is_away = False
    one.store.changes.notify_all()
    await settled(lambda: agree(lab.hosts), "they agree")
    assert other.cleared == [one.epoch]
    await lab.stop()


async def test_a_store_that_goes_back_in_time_is_put_right(seed: int) -> None:
    """A failover to a copy from before the clear: pointer and marker of the old era are back."""
    lab = Lab(seed, 2)
    for host in lab.hosts:
        host.run()
    await settled(lambda: agree(lab.hosts), "they agree")
    before = dict(lab.objects.values)
    await lab.hosts[0].clear()
    await settled(lambda: agree(lab.hosts), "they agree")
    epoch = lab.hosts[0].epoch
    lab.objects.values.clear()
    lab.objects.values.update(before)
    for host in lab.hosts:
        known = host.eras._known[NAME]
        host.eras.lost(NAME, known.number)
    await settled(lambda: agree(lab.hosts), "they agree")
    assert {host.epoch for host in lab.hosts} == {epoch}
    assert not before.keys() & lab.objects.values.keys() - {pointer_name(NAME)}
    await lab.stop()


@pytest.mark.parametrize("why", ["another connection", "a while later"])
async def test_a_marker_that_is_back_is_removed_again_by_the_host_that_cleared(seed: int, why: str) -> None:
    """A failover has lost the removal alone. A host that has not looked since would hit what was cleared."""
    lab = Lab(seed, 2)
    for host in lab.hosts:
        host.run()
    await settled(lambda: agree(lab.hosts), "they agree")
    one, other = lab.hosts
    await other.stop()
    era = other.era
    assert era is not None
    marker = marker_name(NAME, era.generation, era.id)
    value = lab.objects.values[marker]
    await one.clear()
    assert other.hits() is None
    known = one.eras._known[NAME]
    known.again_s = None
    lab.objects.values[marker] = value
    assert other.hits() == era
    if why == "another connection":
        one.store.starts += 1
    else:
        known.again_s = 0.0
    await settled(lambda: other.hits() is None, "it is removed again")
    await lab.stop()


async def test_a_marker_that_is_gone_is_never_put_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host misses the marker just as another one has cleared; a third one has not looked for a while."""
    lab = Lab(seed, 3)
    for host in lab.hosts:
        host.run()
    await settled(lambda: agree(lab.hosts), "they agree")
    one, middle, third = lab.hosts
    await middle.stop()
    await third.stop()
    era = third.era
    assert era is not None
    marker, read = marker_name(NAME, era.generation, era.id), middle.store.read_value
    cleared: list[int] = []

    async def read_value(name: str, until_s: float) -> bytes | None:
        if name == marker and not cleared:
            cleared.append(await one.clear())
        return await read(name, until_s)

    def nothing_stale() -> bool:
        if cleared:
            assert third.hits() is None
        return True

    monkeypatch.setattr(middle.store, "read_value", read_value)
    middle.eras.lost(NAME, middle.eras._known[NAME].number)
    middle.run()
    await settled(lambda: nothing_stale() and bool(cleared) and agree([one, middle]), "they agree")
    await lab.stop()


def test_a_pointer_is_read_as_it_was_written_and_not_otherwise() -> None:
    era = Era(12345, b"12345678")
    value = encode_pointer(NAME, era)
    assert decode_pointer(NAME, value) == era
    assert decode_pointer(b"m" * 16, value) is None
    for at in range(len(value)):
        damaged = bytearray(value)
        damaged[at] ^= 1
        assert decode_pointer(NAME, bytes(damaged)) is None
    for end in range(len(value)):
        assert decode_pointer(NAME, value[:end]) is None
    assert decode_pointer(NAME, value + b"x") is None
    far: Any = encode_pointer(NAME, Era(EPOCH_MAX + 1, b"12345678"))
    assert decode_pointer(NAME, far) is None
