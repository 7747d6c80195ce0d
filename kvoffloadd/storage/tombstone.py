"""Tombstones: what remains of deleted keys, so that older copies of them do not come back."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvoffloadd.model import EPOCH_MAX, KEY_BYTES_MAX, KEY_BYTES_MIN


class Tombstone(msgspec.Struct, frozen=True, array_like=True):
    """Keys of one group in one epoch of a namespace that were deleted at once.

    `number` is a place in the history of records: those of these keys with a `sequence` up to it are void, later ones
    count. `keys`: packed, of `key_bytes` each. `in_store`: the remote store may still have their objects.
    """

    fingerprint: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    uid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    epoch: Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)]
    group: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    number: Annotated[int, msgspec.Meta(ge=1, le=EPOCH_MAX)]
    key_bytes: Annotated[int, msgspec.Meta(ge=KEY_BYTES_MIN, le=KEY_BYTES_MAX)]
    keys: bytes
    in_store: bool = False

    @property
    def space(self) -> tuple[bytes, int, int]:
        """Returns what its keys belong to: the fingerprint of their namespace, the epoch, and the group."""
        return self.fingerprint, self.epoch, self.group

    @property
    def id(self) -> tuple[bytes, int, int, int]:
        """Returns what identifies it, wherever it is recorded: no number is used twice."""
        return self.fingerprint, self.epoch, self.group, self.number

    @property
    def num_keys(self) -> int:
        """Returns the number of its keys."""
        return len(self.keys) // self.key_bytes

    @property
    def is_sound(self) -> bool:
        """Returns whether its keys are whole."""
        return len(self.keys) % self.key_bytes == 0
