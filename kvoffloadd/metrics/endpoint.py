"""Where metrics are scraped: a small HTTP server in threads of its own, on this host alone.

Ownership: the event loop owns all figures. A server thread asks it for one snapshot per scrape and waits for that; what
then takes time, making text of it and sending it, happens in the thread. A scraper that is slow, or many, keeps
nobody waiting but themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from kvoffloadd.checks import split_address
from kvoffloadd.errors import ConfigError
from kvoffloadd.metrics.families import families
from kvoffloadd.sockets import bind_path, pass_descriptors

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

SOCKET_MODE = 0o660
ANSWER_S = 5.0
"""How long the loop may take to answer; it takes milliseconds, unless it is stuck."""

PEER_S = 10.0
"""How long a peer may take to send its request and to read the answer, together."""

RETRY_S = 0.1
"""Until the next try when there is no descriptor for a peer; a busy loop would help nobody."""

SCRAPES_MAX = 4
"""At once; more are turned away."""

_BACKLOG = 16
_PATHS = ("/", "/metrics")


class LateError(Exception):
    """The event loop did not answer in time, or has ended."""


def bind(listen: str) -> socket.socket:
    """A listening socket at "host:port" of this host, or at a path. Raises ConfigError if it can't be had."""
    place = split_address(listen)
    try:
        if isinstance(place, str):
            return _bind_path(Path(place))
        family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
        return socket.create_server(place, family=family, backlog=_BACKLOG)
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


class Endpoint(Collector):
    """Serves from `start` to `close`. `snapshot` is called on the loop, once for each scrape."""

    def __init__(
        self, listener: socket.socket, loop: asyncio.AbstractEventLoop, snapshot: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._loop = loop
        self._snapshot = snapshot
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        self._server = _Server(listener, _app(registry))

    def start(self) -> None:
        """Begin to serve."""
        threading.Thread(target=self._server.serve_forever, name="kvo-metrics", daemon=True).start()

    async def close(self) -> None:
        """Serve nobody any more, and remove the socket."""
        await self._loop.run_in_executor(None, self._server.shutdown)
        place = self._server.socket.getsockname()
        self._server.server_close()
        if isinstance(place, str):
            with contextlib.suppress(OSError):
                os.unlink(place)

    def collect(self) -> Iterator[Metric]:
        """For the registry, in a server thread. Raises LateError."""
        return families(self._ask())

    def _ask(self) -> Mapping[str, Any]:
        answer: Future[Mapping[str, Any]] = Future()

        def tell() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # whoever asked has given up
            try:
                answer.set_result(self._snapshot())
            except Exception as error:  # noqa: BLE001  the end of a callback: the thread that asked tells of it
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(tell)
            return answer.result(ANSWER_S)
        except TimeoutError:
            answer.cancel()
            raise LateError(f"the event loop did not answer within {ANSWER_S:g} s") from None
        except RuntimeError as error:
            raise LateError(str(error)) from None


def _app(registry: CollectorRegistry) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    """The library's, at the usual paths alone, and with an answer where there are no figures."""
    library = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in _PATHS:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        try:
            return cast("Iterable[bytes]", library(environ, start_response))
        except LateError as error:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [f"{error}\n".encode()]

    return app


class _Handler(WSGIRequestHandler):
    """Of one request. Says nothing of it."""

    timeout = PEER_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def get_stderr(self) -> io.StringIO:
        """Where wsgiref would print the traceback of a peer that went away."""
        return io.StringIO()


class _Server(ThreadingWSGIServer):
    """The library's server on a socket that is there already, with a bound on its threads."""

    def __init__(self, listener: socket.socket, app: Callable[[dict[str, Any], Any], Iterable[bytes]]) -> None:
        super().__init__(("localhost", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = "localhost", 0
        self.setup_environ()
        self.set_app(app)
        self._free = threading.Semaphore(SCRAPES_MAX)
        self._lock = threading.Lock()  # guards `_ends`
        self._ends: dict[socket.socket, float] = {}

    def get_request(self) -> tuple[socket.socket, Any]:
        """The peer of a Unix socket has no address, which wsgiref can't do without."""
        try:
            peer, address = self.socket.accept()
        except OSError:
            time.sleep(RETRY_S)  # it stays in the backlog
            raise
        return peer, address or ("local", 0)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, if there is one left."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._ends[request] = time.monotonic() + PEER_S
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # no thread can be made
            self._free.release()
            self.shutdown_request(request)
            log.warning("a scrape was refused: %s", error)

    def service_actions(self) -> None:
        """Some times a second: hang up on peers who are late, however many bytes they still send now and then."""
        now = time.monotonic()
        with self._lock:
            for request, end in self._ends.items():
                if now > end:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """See the base class."""
        with self._lock:
            self._ends.pop(request, None)
        super().shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See the base class."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that is slow or gone is nothing to tell of."""
        log.debug("a scrape failed", exc_info=True)
