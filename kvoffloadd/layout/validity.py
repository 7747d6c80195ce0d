"""What is valid after a load of which a part failed. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.model import BoolArray, GroupKind, I64Array


@dataclass(frozen=True, slots=True)
class Loaded:
    """A group after a load. `valid`: bool (keys,), of each key of the prompt from the first on, whether its blocks hold
    its bytes, loaded or computed here. `window_keys`: as in `client.Group`.
    """

    kind: GroupKind
    tokens_per_key: int
    valid: BoolArray
    window_keys: int = 0

    def kept(self, tokens: int) -> BoolArray:
        """bool (keys,): what may stay marked valid when a prefix of so many tokens is."""
        return self.valid & (np.arange(len(self.valid)) < tokens // self.tokens_per_key)


def valid_prefix(groups: Sequence[Loaded], local_tokens: int) -> int:
    """The longest prefix, in tokens, whose needs every group meets; at least what is held locally.

    It is not where the first key failed: with windows, keys before that may never have been asked for. Prefixes end
    with a key of every group.
    """
    if not groups:
        return local_tokens
    step = math.lcm(*(group.tokens_per_key for group in groups))
    end = min(len(group.valid) * group.tokens_per_key for group in groups)
    ends: I64Array = np.arange(step, end + 1, step, dtype=np.int64)
    for group in groups:
        ends = ends[_met(group, ends // group.tokens_per_key)]
    return max(local_tokens, int(ends[-1]) if len(ends) else 0)


def _met(group: Loaded, lengths: I64Array) -> BoolArray:
    """Whether a prefix of each length in keys has what it needs."""
    # bad[n]: how many of the first n keys are not valid.
    bad = np.concatenate([np.zeros(1, np.int64), np.cumsum(~group.valid)])
    met: BoolArray = bad[lengths] == bad[group.kind.first_needed(lengths, group.window_keys)]
    return met
