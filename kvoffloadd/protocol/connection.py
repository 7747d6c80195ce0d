"""One end of a session's byte stream, without any I/O: bytes and descriptors in, messages out, and the reverse.

A frame is a u32 little-endian length and that many bytes of one msgpack map. Decoding a hostile frame costs at most a
small multiple of its size: see `unpacking`.

Descriptors are plain integers here. Those that `next_message` returns belong to the caller. The rest belong to the
connection until `take_fds`, which the I/O layer calls at the end of the stream, to close them.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from kvoffloadd.errors import FramingError, InternalError, MessageError, PeerError, StateError
from kvoffloadd.protocol.messages import (
    FDS_PER_FRAME_MAX,
    FRAME_BYTES_MAX,
    FROM_CLIENT,
    FROM_DAEMON,
    SEQ_END,
    Message,
)
from kvoffloadd.protocol.state import CLIENT_MOVES, DAEMON_MOVES, ProtocolState
from kvoffloadd.protocol.unpacking import ARRAY_ITEMS_MAX, MAP_ITEMS_MAX, Unpacking, unpack, unpack_in_steps

PREFIX = struct.Struct("<I")
AT_ONCE_BYTES = 1 << 16
"""A daemon unpacks larger frames in steps, and converts the map to a message in a separate step."""

_encode = msgspec.msgpack.Encoder().encode
_convert = msgspec.convert
_BYTES = (bytes,)


def tag_of(message: Message) -> str:
    """Returns the message's `type` on the wire."""
    return str(message.__struct_config__.tag)


def encode(message: Message) -> bytes:
    """Returns the message as one frame. Raises FramingError if it would exceed the frame cap."""
    body = _encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise FramingError(
            f"a {type(message).__name__} of {len(body)} bytes exceeds the frame cap of {FRAME_BYTES_MAX}"
        )
    return PREFIX.pack(len(body)) + body


def convert(fields: dict[str, Any], known: dict[str, type[Message]]) -> Message:
    """Returns the typed message in a frame's map. Raises MessageError."""
    tag = fields.get("type")
    cls = known.get(tag) if type(tag) is str else None
    if cls is None:
        raise MessageError(f"unknown message type {tag!r:.60}")
    try:
        return _convert(fields, cls, builtin_types=_BYTES)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise MessageError(f"{tag}: {str(error)[:300]}") from None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A message for several receivers, encoded once."""

    message: Message
    frame: bytes

    @classmethod
    def of(cls, message: Message) -> Self:
        """Encodes a message. Raises FramingError if it exceeds the frame cap."""
        return cls(message, encode(message))


class Connection:
    """Framing, typing and the state table of one session, seen from one side (`daemon=True`: the daemon's)."""

    def __init__(self, *, daemon: bool) -> None:
        self.state = ProtocolState.HELLO
        self.pending = bytearray()  # received bytes that belong to no message yet; read-only for callers
        # A large frame in the making; `next_message` continues it until the message is complete. Read-only for callers.
        self.unpacking: Unpacking | None = None
        self._daemon = daemon
        self._known: dict[str, type[Message]] = FROM_CLIENT if daemon else FROM_DAEMON
        self._map_items_max = MAP_ITEMS_MAX if daemon else ARRAY_ITEMS_MAX
        self._fds: deque[int] = deque()

    def receive_data(self, data: bytes | memoryview, fds: Iterable[int] = ()) -> None:
        """Accepts data from the socket. Raises FramingError if more descriptors are queued than one frame may carry."""
        self._fds.extend(fds)  # first: if memory is short, `take_fds` has them
        self.pending += data
        if len(self._fds) > FDS_PER_FRAME_MAX:
            raise FramingError(f"{len(self._fds)} descriptors in flight; a frame carries at most {FDS_PER_FRAME_MAX}")

    @property
    def frame_bytes(self) -> int:
        """The size that the incoming frame states; 0 if no frame has begun or its size has not arrived."""
        return PREFIX.unpack_from(self.pending)[0] if len(self.pending) >= PREFIX.size else 0

    def next_message(self) -> tuple[Message, list[int]] | None:
        """Returns the next message and its descriptors.

        Returns None if more bytes are needed, or if the daemon is `unpacking` a large frame, which takes long enough
        that its event loop should run between the steps.

        Raises FramingError (the stream is unusable from here on), MessageError or StateError (this frame is skipped,
        the stream continues; `seq` of the error identifies the request to answer).
        """
        if (fields := self._next_map()) is None:
            return None
        fds = self._claim(fields.get("fds", 0))
        try:
            message = convert(fields, self._known)
            self.state = self._state_after(fields["type"], by_client=self._daemon)
        except PeerError as error:
            self._fds.extendleft(reversed(fds))  # no message owns them
            if fds:
                raise FramingError(f"the descriptors of a frame can't be received: {error}") from error
            seq = fields.get("seq")
            error.seq = seq if type(seq) is int and 0 <= seq < SEQ_END else 0
            raise
        except Exception:
            self._fds.extendleft(reversed(fds))
            raise
        return message, fds

    def _next_map(self) -> dict[str, Any] | None:
        """Returns the map in the next frame, or None as `next_message` does. Raises only FramingError."""
        if self.unpacking is not None:
            return self._next_step(self.unpacking)
        if len(self.pending) < PREFIX.size:
            return None
        (size,) = PREFIX.unpack_from(self.pending)
        if not 0 < size <= FRAME_BYTES_MAX:
            raise FramingError(f"a frame of {size} bytes; the cap is {FRAME_BYTES_MAX}")
        end = PREFIX.size + size
        if len(self.pending) < end:
            return None
        with memoryview(self.pending) as view, view[PREFIX.size : end] as body:
            if self._daemon and size > AT_ONCE_BYTES:
                fields, self.unpacking = None, unpack_in_steps(bytes(body))
            else:
                fields = unpack(body, self._map_items_max)
        del self.pending[:end]
        return fields

    def _next_step(self, unpacking: Unpacking) -> dict[str, Any] | None:
        """Takes one step, and returns the map if it was the last."""
        self.unpacking = None
        try:
            next(unpacking)
        except StopIteration as end:
            fields: dict[str, Any] = end.value
            return fields
        self.unpacking = unpacking
        return None

    def _claim(self, count: object) -> list[int]:
        """Takes the frame's descriptors. The message's validation rejects `fds` that is not an int."""
        wanted = count if type(count) is int else 0
        if not 0 <= wanted <= len(self._fds):
            raise FramingError(f"a frame states {wanted} descriptors, {len(self._fds)} came")
        if len(self._fds) > wanted and not self.pending:
            raise FramingError(f"{len(self._fds) - wanted} descriptors came that no frame states")
        return [self._fds.popleft() for _ in range(wanted)]

    def send(self, message: Message | Encoded) -> bytes:
        """Returns the frame to write.

        Raises StateError if this side may not send the message now. A message that exceeds the frame cap raises
        FramingError, or InternalError in the daemon, which must bound its answers.
        """
        content = message.message if isinstance(message, Encoded) else message
        after = self._state_after(tag_of(content), by_client=not self._daemon)
        try:
            frame = message.frame if isinstance(message, Encoded) else encode(message)
        except FramingError as error:
            raise (InternalError(f"the answer can't be sent: {error}") if self._daemon else error) from None
        self.state = after
        return frame

    def _state_after(self, tag: str, *, by_client: bool) -> ProtocolState:
        """Returns the state after this message. Raises StateError if the sender may not send it now."""
        after = (CLIENT_MOVES if by_client else DAEMON_MOVES)[self.state].get(tag)
        if after is None:
            sender = "client" if by_client else "daemon"
            raise StateError(f"the {sender} may not send {tag!r} in state {self.state.value}")
        return after

    def take_fds(self) -> list[int]:
        """Returns the descriptors that no message claimed; the caller closes them."""
        fds = list(self._fds)
        self._fds.clear()
        return fds
