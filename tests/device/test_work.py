"""Work in pieces: the same bytes as all at once, each exactly once, never many descriptors at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.device import chunked as chunks_module
from kvoffloadd.device.chunked import Chunks
from kvoffloadd.device.plan import Copies, GroupPlan, PayloadCopies, Tensor, split, split_payloads
from kvoffloadd.device.work import HASHED_DESCRIPTORS, SMALL_DESCRIPTORS, BlockList, BlockWork, hashable
from kvoffloadd.errors import UsageError
from kvoffloadd.model import NO_BLOCK, Direction, Ref
from tests.device.memory import u64
from tests.device.test_copies import bytes_of

BLOCKS = 12


@st.composite
def lists(draw: st.DrawFn) -> list[BlockList]:
    """Some groups of one or two parts, payloads of some keys, gaps."""
    made, address = [], 1 << 40
    for number in range(draw(st.integers(1, 3))):
        per_key = draw(st.integers(1, 3))
        plans = []
        for part in range(draw(st.integers(1, 2))):
            tensor = Tensor((number * 2 + part) << 20, BLOCKS, 16, draw(st.sampled_from([16, 24])))
            refs = draw(st.sampled_from([[Ref(0, 0, 16)], [Ref(0, 0, 2, 4, 4)], [Ref(0, 0, 8), Ref(0, 12, 4)]]))
            plans.append(GroupPlan.build([tensor], refs, per_key))
        keys = draw(st.integers(0, 6))
        ids = draw(
            st.lists(st.integers(0, BLOCKS - 1) | st.just(NO_BLOCK), min_size=keys * per_key, max_size=keys * per_key)
        )
        at, columns = np.nonzero(np.ones((keys, len(plans)), bool))
        kept = np.array([draw(st.booleans()) for _ in at], bool)
        addresses = []
        for column in columns[kept]:
            addresses.append(address)
            address += plans[column].payload_bytes + draw(st.sampled_from([0, 0, 64]))
        blocks = np.array(ids, np.uint32).reshape(keys, per_key)
        made.append(BlockList(tuple(plans), blocks, at[kept], columns[kept], u64(addresses)))
    return made


@pytest.mark.slow
@given(
    lists().map(BlockWork), st.sampled_from([1, 2, 7, 1000]), st.sampled_from([1, 40, 1000]), st.sampled_from(Direction)
)
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_whole(work: BlockWork, descriptors: int, size: int, direction: Direction) -> None:
    whole = work.make_all(direction)
    assert (whole.total_bytes, whole.descriptors) == (work.total_bytes, work.descriptors)
    made = [work.make(direction, piece) for piece in work.pieces(descriptors, size)]
    assert sorted(pair for copies in made for pair in bytes_of(copies)) == bytes_of(whole)
    assert sum(copies.descriptors for copies in made) == work.descriptors
    # A key's parts stay together, so that a piece may have one key's more than was asked for.
    assert all(copies.descriptors <= max(descriptors, 2 * 12) for copies in made)


@pytest.mark.slow
@given(lists(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_mask_leaves_payloads_out(block_lists: list[BlockList], data: st.DataObject) -> None:
    """What is in the mask and what is not are the whole; what is not wanted has no address among the copies."""
    count = sum(len(one.keys) for one in block_lists)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    inside, outside = (bytes_of(BlockWork(block_lists, m).make_all(Direction.STORE)) for m in (mask, ~mask))
    assert sorted(inside + outside) == bytes_of(BlockWork(block_lists).make_all(Direction.STORE))
    addresses = np.concatenate([one.addresses for one in block_lists])
    sizes = np.concatenate([np.array([plan.payload_bytes for plan in one.plans])[one.columns] for one in block_lists])
    own = {a + at for a, size in zip(addresses[mask].tolist(), sizes[mask].tolist(), strict=True) for at in range(size)}
    assert {to for _, to in inside} <= own


def payloads_of(block_lists: list[BlockList]) -> list[tuple[int, ...]]:
    """Returns, for each payload, in order, the memory address of each of its bytes."""
    found = []
    for one in block_lists:
        for key, column, address in zip(one.keys, one.columns, one.addresses, strict=True):
            memory, payload, sizes = one.plans[column].expand(one.blocks[[key]], u64([address]))
            assert np.array_equal(payload, int(address) + np.cumsum(sizes) - sizes)
            found.append(
                tuple(at for low, n in zip(memory.tolist(), sizes.tolist(), strict=True) for at in range(low, low + n))
            )
    return found


def hashed_bytes(copies: Copies, firsts: dict[int, int]) -> dict[int, tuple[int, ...]]:
    """Returns, for each payload, by its number, the source addresses in the order in which they are hashed."""
    assert isinstance(copies, PayloadCopies)
    assert len(copies.counts) == len(copies.digests)
    ends, found = np.cumsum(copies.counts).astype(int), {}
    for count, end, digest in zip(copies.counts.tolist(), ends.tolist(), copies.digests, strict=True):
        runs = slice(end - count, end)
        to = copies.dst[runs]
        assert np.array_equal(to, to[:1] + np.cumsum(copies.size[runs]) - copies.size[runs]), "in payload order"
        sources = zip(copies.src[runs].tolist(), copies.size[runs].tolist(), strict=True)
        found[firsts[digest.ctypes.data]] = tuple(at for low, n in sources for at in range(low, low + n))
    assert ends[-1:].tolist() == ([len(copies)] if len(ends) else [])
    return found


@given(lists(), st.sampled_from([1, 2, 3, 40]), st.sampled_from([1, 50, 1000]), st.sampled_from([1, 2, 1000]))
@settings(max_examples=200, deadline=None)
def test_hashed_work_is_the_same_payload_by_payload(
    block_lists: list[BlockList], pieces: int, size: int, most: int
) -> None:
    """However it is cut: each payload in one chunk, in the order of its bytes, with its own place for the digest."""
    for one in block_lists:
        one.blocks[one.blocks == NO_BLOCK] = 0
    work = BlockWork(block_lists)
    hashed = work.hashed(1000, 10_000)
    assert hashed is not None
    expected = dict(enumerate(payloads_of(block_lists)))
    largest = max(map(len, expected.values()), default=0)
    firsts = {row.ctypes.data: number for number, row in enumerate(hashed.digests)}
    assert len(firsts) == len(hashed.digests) == len(expected)
    assert (hashed.total_bytes, hashed.descriptors) == (work.total_bytes, work.descriptors)
    whole = hashed.make_all(Direction.STORE)
    assert whole.descriptors == work.descriptors
    if work.total_bytes:
        assert hashed_bytes(whole, firsts) == expected
    in_pieces = [hashed.make(Direction.STORE, piece) for piece in hashed.pieces(1000, 10_000)]
    for made in ([whole], in_pieces):
        cut = [
            chunk
            for copies in made
            for chunk in split_payloads(copies, pieces, 1, chunk_bytes=size, chunk_descriptors=most)
        ]
        found: dict[int, tuple[int, ...]] = {}
        for chunk in cut:
            new = hashed_bytes(chunk, firsts)
            assert new and not found.keys() & new.keys()
            found |= new
        assert found == expected
        assert sum(chunk.descriptors for chunk in cut) == work.descriptors
        for chunk in cut:
            assert isinstance(chunk, PayloadCopies)
            assert len(chunk.counts) == 1 or len(chunk) <= most
            assert len(chunk.counts) == 1 or chunk.total_bytes <= max(size, size // 2 + largest)


def test_what_is_not_copied_whole_is_not_hashed() -> None:
    plan = GroupPlan.build([Tensor(0, BLOCKS, 64, 64)], [Ref(0, 0, 8, 4, 16)], 2)
    blocks = np.arange(6, dtype=np.uint32).reshape(3, 2)

    def work(ids: np.ndarray, mask: list[bool] | None = None) -> BlockWork:
        one = BlockList((plan,), ids, np.arange(3), np.zeros(3, np.int64), u64([1 << 40, 2 << 40, 3 << 40]))
        return BlockWork([one], None if mask is None else np.array(mask))

    assert work(blocks).hashed(8, 64) is not None
    assert work(blocks).hashed(7, 64) is None, "too many descriptors a payload for one piece"
    assert work(blocks).hashed(8, 63) is None, "too many bytes"
    gap = blocks.copy()
    gap[1, 1] = NO_BLOCK
    assert work(gap).hashed(8, 64) is None
    gap[1, 0] = NO_BLOCK
    assert work(gap).hashed(8, 64) is None, "one is not copied at all"
    assert work(blocks, [True, False, True]).hashed(8, 64) is None
    assert work(blocks, [True, True, True]).hashed(8, 64) is not None


@given(lists(), st.data(), st.sampled_from(Direction), st.sampled_from([1, 2, 3, 40]), st.sampled_from([1, 50, 1000]))
@settings(max_examples=200, deadline=None)
def test_hashing_work_copies_what_is_wanted_and_tells_what_it_found_of_what(
    block_lists: list[BlockList], data: st.DataObject, direction: Direction, pieces: int, size: int
) -> None:
    """Payloads that are left out, or copied in part, take no other payload's place."""
    count = sum(len(one.keys) for one in block_lists)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    work = BlockWork(block_lists, mask)
    hashed = work.hashing()
    whole = hashed.make_all(direction)
    assert bytes_of(whole) == bytes_of(work.make_all(direction))
    made = [hashed.make(direction, piece) for piece in hashed.pieces(40, 50)]
    chunks = [chunk for copies in made for chunk in split_payloads(copies, pieces, 1, chunk_bytes=size)]
    assert sorted(pair for chunk in chunks for pair in bytes_of(chunk)) == bytes_of(whole)
    assert sum(chunk.descriptors for chunk in chunks) == work.descriptors
    addresses = np.concatenate([one.addresses for one in block_lists])
    wanted = np.concatenate([one.wanted() for one in block_lists]) & mask
    number_of = {int(address): at for at, address in enumerate(addresses.tolist())}
    hashes = dict[int, int]()
    for chunk in chunks:
        assert isinstance(chunk, PayloadCopies)
        payload = chunk.src if direction is Direction.LOAD else chunk.dst
        firsts = (np.cumsum(chunk.counts) - chunk.counts).astype(int)
        for first, digest in zip(firsts, chunk.digests, strict=True):
            below = max(at for at in number_of if at <= int(payload[first]))
            hashes[number_of[below]] = digest[0] = number_of[below] + 1
    assert sorted(hashes) == np.flatnonzero(wanted).tolist()
    assert hashed.found()[:, 0].tolist() == [at + 1 if wanted[at] else 0 for at in range(count)]


def test_what_a_load_can_hash() -> None:
    """Payloads that are copied whole, unless one of the job is too large, or has too many runs, for one chunk."""
    small = GroupPlan.build([Tensor(0, BLOCKS, 64, 64)], [Ref(0, 0, 8, 4, 16)], 2)
    runs = GroupPlan.build([Tensor(0, BLOCKS, 1 << 14, 1 << 14)], [Ref(0, 0, 1, HASHED_DESCRIPTORS, 2)], 1)
    more = GroupPlan.build([Tensor(0, BLOCKS, 1 << 14, 1 << 14)], [Ref(0, 0, 1, HASHED_DESCRIPTORS + 1, 2)], 1)

    def of(plan: GroupPlan, ids: list[list[int]]) -> BlockList:
        numbers = np.arange(len(ids))
        return BlockList((plan,), np.array(ids, np.uint32), numbers, np.zeros_like(numbers), u64([1 << 40] * len(ids)))

    holed = of(small, [[0, 1], [2, NO_BLOCK], [NO_BLOCK, NO_BLOCK], [3, 4]])
    assert hashable([holed], 64).tolist() == [True, False, False, True]
    assert hashable([holed], 63).tolist() == [False] * 4
    assert hashable([holed, of(runs, [[5]])], 1 << 20).tolist() == [True, False, False, True, True]
    assert not hashable([holed, of(more, [[5]])], 1 << 20).any()
    assert hashable([], 64).tolist() == []


def test_neighbours_of_two_payloads_stay_two_copies() -> None:
    """Blocks and slots side by side: a copy of both could have one digest only."""
    plan = GroupPlan.build([Tensor(0, BLOCKS, 64, 64)], [Ref(0, 0, 64)], 2)
    blocks = np.arange(6, dtype=np.uint32).reshape(3, 2)
    addresses = u64([1 << 40, (1 << 40) + 128, (1 << 40) + 256])
    work = BlockWork([BlockList((plan,), blocks, np.arange(3), np.zeros(3, np.int64), addresses)])
    assert len(work.make_all(Direction.STORE)) == 1
    hashed = work.hashed(100, 1000)
    assert hashed is not None
    made = hashed.make_all(Direction.STORE)
    assert isinstance(made, PayloadCopies)
    assert (made.size.tolist(), made.counts.tolist()) == ([128] * 3, [1] * 3)


def test_only_whole_payloads_are_split_between_them() -> None:
    none = u64([])
    with pytest.raises(UsageError):
        split_payloads(Copies(none, none, none, 0), 1, 1)
    with pytest.raises(UsageError):
        split_payloads(PayloadCopies(none, none, none, 0, none, np.zeros((0, 2), np.uint64)), 0, 1)
    assert split_payloads(PayloadCopies(none, none, none, 0, none, np.zeros((0, 2), np.uint64)), 1, 1) == []


def big(keys: int, per_key: int) -> BlockWork:
    """`per_key` runs of 8 bytes for each key, in scattered blocks."""
    page = 16 * per_key
    plan = GroupPlan.build([Tensor(1 << 30, keys, page, page)], [Ref(0, 0, 8, per_key, 16)], 1)
    ids = np.random.default_rng(1).permutation(keys).astype(np.uint32)[:, None]
    addresses = u64(range(1 << 40, (1 << 40) + keys * 8192, 8192))
    return BlockWork([BlockList((plan,), ids, np.arange(keys), np.zeros(keys, np.int64), addresses)])


def nothing(_chunk: Copies) -> None:
    """Copies no byte."""


def cutter(seen: list[int]) -> Callable[[Copies], list[Copies]]:
    def cut(copies: Copies) -> list[Copies]:
        seen.append(copies.descriptors)
        return split(copies, 1, 1)

    return cut


@pytest.mark.slow
def test_chunks_are_made_as_they_are_taken() -> None:
    work, seen = big(4000, 32), list[int]()
    chunks = Chunks(work, Direction.LOAD, cutter(seen), 1 << 30)
    assert seen == [], "nothing is made before anybody asks"
    moved = []

    def move(chunk: Copies) -> None:
        moved.extend(bytes_of(chunk))

    while chunks.copy_next(move):
        pass
    assert max(seen) <= chunks_module.PIECE_DESCRIPTORS
    assert sum(seen) == work.descriptors == chunks.descriptors == chunks.copies == 4000 * 32
    assert len(moved) == len(set(moved)) == work.total_bytes == chunks.bytes
    assert chunks.complete


def test_a_key_of_many_descriptors_is_made_in_parts() -> None:
    seen: list[int] = []
    chunks = Chunks(big(2, 3 * chunks_module.PIECE_DESCRIPTORS), Direction.STORE, cutter(seen), 1 << 30)
    while chunks.copy_next(nothing):
        pass
    assert max(seen) == chunks_module.PIECE_DESCRIPTORS
    assert chunks.complete


def test_dropped_chunks_are_neither_taken_nor_made() -> None:
    seen: list[int] = []
    chunks = Chunks(big(4000, 32), Direction.LOAD, cutter(seen), 1 << 30)
    assert not chunks.copy_next(lambda _: chunks.drop()), "while its first chunk is being copied"
    moved = chunks.bytes
    assert moved > 0
    assert (chunks.copy_next(nothing), chunks.bytes, len(seen)) == (False, moved, 1)
    assert not chunks.complete


def test_chunks_dropped_while_one_is_made_stay_dropped() -> None:
    work = big(4000, 32)

    def cut(copies: Copies) -> list[Copies]:
        chunks.drop()
        return split(copies, 1, 1)

    chunks = Chunks(work, Direction.LOAD, cut, 1 << 30)
    assert not chunks.copy_next(nothing)
    assert chunks.bytes == 0


@pytest.mark.parametrize(("keys", "small"), [(SMALL_DESCRIPTORS // 32, True), (SMALL_DESCRIPTORS // 32 + 1, False)])
def test_small_work_is_made_at_once(keys: int, small: bool) -> None:
    seen: list[int] = []
    chunks = Chunks(big(keys, 32), Direction.LOAD, cutter(seen), 1 << 30)
    assert bool(seen) == small
    assert chunks.share(2) == 2


def test_small_work_that_is_not_made_at_once_is_made_by_who_takes_it() -> None:
    seen: list[int] = []
    work = big(SMALL_DESCRIPTORS // 32, 32)
    chunks = Chunks(work, Direction.LOAD, cutter(seen), 1 << 30, at_once=False)
    assert (seen, chunks.share(2)) == ([], 2)
    while chunks.copy_next(nothing):
        pass
    assert sum(seen) == work.descriptors
    assert chunks.complete


def test_what_is_not_wanted_costs_nothing() -> None:
    """Keys named again and again with no block, of a plan of half a million descriptors: a load may have thousands."""
    per_key, runs, keys = 32, 16_384, 4000
    plan = GroupPlan.build([Tensor(0, 64, 2 * runs, 2 * runs)], [Ref(0, 0, 1, runs, 2)], per_key)
    blocks = np.full((keys, per_key), NO_BLOCK, np.uint32)
    blocks[7, 3] = 5
    numbers = np.arange(keys)
    addresses = np.full(keys, 1 << 40, np.uint64)
    work = BlockWork([BlockList((plan,), blocks, numbers, np.zeros(keys, np.int64), addresses)])
    assert (work.total_bytes, work.descriptors, work.small) == (runs, runs, False)
    pieces = list(work.pieces(chunks_module.PIECE_DESCRIPTORS, 1 << 30))
    assert len(pieces) == per_key * runs // chunks_module.PIECE_DESCRIPTORS
    assert {piece.first for piece in pieces} == {0}
    assert sum(work.make(Direction.LOAD, piece).descriptors for piece in pieces) == runs


def test_a_piece_of_which_nothing_is_wanted_is_a_turn_of_its_own() -> None:
    """Others go on between two of them, however many there are."""
    plan = GroupPlan.build([Tensor(0, 64, 64, 64)], [Ref(0, 0, 1, 32, 2)], 4096)
    blocks = np.full((1, 4096), NO_BLOCK, np.uint32)
    blocks[0, -1] = 5
    work = BlockWork([BlockList((plan,), blocks, np.zeros(1, np.int64), np.zeros(1, np.int64), u64([1 << 40]))])
    chunks = Chunks(work, Direction.LOAD, lambda copies: split(copies, 1, 4096), 1 << 30)
    moved = [0]
    while chunks.copy_next(nothing):
        moved.append(chunks.bytes)
    assert (moved, chunks.bytes) == ([0] * 4, 32)
