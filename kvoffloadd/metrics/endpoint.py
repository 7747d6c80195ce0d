"""Serves metrics: a small HTTP server on the event loop.

One snapshot a second is taken on the loop, for any number of scrapers; its text is written in a thread. Slow or silent
scrapers block no others: each has a deadline, and where connections are scarce, the host with the most loses one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import ipaddress
import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvoffloadd.checks import split_address
from kvoffloadd.errors import ConfigError
from kvoffloadd.linux.sockets import bind_path, pass_descriptors
from kvoffloadd.metrics.families import families

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

SOCKET_MODE = 0o660
PEER_S = 10.0
"""How long a peer may take to send its request and to read the answer, together."""

RETRY_S = 0.1
"""The wait before the next try when there is no descriptor for a peer; a busy loop would not help."""

PEERS_MAX = 64
"""Connections at once. The next one replaces another: of the host that has the most, the oldest, first among those that
have not sent their request.
"""

NEIGHBOURS_IPV6 = 64
"""The length of the prefix, in bits, whose addresses count as one host: one host can have all of them."""

SNAPSHOT_S = 1.0
"""Scrapes within this time get the same figures, because any process that reaches the port may scrape at any rate."""

FORMATS_MAX = 8
"""The number of formats in which one snapshot is written; further formats are answered with Prometheus's plain text."""

HEAD_BYTES_MAX = 16 << 10
"""The most that a request line and its header may have."""

Encode = Callable[[CollectorRegistry], bytes]

_BACKLOG = PEERS_MAX
_PATHS = (b"/", b"/metrics")


def bind(listen: str) -> socket.socket:
    """Returns a listening socket at "host:port" of this host, or at a path. At [::] it accepts IPv4, too. Raises
    ConfigError if it can't be opened.
    """
    place = split_address(listen)
    try:
        if isinstance(place, str):
            return _bind_path(Path(place))
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        both = ipaddress.ip_address(place[0]) == ipaddress.IPv6Address("::") and socket.has_dualstack_ipv6()
        return socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"metrics.listen: {listen} can't be used: {error.strerror or error}") from None


def _bind_path(path: Path) -> socket.socket:
    listener = bind_path("metrics.listen", path, SOCKET_MODE)
    try:
        listener.listen(_BACKLOG)
        pass_descriptors(listener, allowed=False)
    except BaseException:
        listener.close()
        raise
    return listener


class _Places:
    """Keeps the connections that have not been replaced, and decides which is the next to be."""

    def __init__(self) -> None:
        self._host_of: dict[asyncio.Task[None], str] = {}  # the oldest connection first
        self._silent: set[asyncio.Task[None]] = set()  # those that have not sent their request
        self._count_of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._host_of)

    def take(self, scrape: asyncio.Task[None], host: str) -> None:
        """Adds a connection of this host, which is silent so far."""
        self._host_of[scrape] = host
        self._count_of[host] += 1
        self._silent.add(scrape)

    def has_sent(self, scrape: asyncio.Task[None]) -> None:
        """Notes that a connection has sent its request."""
        self._silent.discard(scrape)

    def leave(self, scrape: asyncio.Task[None]) -> None:
        """Removes a connection, if it is still there."""
        self._silent.discard(scrape)
        host = self._host_of.pop(scrape, None)
        if host is not None:
            self._count_of[host] -= 1
            if not self._count_of[host]:
                del self._count_of[host]

    def next_to_go(self) -> asyncio.Task[None]:
        """Returns the oldest silent connection of the host that has the most, or its oldest if none is silent."""
        most = max(self._count_of.values())
        greedy = [scrape for scrape, host in self._host_of.items() if self._count_of[host] == most]
        return next((scrape for scrape in greedy if scrape in self._silent), greedy[0])


def _host_of(address: object) -> str:
    """Returns a name for the host of a peer: one for all peers of a Unix socket, and for IPv6 the network's prefix."""
    if not isinstance(address, tuple):
        return "this host"
    ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((ip, NEIGHBOURS_IPV6), strict=False))
        ip = ip.ipv4_mapped
    return str(ip)


class Endpoint:
    """Serves from `start` to `close`. `snapshot` runs on the loop, once for all scrapes within SNAPSHOT_S."""

    def __init__(
        self,
        listener: socket.socket,
        loop: asyncio.AbstractEventLoop,
        snapshot: Callable[[], Awaitable[Mapping[str, Any]]],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._loop = loop
        self._snapshot = snapshot
        self._pause: asyncio.TimerHandle | None = None
        self._figures = Figures(snapshot)
        self._scrapes: set[asyncio.Task[None]] = set()
        self._places = _Places()

    def start(self) -> None:
        """Begins to serve."""
        self._loop.add_reader(self._listener, self._accept)

    async def close(self) -> None:
        """Serves no more scrapers, and removes the socket."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        for scrape in self._scrapes:
            scrape.cancel()
        await asyncio.gather(*self._scrapes, return_exceptions=True)
        await self._figures.close()
        place = self._listener.getsockname()
        self._listener.close()
        if isinstance(place, str):
            with contextlib.suppress(OSError):
                os.unlink(place)

    def _accept(self) -> None:
        """Accepts one scraper for each turn of the loop, however many connect."""
        try:
            peer, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the scraper has gone
        except OSError as error:
            log.debug("no scraper can be accepted: %s", error)
            self._loop.remove_reader(self._listener)  # the connection stays in the backlog
            self._pause = self._loop.call_later(RETRY_S, self.start)
            return
        if len(self._places) >= PEERS_MAX:
            replaced = self._places.next_to_go()
            self._places.leave(replaced)
            replaced.cancel()  # its socket is closed when it has ended: until then the loop may still watch it
        peer.setblocking(False)
        scrape = self._loop.create_task(self._serve(peer))
        self._scrapes.add(scrape)
        self._places.take(scrape, _host_of(address))
        scrape.add_done_callback(partial(self._ended, peer))

    def _ended(self, peer: socket.socket, scrape: asyncio.Task[None]) -> None:
        """Forgets a connection that has ended, including one that was cancelled before it began."""
        self._places.leave(scrape)
        self._scrapes.discard(scrape)
        peer.close()

    async def _serve(self, peer: socket.socket) -> None:
        """Serves one request. A peer that is slow or gone is not logged."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(PEER_S):
                request = await self._request(peer)
                task = asyncio.current_task()
                if task is not None:
                    self._places.has_sent(task)
                await self._loop.sock_sendall(peer, await self._answer(request))

    async def _request(self, peer: socket.socket) -> bytes:
        """Reads the request line and the header. Raises ConnectionError if the peer ends before, or its header does
        not.
        """
        head = b""
        while b"\n\r\n" not in head and b"\n\n" not in head:
            received = await self._loop.sock_recv(peer, HEAD_BYTES_MAX)
            head += received
            if not received or len(head) > HEAD_BYTES_MAX:
                raise ConnectionError("that is no request")
        return head

    async def _answer(self, head: bytes) -> bytes:
        line, _, rest = head.partition(b"\n")
        words = line.split()
        if len(words) != 3 or words[0] != b"GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"metrics are at /metrics, for GET\n")
        if words[1].partition(b"?")[0] not in _PATHS:
            return _response(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
        try:
            encode, kind = choose_encoder(parse_headers(io.BytesIO(rest)).get("Accept", ""))
        # The library compares a version's words with numbers. Not logged: any process that can connect could fill the
        # log.
        except (HTTPException, ValueError, TypeError):
            return _response(HTTPStatus.BAD_REQUEST, b"that is no header\n")
        try:
            text, kind = await self._figures.text(encode, kind)
        except Exception:  # the end of a request: a bug in a figure ends nothing else
            log.exception("a scrape failed")
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR, b"a figure is missing; the daemon's log has more\n")
        return _response(HTTPStatus.OK, text, kind)


class Figures:
    """One snapshot for all scrapes within SNAPSHOT_S, and its text in each format that was asked for."""

    def __init__(self, snapshot: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._snapshot = snapshot
        self._lock = asyncio.Lock()
        self._taken_s = -math.inf
        self._status: Mapping[str, Any] = {}
        self._texts: dict[str, bytes] = {}
        self._writing: dict[str, asyncio.Task[tuple[bytes, str]]] = {}  # by format

    async def text(self, encode: Encode, kind: str) -> tuple[bytes, str]:
        """Returns the metrics and their content type. Raises the exception that made a figure fail. The work continues
        when its first waiter has gone, and later ones wait for the same result.
        """
        writing = self._writing.get(kind)
        if writing is None:
            writing = self._writing[kind] = asyncio.get_running_loop().create_task(self._write(encode, kind))
            writing.add_done_callback(partial(self._written, kind))
        return await asyncio.shield(writing)

    def _written(self, kind: str, writing: asyncio.Task[tuple[bytes, str]]) -> None:
        del self._writing[kind]
        if not writing.cancelled():
            writing.exception()  # the waiters have received it

    async def _write(self, encode: Encode, kind: str) -> tuple[bytes, str]:
        loop = asyncio.get_running_loop()
        async with self._lock:
            now = loop.time()
            if now - self._taken_s >= SNAPSHOT_S:
                self._status, self._taken_s, self._texts = await self._snapshot(), now, {}
            if kind not in self._texts:
                if len(self._texts) >= FORMATS_MAX:
                    encode, kind = choose_encoder("")
                self._texts[kind] = await loop.run_in_executor(None, _text, self._status, encode)
            return self._texts[kind], kind

    async def close(self) -> None:
        """Cancels the writing of texts."""
        writing = list(self._writing.values())
        for task in writing:
            task.cancel()
        await asyncio.gather(*writing, return_exceptions=True)


class _Metrics(Collector):
    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        return families(self._status)


def _text(status: Mapping[str, Any], encode: Encode) -> bytes:
    """Writes the metrics in the scraper's format. Runs in a thread."""
    registry = CollectorRegistry()
    registry.register(_Metrics(status))
    ProcessCollector(registry=registry)
    return encode(registry)


def _response(status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
