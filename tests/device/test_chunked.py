"""A copy's chunks, as threads take them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvoffloadd.device.chunked import Chunks
from kvoffloadd.device.plan import Copies
from kvoffloadd.device.work import HashedWork, Piece
from kvoffloadd.model import Direction


class CancelledMeanwhile:
    """Work in one piece, whose copy is cancelled while a thread makes the piece's copies."""

    total_bytes, descriptors, small = 8, 1, False
    chunks: Chunks

    def pieces(self, most_descriptors: int, most_bytes: int) -> Iterator[Piece]:
        yield Piece(0, 0, 1, 0, 1)

    def make(self, direction: Direction, piece: Piece) -> Copies:
        self.chunks.drop()
        return self.make_all(direction)

    def make_all(self, direction: Direction) -> Copies:
        at = np.array([8], np.uint64)
        return Copies(at, at, at, 1)

    def hashed(self, most_descriptors: int, most_bytes: int) -> HashedWork | None:
        return None


def test_a_copy_that_is_cancelled_while_a_piece_is_made_moves_nothing_of_it() -> None:
    work, moved = CancelledMeanwhile(), list[Copies]()
    work.chunks = Chunks(work, Direction.STORE, lambda copies: [copies], 8)
    assert not work.chunks.copy_next(moved.append)
    assert moved == []
    assert not work.chunks.complete
