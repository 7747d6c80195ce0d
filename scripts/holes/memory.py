"""A worker's registered memory, into which holes may be punched, and what every byte of it must be.

It is read and written through its descriptor alone: a page that is gone, or cut off with the end of the file, then
reads as zeros, and ends no process.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

import numpy as np

from kvoffloadd.client import SharedTensor
from kvoffloadd.linux.sharedmem import Mapping, create_memfd
from kvoffloadd.model import BoolArray, I64Array, U8Array
from scripts.harness.freeblocks import FreeBlocks
from scripts.holes.texts import PAYLOAD_BYTES, STRIDE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class WrongBlock:
    """A block and the gap behind it: u8 (STRIDE_BYTES,) each, and where they differ (bool) against the rule. `before`:
    the last load.
    """

    block: int
    before: U8Array
    expected: U8Array
    seen: U8Array
    differs: BoolArray

    @property
    def wrong_bytes(self) -> int:
        return int(self.differs.sum())

    @property
    def gap_bytes(self) -> int:
        """Those of them behind the payload."""
        return int(self.differs[PAYLOAD_BYTES:].sum())


class WatchedMemory:
    """`blocks` of STRIDE_BYTES, dealt out with `take`, which come back with `give`.

    `sealed`: against any change of its size. `punched`: by its owner, at any time; every byte of it may then be 0.
    `address`: of its mapping in this process.
    """

    def __init__(self, name: str, blocks: int, rng: np.random.Generator, *, sealed: bool, punched: bool) -> None:
        self.size_bytes = blocks * STRIDE_BYTES
        self.sealed = sealed
        self._punched = punched
        self._rng = rng
        self._fd = create_memfd(name, self.size_bytes) if sealed else _unsealed(name, self.size_bytes)
        mapping = Mapping.map_fd(self._fd, self.size_bytes)
        memory = mapping.array()
        # The client looks up by address whose memory it is: the mapping may not end before what it knows of it.
        weakref.finalize(memory, mapping.close).atexit = False
        weakref.finalize(self, os.close, self._fd).atexit = False
        self.address = mapping.address
        self.tensor = SharedTensor.of_fd(self._fd, memory, memory.reshape(blocks, STRIDE_BYTES)[:, :PAYLOAD_BYTES])
        self._expected = np.frombuffer(rng.bytes(self.size_bytes), np.uint8).reshape(blocks, STRIDE_BYTES).copy()
        self._before = self._expected.copy()
        self._lent = np.zeros(blocks, bool)
        self._holed = np.zeros(blocks, bool)
        self.free = FreeBlocks(blocks, rng)
        os.pwrite(self._fd, self._expected.data, 0)

    @property
    def fd(self) -> int:
        return self._fd

    # --- contents ---

    def write(self, blocks: I64Array, contents: U8Array) -> None:
        """Compute, as an engine would: u8 (blocks, PAYLOAD_BYTES)."""
        for block, values in zip(blocks.tolist(), contents, strict=True):
            os.pwrite(self._fd, values.tobytes(), block * STRIDE_BYTES)
        self._expected[blocks, :PAYLOAD_BYTES] = contents

    def spoil(self, blocks: I64Array) -> None:
        """Noise, so that what these blocks hold can't be right by chance."""
        noise = np.frombuffer(self._rng.bytes(len(blocks) * PAYLOAD_BYTES), np.uint8)
        self.write(blocks, noise.reshape(len(blocks), PAYLOAD_BYTES))

    def lend(self, blocks: I64Array, lent: bool = True) -> None:
        """A load writes into these blocks until it has ended (`lent` False); nothing may write into the gaps."""
        self._lent[blocks] = lent

    def expect(self, blocks: I64Array, contents: U8Array, *, holed: bool) -> None:
        """A load has filled these blocks. `holed`: with payloads into which holes were punched."""
        self._before[blocks] = self._expected[blocks]
        self._expected[blocks, :PAYLOAD_BYTES] = contents
        self._holed[blocks] = holed

    def forgive(self, blocks: I64Array) -> None:
        """A load that ended early may have written anything into these blocks."""
        self._expected[blocks, :PAYLOAD_BYTES] = self.read()[blocks, :PAYLOAD_BYTES]

    # --- comparing ---

    def read(self) -> U8Array:
        """u8 (blocks, STRIDE_BYTES): what is there now; zeros behind the end of a file that was cut off."""
        seen = np.zeros_like(self._expected)
        os.preadv(self._fd, [seen.data], 0)
        return seen

    def differing(self, blocks: I64Array, contents: U8Array) -> int:
        """Bytes of these blocks that are not those: what a check counts that looks at nothing else."""
        return int((self.read()[blocks, :PAYLOAD_BYTES] != contents).sum())

    def compare(self) -> list[WrongBlock]:
        """What is wrong in all blocks that are not lent, and in all gaps. It is expected from then on."""
        seen = self.read()
        differs = seen != self._expected
        if self._punched:
            differs &= seen != 0
        differs[self._holed, :PAYLOAD_BYTES] &= seen[self._holed, :PAYLOAD_BYTES] != 0
        differs[self._lent, :PAYLOAD_BYTES] = False
        wrong = [
            WrongBlock(
                int(block), self._before[block].copy(), self._expected[block].copy(), seen[block], differs[block]
            )
            for block in np.flatnonzero(differs.any(axis=1))
        ]
        own = ~self._lent
        self._expected[own] = seen[own]
        self._expected[self._lent, PAYLOAD_BYTES:] = seen[self._lent, PAYLOAD_BYTES:]
        self._holed[own] = False
        return wrong


def _unsealed(name: str, size_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return fd
