"""Eras, and the small objects that name them. Pure.

Every client with write access to the store can write these objects. So an era is read only if later numbers exist: the
writer and the reader of each number have the same bound, and a number derived from a valid one is valid again.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from kvoffloadd.agentwire.names import ERA_BYTES
from kvoffloadd.model import EPOCH_MAX

COUNT_MAX: Final = (1 << 32) - (1 << 16)
"""Eras of one generation. A host that meets the last one clears, which begins a new generation."""

_COUNT_BYTES: Final = 4
_ERA = struct.Struct(f"<8sQ{ERA_BYTES}s")  # magic, generation, id; then the xxh3_128 of the fingerprint and these
_MAGIC: Final = b"KVOERA1\n"


@dataclass(frozen=True, slots=True, order=True)
class Era:
    """An era; see `eras`. `generation`: the namespace's epoch. `id`: a big-endian four-byte count of eras of the
    generation, then random bytes.
    """

    generation: int
    id: bytes

    @property
    def count(self) -> int:
        """The era's number in its generation."""
        return int.from_bytes(self.id[:_COUNT_BYTES])

    @property
    def is_last(self) -> bool:
        """Whether no era of the same generation can follow."""
        return self.count >= COUNT_MAX

    def after(self, epoch: int) -> Era:
        """Returns the begin of the id of a later era of this generation, or of a later generation if this era
        `is_last`.
        """
        count = 0 if epoch > self.generation else self.count + 1
        return Era(epoch, count.to_bytes(_COUNT_BYTES))


def new_era(begins: Era) -> Era:
    """Returns a unique era: keeps the count of the given id and makes the rest random."""
    return Era(begins.generation, begins.id[:_COUNT_BYTES] + secrets.token_bytes(ERA_BYTES - _COUNT_BYTES))


def encode_era(fingerprint: bytes, era: Era) -> bytes:
    """Returns the value of a small object of this namespace that names the era. Raises ValueError if no reader would
    accept it.
    """
    if not (0 <= era.generation <= EPOCH_MAX and era.count <= COUNT_MAX and len(era.id) == ERA_BYTES):
        raise ValueError(f"{era} is beyond the last era")
    fields = _ERA.pack(_MAGIC, era.generation, era.id)
    return fields + xxhash.xxh3_128_digest(fingerprint + fields)


def decode_era(fingerprint: bytes, value: bytes) -> Era | None:
    """Returns the era that a small object names; None: it is damaged, another namespace's, or beyond the last era."""
    fields = value[: _ERA.size]
    if len(fields) < _ERA.size or value[_ERA.size :] != xxhash.xxh3_128_digest(fingerprint + fields):
        return None
    magic, generation, identity = _ERA.unpack(fields)
    era = Era(generation, identity)
    return era if magic == _MAGIC and generation <= EPOCH_MAX and era.count <= COUNT_MAX else None
