"""What is in doubt does not hit, in memory or on disk, and is there again when the doubt is over."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvoffloadd.cache.disk.disktier import find_on_disk
from kvoffloadd.cache.lower.fetches import Urgency
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.confirmed import UNCONFIRMED_MAX_S
from kvoffloadd.cache.memory.doubt import Doubt
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.steppedlookup import SteppedLookup
from kvoffloadd.errors import NotDurableError
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.manifest import read_manifest

from .conftest import Open
from .disktier import HIT, MISS, PENDING, Shape, Tier
from .fakes import keys_of

A, B = (bytes([n]) * 16 for n in (1, 2))


def large(cache: Cache, keyspace: Keyspace, *numbers: int) -> list[int]:
    """Answers as a lookup over several turns does."""
    finding = SteppedLookup(cache, [(keyspace, keys_of(*numbers))])
    list(finding.steps())
    states: list[int] = finding.results()[0].states.tolist()
    finding.release()
    return states


async def with_three_kinds(open_tier: Open) -> tuple[Tier, Keyspace]:
    """Key 1 in memory of this run, key 2 in memory from the disk, key 3 on disk alone."""
    tier = await open_tier()
    keyspace = tier.keyspace(A)
    await tier.store_away(keyspace, 2, 3)
    assert await tier.fetch(keyspace, 2) == [2]
    tier.store(keyspace, 1)
    await tier.quiet()
    assert tier.states(keyspace, 1, 2, 3) == [HIT, HIT, PENDING]
    return tier, keyspace


@pytest.mark.parametrize(
    ("doubt", "states"), [(Doubt.NONE, [HIT, HIT]), (Doubt.INHERITED, [HIT, MISS]), (Doubt.ALL, [MISS, MISS])]
)
async def test_each_doubt(open_tier: Open, doubt: Doubt, states: list[int]) -> None:
    tier, keyspace = await with_three_kinds(open_tier)
    other = tier.keyspace(B)
    tier.store(other, 1)
    keyspace.namespace.doubt = doubt
    assert tier.states(keyspace, 1, 2, 3) == [*states, MISS if doubt else PENDING]
    assert large(tier.cache, keyspace, 1, 2) == states
    found = tier.cache.find_all([(keyspace, keys_of(1, 2)), (other, keys_of(1))])
    assert [result.states.tolist() for result in found] == [states, [HIT]], "another namespace hits"
    assert (found[0].rows >= 0).all(), "it is there, and is not stored twice"
    keyspace.namespace.doubt = Doubt.NONE
    assert tier.states(keyspace, 1, 2, 3) == [HIT, HIT, PENDING]


@pytest.mark.parametrize("doubt", list(Doubt))
async def test_a_question_about_several_groups_finds_nothing_of_one_in_doubt(open_tier: Open, doubt: Doubt) -> None:
    tier = await open_tier()
    keyspaces = [tier.keyspace(name) for name in (A, B)]
    for keyspace in keyspaces:
        await tier.store_away(keyspace, 1)
    keyspaces[0].namespace.doubt = doubt
    groups = [(keyspace, keys_of(1)) for keyspace in keyspaces]
    found = tier.cache.find_all(groups)
    masks = find_on_disk(tier.disk, groups, found)
    assert [mask.tolist() for mask in masks] == [[not doubt], [True]]
    assert [result.states.tolist() for result in found] == [[MISS if doubt else PENDING], [PENDING]]


async def test_what_was_asked_of_the_disk_before_the_doubt_is_not_read(open_tier: Open) -> None:
    tier, keyspace = await with_three_kinds(open_tier)
    ended = asyncio.Event()
    reads = len(tier.files.reads)
    asked = tier.disk.promotion._start
    begun: list[object] = []

    def start(*arguments: object) -> object:
        keyspace.namespace.doubt = Doubt.INHERITED  # it comes between the lookup and the read
        begun.append(arguments)
        return asked(*arguments)  # type: ignore[arg-type]

    tier.disk.promotion._start = start  # type: ignore[assignment, method-assign]
    tier.begin_fetch(keyspace, 3, urgent=Urgency.PIN, done=ended.set)
    await ended.wait()
    assert begun
    assert len(tier.files.reads) == reads
    assert tier.served(keyspace, 3) == []


async def test_a_namespace_that_is_opened_is_in_the_doubt_of_its_name(open_tier: Open) -> None:
    tier = await open_tier()
    tier.cache.doubt_of = lambda fingerprint: Doubt.INHERITED if fingerprint == A else Doubt.NONE
    assert tier.keyspace(A).namespace.doubt is Doubt.INHERITED
    assert tier.keyspace(B).namespace.doubt is Doubt.NONE


# --- what was not confirmed for too long ---


async def confirmed(tier: Tier, at_s: int) -> None:
    tier.cache.confirmed.at_s = at_s
    await tier.disk.clears.save_epochs(tier.roots)


def require(tier: Tier) -> None:
    tier.cache.confirmed.required = True


@pytest.mark.parametrize(
    ("age_s", "required", "kept"),
    [
        (UNCONFIRMED_MAX_S + 60, True, False),
        (UNCONFIRMED_MAX_S - 60, True, True),
        (UNCONFIRMED_MAX_S + 60, False, True),
        (0, True, True),  # it was never confirmed: there was no shared store
    ],
)
async def test_a_disk_that_nobody_confirmed_for_a_month_is_empty(
    open_tier: Open, age_s: int, required: bool, kept: bool
) -> None:
    tier = await open_tier()
    await tier.store_away(tier.keyspace(A), 1, 2)
    if age_s:
        await confirmed(tier, int(time.time()) - age_s)
    await tier.close()
    tier = await open_tier(before=require if required else lambda tier: None)
    assert tier.root.state == RootState.OK
    assert tier.on_disk(tier.keyspace(A), 1, 2) == ([1, 2] if kept else [])
    if not kept:  # what is stored from now on stays, whether the store has confirmed it yet or not
        await tier.store_away(tier.keyspace(A), 3)
        await tier.close()
        tier = await open_tier(before=require)
        assert tier.on_disk(tier.keyspace(A), 3) == [3]


async def test_a_root_that_comes_late_is_not_confirmed_by_looks_from_before(open_tier: Open) -> None:
    """What it has was in no round."""
    now_s, then_s = int(time.time()), int(time.time()) - UNCONFIRMED_MAX_S + 60
    tier = await open_tier()
    await tier.store_away(tier.keyspace(A), 1)
    await confirmed(tier, then_s)
    await tier.close()
    tier = await open_tier(before=lambda tier: setattr(tier.cache.confirmed, "at_s", now_s))
    manifest = await read_manifest(tier.root.path)
    assert manifest is not None
    assert manifest.confirmed_s == then_s
    await confirmed(tier, now_s)
    manifest = await read_manifest(tier.root.path)
    assert manifest is not None
    assert manifest.confirmed_s == now_s


async def test_a_manifest_is_not_written_for_each_confirmation(open_tier: Open) -> None:
    tier = await open_tier()
    now_s = int(time.time())
    await confirmed(tier, now_s)
    written = (tier.root.path / "manifest").stat().st_mtime_ns
    await confirmed(tier, now_s + 3600)
    assert (tier.root.path / "manifest").stat().st_mtime_ns == written
    await confirmed(tier, now_s + 90_000)
    manifest = await read_manifest(tier.root.path)
    assert manifest is not None
    assert manifest.confirmed_s == now_s + 90_000
    await tier.clear()
    manifest = await read_manifest(tier.root.path)
    assert manifest is not None
    assert manifest.confirmed_s == now_s + 90_000, "a clear keeps it"
    await confirmed(tier, now_s)
    manifest = await read_manifest(tier.root.path)
    assert manifest is not None
    assert manifest.confirmed_s == now_s, "the clock was ahead"


# --- numbers of the future ---


async def test_a_root_with_clears_of_the_future_waits_for_the_clock(open_tier: Open) -> None:
    """Nothing is lost: this host's clock may be the wrong one. The other root, and clears, go on."""
    shape = Shape(roots=2)
    tier = await open_tier(shape)
    keyspace = tier.keyspace(A)
    tier.cache.epochs.last = 2 * tier.cache.epochs.clock()  # as a host whose clock is decades ahead
    await tier.clear(keyspace.namespace)
    await tier.store_away(tier.keyspace(A), 1)
    (there,) = [root for root in tier.roots if tier.place(tier.keyspace(A), 1)[0] is root]
    other = next(root for root in tier.roots if root is not there)
    future = tier.cache.epochs.of(A)
    (other.path / "manifest").unlink()  # it knows nothing of this
    await tier.close()
    tier = await open_tier(shape)
    roots = {root.path: root for root in tier.roots}
    assert roots[there.path].state == RootState.OFF
    assert "clock" in roots[there.path].health.reason
    assert roots[other.path].state == RootState.OK
    assert tier.cache.epochs.last < future
    with pytest.raises(NotDurableError, match="not recorded"):
        await tier.clear()
    await tier.close()
    tier = await open_tier(shape, before=lambda tier: setattr(tier.cache.epochs, "last", future))  # the clock is right
    assert {root.path: root for root in tier.roots}[there.path].state == RootState.OK


async def test_records_of_the_future_prove_nothing(open_tier: Open) -> None:
    tier = await open_tier()
    tier.cache.epochs.last = 2 * tier.cache.epochs.clock()
    keyspace = tier.keyspace(A)
    await tier.clear(keyspace.namespace)
    future = tier.cache.epochs.of(A)
    await tier.store_away(tier.keyspace(A), 1)
    await tier.close()
    manifest = tier.root.path / "manifest"
    manifest.unlink()
    tier = await open_tier()
    assert tier.root.state == RootState.OK
    assert tier.cache.epochs.last < future
    assert tier.states(tier.keyspace(A), 1) == [MISS]
    await tier.clear()
