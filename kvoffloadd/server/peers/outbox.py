"""The bounded queue of frames that a peer's socket does not take yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvoffloadd.errors import BusyError
from kvoffloadd.server.peers.account import Account

HIGH_WATER_BYTES = 1 << 20
"""Above this size no further request of the session is read, until the peer has read its replies."""


@dataclass(slots=True, eq=False)
class Outbox:
    """Frames in order. Room for a job's completion is reserved at admission, so that it can always be queued. `account`
    belongs to the peer's uid, which may have any number of sessions.
    """

    limit_bytes: int
    account: Account
    frames: deque[tuple[memoryview, tuple[int, ...]]] = field(default_factory=deque)
    queued_bytes: int = 0
    reserved_bytes: int = 0

    def reserve(self, size: int, **others: int) -> None:
        """Reserves room for a later push of at most `size` bytes, and charges `others`: all or nothing. Raises
        BusyError, and the errors of `Account.charge`; pair with `unreserve`.
        """
        if size and self.queued_bytes + self.reserved_bytes + size > self.limit_bytes:
            raise BusyError(
                f"{self.queued_bytes} bytes unread and {self.reserved_bytes} promised of {self.limit_bytes}: "
                "read completions, then ask again"
            )
        self.account.charge(outbox_bytes=size, **others)
        self.reserved_bytes += size

    def unreserve(self, size: int, **others: int) -> None:
        """Ends a reservation, when its push is queued, or will never be."""
        self.reserved_bytes -= size
        self.account.refund(outbox_bytes=size, **others)

    def room(self, size: int) -> bool:
        """Returns whether a push of `size` bytes without a reservation fits."""
        return not self.account.crowded and self.queued_bytes + self.reserved_bytes + size <= self.limit_bytes

    def put(self, frame: bytes, fds: tuple[int, ...] = (), written: int = 0) -> None:
        """Queues a frame after its first `written` bytes; `fds` go with its first byte and stay the caller's."""
        self.frames.append((memoryview(frame)[written:], () if written else fds))
        self.queued_bytes += len(frame) - written
        self.account.hold(frame)

    def sent(self, size: int) -> None:
        """Removes the first `size` bytes of the first frame, which are written."""
        frame, _ = self.frames.popleft()
        self.queued_bytes -= size
        if size < len(frame):
            self.frames.appendleft((frame[size:], ()))
        else:
            self.account.let_go(frame.obj)  # type: ignore[arg-type]  # a view of bytes

    def check_crowd(self) -> None:
        """Raises BusyError if the amount of unread data allows no large frame."""
        if self.account.crowded:
            raise BusyError("the sessions of this uid have too much unread data: read, then ask again")

    @property
    def congested(self) -> bool:
        """Whether the peer reads too slowly for more of its requests."""
        return self.queued_bytes > HIGH_WATER_BYTES or (self.queued_bytes > 0 and self.account.crowded)
