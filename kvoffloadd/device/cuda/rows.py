"""How the copies of one direction of a GPU are made: row by row, as runs of rows, or by way of the kernel.

Ownership: `limits` is replaced as a whole, by the thread that finds them out. All else is read-only, or looks after
itself. Any thread may call any method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvoffloadd.config import CudaConfig
from kvoffloadd.device.base import Work
from kvoffloadd.device.chunked import PIECE_DESCRIPTORS
from kvoffloadd.device.cuda.driver import PITCH_MAX_BYTES, device_side
from kvoffloadd.device.cuda.pinning import Pinning, cut, cut_at
from kvoffloadd.device.cuda.staging import ROWS_MAX, SLACK_BYTES, Stages
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.device.pitched import Pitched, pitch
from kvoffloadd.device.plan import Copies, split
from kvoffloadd.model import Direction, U64Array


class RowLimits(NamedTuple):
    """Up to how many bytes, on average over a chunk, rows are copied in each of these ways. 0: never."""

    pitched_row_bytes: int = 0
    kernel_row_bytes: int = 0


class RowCopier:
    """Cuts copies of one direction into chunks that the driver takes, and makes them. `mapped_ends`: where the memories
    end that workers share, u64, ascending. `limits`: none at first.
    """

    def __init__(
        self,
        direction: Direction,
        stream: CopyStream,
        stages: Stages,
        pinning: Pinning,
        mapped_ends: Callable[[], U64Array],
        config: CudaConfig,
        chunk_bytes: int,
    ) -> None:
        self.limits = RowLimits()
        self.stream = stream
        self.stages = stages
        self._direction = direction
        self._pinning = pinning
        self._mapped_ends = mapped_ends
        self._config = config
        self._chunk_bytes = chunk_bytes

    def cuts_quickly(self, work: Work) -> bool:
        """Whether `cut` takes so little time for this work that the event loop may call it."""
        looks_for_runs = self.stream.pitched and work.total_bytes <= self.limits.pitched_row_bytes * work.descriptors
        return not looks_for_runs

    def cut(self, copies: Copies) -> list[Copies]:
        """Chunks of copies that the driver takes: none reaches from one piece of the arena, or from one mapping, into
        the next.
        """
        copies = cut(copies, self._direction, self._pinning.ends)
        copies = cut_at(copies, device_side(self._direction, copies.src, copies.dst), self._mapped_ends())
        config, chunk_bytes = self._config, self._chunk_bytes
        if self._takes_kernel(copies):
            chunk_bytes = min(chunk_bytes, config.staging_bytes)
            return split(copies, 1, 1, chunk_bytes=chunk_bytes, chunk_descriptors=ROWS_MAX)
        runs, most = self._runs(copies), config.batch_descriptors
        if runs is not None and len(copies):  # a run takes the driver about as long as a single copy
            most = min(most * len(copies) // max(len(runs) + len(runs.rest), 1), PIECE_DESCRIPTORS)
        return split(copies, 1, 1, chunk_bytes=chunk_bytes, chunk_descriptors=most)

    def move(self, copies: Copies) -> None:
        """Makes the copies of one chunk, in a lane's thread: returns when they have ended. Blocks.

        Raises:
            CudaError: as `CopyStream.move`.
        """
        src, dst, size = copies.src, copies.dst, copies.size
        if not self._pinning.covers(copies, self._direction):
            self.stream.move_each(src, dst, size)
            return
        if self._takes_kernel(copies):
            fits = len(size) <= ROWS_MAX and copies.total_bytes <= self._config.staging_bytes + SLACK_BYTES
            if fits and self.stages.move(self._direction, src, dst, size):
                return
        self.stream.move(src, dst, size, self._runs(copies))

    def _takes_kernel(self, copies: Copies) -> bool:
        """Whether the kernel is to move these rows: they are small, and together worth a kernel."""
        most = self.limits.kernel_row_bytes
        if not most or not self.stages.works:
            return False
        return self._config.kernel_chunk_bytes <= copies.total_bytes <= most * len(copies)

    def _runs(self, copies: Copies) -> Pitched | None:
        """The copies in pitched form. None: they are to be made one by one, since rows are large or the driver does
        not take runs.
        """
        most = self.limits.pitched_row_bytes
        if not most or not self.stream.pitched or copies.total_bytes > most * len(copies):
            return None
        host, device = self._pinning.ends, self._mapped_ends()
        src_ends, dst_ends = (device, host) if self._direction is Direction.STORE else (host, device)
        return pitch(copies, src_ends, dst_ends, pitch_max_bytes=PITCH_MAX_BYTES)
