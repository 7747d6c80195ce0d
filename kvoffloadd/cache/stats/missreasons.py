"""Why lookups miss: was a key never stored, evicted, cleared or corrupt? Event loop only.

Two tables of fixed size, 16 MiB together, whose pages cost memory once they are written. Direct-mapped: a key replaces
the previous key in its slot, so memory fades by itself. Both kinds of error only move a miss from one reason to
another:

- A forgotten key counts as never stored: after as many other keys as a table has slots (4 Mi that went, 2 Mi that were
  stored) 63 % of them.
- A key that was never stored passes for one that went with chance 2**-13 at most, for one of another namespace with
  chance 2**-18.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from kvoffloadd.cache.memory.keyhash import SEED_BITS, KeyHash
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import BoolArray, U8Array, U16Array, U32Array, U64Array

_GONE_BITS, _STORED_BITS = 22, 21
_REASON_BITS, _NAMESPACE_BITS = 3, 14
_SALTS_MAX = 1 << 12
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Reason:
    """Why a key is missed. Plain ints: indices into `REASONS`. A `MissReasons` distinguishes the first five."""

    NEVER_STORED: Final = 0
    EVICTED: Final = 1
    CLEARED: Final = 2
    CORRUPT: Final = 3
    OTHER_NAMESPACE: Final = 4
    INCOMPLETE: Final = 5
    PENDING: Final = 6


REASONS = (
    "never_stored", "evicted", "cleared", "failed_verification", "other_namespace", "incomplete", "pending",
)  # fmt: skip
"""Names of the reasons, for `status` and metrics."""


class MissReasons:
    """Keys that were complete once: how each went, by namespace; and which of its user's namespaces had each first. No
    report to one user depends on the keys that another has stored: keys name prompts.

    `seed`, below 2**128, is the secret of the hash. Keys are (n, WORDS) u64; a key of another group is another key.
    """

    def __init__(self, seed: int) -> None:
        self.hash = KeyHash(seed, "ghosts")
        """Maps (group, keys) to a u64 per key, the same in every namespace. All bits count."""
        self._secret = hashlib.shake_256(seed.to_bytes(SEED_BITS // 8, "little") + b"namespaces").digest(16)
        self._salts: dict[bytes, np.uint64] = {}
        self._gone: U16Array = reserve_array((1 << _GONE_BITS,), np.uint16, scattered=True)
        self._stored: U32Array = reserve_array((1 << _STORED_BITS,), np.uint32, scattered=True)

    def came(self, uid: int, fingerprint: bytes, h: U64Array) -> None:
        """Records that keys with these hashes are complete in this namespace. If another namespace of the user had them
        before, that record stays.
        """
        h = self._of_user(uid, h)
        slots, marks = _slots(h, _STORED_BITS), _names(h)
        known = self._stored[slots]
        self._stored[slots] = np.where(_differ(known, marks), marks | self._number(fingerprint), known)

    def went(self, fingerprint: bytes, h: U64Array, reason: int) -> None:
        """Records that complete keys with these hashes are not held any more: EVICTED, CLEARED or CORRUPT."""
        h = self._own(fingerprint, h)
        self._gone[_slots(h, _GONE_BITS)] = _marks(h) | np.uint16(reason)

    def why(self, uid: int, fingerprint: bytes, h: U64Array) -> U8Array:
        """Returns the reason for each key, by its `hash`, that was not held when this namespace asked for it. That may
        have been some time ago: later stores of the namespace change nothing. Changes nothing.
        """
        of_user = self._of_user(uid, h)
        marks = _names(of_user)
        stored = self._stored[_slots(of_user, _STORED_BITS)]
        others = ~_differ(stored, marks) & (stored ^ marks != self._number(fingerprint))
        reasons = np.where(others, np.uint8(Reason.OTHER_NAMESPACE), np.uint8(Reason.NEVER_STORED))
        own = self._own(fingerprint, h)
        how = self._gone[_slots(own, _GONE_BITS)] ^ _marks(own)
        went = (how > 0) & (how <= Reason.CORRUPT)
        reasons[went] = how[went]
        return reasons

    def _own(self, owner: bytes, h: U64Array) -> U64Array:
        """Returns the hashes of keys with their namespace, or user."""
        own: U64Array = (h ^ self._salt(owner)) * _GOLDEN
        own ^= own >> np.uint64(32)
        return own

    def _of_user(self, uid: int, h: U64Array) -> U64Array:
        return self._own(b"uid %d" % uid, h)

    def _number(self, fingerprint: bytes) -> np.uint32:
        """Returns the number of a namespace in a slot; never 0, which marks an empty one."""
        return np.uint32(int(self._salt(fingerprint)) % ((1 << _NAMESPACE_BITS) - 1) + 1)

    def _salt(self, owner: bytes) -> np.uint64:
        salt = self._salts.get(owner)
        if salt is None:
            if len(self._salts) >= _SALTS_MAX:
                self._salts.clear()
            digest = hashlib.blake2b(owner, digest_size=8, key=self._secret).digest()
            salt = self._salts[owner] = np.uint64(int.from_bytes(digest, "little"))
        return salt


def _slots(h: U64Array, bits: int) -> U64Array:
    slots: U64Array = h & np.uint64((1 << bits) - 1)
    return slots


def _marks(h: U64Array) -> U16Array:
    return (h >> np.uint64(64 - 16 + _REASON_BITS)).astype(np.uint16) << np.uint16(_REASON_BITS)


def _names(h: U64Array) -> U32Array:
    return (h >> np.uint64(64 - 32 + _NAMESPACE_BITS)).astype(np.uint32) << np.uint32(_NAMESPACE_BITS)


def _differ(stored: U32Array, names: U32Array) -> BoolArray:
    """Returns which slots hold another key than this, or none."""
    differ: BoolArray = (stored ^ names >= np.uint32(1 << _NAMESPACE_BITS)) | (stored == 0)
    return differ
