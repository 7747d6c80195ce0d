"""Group plans against a byte-level oracle, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.device.plan import GroupPlan, Tensor
from kvoffloadd.errors import BlockIdError, ExtentError, LimitError, UsageError
from kvoffloadd.model import NO_BLOCK, Ref, U32Array, U64Array
from tests.device.memory import same_array, u64

Bytes = dict[int, int]
"""Payload address -> memory address, byte by byte."""


@st.composite
def refs_of_page(draw: st.DrawFn, tensor: int) -> tuple[int, list[Ref]]:
    """A page's bytes, and refs to it that share no byte."""
    refs, at = [], 0
    for _ in range(draw(st.integers(1, 2))):
        offset = at + draw(st.integers(0, 3))
        length, count = draw(st.integers(1, 6)), draw(st.integers(1, 4))
        stride = length + draw(st.integers(0, 3)) if count > 1 else draw(st.integers(0, 9))
        refs.append(Ref(tensor, offset, length, count, stride))
        at = refs[-1].end
    return at + draw(st.integers(0, 3)), refs


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Tensor], list[Ref], int]:
    """Tensors that share no byte, refs in any order, blocks per key."""
    tensors: list[Tensor] = []
    refs: list[Ref] = []
    base = 1000
    for index in range(draw(st.integers(1, 3))):
        page_bytes, page_refs = draw(refs_of_page(index))
        tensor = Tensor(base, draw(st.integers(1, 9)), page_bytes, page_bytes + draw(st.integers(0, 5)))
        base += tensor.num_blocks * tensor.stride_bytes + draw(st.integers(0, 3))
        tensors.append(tensor)
        refs += page_refs
    return tensors, draw(st.permutations(refs)), draw(st.integers(1, 3))


def oracle(
    tensors: Sequence[Tensor], refs: Sequence[Ref], blocks_per_key: int, blocks: U32Array, payloads: U64Array
) -> Bytes:
    """The payload order of the specification, one byte at a time."""
    found: Bytes = {}
    for key, payload in enumerate(payloads.tolist()):
        before = 0
        for ref in refs:
            tensor = tensors[ref.tensor]
            for j in range(blocks_per_key):
                block = int(blocks[key, j])
                for i in range(ref.count):
                    for byte in range(ref.length):
                        memory = tensor.base_address + block * tensor.stride_bytes + ref.offset + i * ref.stride + byte
                        if block != NO_BLOCK:
                            found[payload + before + j * ref.payload_bytes + i * ref.length + byte] = memory
            before += blocks_per_key * ref.payload_bytes
    return found


def as_bytes(memory: U64Array, payload: U64Array, size: U64Array) -> Bytes:
    places = [
        (p + byte, m + byte)
        for m, p, n in zip(memory.tolist(), payload.tolist(), size.tolist(), strict=True)
        for byte in range(n)
    ]
    assert len({p for p, _ in places}) == len(places), "a payload byte is written twice"
    return dict(places)


@pytest.mark.slow
@given(groups(), st.data())
@settings(max_examples=200, deadline=None)
def test_expand_names_each_byte_in_its_place(group: tuple[list[Tensor], list[Ref], int], data: st.DataObject) -> None:
    tensors, refs, blocks_per_key = group
    made = GroupPlan.build(tensors, refs, blocks_per_key)
    assert made.payload_bytes == blocks_per_key * sum(ref.payload_bytes for ref in refs)
    limit = min(tensors[ref.tensor].num_blocks for ref in refs)
    assert made.num_blocks == limit
    keys = data.draw(st.integers(0, 4))
    ids = st.integers(0, limit - 1) | st.just(NO_BLOCK)
    blocks = np.array(
        data.draw(st.lists(ids, min_size=keys * blocks_per_key, max_size=keys * blocks_per_key)), np.uint32
    ).reshape(keys, blocks_per_key)
    payloads = u64([1 << 40 | key * (made.payload_bytes + 7) for key in range(keys)])
    memory, payload, size = made.expand(blocks, payloads)
    assert memory.dtype == payload.dtype == size.dtype == np.uint64
    assert memory.shape == payload.shape == size.shape == (len(size),)
    assert as_bytes(memory, payload, size) == oracle(tensors, refs, blocks_per_key, blocks, payloads)


def test_payload_order_is_ref_major() -> None:
    tensors = [Tensor(0, 10, 100, 100), Tensor(5000, 10, 64, 80)]
    made = GroupPlan.build(tensors, [Ref(1, 0, 64), Ref(0, 10, 4, 2, 50)], 2)
    memory, payload, size = made.expand(np.array([[3, 4]], np.uint32), u64([9000]))
    assert same_array(memory, [5240, 5320, 310, 360, 410, 460])
    assert same_array(payload, [9000, 9064, 9128, 9132, 9136, 9140])
    assert same_array(size, [64, 64, 4, 4, 4, 4])


def test_a_group_without_refs_is_empty() -> None:
    made = GroupPlan.build([Tensor(0, 1, 1, 1)], [], 2)
    assert made.payload_bytes == 0
    arrays = made.expand(np.array([[3, 4000]], np.uint32), u64([9000]))
    assert [len(array) for array in arrays] == [0, 0, 0]


def test_plain_tuples_are_tensors_too() -> None:
    assert GroupPlan.build([(0, 4, 8, 8)], [Ref(0, 0, 8)], 1).num_blocks == 4


def test_the_highest_addresses_survive() -> None:
    """Block ids are u32 and addresses use 47 bits: no product may wrap."""
    base, blocks = 0x7F00_0000_0000, (1 << 32) - 2
    made = GroupPlan.build([Tensor(base, blocks, 4096, 4096)], [Ref(0, 0, 4096)], 1)
    memory, _, _ = made.expand(np.array([[blocks - 1]], np.uint32), u64([0]))
    assert memory.tolist() == [base + (blocks - 1) * 4096]


def test_ids_outside_the_smallest_tensor_are_refused() -> None:
    tensors = [Tensor(0, 10, 8, 8), Tensor(1000, 6, 8, 8), Tensor(2000, 2, 8, 8)]
    made = GroupPlan.build(tensors, [Ref(0, 0, 8), Ref(1, 0, 8)], 2)
    made.expand(np.array([[5, NO_BLOCK]], np.uint32), u64([0]))
    for bad in (6, 9, NO_BLOCK - 1):
        with pytest.raises(BlockIdError, match=f"{bad}.* 6 blocks"):
            made.expand(np.array([[0, 1], [NO_BLOCK, bad]], np.uint32), u64([0, 0]))


def test_keys_without_any_block_cost_nothing() -> None:
    made = GroupPlan.build([Tensor(0, 10, 8, 8)], [Ref(0, 0, 8)], 2)
    arrays = made.expand(np.full((3, 2), NO_BLOCK, np.uint32), u64([0, 0, 0]))
    assert [len(array) for array in arrays] == [0, 0, 0]


@pytest.mark.parametrize(
    ("ref", "why"),
    [
        (Ref(2, 0, 8), r"names tensor 2, which does not exist \(tensors: 2\)"),
        (Ref(-1, 0, 8), r"names tensor -1, which does not exist \(tensors: 2\)"),
        (Ref(0, 0, 101), "byte 101 of a page of 100"),
        (Ref(0, 96, 5), "byte 101"),
        (Ref(0, 1, 10, 10, 10), "byte 101"),
        (Ref(0, 0, 10, 2, 9), "overlap"),
        (Ref(0, 0, 10, 2), "overlap"),
        (Ref(0, 0, 0), "0 bytes"),
        (Ref(0, 0, -8), "-8 bytes"),
        (Ref(0, 0, 8, 0), "0 runs"),
        (Ref(0, -8, 8), "from -8"),
        (Ref(0, 80, 8, 2, -8), "-8 apart"),
    ],
)
def test_refs_that_reach_outside_are_refused(ref: Ref, why: str) -> None:
    with pytest.raises(ExtentError, match=f"ref 1: .*{why}"):
        GroupPlan.build([Tensor(0, 4, 100, 128), Tensor(1000, 4, 100, 100)], [Ref(1, 0, 100), ref], 1)


@pytest.mark.parametrize(
    "refs",
    [
        [Ref(0, 0, 10), Ref(0, 9, 10)],
        [Ref(0, 0, 10), Ref(0, 0, 10)],
        [Ref(0, 0, 4, 4, 10), Ref(0, 33, 4)],
        [Ref(0, 2, 2, 4, 10), Ref(1, 0, 8), Ref(0, 0, 3, 4, 10)],
    ],
)
def test_refs_that_share_bytes_are_refused(refs: list[Ref]) -> None:
    with pytest.raises(ExtentError, match="tensor 0 share"):
        GroupPlan.build([Tensor(0, 4, 100, 100), Tensor(1000, 4, 100, 100)], refs, 1)


def test_interleaved_refs_share_nothing() -> None:
    GroupPlan.build([Tensor(0, 4, 100, 100)], [Ref(0, 0, 4, 10, 10), Ref(0, 4, 6, 10, 10)], 1)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (Tensor(0, 2, 100, 99), "overlap"),
        (Tensor(0, 0, 100, 100), "no bytes"),
        (Tensor(0, 1, 0, 100), "no bytes"),
        (Tensor(0, 1, 100, 0), "no bytes"),
        (Tensor(-1, 1, 100, 100), "no bytes"),
        (Tensor(0, 1 << 31, 1 << 32, 1 << 32), None),
        (Tensor(1, 1 << 31, 1 << 32, 1 << 32), "address space"),
    ],
)
def test_tensors_that_cant_be_are_refused(tensor: Tensor, why: str | None) -> None:
    if why is None:
        GroupPlan.build([tensor], [], 1)
        return
    with pytest.raises(ExtentError, match=why):
        GroupPlan.build([tensor], [], 1)


def test_a_single_row_needs_no_stride() -> None:
    GroupPlan.build([Tensor(0, 1, 100, 1)], [Ref(0, 0, 100)], 1)


def test_giant_plans_are_refused_before_they_cost_memory() -> None:
    page = 1 << 21
    with pytest.raises(LimitError, match="descriptors"):
        GroupPlan.build([Tensor(0, 1, page, page)], [Ref(0, 0, 1, page // 2, 2)], 4096)


def test_arrays_of_another_shape_are_refused() -> None:
    made = GroupPlan.build([Tensor(0, 10, 8, 8)], [Ref(0, 0, 8)], 2)
    for blocks, payloads in (
        (np.zeros((2, 1), np.uint32), u64([0, 0])),
        (np.zeros((2, 2), np.uint32), u64([0])),
        (np.zeros(2, np.uint32), u64([0])),
        (np.zeros((1, 2), np.int64), u64([0])),
        (np.zeros((1, 2), np.uint32), np.zeros(1, np.int64)),
        (np.zeros((1, 2), np.uint32), np.zeros((1, 1), np.uint64)),
    ):
        with pytest.raises(UsageError):
            made.expand(blocks, payloads)  # type: ignore[arg-type]
