"""Types of the functions in the C code."""

from __future__ import annotations

from typing import Protocol

from kvoffloadd.model import BoolArray, I64Array, U8Array, U16Array, U32Array, U64Array

ALIGNED = 64
"""Bytes to which a destination must be aligned for its payload to be hashed while it is copied; see _copyruns.c."""

Keyspaces = int | U16Array | U64Array
"""The keyspace of all keys, or one for each."""


class Helper(Protocol):
    """The functions of the extension `_native`. Arrays are contiguous; addresses point to memory that is mapped.

    Those that touch payloads run without the GIL, since one call takes up to milliseconds: `copy_runs`,
    `copy_payloads`, `read_words` and `hash_payloads`. The others keep it: they take about a microsecond, and the GIL
    keeps their table from changing meanwhile.

    Raises TypeError, ValueError or BufferError for arguments that do not fit together.
    """

    def copy_runs(self, src: U64Array, dst: U64Array, size: U64Array, /) -> int:
        """Copies `size[i]` bytes from address `src[i]` to `dst[i]`. Returns how many runs were copied: fewer than all
        if a page of the next one is gone.
        """

    def copy_payloads(
        self, hashing: U64Array, src: U64Array, dst: U64Array, size: U64Array, counts: U64Array, digests: U64Array, /
    ) -> int:
        """Copies like `copy_runs`, and writes the hash of each payload, high half first, to `digests[i]`, u64
        `(payloads, 2)`. Payload i consists of the next `counts[i]` runs; counts add up to all runs. `hashing`:
        `Xxh3.streaming`. Returns how many payloads were copied. Raises MemoryError.
        """

    def read_words(self, addresses: U64Array, values: U64Array, gone: BoolArray, /) -> None:
        """Reads the aligned word at each address; where it sets `gone[i]` to True, the word's page is gone."""

    def hash_payloads(self, whole: int, addresses: U64Array, sizes: I64Array, digests: U64Array, /) -> None:
        """Writes the hash of `sizes[i]` bytes at `addresses[i]`, high half first, to `digests[i]`, u64
        `(payloads, 2)`. `whole`: `Xxh3.whole`.
        """

    def hash_keys(self, secret: U64Array, keyspaces: Keyspaces, keys: U64Array, hashes: U64Array, /) -> None:
        """Writes the hash of each key, u64 `(keys, 4)`. `secret`: that of `KeyHash`."""

    def find_rows(
        self, table: U64Array, keyspaces: Keyspaces, keys: U64Array, hashes: U64Array, rows: I64Array, /
    ) -> None:
        """Writes the row of each key, or -1."""

    def rows_fit(self, table: U64Array, hashes: U64Array, /) -> bool:
        """Returns whether no segment becomes more than full with keys of these hashes."""

    def place_rows(self, table: U64Array, hashes: U64Array, rows: U32Array, /) -> None:
        """Puts rows into free slots. Raises LookupError if a segment has none."""

    def remove_rows(self, table: U64Array, hashes: U64Array, rows: U32Array, /) -> int:
        """Makes their slots dead. Returns how many of the rows were in the table."""

    def mark_hits(self, rows: I64Array, missing: U16Array, states: U8Array, /) -> int:
        """Writes 1 for each row with no missing part, else 0. Returns how many rows are there, but incomplete. Raises
        IndexError.
        """

    def add_counts(self, counts: U32Array, rows: U32Array, by: int, kinds: U16Array, held: I64Array, /) -> None:
        """Adds `by` to the count of each row, once for each time that it is named. `held` has for each kind the number
        of its rows with a count other than 0. Raises IndexError.
        """
