"""An independent oracle of what a rank's page has of the page of all heads: numpy's own indices, in four orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.integrations.vllm.fakes import CopyRun, PageMapping

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")

ORDERS = {
    "packed, heads first": "HNC",
    "packed, tokens first": "NHC",
    "split, heads first": "KHNC",
    "split, tokens first": "KNHC",
}
"""Of a page's bytes: K and V (K), heads (H), tokens (N), what a token has of a head (C)."""

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Pages:
    """Describes a layer's pages of all heads, and of ranks. `content`: bytes of a token in a head (of K or V, where
    split).
    """

    order: str
    heads: int
    tokens: int
    content: int

    def whole(self) -> Indices:
        """Each byte of the page of all heads is its own offset."""
        sizes = [{"K": 2, "H": self.heads, "N": self.tokens, "C": self.content}[axis] for axis in self.order]
        return np.arange(np.prod(sizes), dtype=np.int64).reshape(sizes)

    def range(self, first: int, count: int) -> Indices:
        """Offsets of the bytes of some heads, in canonical order."""
        return self.whole().take(range(first, first + count), axis=self.order.index("H")).ravel()

    def of_rank(self, rank: int, ranks: int) -> Indices:
        """Returns, for each byte of the rank's page, its offset in the page of all heads."""
        shards = min(ranks, self.heads)
        count = self.heads // shards
        return self.range(rank // (ranks // shards) * count, count)

    def mapping(self, rank: int, ranks: int, *, strided: bool = True) -> PageMapping:
        """Returns the mapping as vLLM would: strided runs where that is possible, else a run for
        each range of bytes.
        """
        canonical = self.of_rank(rank, ranks)
        starts = np.flatnonzero(np.diff(canonical, prepend=-2) != 1)
        sizes = np.diff(starts, append=len(canonical))
        steps = set(np.diff(canonical[starts]).tolist())
        if strided and len(starts) > 1 and len(set(sizes.tolist())) == 1 and len(steps) == 1:
            size = int(sizes[0])
            runs = [CopyRun(0, int(canonical[0]), size, len(starts), size, steps.pop())]
        else:
            runs = [
                CopyRun(int(start), int(canonical[start]), int(size), 1, int(size), int(size))
                for start, size in zip(starts, sizes, strict=True)
            ]
        return PageMapping(self.whole().size, canonical.size, tuple(runs))

    def tensor(self, ranks: int, blocks: int = 3) -> Any:
        """The rank's tensor as the engine's backend indexes it, without memory."""
        heads = self.heads // min(ranks, self.heads)
        sizes = {"B": blocks, "K": 2, "H": heads, "N": self.tokens, "C": self.content}
        memory = "B" + self.order
        logical = "BKNHC" if "K" in self.order else "BHNC"
        made = torch.empty([sizes[axis] for axis in memory], dtype=torch.int8, device="meta")
        return made.permute([memory.index(axis) for axis in logical])
