"""Makes the copies of one direction of a GPU: row by row, or as runs of rows.

Ownership: every member is read-only, or synchronises itself. Any thread may call any method.
"""

from __future__ import annotations

from collections.abc import Callable

from kvoffloadd.config import CudaConfig
from kvoffloadd.device.base import Work
from kvoffloadd.device.chunked import PIECE_DESCRIPTORS
from kvoffloadd.device.cuda.driver import PITCH_MAX_BYTES, device_side
from kvoffloadd.device.cuda.pinning import Pinning, cut, cut_at
from kvoffloadd.device.cuda.stream import CopyStream
from kvoffloadd.device.pitched import Pitched, pitch
from kvoffloadd.device.plan import Copies, split
from kvoffloadd.model import Direction, U64Array


class RowCopier:
    """Cuts copies of one direction into chunks that the driver accepts, and makes them. `mapped_ends`: returns where
    the memories end that workers share, u64, ascending.
    """

    def __init__(
        self,
        direction: Direction,
        stream: CopyStream,
        pinning: Pinning,
        mapped_ends: Callable[[], U64Array],
        config: CudaConfig,
        chunk_bytes: int,
    ) -> None:
        self.stream = stream
        self._direction = direction
        self._pinning = pinning
        self._mapped_ends = mapped_ends
        self._config = config
        self._chunk_bytes = chunk_bytes

    def cuts_quickly(self, work: Work) -> bool:
        """Returns whether `cut` takes so little time for this work that the event loop may call it."""
        return not self._takes_runs(work.total_bytes, work.descriptors)

    def cut(self, copies: Copies) -> list[Copies]:
        """Returns chunks of copies that the driver accepts: none crosses from one piece of the arena, or from one
        mapping, into the next.
        """
        copies = cut(copies, self._direction, self._pinning.ends)
        copies = cut_at(copies, device_side(self._direction, copies.src, copies.dst), self._mapped_ends())
        runs, most = self._runs(copies), self._config.batch_descriptors
        if runs is not None and len(copies):  # a run takes the driver about as long as a single copy
            most = min(most * len(copies) // max(len(runs) + len(runs.rest), 1), PIECE_DESCRIPTORS)
        return split(copies, 1, 1, chunk_bytes=self._chunk_bytes, chunk_descriptors=most)

    def move(self, copies: Copies) -> None:
        """Makes the copies of one chunk, in a lane's thread, and returns when they have ended. Blocks.

        Raises:
            CudaError: as `CopyStream.move`.
        """
        if self._pinning.covers(copies, self._direction):
            self.stream.move(copies.src, copies.dst, copies.size, self._runs(copies))
        else:
            self.stream.move_each(copies.src, copies.dst, copies.size)

    def _takes_runs(self, total_bytes: int, rows: int) -> bool:
        """Returns whether rows of this number and size are copied in runs: they are small on average, and the driver
        has runs.
        """
        most = self._config.pitched_row_bytes
        return bool(most) and self.stream.pitched and total_bytes <= most * rows

    def _runs(self, copies: Copies) -> Pitched | None:
        """Returns the copies in pitched form. None: they must be made one by one."""
        if not self._takes_runs(copies.total_bytes, len(copies)):
            return None
        host, device = self._pinning.ends, self._mapped_ends()
        src_ends, dst_ends = (device, host) if self._direction is Direction.STORE else (host, device)
        return pitch(copies, src_ends, dst_ends, pitch_max_bytes=PITCH_MAX_BYTES)
