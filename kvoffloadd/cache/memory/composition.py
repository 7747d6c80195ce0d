"""What the bytes of a part are: which dtypes and layers, as far as sessions tell, so that unlike ones never meet."""

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
    """Describes one part of a group. Both are empty where a ref of the part does not name them.

    `dtypes`: the dtype, or the names of several and a digest of what has which. `layers`: a digest of the layers.
    """

    dtypes: str = ""
    layers: bytes = b""

    @classmethod
    def of(cls, refs: Sequence[Ref]) -> Self:
        """Derives the composition of these refs. How their bytes are cut into refs makes no difference."""
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
        """Whether anything is known."""
        return bool(self.dtypes or self.layers)

    def filled(self, other: Composition) -> Composition:
        """What is known of the two together, which do not differ."""
        return Composition(self.dtypes or other.dtypes, self.layers or other.layers)

    def conflict(self, other: Composition) -> tuple[str, str] | None:
        """What both know and differ in: what this one has, and what the other has."""
        if self.dtypes and other.dtypes and self.dtypes != other.dtypes:
            return f"elements of {self.dtypes}", f"of {other.dtypes}"
        if self.layers and other.layers and self.layers != other.layers:
            return f"layers with the digest {self.layers.hex()}", other.layers.hex()
        return None


UNKNOWN = Composition()


def _digest(pieces: Iterable[tuple[str | bytes, int]]) -> bytes:
    """Digests pieces (what, bytes), where neighbours that are the same count as one."""
    joined = [(what, sum(size for _, size in same)) for what, same in itertools.groupby(pieces, key=lambda one: one[0])]
    return hashlib.blake2b(msgpack.packb(joined), digest_size=_DIGEST_BYTES).digest()
