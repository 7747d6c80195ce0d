"""Rounds over many namespaces: trouble with one does not delay the others, and what no look has shown is in doubt."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvoffloadd.agentwire.frames import Code
from kvoffloadd.agentwire.names import marker_name, pointer_name, successor_name
from kvoffloadd.cache.memory.confirmed import UNCONFIRMED_MAX_S
from kvoffloadd.cache.memory.doubt import Doubt
from kvoffloadd.cache.remote import agreement, eras
from kvoffloadd.cache.remote.era import COUNT_MAX, Era, decode_era, encode_era, new_era
from kvoffloadd.cache.remote.eras import SHOWN_MAX, Eras
from kvoffloadd.cache.remote.namespaceera import RENEW_S, NamespaceEra
from kvoffloadd.errors import NotDurableError, RemoteStoreError
from kvoffloadd.model import EPOCH_MAX
from scripts.soak.vandal import forged
from tests.cache.remote.lab import NAME, EraHost, Lab, agree, settled

NAMES = [bytes([n]) * 16 for n in range(1, 25)]


async def opened(lab: Lab, *names: bytes) -> None:
    """All hosts have these namespaces open, are in their eras, and believe what they have."""
    for host in lab.hosts:
        for name in names:
            host.open(name)
        host.run()
    pairs = [(host, name) for host in lab.hosts for name in names]
    await settled(lambda: all(known(host, name) and not host.doubt(name) for host, name in pairs), "all have agreed")


def known(host: EraHost, name: bytes) -> bool:
    return host.eras.of(name) is not None


async def clear(host: EraHost, *names: bytes) -> None:
    for name in names:
        host.epochs.advance(name)
    await host.eras.finish_clear(host.eras.begin_clear(set(names)))


def era_of(lab: Lab, name: bytes) -> Era:
    found = lab.hosts[0].eras.of(name)
    assert found is not None
    assert found.era is not None
    return found.era


@pytest.mark.parametrize("code", [Code.FAILED, Code.SIZE, Code.NOT_COMPLETE])
async def test_a_pointer_that_cannot_be_read_keeps_no_other_namespace(seed: int, code: Code) -> None:
    lab = Lab(seed, 2)
    await opened(lab, *NAMES)
    one, other = lab.hosts
    lab.objects.unreadable[pointer_name(NAMES[0])] = code
    for name in NAMES[1:]:
        await clear(one, name)
    await settled(lambda: all(other.epochs.of(name) == one.epochs.of(name) for name in NAMES[1:]), "all are seen")
    await lab.stop()


async def test_a_pointer_that_is_too_large_is_written_anew(seed: int) -> None:
    lab = Lab(seed, 2)
    await opened(lab, NAME)
    lab.objects.values.pop(pointer_name(NAME))
    lab.objects.unreadable[pointer_name(NAME)] = Code.SIZE
    await settled(lambda: pointer_name(NAME) in lab.objects.values, "it is written again")
    await clear(lab.hosts[0], NAME)
    await settled(lambda: agree(lab.hosts), "they agree")
    await lab.stop()


async def test_reads_that_hang_keep_no_other_namespace(seed: int) -> None:
    """More of them than looks at once, and their markers and successors, too."""
    lab = Lab(seed, 2)
    names = [n.to_bytes(16) for n in range(1, eras.LOOKS_MAX + 20)]
    await opened(lab, *names, *NAMES[-2:])
    one, other = lab.hosts
    for name in names:
        lab.objects.values.pop(pointer_name(name))
        lab.objects.hanging |= {pointer_name(name)}
    for name in NAMES[-2:]:
        await clear(one, name)
    await settled(lambda: all(other.epochs.of(name) == one.epochs.of(name) for name in NAMES[-2:]), "both are seen")
    await lab.stop()


async def test_first_looks_keep_no_namespace_that_is_known(seed: int) -> None:
    """However many namespaces are opened at once, and whatever becomes of them."""
    lab = Lab(seed, 2)
    await opened(lab, NAME)
    one, other = lab.hosts
    for number in range(1, 3 * eras.LOOKS_MAX):
        lab.objects.unwritable.add(pointer_name(number.to_bytes(16)))
        other.open(number.to_bytes(16))
    await settled(lambda: len(other.eras._looks) >= 2 * eras.LOOKS_MAX, "their looks are under way")
    await clear(one, NAME)
    await settled(lambda: agree(lab.hosts), "the clear is seen")
    await lab.stop()


async def test_a_clear_whose_remote_half_hangs_keeps_no_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eras, "LOOK_S", 0.5)
    lab = Lab(seed, 2)
    await opened(lab, *NAMES)
    one, other = lab.hosts
    lab.objects.hanging.add(pointer_name(NAMES[0]))
    for name in NAMES:
        one.epochs.advance(name)
    with pytest.raises(NotDurableError, match=f"1 of {len(NAMES)} namespaces"):
        await one.eras.finish_clear(one.eras.begin_clear(set(NAMES)))
    await settled(lambda: all(other.epochs.of(name) == one.epochs.of(name) for name in NAMES[1:]), "all but that one")
    lab.objects.hanging.clear()
    await settled(lambda: other.epochs.of(NAMES[0]) == one.epochs.of(NAMES[0]), "the daemon tries again by itself")
    await lab.stop()


async def test_namespaces_that_only_a_disk_has_are_looked_at(seed: int) -> None:
    lab = Lab(seed, 2)
    one, other = lab.hosts
    await opened(lab, NAMES[0])
    await settled(lambda: other.eras.of(NAMES[0]) is not None, "it is in the era")
    del other.cache.namespaces[NAMES[0]]
    other.on_disk.add(NAMES[0])
    await clear(one, NAMES[0])
    await settled(lambda: other.epochs.of(NAMES[0]) == one.epochs.of(NAMES[0]), "it hears of the clear")
    assert one.epochs.of(NAMES[0]) in other.cleared
    await lab.stop()


async def test_a_clear_of_all_reaches_what_only_the_disk_has(seed: int) -> None:
    lab = Lab(seed, 2)
    one, other = lab.hosts
    await opened(lab, NAMES[0])
    del one.cache.namespaces[NAMES[0]]
    one.on_disk.add(NAMES[0])
    one.epochs.advance_all()
    await one.eras.finish_clear(one.eras.begin_clear(None))
    await settled(lambda: other.epochs.of(NAMES[0]) == one.epochs.of(NAMES[0]), "it hears of the clear")
    await lab.stop()


async def test_a_round_without_news_is_one_call(seed: int) -> None:
    lab = Lab(seed, 1)
    await opened(lab, *NAMES)
    (host,) = lab.hosts
    await settled(lambda: not host.eras._looks, "all looks are over")
    await settled(lambda: agree(lab.hosts), "they agree")
    for at in range(3):
        await asyncio.sleep(0.002)
        if not host.eras._looks:
            break
        assert at < 2
    calls, rounds = host.store.calls, 0
    asked = host.eras._with_news

    async def counted(names: list[object]) -> object:
        nonlocal rounds
        rounds += 1
        return await asked(names)  # type: ignore[arg-type]

    host.eras._with_news = counted  # type: ignore[assignment, method-assign]
    calls = host.store.calls
    await settled(lambda: rounds >= 5, "five rounds")
    assert host.store.calls - calls <= rounds + 1
    await lab.stop()


# --- doubt ---


async def test_nothing_of_an_earlier_run_hits_before_the_first_look(seed: int) -> None:
    lab = Lab(seed, 2)
    one, other = lab.hosts
    assert one.doubt() is Doubt.INHERITED
    one.store.is_silent = True  # it hangs, which is not known yet
    one.run()
    await asyncio.sleep(0)
    assert one.doubt() is Doubt.INHERITED
    one.store.is_silent = False
    await settled(lambda: one.doubt() is Doubt.NONE, "the look has shown it")
    assert one.eras.of(NAME) is not None
    assert one.open(NAMES[0]).doubt is Doubt.INHERITED, "another namespace"
    assert other.doubt() is Doubt.INHERITED
    await lab.stop()


@pytest.mark.parametrize("how", ["breaker", "silence"])
async def test_a_store_that_is_away_puts_nothing_in_doubt(seed: int, how: str) -> None:
    """The local tiers serve, as BEHAVIOR describes. When it is back, what was never looked at is in doubt again."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    if how == "breaker":
        host.go(away=True)
    host.store.is_silent = True
    host.run()
    await settled(lambda: host.doubt() is Doubt.NONE, "it is known to be away")
    host.open(NAMES[0])
    lab.objects.unreadable[pointer_name(NAMES[0])] = Code.FAILED
    host.store.is_silent = False
    host.go(away=False)
    await settled(lambda: host.doubt(NAMES[0]) is Doubt.INHERITED, "it is back, and this can't be read")
    await settled(lambda: host.doubt() is Doubt.NONE and host.eras.of(NAME) is not None, "this was read")
    await lab.stop()


async def test_what_is_overdue_is_named_and_then_does_not_hit(seed: int) -> None:
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    await opened(lab, NAME, NAMES[0])
    clock = host.eras._clock
    lab.objects.unreadable[pointer_name(NAMES[0])] = Code.FAILED
    await settled(lambda: not host.eras._looks, "no look is under way")
    assert host.eras.figures()["eras_overdue"] == []
    clock.now_s += eras.OVERDUE_S_MIN + 1
    await settled(lambda: host.eras.figures()["eras_overdue"] == [NAMES[0].hex()], "it is named, and it alone")
    assert host.doubt(NAMES[0]) is Doubt.NONE
    clock.now_s += eras.DOUBT_S_MIN
    await settled(lambda: host.doubt(NAMES[0]) is Doubt.ALL, "its keys do not hit")
    await settled(lambda: host.doubt() is Doubt.NONE, "others do")
    host.go(away=True)
    await settled(lambda: host.doubt(NAMES[0]) is Doubt.NONE, "local tiers serve while the store is away")
    host.go(away=False)
    del lab.objects.unreadable[pointer_name(NAMES[0])]
    await settled(lambda: host.eras.figures()["eras_overdue"] == [], "it was seen")
    await settled(lambda: host.doubt(NAMES[0]) is Doubt.NONE, "its keys hit again")
    await lab.stop()


# --- what the store may say ---


@pytest.mark.parametrize("where", ["pointer", "successor"])
@pytest.mark.parametrize(
    ("generation", "identity"),
    [(0, b"\xff" * 8), (EPOCH_MAX, b"\xff" * 8), ((1 << 62) - 1, bytes(8)), ((1 << 64) - 1, bytes(8))],
)
async def test_the_last_numbers_that_there_are_end_nothing(
    seed: int, where: str, generation: int, identity: bytes
) -> None:
    """Forty-eight bytes that any host can write: they are damage, and go."""
    lab = Lab(seed, 2)
    await opened(lab, NAME)
    era, one = era_of(lab, NAME), lab.hosts[0]
    name = pointer_name(NAME) if where == "pointer" else successor_name(NAME, era.generation, era.id)
    evil = lab.objects.values[name] = forged(NAME, generation or era.generation, identity)
    await settled(lambda: lab.objects.values.get(name) != evil and agree(lab.hosts), "they agree without it")
    await clear(one, NAME)
    await settled(lambda: agree(lab.hosts), "and clear")
    assert one.epochs.believes(one.epoch)
    await lab.stop()


def put(lab: Lab, name: str, fingerprint: bytes, era: Era) -> None:
    lab.objects.values[name] = encode_era(fingerprint, era)


async def test_an_era_with_no_next_one_of_its_generation_ends_in_a_clear(seed: int) -> None:
    lab = Lab(seed, 2)
    await opened(lab, NAME)
    era = era_of(lab, NAME)
    put(lab, successor_name(NAME, era.generation, era.id), NAME, Era(era.generation, COUNT_MAX.to_bytes(4) + b"evil"))
    await settled(lambda: agree(lab.hosts) and lab.hosts[0].epoch > era.generation, "a new generation")
    await lab.stop()


@pytest.mark.parametrize("where", ["pointer", "successor"])
async def test_a_generation_far_ahead_is_not_believed(seed: int, where: str) -> None:
    """Nor removed: this host's clock may be the wrong one. The namespace does without the store, and is overdue."""
    lab = Lab(seed, 2)
    await opened(lab, NAME, NAMES[0])
    era, one = era_of(lab, NAMES[0]), lab.hosts[0]
    last = one.epochs.last
    far = Era(10**15, bytes(8))
    name = pointer_name(NAMES[0]) if where == "pointer" else successor_name(NAMES[0], era.generation, era.id)
    put(lab, name, NAMES[0], far)
    put(lab, marker_name(NAMES[0], far.generation, far.id), NAMES[0], far)
    await settled(lambda: one.eras.figures()["eras_ahead"] == [NAMES[0].hex()], "it is named")
    assert one.epochs.last == last
    assert decode_era(NAMES[0], lab.objects.values[name]) == far
    await clear(one, NAME)
    await settled(lambda: agree(lab.hosts), "others go on")
    await lab.stop()


@pytest.mark.parametrize("why", ["due", "back"])
@pytest.mark.parametrize("how", ["ahead", "unreadable"])
async def test_an_era_that_can_not_be_agreed_on_hides_no_marker_that_came_back(seed: int, how: str, why: str) -> None:
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    await opened(lab, NAME)
    over = era_of(lab, NAME)
    await clear(host, NAME)
    own = host.eras._known[NAME]
    await settled(lambda: own.is_idle and not host.eras._looks, "the work of the clear is done")
    if how == "ahead":
        put(lab, pointer_name(NAME), NAME, Era(10**15, bytes(8)))
        await settled(lambda: own.is_ahead, "the era is not believed")
    else:
        lab.objects.unreadable[pointer_name(NAME)] = Code.FAILED
    marker = marker_name(NAME, over.generation, over.id)
    put(lab, marker, NAME, over)
    if why == "due":
        own.again_s = 0.0
    else:
        host.store.starts += 1
    await settled(lambda: marker not in lab.objects.values, "it is removed again")
    await settled(lambda: not own.has_markers_to_remove(time.monotonic()), "which is enough")
    await lab.stop()


async def test_a_path_without_end_is_followed_in_steps(seed: int) -> None:
    lab = Lab(seed, 2)
    await opened(lab, NAME, NAMES[0])
    era, links = era_of(lab, NAMES[0]), 5 * agreement.LINKS_MAX
    for _ in range(links):
        after = new_era(era.after(era.generation))
        put(lab, successor_name(NAMES[0], era.generation, era.id), NAMES[0], after)
        era = after
    await clear(lab.hosts[0], NAME)
    await settled(lambda: agree(lab.hosts), "the other namespace is cleared everywhere")
    await settled(lambda: all(known(host, NAMES[0]) for host in lab.hosts), "and in the end this one is agreed on")
    await lab.stop()


async def test_a_long_path_from_a_hosts_own_era_hides_no_clear(seed: int) -> None:
    """No path joins it with the era that the pointer names, whose host is gone."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    await opened(lab, NAME)
    await host.stop()
    era = own = era_of(lab, NAME)
    cleared = Era(era.generation + 5, bytes(8))
    put(lab, marker_name(NAME, cleared.generation, cleared.id), NAME, cleared)
    put(lab, pointer_name(NAME), NAME, cleared)
    for _ in range(agreement.LINKS_MAX + 1):
        after = new_era(era.after(era.generation))
        put(lab, successor_name(NAME, era.generation, era.id), NAME, after)
        era = after
    host.run()
    await settled(lambda: host.hits() not in (None, own), "it is in another era")
    assert host.epoch == cleared.generation
    await lab.stop()


async def test_a_look_follows_so_many_links_and_no_more(seed: int) -> None:
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    await opened(lab, NAME)
    await host.stop()
    era = era_of(lab, NAME)
    for _ in range(2 * agreement.LINKS_MAX):
        after = new_era(era.after(era.generation))
        put(lab, successor_name(NAME, era.generation, era.id), NAME, after)
        era = after
    calls = host.store.calls
    with pytest.raises(RemoteStoreError, match="moved on"):
        await host.eras._agreement.settle(host.eras._known[NAME])
    assert host.store.calls - calls <= agreement.LINKS_MAX + 2


async def test_small_objects_in_use_are_renewed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    renewed: list[set[str]] = []

    async def renew(names: list[str], kept_s: float, until_s: float) -> list[bool]:
        renewed.append(set(names))
        return [True for _ in names]

    monkeypatch.setattr(host.store, "renew", renew)
    await opened(lab, NAME)
    era = era_of(lab, NAME)
    in_use = {pointer_name(NAME), marker_name(NAME, era.generation, era.id)}
    await settled(lambda: renewed == [in_use], "once at the start")
    host.eras._known[NAME].renewed_s -= RENEW_S
    await settled(lambda: renewed == [in_use] * 2, "and once a day")
    await clear(host, NAME)
    await settled(lambda: host.hits() is not None, "it is in the next era")
    after = era_of(lab, NAME)
    in_use = {pointer_name(NAME), marker_name(NAME, after.generation, after.id)}
    host.eras._known[NAME].renewed_s -= RENEW_S
    await settled(lambda: renewed[-1] == in_use, "and those of that one")
    await lab.stop()


async def test_what_was_not_confirmed_for_a_month_is_cleared_before_it_is_agreed_on(seed: int) -> None:
    """The store has forgotten what was cleared meanwhile."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    await opened(lab, NAME)
    epoch, known_era = host.epoch, host.eras._known[NAME]
    await settled(lambda: not host.eras._looks, "no look is under way")
    assert known_era.confirmed_s is not None
    known_era.confirmed_s -= UNCONFIRMED_MAX_S + 10
    lab.objects.values.clear()
    await settled(lambda: host.epoch > epoch and host.hits() is not None, "it was cleared, by a number of its own")
    await lab.stop()


async def test_all_is_confirmed_when_each_was_seen(seed: int) -> None:
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    lab.objects.unreadable[pointer_name(NAMES[0])] = Code.FAILED
    await opened(lab, NAME)
    host.open(NAMES[0])
    host.cache.confirmed.at_s = 0
    before = host.store.calls
    await settled(lambda: host.store.calls > before + 3, "some rounds")
    assert host.cache.confirmed.at_s == 0
    del lab.objects.unreadable[pointer_name(NAMES[0])]
    await settled(lambda: host.cache.confirmed.at_s > 0, "all were seen")
    await lab.stop()


async def test_a_clear_is_heard_of_though_the_store_has_lost_a_successor(seed: int) -> None:
    """The one that leads there from the era that the other host is in, before it has looked."""
    lab = Lab(seed, 2)
    await opened(lab, NAME)
    before, (one, other) = era_of(lab, NAME), lab.hosts
    other.store.is_silent = True
    await clear(one, NAME)
    await settled(lambda: (now := one.eras.of(NAME)) is not None and now.is_idle, "its work is done")
    assert lab.objects.values.pop(successor_name(NAME, before.generation, before.id), None) is not None
    other.store.is_silent = False
    await settled(lambda: agree(lab.hosts), "the other one hears of it")
    await lab.stop()


async def test_a_store_that_has_lost_all_gives_other_hosts_time_to_tell_of_clears(seed: int) -> None:
    """A host that was down during a clear finds no pointer, and makes one: what it has is not believed before the host
    that has cleared has had a round.
    """
    lab = Lab(seed, 2)
    await opened(lab, NAME)
    one, other = lab.hosts
    await other.stop()
    await clear(one, NAME)
    await one.stop()
    lab.objects.values.clear()
    back = lab.hosts[1] = EraHost(lab.objects, lab._clock, poll_s=0.2)
    back.run()
    await settled(lambda: back.era is not None, "it is in an era")
    assert back.doubt() is Doubt.INHERITED
    one.run()
    await settled(lambda: agree(lab.hosts), "it hears of the clear")
    await settled(lambda: back.doubt() is Doubt.NONE, "and is believed again")
    await lab.stop()


@pytest.mark.parametrize("noticed", ["by its round", "by a lookup"])
async def test_a_store_that_has_lost_a_clear_puts_what_is_there_in_doubt(seed: int, noticed: str) -> None:
    """While the host runs that has not heard of it: the marker of its era is gone, and no pointer leads on."""
    lab = Lab(seed, 2)
    await opened(lab, NAME)
    before, (one, other) = era_of(lab, NAME), lab.hosts
    other.store.is_silent = True
    await clear(one, NAME)
    one.store.is_silent = True
    lab.objects.values.pop(pointer_name(NAME))
    lab.objects.values.pop(successor_name(NAME, before.generation, before.id), None)
    other.eras._poll_s = 0.2  # it has a round at once, and others have time
    if noticed == "by a lookup":
        other.look()
    other.store.is_silent = False
    await settled(lambda: pointer_name(NAME) in lab.objects.values, "it has written a pointer")
    await settled(lambda: other.doubt() is Doubt.ALL, "nothing hits")
    one.store.is_silent = False
    await settled(lambda: agree(lab.hosts) and other.epoch > before.generation, "it hears of the clear")
    await settled(lambda: other.doubt() is Doubt.NONE, "and is believed again")
    await lab.stop()


async def test_doubt_lasts_as_long_as_others_may_need(seed: int) -> None:
    """However often the host looks meanwhile, and loses its marker."""
    lab = Lab(seed, 1)
    lab.hosts[0] = host = EraHost(lab.objects, lab._clock, poll_s=1000)
    host.run()
    clock = host.eras._clock
    await settled(lambda: host.era is not None and host.doubt() is Doubt.INHERITED, "it has made an era")

    def has_made(count: int) -> bool:
        return host.eras._agreement.made > count and host.era is not None

    for number in range(1, 2 * agreement.UNSURE_POLLS):
        lab.objects.values.pop(marker_name(NAME, cast(Era, host.era).generation, cast(Era, host.era).id), None)
        host.look()
        await settled(partial(has_made, number), "it has made another one")
        assert host.doubt() is Doubt.INHERITED
    clock.now_s += agreement.UNSURE_POLLS * 1000
    host.eras.lost(NAME, host.eras._known[NAME].number)
    await settled(lambda: host.doubt() is Doubt.NONE, "time is over")
    await lab.stop()


async def test_a_marker_that_is_lost_at_the_end_of_a_look_has_another_look(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look has made an era and has not ended: a second one of the namespace does not run beside it."""
    lab = Lab(seed, 1)
    lab.hosts[0] = host = EraHost(lab.objects, lab._clock, poll_s=1000)
    agreed, may_end, settle = asyncio.Event(), asyncio.Event(), host.eras._agreement.settle

    async def settle_slowly(known: NamespaceEra) -> None:
        await settle(known)
        agreed.set()
        await may_end.wait()

    monkeypatch.setattr(host.eras._agreement, "settle", settle_slowly)
    host.run()
    await agreed.wait()
    before = cast(Era, host.era)
    del lab.objects.values[marker_name(NAME, before.generation, before.id)]
    host.look()
    await settled(lambda: host.eras._known[NAME].tried_s > 0, "the store has reported what it has")
    may_end.set()
    await settled(lambda: host.hits() not in (None, before), "there is another era")
    await lab.stop()


async def test_a_store_that_takes_no_writes_costs_nothing_of_this_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is full, or a copy that may only be read: it can't record an era, and reports that it has none."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts

    async def refuse(*_: Any, **__: Any) -> None:
        raise RemoteStoreError("no space")

    monkeypatch.setattr(host.store, "write_value", refuse)
    host.run()

    def known() -> NamespaceEra | None:
        return host.eras._known.get(NAME)

    await settled(lambda: (now := known()) is not None and now.absent_s > 0, "a look")
    for _ in range(3):
        host.eras._clock.now_s += eras.OVERDUE_S_MIN + 1
        begun_s = host.eras._clock.now_s
        await settled(lambda: (now := known()) is not None and now.absent_s >= begun_s, "a look")  # noqa: B023
        assert host.doubt() is Doubt.INHERITED
    assert host.eras.figures()["eras_overdue"] == [NAME.hex()]
    lab.objects.unreadable[pointer_name(NAME)] = Code.FAILED
    await settled(lambda: not host.eras._looks, "the last look is over")
    host.eras._clock.now_s += eras.DOUBT_S_MIN + 1
    await settled(lambda: host.doubt() is Doubt.ALL, "another host may have written one meanwhile")
    await lab.stop()


@pytest.mark.parametrize("why", ["a loss", "an object"])
async def test_a_breaker_that_is_open_hides_no_doubt(seed: int, why: str) -> None:
    """The store answers each look: it is not away."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    await opened(lab, NAME)
    host.store.is_open = True
    host.store.changes.notify_all()
    if why == "an object":
        lab.objects.unreadable[pointer_name(NAME)] = Code.FAILED
        host.eras._clock.now_s += eras.DOUBT_S_MIN + 1
    else:
        host.eras._poll_s = 3600.0  # doubt lasts for some polls
        lab.objects.values.clear()
        host.look()
    await settled(lambda: host.doubt() is Doubt.ALL, "nothing hits")
    await lab.stop()


async def test_a_pointer_alone_that_is_lost_puts_nothing_in_doubt(seed: int) -> None:
    """The era's marker is there: there was no clear."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    await opened(lab, NAME)
    for _ in range(3):
        lab.objects.values.pop(pointer_name(NAME))
        await settled(lambda: host.doubt() is not Doubt.NONE or pointer_name(NAME) in lab.objects.values, "it is back")
        assert host.doubt() is Doubt.NONE
    await lab.stop()


async def test_successors_of_eras_that_are_long_over_are_removed(seed: int) -> None:
    lab = Lab(seed, 2)
    await opened(lab, NAME)
    for _ in range(3 * agreement.LINKS_KEPT):
        await clear(lab.hosts[0], NAME)
        await settled(lambda: agree(lab.hosts), "the other host hears of it")
    after = f"{successor_name(NAME, 0, b'').partition('after')[0]}after/"
    assert sum(name.startswith(after) for name in lab.objects.values) <= 2 * agreement.LINKS_KEPT
    await lab.stop()


async def test_a_report_names_so_many_namespaces_at_most(seed: int) -> None:
    """Its frame is bounded."""
    lab = Lab(seed, 1)
    (host,) = lab.hosts
    names = [number.to_bytes(16) for number in range(SHOWN_MAX + 100)]
    for name in names:
        host.open(name)
    host.run()
    await settled(lambda: all(host.eras.of(name) is not None for name in names), "all are known")
    eras = host.eras.figures()["eras"]
    assert isinstance(eras, dict)
    assert len(eras) == SHOWN_MAX
    await lab.stop()


async def test_a_clear_while_markers_are_removed_again_has_its_own_time() -> None:
    """What it asks for is not done with what was asked for before."""
    first, second = Era(1, b"1" * 8), Era(2, b"2" * 8)
    known = NamespaceEra(b"n" * 16)
    known.forget(first, 0.0)

    class Agreement:
        async def remove_markers(self, known: NamespaceEra, eras: Any) -> None:
            await asyncio.sleep(0)

    fake: Any = SimpleNamespace(_agreement=Agreement(), sweeps=set())
    look = asyncio.ensure_future(Eras._remove_again(fake, known))
    await asyncio.sleep(0)
    known.forget(second, 1000.0)
    await look
    assert known.again_s is not None
    assert not known.is_due(time.monotonic())
    assert known.is_due(time.monotonic() + 1001)
    assert len(known.unswept) == 2
