"""Frames between the daemon and its agent, the process that speaks to the remote store. Bytes and structs, no I/O.

A frame is a u32 little-endian length and that many bytes of msgpack. The agent begins with `Greeting`, so that only the
right process of the right version gets descriptors. Then comes `Start`, which carries two of them: the arena's and the
header pages'. The agent answers with `Started`, or with `Refused`, which ends it. From then on each call has a unique
id and exactly one answer: `Values` to a `Read`, `Swept` to a `Sweep`, otherwise `Answer`.

Packed fields are little-endian: keys of 32 bytes, offsets and sizes as u64, codes as i64. Reading them needs no numpy:
the agent may run in a separate environment.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import msgspec

from kvoffloadd.agentwire.names import Space
from kvoffloadd.errors import FramingError

VERSION: Final = 2
"""The version of these frames. Daemon and agent have the same release, whatever else differs in their environments."""

PREFIX: Final = struct.Struct("<I")
FRAME_BYTES_MAX: Final = 8 << 20
"""The limit of a frame to the agent."""
ANSWER_BYTES_MAX: Final = 256 << 10
"""The limit of a frame from the agent."""
KEYS_MAX: Final = 4096
"""The limit of keys in one call."""
PARTS_MAX: Final = 123
"""The limit of parts of one key: a header page has no room for more."""
ADDRESSES_MAX: Final = 256 << 10
"""The limit of parts of all keys in one call together."""
VALUE_BYTES_MAX: Final = 64 << 10
"""The limit of bytes of a small object, which is read or written whole."""
READ_NAMES_MAX: Final = 512
"""The limit of names in one `Read`: the agent may have to hold as many small objects."""
VALUES_BYTES_MAX: Final = 192 << 10
"""The limit of bytes of all small objects in one `Values`."""
NAMES_MAX: Final = 4096
"""The limit of names in one `Remove` or `Renew`."""
AFTER_MAX: Final = 64
"""The limit of letters in a sweep's position."""
TEXT_MAX: Final = 2000
"""The limit of letters in a reason."""

READ_THREADS: Final = 4
CHANGE_THREADS: Final = 2
"""The agent's threads that read small objects, and that write, renew and remove them: the number of calls that it has
at once. Sweeps have a separate one.
"""

FDS: Final = 2
"""The number of descriptors that `Start` carries."""

HEADER_BYTES: Final = 4096
"""The size of the page before an object's payloads."""


class Presence(enum.IntEnum):
    """The presence of an object, one code each in the answer to `Exists`."""

    NO = 0
    YES = 1
    UNKNOWN = 2


class Code(enum.IntEnum):
    """Why an object was not transferred. In an answer, transferred bytes are 0 or more.

    Each except FAILED also guarantees that nothing moves between the object and the memory of the call any more. FAILED
    guarantees it only for engines that stop at once. For the others, memory may be read and written until the agent's
    end.
    """

    MISS = -1  # there is none
    NOT_COMPLETE = -2  # a client is still writing it
    NO_SPACE = -3  # the store has no room for it
    LEASE_OVER = -4  # the store took it back while it came: the bytes are worthless
    SIZE = -5  # it has another size; the written bytes lie within the memory of the call
    REFUSED = -6  # it failed before anything moved
    FAILED = -7


CODE_MIN: Final = min(Code)


# --- to the agent ---


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Starts the engine. Comes with two descriptors: the arena's file, which the agent maps for `arena_bytes` from
    `arena_offset` on, and the header pages, `header_bytes` of them. `settings`: the engine's settings.
    """

    engine: str
    settings: dict[str, object]
    arena_offset: int
    arena_bytes: int
    header_bytes: int
    get_threads: int
    put_threads: int


class Exists(msgspec.Struct, frozen=True, tag="exists"):
    """Answer: a `Presence` for the era's marker, then one for each key."""

    id: int
    space: Space
    keys: bytes


class Get(msgspec.Struct, frozen=True, tag="get"):
    """Answer: for each key the received bytes, or a `Code`.

    `headers`: (n,) offsets in the header pages; `parts`: (n, p) offsets in the arena; `part_bytes`: (p,) sizes.
    """

    id: int
    space: Space
    keys: bytes
    headers: bytes
    parts: bytes
    part_bytes: bytes


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Has the fields of `Get`; answer: for each key the bytes that are there now, whichever client put them, or a
    `Code`.
    """

    id: int
    space: Space
    keys: bytes
    headers: bytes
    parts: bytes
    part_bytes: bytes


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Reads small objects."""

    id: int
    names: list[str]


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Writes a small object. `if_absent`: an existing one stays, which is no failure. `kept_s`: the time in which it is
    not evicted; it may go after that; None: it may be evicted any time. Answer: its bytes, or a `Code`.
    """

    id: int
    name: str
    value: bytes
    if_absent: bool
    kept_s: float | None


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Keeps small objects for `kept_s` from now on, if the engine can. Answer: for each 1 (it is there), 0 (there is
    none) or a `Code`.
    """

    id: int
    names: list[str]
    kept_s: float


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Answer: for each name 1 (removed), 0 (there was none) or a `Code`."""

    id: int
    names: list[str]


class Sweep(msgspec.Struct, frozen=True, tag="sweep"):
    """Removes some objects with this prefix. `after`: empty, or from the answer to the previous step."""

    id: int
    prefix: str
    after: str


Call = Exists | Get | Put | Read | Write | Renew | Remove | Sweep


# --- from the agent ---


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """Reports that the agent runs."""

    version: int
    pid: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    """Reports that the engine is ready. `stops_at_once`: see `Engine`. `about`: its name and version, for people."""

    stops_at_once: bool
    about: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Reports that the engine can't start. `fault`: its cause, "operator", "store" or "daemon"."""

    fault: str
    reason: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Answers a call. `codes`: packed i64, as the call specifies."""

    id: int
    codes: bytes


class Values(msgspec.Struct, frozen=True, tag="values"):
    """Answers a `Read`: for each name the object, None (there is none) or a `Code`. It has at least one, and only the
    first ones if not all fit: the caller asks for the other names again.
    """

    id: int
    values: list[bytes | int | None]


class Swept(msgspec.Struct, frozen=True, tag="swept"):
    """Answers a `Sweep`. `removed`: a number of objects, or a `Code`. `after`: where to continue; empty: nowhere."""

    id: int
    removed: int
    after: str


FromDaemon = Start | Call
Reply = Answer | Values | Swept
FromAgent = Greeting | Started | Refused | Reply

_encoder = msgspec.msgpack.Encoder()
_from_daemon = msgspec.msgpack.Decoder(FromDaemon)
_from_agent = msgspec.msgpack.Decoder(FromAgent)


def encode(message: FromDaemon | FromAgent, bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """Returns one frame. Raises FramingError if it would be larger than `bytes_max`."""
    body = _encoder.encode(message)
    if len(body) > bytes_max:
        raise FramingError(f"a {type(message).__name__} of {len(body)} bytes; the cap is {bytes_max}")
    return PREFIX.pack(len(body)) + body


class Frames:
    """Decodes a stream of bytes into messages. `by_agent`: whether the agent sends them."""

    def __init__(self, *, by_agent: bool) -> None:
        self._pending = bytearray()
        self._decoder = _from_agent if by_agent else _from_daemon
        self._bytes_max = ANSWER_BYTES_MAX if by_agent else FRAME_BYTES_MAX

    def receive(self, data: bytes | memoryview) -> None:
        """Takes bytes from the socket."""
        self._pending += data

    def next(self) -> FromDaemon | FromAgent | None:
        """Returns the next message; None: more bytes are needed. Raises FramingError: the stream is unusable from here
        on.
        """
        if len(self._pending) < PREFIX.size:
            return None
        (size,) = PREFIX.unpack_from(self._pending)
        if not 0 < size <= self._bytes_max:
            raise FramingError(f"a frame of {size} bytes; the cap is {self._bytes_max}")
        end = PREFIX.size + size
        if len(self._pending) < end:
            return None
        try:
            with memoryview(self._pending) as view, view[PREFIX.size : end] as body:
                message: FromDaemon | FromAgent = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise FramingError(f"not a message: {str(error)[:200]}") from None
        del self._pending[:end]
        return message
