"""Gets and puts: their requests to the agent, the meaning of its answers, and the memory they hold meanwhile. Pure,
except `verify`, which a thread of the hash lane runs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvoffloadd.agentwire.frames import ADDRESSES_MAX, HEADER_BYTES, KEYS_MAX, PARTS_MAX, Code, Get, Put
from kvoffloadd.agentwire.names import Space
from kvoffloadd.errors import UsageError
from kvoffloadd.model import I64Array, U8Array, U32Array, U64Array
from kvoffloadd.storage.hashing import hash_payloads
from kvoffloadd.storage.remote.header import match_headers


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """`keys`: (n, 4) u64, as everywhere in the cache."""

    space: Space
    keys: U64Array

    def packed(self) -> bytes:
        """Returns 32 bytes of each key."""
        return np.ascontiguousarray(self.keys, "<u8").tobytes()


class RemoteStatus(enum.IntEnum):
    """The result for one key of a get or put."""

    OK = 0
    MISS = 1  # absent, or not complete
    LEASE_OVER = 2  # evicted while it came
    SIZE = 3  # corrupt: of another size
    HEADER = 4  # corrupt: the header page is damaged, or does not match the request
    PAYLOAD = 5  # corrupt: a checksum differs
    NO_SPACE = 6  # of a put
    FAILED = 7  # the store failed, or the agent died
    NOT_ASKED = 8  # no agent, breaker open, no room in flight, too late, or cancelled: nothing is known about it


CORRUPT: Final = (RemoteStatus.SIZE, RemoteStatus.HEADER, RemoteStatus.PAYLOAD)
"""Counted, and removed from the store, by `RemoteStore`. For its callers these are misses."""

_OF_CODE: Final = {
    Code.MISS: RemoteStatus.MISS,
    Code.NOT_COMPLETE: RemoteStatus.MISS,
    Code.NO_SPACE: RemoteStatus.NO_SPACE,
    Code.LEASE_OVER: RemoteStatus.LEASE_OVER,
    Code.SIZE: RemoteStatus.SIZE,
    Code.REFUSED: RemoteStatus.FAILED,
    Code.FAILED: RemoteStatus.FAILED,
}
_STATUS: Final = np.array([_OF_CODE[Code(code)] for code in range(min(Code), 0)], np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class GetResult:
    """The result of a get. `status`: (n,) u8 of `RemoteStatus`; `digests`: (n, parts, 2) u64, of the payloads of keys
    that are OK. The memory of the others has arbitrary contents.
    """

    status: U8Array
    digests: U64Array


@dataclass(frozen=True, slots=True, eq=False)
class ObjectBatch:
    """The data of one get or put. `addresses`: (n, p), in this process; `headers`: (n,) numbers of header pages."""

    names: Names
    addresses: U64Array
    part_bytes: U64Array
    headers: U32Array

    @property
    def object_bytes(self) -> int:
        """Returns the bytes of each object."""
        return HEADER_BYTES + int(self.part_bytes.sum())

    @property
    def total_bytes(self) -> int:
        """Returns the bytes of all objects."""
        return len(self.names.keys) * self.object_bytes

    def frame(self, cls: type[Get] | type[Put], arena_address: int, call_id: int) -> Get | Put:
        """Makes the frame for the agent."""
        return cls(
            call_id,
            self.names.space,
            self.names.packed(),
            (self.headers.astype("<u8") * np.uint64(HEADER_BYTES)).tobytes(),
            (self.addresses - np.uint64(arena_address)).astype("<u8").tobytes(),
            self.part_bytes.astype("<u8").tobytes(),
        )

    def status(self, codes: I64Array | None) -> U8Array:
        """Returns each key's status from an answer. None: the agent died."""
        if codes is None:
            return np.full(len(self.names.keys), RemoteStatus.FAILED, np.uint8)
        status = np.where(codes == self.object_bytes, RemoteStatus.OK, RemoteStatus.SIZE).astype(np.uint8)
        status[codes < 0] = _STATUS[codes[codes < 0]]
        return status


def checked_shapes(
    names: Names, addresses: U64Array, part_bytes: Sequence[int], arena_address: int, arena_bytes: int
) -> U64Array:
    """Returns `part_bytes` as an array. Raises UsageError for shapes that differ, too many, or memory outside the
    arena.
    """
    sizes = np.array(part_bytes, np.uint64)
    count = len(names.keys)
    if addresses.shape != (count, len(sizes)) or names.keys.shape != (count, 4):
        raise UsageError(f"{count} keys and {len(sizes)} sizes, but addresses {addresses.shape}")
    if not count or not len(sizes) or not sizes.all():
        raise UsageError("no keys, no parts, or parts without bytes")
    if count > KEYS_MAX or len(sizes) > PARTS_MAX or addresses.size > ADDRESSES_MAX:
        raise UsageError(f"{count} keys of {len(sizes)} parts are too many for one call")
    ends_before = np.uint64(arena_address + arena_bytes) - sizes  # of a part of each size
    if sizes.max() > arena_bytes or (addresses < arena_address).any() or (addresses > ends_before).any():
        raise UsageError("an address outside the arena")
    return sizes


def verify(batch: ObjectBatch, status: U8Array, pages: U8Array) -> GetResult:
    """Checks received keys (OK in `status`, which is changed) against their headers, (n, 4096): in a thread.

    A key that is still OK is the requested one, whole and unchanged since it was written.
    """
    parts = len(batch.part_bytes)
    digests = np.zeros((len(status), parts, 2), np.uint64)
    came = np.flatnonzero(status == RemoteStatus.OK)
    valid, named = match_headers(pages[came], batch.names.space, batch.names.keys[came], batch.part_bytes)
    status[came[~valid]] = RemoteStatus.HEADER
    came, named = came[valid], named[valid]
    sizes = np.tile(batch.part_bytes.astype(np.int64), len(came))
    found = hash_payloads(batch.addresses[came].ravel(), sizes).reshape(len(came), parts, 2)
    good = (found == named).all(axis=(1, 2))
    status[came[~good]] = RemoteStatus.PAYLOAD
    digests[came[good]] = found[good]
    return GetResult(status, digests)
