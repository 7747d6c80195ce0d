"""Types that every room shares: array types, units, groups, refs, namespaces, outcomes. No behaviour with side
effects.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

U8Array = npt.NDArray[np.uint8]
U16Array = npt.NDArray[np.uint16]
U32Array = npt.NDArray[np.uint32]
U64Array = npt.NDArray[np.uint64]
I64Array = npt.NDArray[np.int64]
F64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

PAGE_BYTES = 4096
"""Alignment of every slot, which O_DIRECT and cuMemHostRegister require."""

HUGE_PAGE_BYTES = 2 << 20
"""A huge page of the size that every x86-64 and most arm64 kernels have."""


def slot_pages(payload_bytes: int) -> int:
    """Returns the pages of the slot that holds a payload of this size in bytes."""
    return -(-payload_bytes // PAGE_BYTES)


def slot_bytes(payload_bytes: int) -> int:
    """Returns the bytes of the slot that holds a payload of this size in bytes."""
    return slot_pages(payload_bytes) * PAGE_BYTES


NO_BLOCK = 0xFFFFFFFF
"""The value in packed block ids for a block of the key that is not wanted."""

PARTS_AT_THE_PRICE_OF_ONE = 16
"""Every operation on a key costs a little for each of its parts: this number of parts costs about as much as another
key.
"""


def key_price(parts: int, named: int) -> int:
    """Returns how many keys a key with these `parts` counts as, in a request for `named` of them."""
    return max(named, -(-parts // PARTS_AT_THE_PRICE_OF_ONE))


EPOCH_MAX = (1 << 53) - 1
"""The latest epoch of a namespace: see `cache.epochs`. A record with a later one is damaged. Microseconds until the
year 2255, and exact in a double.
"""

DROPPED = ", dropped"
"""The end of a finding of the self-audit that does not hold any more: on the wire a finding is text."""

KEY_BYTES_MIN, KEY_BYTES_MAX = 8, 32
"""Widths a namespace may declare for its keys; wider names are hashed by the client."""

PARTS_PER_KEY_MAX, BLOCKS_PER_KEY_MAX, TOKENS_PER_KEY_END = 1024, 4096, 1 << 24
"""Bounds of a group: for sessions that declare it, and for the records of disks and saved state."""


class GroupKind(enum.StrEnum):
    """The keys before a boundary that a group's layers need (design: `lookup`)."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MAMBA = "mamba"

    def first_needed(self, lengths: I64Array, window_keys: int) -> I64Array:
        """Returns the index of the first key that a prefix needs, for prefixes of these `lengths` in keys, each 1 or
        more.

        `window_keys`: that of the group, see `GroupSchema`. A prefix needs every key from there to its end.
        """
        match self:
            case GroupKind.FULL:
                return np.zeros_like(lengths)
            case GroupKind.SLIDING:
                return np.maximum(lengths - window_keys, 0)
            case GroupKind.CHUNKED:
                return lengths // window_keys * window_keys
            case GroupKind.MAMBA:
                return lengths - 1


class KeyState(enum.IntEnum):
    """The answer per key, one u8 each, in `lookup`, `pin`, `reserve`, `store` and `load`."""

    MISS = 0
    HIT = 1
    PENDING = 2
    RESERVED = 3
    NO_SPACE = 4


class Tier(enum.IntEnum):
    """The location or the source of a key, one u8 each, in the answer to `pin`."""

    MEMORY = 0
    DISK = 1
    REMOTE = 2


class Outcome(enum.StrEnum):
    """How a job ended. After any outcome, the job's blocks belong to the client again."""

    DONE = "done"
    PARTIAL = "partial"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"  # reported by the client library alone: the daemon died


class Direction(enum.StrEnum):
    """The direction in which a job moves bytes: STORE from worker memory to the daemon, LOAD back."""

    STORE = "store"
    LOAD = "load"


Dtype = Literal[
    "", "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint64", "uint32",
    "uint16", "uint8", "bool",
]  # fmt: skip
"""The elements of a KV cache, by torch's names. Empty: not known, or elements of several types."""

_DTYPES: dict[str, Dtype] = {name: name for name in get_args(Dtype)}

LAYERS_BYTES = 8
"""Length of `Ref.layers`, where it is known."""


def dtype_named(name: object) -> Dtype:
    """Returns the dtype of this name, which may be torch's own object; a dtype that is not on the list is not known."""
    return _DTYPES.get(str(name).removeprefix("torch."), "")


def common_dtype(dtypes: Iterable[Dtype]) -> Dtype:
    """Returns the dtype of elements of all these dtypes: not known unless they are the same."""
    distinct = set(dtypes)
    return distinct.pop() if len(distinct) == 1 else ""


def digest_layers(names: Iterable[str]) -> bytes:
    """Returns `Ref.layers` for layers of these names, in this order (docs/PROTOCOL.md); not known without any."""
    encoded = [name.encode() for name in names]
    whole = b"".join(struct.pack("<I", len(name)) + name for name in encoded)
    return hashlib.sha256(whole).digest()[:LAYERS_BYTES] if encoded else b""


@dataclass(frozen=True, slots=True)
class Ref:
    """The bytes of a group in one row of a canonical tensor: `count` runs of `length` bytes, `stride` apart, from
    `offset`.

    `dtype`: that of their elements. `layers`: see `digest_layers`; the digest of the layers that these bytes belong to,
    empty if they are not known. Layers that continue in the next ref count in both, and both have the same digest.
    """

    tensor: int
    offset: int
    length: int
    count: int = 1
    stride: int = 0
    dtype: Dtype = ""
    layers: bytes = b""

    @property
    def payload_bytes(self) -> int:
        """Returns the bytes that one block contributes to a payload through this ref."""
        return self.length * self.count

    @property
    def end(self) -> int:
        """Returns the offset in the row after the last run."""
        return self.offset + (self.count - 1) * self.stride + self.length


@dataclass(frozen=True, slots=True)
class GroupSchema:
    """The properties of a group that all sessions of a namespace must agree on.

    `parts` is P: a key is complete when that many parts are committed. `window_keys` counts keys: for SLIDING the keys
    that hold the last `window - 1` tokens before a boundary, for CHUNKED the keys of one attention chunk; 0 otherwise.
    """

    group: int
    kind: GroupKind
    tokens_per_key: int
    window_keys: int = 0
    blocks_per_key: int = 1
    parts: int = 1

    def __str__(self) -> str:
        facts = [f"{field.name} {getattr(self, field.name)}" for field in fields(self) if field.name != "group"]
        return f"({', '.join(facts)})"

    def price(self, parts: int) -> int:
        """Returns how many keys a key counts as, in a request for this number of its parts."""
        return key_price(self.parts, parts)
