"""A stand-in until the policies land."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffloadd.model import BoolArray, U32Array, U64Array


class Interim:
    """LRU by dict."""

    def __init__(self) -> None:
        self._rows: dict[int, None] = {}

    def insert(self, rows: U32Array, hashes: U64Array, positions: U32Array) -> None:
        for row in rows.tolist()[::-1]:
            self._rows[row] = None

    def touch(self, rows: U32Array, positions: U32Array) -> None:
        for row in rows.tolist()[::-1]:
            del self._rows[row]
            self._rows[row] = None

    def remove(self, rows: U32Array) -> None:
        for row in rows.tolist():
            del self._rows[row]

    def victims(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> U32Array:
        rows = np.array(list(self._rows), np.uint32)
        return rows[evictable(rows)][:wanted] if len(rows) else rows

    def resize(self, capacity_rows: int) -> None:
        pass

    def __len__(self) -> int:
        return len(self._rows)
