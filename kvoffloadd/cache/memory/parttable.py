"""One record per part of each key: its slot, its state, its checksum. Columns, no objects. Event loop only.

EMPTY --reserve--> RESERVED --commit--> COMMITTED --seal--> SEALED
  ^                   |                    |                 |
  +-------abort-------+-------evict--------+-----------------+
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvoffloadd.cache.memory.runallocator import RunAllocator
from kvoffloadd.linux.sharedmem import reserve_array
from kvoffloadd.model import U8Array, U16Array, U32Array, U64Array


class PartState:
    """Names the states of a part. Parts from COMMITTED on hold valid bytes, parts from RESERVED on hold a slot.

    Plain ints, not an enum: they are compared with arrays on hot paths, where an enum member costs more than the rest.
    """

    EMPTY: Final = 0
    RESERVED: Final = 1  # for a lease, or a copy that waits or writes
    COMMITTED: Final = 2
    SEALED: Final = 3


class PartTable:
    """Keeps part records in runs of P, one run per key. A `generation` identifies a late hash: it belongs to the
    record, in any run, and changes each time that the record is emptied.
    """

    def __init__(self, max_parts: int) -> None:
        self.runs = RunAllocator(max_parts)  # the records of a free run are all EMPTY
        self.row: U32Array = reserve_array((max_parts,), np.uint32)
        self.page: U32Array = reserve_array((max_parts,), np.uint32)
        self.state: U8Array = reserve_array((max_parts,), np.uint8)
        self.generation: U16Array = reserve_array((max_parts,), np.uint16)
        self.digest: U64Array = reserve_array((max_parts, 2), np.uint64)
        self.unverified: U8Array = reserve_array((max_parts,), np.uint8)  # adopted, and not read since

    run = staticmethod(RunAllocator.of)

    def memory_bytes(self) -> int:
        """Returns the bytes of the columns up to the highest record in use."""
        per_part = sum(c.itemsize for c in (self.row, self.page, self.state, self.generation, self.unverified)) + 16
        return self.runs.used * per_part + self.runs.memory_bytes()
