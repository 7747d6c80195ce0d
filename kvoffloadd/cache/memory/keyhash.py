"""Hashes keys with a secret, so that a client can't choose keys that collide."""

from __future__ import annotations

import hashlib

import numpy as np

from kvoffloadd.model import KEY_BYTES_MAX, U16Array, U64Array
from kvoffloadd.native import loader

SEED_BITS = 128
_HALF_BITS = np.uint64(32)
_HIGH_HALF = np.uint64(0xFFFFFFFF00000000)
_HALVES = KEY_BYTES_MAX // 4


class KeyHash:
    """Maps (keyspace, key) to a u64, with a secret that is derived from `seed` (below 2**SEED_BITS) and `purpose`.

    Multilinear hashing (Lemire and Kaser, 2014), twice: a sum modulo 2**64 of each 32-bit half of the key, and of the
    keyspace, each times another secret factor; the hash takes the upper 32 bits of the sum. Over the choice of the
    secret, the hashes of any two different keys are uniform and independent: they are equal with probability 2**-64,
    and any b bits of them with probability 2**-b, for any choice of keys that does not depend on the secret. Sums of
    whole words would not be enough: the top bits of a word affect only the top bits of its product, for any factor.

    A bijection with secret factors follows, which removes the linearity of the sums: a client that learns of two keys
    with some equal hash bits can't infer which other keys share them.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        secret = hashlib.shake_256(seed.to_bytes(SEED_BITS // 8, "little") + purpose.encode())
        words: U64Array = np.frombuffer(secret.digest(8 * (2 * _HALVES + 6)), "<u8").astype(np.uint64)
        self._factors = words[: 2 * _HALVES].reshape(_HALVES, 2)
        self._of_space, self._offset = words[2 * _HALVES : 2 * _HALVES + 4].reshape(2, 2)
        self._mixers = words[-2:] | np.uint64(1)
        self._secret = np.concatenate([words[:-2], self._mixers])

    def __call__(self, keyspace: int | U16Array | U64Array, keys: U64Array) -> U64Array:
        """Returns a u64 per key. `keys`: (n, WORDS); `keyspace`: of all keys, or of each."""
        if loader.HELPER is None:
            return self._in_numpy(keyspace, keys)
        hashes = np.empty(len(keys), np.uint64)
        loader.HELPER.hash_keys(self._secret, keyspace, np.ascontiguousarray(keys), hashes)
        return hashes

    def _in_numpy(self, keyspace: int | U16Array | U64Array, keys: U64Array) -> U64Array:
        sums = keys.view(np.uint32).astype(np.uint64) @ self._factors
        keyspaces = keyspace[:, None] if isinstance(keyspace, np.ndarray) else np.uint64(keyspace)
        sums += keyspaces * self._of_space + self._offset
        h: U64Array = sums[:, 0] >> _HALF_BITS
        h |= sums[:, 1] & _HIGH_HALF
        h ^= h >> np.uint64(32)
        h *= self._mixers[0]
        h ^= h >> np.uint64(29)
        h *= self._mixers[1]
        h ^= h >> np.uint64(32)
        return h
