"""Claims that outlive the daemon: saved in each root and beside the arena, restored by the next run."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from kvoffloadd.cache import claimsaver
from kvoffloadd.cache.claimsaver import ClaimSaver
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.claimedkeys import KEYS_MAX
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.savedclaims import PackedClaims, SavedClaims, read_saved_claims
from kvoffloadd.cache.memory.savedstate import read_saved_state
from kvoffloadd.errors import LimitError
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.disk.claimsfile import CLAIMS_NAME, read_claims, write_claims
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.testing.wait import HANG_S

from .conftest import Open
from .disktier import DiskGate, Shape, Tier
from .fakes import keys_of, make_cache
from .test_disk_claims import BIG, pour, retain, turn_over

A, B = b"n" * 16, b"m" * 16
PAGES, SLAB_PAGES = 64, 16


def told(cache: Cache) -> dict[str, tuple[int, int, int, int]]:
    """What clients can see of each claim, by name, but the time that is left."""
    return {
        claim.name: (claim.number, claim.priority, claim.num_keys, claim.tokens) for claim in cache.retention.claims
    }


def left_s(cache: Cache) -> dict[str, float]:
    return {claim.name: claim.ends_s - cache.retention.clock() for claim in cache.retention.claims}


async def saved(tier: Tier) -> None:
    await tier.until(lambda: tier.claims.is_saved)


async def two_claims(tier: Tier) -> Keyspace:
    """Claims of keys on disk: 0 to 9 by one name, 10 to 14 and a key that nobody has stored by another."""
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, 20)
    retain(tier, keyspace, *range(10), name="first", priority=70)
    retain(tier, keyspace, *range(10, 15), 99, name="second", seconds=300.0)
    return keyspace


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves follow one another at once."""
    monkeypatch.setattr(claimsaver, "PAUSE_S", 0.01)


# --- they are kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["close", "drop"])
async def test_claims_outlive_the_daemon_and_go_on_to_keep(open_tier: Open, ends: str) -> None:
    tier = await open_tier(BIG)
    await two_claims(tier)
    before = told(tier.cache)
    await saved(tier)
    await getattr(tier, ends)()

    tier = await open_tier(BIG)
    assert told(tier.cache) == before
    left = left_s(tier.cache)
    assert 540 < left["first"] <= 600
    assert 240 < left["second"] <= 300
    keyspace = tier.keyspace()
    assert tier.cache.retention.disk.totals()[0] == 15  # type: ignore[union-attr]
    await pour(tier, keyspace, 99, 1)
    assert tier.cache.retention.disk.totals()[0] == 16, "a key that comes now is claimed"  # type: ignore[union-attr]
    await turn_over(tier, keyspace, 3)
    assert tier.on_disk(keyspace, *range(20), 99) == [*range(15), 99]
    assert tier.audit() == []


async def test_later_claims_have_higher_numbers_than_restored_ones(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    await two_claims(tier)
    tier.cache.retention.forget([tier.cache.retention.claims[0]])
    await saved(tier)
    await tier.drop()
    tier = await open_tier(BIG)
    assert [claim.number for claim in tier.cache.retention.claims] == [2]
    retain(tier, tier.keyspace(), 1, name="third")
    assert told(tier.cache)["third"][0] == 3


async def test_a_claim_that_has_ended_does_not_come_back(open_tier: Open) -> None:
    tier = await open_tier(BIG)
    await two_claims(tier)
    await saved(tier)
    tier.cache.retention.forget(tier.cache.retention.claims)
    await saved(tier)
    await tier.drop()
    tier = await open_tier(BIG)
    assert told(tier.cache) == {}
    assert tier.cache.namespaces.keys() == set(), "nothing keeps its namespace"


async def test_uses_are_counted_across_restarts(open_tier: Open) -> None:
    tier = await open_tier(BIG, before=lambda tier: tier.cache.retention.change_shares(0.5, 0.5))
    keyspace = await two_claims(tier)
    await tier.fetch(keyspace, *range(10))
    found = tier.cache.find(keyspace, keys_of(*range(10)))
    tier.cache.uses.add([(keyspace, found, 0)])
    tier.cache.uses.settle()
    hits = {claim.name: tier.cache.retention.hits(claim) for claim in tier.cache.retention.claims}
    assert hits["first"] > 0
    await tier.close()
    tier = await open_tier(BIG)
    assert {claim.name: tier.cache.retention.hits(claim) for claim in tier.cache.retention.claims} == hits


async def test_no_clock_makes_a_claim_longer(open_tier: Open) -> None:
    """The smaller of the seconds that were left and the time to its end counts."""
    tier = await open_tier(BIG)
    await two_claims(tier)
    await saved(tier)
    await tier.drop()
    for error_s, left in ((400.0, {"first": 200}), (-10_000.0, {"first": 200}), (10_000.0, {})):

        def set_clock(tier: Tier, error_s: float = error_s) -> None:
            tier.clock_error_s = error_s

        tier = await open_tier(BIG, before=set_clock)
        assert left_s(tier.cache).keys() == left.keys()
        for name, most_s in left.items():
            assert most_s - 60 < left_s(tier.cache)[name] <= most_s
        await saved(tier)
        await tier.drop()


async def test_several_groups_and_a_claim_that_was_cut(open_tier: Open) -> None:
    """Each group's keys keep their positions; of a cut claim, what it kept is left."""
    tier = await open_tier(BIG)
    tier.cache.retention.change_shares(0.0, 0.1)
    namespace = tier.keyspace().namespace
    window = tier.cache.declare(namespace, GroupSchema(1, GroupKind.SLIDING, 32, window_keys=2))
    tier.cache.set_part_bytes(window, {0: PAGE_BYTES})
    full = namespace.keyspaces[0]
    for keyspace in (full, window):
        await pour(tier, keyspace, 0, 30)
    prompt = [(full, 4, keys_of(*range(4, 30))), (window, 2, keys_of(*range(2, 15)))]
    claim = tier.cache.retention.retain(namespace, prompt, priority=9, seconds=60.0, name="x")
    assert claim is not None
    kept = tier.cache.retention.prompt_of(claim)
    assert 0 < sum(len(keys) for _, _, keys in kept) < 39
    assert {keyspace.schema.group: first for keyspace, first, _ in kept} == {0: 4, 1: 2}
    await tier.close()

    tier = await open_tier(BIG, before=lambda tier: tier.cache.retention.change_shares(0.0, 0.1))
    again = tier.cache.retention.prompt_of(tier.cache.retention.claims[0])
    assert [(k.schema.group, first, keys.tolist()) for k, first, keys in again] == [
        (k.schema.group, first, keys.tolist()) for k, first, keys in kept
    ]


# --- memory alone -----------------------------------------------------------------------------------


def successor(cache: Cache) -> Cache:
    """A cache over the same pool, as the next process maps it."""
    pool = ArenaFile(os.dup(cache.tier.pool.fd), PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES, is_old=True)
    return make_cache(PAGES, SLAB_PAGES, pool)


def cache_with(share: float = 0.5) -> tuple[Cache, Keyspace]:
    cache = make_cache(PAGES, SLAB_PAGES)
    cache.retention.memory.share = share
    namespace = cache.open_namespace(A, 0, "test", 32)
    keyspace = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16))
    cache.set_part_bytes(keyspace, {0: PAGE_BYTES})
    return cache, keyspace


def claim(cache: Cache, keyspace: Keyspace, *numbers: int, name: str, priority: int = 50) -> Claim | None:
    prompt = [(keyspace, 0, keys_of(*numbers))]
    return cache.retention.retain(keyspace.namespace, prompt, priority=priority, seconds=600.0, name=name)


async def restored(packed: bytes, cache: Cache) -> Cache:
    """The cache, with these claims."""
    cache.retention.memory.share = 0.5
    saver = ClaimSaver(cache, None, stuck_s=1.0)
    await saver.read(packed, "memory")
    await saver.restore()
    assert cache.retention.check() == []
    return cache


async def test_beside_the_arena_there_is_room_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would lapse first is left out; the others keep their order."""
    cache, keyspace = cache_with()
    saver = ClaimSaver(cache, None, stuck_s=1.0)
    for name, priority in (("low", 1), ("high", 90), ("later", 90), ("small", 0)):
        claim(cache, keyspace, *range(2 if name == "small" else 20), name=name, priority=priority)
    await saver.save()
    whole = cache.saved_claims
    assert told(await restored(whole, make_cache(PAGES, SLAB_PAGES))) == told(cache)
    for most in range(0, len(whole) + 40, 20):
        monkeypatch.setattr(claimsaver, "ARENA_BYTES", most)
        await saver.save()
        assert len(cache.saved_claims) <= max(most, 48)
        names = list(told(await restored(cache.saved_claims, make_cache(PAGES, SLAB_PAGES))))
        assert names in ([], ["small"], ["later"], ["later", "small"], ["high", "later"], ["high", "later", "small"],
                         ["low", "high", "later"], ["low", "high", "later", "small"])  # fmt: skip
    assert len(names) == 4


async def test_the_pool_keeps_them_through_the_saves_of_a_start() -> None:
    """Whatever saves the state before the claims are restored."""
    cache, keyspace = cache_with()
    claim(cache, keyspace, 1, 2, name="x")
    await ClaimSaver(cache, None, stuck_s=1.0).save()
    cache.save_state()
    after = successor(cache)
    state = read_saved_state(after.tier.pool.names())
    assert state is not None
    saver = ClaimSaver(after, None, stuck_s=1.0)
    await saver.inherit(state.claims)
    after.save_state()
    again = read_saved_state(after.tier.pool.names())
    assert again is not None
    assert list(told(await restored(again.claims, after))) == ["x"]


async def test_without_claims_nothing_is_written() -> None:
    cache, keyspace = cache_with()
    saver = ClaimSaver(cache, None, stuck_s=1.0)
    assert await saver.save() == 0
    assert cache.saved_claims == b""
    claim(cache, keyspace, 1, name="x")
    assert not saver.is_saved
    assert await saver.save() > 0


# --- what ends them ---------------------------------------------------------------------------------


async def test_a_clear_ends_them_wherever_they_were_saved(open_tier: Open, tmp_path: Path) -> None:
    """Also where the file from before the clear is put back."""
    tier = await open_tier(BIG)
    keyspace = await two_claims(tier)
    await saved(tier)
    kept = tmp_path / "kept"
    shutil.copy(tier.root.path / CLAIMS_NAME, kept)
    await tier.clear(keyspace.namespace)
    await tier.drop()
    tier = await open_tier(BIG)
    assert told(tier.cache) == {}
    await tier.close()
    shutil.copy(kept, tier.root.path / CLAIMS_NAME)
    tier = await open_tier(BIG)
    assert told(tier.cache) == {}


async def test_a_clear_that_a_late_root_knows_of_ends_restored_claims_alone(open_tier: Open, tmp_path: Path) -> None:
    """The claims of this run are younger than the clear."""
    paths = [tmp_path / "a", tmp_path / "b"]
    tier = await open_tier(BIG, paths=paths)
    await two_claims(tier)
    await saved(tier)
    await tier.close()
    shutil.rmtree(tmp_path / "old", ignore_errors=True)
    shutil.copytree(paths[0], tmp_path / "old")
    tier = await open_tier(BIG, paths=paths)  # clears both
    await tier.clear(tier.keyspace().namespace)
    await tier.close()
    shutil.rmtree(paths[0])
    (tmp_path / "old").rename(paths[0])  # which knows of no clear

    gates: list[Any] = []
    tier = await open_tier(
        Shape(**{**vars(BIG), "stuck_s": 2.0}), paths=paths,
        before=lambda tier: gates.append(tier.files.hang("enter", paths[1])),
    )  # fmt: skip
    assert set(told(tier.cache)) == {"first", "second"}
    retain(tier, tier.keyspace(), 5, name="new")
    gates[0].open()
    await tier.until(lambda: tier.roots[1].state == "ok")
    assert set(told(tier.cache)) == {"new"}


@pytest.mark.parametrize("what", ["missing", "damaged"])
async def test_without_a_manifest_they_are_not_taken_over_now_or_later(open_tier: Open, what: str) -> None:
    tier = await open_tier(BIG)
    await two_claims(tier)
    await tier.close()
    manifest = tier.root.path / "manifest"
    manifest.unlink() if what == "missing" else manifest.write_bytes(b"?" * 99)
    for _ in range(2):
        tier = await open_tier(BIG)
        assert told(tier.cache) == {}
        assert not (tier.root.path / CLAIMS_NAME).exists()
        await tier.close()


# --- several roots, roots that come late, disks that fail --------------------------------------------


async def test_of_two_roots_the_one_that_saved_last_counts(open_tier: Open, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    tier = await open_tier(BIG, paths=paths)
    await two_claims(tier)
    await saved(tier)
    old = (paths[0] / CLAIMS_NAME).read_bytes()
    tier.cache.retention.forget([tier.cache.retention.claims[0]])
    await saved(tier)
    await tier.close()
    for path in paths:
        new = path.joinpath(CLAIMS_NAME).read_bytes()
        path.joinpath(CLAIMS_NAME).write_bytes(old)
        tier = await open_tier(BIG, paths=paths)
        assert list(told(tier.cache)) == ["second"]
        await saved(tier)
        assert (paths[0] / CLAIMS_NAME).read_bytes() == (paths[1] / CLAIMS_NAME).read_bytes() != new
        await tier.close()


async def test_claims_of_a_root_that_comes_late_are_restored_then(open_tier: Open, tmp_path: Path) -> None:
    """Those that were made meanwhile stay, one of them by the same name."""
    tier = await open_tier(BIG)
    await two_claims(tier)
    await tier.close()
    path, gates = tier.root.path, []
    tier = await open_tier(
        Shape(**{**vars(BIG), "stuck_s": 2.0}), before=lambda tier: gates.append(tier.files.hang("enter", path))
    )
    assert told(tier.cache) == {}
    keyspace = tier.keyspace()
    tier.store(keyspace, 50, 51)
    retain(tier, keyspace, 50, name="third")
    retain(tier, keyspace, 51, name="second", priority=3)
    gates[0].open()
    await tier.until(lambda: tier.root.state == "ok")
    found = told(tier.cache)
    assert set(found) == {"first", "second", "third"}
    assert found["second"][1] == 3, "the claim of this run has the name"
    numbers = [claim.number for claim in tier.cache.retention.claims]
    assert numbers == sorted(set(numbers))
    await saved(tier)
    await tier.drop()
    assert told((await open_tier(BIG)).cache) == found


async def test_a_root_that_was_away_brings_no_claim_back_that_has_ended_meanwhile(open_tier: Open) -> None:
    """What it has recorded is of this run, and older than what this run knows."""
    tier = await open_tier(BIG)
    await two_claims(tier)
    await saved(tier)
    path = tier.root.path
    path.rename(path.with_suffix(".away"))
    await tier.until(lambda: tier.root.state == "off" and not tier.root.accepted)
    tier.cache.retention.forget([tier.cache.retention.claims[0]])
    await saved(tier)
    path.with_suffix(".away").rename(path)
    await tier.until(lambda: tier.root.state == "ok")
    assert set(told(tier.cache)) == {"second"}
    await saved(tier)
    await tier.drop()
    assert set(told((await open_tier(BIG)).cache)) == {"second"}


async def test_while_a_root_hangs_no_more_than_one_write_waits_there(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimsaver, "RETRY_S", 0.01)
    tier = await open_tier(Shape(**{**vars(BIG), "stuck_s": 0.2}))
    keyspace = tier.keyspace()
    tier.files.plant("rename_delay_s=30")
    versions = set[int]()

    def many() -> bool:
        retain(tier, keyspace, 1, name="x")
        versions.add(tier.claims._version)
        return len(versions) > 8

    await tier.until(many)
    assert len(tier.root.directory._using) <= 2, "one write of claims, and one health check"
    tier.files.plant("")
    await saved(tier)


@pytest.mark.parametrize("fault", ["write=ENOSPC", "sync=EIO", "rename=EROFS", "open=EMFILE"])
async def test_a_root_that_can_not_record_them_is_tried_again(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(claimsaver, "RETRY_S", 0.05)
    tier = await open_tier(BIG, demote="evict")
    await two_claims(tier)
    await saved(tier)
    tier.files.plant(fault)
    retain(tier, tier.keyspace(), 3, name="third")
    planted = tier.files.planted
    await tier.until(lambda: tier.files.planted > planted + 1)
    assert not tier.claims.is_saved
    tier.files.plant("")
    await saved(tier)
    await tier.drop()
    assert set(told((await open_tier(BIG)).cache)) == {"first", "second", "third"}


async def test_a_root_that_can_not_be_read_costs_its_claims_alone(
    open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    tier = await open_tier(BIG)
    await two_claims(tier)
    await tier.close()
    tier = await open_tier(BIG, before=lambda tier: tier.files.unreadable.add(CLAIMS_NAME))
    assert tier.root.state == "ok"
    assert told(tier.cache) == {}
    assert "claims are not taken over" in caplog.text


# --- between two steps ------------------------------------------------------------------------------


def recorded(path: Path) -> dict[str, int]:
    """The claims in a root's file, with the epoch of each."""
    files = Files()
    fd = files.open_directory(path)
    try:
        found = read_saved_claims(read_claims(files, fd, "here"), "here")
    finally:
        files.close(fd)
    if found is None:
        return {}
    epochs = {keyspace.number: keyspace.epoch for keyspace in found.keyspaces}
    return {one.name: epochs[one.groups[0].keyspace] for one in found.claims}


QUICK = Shape(**{**vars(BIG), "stuck_s": 2.0})


async def late_tier(open_tier: Open, path: Path) -> tuple[Tier, DiskGate]:
    """A tier with a root that comes when the gate opens."""
    gates: list[DiskGate] = []
    tier = await open_tier(QUICK, paths=[path], before=lambda tier: gates.append(tier.files.hang("enter", path)))
    return tier, gates[0]


@pytest.mark.parametrize("turns", range(1, 14, 3))
async def test_claims_that_end_amid_a_save_are_not_saved_in_the_new_epoch(turns: int) -> None:
    cache, keyspace = cache_with()
    saver = ClaimSaver(cache, None, stuck_s=1.0)
    for number in range(12):
        claim(cache, keyspace, number, name=f"{number}")
    saving = asyncio.create_task(saver.save())
    for _ in range(turns):
        await asyncio.sleep(0)
    cache.epochs.advance(A)
    for _ in cache.clear(cache.namespaces[A]):
        pass
    await saving
    found = read_saved_claims(cache.saved_claims, "memory")
    assert found is not None
    assert cache.epochs.of(A) not in [keyspace.epoch for keyspace in found.keyspaces]
    assert not saver.is_saved, "another save is due"
    heir = make_cache(PAGES, SLAB_PAGES)
    heir.epochs.merge(cache.epochs.base, cache.epochs.last, cache.epochs.by_namespace)
    assert told(await restored(cache.saved_claims, heir)) == {}


async def test_groups_of_a_namespace_are_saved_in_one_epoch(open_tier: Open) -> None:
    """A clear that a root knows of raises the epoch between two steps of a save."""
    tier = await open_tier(BIG)
    first = tier.keyspace()
    second = tier.cache.declare(first.namespace, GroupSchema(1, GroupKind.FULL, 16))
    tier.cache.set_part_bytes(second, {0: PAGE_BYTES})
    for keyspace in (first, second):
        for number in range(3):
            prompt = [(keyspace, 0, keys_of(number))]
            tier.cache.retention.retain(
                first.namespace, prompt, priority=5, seconds=600.0, name=f"{number} of {keyspace.id}"
            )
    epoch = tier.cache.epochs.began - 1000
    saving = asyncio.create_task(tier.claims.save())
    for _ in range(4):
        await asyncio.sleep(0)
    await tier.disk.arrivals._merge_epochs(0, epoch, {A: epoch})
    await saving
    await saved(tier)
    assert set(recorded(tier.root.path).values()) == {epoch}
    assert len(recorded(tier.root.path)) == 6


async def test_claims_of_this_run_are_saved_again_in_the_epoch_that_a_late_root_brings(
    open_tier: Open, tmp_path: Path
) -> None:
    tier = await open_tier(BIG)
    retain(tier, tier.keyspace(), 1, name="x")
    await saved(tier)
    epoch = tier.cache.epochs.began - 1000
    await tier.disk.arrivals._merge_epochs(0, epoch, {A: epoch})
    await saved(tier)
    assert recorded(tier.root.path) == {"x": epoch}


def _begin(begun: asyncio.Event, _: float) -> None:
    begun.set()


async def test_a_clear_that_a_root_brings_between_two_steps_of_a_restore_ends_the_rest() -> None:
    """Also while it is merged: the epochs rise last."""
    for rising in (False, True):
        cache = make_cache(PAGES, SLAB_PAGES)
        cache.retention.memory.share = 0.5
        saver = ClaimSaver(cache, None, stuck_s=1.0)
        claims = [claim_facts(number=number, name=f"{number}") for number in range(1, 6)]
        await saver.read(packed(claims=claims), "memory")
        restoring, begun = asyncio.create_task(saver.restore()), asyncio.Event()
        cache.retention.wake = partial(_begin, begun)
        await begun.wait()
        epoch = cache.epochs.began - 1000
        later = cache.epochs.merged(0, epoch, {A: epoch})
        if rising:
            cache.epochs.rising = later
        for _ in cache.drop_older(cache.namespaces[A], epoch):
            pass
        if not rising:
            cache.epochs.merge(0, epoch, {A: epoch})
            cache.namespaces[A].epoch = epoch
        await restoring
        assert told(cache) == {}


async def test_later_claims_of_a_root_that_comes_late_replace_what_was_restored() -> None:
    """What ended, or was changed, before they were saved; but not what this run has changed."""
    cache = make_cache(PAGES, SLAB_PAGES)
    cache.retention.memory.share = 0.5
    saver = ClaimSaver(cache, None, stuck_s=1.0)
    names = ["", "changed", "ended", "forgotten", "extended", ""]
    earlier = [claim_facts(number=number, name=name) for number, name in enumerate(names, 1)]
    await saver.read(packed(claims=earlier, version=7), "one root")
    await saver.restore()
    now = {one.name: one for one in cache.retention.claims}
    cache.retention.forget([now["forgotten"]])
    cache.retention.extend([now["extended"], now[""]], 60.0, 3)  # of those without a name the last
    later = [claim_facts(number=number, name=name, priority=90) for number, name in enumerate(names, 1) if number != 3]
    await saver.read(packed(claims=later, version=8), "another root")
    await saver.read(packed(claims=earlier, version=6), "an old root")
    priorities = [(one.name, one.priority) for one in cache.retention.claims]
    assert priorities == [("extended", 3), ("", 3), ("", 90), ("changed", 90)]
    cache.retention.expire()
    assert cache.retention.check() == []


async def test_a_number_that_another_run_has_given_is_another_claim() -> None:
    """Runs without a root in common count from one."""
    cache = make_cache(PAGES, SLAB_PAGES)
    cache.retention.memory.share = 0.5
    saver = ClaimSaver(cache, None, stuck_s=1.0)
    await saver.read(packed(claims=[claim_facts(name="x")], version=7), "one root")
    await saver.restore()
    cache.retention.forget(cache.retention.claims)
    await saver.read(packed(claims=[claim_facts(name="y")], version=8), "another root")
    assert list(told(cache)) == ["y"]


async def test_a_root_that_comes_late_is_read_before_it_is_written_to(open_tier: Open, tmp_path: Path) -> None:
    """Another root's records may come into the catalog in the meantime."""
    tier = await open_tier(QUICK, paths=[tmp_path / "a"])
    await two_claims(tier)
    await tier.close()
    tier, gate = await late_tier(open_tier, tmp_path / "a")
    keyspace = tier.keyspace()
    tier.store(keyspace, 50)
    async with tier.disk.arrivals._changing:
        gate.open()
        await tier.until(lambda: tier.root.accepted)
        retain(tier, keyspace, 50, name="third")
        await saved(tier)
    await tier.until(lambda: tier.root.state == "ok")
    assert set(told(tier.cache)) == {"first", "second", "third"}
    await saved(tier)
    assert set(recorded(tier.root.path)) == {"first", "second", "third"}


async def test_a_new_root_that_comes_late_has_the_claims_at_once(open_tier: Open, tmp_path: Path) -> None:
    tier, gate = await late_tier(open_tier, tmp_path / "a")
    names = tier.files.hang("names", tmp_path / "a")
    keyspace = tier.keyspace()
    tier.store(keyspace, 1)
    retain(tier, keyspace, 1, name="x")
    gate.open()
    await tier.until(names.entered.is_set)
    await saved(tier)
    names.open()
    await tier.until(lambda: tier.root.state == "ok")
    await saved(tier)
    assert set(recorded(tmp_path / "a")) == {"x"}


async def test_no_half_of_the_restored_claims_is_saved(open_tier: Open, tmp_path: Path) -> None:
    """Whenever it is killed amid a late restore."""
    tier = await open_tier(QUICK, paths=[tmp_path / "a"])
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, 5)
    for number in range(200):
        retain(tier, keyspace, number, name=f"{number}")
    await saved(tier)
    await tier.close()
    tier, gate = await late_tier(open_tier, tmp_path / "a")
    gate.open()
    sizes = set[int]()

    def is_over() -> bool:
        sizes.add(len(recorded(tmp_path / "a")))
        return tier.root.state == "ok" and tier.claims.is_saved

    await tier.until(is_over)
    assert sizes == {200}


async def test_a_save_amid_a_restore_waits_for_it() -> None:
    """Some client makes a claim meanwhile."""
    cache = make_cache(PAGES, SLAB_PAGES)
    cache.retention.memory.share = 0.5
    saver = ClaimSaver(cache, None, stuck_s=1.0)
    claims = [claim_facts(number=number, name=f"{number}") for number in range(1, 9)]
    await saver.read(packed(claims=claims), "memory")
    restoring, begun = asyncio.create_task(saver.restore()), asyncio.Event()
    cache.retention.wake = partial(_begin, begun)
    await begun.wait()
    assert 0 < len(cache.retention.claims) < 8
    await saver.save()
    assert len(told(await restored(cache.saved_claims, make_cache(PAGES, SLAB_PAGES)))) == 8
    await restoring


async def test_a_root_that_hangs_delays_no_other(open_tier: Open, tmp_path: Path) -> None:
    """One save waits for it, until it is known to hang."""
    paths = [tmp_path / "a", tmp_path / "b"]
    tier = await open_tier(Shape(**{**vars(BIG), "stuck_s": 60.0}), paths=paths)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, 5)
    gate, rename = threading.Event(), tier.files.rename

    def slow(dir_fd: int, old: str, new: str) -> None:
        if new == CLAIMS_NAME and os.readlink(f"/proc/self/fd/{dir_fd}") == str(paths[1]):
            gate.wait(HANG_S)
        rename(dir_fd, old, new)

    def is_recorded(name: str) -> bool:
        return name in recorded(paths[0])

    tier.files.rename = slow  # type: ignore[method-assign]
    try:
        tier.claims._stuck_s = 0.2
        for number in range(4):
            retain(tier, keyspace, number, name=f"{number}")
            await tier.until(partial(is_recorded, f"{number}"))
        assert not tier.claims.is_saved
        tier.roots[1].health.become("off", "it hangs")
        retain(tier, keyspace, 4, name="4")
        await saved(tier)
    finally:
        gate.set()


@pytest.mark.parametrize("is_off", [False, True])
async def test_at_the_end_a_root_that_hangs_costs_the_others_nothing(
    open_tier: Open, tmp_path: Path, is_off: bool
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    tier = await open_tier(Shape(**{**vars(BIG), "stuck_s": 60.0}), paths=paths)
    keyspace = tier.keyspace()
    await pour(tier, keyspace, 0, 5)
    gate, hangs, rename = threading.Event(), asyncio.Event(), tier.files.rename

    def slow(dir_fd: int, old: str, new: str) -> None:
        if new == CLAIMS_NAME and os.readlink(f"/proc/self/fd/{dir_fd}") == str(paths[1]):
            tier.loop.call_soon_threadsafe(hangs.set)
            gate.wait(HANG_S)
        rename(dir_fd, old, new)

    tier.files.rename = slow  # type: ignore[method-assign]
    try:
        retain(tier, keyspace, 1, name="first")
        await hangs.wait()
        if is_off:
            tier.roots[1].health.become("off", "it hangs")
        retain(tier, keyspace, 2, name="second")
        await tier.claims.close(1.0)
        assert set(recorded(paths[0])) == {"first", "second"}
        beside = read_saved_claims(tier.cache.saved_claims, "memory")
        assert beside is not None and len(beside.claims) == 2
    finally:
        gate.set()


@pytest.mark.parametrize("error", [MemoryError(), LimitError("no room")])
async def test_the_last_save_may_fail_and_the_rest_is_closed_all_the_same(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    tier = await open_tier(BIG)

    def settle(self: PackedClaims, current: Any) -> None:
        raise error

    monkeypatch.setattr(PackedClaims, "settle", settle)
    retain(tier, tier.keyspace(), 1, name="x")
    await tier.close()
    assert "the last claims could not be saved everywhere" in caplog.text


async def test_a_change_in_the_turn_of_a_retry_is_saved_everywhere(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have come when the loop goes on."""
    monkeypatch.setattr(claimsaver, "RETRY_S", 0.2)
    tier = await open_tier(BIG)
    keyspace, loop = tier.keyspace(), asyncio.get_running_loop()
    retain(tier, keyspace, 1, name="first")
    await saved(tier)
    asked: list[Any] = []
    save = tier.claims.save

    async def watched(roots: Any = None) -> int:
        asked.append(roots)
        return await save(roots)

    monkeypatch.setattr(tier.claims, "save", watched)
    monkeypatch.setattr(claimsaver, "PAUSE_S", 0.0)
    tier.claims._failed.add(tier.root)
    retain(tier, keyspace, 2, name="second")
    await tier.until(lambda: asked)
    tier.claims._failed.add(tier.root)

    def both() -> None:
        time.sleep(0.3)  # the timeout is over, too, when the loop looks
        retain(tier, keyspace, 3, name="third")

    loop.call_later(0.1, both)
    await tier.until(lambda: "third" in told(tier.cache) and tier.claims.is_saved)
    assert "third" in recorded(tier.root.path)


async def test_sizes_that_become_known_later_are_saved() -> None:
    cache, _ = cache_with()
    saver = ClaimSaver(cache, None, stuck_s=1.0)
    keyspace = cache.declare(cache.namespaces[A], GroupSchema(1, GroupKind.FULL, 16, parts=2))
    cache.set_part_bytes(keyspace, {0: PAGE_BYTES})
    assert claim(cache, keyspace, 1, name="x")
    await saver.save()
    found = read_saved_claims(cache.saved_claims, "memory")
    assert found is not None and found.claims == []
    assert not saver.is_saved, "it can't be saved yet"
    cache.set_part_bytes(keyspace, {1: PAGE_BYTES})
    assert saver._is_due.is_set()
    await saver.save()
    assert saver.is_saved
    assert list(told(await restored(cache.saved_claims, make_cache(PAGES, SLAB_PAGES)))) == ["x"]


@pytest.mark.parametrize("error", [MemoryError(), LimitError("no room")])
async def test_a_save_that_fails_is_repeated(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(claimsaver, "RETRY_S", 0.01)
    tier = await open_tier(BIG)
    real, failures = PackedClaims.settle, [error, error]

    def settle(self: PackedClaims, current: Any) -> None:
        if failures:
            raise failures.pop()
        real(self, current)

    monkeypatch.setattr(PackedClaims, "settle", settle)
    retain(tier, tier.keyspace(), 1, name="x")
    await saved(tier)
    assert not failures
    assert set(recorded(tier.root.path)) == {"x"}


async def test_one_users_claims_do_not_void_those_of_others(open_tier: Open) -> None:
    """What memory keeps of one claim and the disk of another may be more than either names."""

    def shares(tier: Tier) -> None:
        tier.cache.retention.change_shares(0.02, 0.5)

    tier = await open_tier(BIG, before=shares)
    retention, keyspace = tier.cache.retention, tier.keyspace()
    other = tier.cache.open_namespace(B, 1000, "theirs", 32)
    theirs = tier.cache.declare(other, GroupSchema(0, GroupKind.FULL, 16))
    tier.cache.set_part_bytes(theirs, {0: PAGE_BYTES})
    half = KEYS_MAX // 2 - 100
    many = np.arange(8 * half, dtype=np.uint64).reshape(-1, 4)
    many[:20] = keys_of(*range(20))
    tier.store(keyspace, *range(20))
    for name, keys in (("cut in memory", many[:half]), ("on disk", many[half:])):
        prompt = [(keyspace, 0, keys)]
        assert retention.retain(keyspace.namespace, prompt, priority=len(name), seconds=600.0, name=name)
        await tier.quiet()
    assert retention.retain(other, [(theirs, 0, keys_of(*range(200)))], priority=90, seconds=600.0, name="theirs")
    await saved(tier)
    await tier.drop()
    tier = await open_tier(BIG, before=shares)
    assert "theirs" in told(tier.cache)


async def test_no_group_is_opened_for_a_claim_that_is_over() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    namespace = cache.open_namespace(A, 0, "test", 32)
    over = [claim_facts(groups=[[6, 0, TWO_KEYS]], ends_s=1e9)]
    await restored(packed([keyspace_facts(5), keyspace_facts(6)], over), cache)
    assert namespace.keyspaces == {}


# --- files that are not as they were written ------------------------------------------------------------


def test_any_change_of_the_file_is_noticed(tmp_path: Path, seed: int) -> None:
    files, rng = Files(), np.random.default_rng(seed)
    fd = files.open_directory(tmp_path)
    try:
        assert read_claims(files, fd, "here") == b""
        packed = [rng.bytes(100), b"", rng.bytes(30)]
        write_claims(files, fd, packed)
        assert read_claims(files, fd, "here") == b"".join(packed)
        path = tmp_path / CLAIMS_NAME
        whole = path.read_bytes()
        changes = [whole[:cut] for cut in range(len(whole))] + [whole + b"\0"]
        changes += [
            whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :]
            for at in range(len(whole))
            if not 12 <= at < 16  # bytes without a meaning
        ]
        for changed in changes:
            path.write_bytes(changed)
            assert read_claims(files, fd, "here") == b""
        assert not list(tmp_path.glob("*.new"))
    finally:
        files.close(fd)


async def test_a_damaged_file_costs_the_claims_and_is_replaced(
    open_tier: Open, caplog: pytest.LogCaptureFixture
) -> None:
    tier = await open_tier(BIG)
    await two_claims(tier)
    await tier.close()
    (tier.root.path / CLAIMS_NAME).write_bytes(b"KVOCLMS\n" + bytes(200))
    tier = await open_tier(BIG)
    assert "its claims are not taken over: the file has version 0" in caplog.text
    assert told(tier.cache) == {}
    retain(tier, tier.keyspace(), 1, name="x")
    await saved(tier)
    await tier.drop()
    assert set(told((await open_tier(BIG)).cache)) == {"x"}


def keyspace_facts(number: int = 5, **changes: Any) -> list[Any]:
    """A keyspace as it is packed, with some fields changed."""
    facts = {
        "number": number, "fingerprint": A, "uid": 0, "label": "test", "key_bytes": 32, "epoch": 0, "group": number,
        "kind": "full", "tokens_per_key": 16, "window_keys": 0, "blocks_per_key": 1, "parts": 1,
        "part_bytes": [PAGE_BYTES],
    }  # fmt: skip
    return list((facts | changes).values())


def claim_facts(**changes: Any) -> list[Any]:
    facts = {
        "number": 1, "name": "x", "priority": 50, "left_s": 600.0, "ends_s": 9e9, "hits": 0,
        "groups": [[5, 0, keys_of(1, 2).tobytes()]],
    }  # fmt: skip
    return list((facts | changes).values())


def packed(keyspaces: list[Any] | None = None, claims: list[Any] | None = None, version: Any = 7) -> bytes:
    keyspaces = [keyspace_facts()] if keyspaces is None else keyspaces
    claims = [claim_facts()] if claims is None else claims
    found: bytes = msgpack.packb([version, b"r" * 16, keyspaces, claims])
    return found


TWO_KEYS = keys_of(1, 2).tobytes()
TOO_MANY = np.arange(4 * (KEYS_MAX + 1), dtype=np.uint64).tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        packed(version=-1),
        packed(version=1 << 53),
        packed(keyspaces=[keyspace_facts(), keyspace_facts()]),
        packed(keyspaces=[keyspace_facts(part_bytes=[])]),
        packed(claims=[claim_facts(number=0)]),
        packed(claims=[claim_facts(priority=101)]),
        packed(claims=[claim_facts(name="x" * 129)]),
        packed(claims=[claim_facts(left_s=-1.0)]),
        packed(claims=[claim_facts(left_s=float("nan"))]),
        packed(claims=[claim_facts(ends_s=float("inf"))]),
        packed(claims=[claim_facts(hits=-1)]),
        packed(claims=[claim_facts(groups=[])]),
        packed(claims=[claim_facts(groups=[[5, -1, TWO_KEYS]])]),
        packed(claims=[claim_facts(groups=[[5, 1 << 48, TWO_KEYS]])]),
        packed(claims=[claim_facts(groups=[[5, 0, b""]])]),
        packed()[:-1],
        b"\xc1",
        b"\x91" * 5000,
    ],
)
async def test_claims_that_are_not_packed_so_are_not_taken_over(wrong: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert read_saved_claims(wrong, "there") is None
    assert "there: the claims of the previous run are damaged" in caplog.text
    assert told(await restored(wrong, make_cache(PAGES, SLAB_PAGES))) == {}


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        (packed(), ["x"]),
        (packed([keyspace_facts(epoch=1)]), []),
        (packed([keyspace_facts(part_bytes=[0])]), []),
        (packed([keyspace_facts(part_bytes=[(SLAB_PAGES + 1) * PAGE_BYTES])]), []),
        (packed(claims=[claim_facts(ends_s=1e9)]), []),
        (packed(claims=[claim_facts(left_s=0)]), []),
        (packed(keyspaces=[]), []),
        (packed(claims=[claim_facts(), claim_facts()]), ["x"]),
        (packed(claims=[claim_facts(number=2), claim_facts(name="y")]), ["x", "y"]),
        (packed(claims=[claim_facts(groups=[[6, 0, TWO_KEYS]])]), []),
        (packed(claims=[claim_facts(groups=[[5, 0, TWO_KEYS[1:]]])]), []),
        (packed(claims=[claim_facts(groups=[[5, 0, TWO_KEYS], [5, 2, TWO_KEYS]])]), []),
        (packed([keyspace_facts(), keyspace_facts(6, fingerprint=B)],
                [claim_facts(groups=[[5, 0, TWO_KEYS], [6, 0, TWO_KEYS]]), claim_facts(number=2, name="y")]), ["y"]),
        (packed(claims=[claim_facts(name="y"), claim_facts(number=2, groups=[[5, 0, TOO_MANY]])]), ["y"]),
        (packed(claims=[claim_facts(groups=[[5, 0, keys_of(1, 1).tobytes()]])]), []),
        (packed([keyspace_facts(), keyspace_facts(6, epoch=0, part_bytes=[0])],
                [claim_facts(groups=[[5, 0, TWO_KEYS], [6, 0, TWO_KEYS]])]), ["x"]),
    ],
)  # fmt: skip
async def test_what_can_not_be_claimed_now_is_left_out(facts: bytes, names: list[str]) -> None:
    cache = await restored(facts, make_cache(PAGES, SLAB_PAGES))
    assert list(told(cache)) == names
    assert cache.namespaces.check() == []
    assert bool(cache.namespaces.find(A)) == bool(names), "no namespace is left open"


@pytest.mark.parametrize(
    "here",
    [
        {"uid": 1000},
        {"key_bytes": 16},
        {"tokens_per_key": 32},
        {"part_bytes": 2 * PAGE_BYTES},
    ],
)
async def test_a_namespace_that_is_another_one_now_gets_no_claims(here: dict[str, int]) -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    namespace = cache.open_namespace(A, here.get("uid", 0), "test", here.get("key_bytes", 32))
    keyspace = cache.declare(namespace, GroupSchema(5, GroupKind.FULL, here.get("tokens_per_key", 16)))
    cache.set_part_bytes(keyspace, {0: here.get("part_bytes", PAGE_BYTES)})
    assert told(await restored(packed(), cache)) == {}
    assert namespace.sessions == 1


async def test_more_groups_than_a_user_may_have_are_not_opened() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    cache.entries.keyspaces.groups_max = 1
    both = [claim_facts(groups=[[5, 0, TWO_KEYS], [6, 0, TWO_KEYS]])]
    await restored(packed([keyspace_facts(), keyspace_facts(6)], both), cache)
    assert [keyspace.schema.group for keyspace in cache.namespaces[A].keyspaces.values()] == [5]
    assert told(cache)["x"][2] == 2


def test_the_pieces_are_what_is_read(seed: int) -> None:
    cache, keyspace = cache_with()
    made = PackedClaims()
    for number in range(3):
        assert claim(cache, keyspace, *range(number + 1), name=f"{number}", priority=number) is not None
    for one in cache.retention.claims:
        made.add(one, cache.retention.prompt_of(one), 4, 60.0, 1e9)
    made.settle(cache.retention.claims)
    pieces, is_whole = made.pieces(5, b"r" * 16, 1 << 20)
    assert is_whole and not made.pieces(5, b"r" * 16, 300)[1]
    found = read_saved_claims(b"".join(pieces), "there")
    assert isinstance(found, SavedClaims)
    assert (found.version, [keyspace.fingerprint for keyspace in found.keyspaces]) == (5, [A])
    assert [(c.number, c.name, c.priority, c.left_s, c.ends_s, c.hits) for c in found.claims] == [
        (number + 1, f"{number}", number, 60.0, 1e9 + 60, 4) for number in range(3)
    ]
    assert [c.groups[0].keys for c in found.claims] == [keys_of(*range(n + 1)).tobytes() for n in range(3)]


async def test_a_clear_between_two_steps_of_a_restore_ends_what_is_restored() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    cache.retention.memory.share = 0.5
    saver = ClaimSaver(cache, None, stuck_s=1.0)
    claims = [claim_facts(number=number, name=f"{number}") for number in range(1, 6)]
    await saver.read(packed(claims=claims), "memory")
    restoring, begun = asyncio.create_task(saver.restore()), asyncio.Event()
    cache.retention.wake = lambda _: begun.set()
    await begun.wait()
    cache.epochs.advance(A)
    for _ in cache.clear(cache.namespaces[A]):
        pass
    await restoring
    assert told(cache) == {}
    cache.retention.expire()
    assert cache.namespaces.find(A) is None, "nothing keeps it"
