"""A claim: which keys of a prompt a client wants kept, how much, and until when."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvoffloadd.cache.memory.claimedkeys import NO_NUMBERS
from kvoffloadd.cache.memory.namespace import ClaimedGroup, Namespace
from kvoffloadd.model import I64Array, U32Array


@dataclass(slots=True, eq=False)
class Claim:
    """A claim that is in force."""

    number: int  # later claims have higher numbers
    namespace: Namespace
    name: str  # chosen by the client; "": none
    priority: int
    ends_s: float  # by the monotonic clock
    # For each group of keys: the numbers of claimed keys in prompt order, and where each of them ends, in tokens.
    groups: list[tuple[ClaimedGroup, U32Array, I64Array]] = field(default_factory=list)
    uses_before: int = 0  # of its last key, when it began
    is_in_force: bool = True

    @property
    def rank(self) -> int:
        """Returns the rank of its priority in `ClaimedKeys`."""
        return self.priority + 1

    @property
    def order(self) -> tuple[int, int]:
        """Returns what claims are ordered by: the first one lapses first."""
        return self.priority, self.number

    @property
    def numbers(self) -> U32Array:
        """Returns the numbers of all its keys."""
        return np.concatenate([NO_NUMBERS, *(numbers for _, numbers, _ in self.groups)])

    @property
    def num_keys(self) -> int:
        """Returns the number of its keys."""
        return sum(len(numbers) for _, numbers, _ in self.groups)

    @property
    def tokens(self) -> int:
        """Returns the length of the prompt that it keeps."""
        return max(int(ends[-1]) for _, _, ends in self.groups)

    @property
    def last(self) -> int:
        """Returns the number of the key with which its prompt ends."""
        _, numbers, _ = max(self.groups, key=lambda group: int(group[2][-1]))
        return int(numbers[-1])
