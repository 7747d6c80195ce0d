"""The bounded queue of frames that a peer's socket does not take yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvoffloadd.errors import BusyError

HIGH_WATER_BYTES = 1 << 20
"""Above this no further request of the session is read, until the peer has read its replies."""

UID_BYTES = 128 << 20
"""What may wait in all outboxes of a uid, and be promised there. Half of it is for what can be dropped, or put off."""


@dataclass(slots=True, eq=False)
class Unread:
    """What waits in the outboxes of one uid, and is promised there. A frame that waits in several counts once."""

    queued_bytes: int = 0
    reserved_bytes: int = 0
    _holders: dict[int, int] = field(default_factory=dict)  # in how many outboxes a frame waits, by its id()

    def hold(self, frame: bytes) -> None:
        """It waits in one outbox more."""
        holders = self._holders.get(id(frame), 0)
        self._holders[id(frame)] = holders + 1
        if not holders:
            self.queued_bytes += len(frame)

    def let_go(self, frame: bytes) -> None:
        """It waits in one outbox less."""
        self._holders[id(frame)] -= 1
        if not self._holders[id(frame)]:
            del self._holders[id(frame)]
            self.queued_bytes -= len(frame)


@dataclass(slots=True, eq=False)
class Outbox:
    """Frames in order. A job's completion is paid for at admission, so that it can always be queued. `unread`: of the
    peer's uid, which has no end of sessions.
    """

    limit_bytes: int
    unread: Unread = field(default_factory=Unread)
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
        if self.unread.queued_bytes + self.unread.reserved_bytes + size > UID_BYTES:
            raise BusyError("the sessions of this uid have too much data unread or promised: read, then ask again")
        self.reserved_bytes += size
        self.unread.reserved_bytes += size

    def unreserve(self, size: int) -> None:
        """The push that was reserved for is queued, or will never be."""
        self.reserved_bytes -= size
        self.unread.reserved_bytes -= size

    def room(self, size: int) -> bool:
        """Whether an unpromised push of `size` bytes fits."""
        return not self.crowded and self.queued_bytes + self.reserved_bytes + size <= self.limit_bytes

    def put(self, frame: bytes, fds: tuple[int, ...] = (), written: int = 0) -> None:
        """Queue a frame of which so many bytes are written; `fds` go with its first byte and stay the caller's."""
        self.frames.append((memoryview(frame)[written:], () if written else fds))
        self.queued_bytes += len(frame) - written
        self.unread.hold(frame)

    def sent(self, size: int) -> None:
        """The first `size` bytes of the first frame are written."""
        frame, _ = self.frames.popleft()
        self.queued_bytes -= size
        if size < len(frame):
            self.frames.appendleft((frame[size:], ()))
        else:
            self.unread.let_go(frame.obj)  # type: ignore[arg-type]  # a view of bytes

    @property
    def crowded(self) -> bool:
        """So much is unread in the sessions of this uid that nothing is added which need not be."""
        return self.unread.queued_bytes > UID_BYTES // 2

    def check_crowd(self) -> None:
        """Raises BusyError if so much is unread that nothing large is to be added."""
        if self.crowded:
            raise BusyError("the sessions of this uid have too much unread data: read, then ask again")

    @property
    def congested(self) -> bool:
        """The peer reads too slowly for more requests of its to be taken."""
        return self.queued_bytes > HIGH_WATER_BYTES or (self.queued_bytes > 0 and self.crowded)
