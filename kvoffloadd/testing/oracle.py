"""Defines every key and every byte as pure functions of a seed, so that any process can check any other's.

A payload's u64 word w of key k is `table[w] ^ digest(k)`: the table differs by group and part and never repeats, so a
byte of another key, group, part or place, and one left from before, differs from the expected byte.
"""

from __future__ import annotations

import numpy as np

from kvoffloadd.model import U8Array, U64Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROOT = 1 << 40  # above every conversation's number


def mixed(values: U64Array) -> U64Array:
    """Returns each value well mixed (the finalizer of splitmix64): neighbours become unlike."""
    mixed_values = values + _GOLDEN
    mixed_values = (mixed_values ^ (mixed_values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_values = (mixed_values ^ (mixed_values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_values ^ (mixed_values >> np.uint64(31))


def digest(*numbers: int) -> int:
    """Returns one u64 for several small numbers."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = mixed(state ^ np.array([number], np.uint64))
    return int(state[0])


class Oracle:
    """The keys and contents of one namespace, in which conversations begin with one of `roots` texts of
    `root_tokens`.
    """

    def __init__(self, seed: int, namespace: int, key_bytes: int, *, roots: int, root_tokens: int) -> None:
        self._key_bytes = key_bytes
        self._roots = roots
        self._root_tokens = root_tokens
        self._seed = digest(seed, namespace)
        self._tables: dict[tuple[int, int, int], U64Array] = {}

    def keys(self, conversation: int, tokens_per_key: int, count: int) -> U8Array:
        """Returns u8 (count, key_bytes): the first keys of a conversation with a key every `tokens_per_key`."""
        shared = min(count, self._root_tokens // tokens_per_key)
        root = self._chain(_ROOT | conversation % self._roots, tokens_per_key, 0, shared)
        return np.concatenate([root, self._chain(conversation, tokens_per_key, shared, count - shared)])

    def _chain(self, name: int, tokens_per_key: int, first: int, count: int) -> U8Array:
        start = np.uint64(digest(self._seed, name, tokens_per_key))
        words = -(-self._key_bytes // 8)
        numbers = np.arange(first * words, (first + count) * words, dtype=np.uint64).reshape(count, words)
        chain = mixed(mixed(numbers) ^ start)
        return np.ascontiguousarray(chain.view(np.uint8)[:, : self._key_bytes])

    def contents(self, group: int, part: int, keys: U8Array, payload_bytes: int) -> U8Array:
        """Returns u8 (keys, payload_bytes): the payloads of these keys."""
        words = -(-payload_bytes // 8)
        table = self._table(group, part, words)
        return (table[None, :] ^ key_digests(keys)[:, None]).view(np.uint8)[:, :payload_bytes]

    def _table(self, group: int, part: int, words: int) -> U64Array:
        name = (group, part, words)
        if name not in self._tables:
            self._tables[name] = mixed(np.arange(words, dtype=np.uint64) ^ np.uint64(digest(self._seed, group, part)))
        return self._tables[name]


def key_digests(keys: U8Array) -> U64Array:
    """Returns a u64 per key, of all its bytes."""
    padded = np.zeros((len(keys), -(-keys.shape[1] // 8) * 8), np.uint8)
    padded[:, : keys.shape[1]] = keys
    found = np.zeros(len(keys), np.uint64)
    for word in padded.view(np.uint64).T:
        found = mixed(found ^ word)
    return found
