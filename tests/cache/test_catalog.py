"""The catalog against a dict of dicts, and what it promises about its size."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvoffloadd.cache.disk import catalog as catalog_module
from kvoffloadd.cache.disk import diskkeyspaces
from kvoffloadd.cache.disk.catalog import Catalog
from kvoffloadd.cache.disk.diskkeyspaces import DiskKeyspace
from kvoffloadd.model import I64Array, U64Array
from kvoffloadd.storage.disk.format import KeyspaceId

from .fakes import entries_of, keys_of

WIDTHS = (1, 1, 3)
SEGMENTS = 6
Place = tuple[int, int]

which = st.integers(0, len(WIDTHS) - 1)
seeds = st.integers(0, 1 << 32)


def name_of(n: int, epoch: int = 0, parts: int = 1) -> KeyspaceId:
    return KeyspaceId(bytes([n]) * 16, b"s" * 16, epoch, 0, parts, 32)


def disk_keyspace_of(catalog: Catalog, n: int, epoch: int = 0, parts: int = 1) -> DiskKeyspace:
    disk_keyspace = catalog.disk_keyspaces.open(name_of(n, epoch, parts))
    assert disk_keyspace is not None
    return disk_keyspace


def put(catalog: Catalog, disk_keyspace: DiskKeyspace, segment: int, *places: tuple[int, int, int]) -> None:
    """Places: (key, part, page)."""
    numbers, parts, pages = zip(*places, strict=True)
    catalog.put(disk_keyspace, entries_of(keys_of(*numbers), parts, pages), segment)


def check(catalog: Catalog, segments: set[int]) -> list[str]:
    """What is wrong with it, all at once."""
    return [finding for found in catalog.steps(lambda: segments) for finding in found]


def numbers_in(keys: U64Array) -> list[int]:
    found: list[int] = keys[:, 1].tolist()
    return found


class CatalogMachine(RuleBasedStateMachine):
    """The model: per disk keyspace, key and part the place."""

    @initialize(seed=seeds)
    def begin(self, seed: int) -> None:
        self.catalog = Catalog(30_000, seed)
        self.epochs = [0] * len(WIDTHS)
        self.widths = list(WIDTHS)
        self.disk_keyspaces = [disk_keyspace_of(self.catalog, n, 0, width) for n, width in enumerate(WIDTHS)]
        self.model: list[dict[int, dict[int, Place]]] = [{} for _ in WIDTHS]
        self.next_page = dict.fromkeys(range(1, SEGMENTS + 1), 1)
        self.used: list[set[int]] = [set() for _ in WIDTHS]

    def complete(self, n: int) -> set[int]:
        return {key for key, places in self.model[n].items() if len(places) == self.widths[n]}

    def forget(self, gone: Iterable[tuple[int, int, int]]) -> None:
        """Forgets (n, key, part)."""
        for n, key, part in gone:
            del self.model[n][key][part]
            if not self.model[n][key]:
                del self.model[n][key]
            self.used[n] &= self.model[n].keys()

    @rule(n=which, seed=seeds, count=st.sampled_from([1, 5, 60, 700]), span=st.sampled_from([20, 1000, 3000]))
    def write(self, n: int, seed: int, count: int, span: int) -> None:
        rng, width = np.random.default_rng(seed), self.widths[n]
        segment = int(rng.integers(1, SEGMENTS + 1))
        numbers = rng.integers(0, span, count)
        parts = rng.integers(0, width, count)
        if seed % 3 == 0:  # whole keys, as a demotion writes them
            numbers, parts = (
                np.repeat(np.unique(numbers), width),
                np.tile(np.arange(width), len(set(numbers))),
            )
        pages = self.next_page[segment] + np.arange(len(numbers))
        self.next_page[segment] += len(numbers)
        for key, part, page in zip(numbers.tolist(), parts.tolist(), pages.tolist(), strict=True):
            self.model[n].setdefault(key, {})[part] = (segment, page)
        order = rng.permutation(len(numbers))
        keys = keys_of(*numbers[order].tolist())
        self.catalog.put(self.disk_keyspaces[n], entries_of(keys, parts[order], pages[order]), segment)

    @rule(n=which, seed=seeds)
    def use(self, n: int, seed: int) -> None:
        keys = sorted(self.complete(n))[:: 1 + seed % 5]
        self.catalog.mark_used(self.catalog.find(self.disk_keyspaces[n], keys_of(*keys)))
        self.used[n] |= set(keys)

    @rule(n=which, seed=seeds)
    def damage(self, n: int, seed: int) -> None:
        """Some records of complete keys turn out to be bad."""
        keys = sorted(self.complete(n))[seed % 3 :: 1 + seed % 7]
        rows = self.catalog.find(self.disk_keyspaces[n], keys_of(*keys)).astype(np.uint32)
        part = seed % self.widths[n]
        lost = self.catalog.forget(self.catalog.places(self.disk_keyspaces[n], rows)[:, part])
        assert sorted(lost.tolist()) == sorted(rows.tolist())
        self.forget((n, key, part) for key in keys)

    @rule(segment=st.integers(1, SEGMENTS))
    def give_up(self, segment: int) -> None:
        records = self.catalog.in_segment(segment)
        gone = [
            (place[1], n, key, part)
            for n, disk_keyspace in enumerate(self.model)
            for key, places in disk_keyspace.items()
            for part, place in places.items()
            if place[0] == segment
        ]
        assert self.catalog.page[records].tolist() == [page for page, *_ in sorted(gone)]
        was_complete = {(n, key) for _, n, key, _ in gone if key in self.complete(n)}
        lost = self.catalog.forget(records)
        names = [(self.owner(row), int(self.catalog.index.keys[row, 1])) for row in lost.tolist()]
        assert sorted(names) == sorted(was_complete)
        self.catalog.close_segment(segment)
        self.forget((n, key, part) for _, n, key, part in gone)
        assert not len(self.catalog.in_segment(segment))

    def owner(self, row: int) -> int:
        return next(
            n
            for n, disk_keyspace in enumerate(self.disk_keyspaces)
            if disk_keyspace.id == self.catalog.index.keyspace[row]
        )

    @rule(n=which, width=st.sampled_from([*WIDTHS, 5]), again=st.booleans())
    def clear(self, n: int, width: int, again: bool) -> None:
        """A new epoch. `again`: the old disk keyspace is emptied first, and the new one, of another width, has its
        number.
        """
        old = self.disk_keyspaces[n]
        self.catalog.disk_keyspaces.close(old)
        self.epochs[n] += 1
        if not again:
            self.disk_keyspaces[n] = disk_keyspace_of(self.catalog, n, self.epochs[n], self.widths[n])
        complete = sorted(self.complete(n))
        packed = keys_of(*complete)
        assert (self.catalog.find(old, packed) == -1).all()
        assert self.catalog.complete(old, packed).all()
        self.catalog.put(old, entries_of(keys_of(9999), [0], [1]), 1)
        emptied = [number for keys in self.catalog.empty(old) for number in numbers_in(keys)]
        assert sorted(emptied) == complete
        assert old.id not in self.catalog.disk_keyspaces
        self.model[n], self.used[n] = {}, set()
        if again:
            self.widths[n], self.catalog.disk_keyspaces._next_number = width, old.id
            self.disk_keyspaces[n] = disk_keyspace_of(self.catalog, n, self.epochs[n], width)
            assert self.disk_keyspaces[n].id == old.id

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "catalog"):
            return
        catalog = self.catalog
        for n, disk_keyspace in enumerate(self.disk_keyspaces):
            model, complete = self.model[n], self.complete(n)
            asked = sorted(model)
            rows = catalog.find(disk_keyspace, keys_of(*asked, 123_456))
            assert [row >= 0 for row in rows.tolist()] == [*(key in complete for key in asked), False]
            found = rows[rows >= 0].astype(np.uint32)
            records = catalog.places(disk_keyspace, found)
            places = np.stack([catalog.segment[records], catalog.page[records]], axis=2).tolist()
            expected = [[list(model[key][part]) for part in range(self.widths[n])] for key in asked if key in complete]
            assert places == expected
            assert set(numbers_in(catalog.index.keys[found[catalog.used[found] != 0]])) == self.used[n] & complete
            assert (disk_keyspace.rows, disk_keyspace.keys) == (len(model), len(complete))
            listed = catalog.listing(disk_keyspace, 0, catalog.index.rows_end)
            assert sorted(numbers_in(catalog.index.keys[listed])) == sorted(complete)
        assert catalog.records == sum(len(places) for disk_keyspace in self.model for places in disk_keyspace.values())
        assert catalog.keys == sum(len(self.complete(n)) for n in range(len(WIDTHS)))

    @invariant()
    def finds_nothing_wrong(self) -> None:
        if hasattr(self, "catalog"):
            assert check(self.catalog, set(range(1, SEGMENTS + 1))) == []


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)


def test_memory_of_many_records_stays_within_the_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    catalog = Catalog(1 << 20, seed)
    disk_keyspace = disk_keyspace_of(catalog, 1)
    for batch in range(400):
        keys = rng.integers(0, 1 << 63, (500, 4), dtype=np.uint64)
        pages = np.arange(1, 501, dtype=np.uint32)
        catalog.put(disk_keyspace, entries_of(keys, np.zeros(500), pages), 1 + batch)
    assert catalog.records == 200_000
    assert catalog.memory_bytes() / catalog.records < 75
    for segment in range(1, 401):
        catalog.forget(catalog.in_segment(segment))
        catalog.close_segment(segment)
    assert (catalog.records, catalog.keys, disk_keyspace.rows) == (0, 0, 0)
    assert check(catalog, set()) == []


def test_rewriting_for_ever_takes_no_more_memory() -> None:
    """Segments come and go, the keys stay: what is remembered of old places goes with their segment."""
    catalog = Catalog(10_000, 1)
    disk_keyspace = disk_keyspace_of(catalog, 1)
    sizes = []
    for segment in range(1, 60):
        put(catalog, disk_keyspace, segment, *((key, 0, 1 + key) for key in range(500)))
        if segment > 2:
            assert not len(catalog.in_segment(segment - 2)), "all of it has moved on"
            catalog.close_segment(segment - 2)
        sizes.append(catalog.memory_bytes())
    assert sizes[-1] == sizes[5]


def test_a_listing_in_steps_names_each_key_once() -> None:
    catalog = Catalog(1000, 1)
    disk_keyspace, other = disk_keyspace_of(catalog, 1), disk_keyspace_of(catalog, 2, parts=2)
    put(catalog, disk_keyspace, 1, *((key, 0, 1 + key) for key in range(50)))
    put(catalog, other, 1, *((key, 0, 100 + key) for key in range(20)))  # one part of two
    put(catalog, other, 1, *((key, 1, 200 + key) for key in range(7)))
    catalog.forget(catalog.places(disk_keyspace, catalog.find(disk_keyspace, keys_of(3, 4)).astype(np.uint32)).ravel())
    for listed, expected in ((disk_keyspace, [*range(3), *range(5, 50)]), (other, list(range(7)))):
        steps = [catalog.listing(listed, start, 8) for start in range(0, catalog.index.rows_end, 8)]
        packed = b"".join(catalog.packed(rows, 32) for rows in steps)
        found = np.frombuffer(packed, np.uint64).reshape(-1, 4)
        assert sorted(numbers_in(found)) == expected


def test_what_does_not_fit_is_left_out() -> None:
    catalog = Catalog(10, 1)
    wide, narrow = disk_keyspace_of(catalog, 1, parts=4), disk_keyspace_of(catalog, 2)
    put(catalog, wide, 1, *((key, part, 1 + 4 * key + part) for key in range(5) for part in range(4)))
    assert (wide.keys, catalog.records) == (2, 8)
    put(catalog, narrow, 2, *((key, 0, 1 + key) for key in range(5)))
    assert (narrow.keys, catalog.records) == (2, 10)
    assert check(catalog, {1, 2}) == []
    put(catalog, narrow, 3, *((key, 0, 1 + key) for key in range(5)))
    assert len(catalog.in_segment(3)) == 2, "those that are there still move"
    catalog.forget(catalog.in_segment(3))
    put(catalog, narrow, 4, (7, 0, 1), (8, 0, 2), (9, 0, 3))
    assert (catalog.find(narrow, keys_of(7, 8, 9)) >= 0).sum() == 2
    assert check(catalog, {1, 4}) == []


def test_of_two_copies_in_one_batch_the_one_at_the_higher_page_counts() -> None:
    catalog = Catalog(100, 1)
    disk_keyspace = disk_keyspace_of(catalog, 1)
    put(catalog, disk_keyspace, 1, (5, 0, 9), (6, 0, 3), (5, 0, 2))
    rows: I64Array = catalog.find(disk_keyspace, keys_of(5, 6))
    assert catalog.page[catalog.first[rows]].tolist() == [9, 3]
    assert (catalog.records, disk_keyspace.keys) == (2, 2)
    assert check(catalog, {1}) == []


def test_disk_keyspaces_of_other_names_do_not_meet() -> None:
    catalog = Catalog(100, 1)
    disk_keyspace = disk_keyspace_of(catalog, 1)
    put(catalog, disk_keyspace, 1, (5, 0, 1))
    others = [
        name_of(2),
        name_of(1, epoch=1),
        KeyspaceId(b"\1" * 16, b"t" * 16, 0, 0, 1, 32),
        KeyspaceId(b"\1" * 16, b"s" * 16, 0, 1, 1, 32),
    ]
    for name in others:
        other = catalog.disk_keyspaces.open(name)
        assert other is not None
        assert other is not disk_keyspace
        assert catalog.find(other, keys_of(5))[0] == -1
    assert catalog.disk_keyspaces.open(name_of(1)) is disk_keyspace


def test_numbers_of_disk_keyspaces_are_used_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diskkeyspaces, "DISK_KEYSPACES_MAX", 4)
    catalog = Catalog(100, 1)
    disk_keyspaces = [disk_keyspace_of(catalog, n) for n in range(3)]
    assert catalog.disk_keyspaces.open(name_of(3)) is None
    put(catalog, disk_keyspaces[1], 1, (5, 0, 1))
    catalog.disk_keyspaces.close(disk_keyspaces[1])
    assert catalog.disk_keyspaces.open(name_of(3)) is None, "it is not empty yet"
    assert [numbers_in(keys) for keys in catalog.empty(disk_keyspaces[1])] == [[5]]
    new = disk_keyspace_of(catalog, 3)
    assert new.id not in (disk_keyspaces[0].id, disk_keyspaces[2].id)
    assert catalog.find(new, keys_of(5))[0] == -1


def test_a_closed_disk_keyspace_is_emptied_in_steps_while_its_segments_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "STEP_RECORDS", 2)
    catalog = Catalog(100, 1)
    old = disk_keyspace_of(catalog, 1)
    put(catalog, old, 1, *((key, 0, 1 + key) for key in range(3)))
    put(catalog, old, 2, *((key, 0, 1 + key) for key in range(3, 9)))
    catalog.disk_keyspaces.close(old)
    emptied: list[int] = []
    for step, keys in enumerate(catalog.empty(old)):
        emptied += numbers_in(keys)
        if step == 0:
            lost = catalog.forget(catalog.in_segment(2))
            emptied += numbers_in(catalog.index.keys[lost])
    assert sorted(emptied) == list(range(9)), "each key is listed once"
    assert catalog.records == 0
    assert check(catalog, {1}) == []


def test_what_is_cleared_is_counted_by_segment_until_its_space_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was written when the clear came, and is no key's any more."""
    monkeypatch.setattr(catalog_module, "STEP_RECORDS", 2)
    catalog = Catalog(100, 1)
    old, other = disk_keyspace_of(catalog, 1), disk_keyspace_of(catalog, 2)
    put(catalog, old, 1, *((key, 0, 1 + key) for key in range(3)))
    put(catalog, old, 2, *((key, 0, 1 + key) for key in range(3, 9)))
    put(catalog, other, 2, (0, 0, 50))
    assert (catalog.keys, catalog.cleared_records) == (10, 0)
    catalog.disk_keyspaces.close(old)
    assert catalog.keys == 1, "no lookup finds the others, though they are still there"
    put(catalog, old, 2, (20, 0, 60), (21, 0, 61))
    for _ in catalog.empty(old):
        pass
    assert (catalog.keys, catalog.cleared_records) == (1, 11)
    assert check(catalog, {1, 2}) == []
    assert check(catalog, {2}) == ["catalog: cleared records are counted in segments [1], which are gone"]
    catalog.close_segment(1)
    assert (catalog.cleared_records, check(catalog, {2})) == (8, [])


def test_emptying_a_disk_keyspace_leaves_alone_what_an_earlier_one_of_its_number_had() -> None:
    catalog = Catalog(1000, 1)
    old, other = disk_keyspace_of(catalog, 1), disk_keyspace_of(catalog, 2)
    put(catalog, old, 1, *((key, 0, 1 + key) for key in range(100)))
    catalog.disk_keyspaces.close(old)
    for _ in catalog.empty(old):
        pass
    catalog.disk_keyspaces._next_number = old.id
    wide = disk_keyspace_of(catalog, 3, parts=2)
    assert wide.id == old.id
    put(catalog, other, 2, *((key, 0, 1 + key) for key in range(50)))
    catalog.disk_keyspaces.close(wide)
    for keys in catalog.empty(wide):
        assert not len(keys)
    assert (catalog.find(other, keys_of(*range(50))) >= 0).all()
    assert check(catalog, {1, 2}) == []


@pytest.mark.parametrize("freed", [1, 2])
def test_emptying_a_disk_keyspace_leaves_alone_what_took_its_place_meanwhile(
    monkeypatch: pytest.MonkeyPatch, freed: int
) -> None:
    monkeypatch.setattr(catalog_module, "STEP_RECORDS", 2)
    catalog = Catalog(100, 1)
    old, other = disk_keyspace_of(catalog, 1), disk_keyspace_of(catalog, 2)
    put(catalog, old, 1, *((key, 0, 1 + key) for key in range(3)))
    put(catalog, old, 2, *((key, 0, 1 + key) for key in range(3, 3 + freed)))
    catalog.disk_keyspaces.close(old)
    walk = catalog.empty(old)
    next(walk)
    catalog.forget(catalog.in_segment(2))  # this segment is given up, between two steps
    put(catalog, other, 3, (77, 0, 1))
    assert catalog.find(other, keys_of(77))[0] >= 0
    for _ in walk:
        pass
    assert catalog.find(other, keys_of(77))[0] >= 0
    assert catalog.records == 1
    assert check(catalog, {1, 3}) == []


def test_keys_that_the_index_can_not_hold_are_left_out() -> None:
    catalog = Catalog(4000, 1)
    disk_keyspace = disk_keyspace_of(catalog, 1)
    catalog.index.hash = lambda keyspace, keys: np.full(len(keys), 7, np.uint64)  # type: ignore[method-assign]
    put(catalog, disk_keyspace, 1, *((key, 0, 1 + key) for key in range(300)))
    put(catalog, disk_keyspace, 2, *((key, 0, 1 + key) for key in range(200, 2000)))
    assert (disk_keyspace.keys, catalog.records) == (300, 300)
    assert len(catalog.in_segment(2)) == 100, "those that are there still move"
    assert check(catalog, {1, 2}) == []


def test_records_of_one_width_serve_another_when_their_segment_is_gone() -> None:
    catalog = Catalog(3000, 1)
    wide, narrow = disk_keyspace_of(catalog, 1, parts=1000), disk_keyspace_of(catalog, 2)
    for key in range(4):
        put(catalog, wide, 1, *((key, part, 1 + 1000 * key + part) for part in range(1000)))
    assert (wide.keys, catalog.records) == (3, 3000), "the fourth is left out"
    catalog.forget(catalog.in_segment(1))
    catalog.close_segment(1)
    put(catalog, narrow, 2, *((key, 0, 1 + key) for key in range(3100)))
    assert (narrow.keys, catalog.records) == (3000, 3000)
    assert check(catalog, {1, 2}) == []


def test_the_audit_of_the_catalog_knows_which_records_are_free() -> None:
    catalog = Catalog(100, 1)
    put(catalog, disk_keyspace_of(catalog, 1), 1, (1, 0, 1))
    catalog.runs.free(1, np.zeros(1, np.uint32))
    assert any("are given out" in finding for finding in check(catalog, {1}))
    catalog.runs.taken += 1
    assert any("numbers are free" in finding for finding in check(catalog, {1}))
    catalog.runs._unlist()
    assert any("a record that is free has a place" in finding for finding in check(catalog, {1}))


def test_a_user_has_no_more_disk_keyspaces_than_are_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diskkeyspaces, "DISK_KEYSPACES_MAX", 33)
    catalog = Catalog(1000, 7)

    def take(uid: int | None, first: int) -> list[DiskKeyspace]:
        """Takes as many as they give."""
        taken: list[DiskKeyspace] = []
        while (disk_keyspace := catalog.disk_keyspaces.open(name_of(first + len(taken)), uid)) is not None:
            taken.append(disk_keyspace)
        return taken

    disk_keyspaces = take(1, 0)
    assert [len(disk_keyspaces), len(take(2, 50)), len(take(3, 100)), len(take(4, 150))] == [16, 8, 4, 2]
    assert catalog.disk_keyspaces.open(name_of(0), 1) is disk_keyspaces[0], "what it has it may use"
    assert catalog.disk_keyspaces.open(name_of(200), 5) is not None, "somebody new finds room"
    assert catalog.disk_keyspaces.open(name_of(201), 1) is None
    catalog.disk_keyspaces.discard(disk_keyspaces[0])
    catalog.disk_keyspaces.close(disk_keyspaces[1])
    assert list(catalog.empty(disk_keyspaces[1])) == []
    for _ in range(2):
        assert [catalog.disk_keyspaces.open(name_of(202 + n), 6) is not None for n in range(3)] == [True, True, False]
    assert check(catalog, set()) == []


def test_what_was_found_at_a_start_is_its_users_once_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diskkeyspaces, "DISK_KEYSPACES_MAX", 9)
    catalog = Catalog(1000, 7)
    found = [catalog.disk_keyspaces.open(name_of(n)) for n in range(5)]
    assert None not in found, "nobody is known to have too many"
    assert [catalog.disk_keyspaces.open(name_of(n), 1) for n in range(5)] == found
    assert catalog.disk_keyspaces.open(name_of(5), 1) is None
    assert catalog.disk_keyspaces.open(name_of(5), 2) is not None
    assert [disk_keyspace.uid for disk_keyspace in catalog.disk_keyspaces.values()] == [1] * 5 + [2]


def test_a_key_comes_once_when_its_last_part_does() -> None:
    """And not when its records move."""
    catalog = Catalog(100, 5)
    came: list[list[int]] = []
    catalog.on_complete = lambda _, rows: came.append(numbers_in(catalog.index.keys[rows]))
    disk_keyspace = disk_keyspace_of(catalog, 0, parts=3)
    put(catalog, disk_keyspace, 1, (7, 0, 1), (7, 1, 2), (8, 2, 3))
    put(catalog, disk_keyspace, 1, (7, 2, 4), (8, 0, 5))
    put(catalog, disk_keyspace, 2, (7, 0, 1), (7, 1, 2), (7, 2, 3))
    assert came == [[], [7], []]
