"""The disk tier of a miniature: keys in the order of writing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvoffloadd.model import BoolArray


class DiskQueue:
    """Holds keys, by name, up to a number of bytes. The key that was written first goes first, unless it was read since
    it was written: then it is written again, as reclaim does with records.
    """

    def __init__(self) -> None:
        self._written: OrderedDict[int, tuple[int, bool]] = OrderedDict()  # bytes, and whether it was read
        self.used_bytes = 0

    def __len__(self) -> int:
        """Returns the number of keys held."""
        return len(self._written)

    def held(self, names: Sequence[int]) -> BoolArray:
        """Returns which of the keys are held."""
        return np.fromiter((name in self._written for name in names), np.bool_, len(names))

    def names(self) -> list[int]:
        """Returns all keys."""
        return list(self._written)

    def read(self, names: Iterable[int]) -> None:
        """Notes that these keys were used, as far as they are held."""
        for name in names:
            if name in self._written:
                self._written[name] = (self._written[name][0], True)

    def write(self, names: Iterable[int], size: int, capacity_bytes: int) -> bool:
        """Writes the keys that are not held. Returns whether others had to go."""
        for name in names:
            if name not in self._written:
                self._written[name] = (size, False)
                self.used_bytes += size
        full = self.used_bytes > capacity_bytes
        while self.used_bytes > capacity_bytes and self._written:
            name, (size, was_read) = self._written.popitem(last=False)
            if was_read:
                self._written[name] = (size, False)
            else:
                self.used_bytes -= size
        return full

    def drop(self, names: Collection[int]) -> None:
        """Removes these keys, as far as they are held."""
        for name in names:
            self.used_bytes -= self._written.pop(name, (0, False))[0]
