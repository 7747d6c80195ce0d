"""Frames between the daemon and its agent, the process that speaks to the remote store. Bytes and structs, no I/O.

A frame is a u32 little-endian length and that many bytes of msgpack. The agent begins with `Greeting`, so that
descriptors are only given to the right process of the right version. Then comes `Start`, which carries two of them: the
arena's and the header pages'. It is answered by `Started`, or by `Refused`, which ends the agent. From then on each
call has an id of its own and exactly one answer: `Values` to a `Read`, `Swept` to a `Sweep`, else `Answer`.

Packed fields are little-endian: keys of 32 bytes, offsets and sizes as u64, codes as i64. Nothing of numpy is needed to
read them: the agent may run in an environment of its own.
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import msgspec

from kvoffloadd.agentwire.names import Space
from kvoffloadd.errors import FramingError

VERSION: Final = 2
"""Of these frames. Daemon and agent are of one release, whatever else their environments have."""

PREFIX: Final = struct.Struct("<I")
FRAME_BYTES_MAX: Final = 8 << 20
"""Of a frame to the agent."""
ANSWER_BYTES_MAX: Final = 256 << 10
"""Of a frame from the agent."""
KEYS_MAX: Final = 4096
"""Keys of one call."""
PARTS_MAX: Final = 123
"""Parts of one key: what a header page has room for."""
ADDRESSES_MAX: Final = 256 << 10
"""Parts of all keys of one call together."""
VALUE_BYTES_MAX: Final = 64 << 10
"""Of a small object that is read or written whole."""
READ_NAMES_MAX: Final = 512
"""Names of one `Read`: the agent may have to hold as many small objects."""
VALUES_BYTES_MAX: Final = 192 << 10
"""Of all small objects of one `Values`."""
NAMES_MAX: Final = 4096
"""Names of one `Remove` or `Renew`."""
AFTER_MAX: Final = 64
"""Letters that say where a sweep goes on."""
TEXT_MAX: Final = 2000
"""Letters of a reason."""

READ_THREADS: Final = 4
CHANGE_THREADS: Final = 2
"""Threads of the agent that read small objects, and that write, renew and remove them: calls that are with it at once.
Sweeps have one of their own.
"""

FDS: Final = 2
"""Descriptors that `Start` carries."""

HEADER_BYTES: Final = 4096
"""Of the page before an object's payloads."""


class Presence(enum.IntEnum):
    """What is known of an object, one code each in the answer to `Exists`."""

    NO = 0
    YES = 1
    UNKNOWN = 2


class Code(enum.IntEnum):
    """Why an object did not come, or did not go. In an answer, bytes that came or went are 0 or more.

    Each but FAILED also says that nothing moves between the object and the memory of the call any more. FAILED says so
    only for engines that stop at once. For the others, memory may be read and written until the agent's end.
    """

    MISS = -1  # there is none
    NOT_COMPLETE = -2  # somebody is still writing it
    NO_SPACE = -3  # the store has no room for it
    LEASE_OVER = -4  # the store took it back while it came: the bytes are worth nothing
    SIZE = -5  # it has another size; what was written lies within the memory of the call
    REFUSED = -6  # it failed before anything moved
    FAILED = -7


CODE_MIN: Final = min(Code)


# --- to the agent ---


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Comes with two descriptors: the arena's file, of which the agent maps `arena_bytes` from `arena_offset` on, and
    the header pages, `header_bytes` of them. `settings`: the engine's own.
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
    """Answer: for each key bytes that came, or a `Code`.

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
    """Small objects."""

    id: int
    names: list[str]


class Write(msgspec.Struct, frozen=True, tag="write"):
    """A small object. `if_absent`: one that is there stays, which is no failure. `kept_s`: it is not evicted for so
    long, and may go after that; None: it may be evicted any time. Answer: its bytes, or a `Code`.
    """

    id: int
    name: str
    value: bytes
    if_absent: bool
    kept_s: float | None


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Keep small objects for `kept_s` from now on, if the engine can. Answer: for each 1 (it is there), 0 (there is
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
    """Remove some of what has this prefix. `after`: empty, or what the answer to the step before says."""

    id: int
    prefix: str
    after: str


Call = Exists | Get | Put | Read | Write | Renew | Remove | Sweep


# --- from the agent ---


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """The agent runs."""

    version: int
    pid: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The engine is there. `stops_at_once`: see `Engine`. `about`: its name and version, for people."""

    stops_at_once: bool
    about: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine can't start. `fault`: whose fault it is, "operator", "store" or "daemon"."""

    fault: str
    reason: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Answers a call. `codes`: packed i64, as the call specifies."""

    id: int
    codes: bytes


class Values(msgspec.Struct, frozen=True, tag="values"):
    """Answers a `Read`: for each name the object, None (there is none) or a `Code`. It has at least one, and not all if
    they don't fit: the caller asks for the other names again.
    """

    id: int
    values: list[bytes | int | None]


class Swept(msgspec.Struct, frozen=True, tag="swept"):
    """Answers a `Sweep`. `removed`: a number of objects, or a `Code`. `after`: where to go on; empty: this was all."""

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
    """One frame. Raises FramingError if it would be larger than `bytes_max`."""
    body = _encoder.encode(message)
    if len(body) > bytes_max:
        raise FramingError(f"a {type(message).__name__} of {len(body)} bytes; the cap is {bytes_max}")
    return PREFIX.pack(len(body)) + body


class Frames:
    """Bytes of a stream in, messages out. `by_agent`: whose messages these are."""

    def __init__(self, *, by_agent: bool) -> None:
        self._pending = bytearray()
        self._decoder = _from_agent if by_agent else _from_daemon
        self._bytes_max = ANSWER_BYTES_MAX if by_agent else FRAME_BYTES_MAX

    def receive(self, data: bytes | memoryview) -> None:
        """Take what the socket gave."""
        self._pending += data

    def next(self) -> FromDaemon | FromAgent | None:
        """The next message; None: more bytes are needed. Raises FramingError: the stream is unusable from here on."""
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
