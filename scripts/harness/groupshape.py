"""The shape of a KV-cache group: the runs of bytes of a block in each tensor, and the part that each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffloadd.client import GroupKind


@dataclass(frozen=True, slots=True)
class RefShape:
    """`count` runs of `length` bytes in a row of tensor `tensor`."""

    tensor: int
    length: int
    count: int = 1

    @property
    def payload_bytes(self) -> int:
        """Returns the bytes of one block."""
        return self.length * self.count


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group: `parts[p]` are the refs of part p; `part_of_rank[r]` is what rank r holds, None: nothing."""

    number: int
    kind: GroupKind
    tokens_per_key: int
    window_keys: int
    blocks_per_key: int
    parts: tuple[tuple[RefShape, ...], ...]
    part_of_rank: tuple[int | None, ...]

    def payload_bytes(self, part: int) -> int:
        """Returns the bytes of one key."""
        return self.blocks_per_key * sum(ref.payload_bytes for ref in self.parts[part])

    def first_needed(self, length: int) -> int:
        """Index of the first key that a prefix of `length` keys needs; `length` itself: none."""
        if self.kind is GroupKind.FULL:
            return 0
        if self.kind is GroupKind.MAMBA:
            return length - 1
        if self.kind is GroupKind.CHUNKED:
            return length - length % self.window_keys
        return max(0, length - self.window_keys)
