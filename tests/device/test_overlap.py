"""Loads that would write a byte twice are found by their block ids, for every layout that a registration may have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.device import overlap
from kvoffloadd.device.overlap import Target, check_targets, find_families
from kvoffloadd.device.plan import GroupPlan, Tensor
from kvoffloadd.errors import DuplicateError, ExtentError, LimitError
from kvoffloadd.model import NO_BLOCK, Ref

Layout = dict[int, list[tuple[Tensor, Ref]]]
"""Of each group its refs, and the tensor of each."""
Ids = dict[int, list[int]]


def plan_of(refs: list[tuple[Tensor, Ref]]) -> GroupPlan:
    tensors = [tensor for tensor, _ in refs]
    return GroupPlan.build(tensors, [Ref(n, r.offset, r.length, r.count, r.stride) for n, (_, r) in enumerate(refs)], 1)


def targets(layout: Layout, ids: Ids) -> list[Target]:
    return [Target(g, [plan_of(layout[g])], np.array(ids[g], np.uint32)[:, None]) for g in ids]


def written(layout: Layout, ids: Ids) -> list[int]:
    """Every byte that is written, one by one."""
    return [
        tensor.base_address + block * tensor.stride_bytes + ref.offset + run * ref.stride + byte
        for group, blocks in ids.items()
        for block in blocks
        if block != NO_BLOCK
        for tensor, ref in layout[group]
        for run in range(ref.count)
        for byte in range(ref.length)
    ]


def refused(layout: Layout, ids: Ids) -> bool:
    try:
        check_targets(find_families(layout), targets(layout, ids))
    except DuplicateError:
        return True
    return False


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Small ones, near each other: apart, interleaved, one within the other, equal, or askew."""
    page = draw(st.sampled_from([2, 4, 8]))
    stride = page + draw(st.sampled_from([0, 0, 4, 8]))
    return Tensor(draw(st.sampled_from([0, 2, 4, 8, 16, 40, 100])), draw(st.integers(1, 5)), page, stride)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Layout, Ids]:
    layout: Layout = {}
    known = draw(st.lists(tensors(), min_size=1, max_size=3))
    for group in range(draw(st.integers(1, 3))):
        refs = []
        for tensor in draw(st.lists(st.sampled_from(known), min_size=1, max_size=3)):
            length = draw(st.integers(1, max(tensor.page_bytes // 2, 1)))
            count = draw(st.integers(1, tensor.page_bytes // length))
            offset = draw(st.integers(0, tensor.page_bytes - count * length))
            refs.append((tensor, Ref(0, offset, length, count, length)))
        layout[group] = refs
    block = st.integers(0, 4) | st.just(NO_BLOCK)
    ids = {}
    for group in draw(st.lists(st.sampled_from(sorted(layout)), unique=True, min_size=1)):
        most = min(tensor.num_blocks for tensor, _ in layout[group])
        ids[group] = [b for b in draw(st.lists(block, max_size=5)) if b == NO_BLOCK or b < most]
    return layout, ids


@pytest.mark.slow
@given(jobs())
@settings(max_examples=500, deadline=None)
def test_as_comparing_every_byte_would_tell(job: tuple[Layout, Ids]) -> None:
    layout, ids = job
    try:
        for refs in layout.values():
            plan_of(refs)
    except ExtentError:
        return  # no such registration
    bytes_written = written(layout, ids)
    assert refused(layout, ids) == (len(set(bytes_written)) < len(bytes_written))


@given(st.lists(st.sampled_from([0, 1, 2, 7, 40, 1000, 1 << 20, NO_BLOCK - 1, NO_BLOCK]), max_size=12), st.booleans())
def test_ids_that_are_named_twice(named: list[int], sorts: bool) -> None:
    """Whether they are sorted or counted, which only how many they are and how large they are decides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "SORTED_IDS_MAX", len(named) if sorts else 0)
        found = overlap._repeated(np.array(named, np.uint32))
    assert set(found.tolist()) == {one for one in named if named.count(one) > 1} - {NO_BLOCK}


# Layouts of engines, on which nothing may be expanded: `(name, layout)`, two groups each.
BLOCKS = 1000


def tensor(base: int, page: int, stride: int = 0) -> Tensor:
    return Tensor(base, BLOCKS, page, stride or page)


WHOLE = Ref(0, 0, 64)
PLAIN: dict[str, Layout] = {
    "a tensor a layer": {0: [(tensor(i << 20, 64), WHOLE) for i in range(4)], 1: [(tensor(9 << 20, 64), WHOLE)]},
    "K and V interleaved": {0: [(tensor(0, 64, 128), WHOLE), (tensor(64, 64, 128), WHOLE)]},
    "all layers in one row": {0: [(tensor(64 * i, 64, 256), WHOLE) for i in range(4)]},
    "heads of two parts": {0: [(tensor(0, 64), Ref(0, 0, 16, 2, 32)), (tensor(0, 64), Ref(0, 16, 16, 2, 32))]},
    "groups in one row": {0: [(tensor(0, 128), Ref(0, 0, 64))], 1: [(tensor(0, 128), Ref(0, 64, 64))]},
    "a pool that groups share": {0: [(tensor(0, 64), WHOLE)], 1: [(tensor(0, 64), WHOLE)]},
}


@pytest.mark.parametrize("layout", PLAIN.values(), ids=PLAIN)
def test_layouts_of_engines_need_no_descriptors(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "CHECKED_DESCRIPTORS_MAX", 0)
    share = BLOCKS // len(layout)
    ids = {group: [*range(group * share, (group + 1) * share), NO_BLOCK, NO_BLOCK] for group in layout}
    assert not refused(layout, ids)
    assert refused(layout, {**ids, 0: [*ids[0], 5]})


def test_groups_that_lie_apart_in_a_row_may_name_one_block() -> None:
    assert not refused(PLAIN["groups in one row"], {0: [7], 1: [7]})
    assert refused(PLAIN["a pool that groups share"], {0: [7], 1: [7]})


def test_ids_that_groups_share_are_compared_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family is coarse: 0 and 1 both meet 2, but not each other."""
    monkeypatch.setattr(overlap, "CHECKED_DESCRIPTORS_MAX", 2)
    page = tensor(0, 128)
    layout: Layout = {0: [(page, Ref(0, 0, 64))], 1: [(page, Ref(0, 64, 64))], 2: [(page, Ref(0, 0, 128))]}
    assert not refused(layout, {0: [*range(100), 500], 1: [*range(200, 300), 500]})
    with pytest.raises(LimitError, match=r"groups \[0, 1\].*4 descriptors.*load less"):
        refused(layout, {0: [500, 501], 1: [500, 501]})


def test_what_only_descriptors_tell_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    askew: Layout = {0: [(tensor(0, 64), WHOLE)], 1: [(tensor(32, 64, 96), WHOLE)]}
    ids = {0: [*range(0, 50)], 1: [*range(500, 550)]}
    assert not refused(askew, ids)
    monkeypatch.setattr(overlap, "CHECKED_DESCRIPTORS_MAX", 99)
    with pytest.raises(LimitError, match="share memory"):
        refused(askew, ids)
    assert not refused(askew, {0: ids[0]}), "each by itself is plain"
