"""What a successor takes over from an arena, and what it leaves: see also the stateful test."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

from kvoffloadd.cache import clearing
from kvoffloadd.cache.claimsaver import ClaimSaver
from kvoffloadd.cache.clearing import Clearings, clear_here
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import CacheTornError
from kvoffloadd.cache.memory.composition import Composition
from kvoffloadd.cache.memory.epochs import RECALLED_MAX_US, unix_time_us
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.memory.savedstate import SavedState, read_saved_state
from kvoffloadd.cache.warm_restart import adopt
from kvoffloadd.config import Config
from kvoffloadd.daemon import Daemon
from kvoffloadd.model import EPOCH_MAX, PAGE_BYTES, PARTS_PER_KEY_MAX, GroupKind, GroupSchema, U64Array
from kvoffloadd.storage import arenafile as pool_module
from kvoffloadd.storage.arenafile import ArenaFile

from .fakes import keys_of, make_cache, make_keyspace, store

PAGES, SLAB_PAGES = 64, 16
NAME = b"n" * 16


def heir(cache: Cache, **changes: int) -> tuple[Cache, SavedState]:
    """What a daemon starts with after this cache's process was killed; the estate with these changes."""
    pool = ArenaFile(os.dup(cache.tier.pool.fd), PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES, is_old=True)
    successor = make_cache(PAGES, SLAB_PAGES, pool)
    saved = read_saved_state(pool.names()) or SavedState(0, 0, {}, [])
    successor.epochs.merge(
        changes.get("base", saved.base), changes.get("last", saved.last), saved.epochs if not changes else {}
    )
    return successor, saved


def hits(cache: Cache, keys: U64Array, pages: tuple[int, ...] = (1,)) -> list[bool]:
    """Returns which of the keys hit, as a worker that registers anew would learn."""
    found: list[bool] = cache.find(make_keyspace(cache, NAME, pages=pages)[1], keys).hits.tolist()
    return found


def test_what_was_sealed_is_taken_over() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    keyspace = make_keyspace(cache, NAME)[1]
    store(cache, keyspace, keys_of(1, 2, 3))
    store(cache, keyspace, keys_of(4), seals=False)
    reserve(cache, keyspace, keys_of(5), np.array([0], np.uint16), 0)
    after, saved = heir(cache)
    assert len(adopt(after, saved)) == 3
    assert check(after, 0, 0) == []
    assert hits(after, keys_of(1, 2, 3, 4, 5)) == [True, True, True, False, False]
    figures = after.figures()
    assert (figures["keys_adopted"], figures["parts_not_adopted"]) == (3, 0)


def test_nothing_is_taken_over_twice() -> None:
    """If not all parts of a key were there, nothing of it is left for the successor's successor."""
    cache = make_cache(PAGES, SLAB_PAGES)
    keyspace = make_keyspace(cache, NAME, pages=(1, 2))[1]
    store(cache, keyspace, keys_of(1), [0])
    store(cache, keyspace, keys_of(2), [1])
    store(cache, keyspace, keys_of(3))
    after, saved = heir(cache)
    assert len(adopt(after, saved)) == 1
    assert after.figures()["parts_not_adopted"] == 2
    assert check(after, 0, 0) == []
    again, saved = heir(after)
    assert len(adopt(again, saved)) == 1
    assert again.figures()["parts_not_adopted"] == 0
    assert hits(again, keys_of(1, 2, 3), (1, 2)) == [False, False, True]


def test_what_was_dropped_while_a_lease_held_it() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    keyspace = make_keyspace(cache, NAME)[1]
    store(cache, keyspace, keys_of(1, 2))
    rows = cache.find(keyspace, keys_of(1, 2)).hit_rows
    cache.hold(rows)
    cache.drop(rows[:1])
    after, saved = heir(cache)
    adopt(after, saved)
    assert hits(after, keys_of(1, 2)) == [False, True]


def test_a_late_checksum_of_what_was_dropped() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    keyspace = make_keyspace(cache, NAME)[1]
    parts = store(cache, keyspace, keys_of(1), seals=False)
    rows = cache.find(keyspace, keys_of(1)).hit_rows
    cache.hold(rows)
    cache.drop(rows)
    cache.seal(parts, cache.entries.parts.generation[parts], np.zeros((1, 2), np.uint64))
    after, saved = heir(cache)
    assert len(adopt(after, saved)) == 0


def test_late_checksums_of_which_one_is_of_what_was_dropped() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    keyspace = make_keyspace(cache, NAME)[1]
    parts = store(cache, keyspace, keys_of(1, 2), seals=False)
    rows = cache.find(keyspace, keys_of(1, 2)).hit_rows
    cache.hold(rows)
    cache.drop(rows[:1])
    cache.seal(parts, cache.entries.parts.generation[parts], np.zeros((2, 2), np.uint64))
    after, saved = heir(cache)
    adopt(after, saved)
    assert hits(after, keys_of(1, 2)) == [False, True]


def test_a_clear_holds_from_its_first_step_on() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    namespace, keyspace = make_keyspace(cache, NAME)
    store(cache, keyspace, keys_of(1))
    cache.epochs.advance(NAME)
    next(cache.clear(namespace))
    cache.save_state()
    store(cache, namespace.keyspaces[0], keys_of(2))
    after, saved = heir(cache)
    adopt(after, saved)
    assert hits(after, keys_of(1, 2)) == [False, True]
    assert check(after, 0, 0) == []


def clear_for_a_client(cache: Cache) -> None:
    Clearings(cache, None, None, killed).begin(frozenset([NAME]))


def clear_everything(cache: Cache) -> None:
    Clearings(cache, None, None, killed).begin(None)


def clear_for_another_host(cache: Cache) -> None:
    clear_here(cache, None, NAME, None).send(None)


class KilledError(Exception):
    """What a process does when it is killed, in a test: nothing more."""


def killed(*_: Any) -> Any:
    raise KilledError


@pytest.mark.parametrize("clear", [clear_for_a_client, clear_everything, clear_for_another_host])
def test_a_clear_is_saved_before_its_first_slot_is_freed(
    monkeypatch: pytest.MonkeyPatch, clear: Callable[[Cache], None]
) -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_keyspace(cache, NAME)[1], keys_of(1))
    monkeypatch.setattr(clearing, "in_turns", killed)
    with pytest.raises((KilledError, CacheTornError)):
        clear(cache)
    after, saved = heir(cache)
    assert len(adopt(after, saved)) == 0
    assert hits(after, keys_of(1)) == [False]
    assert after.epochs == cache.epochs


async def take_over(pool: ArenaFile, cache: Cache, disk: Any = None) -> None:
    """Does what a daemon does that has made this cache over this pool."""
    absent: Any = None
    daemon: Any = Daemon(Config(), absent, absent, absent, pool, absent, {}, absent)
    claims = ClaimSaver(cache, None, stuck_s=1.0)
    await daemon._take_over_keys(SimpleNamespace(cache=cache, disk=disk, claims=claims, spawn=None))


async def test_a_daemon_leaves_memory_that_knows_of_clears_of_the_future() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    keyspace = make_keyspace(cache, NAME)[1]
    store(cache, keyspace, keys_of(1))
    for last, taken in ((unix_time_us() + RECALLED_MAX_US // 2, True), (EPOCH_MAX, False)):
        cache.epochs.last = last
        cache.save_state()
        after, _ = heir(cache, base=0, last=0)
        await take_over(after.tier.pool, after)
        assert after.epochs.last == (last if taken else 0)
        assert hits(after, keys_of(1)) == [taken]


async def test_a_new_pool_knows_of_the_clears_that_disks_have_recorded() -> None:
    """A successor may start without these disks, and with others."""
    cache = make_cache(PAGES, SLAB_PAGES)

    async def start(_: object) -> None:
        cache.epochs.merge(7, 9, {NAME: 9})

    await take_over(cache.tier.pool, cache, SimpleNamespace(start=start))
    saved = heir(cache)[1]
    assert (saved.base, saved.last, saved.epochs) == (7, 9, {NAME: 9})


def test_a_clear_that_only_the_disk_remembers() -> None:
    """It was made while this arena was out of use."""
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_keyspace(cache, NAME)[1], keys_of(1))
    after, saved = heir(cache, base=7, last=7)
    assert len(adopt(after, saved)) == 0
    assert hits(after, keys_of(1)) == [False]
    assert check(after, 0, 0) == []


def test_without_names_nothing_is_anybody_s() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_keyspace(cache, NAME)[1], keys_of(1))
    cache.tier.pool.save_names(b"")
    pool = ArenaFile(os.dup(cache.tier.pool.fd), PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES, is_old=True)
    after = make_cache(PAGES, SLAB_PAGES, pool)
    assert read_saved_state(pool.names()) is None
    assert len(adopt(after, None)) == 0
    assert after.figures()["parts_not_adopted"] == 1
    assert after.tier.num_free(1) == PAGES
    assert check(after, 0, 0) == []


def test_a_place_that_changed_its_size() -> None:
    """A record with another size than its slab belongs to no key."""
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_keyspace(cache, NAME)[1], keys_of(1, 2))
    cache.tier.pool.slabs[0] = 2
    after, saved = heir(cache)
    assert len(adopt(after, saved)) == 0
    assert check(after, 0, 0) == []


def test_the_latest_go_last() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    keyspace = make_keyspace(cache, NAME)[1]
    for key in (5, 3, 9):
        store(cache, keyspace, keys_of(key))
    after, saved = heir(cache)
    rows = adopt(after, saved)
    assert after.entries.index.keys[rows, 1].tolist() == [5, 3, 9]


def test_names_are_written_before_a_key_is_and_not_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    written = []
    save = cache.tier.pool.save_names

    def count(names: bytes) -> bool:
        written.append(names)
        return save(names)

    monkeypatch.setattr(cache.tier.pool, "save_names", count)
    keyspaces = [make_keyspace(cache, NAME, group=group)[1] for group in range(50)]
    assert written == [], "nobody has a key yet"
    store(cache, keyspaces[0], keys_of(1), seals=False)
    assert written == []
    store(cache, keyspaces[0], keys_of(2))
    assert len(written) == 1
    for keyspace in keyspaces:
        store(cache, keyspace, keys_of(3))
    assert len(written) == 1, "nothing has changed"
    store(cache, make_keyspace(cache, NAME, group=50)[1], keys_of(3))
    assert len(written) == 2
    after, saved = heir(cache)
    assert len(adopt(after, saved)) == 52


def test_a_number_that_changed_hands_before_any_key_was_sealed() -> None:
    """A successor finds the names of the namespaces that the keys belong to, not of one that had the number before,
    even if the new one has declared only some of its sizes.
    """
    cache = make_cache(PAGES, SLAB_PAGES)
    old, keyspace = make_keyspace(cache, NAME)
    store(cache, keyspace, keys_of(1))
    rows = cache.find(keyspace, keys_of(1)).hit_rows
    cache.drop(rows)
    number = keyspace.id
    cache.close_namespace(old)
    del old, keyspace
    cache.entries.keyspaces._next = number
    other = cache.open_namespace(b"o" * 16, 0, "test", 32)
    half = cache.declare(other, GroupSchema(0, GroupKind.FULL, 16, parts=2))
    cache.set_part_bytes(half, {0: PAGE_BYTES})
    assert half.id == number
    store(cache, half, keys_of(1), [0])
    after, saved = heir(cache)
    assert len(adopt(after, saved)) == 0
    assert hits(after, keys_of(1)) == [False]


def test_names_that_are_too_many_are_left_out_by_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """One user's restarts are cold then, not everybody's."""
    monkeypatch.setattr(pool_module, "NAMES_BYTES", 4000)
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_keyspace(cache, NAME)[1], keys_of(1))
    many = cache.open_namespace(b"m" * 16, 7, "test", 32)
    for group in range(100):
        keyspace = cache.declare(many, GroupSchema(group, GroupKind.FULL, 16))
        cache.set_part_bytes(keyspace, {0: PAGE_BYTES})
    store(cache, keyspace, keys_of(2))
    after, saved = heir(cache)
    assert len(adopt(after, saved)) == 1
    assert hits(after, keys_of(1)) == [True]
    assert check(after, 0, 0) == []


def test_clears_that_are_too_many_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing may be found again without them."""
    monkeypatch.setattr(pool_module, "NAMES_BYTES", 4000)
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_keyspace(cache, NAME)[1], keys_of(1))
    cache.epochs.merge(0, 500, {number.to_bytes(16): number for number in range(1, 500)})
    for _ in range(2):
        cache.save_state()
    assert caplog.messages == ["memory: there are too many clears to record: a restart will be cold for all"]
    after, saved = heir(cache)
    assert len(adopt(after, saved)) == 0


@pytest.mark.parametrize("groups", [1, 3])
def test_the_successor_goes_on(groups: int) -> None:
    """It stores, evicts and is succeeded as if it had stored all of it itself."""
    cache = make_cache(PAGES, SLAB_PAGES)
    for group in range(groups):
        store(cache, make_keyspace(cache, NAME, group=group)[1], keys_of(*range(20)))
    after, saved = heir(cache)
    assert len(adopt(after, saved)) == 20 * groups
    for group in range(groups):
        store(after, make_keyspace(after, NAME, group=group)[1], keys_of(*range(100, 150)))
        assert check(after, 0, 0) == []
    assert after.eviction.keys_evicted > 0
    again, saved = heir(after)
    assert len(adopt(again, saved)) == PAGES
    assert check(again, 0, 0) == []


def test_a_row_that_is_used_anew_is_not_inherited() -> None:
    """Else a root that comes late, and knows of a clear from before this run, would take what was stored since."""
    cache = make_cache(PAGES, SLAB_PAGES)
    store(cache, make_keyspace(cache, NAME)[1], keys_of(1))
    after, saved = heir(cache)
    rows = adopt(after, saved)
    namespace, keyspace = make_keyspace(after, NAME)
    after.eviction.drop(rows)
    store(after, keyspace, keys_of(2))
    assert after.find(keyspace, keys_of(2)).hit_rows.tolist() == rows.tolist()
    for _ in after.drop_older(namespace, after.epochs.began):
        pass
    assert hits(after, keys_of(2)) == [True]


def keyspaces_of(tree: Any) -> Any:
    """Returns the keyspaces of a saved state, each a list of number, fingerprint, uid, label, ..., parts, sizes of
    parts, compositions.
    """
    return tree[3]


def twice(tree: Any) -> None:
    keyspaces_of(tree).append(keyspaces_of(tree)[0])


def with_field(at: int, value: object) -> Callable[[Any], None]:
    """The second keyspace has this in place of what it had."""

    def change(tree: Any) -> None:
        keyspaces_of(tree)[1][at] = value

    return change


def cut(tree: Any) -> None:
    del tree[3]


@pytest.mark.parametrize(
    "change",
    [
        *(twice, cut, with_field(0, 0), with_field(0, 1 << 16), with_field(1, b"short"), with_field(2, 1)),
        *(with_field(2, -1), with_field(3, "x"), with_field(4, 16), with_field(4, 33), with_field(5, 1)),
        *(with_field(5, EPOCH_MAX + 1), with_field(6, 0), with_field(7, "chunked"), with_field(7, "x")),
        *(with_field(8, 0), with_field(10, 0), with_field(11, 1), with_field(11, PARTS_PER_KEY_MAX + 1)),
        *(with_field(12, [PAGE_BYTES]), with_field(12, None), with_field(12, [1, -1]), with_field(13, [1])),
        *(with_field(13, [0, 0]), with_field(13, [0, ["a", b"b"]]), with_field(13, [0, *[["a", b""]] * 3])),
    ],
)
def test_a_saved_state_that_no_daemon_writes_is_a_cold_start(
    change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    for group, pages in enumerate([(1,), (1, 2)]):
        keyspace = make_keyspace(cache, NAME, group=group, pages=pages)[1]
        cache.set_part_bytes(keyspace, {}, {0: Composition("bfloat16", b"layers 0")})
        store(cache, keyspace, keys_of(1, 2))
    cache.save_state()
    names = cache.tier.pool.names()
    assert read_saved_state(names) is not None
    tree = msgpack.unpackb(names, strict_map_key=False)
    change(tree)
    assert read_saved_state(msgpack.packb(tree)) is None
    assert "what the previous run has saved is damaged" in caplog.text


def test_saved_sizes_that_no_slab_has_room_for_are_passed_over() -> None:
    cache = make_cache(PAGES, SLAB_PAGES)
    for group in range(2):
        store(cache, make_keyspace(cache, NAME, group=group)[1], keys_of(1))
    tree = msgpack.unpackb(cache.tier.pool.names(), strict_map_key=False)
    keyspaces_of(tree)[0][12] = [(1 << 48) - 1]
    after, _ = heir(cache)
    assert len(adopt(after, read_saved_state(msgpack.packb(tree)))) == 1
    assert check(after, 0, 0) == []
    assert after.figures()["slot_sizes"] == 1
