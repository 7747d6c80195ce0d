"""The memory tier of a miniature: keys by name, evicted by a policy. It holds no bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.cache.policy.base import Policy
from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array


@dataclass(frozen=True, slots=True, eq=False)
class SampledKeys:
    """Has sampled keys of one prompt and group. `places`: of each key in the sample of its prompt, from 0 on."""

    names: list[int]
    places: I64Array
    key_bytes: int

    def only(self, wanted: BoolArray) -> SampledKeys:
        """Returns the piece with the keys of this mask alone."""
        at = np.flatnonzero(wanted)
        return SampledKeys([self.names[place] for place in at.tolist()], self.places[at], self.key_bytes)


class SampledMemory:
    """Holds up to `rows_max` keys."""

    def __init__(self, policy: Policy, rows_max: int) -> None:
        """`policy`: without rows; row numbers are below `rows_max`."""
        self._policy = policy
        self._row_of: dict[int, int] = {}
        self._name = np.zeros(rows_max, np.uint64)
        self._bytes = np.zeros(rows_max, np.int64)
        self._free = np.arange(rows_max, dtype=np.uint32)[::-1].copy()
        self._num_free = rows_max
        self._busy = np.zeros(rows_max, np.bool_)
        self.used_bytes = 0

    def __contains__(self, name: object) -> bool:
        """Returns whether the key is held."""
        return name in self._row_of

    def __len__(self) -> int:
        """Returns the number of keys held."""
        return len(self._row_of)

    def names(self) -> list[int]:
        """Returns all keys."""
        return list(self._row_of)

    def held(self, names: Sequence[int]) -> BoolArray:
        """Returns which of the keys are held."""
        return np.fromiter((name in self._row_of for name in names), np.bool_, len(names))

    def drop(self, names: Collection[int]) -> None:
        """Removes these keys, as far as they are held."""
        self._remove(np.array([self._row_of[name] for name in names if name in self._row_of], np.uint32))

    def change(self, used: Sequence[SampledKeys], stored: Sequence[SampledKeys], capacity_bytes: int) -> bool:
        """Uses keys that are held, and stores others, of a few prompts. No key is named twice, no piece is empty. Those
        that find no room, because all others were used just now, are not stored. Returns whether keys were evicted.
        """
        rows = np.array([self._row_of[name] for piece in used for name in piece.names], np.uint32)
        if len(rows):
            self._policy.touch(rows, *_as_prompts(used))
        if not stored:
            return False
        names = np.array([name for piece in stored for name in piece.names], np.uint64)
        sizes = np.repeat([piece.key_bytes for piece in stored], [len(piece.names) for piece in stored])
        self._busy[rows] = True
        evicted = self._make_room(int(sizes.sum()), len(names), capacity_bytes)
        self._busy[rows] = False
        if self._policy.num_aside:
            self._policy.readmit(rows)
        self._insert(stored, names, sizes, capacity_bytes)
        return evicted

    def _insert(self, pieces: Sequence[SampledKeys], names: U64Array, sizes: I64Array, capacity_bytes: int) -> None:
        fitting = int(np.searchsorted(sizes.cumsum(), capacity_bytes - self.used_bytes, side="right"))
        count = min(fitting, self._num_free)
        if not count:
            return
        self._num_free -= count
        rows = self._free[self._num_free : self._num_free + count].copy()
        self._name[rows], self._bytes[rows] = names[:count], sizes[:count]
        self._row_of.update(zip(names[:count].tolist(), rows.tolist(), strict=True))
        self.used_bytes += int(sizes[:count].sum())
        places, begins = _as_prompts(pieces)
        begins = None if begins is None else begins[begins < count]
        self._policy.insert(rows, names[:count], places[:count], begins)

    def _make_room(self, need_bytes: int, need_rows: int, capacity_bytes: int) -> bool:
        """Evicts until so much is free, or nothing is left that may go. Returns whether anything went."""
        evicted = False
        while True:
            over = self.used_bytes + need_bytes - capacity_bytes
            mean_bytes = max(1, self.used_bytes // max(1, len(self._row_of)))
            wanted = max(-(-over // mean_bytes), need_rows - self._num_free)
            if wanted <= 0:
                return evicted
            victims = self._policy.victims(wanted, self._evictable)
            if not len(victims):
                return evicted
            self._remove(victims)
            evicted = True

    def _evictable(self, rows: U32Array) -> BoolArray:
        free: BoolArray = ~self._busy[rows]
        return free

    def _remove(self, rows: U32Array) -> None:
        if not len(rows):
            return
        self._policy.remove(rows)
        for name in self._name[rows].tolist():
            del self._row_of[name]
        self.used_bytes -= int(self._bytes[rows].sum())
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)


def _as_prompts(pieces: Sequence[SampledKeys]) -> tuple[U32Array, I64Array | None]:
    """Returns the places of all keys, and where each piece begins, as policies take them."""
    places = np.concatenate([piece.places for piece in pieces]).astype(np.uint32)
    if len(pieces) == 1:
        return places, None
    return places, np.concatenate(([0], np.cumsum([len(piece.names) for piece in pieces])[:-1])).astype(np.int64)
