"""Valkey as an engine, or a compatible server: Redis, Dragonfly, Garnet. One server, or one address for several.

Each call under way has a connection and a deadline. A call that is given up closes its connection, so no more bytes
arrive: this engine stops at once.

The server must be bounded (`maxmemory`) and evict the least recently used objects with a time to live
(`maxmemory-policy volatile-lru`): all have one except kept ones, which such a server therefore never evicts. A sorted
set has the dates of their ends, and every renewal removes expired ones. With `allkeys-lru`, kept objects stay as long
as they are requested more often than the rest. There are no leases.
"""

from __future__ import annotations

import ctypes
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from kvoffloadd.agent.engines.base import EngineError, Memory, ObjectTransfer
from kvoffloadd.agent.engines.resp import (
    ProtocolError,
    Reply,
    ReplyError,
    RespConnection,
    Server,
    command,
    command_with,
)
from kvoffloadd.agentwire.frames import AFTER_MAX, VALUE_BYTES_MAX, Code, Presence
from kvoffloadd.agentwire.names import KEPT_NAME
from kvoffloadd.agentwire.storeurl import split_store_url

T = TypeVar("T")

DEADLINE_S: Final = 4.0
"""The deadline of a call that moves bytes, unless `deadline_s` is set: shorter than the daemon's limit for killing the
agent.
"""
_SMALL_S: Final = 1.0
"""The deadline of all other calls, unless `deadline_s` is shorter."""
_ANSWERS_SHARE: Final = 0.05
"""The share of a put's time that is left for reading answers, however many objects were sent."""
_OBJECT_BYTES_MAX: Final = 512 << 20
"""The server's default `proto-max-bulk-len`: it ends connections that send more."""
_SHARE_MAX: Final = 16
"""An object may take one part in this number of `maxmemory`: for a larger one the server would evict all others, and
only then refuse it.
"""
_TTL_S: Final = 7 * 86400
"""The life of other objects, unless `ttl_s` is set. It is not renewed: a later computation stores the key again."""
_SCANNED: Final = 1000
_STEP_REMOVED, _STEP_S = 1000, 0.5
"""After this number of objects, or this time, a step of a sweep ends."""
_OVER_MAX: Final = 1000
"""The number of expired kept objects that are removed at once."""
_PLAIN_PREFIX: Final = re.compile(r"[0-9A-Za-z/._-]+")
_NO_SPACE: Final = "OOM"
_ELSEWHERE: Final = ("MOVED", "CLUSTERDOWN", "CROSSSLOT")


class ValkeyEngine:
    """Settings: `url` ("redis://", "rediss://" with TLS, the same with valkey, or "unix://": [USER@]HOST[:PORT][/DB]),
    `password_file`; for TLS `ca_file` (empty: the system's), `cert_file` and `key_file`; `deadline_s`; `ttl_s`.
    """

    stops_at_once: ClassVar[bool] = True

    def __init__(self) -> None:
        self._server = Server("", 0)
        self._deadline_s, self._small_s = DEADLINE_S, _SMALL_S
        self._expires = ("EX", str(_TTL_S))
        self._about = "valkey"
        self._object_bytes_max = _OBJECT_BYTES_MAX
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []

    def start(self, settings: Mapping[str, Any], memory: Memory) -> None:
        """Connects, and checks that the server takes the engine's commands. Raises EngineError."""
        self._server = _server(settings)
        self._deadline_s = float(settings.get("deadline_s", DEADLINE_S))
        self._small_s = min(_SMALL_S, self._deadline_s)
        self._expires = ("EX", str(int(settings.get("ttl_s", _TTL_S))))
        try:
            with self._connection(time.monotonic() + self._deadline_s) as connection:
                connection.ask("TOUCH", "kvo1/")
                connection.ask("ZRANGE", KEPT_NAME, "0", "0")
                fields = _information(connection)
        except ssl.SSLError as error:
            raise EngineError(f"TLS with {self._where()}: {error}", fault="operator") from error
        except ReplyError as error:
            fault = "operator" if error.kind in ("NOAUTH", "WRONGPASS", "NOPERM", *_ELSEWHERE) else "store"
            hint = "; a cluster needs a proxy that is one server" if error.kind in _ELSEWHERE else ""
            raise EngineError(f"{self._where()} refuses: {error}{hint}", fault=fault) from error
        except OSError as error:
            raise EngineError(f"{self._where()} does not answer: {error}", fault="store") from error
        self._about = _about(fields)
        if memory_bytes := int(fields.get("maxmemory", 0)):
            self._object_bytes_max = min(self._object_bytes_max, memory_bytes // _SHARE_MAX)

    def _where(self) -> str:
        return f"the server at {self._server.host}" + (f":{self._server.port}" if self._server.port else "")

    def about(self) -> str:
        """Returns the server's name and version, if it reports them."""
        return self._about

    # --- connections ---

    @contextmanager
    def _connection(self, until_s: float) -> Iterator[RespConnection]:
        """Yields a connection for one call. It is kept for the next one, unless the call fails."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and not connection.is_quiet:
            connection.close()
            connection = None
        if connection is None:
            connection = RespConnection(self._server, until_s)
        connection.until_s = until_s
        try:
            yield connection
            if connection.has_more:
                raise ProtocolError("the server has sent more replies than it got commands")
        except ReplyError:
            self._keep(connection)
            raise
        except BaseException:
            connection.close()
            raise
        self._keep(connection)

    def _keep(self, connection: RespConnection) -> None:
        with self._lock:
            self._idle.append(connection)

    def _call(self, work: Callable[[RespConnection], T], deadline_s: float | None = None) -> T:
        """Calls again if the server has closed the connection, for example by a restart. Repeating any of the calls is
        harmless. Older idle connections are useless then, too.
        """
        until_s = time.monotonic() + (self._small_s if deadline_s is None else deadline_s)
        try:
            with self._connection(until_s) as connection:
                return work(connection)
        except (ConnectionError, ssl.SSLEOFError):
            self.close()
            with self._connection(until_s) as connection:
                return work(connection)

    def close(self) -> None:
        """Closes idle connections; the others end with their calls."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # --- objects ---

    def exists(self, names: Sequence[str]) -> list[int]:
        """Asks for all in one go. Counts as a use of existing objects, which delays their eviction."""
        known: Mapping[Reply, Presence] = {0: Presence.NO, 1: Presence.YES}
        try:
            replies = self._call(lambda connection: _ask_all(connection, "TOUCH", names))
        except OSError:
            return [Presence.UNKNOWN] * len(names)
        return [
            Presence.UNKNOWN if isinstance(reply, ReplyError) else known.get(reply, Presence.UNKNOWN)
            for reply in replies
        ]

    def get(self, transfers: Sequence[ObjectTransfer]) -> list[int]:
        """Gets one after another, all requested at once. A failure of one does not stop the others."""
        codes: list[int] = []

        def work(connection: RespConnection) -> None:
            codes.clear()
            connection.send([b"".join(command("GET", transfer.name) for transfer in transfers)])
            codes.extend(_get_one(connection, transfer) for transfer in transfers)

        return self._transfer(work, codes, len(transfers))

    def put(self, transfers: Sequence[ObjectTransfer]) -> list[int]:
        """Puts one after another, without waiting for answers in between. If the link is too slow for all of them,
        those stored by then count.
        """
        codes: list[int] = []
        sendable = [transfer for transfer in transfers if self._fits(transfer)]

        def work(connection: RespConnection) -> None:
            codes.clear()
            until_s = connection.until_s
            connection.until_s = until_s - _ANSWERS_SHARE * self._deadline_s
            try:
                for transfer in sendable:
                    connection.send(command_with(("SET", transfer.name), _views(transfer), ("NX", *self._expires)))
            finally:
                connection.until_s = until_s
                codes.extend(_put_one(connection, transfer) for transfer in sendable)

        answers = iter(self._transfer(work, codes, len(sendable)))
        return [next(answers) if self._fits(transfer) else Code.NO_SPACE for transfer in transfers]

    def _fits(self, transfer: ObjectTransfer) -> bool:
        return transfer.size_bytes <= self._object_bytes_max

    def _transfer(self, work: Callable[[RespConnection], None], codes: list[int], count: int) -> list[int]:
        """Returns `codes`, which `work` fills; FAILED for the remaining ones. The connection is closed then."""
        with suppress(OSError):
            self._call(work, self._deadline_s)
        return codes + [Code.FAILED] * (count - len(codes))

    # --- small objects ---

    def read(self, names: Sequence[str]) -> list[bytes | int | None]:
        """Skips objects that are too large: they would delay the others."""

        def work(connection: RespConnection) -> list[bytes | int | None]:
            sizes = _ask_all(connection, "STRLEN", names)
            is_small = [isinstance(size, int) and size <= VALUE_BYTES_MAX for size in sizes]
            small = [name for name, small in zip(names, is_small, strict=True) if small]
            values = iter(_ask_all(connection, "GET", small))
            return [
                _value_of(next(values)) if small else Code.SIZE if isinstance(size, int) else Code.REFUSED
                for size, small in zip(sizes, is_small, strict=True)
            ]

        try:
            return self._call(work)
        except OSError:
            return [Code.FAILED] * len(names)

    def write(self, name: str, value: bytes, *, if_absent: bool, kept_s: float | None) -> int:
        """Writes the date of a kept object before the object: whatever happens, it does not stay for ever."""
        if len(value) > VALUE_BYTES_MAX:
            return Code.REFUSED
        words = (*(("NX",) if if_absent else ()), *(self._expires if kept_s is None else ()))

        def work(connection: RespConnection) -> None:
            if kept_s is not None:
                _keep(connection, [name], kept_s)
            connection.ask("SET", name, value, *words)

        try:
            self._call(work)
        except ReplyError as error:
            return _code_of(error)
        except OSError:
            return Code.FAILED
        return len(value)

    def renew(self, names: Sequence[str], kept_s: float) -> list[int]:
        """Renews the dates of existing objects, and afterwards, so that none of them goes, removes expired ones."""

        def work(connection: RespConnection) -> list[int]:
            replies = _ask_all(connection, "TOUCH", names)
            there = [name for name, reply in zip(names, replies, strict=True) if reply == 1]
            now_s = _keep(connection, there, kept_s)
            _remove_over(connection, now_s)
            return [_code_of_one(reply) for reply in replies]

        try:
            return self._call(work)
        except (OSError, ReplyError):
            return [Code.FAILED] * len(names)

    def remove(self, names: Sequence[str]) -> list[int]:
        """Removes objects; the server frees their memory later, by itself."""
        try:
            replies = self._call(lambda connection: _ask_all(connection, "UNLINK", names))
        except OSError:
            return [Code.FAILED] * len(names)
        return [_code_of_one(reply) for reply in replies]

    def sweep(self, prefix: str, after: str) -> tuple[int, str]:
        """Returns FAILED when a step takes too long: the rest is left to the next sweep."""
        if not _PLAIN_PREFIX.fullmatch(prefix):
            raise EngineError(f"{prefix!r} is not a prefix of names", fault="daemon")
        try:
            return self._call(lambda connection: _sweep(connection, prefix, after))
        except (OSError, ReplyError):
            return Code.FAILED, ""


def _ask_all(connection: RespConnection, verb: str, names: Sequence[str]) -> list[Reply | ReplyError]:
    """Sends the same command for each name, in one go."""
    connection.send([b"".join(command(verb, name) for name in names)])
    replies: list[Reply | ReplyError] = []
    for _ in names:
        try:
            replies.append(connection.reply())
        except ReplyError as error:
            replies.append(error)
    return replies


def _get_one(connection: RespConnection, transfer: ObjectTransfer) -> int:
    try:
        size = connection.reply_into(_views(transfer))
    except ReplyError as error:
        return _code_of(error)
    if size is None:
        return Code.MISS
    return size if size == transfer.size_bytes else Code.SIZE


def _put_one(connection: RespConnection, transfer: ObjectTransfer) -> int:
    try:
        connection.reply()  # nil: it was there
    except ReplyError as error:
        return _code_of(error)
    return transfer.size_bytes


def _code_of_one(reply: Reply | ReplyError) -> int:
    """Returns what a command has done with its one name: the number of objects that it found, or a `Code`."""
    return reply if isinstance(reply, int) and reply in (0, 1) else Code.REFUSED


def _value_of(reply: Reply | ReplyError) -> bytes | int | None:
    return reply if isinstance(reply, bytes | None) else Code.REFUSED


def _keep(connection: RespConnection, names: Sequence[str], kept_s: float) -> float:
    """Writes the time until which they are kept, by the server's clock, which is the same for all hosts. Returns that
    clock.
    """
    reply = connection.ask("TIME")
    if not isinstance(reply, list) or not reply or not isinstance(reply[0], bytes):
        raise OSError("unexpected answer to TIME")
    now_s = float(reply[0])
    if names:
        until = str(now_s + kept_s)
        connection.ask("ZADD", KEPT_NAME, *(word for name in names for word in (until, name)))
    return now_s


def _remove_over(connection: RespConnection, now_s: float) -> None:
    """Removes some expired objects. An object renewed at this moment may go, too: after that long without a renewal,
    that is a loss like any other.
    """
    found = connection.ask("ZRANGE", KEPT_NAME, "-inf", str(now_s), "BYSCORE", "LIMIT", "0", str(_OVER_MAX))
    over = [name for name in found if isinstance(name, bytes)] if isinstance(found, list) else []
    if over:
        connection.ask("UNLINK", *over)
        connection.ask("ZREM", KEPT_NAME, *over)


def _sweep(connection: RespConnection, prefix: str, after: str) -> tuple[int, str]:
    removed, cursor, ends_s = 0, after.encode() or b"0", time.monotonic() + _STEP_S
    while True:
        found = connection.ask("SCAN", cursor, "MATCH", prefix + "*", "COUNT", str(_SCANNED))
        if not isinstance(found, list) or len(found) != 2 or not isinstance(found[0], bytes):
            raise OSError("unexpected answer to SCAN")
        cursor, names = found[0], found[1]
        if not cursor.isdigit() or len(cursor) > AFTER_MAX:
            raise OSError("unexpected cursor of SCAN")
        if isinstance(names, list) and names:
            count = connection.ask("UNLINK", *(name for name in names if isinstance(name, bytes)))
            if not isinstance(count, int) or not 0 <= count <= len(names):
                raise OSError("unexpected answer to UNLINK")
            removed += count
        if cursor == b"0":
            return removed, ""
        if removed >= _STEP_REMOVED or time.monotonic() >= ends_s:
            return removed, cursor.decode()


def _views(transfer: ObjectTransfer) -> list[memoryview]:
    """Returns views of the memory of its pieces."""
    return [memoryview((ctypes.c_char * size).from_address(address)).cast("B") for address, size in transfer.pieces]


def _code_of(error: ReplyError) -> Code:
    return Code.NO_SPACE if error.kind == _NO_SPACE else Code.REFUSED


def _information(connection: RespConnection) -> dict[str, str]:
    """Returns the contents of `INFO`, which not every user may call."""
    try:
        info = connection.ask("INFO")
    except ReplyError:
        return {}
    text = info.decode("utf-8", "replace") if isinstance(info, bytes) else ""
    return dict(line.split(":", 1) for line in text.split("\r\n") if ":" in line)


def _about(fields: Mapping[str, str]) -> str:
    name = "valkey" if "valkey_version" in fields else "redis"
    version = fields.get(f"{name}_version", "of an unknown version")
    size, policy = fields.get("maxmemory_human", "?"), fields.get("maxmemory_policy", "?")
    return f"{name} {version}, maxmemory {size}, {policy}"


# --- settings ---


def _server(settings: Mapping[str, Any]) -> Server:
    """Returns the server of the settings. Raises EngineError: they can't be right, or a file can't be read."""
    try:
        url = split_store_url(str(settings["url"]))
    except ValueError as error:
        raise EngineError(f"valkey.url: {error}", fault="operator") from error
    password = url.password
    try:
        if file := settings.get("password_file"):
            password = Path(str(file)).read_text(encoding="utf-8").strip()
        context = _tls(settings) if url.is_tls else None
    except (OSError, ValueError) as error:
        raise EngineError(f"valkey: {error}", fault="operator") from error
    return Server(url.path or url.host, url.port, url.database, url.user, password, context)


def _tls(settings: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.get("ca_file") or None)
    if cert := settings.get("cert_file"):
        context.load_cert_chain(str(cert), str(settings.get("key_file") or cert))
    return context
