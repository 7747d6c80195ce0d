"""A long request in pieces that the daemon takes: so many keys, and so many bytes of a frame, at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from kvoffloadd.client import KvCache
from kvoffloadd.integrations.vllm.names import KEY_BYTES
from kvoffloadd.model import key_price
from kvoffloadd.protocol.messages import Limits

Piece = dict[int, slice]
"""Group -> which of its keys."""

_BLOCK_BYTES = 4
_FRAME_BYTES = 1024
_GROUP_BYTES = 64
"""What a frame has beside keys and blocks, at most."""


def most_keys(limits: Limits | None, caches: KvCache, groups: int, blocks_per_key: int = 0) -> int:
    """How many keys of `caches` fit one request that names so many groups, and so many blocks with each key."""
    if limits is None:
        return sys.maxsize
    parts = max((group.parts for group in caches.groups), default=1)
    bytes_per_key = KEY_BYTES + blocks_per_key * _BLOCK_BYTES
    room = limits.frame_bytes - _FRAME_BYTES - groups * _GROUP_BYTES
    return max(1, min(limits.keys_per_request // key_price(parts, 1), room // bytes_per_key))


def pieces(counts: Mapping[int, int], most: int) -> list[Piece]:
    """All keys of all groups, in order, `most` at once. `counts`: how many each group has."""
    dealt: list[Piece] = []
    room = 0
    for group, count in counts.items():
        at = 0
        while at < count:
            if not room:
                dealt.append({})
                room = most
            taken = min(room, count - at)
            dealt[-1][group] = slice(at, at + taken)
            at += taken
            room -= taken
    return dealt
