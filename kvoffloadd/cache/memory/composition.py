"""Describes what the bytes of a part are: which dtypes and layers, as far as sessions name them, so that unlike bytes
never mix.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import msgpack

from kvoffloadd.model import Ref

_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Composition:
    """Describes one part of a group. Both fields are empty where a ref of the part does not name them.

    `dtypes`: the dtype, or the names of several dtypes and a digest of their assignment. `layers`: a digest of the
    layers.
    """

    dtypes: str = ""
    layers: bytes = b""

    @classmethod
    def of(cls, refs: Sequence[Ref]) -> Self:
        """Derives the composition of these refs. The division of their bytes into refs makes no difference."""
        dtypes, layers = "", b""
        if refs and all(ref.dtype for ref in refs):
            names = sorted({ref.dtype for ref in refs})
            dtypes = "+".join(names)
            if len(names) > 1:
                dtypes += "#" + _digest((ref.dtype, ref.payload_bytes) for ref in refs).hex()
        if refs and all(ref.layers for ref in refs):
            layers = _digest((ref.layers, ref.payload_bytes) for ref in refs)
        return cls(dtypes, layers)

    @property
    def known(self) -> bool:
        """Returns whether anything is known."""
        return bool(self.dtypes or self.layers)

    def filled(self, other: Composition) -> Composition:
        """Combines the known fields of two compositions that do not differ."""
        return Composition(self.dtypes or other.dtypes, self.layers or other.layers)

    def conflict(self, other: Composition) -> tuple[str, str] | None:
        """Returns the first field that both know and that differs: the value of this one, and the value of the other;
        None if they agree.
        """
        if self.dtypes and other.dtypes and self.dtypes != other.dtypes:
            return f"elements of {self.dtypes}", f"of {other.dtypes}"
        if self.layers and other.layers and self.layers != other.layers:
            return f"layers with the digest {self.layers.hex()}", other.layers.hex()
        return None


UNKNOWN = Composition()


def _digest(pieces: Iterable[tuple[str | bytes, int]]) -> bytes:
    """Digests pieces (what, bytes); equal neighbours count as one."""
    joined = [
        (what, sum(size for _, size in same)) for what, same in itertools.groupby(pieces, key=lambda pair: pair[0])
    ]
    return hashlib.blake2b(msgpack.packb(joined), digest_size=_DIGEST_BYTES).digest()
