"""Computes which prefixes of a prompt could be restored, by SGLang's rules. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.integrations.sglang.pools import KV
from kvoffloadd.model import BoolArray


@dataclass(frozen=True, slots=True)
class Needed:
    """The part of a pool, besides keys and values, that a prefix needs: its last `trailing` pages; 0: all of them."""

    pool: str
    trailing: int = 0


@dataclass(frozen=True, slots=True)
class Restorable:
    """The prefixes that could be restored. `pages`: of the longest prefix that all pools can restore; `lengths`: in
    pages, of all such prefixes, shortest first; `by_pool`: the longest of each pool alone, where it has any, within the
    pages of keys and values that are there.
    """

    pages: int
    lengths: tuple[int, ...]
    by_pool: dict[str, int]


def restorable(there: Mapping[str, BoolArray], needed: Sequence[Needed]) -> Restorable:
    """Computes the prefixes. `there`: for each pool, bool (pages,): which pages of the prompt could be loaded."""
    pages = leading(there[KV])
    lengths = np.arange(1, pages + 1)
    fits = np.ones(pages, np.bool_)
    by_pool = {KV: pages} if pages else {}
    for need in needed:
        runs = run_lengths(there[need.pool][:pages])
        held = runs >= (np.minimum(lengths, need.trailing) if need.trailing else lengths)
        if held.any():
            by_pool[need.pool] = int(lengths[held][-1])
        fits &= held
    found = tuple(int(length) for length in lengths[fits])
    return Restorable(found[-1] if found else 0, found, by_pool)


def leading(there: BoolArray) -> int:
    """Returns how many are True before the first that is not."""
    return there.size if there.all() else int(np.argmin(there))


def run_lengths(there: BoolArray) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Returns intp (n,): how many are True in a row up to and with each of them."""
    positions = np.arange(1, there.size + 1)
    gap = np.maximum.accumulate(np.where(there, 0, positions)) if there.size else positions
    return positions - gap
