"""Detects loads in which two copies would write the same bytes. Copies are unordered, so this would be a race.

Descriptors show this, but there may be millions. Block ids show it as well, for nearly all layouts: where rows of one
block id share no bytes with those of another, only an id that is named twice can write a byte twice. The groups with
this property are found once, when they are registered (`find_families`); for the others, and for ids that several
groups name, a bounded number of descriptors is made after all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvoffloadd.device.plan import GroupPlan, Tensor, overlap, runs_meet
from kvoffloadd.errors import DuplicateError, LimitError
from kvoffloadd.model import NO_BLOCK, I64Array, Ref, U32Array

CHECKED_DESCRIPTORS_MAX = 1 << 16
"""The most descriptors of one job, where block ids do not decide: to make and sort them takes the event loop some
milliseconds.
"""

SORTED_IDS_MAX, DENSE = 1 << 12, 4
"""More block ids than this that are also below this multiple of their number are counted, which is faster than
sorting.
"""

_TWICE = "two of the copies write the same bytes: a block or a key is named twice"


@dataclass(frozen=True, slots=True)
class Family:
    """Groups that may share bytes with each other, and with no other group.

    `rows_apart`: rows of different block ids share none, in all groups of the family. `tangled`: groups with block ids
    that do not decide by themselves, since rows of different ids share bytes, or those of one id do.
    """

    number: int
    rows_apart: bool
    tangled: frozenset[int]


class Target(NamedTuple):
    """The blocks that a load writes in one group: `blocks` are u32, of any shape, `(keys, blocks_per_key)` in
    the end.
    """

    group: int
    plans: Sequence[GroupPlan]
    blocks: U32Array


# Columns of a use: a group's runs in a tensor.
_GROUP, _BASE, _BLOCKS, _PAGE, _STRIDE, _OFFSET, _LENGTH, _COUNT, _APART = range(9)


def find_families(groups: Mapping[int, Sequence[tuple[Tensor, Ref]]]) -> dict[int, Family]:
    """Returns the family of each group, from the places of its bytes. All refs lie within their tensors' pages. For
    many thousand refs this takes some milliseconds.
    """
    rows = [
        (group, *tensor, ref.offset, ref.length, ref.count, ref.stride)
        for group, refs in groups.items()
        for tensor, ref in refs
    ]
    uses = np.array(rows, np.int64).reshape(-1, 9)
    head = {group: group for group in groups}

    def family_of(group: int) -> int:
        while head[group] != group:
            group = head[group]
        return group

    mixed: set[int] = set()
    tangled: set[int] = set()
    for piece in _pieces(uses):
        rows_apart, runs_apart = _apart(piece)
        if rows_apart and runs_apart:
            continue
        members = np.unique(piece[:, _GROUP]).tolist()
        tangled |= {group for group in members if not _is_plain(piece[piece[:, _GROUP] == group])}
        first = family_of(members[0])
        for group in members:
            head[family_of(group)] = first
        if not rows_apart:
            mixed |= set(members)
    mixed = {family_of(group) for group in mixed}
    return {
        group: Family(family_of(group), family_of(group) not in mixed, frozenset({group} & tangled)) for group in groups
    }


def _pieces(uses: I64Array) -> list[I64Array]:
    """Returns the runs of tensors that overlap in memory, or lie between each other's rows; a single run is
    left out.
    """
    uses = uses[np.argsort(uses[:, _BASE], kind="stable")]
    ends = uses[:, _BASE] + (uses[:, _BLOCKS] - 1) * uses[:, _STRIDE] + uses[:, _PAGE]
    begins = np.flatnonzero(uses[1:, _BASE] >= np.maximum.accumulate(ends)[:-1]) + 1
    cuts = [0, *begins.tolist(), len(uses)]
    return [uses[begin:end] for begin, end in itertools.pairwise(cuts) if end - begin > 1]


def _is_plain(uses: I64Array) -> bool:
    return all(all(_apart(piece)) for piece in _pieces(uses))


def _apart(piece: I64Array) -> tuple[bool, bool]:
    """Returns whether rows of different block ids share no bytes; and, if so, whether those of one id share none."""
    begin = piece[:, _BASE] - piece[:, _BASE].min()
    stride, width = int(piece[:, _STRIDE].min()), int((begin + piece[:, _PAGE]).max())
    tensors = piece[:, _BASE : _STRIDE + 1]
    if (tensors != tensors[0]).any() and ((piece[:, _STRIDE] != stride).any() or width > stride):
        return False, False
    runs = piece[:, _OFFSET:].copy()
    runs[:, 0] += begin
    return True, not runs_meet(runs)


def check_targets(families: Mapping[int, Family], targets: Sequence[Target]) -> None:
    """Checks that no two copies of a load write the same bytes.

    Raises:
        DuplicateError: two copies would write the same bytes.
        LimitError: only their descriptors can decide, and there are more than `CHECKED_DESCRIPTORS_MAX`.
    """
    by_family: dict[int, list[Target]] = {}
    for target in targets:
        by_family.setdefault(families[target.group].number, []).append(target)
    for number, members in by_family.items():
        family = families[number]
        for target in members:
            if families[target.group].tangled:
                _check_descriptors(members, lambda blocks: blocks != NO_BLOCK)
                break
            if len(_repeated(target.blocks)):
                raise DuplicateError(_TWICE)
        else:
            if len(members) > 1:
                _check_among(family, members)


def _check_among(family: Family, members: Sequence[Target]) -> None:
    """Checks several groups of a family, each of them valid by itself."""
    if not family.rows_apart:
        _check_descriptors(members, lambda blocks: blocks != NO_BLOCK)
        return
    shared = _repeated(np.concatenate([target.blocks.ravel() for target in members]))
    if len(shared):
        _check_descriptors(members, lambda blocks: np.isin(blocks, shared))


def _repeated(blocks: U32Array) -> U32Array:
    ids = blocks[blocks != NO_BLOCK]
    if ids.size > SORTED_IDS_MAX and ids.max() < DENSE * ids.size:
        counted: U32Array = np.flatnonzero(np.bincount(ids) > 1).astype(np.uint32)
        return counted
    ids = np.sort(ids)
    repeated: U32Array = ids[1:][ids[1:] == ids[:-1]]
    return repeated


def _check_descriptors(targets: Sequence[Target], chosen: Callable[[U32Array], np.ndarray]) -> None:
    """Checks the descriptors of the chosen block ids."""
    wanted = [np.where(chosen(target.blocks), target.blocks, np.uint32(NO_BLOCK)) for target in targets]
    rows = [blocks[(blocks != NO_BLOCK).any(axis=1)] for blocks in wanted]
    count = sum(len(blocks) * len(plan.size) for blocks, t in zip(rows, targets, strict=True) for plan in t.plans)
    if count > CHECKED_DESCRIPTORS_MAX:
        raise LimitError(
            f"groups {sorted(target.group for target in targets)} share memory, so that {count} descriptors would have "
            f"to be compared; at most {CHECKED_DESCRIPTORS_MAX} can be: load less in one job"
        )
    made = [
        plan.expand(blocks, np.zeros(len(blocks), np.uint64))
        for blocks, target in zip(rows, targets, strict=True)
        for plan in target.plans
    ]
    begins, _, sizes = (np.concatenate(columns) for columns in zip(*made, strict=True))
    if overlap(begins, sizes):
        raise DuplicateError(_TWICE)
