"""Eras: hosts that share a store agree, whatever comes between, and what was cleared stays cleared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import pytest

from kvoffloadd.agentwire.names import era_prefix, marker_name, markers_prefix, pointer_name, successor_name
from kvoffloadd.cache.remote.agreement import LINKS_KEPT
from kvoffloadd.cache.remote.era import Era, decode_era, encode_era, new_era
from kvoffloadd.errors import NotDurableError, RemoteStoreError
from kvoffloadd.storage.remote.values import NotRead
from tests.cache.remote.lab import NAME, EraHost, Lab, agree, settled


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


class ClearChaos:
    """Clears by any of the hosts, several at once; hosts that are away meanwhile; small objects that are lost. `ahead`:
    the most that the hosts' clocks differ by.
    """

    def __init__(self, lab: Lab, loses: bool, ahead: int) -> None:
        self.lab, self.loses = lab, loses
        self.cleared: set[str] = set()  # markers of all eras that there were when a clear began that was answered
        self.begun: set[str] = set()  # or that was not
        self.tasks: list[asyncio.Task[None]] = []
        for host in lab.hosts:
            host.ahead = lab.rng.randrange(ahead + 1)

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

    async def _clear(self, host: EraHost) -> None:
        before = {name for name in self.lab.objects.ever if name.startswith(markers_prefix(NAME))}
        self.begun |= before
        with suppress(NotDurableError):
            await host.clear()
            self.cleared |= before
            self.check()

    def check(self) -> None:
        if not self.loses:
            self._check(self.cleared)

    def check_at_the_end(self) -> None:
        """Also clears that could not be recorded at first have been."""
        self._check(self.begun)

    def _check(self, over: set[str]) -> None:
        for host in self.lab.hosts:
            era = host.hits()
            assert era is None or marker_name(NAME, era.generation, era.id) not in over, "it takes what was cleared"


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("ahead", [0, 50, 2000])
@pytest.mark.parametrize("number", range(25))
async def test_after_a_clear_no_host_hits_what_was_there_before(
    seed: int, number: int, ahead: int, loses: bool
) -> None:
    """If small objects are lost in the same moments, what is promised holds once all have looked again."""
    lab = Lab(seed + number, 3)
    chaos = ClearChaos(lab, loses, ahead)
    for host in lab.hosts:
        host.run()
    await settled(lambda: agree(lab.hosts), "they agree")
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
    chaos.check_at_the_end()
    await lab.stop()


@pytest.mark.parametrize("how", ["the store was away", "a look was under way"])
async def test_a_clear_by_a_host_whose_clock_is_behind_counts_whoever_carries_it_out(
    seed: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another host has pushed after its own clear, by a later number, is cleared, too."""
    lab = Lab(seed, 2)
    ahead, behind = lab.hosts
    ahead.ahead = 10**6
    for host in lab.hosts:
        host.run()
    await settled(lambda: agree(lab.hosts), "they agree")
    if how == "the store was away":
        behind.go(away=True)
    else:
        await behind.stop()
    await ahead.clear()
    await settled(lambda: ahead.hits() is not None, "it goes on")
    pushed_in = ahead.hits()
    if how == "the store was away":
        with pytest.raises(NotDurableError):
            await behind.clear()
        behind.go(away=False)
    else:
        read, clears = behind.store.read_values, list[asyncio.Task[int]]()

        async def read_values(names: Sequence[str], until_s: float) -> list[bytes | NotRead | None]:
            if not clears and len(names) == 1:  # a look has the namespace's lock
                clears.append(asyncio.get_running_loop().create_task(behind.clear()))
                await asyncio.sleep(0.001)
            return await read(names, until_s)

        monkeypatch.setattr(behind.store, "read_values", read_values)
        behind.run()
        await settled(lambda: bool(clears) and clears[0].done(), "it is answered")
    known = behind.eras._known[NAME]
    await settled(lambda: not known.unmade and agree(lab.hosts), "it is recorded")
    assert behind.hits() != pushed_in
    await lab.stop()


async def test_a_clear_by_a_host_whose_clock_is_behind_gets_a_later_number(seed: int) -> None:
    lab = Lab(seed, 2)
    ahead, behind = lab.hosts
    ahead.ahead = 10**9
    ahead.run()
    await ahead.clear()
    await settled(lambda: ahead.hits() is not None, "it is in its era")
    await behind.clear()  # before it has ever looked
    generation = behind.epoch
    assert generation > 10**9
    assert ahead.hits() is None or cast(Era, ahead.hits()).generation == generation
    behind.run()
    await settled(lambda: agree(lab.hosts), "they agree")
    assert ahead.cleared == [generation]
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


async def test_a_clear_whose_successor_is_written_late_is_one_clear(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store carries out a write that was given up, as this host writes the next one."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    host.run()
    await settled(lambda: agree(lab.hosts), "it is in an era")
    era, write, late = cast(Era, host.era), host.store.write_value, list[bytes]()
    successor = successor_name(NAME, era.generation, era.id)

    async def write_late(name: str, value: bytes, until_s: float, **options: Any) -> None:
        if name == successor:
            late.append(value)
            if len(late) == 1:
                raise RemoteStoreError("it may still be done")
            await write(name, late[0], until_s, **options)
        await write(name, value, until_s, **options)

    monkeypatch.setattr(host.store, "write_value", write_late)
    with pytest.raises(NotDurableError):
        await host.clear()
    number = host.epoch
    await settled(lambda: agree(lab.hosts) and not host.eras._known[NAME].unmade, "the store has recorded it")
    assert len(late) == 2
    assert host.epoch == number
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
    marker, read = marker_name(NAME, era.generation, era.id), middle.store.read_values
    cleared: list[int] = []

    async def read_values(names: Sequence[str], until_s: float) -> list[bytes | NotRead | None]:
        if marker in names and not cleared:
            cleared.append(await one.clear())
        return await read(names, until_s)

    def nothing_stale() -> bool:
        if cleared:
            assert third.hits() is None
        return True

    monkeypatch.setattr(middle.store, "read_values", read_values)
    middle.eras.lost(NAME, middle.eras._known[NAME].number)
    middle.run()
    await settled(lambda: nothing_stale() and bool(cleared) and agree([one, middle]), "they agree")
    await lab.stop()


async def test_a_clear_removes_markers_of_eras_that_were_cleared_before(seed: int) -> None:
    """A store that was away may have brought one back, of an era to which no path leads any more."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    host.run()
    await settled(lambda: agree(lab.hosts), "it is in its era")
    era = host.era
    assert era is not None
    for _ in range(LINKS_KEPT + 2):
        await host.clear()
        await settled(lambda: agree(lab.hosts), "it is in the next one")
    pointed = decode_era(NAME, lab.objects.values[pointer_name(NAME)])
    assert pointed is not None
    assert pointed > era, "the path begins behind it"
    await host.stop()
    marker = marker_name(NAME, era.generation, era.id)
    lab.objects.values[marker] = encode_era(NAME, era)
    await host.clear()
    assert marker not in lab.objects.values


async def test_of_two_eras_that_no_path_joins_the_earlier_one_ends(seed: int) -> None:
    """The store has lost the pointer, and another host has begun anew: who hits in the earlier era must hit no more."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    host.run()
    await settled(lambda: agree(lab.hosts), "it is in its era")
    earlier = host.era
    assert earlier is not None
    later = new_era(earlier.after(earlier.generation))
    lab.objects.values[marker_name(NAME, later.generation, later.id)] = encode_era(NAME, later)
    lab.objects.values[pointer_name(NAME)] = encode_era(NAME, later)
    await settled(lambda: host.era == later, "it goes on in the later one")
    assert marker_name(NAME, earlier.generation, earlier.id) not in lab.objects.values
    await lab.stop()


async def test_what_was_stored_in_each_of_two_eras_is_swept(seed: int) -> None:
    """Two clears, one right after the other."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    host.run()
    keys = []
    for _ in range(2):
        await settled(lambda: agree(lab.hosts), "it is in an era")
        era = cast(Era, host.era)
        keys.append(era_prefix(NAME, era.generation, era.id) + "key")
        lab.objects.values[keys[-1]] = b"payload"
        await host.clear()
    await settled(lambda: not lab.objects.values.keys() & set(keys), "the keys of both are gone")
    await lab.stop()


async def test_a_clear_that_no_store_has_recorded_is_made_up_for_after_a_restart(seed: int) -> None:
    """Nothing of the namespace is there then, but the number of its clear."""
    lab = Lab(seed, 2)
    for host in lab.hosts:
        host.run()
    await settled(lambda: agree(lab.hosts), "they agree")
    one, other = lab.hosts
    era = other.era
    one.go(away=True)
    with pytest.raises(NotDurableError):
        await one.clear()
    await one.stop()
    again = lab.hosts[0] = EraHost(lab.objects, lab._clock)
    again.epochs.merge(one.epochs.base, one.epochs.last, one.epochs.by_namespace)
    del again.cache.namespaces[NAME]
    again.run()
    await settled(lambda: other.epoch == again.epoch and other.hits() not in (None, era), "the other host hears of it")
    await settled(lambda: not again.eras._known, "and this one has no more to do with it")
    before = dict(lab.objects.values)
    again.open(NAME)
    await settled(lambda: agree(lab.hosts), "an engine opens it")
    assert lab.objects.values == before
    await lab.stop()


async def test_a_clear_that_is_remembered_makes_no_era_in_the_store(seed: int) -> None:
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    host.epochs.merge(0, 7, {b"m" * 16: 7})
    host.run()
    await settled(lambda: agree(lab.hosts) and b"m" * 16 in host.eras._checked, "it was looked for")
    assert {name for name in lab.objects.values if (b"m" * 16).hex() in name} == set()
    await lab.stop()


async def test_a_namespace_may_be_opened_as_its_clear_is_looked_for(seed: int) -> None:
    lab = Lab(seed, 1)
    host = lab.hosts[0] = EraHost(lab.objects, lab._clock, poll_s=1000)
    host.epochs.merge(0, 7, {b"m" * 16: 7})
    host.run()
    await settled(lambda: b"m" * 16 in host.eras._checked, "it was looked for")
    host.open(b"m" * 16)
    host.store.starts += 1  # a round begins
    host.eras._wanted.notify_all()
    await settled(lambda: host.eras.of(b"m" * 16) is not None, "it has an era")
    await lab.stop()


async def test_markers_of_eras_that_nobody_knows_are_removed_over_several_looks(seed: int) -> None:
    """The store has lost the pointer and has very many objects; the clear is recorded all the same."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    others = {f"another application's {number}": b"" for number in range(20)}
    lab.objects.values |= others
    for number in range(40):
        era = new_era(Era(number, bytes(8)))
        lab.objects.values[marker_name(NAME, era.generation, era.id)] = encode_era(NAME, era)
    host.store.sweep_most = 3
    with pytest.raises(NotDurableError):
        await host.clear()
    host.run()
    await settled(lambda: agree(lab.hosts), "it is in an era of its own")
    assert len(lab.objects.values) == len(others) + 2
    await lab.stop()
