"""Computes which blocks of each group a transfer needs. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffloadd.errors import UsageError
from kvoffloadd.model import GroupKind, Ref


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a group's layers look. `block_size` and `window` in tokens; `window`: of sliding attention, or a
    chunk's size. Raises UsageError for values that make no reach.
    """

    kind: GroupKind
    block_size: int
    window: int = 0

    def __post_init__(self) -> None:
        windowed = self.kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
        if self.block_size < 1 or (self.window > 0) != windowed:
            raise UsageError(f"a group of kind {self.kind} with blocks of {self.block_size} and window {self.window}")

    def blocks(self, tokens: int, local: int = 0) -> range:
        """Returns the blocks that the token behind a prefix of that many tokens needs; the prefix need not end with a
        block.

        `local`: how many of the prefix's blocks, from the first on, are there already, and not wanted. Raises
        UsageError if that is more than the prefix has.
        """
        end, first = -(-tokens // self.block_size), self._first_token(tokens)
        if not 0 <= local <= end:
            raise UsageError(
                f"{local} local blocks, but the prefix of {tokens} tokens has {end} blocks of {self.block_size}: "
                "local blocks are those of the prefix alone"
            )
        return range(max(local, first // self.block_size if first < tokens else end), end)

    def _first_token(self, tokens: int) -> int:
        match self.kind:
            case GroupKind.FULL:
                return 0
            case GroupKind.SLIDING:
                return max(0, tokens - self.window + 1)
            case GroupKind.CHUNKED:
                return tokens // self.window * self.window
            case GroupKind.MAMBA:
                return max(0, tokens - 1)


def clip(blocks: range, window: int, block_size: int) -> range:
    """Returns the last of these blocks, `ceil(window / block_size) + 1`: engines request that many, wherever a prefix
    may end.
    """
    return blocks[-window // block_size - 1 :]


def descriptors(refs: Sequence[Sequence[Ref]], blocks: Sequence[int]) -> int:
    """Counts the runs of all blocks before any are merged: `refs` and number of blocks of each group."""
    return sum(count * sum(ref.count for ref in group_refs) for group_refs, count in zip(refs, blocks, strict=True))
