"""What is to be written to one peer, bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvoffloadd.errors import BusyError

HIGH_WATER_BYTES = 1 << 20
"""Above this no further request of the session is read, until the peer has read its replies."""


@dataclass(slots=True, eq=False)
class Outbox:
    """Frames in order. A job's completion is paid for at admission, so that it can always be queued."""

    limit_bytes: int
    frames: deque[tuple[memoryview, tuple[int, ...]]] = field(default_factory=deque)
    queued_bytes: int = 0
    reserved_bytes: int = 0

    def reserve(self, size: int) -> None:
        """Room for a later push of at most `size` bytes. Raises BusyError; pair with `unreserve`."""
        if self.queued_bytes + self.reserved_bytes + size > self.limit_bytes:
            raise BusyError(
                f"{self.queued_bytes} bytes unread and {self.reserved_bytes} promised of {self.limit_bytes}: "
                "read completions, then ask again"
            )
        self.reserved_bytes += size

    def unreserve(self, size: int) -> None:
        """The push that was reserved for is queued, or will never be."""
        self.reserved_bytes -= size

    def room(self, size: int) -> bool:
        """Whether an unpromised push of `size` bytes fits."""
        return self.queued_bytes + self.reserved_bytes + size <= self.limit_bytes

    def put(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """Queue a frame; `fds` go with its first byte and stay the caller's."""
        self.frames.append((memoryview(frame), fds))
        self.queued_bytes += len(frame)

    def sent(self, size: int) -> None:
        """The first `size` bytes of the first frame are written."""
        frame, _ = self.frames.popleft()
        self.queued_bytes -= size
        if size < len(frame):
            self.frames.appendleft((frame[size:], ()))

    @property
    def congested(self) -> bool:
        """The peer reads too slowly for more requests of its to be taken."""
        return self.queued_bytes > HIGH_WATER_BYTES
