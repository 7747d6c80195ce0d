"""What every key and every byte must be: pure functions of a seed, so that any process can check any other's.

A payload's u64 word w of key k is `table[w] ^ digest(k)`: the table differs by group and part and never repeats, so a
byte of another key, group, part or place, and one left from before, is not what is expected here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvoffloadd.model import U8Array, U64Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mixed(values: U64Array) -> U64Array:
    """Each value well mixed (the finalizer of splitmix64): neighbours become unlike."""
    mixed_values = values + _GOLDEN
    mixed_values = (mixed_values ^ (mixed_values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_values = (mixed_values ^ (mixed_values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_values ^ (mixed_values >> np.uint64(31))


def digest(*numbers: int) -> int:
    """One u64 of several small numbers."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = mixed(state ^ np.array([number], np.uint64))
    return int(state[0])


class Oracle:
    """Keys and contents of one namespace."""

    def __init__(self, seed: int, namespace: int, key_bytes: int) -> None:
        self.key_bytes = key_bytes
        self._seed = digest(seed, namespace)
        self._tables: dict[tuple[int, int, int], U64Array] = {}

    def keys(self, conversation: int, tokens_per_key: int, first: int, count: int) -> U8Array:
        """u8 (count, key_bytes): keys `first` to `first + count` of a conversation, cut every `tokens_per_key`."""
        start = np.uint64(digest(self._seed, conversation, tokens_per_key))
        words = -(-self.key_bytes // 8)
        numbers = np.arange(first, first + count, dtype=np.uint64)[:, None] * np.uint64(words)
        chain = mixed(mixed(numbers + np.arange(words, dtype=np.uint64)) ^ start)
        return np.ascontiguousarray(chain.view(np.uint8)[:, : self.key_bytes])

    def contents(self, group: int, part: int, keys: U8Array, payload_bytes: int) -> U8Array:
        """u8 (keys, payload_bytes): what these keys' payloads are."""
        words = -(-payload_bytes // 8)
        table = self._table(group, part, words)
        return (table[None, :] ^ key_digests(keys)[:, None]).view(np.uint8)[:, :payload_bytes]

    def _table(self, group: int, part: int, words: int) -> U64Array:
        name = (group, part, words)
        if name not in self._tables:
            self._tables[name] = mixed(np.arange(words, dtype=np.uint64) ^ np.uint64(digest(self._seed, group, part)))
        return self._tables[name]


def key_digests(keys: U8Array) -> U64Array:
    """A u64 per key, of all its bytes."""
    padded = np.zeros((len(keys), -(-keys.shape[1] // 8) * 8), np.uint8)
    padded[:, : keys.shape[1]] = keys
    found = np.zeros(len(keys), np.uint64)
    for word in padded.view(np.uint64).T:
        found = mixed(found ^ word)
    return found
