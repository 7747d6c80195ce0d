"""Eras, and the small objects that name them. Pure.

Whoever can write to the store can write these objects. So an era is read only if there is room behind it: the writer
and the reader of each number have the same bound, and what is made from a number that was read can be read again.
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
    """See `eras`. `generation`: the namespace's epoch. `id`: four bytes that count eras of the generation, big-endian,
    then random ones.
    """

    generation: int
    id: bytes

    @property
    def count(self) -> int:
        """Which era of its generation it is."""
        return int.from_bytes(self.id[:_COUNT_BYTES])

    @property
    def is_last(self) -> bool:
        """Whether no era of the same generation can follow."""
        return self.count >= COUNT_MAX

    def after(self, epoch: int) -> Era:
        """What a later era of this generation, or of a later one, begins with; of this one unless it `is_last`."""
        count = 0 if epoch > self.generation else self.count + 1
        return Era(epoch, count.to_bytes(_COUNT_BYTES))


def new_era(begins: Era) -> Era:
    """An era that nobody else makes: of what its id begins with the count stays, and the rest is random."""
    return Era(begins.generation, begins.id[:_COUNT_BYTES] + secrets.token_bytes(ERA_BYTES - _COUNT_BYTES))


def encode_era(fingerprint: bytes, era: Era) -> bytes:
    """The value of a small object of this namespace that names the era. Raises ValueError: no reader would take it."""
    if not (0 <= era.generation <= EPOCH_MAX and era.count <= COUNT_MAX and len(era.id) == ERA_BYTES):
        raise ValueError(f"{era} is beyond the last era")
    fields = _ERA.pack(_MAGIC, era.generation, era.id)
    return fields + xxhash.xxh3_128_digest(fingerprint + fields)


def decode_era(fingerprint: bytes, value: bytes) -> Era | None:
    """The era that a small object names; None: it is damaged, another namespace's, or beyond the last era."""
    fields = value[: _ERA.size]
    if len(fields) < _ERA.size or value[_ERA.size :] != xxhash.xxh3_128_digest(fingerprint + fields):
        return None
    magic, generation, identity = _ERA.unpack(fields)
    era = Era(generation, identity)
    return era if magic == _MAGIC and generation <= EPOCH_MAX and era.count <= COUNT_MAX else None
