"""KV caches of several shapes, in one piece of memory each."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.harness.gpumemory import Rows

MIB = 1 << 20


@dataclass(frozen=True)
class Layout:
    """`size_bytes` of memory, with these tensors in it."""

    size_bytes: int
    tensors: tuple[Rows, ...]

    @property
    def num_blocks(self) -> int:
        return min(rows.num_blocks for rows in self.tensors)


PLAIN = Layout(4 * MIB, (Rows(0, 64, 65536, 65536),))
"""One tensor that fills its memory."""

INSIDE = Layout(6 * MIB, (Rows(10240, 64, 4096, 4096), Rows(MIB, 64, 30720, 40960), Rows(4 * MIB, 64, 600, 1024)))
"""Tensors at offsets, rows further apart than they are long."""

INTERLEAVED = Layout(8 * MIB, tuple(Rows(layer * 4096, 64, 4096, 8 * 16384) for layer in range(8)))
"""Layers within a block, as engines with one allocation for all layers have them; the rest of a block is nobody's."""

LAYOUTS = {"plain": PLAIN, "inside": INSIDE, "interleaved": INTERLEAVED}
