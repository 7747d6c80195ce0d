"""One end of a session's byte stream, without any I/O: bytes and descriptors in, messages out, and the reverse.

Descriptors are plain integers here. Those that `next_message` hands out belong to the caller; whatever is left
belongs to the connection until `take_fds`, which the I/O layer calls when the stream ends, to close them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from kvoffloadd.errors import FramingError, PeerError
from kvoffloadd.protocol import codec
from kvoffloadd.protocol.messages import (
    FDS_PER_FRAME_MAX,
    FRAME_BYTES_MAX,
    FROM_CLIENT,
    FROM_DAEMON,
    SEQ_END,
    Message,
)
from kvoffloadd.protocol.state import ProtocolState, move


def tag_of(message: Message) -> str:
    """The message's `type` on the wire."""
    return str(message.__struct_config__.tag)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message for many, encoded once."""

    message: Message
    frame: bytes

    @classmethod
    def of(cls, message: Message) -> Self:
        """Raises FramingError if it is too big."""
        return cls(message, codec.encode(message))


class Connection:
    """Framing, typing and the state table of one session, seen from one side (`daemon=True`: the daemon's)."""

    def __init__(self, *, daemon: bool) -> None:
        self.state = ProtocolState.HELLO
        self._daemon = daemon
        self._known: dict[str, type[Message]] = FROM_CLIENT if daemon else FROM_DAEMON
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def receive_data(self, data: bytes | memoryview, fds: Iterable[int] = ()) -> None:
        """Take what the socket gave. Raises FramingError when more descriptors are queued than one frame may carry."""
        self._buffer += data
        self._fds.extend(fds)
        if len(self._fds) > FDS_PER_FRAME_MAX:
            raise FramingError(f"{len(self._fds)} descriptors in flight; a frame carries at most {FDS_PER_FRAME_MAX}")

    @property
    def frame_bytes(self) -> int:
        """What the frame that has begun states as its size; 0 if none has, or its size is not there yet."""
        return codec.PREFIX.unpack_from(self._buffer)[0] if len(self._buffer) >= codec.PREFIX.size else 0

    @property
    def partial(self) -> bool:
        """True while the beginning of a frame waits for its rest."""
        return bool(self._buffer)

    def next_message(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, or None: more bytes are needed.

        Raises FramingError (the stream is unusable from here on), MessageError or StateError (this frame is skipped,
        the stream goes on; `seq` of the error tells which request to answer).
        """
        if len(self._buffer) < codec.PREFIX.size:
            return None
        (size,) = codec.PREFIX.unpack_from(self._buffer)
        if not 0 < size <= FRAME_BYTES_MAX:
            raise FramingError(f"a frame of {size} bytes; the cap is {FRAME_BYTES_MAX}")
        end = codec.PREFIX.size + size
        if len(self._buffer) < end:
            return None
        with memoryview(self._buffer) as view, view[codec.PREFIX.size : end] as body:
            fields = codec.unpack(body)
        del self._buffer[:end]
        fds = self._claim(fields.get("fds", 0))
        try:
            message = codec.convert(fields, self._known)
            self.state = move(self.state, tag_of(message), by_client=self._daemon)
        except PeerError as error:
            self._fds.extendleft(reversed(fds))  # no message came of it that could own them
            if fds:
                raise FramingError(f"descriptors with a frame that can't be taken: {error}") from error
            seq = fields.get("seq")
            error.seq = seq if type(seq) is int and 0 <= seq < SEQ_END else 0
            raise
        return message, fds

    def _claim(self, count: object) -> list[int]:
        """The frame's descriptors. A `fds` that is no int is left to the message's own check."""
        wanted = count if type(count) is int else 0
        if not 0 <= wanted <= len(self._fds):
            raise FramingError(f"a frame states {wanted} descriptors, {len(self._fds)} came")
        if len(self._fds) > wanted and not self._buffer:
            raise FramingError(f"{len(self._fds) - wanted} descriptors came that no frame states")
        return [self._fds.popleft() for _ in range(wanted)]

    def send(self, message: Message | Encoded) -> bytes:
        """The frame to write. Raises StateError for what this side may not say now, FramingError if it is too big."""
        said = message.message if isinstance(message, Encoded) else message
        after = move(self.state, tag_of(said), by_client=not self._daemon)
        frame = message.frame if isinstance(message, Encoded) else codec.encode(message)
        self.state = after
        return frame

    def take_fds(self) -> list[int]:
        """Descriptors that no message claimed; the caller closes them."""
        fds = list(self._fds)
        self._fds.clear()
        return fds
