"""Memory for header pages, which the agent shares: a separate memfd, apart from the arena. Event loop only.

A put gathers the header before an object's payloads, and a get scatters it into these pages.
"""

from __future__ import annotations

import os
from typing import Final

import numpy as np

from kvoffloadd.agentwire.frames import HEADER_BYTES
from kvoffloadd.errors import UsageError
from kvoffloadd.linux.sharedmem import Mapping, create_memfd
from kvoffloadd.model import U8Array, U32Array


class HeaderPages:
    """`count` pages, whose memory is committed on use. Owns the descriptor and the mapping until `close`.

    `pages`: (count, 4096) u8, all of them. A taken page belongs to its taker alone.
    """

    def __init__(self, count: int) -> None:
        """Raises LimitError or OSError if the kernel has no room."""
        self.count: Final = count
        self.size_bytes: Final = count * HEADER_BYTES
        self.fd: Final = create_memfd("kvoffloadd-headers", self.size_bytes)
        try:
            self._mapping = Mapping.map_fd(self.fd, self.size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        self._mapping.leave_out_of_dumps()
        self.pages: U8Array = self._mapping.array().reshape(count, HEADER_BYTES)
        self._free: U32Array = np.arange(count - 1, -1, -1, dtype=np.uint32)  # a stack: few pages are ever touched
        self.num_free = count

    def take(self, count: int) -> U32Array:
        """Takes this number of pages and returns their numbers; their contents are arbitrary. Raises UsageError if they
        are lacking.
        """
        if count > self.num_free:
            raise UsageError(f"{count} header pages of {self.num_free} that are free")
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count][::-1].copy()

    def give(self, pages: U32Array) -> None:
        """Takes back pages that are not in use any more."""
        self._free[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)

    def check(self) -> list[str]:
        """Audits the pages; an empty list: no errors."""
        free = np.sort(self._free[: self.num_free])
        twice = bool((np.diff(free) == 0).any()) or bool(len(free) and free[-1] >= self.count)
        return ["remote: the free list of header pages is wrong"] if twice else []

    def close(self) -> None:
        """Unmaps the pages. The caller guarantees that nothing uses them any more."""
        self._mapping.close()
        os.close(self.fd)
